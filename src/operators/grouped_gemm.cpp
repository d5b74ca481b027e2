// GroupedGemm: whether a problem and a call make sense, and which engine runs them.
#include "switchyard/grouped_gemm.h"

#include <fmt/core.h>

#include <algorithm>
#include <string>

#include "base/limits.h"
#include "base/names.h"
#include "base/origin.h"
#include "base/overlap.h"
#include "base/quantize.h"
#include "cpu/grouped_gemm.h"
#include "gpu/grouped_gemm.h"
#include "layer/compute.h"
#include "model/check_tensor.h"
#include "model/layer_problem.h"
#include "operators/row_layout.h"
#include "protocol/partition.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

constexpr const char* kName = "the operator";

// The limit of layers, low enough that products of sizes fit in 64 bits.
constexpr int kMostColumns = 1 << 23;

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void require_dtype(const char* name, const SlotView& view, DType expected) {
  if (view.empty() || view.dtype() == expected) return;
  throw Error(ErrorCode::kDTypeMismatch,
              fmt::format("{} is {}; use {}", name, to_string(view.dtype()), to_string(expected)));
}

void check_spec(const GroupedGemmSpec& spec) {
  require_within("num_experts", spec.num_experts, 1, kMostGroupedExperts);
  require_within("n", spec.n, 1, kMostColumns);
  require_within("k", spec.k, 1, kMostColumns);
  if (spec.order > GateOrder::kInterleaved) {
    refuse(fmt::format("order is {}; use a named GateOrder", static_cast<int>(spec.order)));
  }
  if (!spec.epilogue) return;
  if (const std::string problem = activation_problem(*spec.epilogue); !problem.empty()) {
    refuse(problem);
  }
  if (spec.epilogue->gated && spec.n % 2 != 0) {
    refuse(fmt::format("n is {}, but half of a gated product is gate and half is up; use an even n",
                       spec.n));
  }
}

std::string form_of(const MatrixView& m) {
  if (is_four_bit(m.dtype)) return four_bit_form(m);
  return m.dtype == DType::kF8E4M3 ? fmt::format("{} with a scale per {} x {}", to_string(m.dtype),
                                                 m.scale_rows, m.scale_cols)
                                   : to_string(m.dtype);
}

void check_weights(const GroupedGemmSpec& spec, const GroupedGemmWeights& weights) {
  const auto num_experts = static_cast<std::size_t>(spec.num_experts);
  if (weights.matrices.size() != num_experts) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("there are {} matrices for {} experts; provide one for each",
                            weights.matrices.size(), spec.num_experts));
  }
  for (std::size_t e = 0; e < num_experts; ++e) {
    const MatrixView& m = weights.matrices[e];
    check_matrix(fmt::format("matrices[{}]", e), m, spec.n, spec.k);
    const std::string form = form_of(m), first = form_of(weights.matrices[0]);
    if (form != first) {
      throw Error(ErrorCode::kDTypeMismatch,
                  fmt::format("matrices[{}] is {} where matrices[0] is {}; all experts must have "
                              "one form, convert them",
                              e, form, first));
    }
  }
  if (weights.biases.empty()) return;
  if (weights.biases.size() != num_experts) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("there are {} biases for {} experts; provide one for each, or none",
                            weights.biases.size(), spec.num_experts));
  }
  for (std::size_t e = 0; e < num_experts; ++e) {
    check_vector(fmt::format("biases[{}]", e), weights.biases[e], spec.n);
  }
}

// A CPU has one schedule.
void require_no_choice(const GroupedSchedule& schedule) {
  const auto require = [](const char* name, const auto& choice) {
    if (!choice) return;
    refuse(
        fmt::format("schedule.{} is {}, but the backend is cpu, which has one schedule; use the "
                    "backend cuda, or leave it to the rule",
                    name, *choice));
  };
  require("tile_rows", schedule.tile_rows);
  require("stages", schedule.stages);
  require("paired", schedule.paired);
  require("band", schedule.band);
  require("splits", schedule.splits);
}

// A table takes the place of a schedule, but for what a launch fixes.
void check_table(const GroupedGemmOptions& options) {
  if (options.table == nullptr) return;
  if (options.backend == Backend::kCpu) {
    refuse(
        "a table is given, but the backend is cpu, which has one schedule; use the backend cuda, "
        "or "
        "leave it out");
  }
  GroupedSchedule others = options.schedule;
  others.paired.reset();
  if (others != GroupedSchedule{}) {
    refuse(
        "both a table and a schedule are given, and each tells how work is cut; leave out one of "
        "them, or all of the schedule but `paired`");
  }
}

