#include "bench/grouped.h"

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "base/names.h"
#include "base/plural.h"
#include "bench/gpu_timing.h"
#include "bench/grouped_operands.h"
#include "bench/load.h"
#include "bench/wall_clock.h"
#include "gpu/device.h"
#include "machine/description.h"
#include "switchyard/error.h"
#include "switchyard/grouped_gemm.h"
#include "switchyard/routing.h"
#include "switchyard/tuner.h"

namespace switchyard::bench {
namespace {

GroupedGemmSpec spec_of(const GroupedOperands& operands, bool swiglu) {
  GroupedGemmSpec spec{.num_experts = operands.experts, .n = operands.n, .k = operands.k};
  if (swiglu) spec.epilogue = Activation{ActivationKind::kSilu, true};
  return spec;
}

// One GroupedGemm with its operands in place.
class Place : public TimedPlace {
 public:
  // Sets the rows of the calls that follow.
  virtual void set_ends(const std::vector<std::int32_t>& ends) = 0;
};

std::size_t output_bytes(const GroupedOperands& operands, const GroupedGemmSpec& spec,
                         std::int64_t rows) {
  return static_cast<std::size_t>(rows) * static_cast<std::size_t>(spec.output_columns()) *
         size_of(operands.output_dtype());
}

GroupedGemm make_gemm(const GroupedOperands& operands, const GroupedOperands::Addresses& at,
                      bool swiglu, Backend backend) {
  const GroupedGemmWeights weights{.matrices = operands.matrices(at)};
  const GroupedGemmOptions options{.backend = backend, .max_rows = static_cast<int>(operands.rows)};
  return {spec_of(operands, swiglu), weights, options};
}

class HostPlace : public Place {
 public:
  HostPlace(const GroupedOperands& operands, bool swiglu)
      : operands_(operands), gemm_(make_gemm(operands, operands.here(), swiglu, Backend::kCpu)) {}

  void set_ends(const std::vector<std::int32_t>& ends) override {
    ends_ = ends;
    output_.resize(output_bytes(operands_, gemm_.spec(), ends.back()));
  }
  void poison_output() override { std::fill(output_.begin(), output_.end(), std::byte{kPoison}); }
  void run_once() override {
    const GroupedInput input{.x = operands_.first_rows(operands_.here(), ends_.back()),
                             .ends = ends_};
    gemm_.run(input, {.data = output_.data(), .dtype = operands_.output_dtype()});
  }
  std::vector<double> time(int repeat) override {
    return wall_times(repeat, [&] { run_once(); });
  }
  std::vector<std::byte> output() override { return output_; }

 private:
  const GroupedOperands& operands_;
  GroupedGemm gemm_;
  std::vector<std::int32_t> ends_;
  std::vector<std::byte> output_;
};

gpu::DeviceBuffer uploaded(const void* data, std::size_t bytes) {
  gpu::DeviceBuffer buffer(bytes);
  if (bytes > 0) buffer.upload(data, bytes);
  return buffer;
}

const float* floats(const gpu::DeviceBuffer& buffer) {
  return reinterpret_cast<const float*>(buffer.data());
}

// One copy of the weights on the current device, which its operator uses where they are.
struct GpuCopy {
  gpu::DeviceBuffer weights, scales;
  GroupedGemm gemm;

  GpuCopy(const GroupedOperands& operands, bool swiglu)
      : weights(uploaded(operands.weights.data(), operands.weights.size())),
        scales(uploaded(operands.weight_scales.data(), operands.weight_scales.size())),
        gemm(make_gemm(operands, {weights.data(), nullptr, scales.data(), nullptr}, swiglu,
                       Backend::kCuda)) {}
};

class GpuPlace : public Place {
 public:
  GpuPlace(const GroupedOperands& operands, bool swiglu)
      : operands_(operands),
        swiglu_(swiglu),
        x_(uploaded(operands.x.data(), operands.x.size())),
        x_scales_(uploaded(operands.x_scales.data(), operands.x_scales.size() * sizeof(float))),
        ends_(static_cast<std::size_t>(operands.experts) * sizeof(std::int32_t)),
        output_(output_bytes(operands, spec_of(operands, swiglu), operands.rows)) {
    add_copies(1);
    gpu::flush_l2(stream_);  // the first one allocates
    stream_.synchronize();
  }

