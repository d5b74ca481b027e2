// MoeLayer on the CPU: one forward pass from gate to combine, as a reader follows a token.
#include "layer/engine.h"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>

#include "base/quantize.h"
#include "cpu/core_lease.h"
#include "cpu/expert_gemm.h"
#include "cpu/pass_memory.h"
#include "cpu/processor.h"
#include "cpu/rank_link.h"
#include "cpu/scheduler.h"
#include "cpu/split.h"
#include "cpu/thread_trace.h"
#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "layer/agreement.h"
#include "layer/call.h"
#include "layer/compute.h"
#include "layer/recorder.h"
#include "protocol/wait.h"
#include "routing/route.h"
#include "switchyard/routing.h"

namespace switchyard::cpu {

using protocol::Missing;
using protocol::Phase;
using Clock = std::chrono::steady_clock;

namespace {

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Ffn prepare(const FfnWeights& weights, int hidden, int intermediate, bool quantised) {
  Ffn ffn;
  ffn.weights = &weights;
  ffn.intermediate = intermediate;
  ffn.gemm1_rows = rows_per_activated_task(hidden, quantised);
  ffn.gemm2_rows = rows_per_task(intermediate);
  return ffn;
}

void set_compute(LayerState& layer, DType compute) {
  layer.compute = compute;
  layer.value = value_type(compute);
  // bf16 has no room for a code times its scale.
  layer.gemm = gemm_dtype(compute);
}

// Each thread may work on a tile of its own and find the next one ready.
int intermediate_slots(int threads) { return 2 * threads + 2; }

std::size_t h_bytes(const LayerState& layer) {
  const auto elements = [](int rows, int columns) {
    return static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns);
  };
  return size_of(layer.gemm) *
         std::max(elements(layer.tile.max_height, layer.spec.intermediate),
                  elements(kOwnTokensShape.max_height, layer.spec.shared_intermediate));
}

// Rows for other hosts begin at a line of their own.
std::size_t staging_offset(const LayerState& layer) {
  return protocol::round_up<std::size_t>(h_bytes(layer), 64);
}

std::size_t intermediate_slot_bytes(const LayerState& layer, bool stages_rows) {
  if (!stages_rows) return h_bytes(layer);
  return staging_offset(layer) +
         static_cast<std::size_t>(layer.tile.max_height) * layer.cell_bytes();
}

// The memory that passes of the layer need, by its spec, compute type, max_tokens and partition of
// experts. `hosts` is null in a world of one host.
MemoryNeeds needs_of(const LayerState& layer, int threads, const network::Hosts* hosts,
                     bool pre_sum_per_host) {
  const bool sums = hosts != nullptr && pre_sum_per_host;
  const auto max_tokens = static_cast<std::uint64_t>(layer.max_tokens);
  MemoryNeeds needs;
  protocol::Heap::Shape& shape = needs.heap;
  shape.num_ranks = layer.places.num_ranks;
  shape.num_experts = layer.places.num_experts;
  shape.hidden = layer.spec.hidden;
  shape.max_tokens = layer.max_tokens;
  shape.element_bytes = layer.quantised() ? 1 : static_cast<int>(size_of(layer.value));
  shape.scaled = layer.quantised();
  shape.weighs_input = layer.spec.weight_on_input;
  shape.cell_bytes =
      max_tokens * static_cast<std::uint64_t>(layer.cells_per_token()) * layer.cell_bytes();
  needs.converted = max_tokens * layer.cell_bytes();
  if (layer.quantised()) needs.quantised = max_tokens * protocol::Heap::bytes_of_token(shape);
  if (sums) {
    needs.sums = host_sums_shape(*hosts, 1, layer.max_tokens, layer.spec.top_k, layer.cell_bytes());
  }
  needs.intermediate = static_cast<std::size_t>(intermediate_slots(threads)) *
                       intermediate_slot_bytes(layer, hosts != nullptr && !sums);
  return needs;
}

// The most events of each thread and pass. They take 3.5 MiB, of which a pass commits what it
// fills. A rank with 8192 tokens of OLMoE has some 5,000 tasks.
constexpr std::size_t kMostTraceEvents = 1 << 16;

TraceWait to_wait(Phase phase) {
  switch (phase) {
    case Phase::kNone: return TraceWait::kNothing;
    case Phase::kGate:
    case Phase::kExperts: return TraceWait::kTask;
    case Phase::kSlots:
    case Phase::kCounts: return TraceWait::kCounts;
    case Phase::kDispatch: return TraceWait::kDispatch;
    case Phase::kCombine: return TraceWait::kCombine;
    case Phase::kLink:
    case Phase::kBootstrap:
    case Phase::kNeighbours:
    case Phase::kSignal:
    case Phase::kGaveUp:
    case Phase::kLeft: return TraceWait::kNothing;
  }
  return TraceWait::kNothing;
}

// The last input that a thread lacked before it had a task.
struct Waited {
  TraceWait wait = TraceWait::kNothing;
  std::int32_t peer = -1;