void check_options(const GroupedGemmOptions& options) {
  check_table(options);
  require_within("max_rows", options.max_rows, 1, kMostRows);
  require_threads(options.num_threads);
  require_device(options.device);
  require_sms("reserved_sms", options.reserved_sms);
  switch (options.backend) {
    case Backend::kCpu: break;
    case Backend::kCuda:
      if (options.num_threads == 0) return;
      refuse(
          fmt::format("num_threads is {}, but the backend is cuda, which has none; leave it at 0",
                      options.num_threads));
    default:
      refuse(fmt::format("backend is {}; use Backend::kCpu or Backend::kCuda",
                         static_cast<int>(options.backend)));
  }
  if (options.device != -1) {
    refuse(fmt::format("device is {}, but the backend is cpu; leave it at -1", options.device));
  }
  if (options.reserved_sms != 0) {
    refuse(fmt::format("reserved_sms is {}, but the backend is cpu; leave it at 0",
                       options.reserved_sms));
  }
  require_no_choice(options.schedule);
}

// Checks an input without reading through an address.
void check_input(const GroupedGemmSpec& spec, DType compute, const GroupedInput& input) {
  const MatrixView& x = input.x;
  check_layout("the input's layout", input.layout);
  if (input.ends.size() != static_cast<std::size_t>(spec.num_experts)) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("ends has {} elements; {} experts need {}", input.ends.size(),
                            spec.num_experts, spec.num_experts));
  }
  if (input.ends.dtype() != DType::kI32 && input.ends.dtype() != DType::kI64) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("ends is {}; use i32 or i64", to_string(input.ends.dtype())));
  }
  if (input.ends.data() == nullptr) refuse("ends is null; pass the experts' running sums of rows");
  require_dtype("the input's index", input.index, DType::kI32);
  if (!is_float(x.dtype) && x.dtype != DType::kF8E4M3) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("x is {}; use bf16, f16, f32 or f8_e4m3", to_string(x.dtype)));
  }
  if (x.dtype == DType::kF8E4M3 && compute != DType::kF8E4M3) {
    refuse(
        fmt::format("x is f8_e4m3, but the operator computes in {}; pass bf16, f16 or f32, or make "
                    "one that computes in f8_e4m3",
                    to_string(compute)));
  }
  if (x.rows < 0 || (x.rows > 0 && x.cols != spec.k)) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("x is [{}, {}]; the weights have {} columns, pass [rows, {}]", x.rows,
                            x.cols, spec.k, spec.k));
  }
  const std::int64_t most = std::max(x.rows, static_cast<std::int64_t>(input.index.size()));
  if (most > kMostRows) {
    refuse(fmt::format("{} has {} rows; an i32 numbers up to {}: multiply fewer at a time",
                       most == x.rows ? "x" : "the input's index", most, kMostRows));
  }
  if (x.rows == 0) return;
  if (x.data == nullptr) refuse(fmt::format("x is null, but has {} rows; pass them", x.rows));
  if (x.col_stride != 1) {
    refuse(fmt::format("x has a col_stride of {}; pass rows that are contiguous", x.col_stride));
  }
  if (x.dtype == DType::kF8E4M3) check_row_scales("x is", x);
}

void check_stride(const char* name, std::int64_t stride, int columns) {
  if (stride == 0 || !is_short(stride, columns)) return;
  refuse(
      fmt::format("{} is {} elements, but a row has {}; use at least that, or 0 for rows one "
                  "behind the other",
                  name, stride, columns));
}

void check_output(const GroupedGemmSpec& spec, const GroupedOutput& output) {
  if (!is_float(output.dtype)) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("the output is {}; use bf16, f16 or f32", to_string(output.dtype)));
  }
  check_layout("the output's layout", output.layout);
  check_stride("the output's row_stride", output.row_stride, spec.output_columns());
  if (output.rows < -1) {
    refuse(fmt::format("the output has {} rows; pass their number, or -1 if there are enough",
                       output.rows));
  }
  require_dtype("the output's index", output.index, DType::kI32);
  require_dtype("row_weights", output.weights, DType::kF32);
  if (!output.index.empty() && output.layout != RowLayout()) {
    refuse("the output has both an index and a layout that is not packed; use one of them");
  }
  if (output.products == nullptr) return;
  if (!spec.epilogue) {
    refuse(
        "products are to be stored, but there is no epilogue: they are the output; leave them "
        "null");
  }
  if (!output.index.empty()) {
    refuse("products are to be stored, and the output has an index; use a layout instead of it");
  }
  check_stride("products_stride", output.products_stride, spec.n);
}

