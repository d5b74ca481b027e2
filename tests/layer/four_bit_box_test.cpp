// The orders of four-bit codes in which kernels read them, and the bit tricks that make bf16 and
// E4M3 of them.
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <set>
#include <utility>

#include "base/convert.h"
#include "gpu/tile/four_bit.h"
#include "reference/decode.h"

namespace switchyard::gpu {
namespace {

std::uint32_t half_of(std::uint32_t pair, std::uint32_t half) {
  return pair >> (16 * half) & 0xffff;
}

// Decodes as a kernel does: the fragment, times a scale that is a pair of bf16 numbers.
float value_of(const CodeWords& words, std::uint32_t i, std::uint32_t scale) {
  const std::uint32_t pair = fragment<DType::kF4E2M1>(words, i / 2);
  const auto code = static_cast<std::uint16_t>(half_of(pair, i % 2));
  return bf16_to_f32(code) * bf16_to_f32(static_cast<std::uint16_t>(box_scale(scale) << 7));
}

constexpr std::uint32_t kPlaces = 16;  // of a pair of words

// A pair of words with one code in place i and another in all others.
template <DType kType>
CodeWords words_with(std::uint32_t i, std::uint32_t code, std::uint32_t others) {
  CodeWords words{};
  for (std::uint32_t j = 0; j < kPlaces; ++j) {
    const CodeWords placed = place_code<kType>(j == i ? code : others, j);
    words.first |= placed.first;
    words.second |= placed.second;
  }
  return words;
}

TEST(FourBitBox, EveryCodeInEveryPlaceAndScale) {
  for (std::uint32_t i = 0; i < kPlaces; ++i) {
    for (std::uint32_t code = 0; code < 16; ++code) {
      for (const std::uint32_t others : {0u, 15u}) {
        const CodeWords mxfp4 = words_with<DType::kF4E2M1>(i, code, others);
        for (std::uint32_t scale = 0; scale <= kMostMxScale; ++scale) {
          ASSERT_EQ(value_of(mxfp4, i, scale),
                    reference::f4e2m1_to_double(static_cast<std::uint8_t>(code)) *
                        f8e8m0_to_f32(static_cast<std::uint8_t>(scale)))
              << "place " << i << " code " << code << " scale " << scale;
        }
        const std::uint32_t pair =
            fragment<DType::kU4>(words_with<DType::kU4>(i, code, others), i / 2);
        ASSERT_EQ(bf16_to_f32(static_cast<std::uint16_t>(half_of(pair, i % 2))),
                  128.0f + static_cast<float>(code));
      }
    }
  }
}

// Two codes never share a bit, and all of them fill both words.
template <DType kType>
void expect_places_apart() {
  CodeWords seen{};
  for (std::uint32_t i = 0; i < kPlaces; ++i) {
    const CodeWords of = place_code<kType>(15, i);
    EXPECT_EQ(of.first & seen.first, 0u);
    EXPECT_EQ(of.second & seen.second, 0u);
    seen.first |= of.first;
    seen.second |= of.second;
  }
  EXPECT_EQ(seen.first & seen.second, ~0u);
}
TEST(FourBitBox, PlacesAreApart) {
  expect_places_apart<DType::kF4E2M1>();
  expect_places_apart<DType::kU4>();
}

// The threads of a box have each of its elements once. The instruction wants them so: of a k16
// step, lane 4 g + t of a warp has rows g and g + 8 of the warp's 16, and columns 2 t, 2 t + 1, 2 t
// + 8 and 2 t + 9.
TEST(FourBitBox, EveryElementOnce) {
  std::set<std::pair<std::uint32_t, std::uint32_t>> seen;
  for (std::uint32_t lane = 0; lane < 256; ++lane) {
    for (std::uint32_t step = 0; step < 4; ++step) {
      const FragmentPlace place = fragment_place(lane, step);
      const std::uint32_t warp = lane / 32, g = lane % 32 / 4, t = lane % 4;
      for (std::uint32_t i = 0; i < 8; ++i) {
        const std::uint32_t reg = i / 2;
        EXPECT_EQ(place.row_of(i), 16 * warp + g + reg % 2 * 8);
        EXPECT_EQ(place.column_of(i), 16 * step + 2 * t + i % 2 + reg / 2 * 8);
        EXPECT_TRUE(seen.insert({place.row_of(i), place.column_of(i)}).second);
      }
    }
  }
  EXPECT_EQ(seen.size(), 128u * 64u);
}

TEST(FourBitBox, ScalesAndRows) {
  std::set<std::uint32_t> rows;
  for (std::uint32_t i = 0; i < 64; ++i) {
    rows.insert(scales_row(i));
    rows.insert(scales_row(i) + 8);
    // Where BoxPlaces of a thread with these rows is.
    const std::uint32_t lane = i / 8 * 32 + i % 8 * 4;
    EXPECT_EQ(fragment_place(lane, 0).row, scales_row(i));
  }
  EXPECT_EQ(rows.size(), 128u);
  for (std::uint32_t row = 0; row < 512; ++row) {
    const BoxRow of = box_row(row, 2);
    EXPECT_EQ(row, of.row / 8 * 16 + of.half * 8 + of.row % 8);
    EXPECT_EQ(box_row(row, 1).row, row);
  }
  static_assert(FourBitBox<DType::kF4E2M1>::kBytes == 4352);
  static_assert(FourBitBox<DType::kU4>::kBytes == 4608);
}

TEST(FourBitBox, WordsOfCodes) {
  const auto code_at = [](std::uint32_t row, std::uint32_t column) {
    return (row * 7 + column * 3) % 16;
  };
  for (const std::uint32_t lane : {0u, 37u, 255u}) {
    for (std::uint32_t pair = 0; pair < 2; ++pair) {
      const CodeWords words = box_words<DType::kF4E2M1>(lane, pair, code_at);
      for (std::uint32_t i = 0; i < kPlaces; ++i) {
        const FragmentPlace place = fragment_place(lane, 2 * pair + i / 8);
        EXPECT_EQ(value_of(words, i, 127),
                  reference::f4e2m1_to_double(static_cast<std::uint8_t>(
                      code_at(place.row_of(i % 8), place.column_of(i % 8)))));
      }
    }
  }
}

// --- As E4M3.

// A permutation of a table's bytes, as the instruction does it.
std::uint32_t permuted(std::uint64_t table, std::uint32_t selectors) {
  std::uint32_t bytes = 0;
  for (std::uint32_t i = 0; i < 4; ++i) {
    const std::uint32_t which = selectors >> (4 * i) & 15;
    EXPECT_LT(which, 8u) << "the instruction would repeat a sign";
    bytes |= static_cast<std::uint32_t>(table >> (8 * which) & 0xff) << (8 * i);
  }
  return bytes;
}

// The four codes of a word's first or second row, in E5M2, decoded as a kernel does.
std::uint32_t codes_of(std::uint32_t word, std::uint32_t of_row, std::uint64_t table) {
  const std::uint32_t magnitudes = word & 0x77777777u;
  return of_row == 0 ? permuted(table, magnitudes & 0xffff) | (word & 0x80808080u)
                     : permuted(table, magnitudes >> 16) | (word << 4 & 0x80808080u);
}

// A code of E5M2: the upper byte of fp16.
float f8e5m2_to_f32(std::uint8_t code) { return f16_to_f32(static_cast<std::uint16_t>(code << 8)); }

// A code's E5M2 times its row's power of two is its value exactly, for every largest scale of a row
// and every scale within reach of it.
TEST(CodesAsE5M2, EveryCodeScaleAndLargestScaleIsExact) {
  for (std::uint32_t top = kLeastTop; top <= kMostMxScale; ++top) {
    const std::uint32_t power = bits_of_row_power(top);
    for (std::uint32_t scale = top - (kCodeSteps - 1); scale <= top; ++scale) {
      const std::uint32_t step = scale - least_scale_of(power);
      ASSERT_LT(step, kCodeSteps);
      ASSERT_EQ(box_step(step), step * sizeof(std::uint64_t));
      for (std::uint32_t code = 0; code < 16; ++code) {
        const auto byte = static_cast<std::uint8_t>((code_table(step) >> (8 * (code & 7)) & 0xff) |
                                                    (code >> 3) << 7);
        ASSERT_EQ(f8e5m2_to_f32(byte) * std::bit_cast<float>(power),
                  reference::f4e2m1_to_double(static_cast<std::uint8_t>(code)) *
                      f8e8m0_to_f32(static_cast<std::uint8_t>(scale)))
            << "code " << code << " scale " << scale << " largest " << top;
      }
    }
  }
  for (std::uint32_t step = 0; step < kCodeTables; ++step) {
    EXPECT_EQ(code_table(step) & 0xff, 0u) << "a group of zeros may have any step";
  }
}

// The instruction wants so: of 32 columns, lane 4 g + t of a warp has rows g and g + 8 of the
// warp's 16, columns 4 t to 4 t + 3 and those 16 on. Every element of a box stands there, once.
TEST(CodesAsE5M2, WordsHaveEveryElementOnce) {
  std::set<std::pair<std::uint32_t, std::uint32_t>> seen;
  for (std::uint32_t lane = 0; lane < 256; ++lane) {
    const std::uint32_t row0 = lane / 32 * 16 + lane % 32 / 4;
    for (std::uint32_t number = 0; number < 4; ++number) {
      const std::uint32_t column0 = number / 2 * 32 + number % 2 * 16 + lane % 4 * 4;
      for (std::uint32_t i = 0; i < 8; ++i) {
        const std::pair<std::uint32_t, std::uint32_t> place{row0 + i / 4 * 8, column0 + i % 4};
        EXPECT_TRUE(seen.insert(place).second);
        for (std::uint32_t code = 0; code < 16; ++code) {
          // All others are of all ones, and of zeros.
          for (const std::uint32_t others : {0u, 15u}) {
            const std::uint32_t word =
                code_word(lane, number, [&](std::uint32_t row, std::uint32_t column) {
                  return std::pair{row, column} == place ? code : others;
                });
            const std::uint32_t bytes = codes_of(word, i / 4, code_table(15));
            const auto byte = static_cast<std::uint8_t>(bytes >> (8 * (i % 4)));
            ASSERT_EQ(f8e5m2_to_f32(byte),
                      reference::f4e2m1_to_double(static_cast<std::uint8_t>(code)))
                << "lane " << lane << " word " << number << " code " << i;
          }
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), 128u * 64u);
}

}  // namespace
}  // namespace switchyard::gpu
