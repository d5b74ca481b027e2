// From the products of a tile to h, and to the tokens' cells. (Of large passes in FP8: tall.cuh.)
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

// Where the epilogue finds a row's entry, and what becomes of it.
template <typename P>
__device__ __forceinline__ std::uint32_t& row_word(const Pass<P>& pass, std::uint32_t group,
                                                   std::uint32_t row) {
  return *reinterpret_cast<std::uint32_t*>(&pass.block.rows[group][row]);
}

// Copies the entries of the tile's rows, which have come, to where the epilogue finds them at once,
// while the products are under way.
template <typename P>
__device__ __forceinline__ void fetch_entries(const Pass<P>& pass, const TaskDescriptor& task,
                                              std::uint32_t group) {
  for (std::uint32_t row = fresh_thread_index<kWarpgroup>(); row < task.rows; row += kWarpgroup) {
    std::uint32_t& to = row_word(pass, group, row);
    if (task.list == nullptr) {
      to = RowEntry::pack(task.first_row + row, pass.layer.top_k);
    } else if (P::kAlone) {
      to = task.list[row];
    } else {
      const std::uint32_t* from = task.list + row;
      if (pass.distributed()) {
        from = entry_of(pass, task.expert, find_source(pass, task.expert, task.first_row + row));
      }
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(&to)), "l"(from)
                   : "memory");
    }
  }
}
// A thread has the entries that it fetched itself; what it makes of them it shares behind a
// barrier.
__device__ __forceinline__ void await_entries() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// For the second GEMM, the rows' entries become the addresses of their cells, which are in the heap
// of the rank that the row came from.
template <typename P>
__device__ __forceinline__ void place_cells(const Pass<P>& pass, const TaskDescriptor& task,
                                            std::uint32_t group) {
  const LayerParams& layer = pass.layer;
  const auto cells = static_cast<std::uint32_t>(layer.cells_per_token);
  for (std::uint32_t row = fresh_thread_index<kWarpgroup>(); row < task.rows; row += kWarpgroup) {
    const std::uint32_t cell =
        (RowEntry::cell(row_word(pass, group, row), cells) << pass.state().log2_splits) +
        task.split;
    std::uint16_t* base = layer.cells;
    if (pass.distributed() && task.shared == 0) {
      const SourceRow source = find_source(pass, task.expert, task.first_row + row);
      base = layer.heap.cells(layer.heaps.base[pass.rank_at(source.distance)]);
    }
    pass.block.rows[group][row] =
        reinterpret_cast<std::uint64_t>(base + std::size_t{cell} * layer.hidden);
  }
  named_barrier<kWarpgroup>(1 + group);
}
template <typename P>
__device__ __forceinline__ std::uint16_t* placed_cell(const Pass<P>& pass, std::uint32_t group,
                                                      std::uint32_t row) {
  return reinterpret_cast<std::uint16_t*>(pass.block.rows[group][row]);
}

// Where weights apply to the input, the rows' entries become their weights.
template <typename P>
__device__ __forceinline__ void fetch_weights(const Pass<P>& pass, const TaskDescriptor& task,
                                              std::uint32_t group) {
  const LayerParams& layer = pass.layer;
  const auto cells = static_cast<std::uint32_t>(layer.cells_per_token);
  for (std::uint32_t row = fresh_thread_index<kWarpgroup>(); row < task.rows; row += kWarpgroup) {
    std::uint32_t& word = row_word(pass, group, row);
    const float* from = pass.state().tables.weights + RowEntry::cell(word, cells);
    if (const SourceRow source = find_source(pass, task.expert, task.first_row + row);
        pass.distributed() && source.distance != 0) {
      from = layer.heap.weights(layer.mine, task.expert, source.distance) + source.position;
    }
    word = __float_as_uint(P::kAlone ? *from : __ldcg(from));
  }
  named_barrier<kWarpgroup>(1 + group);
}

// ... and multiply what is linear in the input.
template <int N, typename P>
__device__ __forceinline__ void weigh_input(const Pass<P>& pass, const TaskDescriptor& task,
                                            std::uint32_t group, float (&acc)[N / 2]) {
  fetch_weights(pass, task, group);
  const std::uint32_t first = 2 * fresh_thread_index<4>();
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    // Of rows past the end, something; they are not stored.
    const float weights[] = {__uint_as_float(row_word(pass, group, 8 * n + first)),
                             __uint_as_float(row_word(pass, group, 8 * n + first + 1))};
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[4 * n + i] *= weights[i % 2];
  }
}

