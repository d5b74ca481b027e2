// From the products of a tile to h, and to the tokens' cells. (Of tall tiles: tall.cuh.)
#pragma once

#include "gpu/epilogue.cuh"
#include "gpu/multiply.cuh"

namespace switchyard::gpu {

// What the model has for each of its weight rows, this thread's two: `op` of each accumulator and
// its row's number. What few models have is in passes of their own: the usual epilogue then has
// half as many instructions, to be executed, and to be fetched.
template <int N, typename Op>
__device__ __forceinline__ void apply_rows(const float* first, const float* second,
                                           bool first_exists, bool second_exists,
                                           float (&acc)[N / 2], Op&& op) {
  const float rows[2] = {first_exists ? __ldg(first) : 0.0f, second_exists ? __ldg(second) : 0.0f};
#pragma unroll
  for (int i = 0; i < N / 2; ++i) acc[i] = op(acc[i], rows[i / 2 % 2]);
}

// Copies the tile's list to where the epilogue finds it at once, while the products are under way.
template <typename P>
__device__ __forceinline__ void fetch_entries(const Pass<P>& pass, const TaskDescriptor& task,
                                              std::uint32_t group) {
  for (std::uint32_t row = fresh_thread_index<kWarpgroup>(); row < task.rows; row += kWarpgroup) {
    std::uint32_t* const to = &pass.block.entries[group][row];
    if (task.list == nullptr) {
      *to = RowEntry::pack(task.first_row + row, pass.layer.top_k);
    } else if (P::kAlone) {
      *to = task.list[row];
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)),
                   "l"(task.list + row)
                   : "memory");
    }
  }
}
// A thread has the entries that it fetched itself; what it makes of them it shares behind a
// barrier.
__device__ __forceinline__ void await_entries() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// For the second GEMM, the rows' entries become the places of their cells, in vectors of 16 bytes.
template <typename P>
__device__ __forceinline__ void place_cells(const Pass<P>& pass, const TaskDescriptor& task,
                                            std::uint32_t group) {
  const auto cells = static_cast<std::uint32_t>(pass.layer.cells_per_token);
  const std::uint32_t vectors = static_cast<std::uint32_t>(pass.layer.hidden) / 8;
  for (std::uint32_t row = fresh_thread_index<kWarpgroup>(); row < task.rows; row += kWarpgroup) {
    std::uint32_t& entry = pass.block.entries[group][row];
    entry = ((RowEntry::cell(entry, cells) << pass.state().log2_splits) + task.split) * vectors;
  }
  named_barrier<kWarpgroup>(1 + group);
}

// Where weights apply to the input: the rows' entries become their weights, and these multiply what
// is linear in the input.
template <int kHalves, int N, typename P>
__device__ __forceinline__ void weigh_input(const Pass<P>& pass, const TaskDescriptor& task,
                                            std::uint32_t group, float (&acc)[kHalves][N / 2]) {
  std::uint32_t* const entries = pass.block.entries[group];
  const auto cells = static_cast<std::uint32_t>(pass.layer.cells_per_token);
  for (std::uint32_t row = fresh_thread_index<kWarpgroup>(); row < task.rows; row += kWarpgroup) {
    const float weight = pass.state().tables.weights[RowEntry::cell(entries[row], cells)];
    entries[row] = __float_as_uint(weight);
  }
  named_barrier<kWarpgroup>(1 + group);
  const std::uint32_t first = 2 * fresh_thread_index<4>();
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    // Of rows past the end, something; they are not stored.
    const uint2 weights = *reinterpret_cast<const uint2*>(entries + 8 * n + first);
#pragma unroll
    for (int i = 0; i < 4 * kHalves; ++i) {
      acc[i / 4][4 * n + i % 4] *= __uint_as_float(i % 2 ? weights.y : weights.x);
    }
  }
}

