#include "switchyard/layer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <sstream>
#include <string>
#include <utility>

#include "base/printable.h"
#include "c_api/guard.h"
#include "c_api/handles.h"
#include "c_api/specs.h"
#include "c_api/structs.h"
#include "switchyard/checkpoint.h"
#include "switchyard/recording.h"
#include "switchyard/routing.h"
#include "trace/chrome_trace.h"

namespace switchyard::c_api {
namespace {

[[noreturn]] void refuse(ErrorCode code, const std::string& message) { throw Error(code, message); }

struct Options {
  LayerOptions layer;
  sy_layer_options given;
};

Options options_of(const sy_layer_options* pointer) {
  Options options;
  options.given =
      read_struct_or("sy_layer_options", pointer, sy_layer_options SY_LAYER_OPTIONS_INIT);
  const sy_layer_options& given = options.given;
  LayerOptions& layer = options.layer;
  layer.backend = backend_of(given.backend);
  if (given.bad_ids != SY_BAD_IDS_RAISE && given.bad_ids != SY_BAD_IDS_SKIP) {
    refuse(ErrorCode::kInvalidArgument,
           fmt::format("bad_ids is {}; use SY_BAD_IDS_RAISE ({}) or SY_BAD_IDS_SKIP ({})",
                       given.bad_ids, +SY_BAD_IDS_RAISE, +SY_BAD_IDS_SKIP));
  }
  layer.bad_ids = given.bad_ids == SY_BAD_IDS_SKIP ? BadIds::kSkip : BadIds::kRaise;
  layer.large_ids_are_none = given.large_ids_are_none != 0;
  layer.max_tokens = given.max_tokens;
  layer.cpu.num_threads = given.num_threads;
  layer.cuda.device = given.device;
  layer.cuda.reserved_sms = given.reserved_sms;
  layer.cuda.cooperative_launch = given.no_cooperative_launch == 0;
  layer.diagnostics.trace = given.trace != 0;
  layer.deadline = milliseconds_of("deadline", given.deadline_seconds);
  if (given.compute != SY_DTYPE_NONE) layer.compute = dtype_of("compute", given.compute);
  if (given.workspace != nullptr) layer.workspace = &given.workspace->workspace;
  layer.workspace_slot = given.workspace_slot;
  layer.diagnostics.recorded_steps = given.recorded_steps;
  layer.pre_sum_per_host = given.pre_sum_per_host != 0;
  if (given.name != nullptr) layer.diagnostics.name = given.name;
  if (given.table_file != nullptr) {
    refuse(ErrorCode::kInvalidArgument,
           fmt::format("table_file is '{}', but layers have no tables any more: they gained 0.5 % "
                       "over the layer's own rules; leave it null",
                       printable(given.table_file)));
  }
  if (given.share_memory_with != nullptr) {
    refuse(ErrorCode::kInvalidArgument,
           "share_memory_with is set, but layers share the memory of a workspace; make one with "
           "sy_workspace_create(), and give it to each of them as workspace");
  }
  return options;
}

// Reads the weights of `places` places of experts.
MoeWeights read_weights(const World& world, const LayerSpec& spec, const sy_layer_weights& given,
                        int places, Backend backend, ScaleCopies& scales) {
  // A layer on a GPU copies what is in host memory.
  return weights_of(given, places, own_experts(places, world.rank(), world.size()),
                    spec.activation.gated, backend == Backend::kCpu ? SY_CPU : kAnyDevice, scales);
}

std::unique_ptr<sy_layer> create(const sy_world& world, const sy_layer_spec& given_spec,
                                 const sy_layer_weights& given_weights,
                                 const sy_layer_options* given_options) {
  Options options = options_of(given_options);
  const LayerSpec spec = spec_of(given_spec);
  const sy_layer_weights given = read_struct("sy_layer_weights", &given_weights);
  options.layer.placement = placement_of(given.placement);
  ScaleCopies scales;
  const int places = options.layer.placement.num_places(spec.num_experts);
  const MoeWeights weights =
      read_weights(world.world, spec, given, places, options.layer.backend, scales);
  MoeLayer layer(world.world, spec, weights, options.layer);
  return std::unique_ptr<sy_layer>(new sy_layer{.world = world.world,
                                                .max_tokens = options.layer.max_tokens,
                                                .device = options.layer.cuda.device,
                                                .has_router = !weights.router.empty(),
                                                .places = places,
                                                .given = given,
                                                .scales = std::move(scales),
                                                .layer = std::move(layer)});
}

std::unique_ptr<sy_layer> from_checkpoint(const sy_world& world, const char* directory, int index,
                                          const sy_layer_options* given_options) {
  const Options options = options_of(given_options);
  const Checkpoint checkpoint = Checkpoint::open(directory);
  const MoeWeights weights = checkpoint.load_layer(index);
  MoeLayer layer(world.world, checkpoint.layer_spec(index), weights, options.layer);
  return std::unique_ptr<sy_layer>(new sy_layer{.world = world.world,
                                                .max_tokens = options.layer.max_tokens,
                                                .device = options.layer.cuda.device,
                                                .has_router = !weights.router.empty(),
                                                .layer = std::move(layer)});
}

void refresh(sy_layer& layer, void* stream) {
  if (!layer.scales.empty()) {
    // The copies are of the caller's scales as they were. Their sizes cannot have changed.
    ScaleCopies scales;
    read_weights(layer.world, layer.layer.spec(), layer.given, layer.places, layer.layer.backend(),
                 scales);
    copy_into(scales, layer.scales);
  }
  layer.layer.refresh(stream);
}

void rebind(sy_layer& layer, const sy_layer_weights& given_weights) {
  const sy_layer_weights given = read_struct("sy_layer_weights", &given_weights);
  const ExpertPlacement placement = placement_of(given.placement);
  ScaleCopies scales;
  const MoeWeights weights = read_weights(layer.world, layer.layer.spec(), given, layer.places,
                                          layer.layer.backend(), scales);
  if (placement.expert_at.empty()) {
    layer.layer.rebind(weights);
  } else {
    layer.layer.rebind(weights, placement);
  }
  layer.given = given;
  // Passes on their way may still read the old copies, which end with the layer.
  for (std::vector<float>& copy : layer.scales) scales.push_back(std::move(copy));
  layer.scales = std::move(scales);
}

// ---------------------------------------------------------------------------------------- calls

void require_contiguous(const char* name, const sy_tensor& tensor) {
  std::int64_t expected = 1;
  for (int d = tensor.ndim - 1; d >= 0; --d) {
    if (tensor.shape[d] > 1 && tensor.strides[d] != expected) {
      refuse(ErrorCode::kInvalidArgument,
             fmt::format("{} {} has strides that are not those of a contiguous tensor; pass a "
                         "contiguous copy",
                         name, shape_text(tensor)));
    }
    expected *= tensor.shape[d];
  }
}

void require_rows(const char* name, const sy_tensor& tensor, std::int64_t tokens,
                  std::int64_t cols) {
  if (tensor.shape[0] == tokens && tensor.shape[1] == cols) return;
  refuse(ErrorCode::kShapeMismatch, fmt::format("{} is {}; {} tokens need [{}, {}]", name,
                                                shape_text(tensor), tokens, tokens, cols));
}

void require_dense_rows(const char* name, const MatrixView& matrix) {
  if (matrix.cols <= 1 || matrix.col_stride == 1) return;
  refuse(ErrorCode::kInvalidArgument,
         fmt::format("{} has a column stride of {}; its rows must be contiguous", name,
                     matrix.col_stride));
}

template <typename T>
std::span<T> span_of(const char* name, const sy_tensor& tensor, sy_dtype dtype,
                     sy_device_type device_type, std::int64_t tokens, std::int64_t cols) {
  if (!is_given(tensor)) return {};
  check_tensor(name, tensor, 2, device_type);
  require_rows(name, tensor, tokens, cols);
  if (tensor.dtype != dtype) {
    refuse(ErrorCode::kDTypeMismatch,
           fmt::format("{} is {}; it must be {}", name, to_string(dtype_of(name, tensor.dtype)),
                       to_string(dtype_of(name, dtype))));
  }
  require_contiguous(name, tensor);
  return {static_cast<T*>(tensor.data), static_cast<std::size_t>(tokens * cols)};
}

bool is_contiguous(const sy_tensor& tensor) {
  return (tensor.shape[1] <= 1 || tensor.strides[1] == 1) &&
         (tensor.shape[0] <= 1 || tensor.strides[0] == tensor.shape[1]);
}

// [T, K]. `copy`: room for what is not contiguous, of host memory.
SlotView slots_of(const char* name, const sy_tensor& tensor, std::int64_t tokens,
                  std::int64_t top_k, sy_device_type device_type, std::vector<std::byte>& copy) {
  if (!is_given(tensor)) return {};
  check_tensor(name, tensor, 2, device_type);
  require_rows(name, tensor, tokens, top_k);
  const DType dtype = dtype_of(name, tensor.dtype);
  const auto count = static_cast<std::size_t>(tokens * top_k);
  if (is_contiguous(tensor)) return {tensor.data, dtype, count};
  if (device_type != SY_CPU) require_contiguous(name, tensor);
  const std::size_t size = size_of(dtype);
  copy.resize(count * size);
  std::byte* to = copy.data();
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t k = 0; k < top_k; ++k, to += size) {
      const std::int64_t at = t * tensor.strides[0] + k * tensor.strides[1];
      std::memcpy(to,
                  static_cast<const std::byte*>(tensor.data) + at * static_cast<std::int64_t>(size),
                  size);
    }
  }
  return {copy.data(), dtype, count};
}

