// The order of four-bit codes in which kernels read them, and the bit tricks that make bf16 of
// them.
#include <gtest/gtest.h>

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
float value_of(std::uint32_t word, std::uint32_t i, std::uint32_t scale) {
  const std::uint32_t pair = fragment<DType::kF4E2M1>(word, i / 2);
  const auto code = static_cast<std::uint16_t>(half_of(pair, i % 2));
  return bf16_to_f32(code) * bf16_to_f32(static_cast<std::uint16_t>(box_scale(scale) << 7));
}

TEST(FourBitBox, EveryCodeInEveryPlaceAndScale) {
  for (std::uint32_t i = 0; i < 8; ++i) {
    for (std::uint32_t code = 0; code < 16; ++code) {
      // All others are of all ones, and of zeros.
      for (const std::uint32_t others : {0u, 15u}) {
        std::uint32_t mxfp4 = 0, int4 = 0;
        for (std::uint32_t j = 0; j < 8; ++j) {
          mxfp4 |= place_code<DType::kF4E2M1>(j == i ? code : others, j);
          int4 |= place_code<DType::kU4>(j == i ? code : others, j);
        }
        for (std::uint32_t scale = 0; scale <= kMostMxScale; ++scale) {
          ASSERT_EQ(value_of(mxfp4, i, scale),
                    reference::f4e2m1_to_double(static_cast<std::uint8_t>(code)) *
                        f8e8m0_to_f32(static_cast<std::uint8_t>(scale)))
              << "place " << i << " code " << code << " scale " << scale;
        }
        const std::uint32_t pair = fragment<DType::kU4>(int4, i / 2);
        ASSERT_EQ(bf16_to_f32(static_cast<std::uint16_t>(half_of(pair, i % 2))),
                  128.0f + static_cast<float>(code));
      }
    }
  }
}

// Two codes never share a bit.
TEST(FourBitBox, PlacesAreApart) {
  for (std::uint32_t i = 0; i < 8; ++i) {
    for (std::uint32_t j = 0; j < i; ++j) {
      EXPECT_EQ(place_code<DType::kF4E2M1>(15, i) & place_code<DType::kF4E2M1>(15, j), 0u);
      EXPECT_EQ(place_code<DType::kU4>(15, i) & place_code<DType::kU4>(15, j), 0u);
    }
  }
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
    for (std::uint32_t step = 0; step < 4; ++step) {
      const FragmentPlace place = fragment_place(lane, step);
      const std::uint32_t word = box_word<DType::kF4E2M1>(lane, step, code_at);
      for (std::uint32_t i = 0; i < 8; ++i) {
        EXPECT_EQ(value_of(word, i, 127), reference::f4e2m1_to_double(static_cast<std::uint8_t>(
                                              code_at(place.row_of(i), place.column_of(i)))));
      }
    }
  }
}

}  // namespace
}  // namespace switchyard::gpu