  static Waited of(const Missing& missing) {
    const TraceWait wait = to_wait(missing.phase);
    return {wait, wait == TraceWait::kTask ? -1 : missing.peer};
  }
};

// A step of the whole rank, on the thread that called forward().
TraceEvent step_of_rank(TraceKind kind, std::int64_t rows) {
  TraceEvent event{kind, TraceRole::kPass};
  event.rows = static_cast<std::int32_t>(rows);
  return event;
}

void require_no_stream(const void* stream) {
  if (stream == nullptr) return;
  throw Error(ErrorCode::kInvalidArgument,
              "a stream is given, but the layer's backend is cpu; leave it null");
}

class Engine final : public LayerEngine {
 public:
  Engine(const World& world, const LayerSpec& spec, const MoeWeights& weights,
         const LayerOptions& options, std::shared_ptr<PassMemory> memory);

  void forward(const ForwardInput& input, const ForwardOutput& output) override;
  void check() override { link_->check(); }
  void refresh(void* stream) override;
  bool copies() const override { return !router_f32_.empty(); }
  void rebind(const MoeWeights& weights, const ExpertPlacement* placement) override;
  const ForwardStats& stats() override { return stats_; }
  Recording recording() override;
  bool records() const override { return options_.diagnostics.recorded_steps > 0; }
  PassTrace trace() override;
  bool traces() const override { return options_.diagnostics.trace; }
  const LayerSpec& spec() const override { return layer_.spec; }
  Backend backend() const override { return Backend::kCpu; }
  DType compute() const override { return layer_.compute; }
  int num_threads() const override { return link_->num_threads(); }
  std::uint64_t workspace_bytes() const override;

 private:
  void prepare_weights();
  void convert_router();
  void place_experts(const ExpertPlacement& placement);
  void send_to_places();
  // The places of experts on all ranks. Without a placement an expert's place is its number.
  int num_places() const {
    return ExpertPlacement{layer_.expert_at}.num_places(layer_.spec.num_experts);
  }
  ExpertRange own_places() const { return own_experts(num_places(), world_.rank(), world_.size()); }
  // Makes threads and their buffers, which this rank may fail to get.
  void make_processors(int threads);
  std::size_t most_tiles() const;
  void begin_pass(const ForwardInput& input, const ForwardOutput& output, std::uint64_t epoch);
  void route(const ForwardInput& input);
  bool in_table(std::int32_t token_id) const {
    return token_id >= 0 && token_id < layer_.weights.hash_table.rows;
  }
  void skip_bad_tokens(const ForwardInput& input);
  void prepare_token(const MatrixView& x, std::int64_t token);
  void list_slots();
  void publish_counts();
  std::uint32_t count(int source, int expert) const;
  void start_tasks();
  void run_tasks();
  bool place(const CoreLease& lease, ThreadTrace* trace, Waited& waited);
  std::optional<protocol::Task> await_task(CoreLease& lease, ThreadTrace* trace, Waited& waited);
  TraceEvent event_of(const protocol::Task& task, const Waited& waited) const;
  void finish(const ForwardOutput& output, Clock::time_point start);

  IdRules id_rules() const { return {options_.bad_ids, options_.large_ids_are_none}; }
  int rank() const { return link_->rank(); }
  int num_ranks() const { return link_->num_ranks(); }
  ThreadTrace* trace_of(int thread) { return link_->trace_of(thread); }

  World world_;
  LayerOptions options_;
  LayerState layer_;
  MoeWeights weights_;             // as given; layer_.weights has the router as it is multiplied
  std::vector<float> router_f32_;  // the router, if it has to be converted
  std::vector<float> router_bias_, correction_bias_, shared_gate_;  // see floats_of()
  std::shared_ptr<PassMemory> memory_;
  std::optional<RankLink> link_;
  std::vector<Processor> processors_;

  Pass pass_;
  Scheduler scheduler_{layer_, pass_};
  bool splits_ = false;  // an expert's rows may be in several segments
  std::vector<std::int32_t> hashed_ids_;
  std::vector<std::int32_t> place_of_;  // [E]: see places_for(); empty: without a placement
  ForwardStats stats_;
  std::vector<std::uint64_t> ring_words_;  // of ring_
  protocol::RoutingRing ring_;
};

Engine::Engine(const World& world, const LayerSpec& spec, const MoeWeights& weights,
               const LayerOptions& options, std::shared_ptr<PassMemory> memory)
    : world_(world), options_(options), memory_(std::move(memory)) {
  // Other ranks may have no reason to refuse, and would wait for this one.
  attempt_together(world.fabric(), [&] {
    validate(spec);
    layer_.spec = spec;
    place_experts(options.placement);
    validate(spec, weights, own_places(), num_places());
    if (!weights.router.empty()) routing::check_routable(spec);
    if (spec.top_k > protocol::kMaxTopK || world.size() > protocol::kMaxRanks) {
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format("top_k {} over {} ranks; this build supports top_k up to {} and {} ranks",
                      spec.top_k, world.size(), protocol::kMaxTopK, protocol::kMaxRanks));
    }
    check_values(weights, own_places());
  });