  void set_ends(const std::vector<std::int32_t>& ends) override {
    stream_.synchronize();
    graph_.reset();
    ends_.upload(ends.data(), ends.size() * sizeof(std::int32_t));
    rows_ = ends.back();
  }
  void poison_output() override { output_.fill(kPoison, stream_); }
  void run_once() override {
    run(0);
    stream_.synchronize();
  }
  void set_rotation(const Rotation& rotation) override {
    graph_.reset();
    rotation_ = rotation;
    add_copies(static_cast<std::size_t>(rotation.copies));
  }
  std::vector<double> time(int repeat) override {
    return time_on_stream(stream_, rotation_, repeat, [&] { run_calls(); });
  }
  std::vector<double> time_graph(int repeat) override {
    if (!graph_) graph_ = gpu::Graph::capture(stream_, [&] { run_calls(); });
    return time_on_stream(stream_, rotation_, repeat, [&] { graph_->launch(stream_); });
  }
  bool has_graphs() const override { return true; }
  std::vector<std::byte> output() override {
    stream_.synchronize();
    std::vector<std::byte> output(output_bytes(operands_, spec_of(operands_, swiglu_), rows_));
    output_.download(output.data(), output.size());
    return output;
  }

 private:
  void add_copies(std::size_t count) {
    while (copies_.size() < count) {
      copies_.push_back(std::make_unique<GpuCopy>(operands_, swiglu_));
    }
  }
  void run(std::size_t copy) {
    GroupedInput input;
    input.x = operands_.first_rows({nullptr, x_.data(), nullptr, floats(x_scales_)}, rows_);
    input.ends = {ends_.data(), DType::kI32, static_cast<std::size_t>(operands_.experts)};
    input.stream = stream_.handle();
    const GroupedOutput output{
        .data = output_.data(), .dtype = operands_.output_dtype(), .rows = rows_};
    copies_[copy]->gemm.run(input, output);
  }
  void run_calls() {
    for (int i = 0; i < rotation_.passes; ++i) run(static_cast<std::size_t>(i % rotation_.copies));
  }
  const GroupedOperands& operands_;
  bool swiglu_;
  gpu::Stream stream_;
  gpu::DeviceBuffer x_, x_scales_, ends_, output_;
  std::vector<std::unique_ptr<GpuCopy>> copies_;
  std::int64_t rows_ = 0;
  Rotation rotation_;
  std::optional<gpu::Graph> graph_;
};

std::unique_ptr<Place> make_place(const GroupedOperands& operands, bool swiglu, Backend backend) {
  if (backend == Backend::kCuda) return std::make_unique<GpuPlace>(operands, swiglu);
  return std::make_unique<HostPlace>(operands, swiglu);
}

struct Timed : CallTimes {
  GroupedAccuracy accuracy;
  std::string problem;  // what is wrong with the results; empty if nothing was found
};

// Returns what is wrong with the first result, or an empty text. Nothing wrong is timed.
std::string problem_of(const std::vector<std::byte>& output, DType dtype,
                       const GroupedAccuracy& accuracy) {
  if (!all_finite(output, dtype)) return "its output has values that are not finite";
  if (accuracy.error <= accuracy.bound) return {};
  return fmt::format("its error is {:.2e}, and the bound {:.2e}", accuracy.error, accuracy.bound);
}

Timed time_point(Place& place, const GroupedOperands& operands, const GroupedPoint& point,
                 const std::vector<std::int32_t>& ends, std::uint64_t touched_bytes,
                 const GroupedOptions& options) {
  place.set_ends(ends);
  place.set_rotation({});
  place.poison_output();
  for (int i = 0; i < kTimingWarmUps; ++i) place.run_once();
  const std::vector<std::byte> first = place.output();
  Timed timed;
  timed.accuracy = check_rows(operands, ends, point.swiglu, first.data());
  timed.problem = problem_of(first, operands.output_dtype(), timed.accuracy);
  if (!timed.problem.empty()) return timed;
  static_cast<CallTimes&>(timed) = time_calls(place, options, touched_bytes, first);
  if (!timed.problems.empty()) timed.problem = timed.problems.front();
  return timed;
}

machine::Load load_of(const GroupedOperands& operands, std::span<const std::int32_t> ends) {
  machine::Load load{.flops = 2.0 * ends.back() * operands.n * operands.k};
  for (std::size_t e = 0; e < ends.size(); ++e) {
    if (ends[e] > (e == 0 ? 0 : ends[e - 1])) load.touched_bytes += operands.matrix_bytes();
  }
  return load;
}

bool same_matrices(const GroupedPoint& a, const GroupedPoint& b) {
  return a.experts == b.experts && a.n == b.n && a.k == b.k;
}

std::string name_of(const GroupedPoint& point) {
  return fmt::format("{}, N {}, K {}, {} each{}", plural(point.experts, "expert"), point.n, point.k,
                     plural(point.rows, "row"), point.swiglu ? ", SwiGLU" : "");
}

// As GroupedGemmOptions::compute that is empty: what the operator computes in by its weights.
DType compute_of(DType weights, Backend backend) {
  if (is_four_bit(weights)) return DType::kBF16;
  if (weights == DType::kF16) return backend == Backend::kCuda ? DType::kF16 : DType::kF32;
  return weights == DType::kF32 && backend == Backend::kCuda ? DType::kBF16 : weights;
}

}  // namespace

std::vector<GroupedPoint> grouped_points_of(const GroupedShape& shape) {
  std::vector<GroupedPoint> points;
  for (const std::int64_t rows : shape.rows) {
    points.push_back({shape.experts, shape.n, shape.k, rows, shape.swiglu, {}});
  }
  return points;
}

std::vector<GroupedPoint> grouped_suite() {
  // DeepSeek-V3's experts on one of eight ranks (both products), OLMoE's and Qwen3-30B-A3B's gate
  // and up, Mixtral 8x7B's, and the few experts with many rows that DeepGEMM publishes.
  static const GroupedShape shapes[] = {
      {32, 4096, 7168, {4, 16, 64, 128, 512, 2048}, false},
      {32, 4096, 7168, {4, 128, 2048}, true},
      {32, 7168, 2048, {4, 16, 64, 128, 512, 2048}, false},
      {64, 2048, 2048, {1, 8, 64, 512}, false},
      {64, 2048, 2048, {8, 512}, true},
      {128, 1536, 2048, {1, 8, 64, 512}, false},
      {128, 1536, 2048, {8, 512}, true},
      {8, 28672, 4096, {4, 64, 512, 2048}, false},
      {8, 28672, 4096, {64, 2048}, true},
      {4, 4096, 7168, {256, 8192}, false},
      {4, 7168, 2048, {256, 8192}, false},
  };
  std::vector<GroupedPoint> points;
  for (const GroupedShape& shape : shapes) {
    const std::vector<GroupedPoint> more = grouped_points_of(shape);
    points.insert(points.end(), more.begin(), more.end());
  }
  return points;
}

std::vector<GroupedPoint> with_balancedness(const std::vector<GroupedPoint>& points,
                                            const std::vector<double>& betas) {
  if (betas.empty()) return points;
  std::vector<GroupedPoint> all;
  for (GroupedPoint point : points) {
    for (const double beta : betas) {
      point.beta = beta;
      all.push_back(point);
    }
  }
  return all;
}

std::vector<std::int32_t> ends_of(const GroupedPoint& point, std::uint64_t seed) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(point.experts), point.rows);
  if (point.beta) {
    const int top_k = std::clamp(point.experts / 4, 1, 8);
    const std::int64_t tokens = std::max<std::int64_t>(point.experts * point.rows / top_k, 1);
    counts = tuner::draw_counts(tuner::Generator::kDistinct, static_cast<int>(tokens),
                                point.experts, top_k, *point.beta, seed);
  }
  std::vector<std::int32_t> ends;
  std::int64_t sum = 0;
  for (const std::int64_t count : counts) ends.push_back(static_cast<std::int32_t>(sum += count));
  return ends;
}

