// Finishes the tiles of GroupedGemm: scales and biases, the activation, the rows' weights, and a
// place in the output for each row. Sums have the forms of tile/weight_major.cuh and
// tile/token_major.cuh.
#pragma once

#include "gpu/grouped/rows.cuh"
#include "gpu/tile/gemm.cuh"

namespace switchyard::gpu {

__device__ __forceinline__ void store_value(void* data, std::size_t at, DType type, float v) {
  if (type == DType::kF32) {
    static_cast<float*>(data)[at] = v;
  } else {
    static_cast<std::uint16_t*>(data)[at] = static_cast<std::uint16_t>(pack(type, v, 0.0f));
  }
}

// A tile's rows.
struct TileOutput {
  const GroupedCall& call;
  const TileTask& task;
  const std::uint32_t& log2_splits;  // of the call
  std::uint32_t packed;              // the tile's first row in packed order
  std::uint32_t first;               // the same in the output's layout

  __device__ TileOutput(const GroupedCall& its_call, const RowTable& rows, const TileTask& its,
                        const std::uint32_t& its_log2_splits)
      : call(its_call),
        task(its),
        log2_splits(its_log2_splits),
        packed(rows.packed_begin[its.expert] + its.first_row),
        first(first_row(its_call.out, rows, rows.out_begin, its.expert) + its.first_row) {}

  // Returns the first element of a token's row, whose elements have `size` bytes.
  __device__ std::byte* row(std::uint32_t token, std::uint32_t size) const {
    std::int64_t at = first + token;
    if (call.index != nullptr) {
      at = __ldg(call.index + packed + token);
      if (at < 0) return static_cast<std::byte*>(call.nowhere);
    }
    return static_cast<std::byte*>(call.y) + at * call.y_stride * size;
  }
  __device__ float weight(std::uint32_t token) const {
    return token < task.rows ? __ldg(call.weights + packed + token) : 0.0f;
  }
};

// The places of a thread's sums: calls each(i, token, column, of_up) for every sum i that it has of
// the tile. Columns count within one half if kGated.
template <int N, bool kGated>
struct WeightMajorPlaces {
  std::uint32_t column0;
  template <typename Each>
  __device__ __forceinline__ void for_each(Each&& each) const {
    const std::uint32_t thread = fresh_thread_index<kWarpgroup>(), lane = thread % 32;
    const std::uint32_t column = column0 + thread / 32 * (kGated ? 8 : 16) + lane / 4;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const bool second = i / 2 % 2 != 0;
      each(i, i / 4 * 8 + 2 * (lane % 4) + i % 2, column + (!kGated && second ? 8 : 0),
           kGated && second);
    }
  }
};
template <int kTaskBoxes, bool kGated>
struct TokenMajorPlaces {
  std::uint32_t block, group;
  template <typename Each>
  __device__ __forceinline__ void for_each(Each&& each) const {
    constexpr std::uint32_t kColumns = kGated ? kBoxColumns / 2 : kBoxColumns;
    const std::uint32_t lane = fresh_thread_index<32>();
    const std::uint32_t token = token_major_row<kTaskBoxes>() + lane / 4;
#pragma unroll
    for (int i = 0; i < kTaskBoxes * kBoxColumns / 2; ++i) {
      const int box = i / (kBoxColumns / 2), at = i % (kBoxColumns / 2);
      const bool up = kGated && at >= kBoxColumns / 4;
      const std::uint32_t column =
          (block * 2 + token_major_box<kTaskBoxes>(box, group)) * kColumns +
          (at / 4 * 8) % kColumns + 2 * (lane % 4) + at % 2;
      each(i, token + (at / 2 % 2 != 0 ? 8 : 0), column, up);
    }
  }
};

