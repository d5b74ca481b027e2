// The exchange of the C interface: dispatch and combine alone.
#include "switchyard/exchange.h"

#include <fmt/format.h>

#include <cstring>
#include <memory>
#include <sstream>
#include <utility>

#include "c_api/guard.h"
#include "c_api/handles.h"
#include "c_api/specs.h"
#include "c_api/structs.h"
#include "c_api/tensors.h"
#include "switchyard/error.h"
#include "trace/chrome_trace.h"

struct sy_exchange {
  switchyard::World world;
  switchyard::Exchange exchange;
  switchyard::c_api::Calls calls{};

  sy_device_type device_type() const {
    return exchange.backend() == switchyard::Backend::kCpu ? SY_CPU : SY_CUDA;
  }
};

struct sy_exchange_handle {
  switchyard::ExchangeHandle handle;
  switchyard::c_api::Calls calls{};
};

namespace switchyard::c_api {
namespace {

CombineWeights combine_weights_of(sy_combine_weights given) {
  switch (given) {
    case SY_WEIGHTS_BY_RECEIVER: return CombineWeights::kByReceiver;
    case SY_WEIGHTS_BY_SENDER: return CombineWeights::kBySender;
    case SY_WEIGHTS_NONE: return CombineWeights::kNone;
    default:
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("weights is {}; use SY_WEIGHTS_BY_RECEIVER ({}), "
                      "SY_WEIGHTS_BY_SENDER ({}) or SY_WEIGHTS_NONE ({})",
                      given, +SY_WEIGHTS_BY_RECEIVER, +SY_WEIGHTS_BY_SENDER, +SY_WEIGHTS_NONE));
  }
}

std::unique_ptr<sy_exchange> create(const sy_world& world, const sy_exchange_spec* given_spec,
                                    const sy_exchange_options* given_options) {
  const sy_exchange_spec given = read_struct("sy_exchange_spec", given_spec);
  const sy_exchange_options asked = read_struct_or("sy_exchange_options", given_options,
                                                   sy_exchange_options SY_EXCHANGE_OPTIONS_INIT);
  ExchangeOptions options;
  options.backend = backend_of(asked.backend);
  options.num_threads = asked.num_threads;
  options.device = asked.device;
  options.max_sms = asked.max_sms;
  options.trace = asked.trace != 0;
  options.deadline = milliseconds_of("deadline", asked.deadline_seconds);
  ExchangeSpec spec;
  spec.hidden = given.hidden;
  spec.num_experts = given.num_experts;
  spec.top_k = given.top_k;
  spec.max_tokens = given.max_tokens;
  spec.dispatch = dtype_of("dispatch", given.dispatch);
  spec.combine = dtype_of("combine", given.combine);
  spec.layout = layout_of(given.layout);
  spec.weights = combine_weights_of(given.weights);
  spec.pre_sum = given.pre_sum != 0;
  spec.pre_sum_per_host = given.pre_sum_per_host != 0;
  spec.placement = placement_of(given.placement);
  spec.large_ids_are_none = given.large_ids_are_none != 0;
  return std::unique_ptr<sy_exchange>(
      new sy_exchange{world.world, Exchange(world.world, spec, options)});
}

// [rows, ceil(H / 128)] of scales, with their stride.
std::pair<float*, std::int64_t> scales_of(const char* name, const sy_tensor& tensor,
                                          std::int64_t rows, int hidden, sy_device_type device) {
  if (!is_given(tensor)) return {nullptr, 0};
  check_tensor(name, tensor, 2, device);
  if (tensor.dtype != SY_F32) {
    throw Error(ErrorCode::kDTypeMismatch, fmt::format("{} is {}; it must be f32", name,
                                                       to_string(dtype_of(name, tensor.dtype))));
  }
  require_columns(name, tensor, rows, (hidden + 127) / 128);
  return {static_cast<float*>(tensor.data), tensor.strides[0]};
}

DispatchInput input_of(const sy_exchange& exchange, const sy_dispatch_input& call) {
  const ExchangeSpec& spec = exchange.exchange.spec();
  const sy_device_type device = exchange.device_type();
  DispatchInput input;
  input.stream = call.stream;
  input.reuse = call.reuse != 0;
  input.tokens = matrix("x", call.x, device);
  require_columns("x", call.x, -1, spec.hidden);
  input.tokens.col_stride = 1;
  const auto [scale, stride] =
      scales_of("x_scale", call.x_scale, call.x.shape[0], spec.hidden, device);
  input.tokens.scale = scale;
  if (scale != nullptr) {
    input.tokens.scale_rows = 1;
    input.tokens.scale_cols = 128;
    input.tokens.scale_stride = stride;
  }
  const auto slots = [&](const char* name, const sy_tensor& tensor,
                         std::initializer_list<DType> types) {
    if (!is_given(tensor)) return SlotView();
    const SlotView view = elements(name, tensor, 2, device, types);
    if (tensor.shape[0] != call.x.shape[0] || tensor.shape[1] != spec.top_k) {
      throw Error(ErrorCode::kShapeMismatch,
                  fmt::format("{} is {}; {} tokens need [{}, {}]", name, shape_text(tensor),
                              call.x.shape[0], call.x.shape[0], spec.top_k));
    }
    return view;
  };
  input.ids = slots("ids", call.ids, {DType::kI32, DType::kI64});
  input.weights = slots("weights", call.weights, {DType::kF32, DType::kBF16});
  return input;
}

// An output of one dimension, of exactly `size` elements, or of that many or more.
template <typename T>
T* array(const char* name, const sy_tensor& tensor, DType dtype, std::int64_t size, bool longer,
         sy_device_type device) {
  if (!is_given(tensor)) return nullptr;
  elements(name, tensor, 1, device, {dtype});
  if (tensor.shape[0] < size || (tensor.shape[0] > size && !longer)) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("{} is {}; it must have {}{} elements", name, shape_text(tensor),
                            longer ? "at least " : "", size));
  }
  return static_cast<T*>(tensor.data);
}