  weights_ = weights;
  layer_.on_step = options.diagnostics.on_step;
  layer_.max_tokens = options.max_tokens;
  set_compute(layer_, agree_on_compute(world.fabric(), weights, options.compute));
  keep_agreed_compute(world, spec, layer_.compute, options_);
  layer_.places = {num_places(), world.size()};

  prepare_weights();

  agree(world.fabric(), {spec, options.max_tokens, layer_.compute, summary_of(options.placement),
                         options.pre_sum_per_host});
  const std::uint64_t id = agree_on_memory(world.fabric(), memory_.get());
  const int threads = threads_of(options.cpu.num_threads, world.size());
  const MemoryNeeds needs = needs_of(layer_, threads, hosts_of(world), options.pre_sum_per_host);
  if (memory_ == nullptr) memory_ = std::make_shared<PassMemory>(world, needs, id);
  attempt_together(world.fabric(), [&] { memory_->require_room(needs); });
  layer_.heap = protocol::Heap::within(memory_->needs().heap, needs.heap);
  const protocol::HostSums sums =
      needs.sums.num_sources > 0 ? memory_->needs().host_sums() : protocol::HostSums();
  layer_.link =
      &link_.emplace(world, memory_->heap(), layer_.places, sums, options.deadline, "layer");

  // A failure here is told to all ranks. This is also a barrier: no rank writes into a heap before
  // all ranks have mapped it.
  attempt_together(world.fabric(), [&] {
    make_processors(threads);
    if (options_.diagnostics.recorded_steps == 0) return;
    ring_.slots = static_cast<std::uint32_t>(options_.diagnostics.recorded_steps);
    ring_.experts = static_cast<std::uint32_t>(spec.num_experts);
    ring_words_.resize(ring_.num_words());
    ring_.words = ring_words_.data();
  });
  // Threads come when all ranks have their processors: where there cannot be so many threads, the
  // memory of the process is short meanwhile, and other ranks would be the ones that lack it.
  attempt_together(world.fabric(), [&] {
    link_->start_threads(threads, [] { thread_local const SingleThreadedLibrary confined; });
  });
}

// Prepares all that is derived from the weights; called again when they change.
void Engine::prepare_weights() {
  const LayerSpec& spec = layer_.spec;
  const ExpertRange own = own_places();
  layer_.weights = weights_;
  layer_.files = MappedWeights(weights_);
  layer_.experts.clear();
  for (int e = own.begin; e < own.end; ++e) {
    layer_.experts.push_back(prepare(layer_.weights.experts[static_cast<std::size_t>(e)],
                                     spec.hidden, spec.intermediate, layer_.quantised()));
  }
  if (spec.shared_intermediate > 0) {
    layer_.shared =
        prepare(layer_.weights.shared, spec.hidden, spec.shared_intermediate, layer_.quantised());
  }
  const MatrixView& router = weights_.router;
  const bool router_as_is =
      router.dtype == DType::kF32 || (router.dtype == DType::kBF16 && layer_.gemm == DType::kBF16);
  if (!router.empty() && !router_as_is) convert_router();
}

// Converts the router once, because that would cost time in every pass. All other weights are read
// where they are.
void Engine::convert_router() {
  const MatrixView& router = weights_.router;
  router_f32_.resize(static_cast<std::size_t>(router.rows * router.cols));
  for (std::int64_t r = 0; r < router.rows; ++r) {
    float* const to = &router_f32_[static_cast<std::size_t>(r * router.cols)];
    const VectorView row{router.row(r), router.dtype, router.cols, router.col_stride};
    std::vector<float> converted;
    std::copy_n(floats_of(row, 0, static_cast<int>(router.cols), 1, converted), router.cols, to);
  }
  layer_.weights.router = {router_f32_.data(), DType::kF32, router.rows, router.cols, router.cols};
}

void Engine::refresh(void* stream) {
  require_no_stream(stream);
  if (!router_f32_.empty()) convert_router();
  layer_.files.require_whole();
}

void Engine::place_experts(const ExpertPlacement& placement) {
  layer_.expert_at = placement.expert_at;
  place_of_.clear();
  if (placement.expert_at.empty()) return;
  place_of_ = places_for(placement, spec().num_experts, world_.rank(), world_.size());
}

void Engine::rebind(const MoeWeights& weights, const ExpertPlacement* placement) {
  if (placement != nullptr) {
    validate(*placement, spec().num_experts);
    require_as_many_places(placement->num_places(spec().num_experts), num_places());
    agree_on_placement(world_.fabric(), *placement);
  }
  validate(spec(), weights, own_places(), num_places());
  check_values(weights, own_places());
  require_same_weights(weights_, weights, layer_.compute,
                       resolve_compute(weights, options_.compute));
  weights_ = weights;
  if (placement != nullptr) place_experts(*placement);
  prepare_weights();
}