// Joins the parts of a split K. Every part stores its sums. The warpgroup that stores the last part
// gets the sums of all, added in the order of the parts; for others it returns false. `last`: this
// warpgroup's word in shared memory.
template <typename Places, typename Sum>
__device__ __forceinline__ bool join_parts(const GroupedParams& params, const TileOutput& to,
                                           const Places& places, std::uint32_t group,
                                           std::uint32_t width, std::uint32_t* last, Sum&& sum) {
  const GroupedCall& call = to.call;
  const auto at = [&](std::uint32_t part, std::uint32_t token, std::uint32_t column, bool up) {
    return call.sums + (part * call.split_rows + to.packed + token) * width + column +
           (up ? params.columns : 0);
  };
  const auto exists = [&](std::uint32_t token, std::uint32_t column) {
    return token < to.task.rows && column < params.columns;
  };
  places.for_each([&](int i, std::uint32_t token, std::uint32_t column, bool up) {
    if (exists(token, column)) __stcg(at(to.task.split, token, column, up), sum(i));
  });
  __threadfence();
  named_barrier<kWarpgroup>(group_barrier(group));
  const std::uint32_t parts = 1u << to.log2_splits;
  if (fresh_thread_index<kWarpgroup>() == 0) {
    std::uint32_t* const stored =
        call.stored +
        (std::size_t{to.task.tile} * params.row_blocks + to.task.block) * kMathGroups + group;
    *last = atomicAdd(stored, 1) + 1 == parts ? 1 : 0;
    if (*last != 0) *stored = 0;
    __threadfence();
  }
  named_barrier<kWarpgroup>(group_barrier(group));
  if (*last == 0) return false;
  places.for_each([&](int i, std::uint32_t token, std::uint32_t column, bool up) {
    float all = 0;
    for (std::uint32_t part = 0; exists(token, column) && part < parts; ++part) {
      all += __ldcg(at(part, token, column, up));
    }
    sum(i) = all;
  });
  return true;
}

// Stores the sums as products.
template <typename Places, typename Sum>
__device__ __forceinline__ void store_products(const GroupedParams& params, const TileOutput& to,
                                               const Places& places, Sum&& sum) {
  places.for_each([&](int i, std::uint32_t token, std::uint32_t column, bool up) {
    if (token >= to.task.rows || column >= params.columns) return;
    store_value(to.call.products,
                static_cast<std::size_t>((to.first + token) * to.call.products_stride) +
                    (up ? params.up_at : params.gate_at) + column * params.product_step,
                to.call.type, sum(i));
  });
}
// Stores the output in fp32, from registers: four or eight lanes have 32 bytes of a row.
template <typename Places, typename Sum>
__device__ __forceinline__ void store_floats(const GroupedParams& params, const TileOutput& to,
                                             const Places& places, Sum&& sum) {
  places.for_each([&](int i, std::uint32_t token, std::uint32_t column, bool up) {
    if (up || token >= to.task.rows || column >= params.columns) return;
    reinterpret_cast<float*>(to.row(token, sizeof(float)))[column] = sum(i);
  });
}

// Finishes weight-major tiles.
template <int N, bool kGated, bool kActivates, typename C>
__device__ __forceinline__ void finish_grouped(const GroupedParams& params,
                                               const Epilogue<C>& epilogue, const TileOutput& to,
                                               std::uint32_t group, std::uint32_t* last,
                                               float (&acc)[N / 2]) {
  const TileTask& task = to.task;
  const std::uint32_t thread = fresh_thread_index<kWarpgroup>();
  const std::uint32_t warp = thread / 32, lane = thread % 32;
  constexpr std::uint32_t kColumns = kGated ? 32 : 64;  // from this warpgroup
  const std::uint32_t column0 = (task.block * kMathGroups + group) * kColumns;
  const WeightMajorPlaces<N, kGated> places{column0};
  const auto sum = [&](int i) -> float& { return acc[i]; };
  constexpr std::uint32_t kHalves = kGated ? 2 : 1;
  // (Only low tiles are split: with more sums there are no registers for this.)
  if constexpr (N <= kMostSplitRows) {
    if (to.log2_splits != 0 &&
        !join_parts(params, to, places, group, kHalves * params.columns, last, sum)) {
      return;
    }
  }
  if constexpr (kActivates) {
    finish_products<N, kGated>(
        epilogue, task, group, column0 + warp * (kColumns / 4) + lane / 4, [](std::uint32_t) {},
        acc);
    if (to.call.products != nullptr) store_products(params, to, places, sum);
    activate_sums<kGated ? 2 : 4, 4, kGated>(params.form, acc);
  } else {
    finish_sums<N>(epilogue, task, group, true, acc);
  }
  if (to.call.weights != nullptr) {
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      const std::uint32_t token = 8 * n + 2 * (lane % 4);
      const float weights[] = {to.weight(token), to.weight(token + 1)};
#pragma unroll
      for (int i = 0; i < (kGated ? 2 : 4); ++i) acc[4 * n + i] *= weights[i % 2];
    }
  }
  if (to.call.type == DType::kF32) {
    store_floats(params, to, places, sum);
    return;
  }
  store_tile<C, N, kGated>(
      shared_address(epilogue.staging[group]), group_barrier(group), task.rows,
      column0 < params.columns ? params.columns - column0 : 0,
      [&](int n) {
        const float* const sums = acc + 4 * n;
        return uint2{pack(to.call.type, sums[0], sums[1]),
                     kGated ? 0 : pack(to.call.type, sums[2], sums[3])};
      },
      [&](std::uint32_t token) {
        return reinterpret_cast<std::uint16_t*>(to.row(token, sizeof(std::uint16_t))) + column0;
      });
}