DispatchOutput output_of(const sy_exchange& exchange, const sy_dispatch_output& call) {
  const ExchangeSpec& spec = exchange.exchange.spec();
  const sy_device_type device = exchange.device_type();
  const ExpertRange own = exchange.exchange.own_places();
  const std::int64_t experts = own.end - own.begin;
  DispatchOutput output;
  output.stream = call.stream;
  check_tensor("rows", call.rows, 2, device);
  require_columns("rows", call.rows, -1, spec.hidden);
  require_rows_apart("rows", call.rows);
  if (dtype_of("rows", call.rows.dtype) != spec.dispatch) {
    throw Error(ErrorCode::kDTypeMismatch, fmt::format("rows are {}; the exchange dispatches {}",
                                                       to_string(dtype_of("rows", call.rows.dtype)),
                                                       to_string(spec.dispatch)));
  }
  output.rows = call.rows.data;
  output.capacity = call.rows.shape[0];
  output.row_stride = output.capacity > 1 ? call.rows.strides[0] : 0;
  require_rows_apart("scales", call.scales);
  const auto [scales, stride] =
      scales_of("scales", call.scales, output.capacity, spec.hidden, device);
  output.scales = scales;
  output.scale_stride = output.capacity > 1 ? stride : 0;
  output.ends = array<std::int32_t>("ends", call.ends, DType::kI32, experts, false, device);
  output.counts = array<std::int32_t>("counts", call.counts, DType::kI32, experts, false, device);
  output.num_rows = array<std::int32_t>("num_rows", call.num_rows, DType::kI32, 1, false, device);
  output.weights =
      array<float>("weights", call.weights, DType::kF32, output.capacity, true, device);
  if (is_given(call.origins)) {
    elements("origins", call.origins, 2, device, {DType::kI32});
    if (call.origins.shape[0] < output.capacity || call.origins.shape[1] != 3) {
      throw Error(ErrorCode::kShapeMismatch,
                  fmt::format("origins is {}; it must be [{}, 3]", shape_text(call.origins),
                              output.capacity));
    }
    output.origins = static_cast<RowOrigin*>(call.origins.data);
  }
  return output;
}
static_assert(sizeof(RowOrigin) == 3 * sizeof(std::int32_t), "a row of origins");

