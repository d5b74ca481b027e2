// The operators of the C interface: grouped GEMM, permute, unpermute.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "base/overlap.h"
#include "c_api/guard.h"
#include "c_api/handles.h"
#include "c_api/specs.h"
#include "c_api/structs.h"
#include "c_api/tensors.h"
#include "switchyard/error.h"
#include "switchyard/grouped_gemm.h"
#include "switchyard/tuner.h"

struct sy_grouped_gemm {
  // The caller's struct that the weights were made of, and copies of their scales.
  sy_grouped_gemm_spec given;
  switchyard::c_api::ScaleCopies scales;
  int max_rows = 0;
  switchyard::GroupedGemm gemm;
  switchyard::c_api::Calls calls{};

  sy_device_type device_type() const {
    return gemm.backend() == switchyard::Backend::kCpu ? SY_CPU : SY_CUDA;
  }
};

namespace switchyard::c_api {
namespace {

// 0, which the caller may have from an older header, is the rule.
std::optional<int> chosen(std::int32_t value) {
  return value == 0 ? std::nullopt : std::optional<int>(value);
}

GroupedSchedule schedule_of(const sy_grouped_gemm_options& asked) {
  if (asked.paired < SY_BY_RULE || asked.paired > SY_NO) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("paired is {}; use SY_BY_RULE ({}), SY_YES ({}) or SY_NO ({})",
                            asked.paired, +SY_BY_RULE, +SY_YES, +SY_NO));
  }
  GroupedSchedule schedule;
  schedule.tile_rows = chosen(asked.tile_rows);
  schedule.stages = chosen(asked.stages);
  if (asked.paired != SY_BY_RULE) schedule.paired = asked.paired == SY_YES;
  schedule.band = chosen(asked.band);
  schedule.splits = chosen(asked.splits);
  return schedule;
}

std::unique_ptr<sy_grouped_gemm> create(const sy_grouped_gemm_spec* given_spec,
                                        const sy_grouped_gemm_options* given_options) {
  const sy_grouped_gemm_spec given = read_struct("sy_grouped_gemm_spec", given_spec);
  const sy_grouped_gemm_options asked =
      read_struct_or("sy_grouped_gemm_options", given_options,
                     sy_grouped_gemm_options SY_GROUPED_GEMM_OPTIONS_INIT);
  GroupedGemmOptions options;
  options.backend = backend_of(asked.backend);
  options.max_rows = asked.max_rows;
  options.num_threads = asked.num_threads;
  options.device = asked.device;
  options.reserved_sms = asked.reserved_sms;
  if (asked.compute != SY_DTYPE_NONE) options.compute = dtype_of("compute", asked.compute);
  options.schedule = schedule_of(asked);
  if (asked.table_file != nullptr) {
    options.table = std::make_shared<tuner::Table>(tuner::read_table(asked.table_file));
  }

  ScaleCopies scales;
  const GroupedGemmWeights weights = weights_of(given, asked.backend, scales);
  GroupedGemmSpec spec;
  spec.num_experts = whole("num_experts", given.weights.weight.shape[0]);
  spec.n = whole("n", given.weights.weight.shape[1]);
  spec.k = whole("k", given.weights.weight.shape[2]);
  if (given.has_epilogue != 0) spec.epilogue = activation_of(given.epilogue);
  spec.order = order_of(given.order);
  GroupedGemm gemm(spec, weights, options);
  return std::unique_ptr<sy_grouped_gemm>(
      new sy_grouped_gemm{given, std::move(scales), asked.max_rows, std::move(gemm)});
}

void refresh(sy_grouped_gemm& gemm, void* stream) {
  if (!gemm.scales.empty()) {
    ScaleCopies scales;
    weights_of(gemm.given, gemm.device_type(), scales);
    copy_into(scales, gemm.scales);
  }
  gemm.gemm.refresh(stream);
}

GroupedInput input_of(const sy_grouped_gemm_call& call, sy_device_type device, int k) {
  GroupedInput input;
  input.stream = call.stream;
  input.layout = layout_of(call.x_layout);
  input.x = matrix("x", call.x, device);
  require_columns("x", call.x, -1, k);
  input.x.col_stride = 1;
  if (is_given(call.x_scale)) {
    check_tensor("x_scale", call.x_scale, 2, device);
    if (call.x_scale.dtype != SY_F32) {
      throw Error(ErrorCode::kDTypeMismatch,
                  fmt::format("x_scale is {}; it must be f32",
                              to_string(dtype_of("x_scale", call.x_scale.dtype))));
    }
    require_columns("x_scale", call.x_scale, call.x.shape[0], (k + 127) / 128);
    input.x.scale = static_cast<const float*>(call.x_scale.data);
    input.x.scale_rows = 1;
    input.x.scale_cols = 128;
    input.x.scale_stride = call.x_scale.strides[0];
  }
  input.ends = elements("ends", call.ends, 1, device, {DType::kI32, DType::kI64});
  if (is_given(call.index)) input.index = elements("index", call.index, 1, device, {DType::kI32});
  return input;
}

