#include "failures/play.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <optional>
#include <thread>

#include "models/generate.h"
#include "support/exchanges.h"
#include "support/layers.h"
#include "support/numbers.h"
#include "switchyard/peer.h"
#include "switchyard/symmetric_heap.h"

#if defined(SWITCHYARD_HAS_CUDA)
#include "gpu/host/device_scope.h"
#include "support/device_ranks.h"
#endif

namespace switchyard::failures {
namespace {

#if defined(SWITCHYARD_HAS_CUDA)
// A layer on a GPU and its tokens there.
class GpuPass {
 public:
  GpuPass(const World& world, const std::vector<std::int32_t>& ids,
          const std::vector<float>& slot_weights, int experts, int top_k,
          std::chrono::milliseconds deadline)
      : device_(world.rank() % gpu::device_count()) {
    const gpu::DeviceScope scope(device_);
    stream_.emplace();
    const LayerSpec spec = testing::spec_of(256, 128, experts, top_k);
    const auto tokens = static_cast<int>(ids.size()) / top_k;
    LayerOptions options;
    options.max_tokens = tokens;
    options.deadline = deadline;
    layer_.emplace(world, spec, generate_weights(spec, DType::kBF16, 1, {.num_threads = 1}),
                   testing::options_of_rank(world.rank(), world.size(), options));
    batch_.emplace(
        spec,
        testing::Batch{
            testing::Matrix::random(tokens, spec.hidden, DType::kBF16, 1), ids, slot_weights, {}},
        DType::kBF16);
  }
  void run() {
    const gpu::DeviceScope scope(device_);
    batch_->enqueue(*layer_, *stream_);
    stream_->synchronize();
    (void)layer_->stats();  // throws if the pass failed
  }

 private:
  int device_;
  std::optional<MoeLayer> layer_;
  std::optional<testing::DeviceBatch> batch_;
  std::optional<gpu::Stream> stream_;  // of that device
};
#endif

using testing::ExchangeArrays;
using testing::Matrix;

constexpr int kExperts = 16, kTopK = 2, kHidden = 32, kTokens = 12;

std::atomic<int> exit_code{0};
void exit_at_once(int) { ::_exit(exit_code.load()); }

// The victim's program throws this, or returns because of it.
struct Returns {};

ExchangeSpec exchange_spec() {
  ExchangeSpec spec;
  spec.hidden = kHidden;
  spec.num_experts = kExperts;
  spec.top_k = kTopK;
  spec.max_tokens = kTokens;
  spec.dispatch = spec.combine = DType::kF32;
  return spec;
}

class Player {
 public:
  Player(const Trial& trial, int rank, const std::string& rendezvous,
         std::chrono::milliseconds deadline, Board& board)
      : trial_(trial),
        rank_(rank),
        rendezvous_(rendezvous),
        deadline_(deadline),
        board_(board),
        mine_(board.ranks[rank]),
        numbers_(trial.seed * kMostRanks + static_cast<std::uint64_t>(rank)),
        steps_left_(trial.at),
        spec_(testing::spec_of(kHidden, 16, kExperts, kTopK)),
        weights_(generate_weights(spec_, DType::kF32, 1, {.num_threads = 1})),
        x_(Matrix::random(kTokens, kHidden, DType::kF32, 1)),
        y_(kTokens, kHidden, DType::kF32) {
    const ExpertRange victims = own_experts(kExperts, trial.victim, trial.ranks);
    const bool avoids = trial.avoids_victim[static_cast<std::size_t>(rank)];
    while (ids_.size() < static_cast<std::size_t>(kTokens) * kTopK) {
      const int id = numbers_.between(0, kExperts - 1);
      if (avoids && id >= victims.begin && id < victims.end) continue;
      if (ids_.size() % kTopK != 0 && ids_.back() == id) continue;
      ids_.push_back(id);
    }
    slot_weights_.assign(ids_.size(), 0.5f);
  }