void forward(sy_layer& layer, const sy_forward& given) {
  const sy_forward call = read_struct("sy_forward", &given);
  const sy_device_type device_type = layer.device_type();
  ForwardInput input;
  input.activations = matrix("x", call.x, device_type);
  require_dense_rows("x", input.activations);
  const std::int64_t tokens = input.activations.rows;
  if (is_given(call.x_scale)) {
    const MatrixView scale = matrix("x_scale", call.x_scale, device_type);
    if (scale.dtype != DType::kF32) {
      refuse(ErrorCode::kDTypeMismatch,
             fmt::format("x_scale is {}; pass f32", to_string(scale.dtype)));
    }
    if (scale.cols > 1 && scale.col_stride != 1) {
      refuse(ErrorCode::kInvalidArgument,
             fmt::format("x_scale has columns {} elements apart; pass a copy whose rows are "
                         "contiguous",
                         scale.col_stride));
    }
    constexpr std::int64_t kGroup = 128;
    require_rows("x_scale", call.x_scale, tokens,
                 (layer.layer.spec().hidden + kGroup - 1) / kGroup);
    input.activations.scale = static_cast<const float*>(scale.data);
    input.activations.scale_rows = 1;
    input.activations.scale_cols = kGroup;
    input.activations.scale_stride = scale.row_stride;
  }
  const std::int64_t top_k = layer.layer.spec().top_k;
  input.topk_ids = slots_of("topk_ids", call.topk_ids, tokens, top_k, device_type, layer.ids);
  input.topk_weights =
      slots_of("topk_weights", call.topk_weights, tokens, top_k, device_type, layer.weights);
  if (is_given(call.logits)) {
    input.logits = matrix("logits", call.logits, device_type);
    // Without tokens there are no logits, and their address may be null.
    if (tokens == 0) input.logits = {};
  }
  if (is_given(call.token_ids)) {
    check_tensor("token_ids", call.token_ids, 1, device_type);
    if (call.token_ids.dtype != SY_I32) {
      refuse(ErrorCode::kDTypeMismatch,
             fmt::format("token_ids are {}; convert them to i32",
                         to_string(dtype_of("token_ids", call.token_ids.dtype))));
    }
    require_contiguous("token_ids", call.token_ids);
    input.token_ids = {static_cast<const std::int32_t*>(call.token_ids.data),
                       static_cast<std::size_t>(call.token_ids.shape[0])};
  }
  input.stream = call.stream;
  input.max_tokens_per_rank = call.max_tokens_per_rank;

  const MatrixView out = matrix("out", call.out, device_type);
  require_rows("out", call.out, tokens, layer.layer.spec().hidden);
  require_dense_rows("out", out);
  ForwardOutput output;
  output.data = call.out.data;
  output.dtype = out.dtype;
  // 0 would mean contiguous rows; with one row at most it does not matter.
  output.row_stride = tokens > 1 ? out.row_stride : 0;
  if (tokens > 1 && out.row_stride == 0) {
    refuse(ErrorCode::kInvalidArgument,
           "out has a row stride of 0: all rows would be the same memory; pass rows of their own");
  }
  output.scale = call.out_scale;
  output.accumulate = call.accumulate != 0;
  output.topk_ids =
      span_of<std::int32_t>("ids_out", call.ids_out, SY_I32, device_type, tokens, top_k);
  output.topk_weights =
      span_of<float>("weights_out", call.weights_out, SY_F32, device_type, tokens, top_k);
  layer.layer.forward(input, output);
}