GroupedOutput output_of(const sy_grouped_gemm_call& call, sy_device_type device,
                        const GroupedGemmSpec& spec) {
  GroupedOutput output;
  check_tensor("out", call.out, 2, device);
  require_columns("out", call.out, -1, spec.output_columns());
  output.data = call.out.data;
  output.dtype = dtype_of("out", call.out.dtype);
  output.rows = call.out.shape[0];
  output.row_stride = output.rows > 1 ? call.out.strides[0] : 0;
  output.layout = layout_of(call.out_layout);
  if (is_given(call.out_index)) {
    output.index = elements("out_index", call.out_index, 1, device, {DType::kI32});
  }
  if (is_given(call.row_weights)) {
    output.weights = elements("row_weights", call.row_weights, 1, device, {DType::kF32});
  }
  if (is_given(call.chosen)) {
    const SlotView chosen = elements("chosen", call.chosen, 1, device, {DType::kI32});
    if (chosen.size() != 1) {
      throw Error(ErrorCode::kShapeMismatch,
                  fmt::format("chosen is {}; pass [1]", shape_text(call.chosen)));
    }
    output.chosen = static_cast<std::int32_t*>(call.chosen.data);
  }
  if (!is_given(call.products)) return output;
  check_tensor("products", call.products, 2, device);
  require_columns("products", call.products, output.rows, spec.n);
  if (call.products.dtype != call.out.dtype) {
    throw Error(
        ErrorCode::kDTypeMismatch,
        fmt::format("products are {} and out is {}; use one type for both",
                    to_string(dtype_of("products", call.products.dtype)), to_string(output.dtype)));
  }
  output.products = call.products.data;
  output.products_stride = call.products.shape[0] > 1 ? call.products.strides[0] : 0;
  return output;
}

RowLayout layout_or_packed(const sy_row_layout* layout) {
  return layout == nullptr ? RowLayout() : layout_of(*layout);
}

// `longer`: it may have more.
void require_elements(const char* name, const sy_tensor& tensor, std::size_t needed, bool longer) {
  const std::size_t size = tensor.ndim == 2
                               ? static_cast<std::size_t>(tensor.shape[0] * tensor.shape[1])
                               : static_cast<std::size_t>(tensor.shape[0]);
  if (size < needed || (size > needed && !longer)) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("{} is {}; it must have {}{} elements", name, shape_text(tensor),
                            longer ? "at least " : "", needed));
  }
}

DeviceStream stream_on(const sy_tensor& tensor, void* stream) { return {stream, tensor.device_id}; }

// A call with a stream is a mistake where nothing is enqueued.
void require_no_stream(const void* stream) {
  if (stream == nullptr) return;
  throw Error(ErrorCode::kInvalidArgument,
              "a stream is given, but the tensors are in host memory; leave it null");
}

// `ends` to `tokens` are the caller's and have been described; only `ids` and `layout` have not
// been checked. Returns the rows of the layout.
std::int64_t permute_on_host(const sy_tensor& ids, int num_experts, const RowLayout& layout,
                             const sy_tensor& ends, const sy_tensor& positions,
                             const sy_tensor* tokens) {
  const SlotView slots = elements("ids", ids, 2, SY_CPU, {DType::kI32, DType::kI64});
  const SlotView ends_out = elements("ends", ends, 1, SY_CPU, {DType::kI32});
  const SlotView positions_out = elements("positions", positions, 2, SY_CPU, {DType::kI32});
  SlotView tokens_out;
  if (tokens != nullptr) tokens_out = elements("tokens", *tokens, 1, SY_CPU, {DType::kI32});
  require_apart({{"ends", ends_out}, {"positions", positions_out}, {"tokens", tokens_out}},
                {{"ids", slots}});
  const Permutation order = permute(slots, whole("top_k", ids.shape[1]), num_experts, layout);
  require_elements("ends", ends, order.ends.size(), false);
  require_elements("positions", positions, order.positions.size(), false);
  if (tokens != nullptr) require_elements("tokens", *tokens, order.tokens.size(), true);
  const auto put = [](const sy_tensor& to, const std::vector<std::int32_t>& values) {
    return std::copy(values.begin(), values.end(), static_cast<std::int32_t*>(to.data));
  };
  put(ends, order.ends);
  put(positions, order.positions);
  if (tokens != nullptr) {
    std::fill(put(*tokens, order.tokens),
              static_cast<std::int32_t*>(tokens->data) + tokens->shape[0], -1);
  }
  return static_cast<std::int64_t>(order.tokens.size());
}