// Products of a first GEMM, before the activation. The thread's gate and up are its first and
// second weight row, or, kHalves being 2, its first and second half.
template <int kHalves, int N, bool kGated, typename P>
__device__ __forceinline__ void finish_products(const Pass<P>& pass, const TaskDescriptor& task,
                                                std::uint32_t group, std::uint32_t row,
                                                float (&acc)[kHalves][N / 2]) {
  const LayerParams& layer = pass.layer;
  const FfnParams& ffn = pass.ffn(task.shared != 0);
  if (layer.weight_on_input && task.shared == 0) weigh_input<kHalves, N>(pass, task, group, acc);
  const auto intermediate = static_cast<std::uint32_t>(ffn.intermediate);
  const std::size_t row0 = static_cast<std::size_t>(task.expert) * intermediate;
  const auto for_rows = [&](const float* gate, const float* up, auto op) {
    if (up == nullptr) return;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      constexpr bool kInterleaved = kGated && kHalves == 1;
      const std::uint32_t first = row + (kGated ? 0 : half * kInstructionRows);
      const std::uint32_t second = kInterleaved ? first : first + 8;
      const float* const of_half = kGated && half == 0 ? gate : up;
      apply_rows<N>(of_half + row0 + first, (kInterleaved ? up : of_half) + row0 + second,
                    first < intermediate, second < intermediate, acc[half], op);
    }
  };
  if constexpr (P::kScaled) {
    for_rows(ffn.gate_scale, ffn.up_scale, [](float v, float scale) { return v * scale; });
  }
  for_rows(ffn.gate_bias, ffn.up_bias, [](float v, float bias) { return v + bias; });
  // The parameterised SwiGLU: gate at most `limit`, up within it and moved by up_bias.
  if (kGated && layer.clamps) {
#pragma unroll
    for (int i = 0; i < kHalves * N / 2; ++i) {
      float& v = acc[i / (N / 2)][i % (N / 2)];
      const bool up = kHalves == 1 ? i / 2 % 2 == 1 : i >= N / 2;
      v = at_most(v, layer.limit);
      if (up) v = at_least(v, -layer.limit) + layer.up_bias;
    }
  }
}

// h as bf16.
template <int N, ActivationKind kKind, bool kGated, typename P>
__device__ __forceinline__ void finish_gemm1(const Pass<P>& pass, const TaskDescriptor& task,
                                             std::uint32_t group, float (&acc)[1][N / 2]) {
  const LayerParams& layer = pass.layer;
  const std::uint32_t thread = fresh_thread_index<kWarpgroup>();
  const std::uint32_t warp = thread / 32, lane = thread % 32;
  const auto intermediate = static_cast<std::uint32_t>(pass.ffn(task.shared != 0).intermediate);
  constexpr std::uint32_t kColumns = kGated ? 32 : 64;  // of h, from this warpgroup
  const std::uint32_t column0 = (task.block * kMathGroups + group) * kColumns;
  finish_products<1, N, kGated>(pass, task, group, column0 + warp * (kColumns / 4) + lane / 4, acc);
  const float slope = -1.44269504f * layer.alpha;
  const auto pair = [&](int, int n) {
    const float *first = acc[0] + 4 * n, *second = first + 2;
    const auto value = [slope](float v) { return activate<kKind>(v, slope); };
    if constexpr (kGated) {
      return uint2{pack_bf16(value(first[0]) * second[0], value(first[1]) * second[1]), 0};
    } else {
      return uint2{pack_bf16(value(first[0]), value(first[1])),
                   pack_bf16(value(second[0]), value(second[1]))};
    }
  };
  const std::uint32_t stride = layer.h_stride / 8;
  const std::uint32_t to = task.tile % layer.h_slots * kMaxHeight<P> * stride + column0 / 8;
  store_tile<N, 1, kGated>(shared_address(pass.block.staging[group]), 1 + group, task.rows,
                           column0 < intermediate ? intermediate - column0 : 0, pair,
                           reinterpret_cast<std::uint16_t*>(layer.h),
                           [&](std::uint32_t token) { return to + token * stride; });
}