void Engine::make_processors(int threads) {
  if (options_.diagnostics.trace) link_->record(threads, kMostTraceEvents);
  for (int i = 0; i < threads; ++i) processors_.emplace_back(layer_, trace_of(i));

  pass_.placement = protocol::Placement(layer_.places, rank());
  pass_.tiles.reserve(most_tiles());
  splits_ = num_ranks() > 1 && bits_ignore_height(layer_);
  pass_.num_intermediate_slots = intermediate_slots(threads);
  pass_.intermediate_slot_bytes =
      intermediate_slot_bytes(layer_, link_->spans_hosts() && !link_->sums());
  pass_.staging_offset = staging_offset(layer_);
  pass_.intermediate = memory_->intermediate();
  pass_.tokens_for.resize(static_cast<std::size_t>(num_ranks()));
  pass_.dispatch_chunks.resize(static_cast<std::size_t>(num_ranks()));
  pass_.own_entries.resize(layer_.experts.size());
}

void Engine::forward(const ForwardInput& input, const ForwardOutput& output) {
  check_call(layer_.spec, layer_.weights, options_.max_tokens, rank(), input, output,
             layer_.compute);
  check_ids(layer_.spec, layer_.weights, input, id_rules());
  require_no_stream(input.stream);
  check();
  const SingleThreadedLibrary confined;
  const Clock::time_point start = Clock::now();
  const PassMemory::Use use(*memory_);
  begin_pass(input, output, use.epoch());
  route(input);
  {
    const Traced traced(trace_of(0), step_of_rank(TraceKind::kRoute, pass_.tokens));
    stats_.dropped_slots = drop_over_capacity(spec(), pass_.tokens, pass_.ids, pass_.weights);
    send_to_places();
    list_slots();
  }
  publish_counts();
  stats_.gate_seconds = seconds_since(start);
  start_tasks();
  run_tasks();
  stats_.plan_seconds = std::chrono::duration<double>(scheduler_.placed_at() - start).count();
  link_->end_call();
  finish(output, start);
  if (ring_.words != nullptr) {
    record_step(ring_, stats_.epoch, stats_.tokens, stats_.tokens_per_expert);
  }
}

std::uint64_t Engine::workspace_bytes() const {
  std::uint64_t bytes = memory_->bytes() - memory_->heap()->bytes() +
                        ring_words_.size() * sizeof(std::uint64_t) + link_->trace_bytes();
  for (const Processor& processor : processors_) bytes += processor.scratch_bytes();
  return bytes;
}

void Engine::begin_pass(const ForwardInput& input, const ForwardOutput& output,
                        std::uint64_t epoch) {
  const MatrixView& x = input.activations;
  stats_ = {};
  pass_.epoch = epoch;
  link_->clear_traces();
  pass_.tokens = x.rows;
  pass_.logits = input.logits;
  pass_.output = output;
  const bool routes = input.topk_ids.empty();
  const auto floats = [](bool wanted, const VectorView& values, std::vector<float>& scratch) {
    return wanted ? floats_of(values, 0, static_cast<int>(values.size), 1, scratch) : nullptr;
  };
  pass_.router_bias = floats(routes, weights_.router_bias, router_bias_);
  pass_.correction_bias = floats(routes, weights_.correction_bias, correction_bias_);
  pass_.shared_gate = floats(spec().shared_intermediate > 0, weights_.shared_gate, shared_gate_);
  const auto slots = static_cast<std::size_t>(x.rows) * static_cast<std::size_t>(spec().top_k);
  pass_.ids.resize(slots);
  pass_.weights.resize(slots);
  pass_.slots.resize(slots);
  // Activations of another type are converted once, here, so that a token has the same bits
  // whether its expert is local or not.
  if (x.dtype == layer_.value) {
    pass_.x = static_cast<const std::byte*>(x.data);
    pass_.x_row_bytes = x.row_stride * static_cast<std::int64_t>(size_of(x.dtype));
  } else {
    pass_.x = x.dtype == DType::kF8E4M3 ? nullptr : memory_->converted();
    pass_.x_row_bytes = static_cast<std::int64_t>(layer_.cell_bytes());
  }
  pass_.wire = layer_.quantised() ? memory_->quantised() : pass_.x;
  pass_.wire_row_bytes =
      layer_.quantised() ? static_cast<std::int64_t>(layer_.wire_bytes()) : pass_.x_row_bytes;
}