void fill_stats(sy_layer& layer, sy_stats* out) {
  check_size("sy_stats", out);
  const ForwardStats& stats = layer.layer.stats();
  sy_stats filled = SY_STATS_INIT;
  filled.num_experts = out->num_experts;
  filled.tokens_per_expert = out->tokens_per_expert;
  if (out->tokens_per_expert != nullptr && out->num_experts != 0) {
    const int experts = layer.layer.spec().num_experts;
    if (out->num_experts != experts) {
      refuse(ErrorCode::kShapeMismatch,
             fmt::format("tokens_per_expert has room for {} experts; the layer has {}",
                         out->num_experts, experts));
    }
    std::fill_n(out->tokens_per_expert, experts, 0);
    std::copy(stats.tokens_per_expert.begin(), stats.tokens_per_expert.end(),
              out->tokens_per_expert);
  }
  filled.epoch = stats.epoch;
  filled.tokens = stats.tokens;
  filled.dropped_slots = stats.dropped_slots;
  filled.nan_logits = stats.nan_logits;
  filled.nan_tokens = stats.nan_tokens;
  filled.bad_slots = stats.bad_slots;
  filled.dispatch_bytes = stats.dispatch_bytes;
  filled.combine_bytes = stats.combine_bytes;
  filled.signal_bytes = stats.signal_bytes;
  filled.heap_bytes_used = stats.heap_bytes_used;
  filled.heap_bytes_reserved = stats.heap_bytes_reserved;
  filled.workspace_bytes_used = stats.workspace_bytes_used;
  filled.gate_seconds = stats.gate_seconds;
  filled.plan_seconds = stats.plan_seconds;
  filled.total_seconds = stats.total_seconds;
  write_struct("sy_stats", filled, out);
}

}  // namespace
}  // namespace switchyard::c_api

