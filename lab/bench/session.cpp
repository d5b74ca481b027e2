#include "bench/session.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include "base/names.h"
#include "base/plural.h"
#include "base/whole_file.h"
#include "bench/load.h"
#include "bench/skew.h"
#include "gpu/device.h"
#include "machine/description.h"
#include "models/generate.h"
#include "run/source.h"
#include "switchyard/error.h"
#include "switchyard/routing.h"

namespace switchyard::bench {
namespace {

// Draws the weights of all experts once, on all processors. No two experts are equal. Each rank
// copies its own experts from here.
run::Source make_source(const BenchLayer& layer, DType dtype, std::uint64_t seed,
                        LayerObserver& observer) {
  run::Source source{.name = layer.model, .spec = layer.spec, .dtype = dtype};
  GenerateOptions generation;
  generation.progress = [&](std::uint64_t done, std::uint64_t total) {
    observer.generating(layer.model, done, total);
  };
  source.weights = generate_weights(layer.spec, dtype, layer_seed(seed, 0), generation);
  return source;
}

FloorChoice floor_of(const SessionOptions& o) {
  if (o.measure.backend == Backend::kCpu) return {};
  return choose_floor(gpu::device_info(gpu::current_device()).name, gpu::device_count(),
                      o.measure.ranks, o.plan.compute, o.facts);
}

// The experts of each token of all ranks in turn, int32 [tokens, top_k].
void write_routing(const std::filesystem::path& folder, const results::Row& row,
                   const Measured& measured) {
  std::string name =
      fmt::format("{}-{}-{}x{}", row.model, row.dtype, row.ranks, row.tokens_per_rank);
  if (row.beta != 1) name += fmt::format("-beta{}", row.beta);
  const auto* const ids = reinterpret_cast<const char*>(measured.topk_ids.data());
  write_whole(folder / (name + ".i32"),
              std::string_view(ids, measured.topk_ids.size() * sizeof(std::int32_t)));
}

}  // namespace

Session::Session(SessionOptions options, LayerObserver& observer)
    : options_(std::move(options)),
      observer_(observer),
      machine_(machine::describe_machine(options_.measure.backend, options_.measure.ranks)),
      floor_(floor_of(options_)) {
  if (options_.torch) job_ = std::make_unique<TorchJob>();
}
Session::~Session() = default;

std::vector<results::Row> Session::run() {
  for (const BenchLayer& layer : options_.plan.layers) {
    try {
      measure_layer(layer);
    } catch (const Error& error) {
      // The session goes on: a failed pass makes only its own layer unusable.
      observer_.failed_by(layer.model, error);
    }
    observer_.keep(rows_);
  }
  if (job_ && !job_->empty()) add_rivals();
  return rows_;
}

void Session::measure_layer(const BenchLayer& layer) {
  const BenchPlan& plan = options_.plan;
  run::Source source = make_source(layer, plan.dtype, options_.seed, observer_);
  const std::int64_t most = *std::max_element(plan.tokens.begin(), plan.tokens.end());
  const int ranks = options_.measure.ranks;
  // Every rank has tokens of its own, so the gate is made for `most` tokens of each.
  SkewedGate gate(source.spec, source.weights, most * ranks, activation_dtype(plan.compute),
                  options_.seed);
  LayerBench bench(source, plan.compute, most, options_.measure);
  if (job_) job_->add_layer(layer, source.weights, gate.activations(most, 0), plan.compute);
  const std::uint64_t points = plan.layers.size() * plan.betas.size() * plan.tokens.size();
  for (const double beta : plan.betas) {
    for (const std::int64_t tokens : plan.tokens) {
      observer_.measuring(rows_.size(), points);
      const float skew = gate.skew_for(tokens * ranks, beta);
      const Measured measured = bench.measure(gate.activations(tokens * ranks, skew));
      rows_.push_back(row_of(layer, tokens, beta, measured));
      if (!options_.routing.empty()) write_routing(options_.routing, rows_.back(), measured);
      observer_.measured(rows_.back());
      if (!measured.problem.empty()) {
        observer_.failed(fmt::format("{}, {}, beta {}", layer.model, plural(tokens, "token"), beta),
                         measured.problem);
      }
      if (job_) {
        job_->add_point(rows_.size() - 1, tokens, beta, skew,
                        static_cast<int>(rows_.back().repeats), measured.rotation);
      }
    }
  }
}

results::Row Session::row_of(const BenchLayer& layer, std::int64_t tokens, double beta,
                             const Measured& measured) const {
  const BenchPlan& plan = options_.plan;
  const bool graph = !measured.graph_us.empty();
  const bool no_graph = !measured.no_graph_us.empty();
  const std::vector<double>& times = graph ? measured.graph_us : measured.no_graph_us;
  auto row = row_of_run<results::Row>(plan.suite.c_str(), machine_, options_);
  set_layer(row, layer.model, layer.spec, plan.dtype, plan.compute);
  if (is_four_bit(plan.dtype)) {
    row.weights = row.dtype;
    row.tokens_in = row.compute;
  }
  row.routing = options_.measure.given_routing ? "given" : "gate";
  row.ranks = options_.measure.ranks;
  row.tokens_per_rank = tokens;
  row.beta = beta;
  row.beta_reached = balancedness(measured.tokens_per_expert);
  set_times(row, times);
  row.touched_bytes = static_cast<double>(measured.load.touched_bytes);
  row.flops = measured.load.flops;
  row.nvlink_bytes = static_cast<double>(measured.load.nvlink_bytes);
  if (floor_.facts) {
    row.floor_us =
        machine::floor_us(*floor_.facts, measured.load, plan.compute, options_.measure.ranks);
  }
  if (no_graph) row.median_us_no_graph = percentile(measured.no_graph_us, 0.5);
  row.experts_hit =
      std::count_if(measured.tokens_per_expert.begin(), measured.tokens_per_expert.end(),
                    [](std::int64_t count) { return count > 0; });
  row.expert_load = load_quantiles(measured.tokens_per_expert);
  row.rotation_copies = measured.rotation.copies;
  row.rotation_passes = measured.rotation.passes;
  row.graph_nodes = measured.graph_nodes;
  row.error = measured.error;
  row.error_bound = measured.error_bound;
  if (plan.checked_with_gate) row.gate = !options_.measure.given_routing;
  row.times_us = times;
  if (graph && no_graph) row.times_us_no_graph = measured.no_graph_us;
  return row;
}

// Reports a failure of the rival instead of throwing it, so that the measured rows are still kept
// and summed up.
std::map<std::size_t, TimedRival> Session::run_rival() {
  try {
    return job_->run(*options_.torch, [this](const std::string& text) { observer_.note(text); });
  } catch (const Error& error) {
    observer_.failed("the rival", error.what());
    return {};
  }
}

void Session::add_rivals() {
  observer_.rival_begins();
  const std::map<std::size_t, TimedRival> rivals = run_rival();
  if (rivals.size() < rows_.size()) {
    observer_.note(fmt::format("no time of the rival at {} of {}", rows_.size() - rivals.size(),
                               plural(rows_.size(), "point")));
  }
  for (const auto& [index, timed] : rivals) {
    results::Row& row = rows_.at(index);
    row.rival = timed.rival;
    // The rival has the same activations and the same router, so only a near tie may be decided
    // differently.
    if (std::abs(timed.experts_hit - *row.experts_hit) > 1) {
      observer_.failed(fmt::format("{}, {}", row.model, plural(row.tokens_per_rank, "token")),
                       fmt::format("experts hit by the rival's gate: {}, by ours: {}",
                                   timed.experts_hit, *row.experts_hit));
    }
  }
  observer_.keep(rows_);
}

}  // namespace switchyard::bench