void Engine::route(const ForwardInput& input) {
  const MatrixView& x = input.activations;
  const bool given = !input.topk_ids.empty();
  const std::int32_t* hashed_ids = nullptr;
  if (!given && spec().routing.method == RoutingMethod::kHash) {
    hashed_ids_.clear();
    for (const std::int32_t id : input.token_ids) {
      // A bad token (check_ids() let it pass) routes like some other, and loses its slots below.
      routing::append_hashed_ids(layer_.weights.hash_table, in_table(id) ? id : 0, hashed_ids_);
    }
    hashed_ids = hashed_ids_.data();
  }
  std::atomic<std::int64_t> next_block{0};
  std::atomic<std::int64_t> nan_logits{0}, nan_tokens{0};
  link_->in_parallel(pass_.epoch, [&](int i) {
    const CoreLease lease(layer_.heaps());
    constexpr std::int64_t kBlock = Processor::kGateBlock;
    ThreadTrace* const trace = trace_of(i);
    if (trace != nullptr) trace->begin({TraceKind::kGate, TraceRole::kPass, TraceWait::kCore});
    std::int64_t rows = 0;
    for (;;) {
      const std::int64_t begin = next_block.fetch_add(1) * kBlock;
      if (begin >= x.rows || link_->aborted()) break;
      const std::int64_t end = std::min(begin + kBlock, x.rows);
      rows += end - begin;
      layer_.step(ProtocolStep::Kind::kGate, rank(), pass_.epoch);
      for (std::int64_t t = begin; t < end; ++t) prepare_token(x, t);
      if (!given) {
        const NanCounts nan =
            processors_[static_cast<std::size_t>(i)].gate(pass_, begin, end, hashed_ids);
        nan_logits += nan.logits;
        nan_tokens += nan.tokens;
      }
    }
    if (trace != nullptr) trace->end(static_cast<std::int32_t>(rows));
  });
  if (given) {
    stats_.bad_slots = read_routing(spec(), input, id_rules(), pass_.ids, pass_.weights);
  }
  if (hashed_ids != nullptr) skip_bad_tokens(input);
  stats_.nan_logits = nan_logits;
  stats_.nan_tokens = nan_tokens;
}

void Engine::skip_bad_tokens(const ForwardInput& input) {
  const auto top_k = static_cast<std::size_t>(spec().top_k);
  for (std::size_t t = 0; t < input.token_ids.size(); ++t) {
    if (in_table(input.token_ids[t])) continue;
    std::fill_n(pass_.ids.begin() + static_cast<std::ptrdiff_t>(t * top_k), top_k, kNoExpert);
    std::fill_n(pass_.weights.begin() + static_cast<std::ptrdiff_t>(t * top_k), top_k, 0.0f);
    stats_.bad_slots += spec().top_k;
  }
}

// Makes the forms of a token that experts and gates read, unless they are there already.
void Engine::prepare_token(const MatrixView& x, std::int64_t token) {
  if (pass_.x == memory_->converted()) {
    kernels().convert(x.row(token), x.dtype,
                      memory_->converted() + static_cast<std::size_t>(token * pass_.x_row_bytes),
                      layer_.value, x.cols, 1);
  }
  if (!layer_.quantised()) return;
  std::byte* const row =
      memory_->quantised() + static_cast<std::size_t>(token * pass_.wire_row_bytes);
  auto* const codes = reinterpret_cast<std::uint8_t*>(row);
  auto* const scales = reinterpret_cast<float*>(row + layer_.heap.scale_offset());
  if (x.dtype == DType::kF8E4M3) {
    std::memcpy(codes, x.row(token), static_cast<std::size_t>(x.cols));
    std::copy_n(x.f32_scale() + token * x.scale_stride,
                protocol::ceil_div<std::int64_t>(x.cols, kQuantGroup), scales);
  } else {
    kernels().quantize(reinterpret_cast<const std::uint16_t*>(pass_.x_row(token)), codes, scales,
                       x.cols);
  }
}

// Replaces ids of experts by those of places, which the protocol takes for experts. finish() turns
// them back.
void Engine::send_to_places() {
  if (place_of_.empty()) return;
  for (std::int32_t& id : pass_.ids) {
    if (id >= 0) id = place_of_[static_cast<std::size_t>(id)];
  }
}

// Lists this rank's slots by expert and its tokens by rank, and notes each slot's place in these
// lists.
void Engine::list_slots() {
  const protocol::ExpertPartition& experts = layer_.places;
  pass_.counts.assign(static_cast<std::size_t>(num_places()), 0);
  for (auto& tokens : pass_.tokens_for) tokens.clear();
  for (auto& entries : pass_.own_entries) entries.clear();
  for (std::int64_t t = 0; t < pass_.tokens; ++t) {
    std::uint64_t ranks_seen = 0;
    for (std::int64_t i = t * spec().top_k; i < (t + 1) * spec().top_k; ++i) {
      const std::int32_t e = pass_.ids[static_cast<std::size_t>(i)];
      Slot& slot = pass_.slots[static_cast<std::size_t>(i)];
      slot = Slot{};
      if (e < 0) continue;
      slot.owner = experts.owner(e);
      slot.position = pass_.counts[static_cast<std::size_t>(e)]++;
      if (slot.owner == rank()) {
        pass_.own_entries[static_cast<std::size_t>(e - experts.begin(rank()))].push_back(
            protocol::SlotEntry::pack(static_cast<std::uint32_t>(t),
                                      static_cast<std::uint32_t>(i - t * spec().top_k)));
        continue;
      }
      const int via = link_->via(slot.owner);
      if (ranks_seen >> via & 1) continue;
      ranks_seen |= std::uint64_t{1} << via;
      pass_.tokens_for[static_cast<std::size_t>(via)].push_back(static_cast<std::uint32_t>(t));
    }
  }
  pass_.unsent = pass_.counts;
  for (int d = 0; d < num_ranks(); ++d) {
    const auto tokens = pass_.tokens_for[static_cast<std::size_t>(d)].size();
    pass_.dispatch_chunks[static_cast<std::size_t>(d)] =
        static_cast<std::uint32_t>(protocol::ceil_div<std::size_t>(tokens, kDispatchChunk));
  }
}