using namespace switchyard::c_api;

sy_status sy_own_experts(int32_t num_experts, int32_t rank, int32_t num_ranks, int32_t* begin,
                         int32_t* end) {
  return guarded([&] {
    require("begin", begin);
    require("end", end);
    const switchyard::ExpertRange own = switchyard::own_experts(num_experts, rank, num_ranks);
    *begin = own.begin;
    *end = own.end;
  });
}

sy_status sy_layer_create(sy_world* world, const sy_layer_spec* spec,
                          const sy_layer_weights* weights, const sy_layer_options* options,
                          sy_layer** out) {
  return guarded([&] {
    require("world", world);
    require("sy_layer_spec", spec);
    require("sy_layer_weights", weights);
    require("out", out);
    const Call in_call(world->calls, world->world);
    *out = create(*world, *spec, *weights, options).release();
  });
}

sy_status sy_layer_from_checkpoint(sy_world* world, const char* directory, int32_t layer_index,
                                   const sy_layer_options* options, sy_layer** out) {
  return guarded([&] {
    require("world", world);
    require("directory", directory);
    require("out", out);
    const Call in_call(world->calls, world->world);
    *out = from_checkpoint(*world, directory, layer_index, options).release();
  });
}

sy_status sy_layer_destroy(sy_layer** layer) {
  return guarded([&] {
    require("layer", layer);
    destroy(*layer);
  });
}

