#include "bench/measure.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>
#include <span>
#include <utility>

#include "base/convert.h"
#include "base/plural.h"
#include "bench/load.h"
#include "bench/wall_clock.h"
#include "gpu/device.h"
#include "run/devices.h"
#include "run/ranks.h"
#include "run/verify.h"

namespace switchyard::bench {

using run::Batch;
using run::RankDevice;
using run::RunResult;
using run::Share;
using run::Source;

// The place where a layer runs. It holds the layer's memory and times its passes. Batches and
// results cover all ranks, in the order of the ranks.
class LayerBench::Place : public TimedPlace {
 public:
  struct Stats {
    std::vector<std::int64_t> tokens_per_expert;  // over all ranks
    std::uint64_t most_sent = 0;  // bytes to other ranks, of the rank that wrote most
  };

  // Sets the batch of the passes that follow. If `ids` and `weights` are empty, the gate routes.
  virtual void set_input(const MatrixView& activations, const std::vector<std::int32_t>& ids,
                         const std::vector<float>& weights) = 0;
  // run_once() also writes the pass's routing.
  virtual int graph_nodes() const { return 0; }
  // Throws the error of a pass that failed.
  virtual Stats stats() = 0;
  // Returns the output of the last pass, and the routing of the last run_once().
  virtual RunResult download() = 0;
  std::vector<std::byte> output() override { return download().output; }
};

namespace {

// The number of tokens to verify, or one per rank if there are more ranks than that. The fp64
// reference is slow. A few tokens suffice, because a token's output does not depend on the others.
constexpr std::int64_t kVerifiedTokens = 4;

// The most launches that a rank enqueues before it waits for its device. 1024 launches fill a
// queue. A full queue makes the host wait inside the launch call. There it may keep another rank's
// host from the very launch that would empty the queue.
constexpr std::size_t kLaunchesInFlight = 256;

LayerOptions layer_options(DType compute, std::int64_t max_tokens) {
  return {.max_tokens = static_cast<int>(max_tokens), .compute = compute};
}

LayerOptions layer_options(DType compute, std::int64_t max_tokens, const MeasureOptions& options,
                           const RankDevice& place) {
  LayerOptions o = layer_options(compute, max_tokens);
  o.backend = Backend::kCuda;
  o.cuda.device = place.device;
  o.cuda.reserved_sms = place.reserved_sms;
  o.cuda.cooperative_launch = !options.uncooperative;
  o.diagnostics.trace = options.traced;
  return o;
}

std::size_t output_bytes(const LayerSpec& spec, std::int64_t tokens, DType dtype) {
  return static_cast<std::size_t>(tokens) * static_cast<std::size_t>(spec.hidden) * size_of(dtype);
}
std::size_t num_slots(const LayerSpec& spec, std::int64_t tokens) {
  return static_cast<std::size_t>(tokens) * static_cast<std::size_t>(spec.top_k);
}

class HostPlace : public LayerBench::Place {
 public:
  HostPlace(const Source& source, DType compute, std::int64_t max_tokens)
      : layer_(World::single(), source.spec, source.weights, layer_options(compute, max_tokens)) {
    result_.output_dtype = activation_dtype(compute);
  }

  void set_input(const MatrixView& activations, const std::vector<std::int32_t>& ids,
                 const std::vector<float>& weights) override {
    const LayerSpec& spec = layer_.spec();
    given_ids_ = ids;
    given_weights_ = weights;
    input_.activations = activations;
    input_.topk_ids = given_ids_;
    input_.topk_weights = given_weights_;
    result_.output.resize(output_bytes(spec, activations.rows, result_.output_dtype));
    result_.topk_ids.resize(num_slots(spec, activations.rows));
    result_.topk_weights.resize(num_slots(spec, activations.rows));
  }
  void poison_output() override {
    std::fill(result_.output.begin(), result_.output.end(), std::byte{kPoison});
  }
  void run_once() override {
    ForwardOutput output = plain_output();
    output.topk_ids = result_.topk_ids;
    output.topk_weights = result_.topk_weights;
    layer_.forward(input_, output);
  }
  std::vector<double> time(int repeat) override {
    return wall_times(repeat, [&] { layer_.forward(input_, plain_output()); });
  }
  Stats stats() override { return {layer_.stats().tokens_per_expert, 0}; }
  RunResult download() override { return result_; }

