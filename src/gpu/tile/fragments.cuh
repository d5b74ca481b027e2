// Fragments of four-bit weights in bf16: from a stage of the ring to registers.
#pragma once

#include "gpu/ptx/compiler.cuh"
#include "gpu/ptx/memory.cuh"
#include "gpu/tile/config.h"
#include "gpu/tile/four_bit.h"

namespace switchyard::gpu {

// A stage's instructions are issued in two halves: the operands of one half are made while the
// products of the other are under way.
inline constexpr int kHalves = 2, kHalfSteps = 2;
using Fragments = std::uint32_t[kHalfSteps][4];
// The registers of both halves. Their numbers mean nothing between tiles.
template <bool kExist>
struct OperandRegisters {
  Fragments half[kHalves] = {};
};
template <>
struct OperandRegisters<false> {};

// Multiplies a pair of bf16 by the lower or upper number of another. The instruction takes half of
// an operand for both, if the pair is taken apart and put together so.
template <int kHalf>
__device__ __forceinline__ std::uint32_t multiply_bf16(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product;
  asm("{\n.reg .b16 h<2>;\n.reg .b32 both;\nmov.b32 {h0, h1}, %2;\nmov.b32 both, {h%3, h%3};\n"
      "mul.rn.bf16x2 %0, %1, both;\n}"
      : "=r"(product)
      : "r"(a), "r"(b), "n"(kHalf));
  return product;
}
// The same, into a register that keeps its number if `go` is 0, which it never is.
template <int kHalf>
__device__ __forceinline__ void multiply_bf16_into(std::uint32_t& to, std::uint32_t a,
                                                   std::uint32_t b, std::uint32_t go) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b16 h<2>;\n.reg .b32 both;\nsetp.ne.u32 p, %3, 0;\n"
      "mov.b32 {h0, h1}, %2;\nmov.b32 both, {h%4, h%4};\n@p mul.rn.bf16x2 %0, %1, both;\n}"
      : "+r"(to)
      : "r"(a), "r"(b), "r"(go), "n"(kHalf));
}
__device__ __forceinline__ std::uint32_t subtract_bf16(std::uint32_t a, std::uint32_t b) {
  std::uint32_t difference;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}

// The scales of this thread's two rows of a box, for two groups of columns each: of MXFP4 a pair
// for each row, of INT4 a pair for each group.
template <DType kType>
struct RowScales {
  std::uint32_t pairs[2];

  // `words`: the thread's scales of the box.
  __device__ __forceinline__ explicit RowScales(const uint2& words) : pairs{words.x, words.y} {
    if constexpr (kType == DType::kF4E2M1) {
      // Bytes are exponents of bf16, which begin at bit 7: of both rows in turn.
      pairs[0] = words.x << 7 & 0x7f807f80u;
      pairs[1] = words.x >> 1 & 0x7f807f80u;
    }
  }
  static constexpr bool kOfRows = kType == DType::kF4E2M1;
  static constexpr int half(int row, int group) { return kOfRows ? group : row; }
  __device__ std::uint32_t pair(int row, int group) const { return pairs[kOfRows ? row : group]; }
};

// This thread's codes and scales of a box.
struct BoxWords {
  uint4 codes;
  uint2 scales;
};
// Where this thread's words are in a box.
template <DType kType>
class BoxPlaces {
 public:
  __device__ explicit BoxPlaces(std::uint32_t group) {
    using Box = FourBitBox<kType>;
    const std::uint32_t thread = reread_thread_index<kWarpgroup>();
    codes_ = (group * kWarpgroup + thread) * Box::kLaneBytes;
    scales_ = Box::kScalesAt +
              (group * (kWarpgroup / 4) + thread / 32 * 8 + thread % 32 / 4) * Box::kScaleBytes;
  }
  // Loads them from the box at `box` + `more`, of which `more` may be a constant.
  __device__ __forceinline__ BoxWords load(std::uint32_t box, std::uint32_t more = 0) const {
    BoxWords words{load_shared_vector(box + codes_ + more), {}};
    if constexpr (FourBitBox<kType>::kIsFloat) {
      words.scales.x = __float_as_uint(load_shared_float(box + scales_ + more));
    } else {
      const float2 both = load_shared_floats(box + scales_ + more);
      words.scales = {__float_as_uint(both.x), __float_as_uint(both.y)};
    }
    return words;
  }

 private:
  std::uint32_t codes_, scales_;
};

