#include "exchange/call.h"

#include <fmt/core.h>

#include <cmath>
#include <string>

#include "base/limits.h"
#include "base/overlap.h"
#include "base/quantize.h"
#include "model/check_tensor.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void check_tokens(const ExchangeProblem& problem, const MatrixView& tokens) {
  const ExchangeSpec& spec = problem.spec;
  if (tokens.rows < 0 || tokens.rows > spec.max_tokens) {
    throw Error(ErrorCode::kCapacityExceeded,
                fmt::format("{} tokens on rank {}; the exchange was made for at most {} "
                            "(max_tokens): make it for more, or pass fewer",
                            tokens.rows, problem.rank, spec.max_tokens));
  }
  if (tokens.rows == 0) return;
  const bool fits =
      tokens.dtype == spec.dispatch || (problem.quantised() && is_float(tokens.dtype));
  if (!fits) {
    throw Error(
        ErrorCode::kDTypeMismatch,
        fmt::format("tokens are {}, and travel as {}; use {}", to_string(tokens.dtype),
                    to_string(spec.dispatch),
                    problem.quantised() ? "f8_e4m3, bf16, f16 or f32"
                                        : fmt::format("{}, or make an exchange of that type",
                                                      to_string(spec.dispatch))));
  }
  if (tokens.cols != spec.hidden) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("tokens have {} columns; the exchange's hidden size is {}", tokens.cols,
                            spec.hidden));
  }
  if (tokens.data == nullptr || tokens.col_stride != 1) {
    refuse("tokens must be non-null, with contiguous rows (col_stride 1)");
  }
  if (tokens.dtype == DType::kF8E4M3) check_row_scales("tokens are", tokens);
  if (tokens.dtype != DType::kF8E4M3 && tokens.scale != nullptr) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("tokens are {}, which have no scales, but scales are given (x_scale); "
                            "pass tokens as f8_e4m3, or no scales",
                            to_string(tokens.dtype)));
  }
}

void require_slots(const char* name, const SlotView& view, std::int64_t tokens, int top_k,
                   DType one, DType other) {
  const std::int64_t slots = tokens * top_k;
  if (view.empty() && slots == 0) return;
  if (static_cast<std::int64_t>(view.size()) != slots) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("{} have {} elements; {} tokens with top_k {} need {}", name,
                            view.size(), tokens, top_k, slots));
  }
  if (view.dtype() != one && view.dtype() != other) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("{} are {}; use {} or {}", name, to_string(view.dtype()),
                            to_string(one), to_string(other)));
  }
  if (slots > 0 && view.data() == nullptr) {
    refuse(fmt::format("{} are null; pass [{}, {}]", name, tokens, top_k));
  }
}

void require_not_lost(const ExchangeCalls& calls) {
  if (!calls.lost) return;
  refuse(
      "the handle of a call on its way was destroyed, so what it sent cannot be received any more; "
      "make a new exchange on every rank");
}

void check_stride(const char* name, std::int64_t stride, std::int64_t columns) {
  if (stride == 0 || !is_short(stride, columns)) return;
  refuse(
      fmt::format("{} is {} elements, but a row has {}; use at least that, or 0 for rows one "
                  "behind the other",
                  name, stride, columns));
}

// Where rows and scales go.
CallArray rows_of(const ExchangeProblem& problem, const DispatchOutput& output) {
  const auto bytes = static_cast<std::int64_t>(problem.token_bytes());
  const auto element = static_cast<std::int64_t>(size_of(problem.spec.dispatch));
  return {"rows (out)", output.rows, output.capacity, bytes,
          output.row_stride == 0 ? bytes : output.row_stride * element};
}
CallArray scales_of(const ExchangeProblem& problem, const DispatchOutput& output) {
  const auto bytes = static_cast<std::int64_t>(problem.scale_bytes());
  constexpr auto kElement = static_cast<std::int64_t>(sizeof(float));
  return {"scales", output.scales, output.capacity, bytes,
          output.scale_stride == 0 ? bytes : output.scale_stride * kElement};
}
CallArray sums_of(const ExchangeProblem& problem, const CombineOutput& output,
                  std::int64_t tokens) {
  const auto element = static_cast<std::int64_t>(size_of(output.dtype));
  const std::int64_t stride = output.row_stride == 0 ? problem.spec.hidden : output.row_stride;
  return {"out", output.data, tokens, problem.spec.hidden * element, stride * element};
}

}  // namespace

void require_apart_from_sent(const ExchangeProblem& problem, const DispatchInput& input,
                             const DispatchOutput& output) {
  const std::int64_t own = problem.num_own();
  const CallArray x("x", input.tokens);
  const CallArray x_scale = CallArray::scales("x_scale", input.tokens, kQuantGroup);
  const CallArray ids("ids", input.ids), weights("weights", input.weights);
  require_apart(
      {rows_of(problem, output), scales_of(problem, output),
       CallArray::of("ends", output.ends, own), CallArray::of("counts", output.counts, own),
       CallArray::of("num_rows", output.num_rows, 1),
       CallArray::of("origins", output.origins, output.capacity),
       CallArray::of("the received weights", output.weights, output.capacity)},
      {x, x_scale, ids, weights});
}

void require_apart_from_sent(const ExchangeProblem& problem, const CombineInput& input,
                             const CombineOutput& output, std::int64_t tokens) {
  require_apart({sums_of(problem, output, tokens)}, {{"rows", input.rows}});
}