 private:
  ForwardOutput plain_output() {
    ForwardOutput output;
    output.data = result_.output.data();
    output.dtype = result_.output_dtype;
    return output;
  }

  MoeLayer layer_;
  ForwardInput input_;
  std::vector<std::int32_t> given_ids_;
  std::vector<float> given_weights_;
  RunResult result_;
};

template <typename T>
void append(std::vector<T>& to, const std::vector<T>& from, std::size_t first, std::size_t count) {
  const auto begin = from.begin() + static_cast<std::ptrdiff_t>(first);
  to.insert(to.end(), begin, begin + static_cast<std::ptrdiff_t>(count));
}

// One rank on the current device. Every function is to be called by all ranks at the same time.
class GpuRank {
 public:
  GpuRank(World world, const RankDevice& place, const Source& source, DType compute,
          std::int64_t max_tokens, const MeasureOptions& options)
      : world_(std::move(world)),
        source_(source),
        layer_options_(layer_options(compute, max_tokens, options, place)),
        dtype_(activation_dtype(compute)),
        activations_(output_bytes(source.spec, max_tokens, dtype_)),
        output_(output_bytes(source.spec, max_tokens, dtype_)),
        ids_(num_slots(source.spec, max_tokens) * sizeof(std::int32_t)),
        weights_(num_slots(source.spec, max_tokens) * sizeof(float)),
        given_ids_(ids_.bytes()),
        given_weights_(weights_.bytes()) {
    add_copies(1);
    gpu::flush_l2(stream_);  // the first one allocates
    stream_.synchronize();
  }

  int device() const { return layer_options_.cuda.device; }
  // `most`: the most tokens of any rank.
  void set_input(const MatrixView& activations, std::span<const std::int32_t> ids,
                 std::span<const float> weights, std::int64_t most) {
    stream_.synchronize();
    graph_.reset();
    tokens_ = activations.rows;
    activations_.upload(activations.data, output_bytes(source_.spec, tokens_, activations.dtype));
    given_ids_.upload(ids.data(), ids.size_bytes());
    given_weights_.upload(weights.data(), weights.size_bytes());
    input_ = {};
    input_.activations = activations;
    input_.activations.data = activations_.data();
    input_.topk_ids = {reinterpret_cast<std::int32_t*>(given_ids_.data()), ids.size()};
    input_.topk_weights = {reinterpret_cast<float*>(given_weights_.data()), weights.size()};
    input_.stream = stream_.handle();
    if (!ids.empty()) input_.max_tokens_per_rank = static_cast<int>(most);
  }
  void poison_output() { output_.fill(kPoison, stream_); }
  void run_once() {
    const std::size_t slots = num_slots(source_.spec, tokens_);
    ForwardOutput output = plain_output();
    output.topk_ids = {reinterpret_cast<std::int32_t*>(ids_.data()), slots};
    output.topk_weights = {reinterpret_cast<float*>(weights_.data()), slots};
    layers_.front()->forward(input_, output);
    world_.barrier();  // no rank waits for its device before all have launched: see time_passes()
    stream_.synchronize();
  }
  void set_rotation(const Rotation& rotation) {
    graph_.reset();
    rotation_ = rotation;
    add_copies(static_cast<std::size_t>(rotation.copies));
  }
  std::vector<double> time(int repeat) {
    return time_passes(repeat, [&] { run_passes(); });
  }
  std::vector<double> time_graph(int repeat) {
    if (!graph_) graph_ = gpu::Graph::capture(stream_, [&] { run_passes(); });
    return time_passes(repeat, [&] { graph_->launch(stream_); });
  }
  int graph_nodes() const { return graph_ ? graph_->num_nodes() / rotation_.passes : 0; }
  const ForwardStats& stats() {
    for (const auto& layer : layers_) layer->stats();
    return layers_.front()->stats();
  }
  RunResult download() {
    stream_.synchronize();
    const LayerSpec& spec = source_.spec;
    RunResult result{.backend = Backend::kCuda, .output_dtype = dtype_};
    result.output.resize(output_bytes(spec, tokens_, dtype_));
    result.topk_ids.resize(num_slots(spec, tokens_));
    result.topk_weights.resize(num_slots(spec, tokens_));
    output_.download(result.output.data(), result.output.size());
    ids_.download(result.topk_ids.data(), result.topk_ids.size() * sizeof(std::int32_t));
    weights_.download(result.topk_weights.data(), result.topk_weights.size() * sizeof(float));
    return result;
  }