std::vector<std::int64_t> read_ends(const SlotView& ends) {
  std::vector<std::int64_t> values(ends.size());
  for (std::size_t e = 0; e < values.size(); ++e) {
    values[e] = ends.dtype() == DType::kI64 ? static_cast<const std::int64_t*>(ends.data())[e]
                                            : static_cast<const std::int32_t*>(ends.data())[e];
  }
  return values;
}

// One behind the last row that an expert has.
std::int64_t end_of_rows(const RowLayout& layout, std::span<const std::int64_t> ends) {
  const std::vector<std::int64_t> first = first_rows(layout, ends);
  std::int64_t end = 0;
  for (std::size_t e = 0; e < ends.size(); ++e) {
    const std::int64_t rows = ends[e] - (e == 0 ? 0 : ends[e - 1]);
    if (rows > 0) end = first[e] + rows;
  }
  return end;
}

void require_entries(const char* name, const SlotView& view, std::int64_t needed) {
  if (view.empty() || static_cast<std::int64_t>(view.size()) >= needed) return;
  throw Error(
      ErrorCode::kShapeMismatch,
      fmt::format("{} has {} entries; the rows of this call need {}", name, view.size(), needed));
}

void check_rows_of_x(const GroupedInput& input, std::span<const std::int64_t> ends) {
  const std::int64_t needed = end_of_rows(input.layout, ends);
  if (input.index.empty()) {
    if (input.x.rows >= needed) return;
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("x has {} rows; the experts' last one is row {} of its layout",
                            input.x.rows, needed - 1));
  }
  require_entries("the input's index", input.index, needed);
  const std::vector<std::int64_t> first = first_rows(input.layout, ends);
  const auto* const index = static_cast<const std::int32_t*>(input.index.data());
  for (std::size_t e = 0; e < ends.size(); ++e) {
    const std::int64_t rows = ends[e] - (e == 0 ? 0 : ends[e - 1]);
    for (std::int64_t r = first[e]; r < first[e] + rows; ++r) {
      if (index[r] >= 0 && index[r] < input.x.rows) continue;
      refuse(fmt::format("the input's index[{}] is {}, of expert {}; x has rows 0 to {}", r,
                         index[r], e, input.x.rows - 1));
    }
  }
}

void check_rows_of_output(const GroupedOutput& output, std::span<const std::int64_t> ends) {
  const std::int64_t total = ends.back();
  if (total > 0 && output.data == nullptr) refuse("the output is null; pass its memory");
  require_entries("row_weights", output.weights, total);
  if (output.index.empty()) {
    const std::int64_t needed = end_of_rows(output.layout, ends);
    if (output.rows < 0 || output.rows >= needed) return;
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("the output has {} rows; the experts' last one is row {} of its layout",
                            output.rows, needed - 1));
  }
  require_entries("the output's index", output.index, total);
  const auto* const index = static_cast<const std::int32_t*>(output.index.data());
  for (std::int64_t r = 0; r < total; ++r) {
    if (index[r] >= -1 && (output.rows < 0 || index[r] < output.rows)) continue;
    refuse(output.rows < 0
               ? fmt::format("the output's index[{}] is {}; use rows from 0 on, or -1 for none", r,
                             index[r])
               : fmt::format("the output's index[{}] is {}; the output has rows 0 to {}, or -1 for "
                             "none",
                             r, index[r], output.rows - 1));
  }
  std::vector<std::int32_t> rows(index, index + total);
  std::sort(rows.begin(), rows.end());
  const auto twice = std::adjacent_find(
      rows.begin(), rows.end(), [](std::int32_t a, std::int32_t b) { return a == b && a >= 0; });
  if (twice == rows.end()) return;
  refuse(fmt::format("the output's index has row {} twice; each row of the output can be of one",
                     *twice));
}

// Checks all of a call, for memory that the host can read. Returns the ends.
std::vector<std::int64_t> check_rows(const GroupedGemmOptions& options, const GroupedInput& input,
                                     const GroupedOutput& output) {
  std::vector<std::int64_t> ends = read_ends(input.ends);
  if (!std::is_sorted(ends.begin(), ends.end()) || ends[0] < 0) {
    first_rows({}, ends);  // says which
  }
  if (ends.back() > options.max_rows) {
    throw Error(ErrorCode::kCapacityExceeded,
                fmt::format("{} rows; the operator was made for at most {} (max_rows): make it for "
                            "more, or pass fewer",
                            ends.back(), options.max_rows));
  }
  check_rows_of_x(input, ends);
  check_rows_of_output(output, ends);
  return ends;
}

