// The places of the sums of weight-major tiles, and their way through shared memory into rows of
// tokens.
//
// A math warpgroup holds D[64 weight rows, N tokens]. Warp w has rows 16 w to 16 w + 15; its lane
// 4 g + t holds rows g and g + 8 of them, of tokens 8 n + 2 t and the next, in acc[4 n .. 4 n + 3].
#pragma once

#include "gpu/tile/activation.cuh"
#include "gpu/tile/fragments.cuh"
#include "gpu/tile/store.cuh"
#include "gpu/tile/task.h"

namespace switchyard::gpu {

// The interface is that of TokenMajorPlaces. Columns are those of the output, which are weight rows
// of the product; with kGated they count within gate and within up, a thread's first and second
// weight row.
template <int N, bool kGated, typename C>
class WeightMajorPlaces {
 public:
  using Sums = float[N / 2];
  static constexpr int kCount = N / 2;
  static constexpr std::uint32_t kColumns = kGated ? 32 : 64;  // from a warpgroup

  __device__ WeightMajorPlaces(const TileTask& task, std::uint32_t group)
      : group_(group), column0_((task.block * kMathGroups + group) * kColumns) {}

  __device__ static float& at(Sums& acc, int i) { return acc[i]; }
  __device__ static constexpr bool of_up(int i) { return kGated && i / 2 % 2 != 0; }

  // Calls each(i, token, column, of_up) for every sum i that the thread has of the tile.
  template <typename Each>
  __device__ __forceinline__ void for_each(Each&& each) const {
    const std::uint32_t first = column(), lane = reread_thread_index<32>();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      each(i, i / 4 * 8 + 2 * (lane % 4) + i % 2, first + (!kGated && i / 2 % 2 != 0 ? 8 : 0),
           of_up(i));
    }
  }
  // Combines each sum with a number that the model has for its column: acc = op(acc, number). Only
  // `up` is used if not kGated. Features of few models are steps of their own, so the usual
  // epilogue has half as many instructions to execute and to fetch.
  template <typename Op>
  __device__ __forceinline__ void apply(const float* gate, const float* up, std::uint32_t columns,
                                        Sums& acc, Op&& op) const {
    const std::uint32_t first = column(), second = kGated ? first : first + 8;
    const float numbers[2] = {first < columns ? __ldg((kGated ? gate : up) + first) : 0.0f,
                              second < columns ? __ldg(up + second) : 0.0f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) acc[i] = op(acc[i], numbers[i / 2 % 2]);
  }
  // Multiplies the sums of each token by weight_of(token). Tokens past the tile's end have any
  // weight; they are not stored.
  template <typename WeightOf>
  __device__ __forceinline__ void weigh(Sums& acc, WeightOf&& weight_of) const {
    const std::uint32_t first = 2 * reread_thread_index<4>();
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      const float weights[] = {weight_of(8 * n + first), weight_of(8 * n + first + 1)};
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[4 * n + i] *= weights[i % 2];
    }
  }
  __device__ __forceinline__ void activate(const ActivationForm& form, Sums& acc) const {
    activate_sums<kGated ? 2 : 4, 4, kGated>(form, acc);
  }
  // Stores elements of 16 bits, below `columns` and for the first `rows` tokens. pack(sums) makes
  // two of them from a sum and the next; row_of(token) is the token's row.
  template <typename Pack, typename RowOf>
  __device__ __forceinline__ void store(const Epilogue<C>& epilogue, std::uint32_t rows,
                                        std::uint32_t columns, Sums& acc, Pack&& pack,
                                        RowOf&& row_of) const {
    store_tile<C, N, kGated>(
        shared_address(epilogue.staging[group_]), group_barrier(group_), rows,
        column0_ < columns ? columns - column0_ : 0,
        [&](int n) {
          const float* const sums = acc + 4 * n;
          return uint2{pack(sums), kGated ? 0 : pack(sums + 2)};
        },
        [&](std::uint32_t token) { return row_of(token) + column0_; });
  }

 private:
  // Returns the column of the thread's first weight row.
  __device__ std::uint32_t column() const {
    const std::uint32_t thread = reread_thread_index<kWarpgroup>();
    return column0_ + thread / 32 * (kColumns / 4) + thread % 32 / 4;
  }

  std::uint32_t group_, column0_;
};

// Makes the tables of code_table() in shared memory. Called by all threads.
__device__ __forceinline__ void make_code_tables(ScaleNotes<true>& notes) {
  if (threadIdx.x < kCodeTables) notes.tables[threadIdx.x] = kTablesOfSteps.of_step[threadIdx.x];
}

// Stores a first GEMM's tile: h, in bf16.
template <int N, bool kSilu, bool kGated, typename C>
__device__ __forceinline__ void store_hidden(const Epilogue<C>& epilogue, const TileTask& task,
                                             std::uint32_t group, const HiddenSlots<C>& to_slots,
                                             float (&acc)[N / 2]) {
  const HiddenParams& layer = to_slots.layer;
  const HiddenValues<kSilu, kGated, 2> value(epilogue.activation.form);
  value.template prepare<4>(acc);
  const std::uint32_t stride = layer.h_stride / 8;
  const std::uint32_t to =
      to_slots.first_row(task.tile) * (stride * C::kNumerics.token_bytes() / 2);
  WeightMajorPlaces<N, kGated, C>(task, group)
      .store(
          epilogue, task.rows,
          static_cast<std::uint32_t>(epilogue.experts.ffn(task.shared != 0).intermediate), acc,
          [&](const float* sums) { return pack_bf16(value(sums), value(sums + 1)); },
          [&](std::uint32_t token) {
            return reinterpret_cast<std::uint16_t*>(layer.h) + std::size_t{to + token * stride} * 8;
          });
}

}  // namespace switchyard::gpu