void Engine::publish_counts() {
  const Traced traced(trace_of(0), step_of_rank(TraceKind::kCounts, pass_.tokens));
  const std::uint64_t flag = std::uint64_t{protocol::flag_of(pass_.epoch)} << 32;
  std::vector<std::uint64_t> row;
  row.reserve(pass_.counts.size());
  for (const std::uint32_t count : pass_.counts) row.push_back(flag | count);
  for (int i = 1; i < num_ranks(); ++i) {
    const int peer = link_->peer(i);
    layer_.step(ProtocolStep::Kind::kPublishCounts, peer, pass_.epoch);
    const std::span<const int> ranks = link_->ranks_behind(peer);
    if (ranks.empty()) continue;
    // Release: the row is also the credit for the peer to send (heap.h), so it must follow all that
    // this rank did in the previous pass. On another host, later records of the lane arrive behind
    // it.
    link_->to(peer, network::Lane::kDispatch, pass_.epoch, [&](auto& to) {
      for (const int r : ranks) {
        to.target(r, layer_.heap.counts(pass_.epoch, rank()).in(layer_.heaps().base[r]));
      }
      to.words(row);
    });
    stats_.signal_bytes += row.size() * sizeof(std::uint64_t);
  }
}

// The counts matrix, once the source's row has come.
std::uint32_t Engine::count(int source, int expert) const {
  if (source == rank()) return pass_.counts[static_cast<std::size_t>(expert)];
  return count_of(layer_, pass_.epoch, source, expert);
}

// Tiles of a pass in which every rank has as many tokens as it may, and every expert's rows are
// placed for each source alone.
std::size_t Engine::most_tiles() const {
  const auto u = [](int value) { return static_cast<std::size_t>(value); };
  const std::size_t ranks = u(num_ranks()), tokens = u(options_.max_tokens),
                    experts = layer_.experts.size();
  const std::size_t rows = ranks * tokens * std::min(u(spec().top_k), experts);
  return protocol::ceil_div(tokens, u(kOwnTokensShape.max_height)) + experts * ranks +
         rows / u(layer_.tile.max_height);
}

// Lists the tasks that need no other rank's counts: the shared expert's tiles, sending, and, as the
// last, combining.
void Engine::start_tasks() {
  pass_.tiles.clear();
  pass_.placement.clear();
  pass_.shared_tiles = protocol::TokenTiles(
      spec().shared_intermediate > 0 ? static_cast<std::uint32_t>(pass_.tokens) : 0,
      kOwnTokensShape);
  pass_.add_tiles(pass_.shared_tiles, kOwnTokensShape, -1, 0);

  protocol::Workload& work = pass_.work;
  work.rank = rank();
  work.num_ranks = num_ranks();
  work.dispatch_chunks = pass_.dispatch_chunks.data();
  work.num_shared_tiles = pass_.shared_tiles.count;
  work.num_combine_chunks =
      static_cast<std::uint32_t>(protocol::ceil_div<std::int64_t>(pass_.tokens, kCombineChunk));
  if (work.num_shared_tiles > 0) {
    work.shared_gemm1_blocks = layer_.shared.gemm1_blocks();
    work.shared_gemm2_blocks = layer_.shared.gemm2_blocks(spec().hidden);
  }
  if (!layer_.experts.empty()) {
    work.routed_gemm1_blocks = layer_.experts[0].gemm1_blocks();
    work.routed_gemm2_blocks = layer_.experts[0].gemm2_blocks(spec().hidden);
  }
  pass_.received.assign(
      static_cast<std::size_t>(num_ranks() - 1) * pass_.received_words(options_.max_tokens), 0);
  pass_.unfinished.assign(layer_.experts.size() * static_cast<std::size_t>(num_ranks()), 0);
  pass_.sums_sent = 0;
  scheduler_.start(options_.patience ? *options_.patience : patience_for(layer_), splits_);
}

