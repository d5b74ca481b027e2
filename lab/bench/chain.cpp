#include "bench/chain.h"

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "base/names.h"
#include "base/plural.h"
#include "bench/activations.h"
#include "bench/gpu_timing.h"
#include "bench/load.h"
#include "bench/measure.h"
#include "bench/memory.h"
#include "bench/small_kernel.h"
#include "bench/suite.h"
#include "gpu/device.h"
#include "machine/description.h"
#include "models/generate.h"
#include "run/verify.h"
#include "switchyard/error.h"
#include "switchyard/layer.h"
#include "switchyard/routing.h"
#include "switchyard/world.h"

namespace switchyard::bench {
namespace {

using results::ChainRow;

constexpr std::int64_t kVerifiedTokens = 4;

BenchLayer layer_of(const ChainModel& model) {
  return bench_layer(model.name, {.num_experts = model.experts});
}

// Copies of a layer on the current device, made once for all numbers of tokens.
class Copies {
 public:
  Copies(const run::Source& source, DType compute, std::int64_t max_tokens)
      : world_(World::single()),
        source_(source),
        options_{.backend = Backend::kCuda,
                 .max_tokens = static_cast<int>(max_tokens),
                 .compute = compute} {
    options_.cuda.device = gpu::current_device();
  }
  void reach(std::size_t count) {
    while (layers_.size() < count) {
      layers_.push_back(
          std::make_unique<MoeLayer>(world_, source_.spec, source_.weights, options_));
    }
  }
  const run::Source& source() const { return source_; }
  DType compute() const { return *options_.compute; }
  // Layer i of a chain over `copies` of them.
  MoeLayer& layer(std::size_t i, int copies) {
    return *layers_[i % static_cast<std::size_t>(copies)];
  }

 private:
  World world_;
  const run::Source& source_;
  LayerOptions options_;
  std::vector<std::unique_ptr<MoeLayer>> layers_;
};

// The tokens of one point on their way through the chain. Each layer has a routing of its own, so
// that layers which share a copy read other experts where tokens are few. The residual's first
// values and the zeros before the first layer stay as they are, so every chain has the same
// results.
class Chain {
 public:
  Chain(Copies& copies, std::int64_t tokens, int layers, std::uint64_t seed)
      : copies_(copies),
        tokens_(tokens),
        count_(static_cast<std::size_t>(layers)),
        first_(Backend::kCuda, random_activations(DType::kBF16, tokens, hidden(), seed)),
        zeros_(Backend::kCuda, std::vector<std::byte>(bytes())),
        sum_(Backend::kCuda, bytes()),
        normal_(Backend::kCuda, bytes()),
        output_(Backend::kCuda, bytes()) {
    const LayerSpec& spec = copies.source().spec;
    for (std::size_t i = 0; i < count_; ++i) {
      routing_.push_back(
          synthetic_routing(static_cast<int>(tokens), spec.num_experts, spec.top_k, 1.0, seed + i));
      ids_.emplace_back(Backend::kCuda, routing_.back().ids);
      weights_.emplace_back(Backend::kCuda, routing_.back().weights);
    }
    rotation_ = choose_rotation(touched_bytes());
    rotation_.passes = layers;
    copies.reach(static_cast<std::size_t>(rotation_.copies));
    gpu::flush_l2(stream_);  // the first one allocates
    stream_.synchronize();
  }

  const Rotation& rotation() const { return rotation_; }