 private:
  ForwardOutput plain_output() { return {.data = output_.data(), .dtype = dtype_}; }

  void add_copies(std::size_t count) {
    while (layers_.size() < count) {
      layers_.push_back(
          std::make_unique<MoeLayer>(world_, source_.spec, source_.weights, layer_options_));
    }
  }
  void run_passes() {
    for (int i = 0; i < rotation_.passes; ++i) {
      layers_[static_cast<std::size_t>(i % rotation_.copies)]->forward(input_, plain_output());
    }
  }

  // Enqueues a whole row of repetitions before it waits for the device. The flush keeps the device
  // busy for longer than the host needs to launch what follows. So the launch is already queued
  // when the flush ends, and the host's time is not measured.
  //
  // With several ranks, a kernel waits for kernels that other ranks launch. So no rank waits for
  // its device between the barriers: it could be waiting for a launch that comes after its own.
  // Every row begins with passes that are not timed. A pass ends on all devices at about the same
  // time, however far apart the hosts launched it. So the timed passes begin together.
  std::vector<double> time_passes(int repeat, const std::function<void()>& passes) {
    std::vector<std::pair<gpu::Event, gpu::Event>> events(static_cast<std::size_t>(repeat));
    const auto launches = static_cast<std::size_t>(rotation_.passes);
    const std::size_t in_a_row =
        world_.size() == 1 ? events.size() : std::max<std::size_t>(kLaunchesInFlight / launches, 1);
    for (std::size_t first = 0; first < events.size(); first += in_a_row) {
      world_.barrier();
      if (world_.size() > 1) passes();
      for (std::size_t i = first; i < std::min(first + in_a_row, events.size()); ++i) {
        if (i == first || rotation_.passes == 1) gpu::flush_l2(stream_);
        events[i].first.record(stream_);
        passes();
        events[i].second.record(stream_);
      }
      world_.barrier();
      stream_.synchronize();
    }
    std::vector<double> times;
    for (const auto& [begin, end] : events) {
      times.push_back(gpu::Event::elapsed_us(begin, end) / rotation_.passes);
    }
    return times;
  }

  World world_;
  const Source& source_;
  LayerOptions layer_options_;
  std::vector<std::unique_ptr<MoeLayer>> layers_;
  DType dtype_;
  gpu::Stream stream_;
  gpu::DeviceBuffer activations_, output_, ids_, weights_, given_ids_, given_weights_;
  std::int64_t tokens_ = 0;
  Rotation rotation_;
  ForwardInput input_;
  std::optional<gpu::Graph> graph_;
};

// Runs each rank as a thread with its device. Several ranks share the layer's experts.
class GpuPlace : public LayerBench::Place {
 public:
  GpuPlace(const Source& source, DType compute, std::int64_t max_tokens,
           const MeasureOptions& options)
      : ranks_(static_cast<std::size_t>(options.ranks)) {
    std::vector<World> worlds = World::threads(options.ranks);
    run::on_every_rank(options.ranks, [&](int r) {
      const auto i = static_cast<std::size_t>(r);
      World world = std::move(worlds[i]);
      const RankDevice place = run::rank_device(r, options.ranks, options.reserved_sms);
      gpu::set_device(place.device);
      ranks_[i] =
          std::make_unique<GpuRank>(std::move(world), place, source, compute, max_tokens, options);
    });
  }
  ~GpuPlace() override {
    // All ranks are destroyed at the same time, as all their functions are called.
    try {
      on_all([this](GpuRank&, int r) { ranks_[static_cast<std::size_t>(r)].reset(); });
    } catch (...) {
      // No later measurement depends on these ranks, and a destructor must not throw.
    }
  }
  GpuPlace(const GpuPlace&) = delete;
  GpuPlace& operator=(const GpuPlace&) = delete;