// h as codes and scales. A task has whole groups of columns: one, of which each math warpgroup has
// half, if gate and up have met, else one for each warpgroup.
template <int N, ActivationKind kKind, bool kGated, typename P>
__device__ __forceinline__ void finish_gemm1(const Pass<P>& pass, const TaskDescriptor& task,
                                             std::uint32_t group, float (&acc)[2][N / 2]) {
  constexpr int kParts = kGated ? 1 : 2;  // of 64 columns, from this warpgroup
  constexpr std::uint32_t kTogether = kGated ? kMathGroups : 1;  // warpgroups of a group of columns
  constexpr std::uint32_t kBothGroups = 3;                       // a named barrier
  const LayerParams& layer = pass.layer;
  QuantizedTile<P>& tile = pass.block.quantized;
  // The largest magnitudes that a warpgroup's four warps found among their columns, for tokens 2 i
  // and 2 i + 1 as two bf16 numbers. Nobody is staging yet.
  const auto amax = [&](std::uint32_t of_group) {
    return reinterpret_cast<std::uint32_t*>(pass.block.staging[of_group]);
  };
  const std::uint32_t thread = fresh_thread_index<kWarpgroup>();
  const std::uint32_t warp = thread / 32, lane = thread % 32;
  const auto intermediate = static_cast<std::uint32_t>(pass.ffn(task.shared != 0).intermediate);
  const std::uint32_t column0 = (task.block * kMathGroups + group) * kParts * kInstructionRows;
  finish_products<2, N, kGated>(pass, task, group, column0 + warp * 16 + lane / 4, acc);
  const float slope = -1.44269504f * layer.alpha;
  const auto value = [slope](float v) { return activate<kKind>(v, slope); };
  // Rounded to bf16: values[part][2 n] and [2 n + 1] of the thread's first and second row.
  std::uint32_t values[kParts][N / 4];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const float a = value(acc[part][2 * i]), b = value(acc[part][2 * i + 1]);
      if constexpr (kGated) {
        values[part][i] = pack_bf16(a * acc[1][2 * i], b * acc[1][2 * i + 1]);
      } else {
        values[part][i] = pack_bf16(a, b);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    std::uint32_t most = larger_magnitudes(values[0][2 * n], values[0][2 * n + 1]);
    if constexpr (!kGated) {
      most = larger_magnitudes(most, larger_magnitudes(values[1][2 * n], values[1][2 * n + 1]));
    }
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      most = larger_magnitudes(most, __shfl_xor_sync(~0u, most, lanes));
    }
    if (lane < 4) amax(group)[warp * kMaxHeight<P> / 2 + 4 * n + lane] = most;
  }
  const auto meet = [&] {
    if constexpr (kGated) {
      named_barrier<kMathGroups * kWarpgroup>(kBothGroups);
    } else {
      named_barrier<kWarpgroup>(1 + group);
    }
  };
  meet();
  if (N == kWarpgroup || thread < N) {
    std::uint32_t most = 0;
#pragma unroll
    for (std::uint32_t w = 0; w < 4 * kTogether; ++w) {
      const std::uint32_t* const of_warp = amax(kGated ? w / 4 : group) + w % 4 * kMaxHeight<P> / 2;
      most = larger_magnitudes(most, of_warp[thread / 2]);
    }
    const GroupScale scale = group_scale(thread % 2 == 0 ? low_half(most) : high_half(most));
    tile.inverse[group][thread] = scale.inverse;
    if (thread < task.rows && column0 < intermediate && (!kGated || group == 0)) {
      const std::size_t slot = task.tile % layer.h_slots;
      layer.h_scales[(slot * layer.h_groups + column0 / kQuantGroup) * kMaxHeight<P> + thread] =
          scale.scale;
    }
  }
  // Only then may the next tile's magnitudes be written.
  meet();
  const std::uint32_t stride = layer.h_stride / kLaneColumns;
  const std::uint32_t to =
      task.tile % layer.h_slots * kMaxHeight<P> * stride + column0 / kLaneColumns;
  store_codes<N, kParts>(shared_address(pass.block.staging[group]), 1 + group, task.rows,
                         column0 < intermediate ? intermediate - column0 : 0, values,
                         tile.inverse[group], layer.h,
                         [&](std::uint32_t token) { return to + token * stride; });
}

template <int kHalves, int N, typename P>
__device__ __forceinline__ void finish_gemm2(const Pass<P>& pass, const TaskDescriptor& task,
                                             std::uint32_t group, float (&acc)[kHalves][N / 2]) {
  const LayerParams& layer = pass.layer;
  const FfnParams& ffn = pass.ffn(task.shared != 0);
  const std::uint32_t thread = fresh_thread_index<kWarpgroup>();
  const std::uint32_t warp = thread / 32, lane = thread % 32;
  const auto hidden = static_cast<std::uint32_t>(layer.hidden);
  const std::uint32_t column0 = (task.block * kMathGroups + group) * kHalves * kInstructionRows;
  const auto for_rows = [&](const float* vector, auto op) {
    if (vector == nullptr) return;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const std::uint32_t row = column0 + half * kInstructionRows + warp * 16 + lane / 4;
      const float* const at = vector + static_cast<std::size_t>(task.expert) * hidden + row;
      apply_rows<N>(at, at + 8, row < hidden, row + 8 < hidden, acc[half], op);
    }
  };
  if constexpr (P::kScaled) {
    for_rows(ffn.down_scale, [](float v, float scale) { return v * scale; });
  }
  // Of a split GEMM, one part.
  for_rows(task.split != 0 ? nullptr : ffn.down_bias, [](float v, float bias) { return v + bias; });
  const auto pair = [&](int half, int n) {
    const float* const sums = acc[half] + 4 * n;
    return uint2{pack_bf16(sums[0], sums[1]), pack_bf16(sums[2], sums[3])};
  };
  store_tile<N, kHalves, false>(
      shared_address(pass.block.staging[group]), 1 + group, task.rows,
      column0 < hidden ? hidden - column0 : 0, pair, layer.cells,
      [&](std::uint32_t token) { return pass.block.entries[group][token] + column0 / 8; });
}

}  // namespace switchyard::gpu