  // Runs the chain with the host waiting for each kernel.
  void run_apart() {
    enqueue(false, [this] { stream_.synchronize(); });
  }
  // Captures the chain and replays it, the first time without timing it. Returns the microseconds
  // per layer.
  std::vector<double> time(bool early, int repeat) {
    poison();
    gpu::Graph graph = gpu::Graph::capture(stream_, [&] { enqueue(early, [] {}); });
    graph.launch(stream_);
    return time_on_stream(stream_, rotation_, repeat, [&] { graph.launch(stream_); });
  }
  // Returns what the last layer of the last chain gave. Throws the error of a pass that failed.
  std::vector<std::byte> output() {
    stream_.synchronize();
    for (std::size_t i = 0; i < static_cast<std::size_t>(rotation_.copies); ++i) {
      copies_.layer(i, rotation_.copies).check();
    }
    return output_.read<std::byte>();
  }
  // Compares some tokens of the last layer with fp64.
  run::Verification verify(const std::vector<std::byte>& output) const {
    const std::int64_t count = std::min(tokens_, kVerifiedTokens);
    const auto slots =
        static_cast<std::size_t>(count) * static_cast<std::size_t>(copies_.source().spec.top_k);
    const std::size_t kept =
        bytes() / static_cast<std::size_t>(tokens_) * static_cast<std::size_t>(count);
    const std::vector<std::byte> x = normal_.read<std::byte>();
    const SyntheticRouting& routing = routing_.back();
    run::Batch batch;
    batch.activations = {x.data(), DType::kBF16, count, hidden(), hidden()};
    batch.topk_ids.assign(routing.ids.begin(),
                          routing.ids.begin() + static_cast<std::ptrdiff_t>(slots));
    batch.topk_weights.assign(routing.weights.begin(),
                              routing.weights.begin() + static_cast<std::ptrdiff_t>(slots));
    run::RunResult result{.backend = Backend::kCuda, .output_dtype = DType::kBF16};
    result.output.assign(output.begin(), output.begin() + static_cast<std::ptrdiff_t>(kept));
    result.topk_ids = batch.topk_ids;
    result.topk_weights = batch.topk_weights;
    return run::verify(copies_.source(), batch, result, copies_.compute());
  }

 private:
  int hidden() const { return copies_.source().spec.hidden; }
  std::size_t bytes() const {
    return static_cast<std::size_t>(tokens_) * static_cast<std::size_t>(hidden()) *
           sizeof(std::uint16_t);
  }
  std::uint64_t touched_bytes() const {
    const run::Source& source = copies_.source();
    std::vector<std::int64_t> rows(static_cast<std::size_t>(source.spec.num_experts));
    for (const std::int32_t e : routing_.front().ids) ++rows[static_cast<std::size_t>(e)];
    return heaviest_load(source.spec, source.weights, rows, tokens_, 1).touched_bytes;
  }
  void poison() {
    for (Memory* const memory : {&sum_, &normal_, &output_}) {
      const std::vector<std::byte> poison(bytes(), std::byte{kPoison});
      gpu::copy_memory(memory->as<std::byte>(), poison.data(), poison.size());
    }
  }
  void enqueue(bool early, const std::function<void()>& after_each) {
    for (std::size_t i = 0; i < count_; ++i) {
      const SmallKernel small{.residual = (i == 0 ? first_ : sum_).as<std::uint16_t>(),
                              .delta = (i == 0 ? zeros_ : output_).as<std::uint16_t>(),
                              .sum = sum_.as<std::uint16_t>(),
                              .normal = normal_.as<std::uint16_t>(),
                              .tokens = tokens_,
                              .hidden = hidden()};
      small.enqueue(stream_, early);
      after_each();
      ForwardInput input;
      input.activations = {normal_.as<std::byte>(), DType::kBF16, tokens_, hidden(), hidden()};
      input.topk_ids = {ids_[i].as<std::int32_t>(), routing_[i].ids.size()};
      input.topk_weights = {weights_[i].as<float>(), routing_[i].weights.size()};
      input.max_tokens_per_rank = static_cast<int>(tokens_);
      input.stream = stream_.handle();
      const ForwardOutput output{.data = output_.as<std::byte>(), .dtype = DType::kBF16};
      copies_.layer(i, rotation_.copies).forward(input, output);
      after_each();
    }
  }