CombineInput results_of(const sy_exchange& exchange, const sy_combine_input& call) {
  CombineInput input;
  input.stream = call.stream;
  input.rows = matrix("rows", call.rows, exchange.device_type());
  require_columns("rows", call.rows, -1, exchange.exchange.spec().hidden);
  input.rows.col_stride = 1;
  return input;
}

CombineOutput sums_of(const sy_exchange& exchange, const sy_combine_output& call,
                      std::int64_t tokens) {
  CombineOutput output;
  output.stream = call.stream;
  check_tensor("out", call.out, 2, exchange.device_type());
  require_columns("out", call.out, tokens, exchange.exchange.spec().hidden);
  require_rows_apart("out", call.out);
  output.data = call.out.data;
  output.dtype = dtype_of("out", call.out.dtype);
  output.row_stride = call.out.shape[0] > 1 ? call.out.strides[0] : 0;
  output.scale = call.scale;
  output.accumulate = call.accumulate != 0;
  return output;
}

void fill_info(const sy_exchange& exchange, sy_exchange_info* out) {
  const ExchangeSpec& spec = exchange.exchange.spec();
  sy_exchange_info info = SY_EXCHANGE_INFO_INIT;
  info.backend = exchange.device_type();
  info.num_threads = exchange.exchange.num_threads();
  info.own_begin = exchange.exchange.own_places().begin;
  info.own_end = exchange.exchange.own_places().end;
  info.rows_needed = exchange.exchange.rows_needed();
  info.layout = {static_cast<sy_rows_kind>(spec.layout.kind), 0, spec.layout.size};
  write_struct("sy_exchange_info", info, out);
}
static_assert(static_cast<int>(RowLayout::Kind::kPacked) == SY_ROWS_PACKED &&
              static_cast<int>(RowLayout::Kind::kBlocked) == SY_ROWS_BLOCKED &&
              static_cast<int>(RowLayout::Kind::kPadded) == SY_ROWS_PADDED);

void fill_stats(const sy_exchange& exchange, sy_exchange_stats* out) {
  check_size("sy_exchange_stats", out);
  const ExchangeStats& stats = exchange.exchange.stats();
  sy_exchange_stats filled = SY_EXCHANGE_STATS_INIT;
  filled.dispatches = stats.dispatches;
  filled.combines = stats.combines;
  filled.tokens = stats.tokens;
  filled.tokens_sent = stats.tokens_sent;
  filled.rows_received = stats.rows_received;
  filled.rows_returned = stats.rows_returned;
  filled.dispatch_bytes = stats.dispatch_bytes;
  filled.combine_bytes = stats.combine_bytes;
  filled.signal_bytes = stats.signal_bytes;
  filled.heap_bytes_reserved = stats.heap_bytes_reserved;
  write_struct("sy_exchange_stats", filled, out);
}

// A call of an exchange with one of its handles.
template <typename Body>
sy_status with_both(sy_exchange* exchange, sy_exchange_handle* handle, const Body& body) {
  return guarded([&] {
    require("exchange", exchange);
    require("handle", handle);
    const Call in_call(exchange->calls, exchange->world), with_handle(handle->calls);
    body();
  });
}

}  // namespace
}  // namespace switchyard::c_api

using namespace switchyard::c_api;

sy_status sy_exchange_create(sy_world* world, const sy_exchange_spec* spec,
                             const sy_exchange_options* options, sy_exchange** out) {
  return guarded([&] {
    require("world", world);
    require("out", out);
    const Call in_call(world->calls, world->world);
    *out = create(*world, spec, options).release();
  });
}

sy_status sy_exchange_destroy(sy_exchange** exchange) {
  return guarded([&] {
    require("exchange", exchange);
    destroy(*exchange);
  });
}

sy_status sy_exchange_get_info(const sy_exchange* exchange, sy_exchange_info* out) {
  return guarded([&] {
    require("exchange", exchange);
    fill_info(*exchange, out);
  });
}

sy_status sy_exchange_handle_create(sy_exchange* exchange, sy_exchange_handle** out) {
  return guarded([&] {
    require("exchange", exchange);
    require("out", out);
    auto handle = std::make_unique<sy_exchange_handle>();
    handle->handle = exchange->exchange.make_handle();
    *out = handle.release();
  });
}