// (permute_on_host() looks at the others.)
void require_apart_from_outputs(const SlotView& dropped, const sy_permute_call& call) {
  const SlotView ends = elements("ends", call.ends, 1, SY_CPU, {DType::kI32});
  const SlotView positions = elements("positions", call.positions, 2, SY_CPU, {DType::kI32});
  SlotView tokens;
  if (is_given(call.tokens)) tokens = elements("tokens", call.tokens, 1, SY_CPU, {DType::kI32});
  require_apart(
      {{"dropped", dropped}, {"ends", ends}, {"positions", positions}, {"tokens", tokens}}, {});
}

std::int32_t* numbers(const char* name, const sy_tensor& tensor, int ndim) {
  elements(name, tensor, ndim, SY_CUDA, {DType::kI32});
  return static_cast<std::int32_t*>(tensor.data);
}

void permute_on_device(const sy_permute_call& call) {
  const SlotView slots = elements("ids", call.ids, 2, SY_CUDA, {DType::kI32, DType::kI64});
  DevicePermutation out;
  out.layout = layout_of(call.layout);
  out.ends = numbers("ends", call.ends, 1);
  out.positions = numbers("positions", call.positions, 2);
  require_elements("ends", call.ends, static_cast<std::size_t>(std::max(call.num_experts, 0)),
                   false);
  require_elements("positions", call.positions, slots.size(), false);
  if (is_given(call.tokens)) {
    out.tokens = numbers("tokens", call.tokens, 1);
    out.rows = call.tokens.shape[0];
  }
  if (is_given(call.dropped)) {
    out.dropped = numbers("dropped", call.dropped, 1);
    require_elements("dropped", call.dropped, 1, false);
  }
  const SlotView workspace = elements("workspace", call.workspace, 1, SY_CUDA, {DType::kU8});
  out.workspace = call.workspace.data;
  out.workspace_bytes = workspace.size();
  permute(slots, whole("top_k", call.ids.shape[1]), call.num_experts, out,
          stream_on(call.ids, call.stream));
}

void unpermute_tensors(const sy_unpermute_call& call, sy_device_type device) {
  MatrixView view = matrix("rows", call.rows, device);
  require_columns("rows", call.rows, -1, whole("the number of columns", call.rows.shape[1]));
  view.col_stride = 1;
  const SlotView slots = elements("positions", call.positions, 2, device, {DType::kI32});
  SlotView factors;
  if (is_given(call.weights)) {
    factors = elements("weights", call.weights, 2, device, {DType::kF32, DType::kBF16});
    if (!std::equal(call.weights.shape, call.weights.shape + 2, call.positions.shape)) {
      throw Error(ErrorCode::kShapeMismatch,
                  fmt::format("weights are [{}, {}], but positions are [{}, {}]; pass one for each",
                              call.weights.shape[0], call.weights.shape[1], call.positions.shape[0],
                              call.positions.shape[1]));
    }
  }
  check_tensor("out", call.out, 2, device);
  require_columns("out", call.out, call.positions.shape[0],
                  whole("the number of columns", call.rows.shape[1]));
  require_rows_apart("out", call.out);
  ForwardOutput output;
  output.data = call.out.data;
  output.dtype = dtype_of("out", call.out.dtype);
  output.row_stride = call.out.shape[0] > 1 ? call.out.strides[0] : 0;
  output.scale = call.scale;
  output.accumulate = call.accumulate != 0;
  const int top_k = whole("top_k", call.positions.shape[1]);
  if (device == SY_CPU) {
    require_no_stream(call.stream);
    unpermute(view, slots, factors, top_k, output);
  } else {
    unpermute(view, slots, factors, top_k, output, stream_on(call.rows, call.stream));
  }
}

}  // namespace
}  // namespace switchyard::c_api

using namespace switchyard::c_api;
using switchyard::DType;

sy_status sy_rows_needed(const sy_row_layout* layout, int32_t num_experts, int64_t rows,
                         int64_t* out) {
  return guarded([&] {
    require("out", out);
    *out = switchyard::rows_needed(layout_or_packed(layout), num_experts, rows);
  });
}

sy_status sy_grouped_gemm_create(const sy_grouped_gemm_spec* spec,
                                 const sy_grouped_gemm_options* options, sy_grouped_gemm** out) {
  return guarded([&] {
    require("out", out);
    *out = create(spec, options).release();
  });
}

