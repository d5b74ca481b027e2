// The warp's matrix instruction, and the store that transposes.
#pragma once

#include <cstdint>

namespace switchyard::gpu {

// C += A B with A 16 x 16 and B 16 x 8, in bf16 with fp32 sums.
__device__ __forceinline__ void multiply_16x8x16(float (&c)[4], std::uint32_t a0, std::uint32_t a1,
                                                 std::uint32_t a2, std::uint32_t a3,
                                                 std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same in fp16.
__device__ __forceinline__ void multiply_16x8x16_f16(float (&c)[4], std::uint32_t a0,
                                                     std::uint32_t a1, std::uint32_t a2,
                                                     std::uint32_t a3, std::uint32_t b0,
                                                     std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Loads four 8 x 8 matrices of 16-bit elements, whose rows are at the addresses of lanes 0 to 7, 8
// to 15 and so on. Lane 4 g + t gets elements 2 t and 2 t + 1 of row g of each.
__device__ __forceinline__ void load_matrices(std::uint32_t address, std::uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// Stores four 8 x 8 matrices of 16-bit elements whose rows are in a warp's registers. With
// kTransposed their columns become rows in shared memory.
template <bool kTransposed = true>
__device__ __forceinline__ void store_matrices(std::uint32_t address, std::uint32_t a,
                                               std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  if constexpr (kTransposed) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(a), "r"(b), "r"(c), "r"(d)
        : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
  }
}

}  // namespace switchyard::gpu