void Engine::run_tasks() {
  link_->in_parallel(pass_.epoch, [&](int i) {
    Processor& processor = processors_[static_cast<std::size_t>(i)];
    ThreadTrace* const trace = trace_of(i);
    if (trace != nullptr) trace->set_free();
    CoreLease lease(layer_.heaps());
    Waited waited{TraceWait::kCore, -1};
    for (;;) {
      std::optional<protocol::Task> task = scheduler_.next();
      if (!task && place(lease, trace, waited)) task = scheduler_.next();
      if (!task) task = await_task(lease, trace, waited);
      if (!task) break;
      if (trace == nullptr) {
        processor.run(pass_, *task);
      } else {
        trace->begin(event_of(*task, waited));
        processor.run(pass_, *task);
        trace->end();
      }
      scheduler_.complete(*task);
      waited = {lease.offer() ? TraceWait::kCore : TraceWait::kNothing, -1};
      if (link_->aborted()) return;
    }
    layer_.files.require_whole();
  });
  check();
}

// Places rows if it is time (see Scheduler); returns true if it did. The thread has nothing else to
// do, for the reason `waited`, and placing rows ends that wait.
bool Engine::place(const CoreLease& lease, ThreadTrace* trace, Waited& waited) {
  if (scheduler_.all_placed()) return false;
  if (trace != nullptr) {
    TraceEvent event{TraceKind::kPlan, TraceRole::kPass, waited.wait};
    event.peer = waited.peer;
    trace->begin(event);
  }
  // A thread that holds its core may have to give it to another rank.
  const bool idle = !lease.held() && CoreLease::core_is_free();
  if (!scheduler_.place(idle)) return false;
  if (trace != nullptr) trace->end(static_cast<std::int32_t>(pass_.tokens));
  waited = {};
  return true;
}

// Returns no task once all are complete, or if the pass has failed. With a trace, `waited` becomes
// what was lacking at the last look.
std::optional<protocol::Task> Engine::await_task(CoreLease& lease, ThreadTrace* trace,
                                                 Waited& waited) {
  std::optional<protocol::Task> task;
  lease.give();
  if (trace != nullptr) waited = Waited::of(scheduler_.missing());
  const protocol::WaitResult result = link_->wait(
      pass_.epoch, false,
      [&] {
        task = scheduler_.next();
        if (!task && place(lease, trace, waited)) task = scheduler_.next();
        if (task.has_value() || scheduler_.all_complete()) return true;
        if (trace != nullptr) waited = Waited::of(scheduler_.missing());
        return false;
      },
      [&] {
        const Missing missing = scheduler_.missing();
        layer_.waiting(missing.peer, pass_.epoch);
        return missing;
      });
  if (result != protocol::WaitResult::kReady || !task) return std::nullopt;
  if (trace == nullptr) {
    lease.take();
    return task;
  }
  const std::int64_t given = trace::now_ns();
  lease.take();
  // An event has one reason: the longer wait's.
  if (trace::now_ns() - given > given - trace->free_since_ns()) {
    waited = {TraceWait::kCore, -1};
  }
  return task;
}

TraceEvent Engine::event_of(const protocol::Task& task, const Waited& waited) const {
  TraceEvent event{TraceKind::kSend, TraceRole::kMath, waited.wait};
  event.peer = waited.peer;
  const auto index = static_cast<std::int32_t>(task.index);
  switch (task.kind) {
    case protocol::TaskKind::kDispatch: {
      event.role = TraceRole::kSend;
      event.peer = task.peer;
      const auto tokens = static_cast<std::int32_t>(pass_.tokens_for[task.peer].size());
      const auto chunk = static_cast<std::int32_t>(kDispatchChunk);
      event.rows = std::min(chunk, tokens - index * chunk);
      return event;
    }
    case protocol::TaskKind::kGemm1:
    case protocol::TaskKind::kGemm2: {
      const Tile& tile = pass_.tiles[task.index];
      event.kind = task.kind == protocol::TaskKind::kGemm1 ? TraceKind::kGemm1 : TraceKind::kGemm2;
      event.block = static_cast<std::int32_t>(task.block);
      event.expert = tile.expert < 0 ? -1 : layer_.expert_of(tile.expert);
      event.rows = static_cast<std::int32_t>(tile.rows);
      break;
    }
    case protocol::TaskKind::kCombine: {
      event.kind = TraceKind::kCombine;
      const std::int64_t first = std::int64_t{index} * kCombineChunk;
      event.rows =
          static_cast<std::int32_t>(std::min<std::int64_t>(kCombineChunk, pass_.tokens - first));
      break;
    }
    case protocol::TaskKind::kNone: break;
  }
  event.tile = index;
  return event;
}

Recording Engine::recording() {
  check();
  Recording recording = empty_recording(spec(), options_, world_);
  // (The ring is of experts: finish() has turned places back.)
  read_ring(
      ring_, [](std::uint64_t, int expert) { return expert; }, recording);
  return recording;
}

PassTrace Engine::trace() {
  check();
  return link_->trace(pass_.epoch);
}