void check_options(const ExchangeOptions& options) {
  require_threads(options.num_threads);
  require_device(options.device);
  require_sms("max_sms", options.max_sms);
  switch (options.backend) {
    case Backend::kCpu:
      if (options.device != -1) {
        refuse(
            fmt::format("device is {}, but the backend is cpu; use Backend::kCuda, or leave it "
                        "at -1",
                        options.device));
      }
      if (options.max_sms != 0) {
        refuse(
            fmt::format("max_sms is {}, but the backend is cpu; leave it at 0", options.max_sms));
      }
      return;
    case Backend::kCuda:
      if (options.num_threads != 0) {
        refuse(
            fmt::format("num_threads is {}, but the backend is cuda, which has none; leave it at 0",
                        options.num_threads));
      }
      if (options.on_step) {
        refuse(
            "on_step is set, but the backend is cuda, whose steps are on the device; leave it "
            "empty");
      }
      return;
  }
  refuse(fmt::format("backend is {}; use Backend::kCpu or Backend::kCuda",
                     static_cast<int>(options.backend)));
}

void check_turn_to_send(const char* call, const ExchangeHandle::State* pending,
                        const ExchangeCalls& calls) {
  require_not_lost(calls);
  if (pending == nullptr) return;
  refuse(
      fmt::format("{0}_send() before {0}_recv() of the {0} that was sent last; receive that "
                  "first, or use another exchange for what overlaps",
                  call));
}

void check_turn_to_receive(const char* call, const ExchangeHandle::State* pending,
                           const ExchangeHandle::State& handle, const ExchangeCalls& calls) {
  require_not_lost(calls);
  if (pending == nullptr) {
    refuse(fmt::format("{0}_recv(), but no {0} is on its way; call {0}_send() first", call));
  }
  if (pending != &handle) {
    refuse(fmt::format("{0}_recv() with another handle than the {0} was sent with; pass that one",
                       call));
  }
}

void check_dispatch(const ExchangeProblem& problem, const DispatchInput& input,
                    const ExchangeHandle::State& handle) {
  check_tokens(problem, input.tokens);
  const std::int64_t tokens = input.tokens.rows;
  const int top_k = problem.spec.top_k;
  if (input.reuse) {
    if (!input.ids.empty() || !input.weights.empty()) {
      refuse("reuse is set, and ids or weights are given; leave them empty, or reuse nothing");
    }
    if (!handle.received) {
      refuse("reuse is set, but no dispatch was received with the handle; pass ids first");
    }
    if (handle.tokens == tokens) return;
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("{} tokens, and the handle that they reuse is of {}; pass as many, or "
                            "ids",
                            tokens, handle.tokens));
  }
  require_slots("ids", input.ids, tokens, top_k, DType::kI32, DType::kI64);
  if (!input.weights.empty()) {
    require_slots("weights", input.weights, tokens, top_k, DType::kF32, DType::kBF16);
  }
}

void check_received(const ExchangeProblem& problem, const DispatchOutput& output) {
  if (output.capacity < 0) {
    refuse(fmt::format("capacity is {} rows; use 0 or more", output.capacity));
  }
  if (output.capacity > 0 && output.rows == nullptr) {
    refuse(fmt::format("the output's rows are null, but capacity is {}; pass their memory",
                       output.capacity));
  }
  check_stride("row_stride", output.row_stride, problem.spec.hidden);
  if (problem.quantised()) {
    if (output.capacity > 0 && output.scales == nullptr) {
      refuse(fmt::format("rows are f8_e4m3, but the output's scales are null; pass [{}, {}] f32",
                         output.capacity, problem.groups()));
    }
    check_stride("scale_stride", output.scale_stride, problem.groups());
  } else if (output.scales != nullptr) {
    refuse(fmt::format("the output has scales, but rows are {}, which have none; leave them null",
                       to_string(problem.spec.dispatch)));
  }
}

void check_results(const ExchangeProblem& problem, const CombineInput& input) {
  const MatrixView& rows = input.rows;
  if (rows.dtype != problem.spec.combine) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("rows are {}, and travel as {}; use that, or make an exchange of "
                            "another type",
                            to_string(rows.dtype), to_string(problem.spec.combine)));
  }
  if (rows.rows < 0 || (rows.rows > 0 && rows.cols != problem.spec.hidden)) {
    throw Error(ErrorCode::kShapeMismatch, fmt::format("rows are [{}, {}]; pass [rows, {}]",
                                                       rows.rows, rows.cols, problem.spec.hidden));
  }
  if (rows.rows > 0 && (rows.data == nullptr || rows.col_stride != 1)) {
    refuse("rows must be non-null and contiguous (col_stride 1)");
  }
}

void check_combined(const ExchangeProblem& problem, const CombineOutput& output,
                    const ExchangeHandle::State& handle) {
  if (!is_float(output.dtype)) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("the output is {}; use bf16, f16 or f32", to_string(output.dtype)));
  }
  if (handle.tokens > 0 && output.data == nullptr) {
    refuse(fmt::format("the output is null; pass [{}, {}]", handle.tokens, problem.spec.hidden));
  }
  check_stride("the output's row_stride", output.row_stride, problem.spec.hidden);
  if (!std::isfinite(output.scale)) {
    refuse(fmt::format("the output's scale is {}; use a finite number", output.scale));
  }
}

void read_ids(const ExchangeProblem& problem, const SlotView& given, std::int32_t* ids) {
  const ExchangeSpec& spec = problem.spec;
  const auto top_k = static_cast<std::size_t>(spec.top_k);
  for_each_id(
      spec.num_experts, spec.top_k, given, {}, id_rules(spec),
      [&](std::size_t i, std::int32_t id) { ids[i] = id; },
      [&](std::size_t i, std::int64_t id, bool twice) {
        refuse(twice ? named_twice_text(i / top_k, id)
                     : bad_id_text("ids", i / top_k, i % top_k, id, spec.num_experts));
      });
}

}  // namespace switchyard