sy_status sy_layer_forward(sy_layer* layer, const sy_forward* call) {
  return guarded([&] {
    require("layer", layer);
    const Call in_call(layer->calls, layer->world);
    require("sy_forward", call);
    forward(*layer, *call);
  });
}

sy_status sy_layer_check(sy_layer* layer) {
  return guarded([&] {
    require("layer", layer);
    const Call in_call(layer->calls, layer->world);
    layer->layer.check();
  });
}

sy_status sy_layer_refresh(sy_layer* layer, void* stream) {
  return guarded([&] {
    require("layer", layer);
    const Call in_call(layer->calls, layer->world);
    refresh(*layer, stream);
  });
}

sy_status sy_layer_rebind(sy_layer* layer, const sy_layer_weights* weights) {
  return guarded([&] {
    require("layer", layer);
    const Call in_call(layer->calls, layer->world);
    require("sy_layer_weights", weights);
    rebind(*layer, *weights);
  });
}

sy_status sy_layer_get_info(const sy_layer* layer, sy_layer_info* out) {
  return guarded([&] {
    require("layer", layer);
    const switchyard::LayerSpec& spec = layer->layer.spec();
    sy_layer_info info = SY_LAYER_INFO_INIT;
    info.backend = layer->device_type();
    info.compute = to_c(layer->layer.compute());
    info.num_threads = layer->layer.num_threads();
    info.workspace_bytes = layer->layer.workspace_bytes();
    info.max_tokens = layer->max_tokens;
    info.device = layer->device;
    info.hidden = spec.hidden;
    info.intermediate = spec.intermediate;
    info.num_experts = spec.num_experts;
    info.top_k = spec.top_k;
    info.has_router = layer->has_router ? 1 : 0;
    info.shared_intermediate = spec.shared_intermediate;
    info.activation = to_c(spec.activation);
    info.copies = layer->layer.copies() || !layer->scales.empty() ? 1 : 0;
    write_struct("sy_layer_info", info, out);
  });
}

sy_status sy_layer_get_stats(sy_layer* layer, sy_stats* out) {
  return guarded([&] {
    require("layer", layer);
    const Call in_call(layer->calls, layer->world);
    require("sy_stats", out);
    fill_stats(*layer, out);
  });
}

sy_status sy_layer_recording(sy_layer* layer, const char* machine, char* text, uint64_t* size) {
  return guarded([&] {
    require("layer", layer);
    const Call in_call(layer->calls, layer->world);
    require("size", size);
    const std::string json =
        switchyard::to_json({machine == nullptr ? "" : machine, {layer->layer.recording()}});
    if (text != nullptr && *size > json.size()) std::memcpy(text, json.c_str(), json.size() + 1);
    *size = json.size() + 1;
  });
}

sy_status sy_layer_trace(sy_layer* layer, char* text, uint64_t* size) {
  return guarded([&] {
    require("layer", layer);
    const Call in_call(layer->calls, layer->world);
    require("size", size);
    const switchyard::PassTrace trace = layer->layer.trace();
    std::ostringstream out;
    switchyard::trace::ChromeTraceOptions options;
    options.title = switchyard::describe(layer->layer.spec());
    if (layer->device_type() == SY_CUDA) options.unit = "SM";
    switchyard::trace::write_chrome_trace(out, {&trace, 1}, options);
    const std::string json = std::move(out).str();
    if (text != nullptr && *size > json.size()) std::memcpy(text, json.c_str(), json.size() + 1);
    *size = json.size() + 1;
  });
}