void Engine::finish(const ForwardOutput& output, Clock::time_point start) {
  const protocol::ExpertPartition& experts = layer_.places;
  const int num_experts = num_places();
  std::transform(
      pass_.ids.begin(), pass_.ids.begin() + static_cast<std::ptrdiff_t>(output.topk_ids.size()),
      output.topk_ids.begin(), [&](std::int32_t id) { return id < 0 ? id : layer_.expert_of(id); });
  std::copy_n(pass_.weights.begin(), output.topk_weights.size(), output.topk_weights.begin());

  stats_.epoch = pass_.epoch;
  stats_.tokens = pass_.tokens;
  std::uint64_t rows_sent = 0, rows_received = 0, tokens_sent = 0, tokens_received = 0;
  // Rows of tokens that hosts sum: those whose sums this rank keeps, those of them that its experts
  // have, and those of its own tokens on other hosts.
  std::uint64_t collected = 0, collected_own = 0, summed_slots = 0;
  std::uint32_t fullest = 0;
  stats_.tokens_per_expert.assign(static_cast<std::size_t>(spec().num_experts), 0);
  for (int e = 0; e < num_experts; ++e) {
    std::uint32_t rows = 0;
    for (int s = 0; s < num_ranks(); ++s) {
      rows += count(s, e);
      fullest = std::max(fullest, count(s, e));
    }
    stats_.tokens_per_expert[static_cast<std::size_t>(layer_.expert_of(e))] += rows;
    const std::uint32_t own = pass_.counts[static_cast<std::size_t>(e)];
    (experts.owner(e) == rank() ? rows_received : rows_sent) +=
        experts.owner(e) == rank() ? rows - own : own;
    if (!link_->sums()) continue;
    if (link_->way_back(experts.owner(e)) == RankLink::Return::kSummed) {
      summed_slots += own;
      continue;
    }
    for (int s = 0; s < num_ranks(); ++s) {
      if (!link_->keeps_sums_for(s)) continue;
      collected += count(s, e);
      if (experts.owner(e) == rank()) collected_own += count(s, e);
    }
  }
  for (const auto& tokens : pass_.tokens_for) tokens_sent += tokens.size();
  for (const std::uint64_t word : pass_.received) tokens_received += std::popcount(word);
  stats_.dispatch_bytes = tokens_sent * layer_.wire_bytes() + rows_sent * layer_.heap.entry_bytes();
  if (!spec().weight_on_input) {
    stats_.dispatch_bytes += summed_slots * sizeof(float);
  }
  stats_.combine_bytes = (rows_received - collected_own + pass_.sums_sent) * layer_.cell_bytes();
  stats_.padded_all_to_all_bytes = static_cast<std::uint64_t>(num_experts - experts.count(rank())) *
                                   fullest * (layer_.wire_bytes() + layer_.cell_bytes());
  stats_.heap_bytes_used = layer_.heap.bytes_used(
      tokens_received, rows_received,
      static_cast<std::uint64_t>(pass_.tokens * layer_.cells_per_token()) * layer_.cell_bytes());
  stats_.heap_bytes_used += collected * layer_.cell_bytes();
  stats_.heap_bytes_reserved = link_->sums() ? link_->sums().end() : layer_.heap.bytes();
  stats_.workspace_bytes_used =
      std::min(static_cast<std::size_t>(pass_.num_intermediate_slots), pass_.tiles.size()) *
      pass_.intermediate_slot_bytes;
  if (pass_.x == memory_->converted()) {
    stats_.workspace_bytes_used += static_cast<std::uint64_t>(pass_.tokens) * layer_.cell_bytes();
  }
  if (layer_.quantised()) {
    stats_.workspace_bytes_used += static_cast<std::uint64_t>(pass_.tokens) * layer_.wire_bytes();
  }
  for (const Processor& processor : processors_) {
    stats_.workspace_bytes_used += processor.scratch_bytes();
  }
  stats_.total_seconds = seconds_since(start);
}

}  // namespace

std::unique_ptr<LayerEngine> make_engine(const World& world, const LayerSpec& spec,
                                         const MoeWeights& weights, const LayerOptions& options,
                                         std::shared_ptr<switchyard::PassMemory> memory) {
  // MoeLayer has seen that it is of this backend.
  return std::make_unique<Engine>(world, spec, weights, options,
                                  std::static_pointer_cast<PassMemory>(std::move(memory)));
}

std::shared_ptr<switchyard::PassMemory> make_memory(const World& world,
                                                    std::span<const LayerSpec> specs,
                                                    const WorkspaceOptions& options,
                                                    std::uint64_t id) {
  std::optional<MemoryNeeds> needs;
  for (const LayerSpec& spec : specs) {
    LayerState layer;
    layer.spec = spec;
    layer.max_tokens = options.max_tokens;
    set_compute(layer, options.compute);
    layer.places = {spec.num_experts, world.size()};
    const MemoryNeeds its = needs_of(layer, threads_of(options.num_threads, world.size()),
                                     hosts_of(world), options.pre_sum_per_host);
    needs = needs ? MemoryNeeds::largest(*needs, its) : its;
  }
  return std::make_shared<PassMemory>(world, needs.value(), id);
}

}  // namespace switchyard::cpu
