// Weights of four bits in the order in which the matrix instruction takes them from registers.
//
// A box is kTileRows weight rows x the columns of a stage, or of a part of one: 64 rows for each
// math warpgroup, cut into the fragments of four instructions. Every thread has 32 codes of a box,
// 16 bytes, which one load takes to its registers: two words for each two instructions, sixteen
// codes, two in each register that an instruction wants. Behind the codes are the scales of each
// warp's 16 rows. The bits of the words stand where few instructions make bf16 of them; see
// fragment().
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "gpu/ptx/machine.h"
#include "switchyard/tensor.h"

namespace switchyard::gpu {

template <DType kType>
struct FourBitBox {
  static_assert(is_four_bit(kType));
  static constexpr bool kIsFloat = kType == DType::kF4E2M1;
  static constexpr std::uint32_t kRows = 128, kColumns = 64, kGroup = 32;
  static constexpr std::uint32_t kLanes = 256, kLaneBytes = 16;
  // Scales of rows g and g + 8 of a warp, for each of two groups of columns: a byte each of MXFP4,
  // bf16 of INT4.
  static constexpr std::uint32_t kScaleBytes = kIsFloat ? 4 : 8;
  static constexpr std::uint32_t kScalesAt = kLanes * kLaneBytes;
  static constexpr std::uint32_t kBytes = kScalesAt + kRows / 2 * kScaleBytes;
};

inline constexpr int kBoxColumnsOfFourBits = FourBitBox<DType::kU4>::kColumns;

constexpr std::uint32_t box_bytes(DType type) {
  return type == DType::kF4E2M1 ? FourBitBox<DType::kF4E2M1>::kBytes
                                : FourBitBox<DType::kU4>::kBytes;
}

// The place of a thread's eight codes of one instruction in the box: code `i` is in half i % 2 of
// register i / 2.
struct FragmentPlace {
  std::uint32_t row, column;  // of the first code
  // A register has two neighbouring columns. The four are those of the row, of the row 8 below,
  // and of both again 8 columns on.
  SWITCHYARD_HOST_DEVICE constexpr std::uint32_t row_of(std::uint32_t i) const {
    return row + i / 2 % 2 * 8;
  }
  SWITCHYARD_HOST_DEVICE constexpr std::uint32_t column_of(std::uint32_t i) const {
    return column + i / 4 * 8 + i % 2;
  }
};
SWITCHYARD_HOST_DEVICE constexpr FragmentPlace fragment_place(std::uint32_t lane,
                                                              std::uint32_t step) {
  return {lane / 32 * 16 + lane % 32 / 4, step * 16 + lane % 4 * 2};
}
// The first row, and row 8 below it, of which a box's scales number `i` are.
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t scales_row(std::uint32_t i) {
  return i / 8 * 16 + i % 8;
}

// Sixteen codes, of two neighbouring instructions, stand in a pair of words. A register of bf16 has
// the sign and the magnitude of each of its two codes at kCodeBits. In the words it stands turned
// left by so many bits. Three registers of each instruction fill three quarters of its word. The
// fourth registers of both fill what is left of both words, at kOfFirst of the first.
inline constexpr std::uint32_t kCodeBits = 0x81c081c0u, kOfFirst = 0x30603060u;
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t turn_of(std::uint32_t reg) {
  constexpr std::uint32_t kTurns[8] = {2, 8, 28, 0, 4, 26, 30, 6};
  return kTurns[reg];
}
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t turn_left(std::uint32_t word, std::uint32_t bits) {
  return word << bits % 32 | word >> (32 - bits) % 32;
}
struct CodeWords {
  std::uint32_t first, second;
};

// One code in its place in a pair of words: `i` counts the codes of both instructions.
template <DType kType>
SWITCHYARD_HOST_DEVICE constexpr CodeWords place_code(std::uint32_t code, std::uint32_t i) {
  const std::uint32_t half = i % 2 * 16, reg = i / 2;
  if constexpr (kType == DType::kU4) {
    const std::uint32_t word = code << (half + 4 * (reg % 4));
    return reg < 4 ? CodeWords{word, 0} : CodeWords{0, word};
  } else {
    const std::uint32_t word =
        turn_left(((code >> 3) << 15 | (code & 7) << 6) << half, turn_of(reg));
    if (reg % 4 == 3) return {word & kOfFirst, word & ~kOfFirst};
    return reg < 4 ? CodeWords{word, 0} : CodeWords{0, word};
  }
}

// The two codes of register `reg` of eight as numbers of bf16: of MXFP4 their values times 2^-126,
// of INT4 128 + their codes. Both are exact.
template <DType kType>
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t fragment(const CodeWords& words, std::uint32_t reg) {
  if constexpr (kType == DType::kU4) {
    return ((reg < 4 ? words.first : words.second) >> (4 * (reg % 4)) & 0x000f000fu) | 0x43004300u;
  } else {
    // The exponent and mantissa are at the end of bf16's exponent: 2^126 takes them to their
    // values, those without an exponent, too.
    const std::uint32_t word = reg % 4 == 3 ? (words.first & kOfFirst) | (words.second & ~kOfFirst)
                               : reg < 4    ? words.first
                                            : words.second;
    const std::uint32_t back = 32 - turn_of(reg);
    // Where no bit has gone around, a shift does, which another unit of the processor can take.
    return (back < 16 ? word << back : turn_left(word, back)) & kCodeBits;
  }
}

// The pair of words of thread `lane` of a box for instructions 2 `pair` and the next.
// code_at(row, column) is a code.
template <DType kType, typename CodeAt>
SWITCHYARD_HOST_DEVICE CodeWords box_words(std::uint32_t lane, std::uint32_t pair,
                                           CodeAt&& code_at) {
  CodeWords words{};
  for (std::uint32_t i = 0; i < 16; ++i) {
    const FragmentPlace place = fragment_place(lane, 2 * pair + i / 8);
    const CodeWords of = place_code<kType>(code_at(place.row_of(i % 8), place.column_of(i % 8)), i);
    words.first |= of.first;
    words.second |= of.second;
  }
  return words;
}

// The row of a matrix that stands in row `row` of its boxes, counted over all of them. With two
// halves 8 rows of gate and 8 rows of up stand in turn.
struct BoxRow {
  std::uint32_t half, row;
};
SWITCHYARD_HOST_DEVICE constexpr BoxRow box_row(std::uint32_t row, int halves) {
  if (halves == 1) return {0, row};
  return {row / 8 % 2, row / 16 * 8 + row % 8};
}

// The scale of MXFP4 as a byte of a box: the exponent's field of the bf16 that the fragments are
// multiplied by, 2^126 times the scale. Scales above 2 have none.
inline constexpr std::uint32_t kMostMxScale = 128;
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t box_scale(std::uint32_t scale) {
  return scale + 126;
}

// --- MXFP4 as E5M2, for products with E4M3. A row's weights are multiplied as E5M2 times one power
// of two, the row's. The scale of a group of columns, relative to that power, moves the exponents
// of its codes. E5M2 has the eight magnitudes exactly at 29 scales, down into its subnormal
// numbers. (E4M3 has them at 15.)

// The magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 as E5M2, times 2^(step - 15), for steps below
// kCodeSteps: one byte each, the first the lowest.
inline constexpr std::uint32_t kCodeSteps = 29;
// Groups of zeros may have any step: it is taken modulo kCodeTables, and every table has a zero.
inline constexpr std::uint32_t kCodeTables = 32;
SWITCHYARD_HOST_DEVICE constexpr std::uint64_t code_table(std::uint32_t step) {
  std::uint64_t table = 0;
  if (step >= kCodeSteps) return table;
  for (std::uint32_t magnitude = 0; magnitude < 8; ++magnitude) {
    // In units of the smallest E5M2, 2^-16.
    const std::uint32_t halves =
        magnitude < 4 ? magnitude : (2 + magnitude % 2) << (magnitude / 2 - 1);
    const std::uint32_t units = halves << step;
    std::uint32_t power = 0;
    while (units >> power > 1) ++power;
    const std::uint32_t code = units < 4 ? units : (power - 1) << 2 | (units >> (power - 2) & 3);
    table |= std::uint64_t{code} << (8 * magnitude);
  }
  return table;
}

// A thread's eight codes of MXFP4 for half of the 32 columns of an instruction, as word `number` of
// its four of the box: four neighbouring columns of a row and of the row 8 below. Magnitudes stand
// as a permutation of bytes takes them, the first row's in the lower half, and signs in the bits
// between, 4 bits below a byte's sign those of the second row.
template <typename CodeAt>
SWITCHYARD_HOST_DEVICE std::uint32_t code_word(std::uint32_t lane, std::uint32_t number,
                                               CodeAt&& code_at) {
  const std::uint32_t row = lane / 32 * 16 + lane % 32 / 4, column = number * 16 + lane % 4 * 4;
  std::uint32_t word = 0;
  for (std::uint32_t i = 0; i < 4; ++i) {
    const std::uint32_t first = code_at(row, column + i), second = code_at(row + 8, column + i);
    word |= (first & 7) << 4 * i | (first >> 3) << (8 * i + 7);
    word |= (second & 7) << (4 * i + 16) | (second >> 3) << (8 * i + 3);
  }
  return word;
}

// A row's power of two is that of its largest scale, `top`, less the highest step: E5M2 reaches to
// 6 * 2^kTopPower. Tops are at least kLeastTop, because the scale of step 0 is not negative.
inline constexpr std::uint32_t kTopPower = kCodeSteps - 1 - 15;
inline constexpr std::uint32_t kLeastTop = kCodeSteps - 1;
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t bits_of_row_power(std::uint32_t top) {
  return (top - kTopPower) << 23;
}
// The scale of step 0 in a row. `power`: bits_of_row_power().
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t least_scale_of(std::uint32_t power) {
  return (power >> 23) + kTopPower - (kCodeSteps - 1);
}
// The byte of a box for a scale that is `step` above the row's least one: the offset of the step's
// table among those of code_table().
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t box_step(std::uint32_t step) {
  return step % kCodeTables * sizeof(code_table(0));
}

}  // namespace switchyard::gpu
