// permute() and unpermute(): on the host, and what is checked before a GPU does it.
#include <fmt/core.h>

#include <cmath>

#include "base/convert.h"
#include "base/limits.h"
#include "base/overlap.h"
#include "cpu/kernels.h"
#include "gpu/operators.h"
#include "model/check_tensor.h"
#include "operators/row_layout.h"
#include "switchyard/error.h"
#include "switchyard/grouped_gemm.h"

namespace switchyard {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

// Tokens of a [T, K] array.
std::size_t tokens_of(const char* name, const SlotView& slots, int top_k) {
  if (top_k < 1) refuse(fmt::format("top_k is {}; use at least 1", top_k));
  const auto k = static_cast<std::size_t>(top_k);
  if (slots.size() % k != 0) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("{} has {} elements, which is no multiple of top_k, {}; pass [T, {}]",
                            name, slots.size(), top_k, top_k));
  }
  if (slots.size() > 0 && slots.data() == nullptr) {
    refuse(fmt::format("{} is null; pass {} elements", name, slots.size()));
  }
  return slots.size() / k;
}

void require_i32(std::int64_t rows) {
  if (rows <= kMostRows) return;
  refuse(
      fmt::format("{} rows; an i32 numbers up to {}: permute fewer tokens at a time, or use a "
                  "layout with less padding",
                  rows, kMostRows));
}

float weight_of(const SlotView& weights, std::size_t i) {
  if (weights.empty()) return 1;
  return weights.dtype() == DType::kBF16
             ? bf16_to_f32(static_cast<const std::uint16_t*>(weights.data())[i])
             : static_cast<const float*>(weights.data())[i];
}

void check_unpermute(const MatrixView& rows, const SlotView& positions, const SlotView& weights,
                     const ForwardOutput& out) {
  if (!is_float(rows.dtype) || !is_float(out.dtype)) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("rows are {} and out is {}; use bf16, f16 or f32",
                            to_string(rows.dtype), to_string(out.dtype)));
  }
  if (!positions.empty() && positions.dtype() != DType::kI32) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("positions are {}; use i32", to_string(positions.dtype())));
  }
  if (!weights.empty() && weights.dtype() != DType::kF32 && weights.dtype() != DType::kBF16) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("weights are {}; use f32 or bf16", to_string(weights.dtype())));
  }
  if (!weights.empty() && weights.size() != positions.size()) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("there are {} weights for {} positions; pass one for each, or none",
                            weights.size(), positions.size()));
  }
  if (rows.rows < 0 || rows.cols < 1) {
    throw Error(
        ErrorCode::kShapeMismatch,
        fmt::format("rows are [{}, {}]; pass [any, H] with H of 1 or more", rows.rows, rows.cols));
  }
  if (rows.rows > 0 && (rows.data == nullptr || rows.col_stride != 1)) {
    refuse("rows must be non-null and contiguous (col_stride 1)");
  }
  if (!std::isfinite(out.scale)) {
    refuse(fmt::format("the output's scale is {}; use a finite number", out.scale));
  }
  if (!out.topk_ids.empty() || !out.topk_weights.empty()) {
    refuse("the output has topk_ids or topk_weights, but nothing is routed here; leave them empty");
  }
  if (out.row_stride != 0 && is_short(out.row_stride, rows.cols)) {
    refuse(
        fmt::format("output rows are {} elements apart, but have {}; use a row_stride of at least "
                    "that, or 0 for rows one behind the other",
                    out.row_stride, rows.cols));
  }
}

void require_memory_apart(const MatrixView& rows, const SlotView& positions,
                          const SlotView& weights, std::size_t tokens, const ForwardOutput& out) {
  const auto element = static_cast<std::int64_t>(size_of(out.dtype));
  const std::int64_t stride = out.row_stride == 0 ? rows.cols : out.row_stride;
  require_apart(
      {{"out", out.data, static_cast<std::int64_t>(tokens), rows.cols * element, stride * element}},
      {{"rows", rows}, {"positions", positions}, {"weights", weights}});
}

void check_positions(const MatrixView& rows, const SlotView& positions) {
  const auto* const position = static_cast<const std::int32_t*>(positions.data());
  for (std::size_t i = 0; i < positions.size(); ++i) {
    if (position[i] >= -1 && position[i] < rows.rows) continue;
    refuse(fmt::format("positions[{}] is {}; there are {} rows: use 0 to {}, or -1 for none", i,
                       position[i], rows.rows, rows.rows - 1));
  }
}

void require_experts(int num_experts) {
  if (num_experts >= 1 && num_experts <= kMostGroupedExperts) return;
  refuse(fmt::format("num_experts is {}; use 1 to {}", num_experts, kMostGroupedExperts));
}

// Checks the arguments without reading through an address. Returns the tokens.
std::size_t check_permute(const SlotView& ids, int top_k, int num_experts,
                          const RowLayout& layout) {
  const std::size_t tokens = tokens_of("ids", ids, top_k);
  check_layout("the layout", layout);
  require_experts(num_experts);
  if (!ids.empty() && ids.dtype() != DType::kI32 && ids.dtype() != DType::kI64) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("ids are {}; use i32 or i64", to_string(ids.dtype())));
  }
  require_i32(static_cast<std::int64_t>(ids.size()));
  return tokens;
}

void require_memory(const char* name, const void* data) {
  if (data == nullptr) refuse(fmt::format("{} is null; pass its memory on the device", name));
}

}  // namespace