GroupedSession::GroupedSession(GroupedOptions options, GroupedObserver& observer)
    : options_(std::move(options)),
      observer_(observer),
      machine_(machine::describe_machine(options_.backend, 1)) {
  if (options_.backend == Backend::kCpu) return;
  floor_ = choose_floor(gpu::device_info(gpu::current_device()).name, gpu::device_count(), 1,
                        compute_of(options_.dtype, options_.backend), options_.facts);
}

std::vector<results::GroupedRow> GroupedSession::run(const std::vector<GroupedPoint>& points) {
  std::vector<results::GroupedRow> rows;
  std::size_t done = 0;
  const auto row_of = [&](const GroupedPoint& point, const GroupedOperands& operands,
                          const std::vector<std::int32_t>& ends, const Timed& timed) {
    const machine::Load load = load_of(operands, ends);
    const bool graph = !timed.graph_us.empty(), no_graph = !timed.no_graph_us.empty();
    const std::vector<double>& times = graph ? timed.graph_us : timed.no_graph_us;
    std::vector<std::int64_t> counts;
    for (std::size_t e = 0; e < ends.size(); ++e) {
      counts.push_back(ends[e] - (e == 0 ? 0 : ends[e - 1]));
    }
    auto row = row_of_run<results::GroupedRow>("grouped", machine_, options_);
    row.implementation = "switchyard";
    row.experts = point.experts;
    row.n = point.n;
    row.k = point.k;
    row.rows_per_expert = point.rows;
    row.activation = point.swiglu ? "swiglu" : "none";
    row.dtype = short_name(options_.dtype);
    row.compute = short_name(compute_of(options_.dtype, options_.backend));
    row.beta = point.beta;
    if (point.beta) row.beta_reached = balancedness(counts);
    row.rows = ends.back();
    row.experts_hit = std::count_if(counts.begin(), counts.end(), [](auto c) { return c > 0; });
    set_times(row, times);
    row.touched_bytes = static_cast<double>(load.touched_bytes);
    row.flops = load.flops;
    if (floor_.facts) {
      row.floor_us =
          machine::floor_us(*floor_.facts, load, compute_of(options_.dtype, options_.backend), 1);
    }
    if (no_graph) row.median_us_no_graph = percentile(timed.no_graph_us, 0.5);
    row.rotation_copies = timed.rotation.copies;
    row.rotation_passes = timed.rotation.passes;
    row.error = timed.accuracy.error;
    row.error_bound = timed.accuracy.bound;
    row.times_us = times;
    if (graph && no_graph) row.times_us_no_graph = timed.no_graph_us;
    return row;
  };
  const auto measure = [&](const GroupedOperands& operands,
                           std::span<const GroupedPoint> of_place) {
    const std::unique_ptr<Place> place =
        make_place(operands, of_place.front().swiglu, options_.backend);
    for (const GroupedPoint& point : of_place) {
      observer_.measuring(done++, points.size());
      const std::vector<std::int32_t> ends = ends_of(point, options_.seed);
      const Timed timed = time_point(*place, operands, point, ends,
                                     load_of(operands, ends).touched_bytes, options_);
      if (!timed.problem.empty()) observer_.failed(name_of(point), timed.problem);
      if (timed.graph_us.empty() && timed.no_graph_us.empty()) continue;
      rows.push_back(row_of(point, operands, ends, timed));
      observer_.measured(rows.back());
    }
  };

  for (auto first = points.begin(); first != points.end();) {
    const auto last = std::find_if_not(first, points.end(), [&](const GroupedPoint& point) {
      return same_matrices(point, *first);
    });
    std::int64_t most = 0;
    for (auto point = first; point != last; ++point) {
      most = std::max(most, point->experts * point->rows);
    }
    try {
      const GroupedOperands operands(first->experts, first->n, first->k,
                                     std::max<std::int64_t>(most, 8), options_.dtype,
                                     options_.seed);
      while (first != last) {
        const auto other = std::find_if_not(
            first, last, [&](const GroupedPoint& point) { return point.swiglu == first->swiglu; });
        measure(operands, std::span(&*first, static_cast<std::size_t>(other - first)));
        first = other;
      }
    } catch (const Error& error) {
      // Other matrices may still be measured.
      observer_.failed_by(name_of(*first), error);
    }
    first = last;
    observer_.keep(rows);
  }
  return rows;
}

}  // namespace switchyard::bench