// Finishes token-major tiles.
template <int kTaskBoxes, bool kGated, bool kActivates, typename C>
__device__ __forceinline__ void finish_grouped(const GroupedParams& params,
                                               const Epilogue<C>& epilogue, const TileOutput& to,
                                               std::uint32_t group, std::uint32_t* last,
                                               TokenMajorSums<kTaskBoxes>& acc) {
  const TileTask& task = to.task;
  const TokenMajorPlaces<kTaskBoxes, kGated> places{task.block, group};
  const auto sum = [&](int i) -> float& {
    return acc[i / (kBoxColumns / 2)][i % (kBoxColumns / 2)];
  };
  constexpr std::uint32_t kHalves = kGated ? 2 : 1;
  if (to.log2_splits != 0 &&
      !join_parts(params, to, places, group, kHalves * params.columns, last, sum)) {
    return;
  }
  const std::uint32_t row0 = token_major_row<kTaskBoxes>();
  if constexpr (kActivates) {
    finish_products<kTaskBoxes, kGated>(
        epilogue, task, group, [](std::uint32_t) {}, acc);
    if (to.call.products != nullptr) store_products(params, to, places, sum);
    constexpr int kPart = kGated ? kBoxColumns / 4 : kBoxColumns / 2;
#pragma unroll
    for (auto& box : acc) activate_sums<kPart, kBoxColumns / 2, kGated>(params.form, box);
  } else {
    finish_sums<kTaskBoxes>(epilogue, task, group, acc);
  }
  if (to.call.weights != nullptr) {
    const std::uint32_t token = row0 + fresh_thread_index<32>() / 4;
    const float weights[] = {to.weight(token), to.weight(token + 8)};
#pragma unroll
    for (auto& box : acc) {
#pragma unroll
      for (int i = 0; i < kBoxColumns / (kGated ? 4 : 2); ++i) box[i] *= weights[i / 2 % 2];
    }
  }
  if (to.call.type == DType::kF32) {
    store_floats(params, to, places, sum);
    return;
  }
  const WarpStaging staging(epilogue, group);
  constexpr std::uint32_t kColumns = kGated ? kBoxColumns / 2 : kBoxColumns;  // of a box
  std::uint32_t column = (task.block * 2 + token_major_box<kTaskBoxes>(0, group)) * kColumns;
#pragma unroll
  for (int box = 0; box < kTaskBoxes; ++box) {
#pragma unroll
    for (int part = 0; part < (kGated ? 2 : 4); ++part) {
      const std::uint32_t row = row0 + part % 2 * kWarpStagedTokens;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const auto octet = [&](int n) {
          const float* const sums = acc[box] + 4 * (part / 2 * 8 + 4 * j + n) + part % 2 * 2;
          return pack(to.call.type, sums[0], sums[1]);
        };
        const std::uint32_t lane = fresh_thread_index<32>();
        store_matrices<false>(staging.place(lane % 8, 4 * j + lane / 8), octet(0), octet(1),
                              octet(2), octet(3));
      }
      staging.drain(
          [&](std::uint32_t token, std::uint32_t vector) {
            return row + token < task.rows && column + 8 * vector < params.columns;
          },
          [&](std::uint32_t token, std::uint32_t vector) {
            return reinterpret_cast<std::uint16_t*>(to.row(row + token, sizeof(std::uint16_t))) +
                   column + 8 * vector;
          });
      if (part % 2 == 1) column += 64;
    }
  }
}

}  // namespace switchyard::gpu