sy_status sy_exchange_handle_destroy(sy_exchange_handle** handle) {
  return guarded([&] {
    require("handle", handle);
    destroy(*handle);
  });
}

sy_status sy_exchange_dispatch_send(sy_exchange* exchange, const sy_dispatch_input* input,
                                    sy_exchange_handle* handle) {
  return with_both(exchange, handle, [&] {
    const sy_dispatch_input call = read_struct("sy_dispatch_input", input);
    exchange->exchange.dispatch_send(input_of(*exchange, call), handle->handle);
  });
}

sy_status sy_exchange_dispatch_recv(sy_exchange* exchange, const sy_dispatch_output* output,
                                    sy_exchange_handle* handle) {
  return with_both(exchange, handle, [&] {
    const sy_dispatch_output call = read_struct("sy_dispatch_output", output);
    exchange->exchange.dispatch_recv(output_of(*exchange, call), handle->handle);
  });
}

sy_status sy_exchange_dispatch(sy_exchange* exchange, const sy_dispatch_input* input,
                               const sy_dispatch_output* output, sy_exchange_handle* handle) {
  return with_both(exchange, handle, [&] {
    const sy_dispatch_input sent = read_struct("sy_dispatch_input", input);
    const sy_dispatch_output received = read_struct("sy_dispatch_output", output);
    exchange->exchange.dispatch(input_of(*exchange, sent), output_of(*exchange, received),
                                handle->handle);
  });
}

sy_status sy_exchange_combine_send(sy_exchange* exchange, const sy_combine_input* input,
                                   sy_exchange_handle* handle) {
  return with_both(exchange, handle, [&] {
    const sy_combine_input call = read_struct("sy_combine_input", input);
    exchange->exchange.combine_send(results_of(*exchange, call), handle->handle);
  });
}

sy_status sy_exchange_combine_recv(sy_exchange* exchange, const sy_combine_output* output,
                                   sy_exchange_handle* handle) {
  return with_both(exchange, handle, [&] {
    const sy_combine_output call = read_struct("sy_combine_output", output);
    exchange->exchange.combine_recv(sums_of(*exchange, call, handle->handle.tokens()),
                                    handle->handle);
  });
}

sy_status sy_exchange_combine(sy_exchange* exchange, const sy_combine_input* input,
                              const sy_combine_output* output, sy_exchange_handle* handle) {
  return with_both(exchange, handle, [&] {
    const sy_combine_input sent = read_struct("sy_combine_input", input);
    const sy_combine_output received = read_struct("sy_combine_output", output);
    exchange->exchange.combine(results_of(*exchange, sent),
                               sums_of(*exchange, received, handle->handle.tokens()),
                               handle->handle);
  });
}

sy_status sy_exchange_rows_needed(sy_exchange* exchange, sy_exchange_handle* handle, void* stream,
                                  int64_t* out) {
  return with_both(exchange, handle, [&] {
    require("out", out);
    *out = exchange->exchange.rows_needed(handle->handle, stream);
  });
}

sy_status sy_exchange_check(sy_exchange* exchange) {
  return guarded([&] {
    require("exchange", exchange);
    exchange->exchange.check();
  });
}

sy_status sy_exchange_get_stats(sy_exchange* exchange, sy_exchange_stats* out) {
  return guarded([&] {
    require("exchange", exchange);
    fill_stats(*exchange, out);
  });
}

sy_status sy_exchange_trace(sy_exchange* exchange, char* text, uint64_t* size) {
  return guarded([&] {
    require("exchange", exchange);
    require("size", size);
    const switchyard::PassTrace trace = exchange->exchange.trace();
    std::ostringstream out;
    switchyard::trace::ChromeTraceOptions options;
    const switchyard::ExchangeSpec& spec = exchange->exchange.spec();
    options.title = fmt::format("exchange of {} experts, top-{}, hidden {}", spec.num_experts,
                                spec.top_k, spec.hidden);
    if (exchange->device_type() == SY_CUDA) options.unit = "block";
    switchyard::trace::write_chrome_trace(out, {&trace, 1}, options);
    const std::string json = std::move(out).str();
    if (text != nullptr && *size > json.size()) std::memcpy(text, json.c_str(), json.size() + 1);
    *size = json.size() + 1;
  });
}