  Copies& copies_;
  std::int64_t tokens_;
  std::size_t count_;
  Memory first_, zeros_, sum_, normal_, output_;
  std::vector<SyntheticRouting> routing_;
  std::vector<Memory> ids_, weights_;
  Rotation rotation_;
  gpu::Stream stream_;
};

// A chain without early launches, and one with them.
struct Timed {
  std::vector<double> us[2];
  std::string problem;  // what is wrong with the results; empty if nothing was found
  run::Verification verification;
};

Timed time_chain(Chain& chain, const ChainOptions& options) {
  Timed timed;
  chain.run_apart();
  const std::vector<std::byte> expected = chain.output();
  timed.verification = chain.verify(expected);
  if (!all_finite(expected, DType::kBF16)) {
    timed.problem = "its output has values that are not finite";
  } else if (!timed.verification.error_ok()) {
    timed.problem = fmt::format("its error is {:.2e}, and the bound {:.2e}",
                                timed.verification.error, timed.verification.bound);
  }
  for (int capture = 0; capture < options.captures && timed.problem.empty(); ++capture) {
    for (const bool early : {false, true}) {
      const std::vector<double> times = chain.time(early, options.repeat);
      timed.us[early].insert(timed.us[early].end(), times.begin(), times.end());
      if (chain.output() == expected) continue;
      timed.problem = fmt::format(
          "its output has other bits {} early launches than with a host "
          "that waits for each kernel",
          early ? "with" : "without");
    }
  }
  return timed;
}

}  // namespace

ChainOptions chain_suite() {
  ChainOptions options;
  // V4-Flash has as many experts as a rank of four: several copies of all 256 are not needed to
  // keep the weights out of the L2 cache, and the host draws each of them.
  options.models = {{"qwen3-30b", DType::kBF16},
                    {"qwen3-30b", DType::kF8E4M3},
                    {"olmoe", DType::kBF16},
                    {"v4-flash-routed", DType::kF8E4M3, 64}};
  options.tokens = {1, 4, 8, 64, 512};
  return options;
}

ChainSession::ChainSession(ChainOptions options, ChainObserver& observer)
    : options_(std::move(options)), observer_(observer) {
  for (const ChainModel& model : options_.models) {
    if (layer_of(model).spec.hidden % 8 == 0) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{} has {} columns, and the small kernel of bench chain takes multiples "
                    "of 8; choose another model",
                    model.name, layer_of(model).spec.hidden));
  }
  if (gpu::device_count() == 0) {
    throw Error(ErrorCode::kUnsupported,
                "bench chain needs a GPU, because it times launches; 'switchyard doctor' tells "
                "what is missing");
  }
  machine_ = machine::describe_machine(Backend::kCuda, 1);
}

void ChainSession::run() {
  for (const ChainModel& model : options_.models) {
    try {
      measure(model);
    } catch (const Error& error) {
      observer_.failed_by(model.name, error);  // other models may still be measured
    }
  }
}

void ChainSession::measure(const ChainModel& model) {
  const BenchLayer layer = layer_of(model);
  const DType compute = default_compute(model.dtype);
  run::Source source{.name = model.name, .spec = layer.spec, .dtype = model.dtype};
  source.weights = generate_weights(layer.spec, model.dtype, layer_seed(options_.seed, 0), {});
  Copies copies(source, compute, *std::max_element(options_.tokens.begin(), options_.tokens.end()));
  for (const std::int64_t tokens : options_.tokens) {
    observer_.measuring(done_++, options_.models.size() * options_.tokens.size());
    Chain chain(copies, tokens, options_.layers, options_.seed + 1);
    const Timed timed = time_chain(chain, options_);
    if (!timed.problem.empty()) {
      observer_.failed(
          fmt::format("{} in {}, {}", model.name, short_name(model.dtype), plural(tokens, "token")),
          timed.problem);
      continue;
    }
    std::vector<ChainRow> rows;
    for (const bool early : {false, true}) {
      auto row = row_of_run<ChainRow>(kChainSuite, machine_, options_);
      set_layer(row, model.name, layer.spec, model.dtype, compute);
      row.tokens = tokens;
      row.layers = options_.layers;
      row.early_launch = early;
      set_times(row, timed.us[early]);
      row.captures = options_.captures;
      row.rotation_copies = chain.rotation().copies;
      row.error = timed.verification.error;
      row.error_bound = timed.verification.bound;
      row.times_us = timed.us[early];
      observer_.measured(row);
      rows.push_back(std::move(row));
    }
    observer_.keep(rows);
  }
}

}  // namespace switchyard::bench
