// Finishes the tiles of GroupedGemm: scales and biases, the activation, the rows' weights, and a
// place in the output for each row.
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
  // The scales of tokens in FP8, where each has one. Behind the last row's is room for those of
  // kMostTileRows more.
  __device__ const float* scales() const { return call.x_scales + packed; }
  __device__ float weight(std::uint32_t token) const {
    return token < task.rows ? __ldg(call.weights + packed + token) : 0.0f;
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
  if (reread_thread_index<kWarpgroup>() == 0) {
    std::uint32_t* const stored =
        call.stored +
        (std::size_t{to.task.tile} * params.paired_row_blocks + to.task.block) * kMathGroups +
        group;
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

// Finishes a tile. (Only low weight-major tiles are split: with more sums there are no registers
// for this.)
template <int kVariant, bool kGated, bool kActivates, typename C>
__device__ __forceinline__ void finish_grouped(const GroupedParams& params,
                                               const Epilogue<C>& epilogue, const TileOutput& to,
                                               std::uint32_t group, std::uint32_t* last,
                                               typename Places<kVariant, kGated, C>::Sums& acc) {
  using Its = Places<kVariant, kGated, C>;
  const TileTask& task = to.task;
  const Its places(task, group);
  const auto sum = [&](int i) -> float& { return Its::at(acc, i); };
  if constexpr (kMakesCodes<C>) {
    places.weigh(acc, [of = to.scales()](std::uint32_t token) { return __ldg(of + token); });
  }
  if constexpr (kTokenMajor<C> || kVariant <= kMostSplitRows) {
    constexpr std::uint32_t kHalves = kGated ? 2 : 1;
    if (to.log2_splits != 0 &&
        !join_parts(params, to, places, group, kHalves * params.columns, last, sum)) {
      return;
    }
  }
  if constexpr (kActivates) {
    finish_products<kVariant, false, kGated>(
        epilogue, task, group, [](std::uint32_t) {}, acc);
    if (to.call.products != nullptr) store_products(params, to, places, sum);
    places.activate(params.form, acc);
  } else {
    finish_sums<kVariant>(epilogue, task, group, true, acc);
  }
  if (to.call.weights != nullptr) {
    places.weigh(acc, [&](std::uint32_t token) { return to.weight(token); });
  }
  if (to.call.type == DType::kF32) {
    store_floats(params, to, places, sum);
    return;
  }
  places.store(
      epilogue, task.rows, params.columns, acc,
      [&](const float* sums) { return pack(to.call.type, sums[0], sums[1]); },
      [&](std::uint32_t token) {
        return reinterpret_cast<std::uint16_t*>(to.row(token, sizeof(std::uint16_t)));
      });
}

}  // namespace switchyard::gpu