  // Until the world fails, or everything is done and closed.
  void run() {
    std::this_thread::sleep_for(trial_.arrival[static_cast<std::size_t>(rank_)]);
    if (is_victim() && trial_.scene == Scene::kStart && trial_.how == How::kBeforeAct) harm();
#if defined(SWITCHYARD_HAS_CUDA)
    if (trial_.gpus > 0) warm_up();
#endif
    begin("start");
    WorldOptions options;
    options.deadline = deadline_;
    options.rendezvous = rendezvous_;
    world_.emplace(rendezvous_.empty() ? World::from_environment(options)
                                       : World::processes(rank_, trial_.ranks, options));
    if (trial_.uses(Act::kPass, Act::kPass)) {
      begin("make layer");
#if defined(SWITCHYARD_HAS_CUDA)
      if (trial_.gpus > 0) {
        gpu_.emplace(*world_, ids_, slot_weights_, kExperts, kTopK, deadline_);
      } else
#endif
        layer_.emplace(*world_, spec_, weights_, layer_options(true));
    }
    if (trial_.uses(Act::kDispatch, Act::kDispatch)) {
      begin("make exchange");
      exchange_.emplace(*world_, exchange_spec(), exchange_options(true));
      handle_ = exchange_->make_handle();
      arrays_.emplace(exchange_->spec(), exchange_->own_places(), exchange_->rows_needed());
    }
    if (trial_.uses(Act::kHeapRing, Act::kHeapBarrier)) {
      begin("make heap");
      heap_.emplace(*world_, std::size_t{1} << 16);
      inbox_ = heap_->allocate<float>(64);
      flags_ = heap_->allocate<std::uint64_t>(static_cast<std::size_t>(trial_.ranks));
      heap_->barrier();
    }
    for (int round = 1; trial_.rounds == 0 || round <= trial_.rounds; ++round) {
      mine_.round = round;
      for (std::size_t i = 0; i < trial_.acts.size(); ++i) {
        act(trial_.acts[i], !trial_.ends_by_itself() && static_cast<int>(i) == trial_.act);
      }
    }
    for (std::size_t i = 0; i < trial_.closing.size(); ++i) {
      act(trial_.closing[i], static_cast<int>(i) == trial_.act);
    }
  }

  // Lets go of what is left after a failure.
  void close() {
#if defined(SWITCHYARD_HAS_CUDA)
    gpu_.reset();
#endif
    layer_.reset();
    handle_ = {};
    exchange_.reset();
    heap_.reset();
    world_.reset();
  }

 private:
  bool is_victim() const { return rank_ == trial_.victim; }

#if defined(SWITCHYARD_HAS_CUDA)
  // Loads kernels, which takes seconds, while nobody waits for this rank.
  void warm_up() const {
    const gpu::DeviceScope scope(rank_ % gpu::device_count());
    LayerOptions options;
    options.backend = Backend::kCuda;
    options.max_tokens = kTokens;
    const LayerSpec spec = testing::spec_of(256, 128, kExperts, kTopK);
    const MoeLayer layer(World::single(), spec,
                         generate_weights(spec, DType::kBF16, 1, {.num_threads = 1}), options);
  }
#endif

  void begin(const char* what) {
    std::snprintf(mine_.doing, sizeof mine_.doing, "%s", what);
    mine_.began_ns = now_ns();
  }

  void harm() {
    board_.harmed_ns = now_ns();
    if (trial_.harm == Harm::kExit) ::_exit(trial_.exit_code);
    if (trial_.harm == Harm::kReturn) throw Returns();
    ::kill(::getpid(), signal_of(trial_.harm));
  }

  auto hook(bool harms) {
    return [this, harms](const ProtocolStep& step) {
      if (harms && is_victim() && trial_.how == How::kAtStep && mine_.round >= 2 &&
          step.kind == trial_.step && steps_left_.fetch_sub(1) == 0) {
        harm();
      }
    };
  }
  LayerOptions layer_options(bool harms) {
    LayerOptions options;
    options.max_tokens = kTokens;
    options.cpu.num_threads = trial_.threads;
    options.diagnostics.on_step = hook(harms);
    return options;
  }
  ExchangeOptions exchange_options(bool harms) {
    ExchangeOptions options;
    options.num_threads = 1;
    options.on_step = hook(harms);
    return options;
  }

