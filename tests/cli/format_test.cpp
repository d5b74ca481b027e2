#include "cli/format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace switchyard::cli {
namespace {

using ::testing::ElementsAre;

TEST(FormatQuantity, KeepsThreeDigits) {
  EXPECT_EQ(format_quantity(1.234e12, "FLOP/s"), "1.23 TFLOP/s");
  EXPECT_EQ(format_quantity(12.34e9, "B/s"), "12.3 GB/s");
  EXPECT_EQ(format_quantity(123.4e6, "B"), "123 MB");
  EXPECT_EQ(format_quantity(0, "B/s"), "0.00 B/s");
  EXPECT_EQ(format_quantity(2.5e18, "B"), "2500 PB");
}

TEST(FormatQuantity, NextPrefixBeginsWhereRoundingWouldNeedFourDigits) {
  EXPECT_EQ(format_quantity(999.4, "B"), "999 B");
  EXPECT_EQ(format_quantity(999.6, "B"), "1.00 kB");
  EXPECT_EQ(format_quantity(9.996e6, "B"), "10.0 MB");
  EXPECT_EQ(format_quantity(99.96e6, "B"), "100 MB");
}

TEST(FormatBytes, SmallCountsAreWhole) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(999), "999 B");
  EXPECT_EQ(format_bytes(1000), "1.00 kB");
  EXPECT_EQ(format_bytes(805306368), "805 MB");
}

TEST(FormatSeconds, ChoosesTheUnit) {
  EXPECT_EQ(format_seconds(3.071), "3.07 s");
  EXPECT_EQ(format_seconds(0.0412), "41.2 ms");
  EXPECT_EQ(format_seconds(812e-6), "812 us");
  EXPECT_EQ(format_seconds(5e-9), "5.00 ns");
  EXPECT_EQ(format_seconds(0.9996), "1.00 s");
}

TEST(FormatCount, GroupsByThousands) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1000), "1,000");
  EXPECT_EQ(format_count(1234567), "1,234,567");
  EXPECT_EQ(format_count(-123), "-123");
  EXPECT_EQ(format_count(-1234), "-1,234");
}

TEST(Plural, OneIsSingular) {
  EXPECT_EQ(plural(1, "rank"), "1 rank");
  EXPECT_EQ(plural(0, "rank"), "0 ranks");
  EXPECT_EQ(plural(12345, "token"), "12,345 tokens");
  EXPECT_EQ(plural(std::size_t{1}, "process", "processes"), "1 process");
  EXPECT_EQ(plural(std::size_t{2}, "process", "processes"), "2 processes");
}

TEST(FormatPercent, KeepsTwoDigitsOfSmallFractions) {
  EXPECT_EQ(format_percent(0.7132), "71 %");
  EXPECT_EQ(format_percent(0.0123), "1.2 %");
  EXPECT_EQ(format_percent(0.0042), "0.42 %");
  EXPECT_EQ(format_percent(0), "0 %");
  EXPECT_EQ(format_percent(2.15), "215 %");
}

TEST(Wrap, BreaksAtBlanksOnly) {
  EXPECT_THAT(wrap("aa bb cc", 5), ElementsAre("aa bb", "cc"));
  EXPECT_THAT(wrap("aa bb cc", 8), ElementsAre("aa bb cc"));
  EXPECT_THAT(wrap("abcdefgh ij", 4), ElementsAre("abcdefgh", "ij"));
  EXPECT_TRUE(wrap("", 10).empty());
}

TEST(Wrap, KeepsNumbersWithTheirUnits) {
  EXPECT_THAT(wrap("sent 4.10 kB there", 10), ElementsAre("sent", "4.10 kB", "there"));
  EXPECT_THAT(wrap("at 48 % of it", 7), ElementsAre("at 48 %", "of it"));
}

TEST(Wrap, CountsCharactersNotBytes) {
  EXPECT_EQ(display_width("▁▂█·x"), 5);
  EXPECT_THAT(wrap("▁▂▃ ▄▅▆", 7), ElementsAre("▁▂▃ ▄▅▆"));
}

TEST(BarChart, HeightsAreRelativeToTheLargest) {
  const std::vector<std::int64_t> counts = {0, 1, 50, 51, 100};
  EXPECT_THAT(bar_chart(counts, 64), ElementsAre("·▁▄▅█"));
}

TEST(BarChart, OnlyZeroIsADot) {
  const std::vector<std::int64_t> counts = {1, 1'000'000, 0};
  EXPECT_THAT(bar_chart(counts, 64), ElementsAre("▁█·"));
  EXPECT_THAT(bar_chart(std::vector<std::int64_t>{0, 0}, 64), ElementsAre("··"));
  EXPECT_TRUE(bar_chart({}, 64).empty());
}

TEST(BarChart, ManyExpertsTakeSeveralLines) {
  std::vector<std::int64_t> counts(500);
  std::iota(counts.begin(), counts.end(), 0);
  const std::vector<std::string> lines = bar_chart(counts, 64);
  ASSERT_EQ(lines.size(), 8u);
  for (std::size_t i = 0; i < 7; ++i) EXPECT_EQ(display_width(lines[i]), 64);
  EXPECT_EQ(display_width(lines[7]), 500 - 7 * 64);
}

TEST(Palette, PaintsOnlyWhenEnabled) {
  EXPECT_EQ(Palette(false).red("x"), "x");
  EXPECT_EQ(Palette(true).red("x"), "\x1b[1;31mx\x1b[0m");
}

TEST(AlignColumns, AlignsEitherSideWithoutTrailingBlanks) {
  constexpr std::size_t kRight[] = {1};
  EXPECT_THAT(align_columns({{"model", "n", "x"}, {"a", "100", ""}}, kRight),
              ElementsAre("model    n  x", "a      100"));
}

}  // namespace
}  // namespace switchyard::cli