Permutation permute(SlotView ids, int top_k, int num_experts, const RowLayout& layout) {
  const std::size_t tokens = check_permute(ids, top_k, num_experts, layout);
  // The slot's expert, or -1.
  const auto expert_of = [&](std::size_t slot) {
    const std::int64_t id = ids.dtype() == DType::kI64
                                ? static_cast<const std::int64_t*>(ids.data())[slot]
                                : static_cast<const std::int32_t*>(ids.data())[slot];
    return id >= 0 && id < num_experts ? id : -1;
  };
  std::vector<std::int64_t> ends(static_cast<std::size_t>(num_experts));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (const std::int64_t e = expert_of(i); e >= 0) ++ends[static_cast<std::size_t>(e)];
  }
  for (std::size_t e = 1; e < ends.size(); ++e) ends[e] += ends[e - 1];
  std::vector<std::int64_t> next = first_rows(layout, ends);
  require_i32(next.back());

  Permutation result;
  result.layout = layout;
  result.ends.assign(ends.begin(), ends.end());
  result.tokens.assign(static_cast<std::size_t>(next.back()), -1);
  result.positions.assign(ids.size(), -1);
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t i = t * static_cast<std::size_t>(top_k);
         i < (t + 1) * static_cast<std::size_t>(top_k); ++i) {
      const std::int64_t e = expert_of(i);
      if (e < 0) continue;
      const std::int64_t row = next[static_cast<std::size_t>(e)]++;
      result.positions[i] = static_cast<std::int32_t>(row);
      result.tokens[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(t);
    }
  }
  return result;
}

void unpermute(const MatrixView& rows, SlotView positions, SlotView weights, int top_k,
               const ForwardOutput& out) {
  const std::size_t tokens = tokens_of("positions", positions, top_k);
  check_unpermute(rows, positions, weights, out);
  check_positions(rows, positions);
  if (tokens == 0) return;
  if (out.data == nullptr) refuse("the output is null; pass its memory");
  require_memory_apart(rows, positions, weights, tokens, out);
  const auto k = static_cast<std::size_t>(top_k);
  const auto* const position = static_cast<const std::int32_t*>(positions.data());
  const std::int64_t stride = out.row_stride == 0 ? rows.cols : out.row_stride;
  std::vector<const void*> summands(k);
  std::vector<float> factors(k);
  for (std::size_t t = 0; t < tokens; ++t) {
    int count = 0;
    for (std::size_t i = t * k; i < (t + 1) * k; ++i) {
      if (position[i] < 0) continue;
      summands[static_cast<std::size_t>(count)] = rows.row(position[i]);
      factors[static_cast<std::size_t>(count++)] = weight_of(weights, i);
    }
    cpu::kernels().combine(
        summands.data(), factors.data(), count, rows.dtype,
        static_cast<std::byte*>(out.data) +
            static_cast<std::int64_t>(t) * stride * static_cast<std::int64_t>(size_of(out.dtype)),
        out.dtype, rows.cols, out.scale, out.accumulate);
  }
}

std::size_t permute_workspace_bytes(std::int64_t slots, int num_experts) {
  if (slots < 0) refuse(fmt::format("there are {} slots; use 0 or more", slots));
  require_i32(slots);
  require_experts(num_experts);
  return gpu::permute_workspace_bytes(slots, num_experts);
}

void permute(SlotView ids, int top_k, int num_experts, const DevicePermutation& out,
             const DeviceStream& where) {
  check_permute(ids, top_k, num_experts, out.layout);
  const auto slots = static_cast<std::int64_t>(ids.size());
  const std::int64_t needed = rows_needed(out.layout, num_experts, slots);
  require_i32(needed);
  require_memory("ends", out.ends);
  if (slots > 0) require_memory("positions", out.positions);
  if (out.tokens != nullptr && out.rows < needed) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("tokens has {} entries; {} slots of {} experts may need {} in this "
                            "layout (rows_needed())",
                            out.rows, slots, num_experts, needed));
  }
  const std::size_t bytes = permute_workspace_bytes(slots, num_experts);
  require_memory("the workspace", out.workspace);
  if (out.workspace_bytes < bytes || reinterpret_cast<std::uintptr_t>(out.workspace) % 4 != 0) {
    refuse(
        fmt::format("the workspace has {} bytes at {}; {} slots of {} experts need {} at a "
                    "multiple of 4 (permute_workspace_bytes())",
                    out.workspace_bytes, out.workspace, slots, num_experts, bytes));
  }
  require_apart(
      {CallArray::of("ends", out.ends, num_experts),
       CallArray::of("positions", out.positions, slots),
       CallArray::of("tokens", out.tokens, out.rows), CallArray::of("dropped", out.dropped, 1),
       CallArray::of("workspace", static_cast<const std::byte*>(out.workspace),
                     static_cast<std::int64_t>(out.workspace_bytes))},
      {{"ids", ids}});
  gpu::permute(ids, top_k, num_experts, out, where);
}

void unpermute(const MatrixView& rows, SlotView positions, SlotView weights, int top_k,
               const ForwardOutput& out, const DeviceStream& where) {
  const std::size_t tokens = tokens_of("positions", positions, top_k);
  check_unpermute(rows, positions, weights, out);
  require_i32(static_cast<std::int64_t>(positions.size()));
  if (tokens == 0) return;
  require_memory("the output", out.data);
  require_memory_apart(rows, positions, weights, tokens, out);
  gpu::unpermute(rows, positions, weights, top_k, out, where);
}

}  // namespace switchyard