// The operands of the half's instructions. A half is a group of columns that share a scale.
// assign<kHalf>(register, codes, scales) multiplies codes by the scale in that half.
template <int kGroup, DType kType, typename Assign>
__device__ __forceinline__ void make_fragments(const BoxWords& words, Fragments& to,
                                               Assign&& assign) {
  const CodeWords codes = kGroup == 0 ? CodeWords{words.codes.x, words.codes.y}
                                      : CodeWords{words.codes.z, words.codes.w};
  using Scales = RowScales<kType>;
  const Scales scales(words.scales);
#pragma unroll
  for (std::uint32_t step = 0; step < kHalfSteps; ++step) {
#pragma unroll
    for (std::uint32_t reg = 0; reg < 4; ++reg) {
      std::uint32_t value = fragment<kType>(codes, 4 * step + reg);
      // 136: the zero of a code, 8, where fragment() puts it.
      if constexpr (kType == DType::kU4) value = subtract_bf16(value, 0x43084308u);
      if (reg % 2 == 0) {
        assign.template operator()<Scales::half(0, kGroup)>(to[step][reg], value,
                                                            scales.pair(0, kGroup));
      } else {
        assign.template operator()<Scales::half(1, kGroup)>(to[step][reg], value,
                                                            scales.pair(1, kGroup));
      }
    }
  }
}
template <int kGroup, DType kType>
__device__ __forceinline__ void make_fragments(const BoxWords& words, Fragments& to) {
  make_fragments<kGroup, kType>(
      words, to, [&]<int kHalf>(std::uint32_t& product, std::uint32_t a, std::uint32_t b) {
        product = multiply_bf16<kHalf>(a, b);
      });
}

// --- Fragments in E5M2: of a group of 32 columns, which one instruction takes.

// code_table() of each step.
struct CodeTables {
  std::uint64_t of_step[kCodeTables];

  constexpr CodeTables() : of_step{} {
    for (std::uint32_t step = 0; step < kCodeTables; ++step) of_step[step] = code_table(step);
  }
};
__constant__ const CodeTables kTablesOfSteps;

// The upper half of a word of magnitudes, in both halves: as a number of fp16 times 1. The pipe
// that shifts is busy with look_up(). (No magnitudes are a NaN, because bit 11 of a half is clear.
// A product of integers takes longer, and so do passes with it.)
__device__ __forceinline__ std::uint32_t upper_half(std::uint32_t word) {
  std::uint32_t half;
  asm("{\n.reg .b16 h<2>;\n.reg .b32 both;\nmov.b32 {h0, h1}, %1;\nmov.b32 both, {h1, h1};\n"
      "mul.rn.f16x2 %0, both, %2;\n}"
      : "=r"(half)
      : "r"(word), "r"(0x3c003c00u));
  return half;
}

// A byte of the table for each of four codes: see code_word().
__device__ __forceinline__ std::uint32_t look_up(const uint2& table, std::uint32_t magnitudes) {
  std::uint32_t bytes;
  // (The intrinsic function would clear bits of the codes that are clear.)
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(table.x), "r"(table.y), "r"(magnitudes));
  return bytes;
}

// a | (b & 0x80808080), into a register that keeps its number if `go` is 0, which it never is.
__device__ __forceinline__ void sign_into(std::uint32_t& to, std::uint32_t a, std::uint32_t b,
                                          std::uint32_t go) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p lop3.b32 %0, %1, %2, 0x80808080, 0xf8;\n}"
      : "+r"(to)
      : "r"(a), "r"(b), "r"(go));
}

// The operands of the box's two instructions. `table`: where those of code_table() are in shared
// memory. A box's scales are their offsets, which take the place of the address's last byte.
// kMultiplies: by upper_half(), as low passes do.
template <bool kMultiplies, typename Assign>
__device__ __forceinline__ void make_code_fragments(const BoxWords& words, std::uint32_t table,
                                                    Fragments& to, Assign&& assign) {
  const std::uint32_t codes[] = {words.codes.x, words.codes.y, words.codes.z, words.codes.w};
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    uint2 tables[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float2 magnitudes =
          load_shared_floats(__byte_perm(table, words.scales.x, 0x3214 + 2 * group + row));
      tables[row] = {__float_as_uint(magnitudes.x), __float_as_uint(magnitudes.y)};
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t word = codes[2 * group + i], magnitudes = word & 0x77777777u;
      assign(to[group][2 * i], look_up(tables[0], magnitudes), word);
      const std::uint32_t upper = kMultiplies ? upper_half(magnitudes) : magnitudes >> 16;
      assign(to[group][2 * i + 1], look_up(tables[1], upper), word << 4);
    }
  }
}
template <bool kMultiplies>
__device__ __forceinline__ void make_code_fragments(const BoxWords& words, std::uint32_t table,
                                                    Fragments& to) {
  make_code_fragments<kMultiplies>(
      words, table, to, [](std::uint32_t& made, std::uint32_t bytes, std::uint32_t signs) {
        made = bytes | (signs & 0x80808080u);
      });
}

}  // namespace switchyard::gpu