  void act(Act what, bool is_drawn) {
    // Ranks come to a call at different times.
    if (numbers_.between(0, 3) == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(numbers_.between(0, 2'000)));
    }
    if (is_drawn && is_victim() && trial_.how == How::kBeforeAct && trial_.scene != Scene::kStart &&
        mine_.round >= 2) {
      harm();
    }
    begin(to_string(what));
    switch (what) {
      case Act::kBarrier: return world_->barrier();
      case Act::kMakeLayer:
        return static_cast<void>(MoeLayer(*world_, spec_, weights_, layer_options(false)));
      case Act::kMakeExchange:
        return static_cast<void>(Exchange(*world_, exchange_spec(), exchange_options(false)));
      case Act::kMakeHeap: return static_cast<void>(SymmetricHeap(*world_, std::size_t{1} << 16));
      case Act::kPass: return pass();
      case Act::kDispatch:
        exchange_->dispatch_send({.tokens = x_.view(), .ids = ids_, .weights = slot_weights_},
                                 handle_);
        begin("dispatch");
        return exchange_->dispatch_recv(arrays_->output(), handle_);
      case Act::kCombine:
        exchange_->combine_send({arrays_->rows.view()}, handle_);
        begin("combine");
        return exchange_->combine_recv({.data = y_.row(0), .dtype = DType::kF32}, handle_);
      case Act::kHeapRing: {
        ++signals_;
        const int to = (rank_ + trial_.heap_shift) % trial_.ranks;
        const int from = (rank_ + trial_.ranks - trial_.heap_shift) % trial_.ranks;
        host::put(heap_->translate(inbox_, to), y_.row(0), 64 * sizeof(float));
        raise_flag(to);
        return heap_->wait(flags_ + from, signals_, from);
      }
      case Act::kHeapAll:
        ++signals_;
        for (int to = 0; to < trial_.ranks; ++to) raise_flag(to);
        for (int from = 0; from < trial_.ranks; ++from) {
          begin("heap all");
          heap_->wait(flags_ + from, signals_, from);
        }
        return;
      case Act::kHeapBarrier: return heap_->barrier();
      case Act::kCloseLayer: return layer_.reset();
      case Act::kCloseExchange: handle_ = {}; return exchange_.reset();
      case Act::kCloseHeap: return heap_.reset();
      case Act::kCloseWorld: return world_.reset();
    }
  }

  void pass() {
#if defined(SWITCHYARD_HAS_CUDA)
    if (trial_.gpus > 0) return gpu_->run();
#endif
    ForwardInput input;
    input.activations = x_.view();
    input.topk_ids = ids_;
    input.topk_weights = slot_weights_;
    ForwardOutput output;
    output.data = y_.row(0);
    output.dtype = DType::kF32;
    layer_->forward(input, output);
  }

  // This rank's flag in another's memory. It counts the acts that raise it.
  void raise_flag(int to) { host::signal(heap_->translate(flags_ + rank_, to), signals_); }

  const Trial& trial_;
  const int rank_;
  const std::string rendezvous_;
  const std::chrono::milliseconds deadline_;
  Board& board_;
  RankBoard& mine_;
  test::Numbers numbers_;
  std::atomic<int> steps_left_;
  const LayerSpec spec_;
  const MoeWeights weights_;
  const Matrix x_;
  Matrix y_;
  std::vector<std::int32_t> ids_;
  std::vector<float> slot_weights_;
  std::optional<World> world_;
  std::optional<MoeLayer> layer_;
#if defined(SWITCHYARD_HAS_CUDA)
  std::optional<GpuPass> gpu_;
#endif
  std::optional<Exchange> exchange_;
  ExchangeHandle handle_;
  std::optional<ExchangeArrays> arrays_;
  std::optional<SymmetricHeap> heap_;
  float* inbox_ = nullptr;
  std::uint64_t* flags_ = nullptr;
  std::uint64_t signals_ = 0;
};

}  // namespace

int signal_of(Harm harm) {
  switch (harm) {
    case Harm::kKill: return SIGKILL;
    case Harm::kStop: return SIGSTOP;
    case Harm::kExit: return SIGUSR1;
    case Harm::kInterrupt: return SIGINT;
    case Harm::kReturn: return SIGUSR1;  // where it did not come to its moment
  }
  return 0;
}

void play_rank(const Trial& trial, int rank, const std::string& rendezvous,
               std::chrono::milliseconds deadline, Board& board) {
  RankBoard& mine = board.ranks[rank];
  exit_code = trial.exit_code;
  ::signal(SIGUSR1, exit_at_once);
  ::signal(SIGINT, SIG_DFL);
  Player player(trial, rank, rendezvous, deadline, board);
  mine.pid = ::getpid();
  Outcome outcome = Outcome::kDone;
  try {
    player.run();
  } catch (const TimeoutError& error) {
    mine.failed_ns = now_ns();
    outcome = Outcome::kTimeout;
    const WaitFailure& failure = error.failure();
    mine.code = static_cast<int>(error.code());
    mine.peer = failure.peer_rank;
    mine.waiter = failure.waiter_rank;
    std::snprintf(mine.phase, sizeof mine.phase, "%s", failure.phase);
    std::snprintf(mine.words, sizeof mine.words, "%s", error.what());
  } catch (const Returns&) {
    player.close();
    ::_exit(trial.exit_code);
  } catch (const std::exception& error) {
    mine.failed_ns = now_ns();
    outcome = Outcome::kOther;
    std::snprintf(mine.words, sizeof mine.words, "%s", error.what());
  }
  mine.outcome = outcome;
  player.close();
  mine.ended_ns = now_ns();
}

}  // namespace switchyard::failures