// `least_rows`: rows that the output has if the caller does not say how many.
void require_memory_apart(const GroupedGemmSpec& spec, const GroupedInput& input,
                          const GroupedOutput& output, std::int64_t least_rows) {
  const auto element = static_cast<std::int64_t>(size_of(output.dtype));
  const std::int64_t rows = output.rows < 0 ? least_rows : output.rows;
  const auto array = [&](const char* name, void* data, std::int64_t columns, std::int64_t stride) {
    return CallArray(name, data, rows, columns * element,
                     (stride == 0 ? columns : stride) * element);
  };
  require_apart({array("out", output.data, spec.output_columns(), output.row_stride),
                 array("products", output.products, spec.n, output.products_stride),
                 CallArray::of("chosen", output.chosen, 1)},
                {{"x", input.x},
                 CallArray::scales("x_scale", input.x, kQuantGroup),
                 {"ends", input.ends},
                 {"index", input.index},
                 {"out_index", output.index},
                 {"row_weights", output.weights}});
}

void require_no_stream(const void* stream) {
  if (stream == nullptr) return;
  refuse("a stream is given, but the operator's backend is cpu; leave it null");
}

}  // namespace

struct GroupedGemm::Engine {
  const Origin origin;
  GroupedGemmSpec spec;
  GroupedGemmOptions options;
  DType compute;
  std::unique_ptr<cpu::GroupedGemmEngine> cpu;  // one of both
  std::unique_ptr<gpu::GroupedGemmEngine> gpu;

  Engine(const GroupedGemmSpec& s, const GroupedGemmWeights& weights, const GroupedGemmOptions& o)
      : spec(checked(s, weights, o)),
        options(o),
        compute(resolve_compute(weights.matrices, o.compute, o.backend)) {
    if (o.backend == Backend::kCpu) {
      for (std::size_t e = 0; e < weights.matrices.size(); ++e) {
        check_four_bit_values(fmt::format("matrices[{}]", e), weights.matrices[e]);
      }
      cpu = std::make_unique<cpu::GroupedGemmEngine>(s, weights, compute, o.num_threads);
      return;
    }
    gpu = std::make_unique<gpu::GroupedGemmEngine>(s, weights, compute, o);
  }

  static const GroupedGemmSpec& checked(const GroupedGemmSpec& spec,
                                        const GroupedGemmWeights& weights,
                                        const GroupedGemmOptions& options) {
    check_options(options);
    check_spec(spec);
    check_weights(spec, weights);
    return spec;
  }
};

std::string grouped_kernel_name(DType compute) {
  return std::string("grouped_") + short_name(compute == DType::kF16 ? DType::kBF16 : compute);
}

GroupedGemm::GroupedGemm(const GroupedGemmSpec& spec, const GroupedGemmWeights& weights,
                         const GroupedGemmOptions& options)
    : engine_(std::make_unique<Engine>(spec, weights, options)) {}
GroupedGemm::~GroupedGemm() { leave_inherited(engine_); }
GroupedGemm::GroupedGemm(GroupedGemm&&) noexcept = default;
GroupedGemm& GroupedGemm::operator=(GroupedGemm&& other) noexcept {
  leave_inherited(engine_);
  engine_ = std::move(other.engine_);
  return *this;
}

void GroupedGemm::refresh(void* stream) {
  const Engine& engine = held_here(engine_, kName);
  if (engine.gpu != nullptr) return engine.gpu->refresh(stream);
  require_no_stream(stream);
}
bool GroupedGemm::copies() const {
  const Engine& engine = held(engine_, kName);
  return engine.gpu != nullptr && engine.gpu->copies();
}

void GroupedGemm::run(const GroupedInput& input, const GroupedOutput& output) {
  const Engine& engine = held_here(engine_, kName);
  check_input(engine.spec, engine.compute, input);
  check_output(engine.spec, output);
  if (engine.gpu != nullptr) {
    // The host does not know how many rows there are.
    require_memory_apart(engine.spec, input, output, 1);
    return engine.gpu->run(input, output);
  }
  require_no_stream(input.stream);
  if (output.chosen != nullptr) {
    refuse("`chosen` is given, but the operator's backend is cpu, which chooses nothing; leave it");
  }
  const std::vector<std::int64_t> ends = check_rows(engine.options, input, output);
  require_memory_apart(engine.spec, input, output, end_of_rows(output.layout, ends));
  engine.cpu->run(input, output, ends);
}

const GroupedGemmSpec& GroupedGemm::spec() const { return held(engine_, kName).spec; }
Backend GroupedGemm::backend() const { return held(engine_, kName).options.backend; }
DType GroupedGemm::compute() const { return held(engine_, kName).compute; }
int GroupedGemm::num_threads() const {
  const Engine& engine = held(engine_, kName);
  return engine.cpu == nullptr ? 0 : engine.cpu->num_threads();
}

}  // namespace switchyard
