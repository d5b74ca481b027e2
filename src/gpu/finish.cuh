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
    std::uint32_t entry = row_word(pass, group, row);
    std::uint16_t* base = layer.cells;
    if (pass.distributed() && task.shared == 0) {
      entry = RowEntry::sent(entry, layer);
      const SourceRow source = find_source(pass, task.expert, task.first_row + row);
      base = reinterpret_cast<std::uint16_t*>(
          layer.heap.cells(layer.heaps.base[pass.rank_at(source.distance)]));
    }
    const std::uint32_t cell =
        (RowEntry::cell(entry, cells) << pass.state().log2_splits) + task.split;
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
  if (!ffn.more_of_first) return;
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
  const float slope = 0.5f * layer.alpha;
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
  const std::uint32_t to =
      first_row_of_h(pass, task.tile) * (stride * P::kElementBytes / 2) + column0 / 8;
  store_tile<P, N, kGated>(
      shared_address(pass.block.staging[group]), 1 + group, task.rows,
      column0 < intermediate ? intermediate - column0 : 0, pair, [&](std::uint32_t token) {
        return reinterpret_cast<std::uint16_t*>(layer.h) + std::size_t{to + token * stride} * 8;
      });
}

// Of passes that quantize together: the part of a group of 128 columns of h that a math warpgroup
// has stored in bf16. Two blocks' warpgroups have a group where gate and up make it, else one's;
// the last of them makes codes and scales of all of it and tells of all. To find out who that is
// takes a trip to the L2 cache, so it is put off until the next tile's products are under way, if
// that is a first GEMM's: these wait for nothing that depends on it.
template <bool kGated, typename P>
class StoredPart {
 public:
  static constexpr bool kExists = P::kAlone && P::kScaled;
  __device__ explicit StoredPart(const Pass<P>& pass) : pass_(pass) {}

  // The warpgroup has issued its stores, and a barrier has been since.
  __device__ void put_off(const TaskDescriptor& task) {
    if constexpr (kExists) {
      tile_ = task.tile;
      group_ = task.block / kBlocks;
      rows_ = task.rows;
      shared_ = task.shared != 0;
      if (fresh_thread_index<kWarpgroup>() != 0) return;
      before_ = fetch_add_released_gpu(pass_.parts_stored(tile_, group_), 1u << shift());
    }
  }
  // By all of the warpgroup.
  __device__ void finish() {
    if constexpr (kExists) {
      if (rows_ == 0) return;
      const FfnParams& ffn = pass_.ffn(shared_);
      const std::uint32_t thread = fresh_thread_index<kWarpgroup>();
      const std::uint32_t parts =
          kMathGroups * min(kBlocks, pass_.tasks(ffn.gemm1_rows) - group_ * kBlocks);
      const bool last = thread == 0 && (before_ >> shift() & 15) + 1 == parts;
      if (last) fence_gpu();
      if (named_barrier_any<kWarpgroup>(1 + math_group(), last)) {
        quantize(static_cast<std::uint32_t>(ffn.intermediate), thread);
        named_barrier<kWarpgroup>(1 + math_group());
        if (thread == 0) add_release_gpu(pass_.gemm1_done(tile_), parts);
      }
      rows_ = 0;
    }
  }

 private:
  static constexpr std::uint32_t kBlocks = kGated ? 2 : 1;  // that make a group
  __device__ std::uint32_t shift() const { return 4 * (group_ % PassWords::kGroupsOfWord); }
  __device__ void quantize(std::uint32_t intermediate, std::uint32_t thread) const {
    constexpr std::uint32_t kRows = kWarpgroup / kGroupLanes;
    const LayerParams& layer = pass_.layer;
    const std::uint32_t column = group_ * kQuantGroup + thread % kGroupLanes * kLaneColumns;
    const std::size_t slot = tile_ % layer.h_slots;
    std::byte* const to = layer.h + slot * kSlotRows<P> * layer.h_stride;
    const std::uint16_t* const from = rows_of_h(pass_, tile_);
    float* const scales = layer.h_scales + (slot * layer.h_groups + group_) * kSlotRows<P>;
#pragma unroll 1
    for (std::uint32_t row0 = 0; row0 < rows_; row0 += kRows) {
      const std::uint32_t row = row0 + thread / kGroupLanes;
      const std::size_t at = std::size_t{row} * layer.h_stride + column;
      const bool exists = row < rows_ && column < intermediate;
      uint4 first{}, second{};
      if (exists) {
        // Past the L1 cache, which may remember another tile of the slot.
        const auto* const vectors = reinterpret_cast<const uint4*>(from + at);
        first = __ldcg(vectors);
        second = __ldcg(vectors + 1);
      }
      float scale = 0;
      const uint4 codes = quantize_together(first, second, scale);
      if (exists) store_vector(to + at, codes);
      if (row < rows_ && thread % kGroupLanes == 0) scales[row] = scale;
    }
  }

  const Pass<P>& pass_;
  // Of the task that is put off; no rows if there is none.
  std::uint32_t tile_ = 0, group_ = 0, rows_ = 0;
  bool shared_ = false;
  std::uint32_t before_ = 0;  // in the first thread: what the word was without this part
};

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
  if (ffn.more_of_second) {
    if constexpr (P::kScaled) {
      for_rows(ffn.down_scale, [](float v, float scale) { return v * scale; });
    }
    // Of a split GEMM, one part.
    for_rows(task.split != 0 ? nullptr : ffn.down_bias,
             [](float v, float bias) { return v + bias; });
  }
  const auto pair = [&](int n) {
    const float* const sums = acc + 4 * n;
    return uint2{pack_bf16(sums[0], sums[1]), pack_bf16(sums[2], sums[3])};
  };
  store_tile<P, N, false>(shared_address(pass.block.staging[group]), 1 + group, task.rows,
                          column0 < hidden ? hidden - column0 : 0, pair, [&](std::uint32_t token) {
                            return placed_cell(pass, group, token) + column0;
                          });
}

}  // namespace switchyard::gpu