// Products of a first GEMM, before the activation. The thread's gate and up are its first and
// second weight row.
template <int N, bool kGated, typename P>
__device__ __forceinline__ void finish_products(const Pass<P>& pass, const TaskDescriptor& task,
                                                std::uint32_t group, std::uint32_t row,
                                                float (&acc)[N / 2]) {
  const LayerParams& layer = pass.layer;
  const FfnParams& ffn = pass.ffn(task.shared != 0);
  if (layer.weight_on_input && task.shared == 0) weigh_input<N>(pass, task, group, acc);
  const auto intermediate = static_cast<std::uint32_t>(ffn.intermediate);
  const std::size_t row0 = static_cast<std::size_t>(task.expert) * intermediate;
  const auto for_rows = [&](const float* gate, const float* up, auto op) {
    if (up == nullptr) return;
    const std::uint32_t second = kGated ? row : row + 8;
    apply_rows<N>((kGated ? gate : up) + row0 + row, up + row0 + second, row < intermediate,
                  second < intermediate, acc, op);
  };
  if constexpr (P::kScaled) {
    for_rows(ffn.gate_scale, ffn.up_scale, [](float v, float scale) { return v * scale; });
  }
  for_rows(ffn.gate_bias, ffn.up_bias, [](float v, float bias) { return v + bias; });
  // The parameterised SwiGLU: gate at most `limit`, up within it and moved by up_bias.
  if (kGated && layer.clamps) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      float& v = acc[i];
      v = at_most(v, layer.limit);
      if (i / 2 % 2 == 1) v = at_least(v, -layer.limit) + layer.up_bias;
    }
  }
}

// h, in bf16.
template <int N, ActivationKind kKind, bool kGated, typename P>
__device__ __forceinline__ void finish_gemm1(const Pass<P>& pass, const TaskDescriptor& task,
                                             std::uint32_t group, float (&acc)[N / 2]) {
  const LayerParams& layer = pass.layer;
  const std::uint32_t thread = fresh_thread_index<kWarpgroup>();
  const std::uint32_t warp = thread / 32, lane = thread % 32;
  const auto intermediate = static_cast<std::uint32_t>(pass.ffn(task.shared != 0).intermediate);
  constexpr std::uint32_t kColumns = kGated ? 32 : 64;  // of h, from this warpgroup
  const std::uint32_t column0 = (task.block * kMathGroups + group) * kColumns;
  finish_products<N, kGated>(pass, task, group, column0 + warp * (kColumns / 4) + lane / 4, acc);
  const float slope = -1.44269504f * layer.alpha;
  const auto pair = [&](int n) {
    const float *first = acc + 4 * n, *second = first + 2;
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
  store_tile<N, kGated>(
      shared_address(pass.block.staging[group]), 1 + group, task.rows,
      column0 < intermediate ? intermediate - column0 : 0, pair, [&](std::uint32_t token) {
        return reinterpret_cast<std::uint16_t*>(layer.h) + std::size_t{to + token * stride} * 8;
      });
}

template <int N, typename P>
__device__ __forceinline__ void finish_gemm2(const Pass<P>& pass, const TaskDescriptor& task,
                                             std::uint32_t group, float (&acc)[N / 2]) {
  const LayerParams& layer = pass.layer;
  const FfnParams& ffn = pass.ffn(task.shared != 0);
  const std::uint32_t thread = fresh_thread_index<kWarpgroup>();
  const std::uint32_t warp = thread / 32, lane = thread % 32;
  const auto hidden = static_cast<std::uint32_t>(layer.hidden);
  const std::uint32_t column0 = (task.block * kMathGroups + group) * kInstructionRows;
  const auto for_rows = [&](const float* vector, auto op) {
    if (vector == nullptr) return;
    const std::uint32_t row = column0 + warp * 16 + lane / 4;
    const float* const at = vector + static_cast<std::size_t>(task.expert) * hidden + row;
    apply_rows<N>(at, at + 8, row < hidden, row + 8 < hidden, acc, op);
  };
  if constexpr (P::kScaled) {
    for_rows(ffn.down_scale, [](float v, float scale) { return v * scale; });
  }
  // Of a split GEMM, one part.
  for_rows(task.split != 0 ? nullptr : ffn.down_bias, [](float v, float bias) { return v + bias; });
  const auto pair = [&](int n) {
    const float* const sums = acc + 4 * n;
    return uint2{pack_bf16(sums[0], sums[1]), pack_bf16(sums[2], sums[3])};
  };
  store_tile<N, false>(shared_address(pass.block.staging[group]), 1 + group, task.rows,
                       column0 < hidden ? hidden - column0 : 0, pair, [&](std::uint32_t token) {
                         return placed_cell(pass, group, token) + column0;
                       });
}

}  // namespace switchyard::gpu