  void set_input(const MatrixView& activations, const std::vector<std::int32_t>& ids,
                 const std::vector<float>& weights) override {
    const std::size_t k = ids.empty() ? 0 : ids.size() / static_cast<std::size_t>(activations.rows);
    std::int64_t most = 0;
    for (int r = 0; r < num_ranks(); ++r) {
      most = std::max(most, run::share_of(activations.rows, r, num_ranks()).count);
    }
    on_all([&](GpuRank& rank, int r) {
      const Share share = run::share_of(activations.rows, r, num_ranks());
      const auto first = static_cast<std::size_t>(share.first) * k;
      const auto count = static_cast<std::size_t>(share.count) * k;
      MatrixView mine = activations;
      mine.data = activations.row(share.first);
      mine.rows = share.count;
      rank.set_input(mine, std::span(ids).subspan(first, count),
                     std::span(weights).subspan(first, count), most);
    });
  }
  void poison_output() override {
    on_all([](GpuRank& rank, int) { rank.poison_output(); });
  }
  void run_once() override {
    on_all([](GpuRank& rank, int) { rank.run_once(); });
  }
  void set_rotation(const Rotation& rotation) override {
    on_all([&](GpuRank& rank, int) { rank.set_rotation(rotation); });
  }
  std::vector<double> time(int repeat) override {
    return slowest(repeat, [&](GpuRank& rank) { return rank.time(repeat); });
  }
  std::vector<double> time_graph(int repeat) override {
    return slowest(repeat, [&](GpuRank& rank) { return rank.time_graph(repeat); });
  }
  bool has_graphs() const override { return true; }
  int graph_nodes() const override { return ranks_.front()->graph_nodes(); }
  Stats stats() override {
    std::vector<ForwardStats> all(ranks_.size());
    on_all([&](GpuRank& rank, int r) { all[static_cast<std::size_t>(r)] = rank.stats(); });
    Stats stats{all.front().tokens_per_expert, 0};
    for (const ForwardStats& of_rank : all) {
      stats.most_sent = std::max(
          stats.most_sent, of_rank.dispatch_bytes + of_rank.combine_bytes + of_rank.signal_bytes);
    }
    return stats;
  }
  RunResult download() override {
    std::vector<RunResult> all(ranks_.size());
    on_all([&](GpuRank& rank, int r) { all[static_cast<std::size_t>(r)] = rank.download(); });
    RunResult result = std::move(all.front());
    for (std::size_t r = 1; r < all.size(); ++r) {
      append(result.output, all[r].output, 0, all[r].output.size());
      append(result.topk_ids, all[r].topk_ids, 0, all[r].topk_ids.size());
      append(result.topk_weights, all[r].topk_weights, 0, all[r].topk_weights.size());
    }
    return result;
  }

 private:
  int num_ranks() const { return static_cast<int>(ranks_.size()); }

  void on_all(const std::function<void(GpuRank&, int)>& body) {
    run::on_every_rank(num_ranks(), [&](int r) {
      std::unique_ptr<GpuRank>& rank = ranks_[static_cast<std::size_t>(r)];
      if (rank == nullptr) return;  // it failed before
      gpu::set_device(rank->device());
      try {
        body(*rank, r);
      } catch (...) {
        rank.reset();  // it leaves its world, so that the others need not wait for it
        throw;
      }
    });
  }

  // Returns the slowest rank's time of each repetition.
  std::vector<double> slowest(int repeat,
                              const std::function<std::vector<double>(GpuRank&)>& time) {
    std::vector<double> times(static_cast<std::size_t>(repeat));
    std::mutex mutex;
    on_all([&](GpuRank& rank, int) {
      const std::vector<double> mine = time(rank);
      const std::lock_guard lock(mutex);
      for (std::size_t i = 0; i < times.size(); ++i) times[i] = std::max(times[i], mine[i]);
    });
    return times;
  }

