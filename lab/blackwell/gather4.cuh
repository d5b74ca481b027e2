// The copy engine of Blackwell (sm_100a, PTX 8.6): four rows of a matrix at a time, from and to any
// places. Never run: it has been compiled and disassembled, on no such GPU.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace switchyard::gpu {

// Loads the columns of a box, from column k on, of four rows: one below the other, and swizzled as
// four rows of a box are. The map's boxes have one row.
__device__ __forceinline__ void gather4(const CUtensorMap& map, std::uint32_t to,
                                        std::uint32_t barrier, int k, const int4& rows) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(k), "r"(rows.x), "r"(rows.y), "r"(rows.z), "r"(rows.w)
      : "memory");
}
// Stores four rows that lie as gather4() leaves them. It belongs to this thread's next group of
// stores: see commit_stores().
__device__ __forceinline__ void scatter4(const CUtensorMap& map, std::uint32_t from, int k,
                                         const int4& rows) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group"
      " [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
      "r"(from), "r"(k), "r"(rows.x), "r"(rows.y), "r"(rows.z), "r"(rows.w)
      : "memory");
}

}  // namespace switchyard::gpu