sy_status sy_grouped_gemm_destroy(sy_grouped_gemm** gemm) {
  return guarded([&] {
    require("gemm", gemm);
    destroy(*gemm);
  });
}

sy_status sy_grouped_gemm_get_info(const sy_grouped_gemm* gemm, sy_grouped_gemm_info* out) {
  return guarded([&] {
    require("gemm", gemm);
    const switchyard::GroupedGemmSpec& spec = gemm->gemm.spec();
    sy_grouped_gemm_info info = SY_GROUPED_GEMM_INFO_INIT;
    info.backend = gemm->device_type();
    info.compute = to_c(gemm->gemm.compute());
    info.num_threads = gemm->gemm.num_threads();
    info.num_experts = spec.num_experts;
    info.n = spec.n;
    info.k = spec.k;
    info.output_columns = spec.output_columns();
    info.max_rows = gemm->max_rows;
    info.copies = gemm->gemm.copies() || !gemm->scales.empty() ? 1 : 0;
    write_struct("sy_grouped_gemm_info", info, out);
  });
}

sy_status sy_grouped_gemm_run(sy_grouped_gemm* gemm, const sy_grouped_gemm_call* given) {
  return guarded([&] {
    require("gemm", gemm);
    const Call in_call(gemm->calls);
    const sy_grouped_gemm_call call = read_struct("sy_grouped_gemm_call", given);
    require_rows_apart("out", call.out);
    require_rows_apart("products", call.products);
    const switchyard::GroupedInput input = input_of(call, gemm->device_type(), gemm->gemm.spec().k);
    gemm->gemm.run(input, output_of(call, gemm->device_type(), gemm->gemm.spec()));
  });
}

sy_status sy_grouped_gemm_refresh(sy_grouped_gemm* gemm, void* stream) {
  return guarded([&] {
    require("gemm", gemm);
    const Call in_call(gemm->calls);
    refresh(*gemm, stream);
  });
}

sy_status sy_permute(const sy_tensor* ids, int32_t num_experts, const sy_row_layout* layout,
                     const sy_tensor* ends, const sy_tensor* positions, const sy_tensor* tokens,
                     int64_t* rows) {
  return guarded([&] {
    require("ids", ids);
    require("ends", ends);
    require("positions", positions);
    const std::int64_t made =
        permute_on_host(*ids, num_experts, layout_or_packed(layout), *ends, *positions, tokens);
    if (rows != nullptr) *rows = made;
  });
}

sy_status sy_permute_run(const sy_permute_call* given) {
  return guarded([&] {
    const sy_permute_call call = read_struct("sy_permute_call", given);
    if (call.ids.device_type == SY_CUDA) return permute_on_device(call);
    require_no_stream(call.stream);
    if (is_given(call.dropped)) {
      const switchyard::SlotView dropped =
          elements("dropped", call.dropped, 1, SY_CPU, {DType::kI32});
      require_elements("dropped", call.dropped, 1, false);
      require_apart_from_outputs(dropped, call);
    }
    permute_on_host(call.ids, call.num_experts, layout_of(call.layout), call.ends, call.positions,
                    is_given(call.tokens) ? &call.tokens : nullptr);
    if (is_given(call.dropped)) *static_cast<std::int32_t*>(call.dropped.data) = 0;
  });
}

sy_status sy_permute_workspace(int64_t slots, int32_t num_experts, uint64_t* bytes) {
  return guarded([&] {
    require("bytes", bytes);
    *bytes = switchyard::permute_workspace_bytes(slots, num_experts);
  });
}

sy_status sy_unpermute(const sy_tensor* rows, const sy_tensor* positions, const sy_tensor* weights,
                       float scale, int32_t accumulate, const sy_tensor* out) {
  return guarded([&] {
    require("rows", rows);
    require("positions", positions);
    require("out", out);
    sy_unpermute_call call = SY_UNPERMUTE_CALL_INIT;
    call.rows = *rows;
    call.positions = *positions;
    if (weights != nullptr) {
      elements("weights", *weights, 2, SY_CPU, {DType::kF32, DType::kBF16});
      call.weights = *weights;
    }
    call.out = *out;
    call.scale = scale;
    call.accumulate = accumulate;
    unpermute_tensors(call, SY_CPU);
  });
}

sy_status sy_unpermute_run(const sy_unpermute_call* given) {
  return guarded([&] {
    const sy_unpermute_call call = read_struct("sy_unpermute_call", given);
    unpermute_tensors(call, call.rows.device_type == SY_CUDA ? SY_CUDA : SY_CPU);
  });
}
