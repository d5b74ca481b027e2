// The copy engine (TMA): boxes of matrices and runs of bytes, between device and shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gpu/ptx/machine.h"

namespace switchyard::gpu {

// The multicast mask of both blocks of a pair. A load goes to the same place in either's shared
// memory.
inline constexpr std::uint16_t kBothOfPair = (1 << kPair) - 1;

// Loads a box of a matrix whose first element is in column k of row `row`.
__device__ __forceinline__ void load_rows(const CUtensorMap& map, std::uint32_t to,
                                          std::uint32_t barrier, int k, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(k), "r"(row)
      : "memory");
}
// Loads a box as above; with `both`, into the shared memory of both blocks of the pair.
__device__ __forceinline__ void load_rows(const CUtensorMap& map, std::uint32_t to,
                                          std::uint32_t barrier, int k, int row, bool both) {
  if (both) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(k), "r"(row), "h"(kBothOfPair)
        : "memory");
  } else {
    load_rows(map, to, barrier, k, row);
  }
}

// How long the L2 cache keeps what is loaded, as createpolicy.fractional encodes it.
inline constexpr std::uint64_t kEvictFirst = 0x12f0000000000000, kEvictLast = 0x14f0000000000000;

// Loads a box of the five-dimensional map over an expert's weights; see FfnParams. The map decides
// which coordinate, `second` or `third`, counts groups of rows.
__device__ __forceinline__ void load_box(const CUtensorMap& map, std::uint32_t to,
                                         std::uint32_t barrier, int k, int second, int third,
                                         int expert, std::uint64_t policy, bool both) {
  if (both) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8, %9;" ::"r"(
            to),
        "l"(&map), "r"(barrier), "r"(k), "r"(0), "r"(second), "r"(third), "r"(expert),
        "h"(kBothOfPair), "l"(policy)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(k), "r"(0), "r"(second), "r"(third), "r"(expert), "l"(policy)
        : "memory");
  }
}

// Copies contiguous bytes, in multiples of 16, to and from shared memory.
__device__ __forceinline__ void load_bytes(std::uint32_t to, const void* from, std::uint32_t bytes,
                                           std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// Loads as above; `policy` says how long the L2 cache keeps the bytes.
__device__ __forceinline__ void load_bytes(std::uint32_t to, const void* from, std::uint32_t bytes,
                                           std::uint32_t barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void store_bytes(void* to, std::uint32_t from, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
// Makes a group of all stores that this thread has issued since the last one.
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all of this thread's groups but the newest kNewest are in memory. It has no deadline,
// because it waits for nothing but this GPU's memory.
template <int kNewest>
__device__ __forceinline__ void await_all_stores_but() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kNewest) : "memory");
}

}  // namespace switchyard::gpu