  std::vector<std::unique_ptr<GpuRank>> ranks_;
};

// Some tokens of a batch, evenly spread, with their results.
struct Sample {
  Batch batch;
  RunResult result;
};

Sample sample_of(const MatrixView& x, const RunResult& all, std::size_t k, bool given_routing,
                 std::int64_t most) {
  const std::int64_t count = std::min(x.rows, most);
  const std::size_t x_bytes = static_cast<std::size_t>(x.cols) * size_of(x.dtype);
  const std::size_t y_bytes = static_cast<std::size_t>(x.cols) * size_of(all.output_dtype);
  Sample sample;
  sample.result.backend = all.backend;
  sample.result.output_dtype = all.output_dtype;
  const auto rows = std::make_shared<std::vector<std::byte>>();
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t token = count == 1 ? 0 : i * (x.rows - 1) / (count - 1);
    const auto t = static_cast<std::size_t>(token);
    const auto* row = static_cast<const std::byte*>(x.row(token));
    rows->insert(rows->end(), row, row + x_bytes);
    append(sample.result.output, all.output, t * y_bytes, y_bytes);
    append(sample.result.topk_ids, all.topk_ids, t * k, k);
    append(sample.result.topk_weights, all.topk_weights, t * k, k);
  }
  sample.batch.activations = {rows->data(), x.dtype, count, x.cols, x.cols};
  sample.batch.owner = rows;
  if (given_routing) {
    sample.batch.topk_ids = sample.result.topk_ids;
    sample.batch.topk_weights = sample.result.topk_weights;
  }
  return sample;
}

void add_problem(Measured& measured, const std::string& problem) {
  measured.problem += (measured.problem.empty() ? "" : "; ") + problem;
}

void add_verification(Measured& measured, const Source& source, const Sample& sample,
                      DType compute) {
  const run::Verification v = run::verify(source, sample.batch, sample.result, compute);
  measured.error = v.error;
  measured.error_bound = v.bound;
  if (!v.error_ok()) {
    add_problem(measured,
                fmt::format("its error is {:.2e}, and the bound {:.2e}", v.error, v.bound));
  }
  if (v.misrouted_tokens > 0) {
    add_problem(measured, fmt::format("{} of {} routed wrongly", v.misrouted_tokens,
                                      plural(sample.batch.tokens(), "token")));
  }
}

}  // namespace

LayerBench::LayerBench(const Source& source, DType compute, std::int64_t max_tokens,
                       const MeasureOptions& options)
    : source_(source), compute_(compute), options_(options) {
  if (options.backend == Backend::kCuda) {
    place_ = std::make_unique<GpuPlace>(source, compute, max_tokens, options);
  } else {
    place_ = std::make_unique<HostPlace>(source, compute, max_tokens);
  }
}
LayerBench::~LayerBench() = default;

Measured LayerBench::measure(const MatrixView& activations) {
  Measured measured;
  place_->set_input(activations, {}, {});
  if (options_.given_routing) {
    place_->run_once();
    RunResult gated = place_->download();
    place_->set_input(activations, gated.topk_ids, gated.topk_weights);
    measured.topk_ids = std::move(gated.topk_ids);
  }
  place_->poison_output();
  for (int i = 0; i < kTimingWarmUps; ++i) place_->run_once();

  const Place::Stats stats = place_->stats();
  measured.tokens_per_expert = stats.tokens_per_expert;
  measured.load = heaviest_load(source_.spec, source_.weights, stats.tokens_per_expert,
                                activations.rows / options_.ranks, options_.ranks);
  measured.load.nvlink_bytes = stats.most_sent;
  const RunResult first = place_->download();
  if (!all_finite(first.output, first.output_dtype))
    add_problem(measured, "its output has values that are not finite");

  CallTimes times = time_calls(*place_, options_, measured.load.touched_bytes, first.output);
  measured.rotation = times.rotation;
  measured.graph_us = std::move(times.graph_us);
  measured.no_graph_us = std::move(times.no_graph_us);
  if (!measured.graph_us.empty()) measured.graph_nodes = place_->graph_nodes();
  for (const std::string& problem : times.problems) add_problem(measured, problem);
  place_->stats();  // throws if a timed pass failed
  if (options_.verify) {
    add_verification(
        measured, source_,
        sample_of(activations, first, static_cast<std::size_t>(source_.spec.top_k),
                  options_.given_routing, std::max<std::int64_t>(kVerifiedTokens, options_.ranks)),
        compute_);
  }
  return measured;
}

DType default_compute(DType weights) {
  if (is_four_bit(weights)) return DType::kBF16;
  return weights == DType::kF16 ? DType::kF32 : weights;
}

DType activation_dtype(DType compute) { return compute == DType::kF8E4M3 ? DType::kBF16 : compute; }

}  // namespace switchyard::bench
