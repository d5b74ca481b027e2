#include "common/numbers.h"

#include <gtest/gtest.h>

namespace switchyard {
namespace {

TEST(ParseWhole, AcceptsNothingButDigitsAndMinus) {
  EXPECT_EQ(parse_whole("42"), 42);
  EXPECT_EQ(parse_whole("-7"), -7);
  EXPECT_EQ(parse_whole("010"), 10);
  for (const char* text :
       {"", " 5", "5 ", "+5", "0x10", "1e3", "12x", "1.0", "--5", "99999999999999999999"}) {
    EXPECT_EQ(parse_whole(text), std::nullopt) << "'" << text << "'";
  }
}

TEST(ParseReal, AcceptsFiniteDecimals) {
  EXPECT_EQ(parse_real("0.5"), 0.5);
  EXPECT_EQ(parse_real("2e3"), 2000);
  for (const char* text : {"", "nan", "inf", "-inf", "1.5x", " 1", "0x1p3", "1e999"}) {
    EXPECT_EQ(parse_real(text), std::nullopt) << "'" << text << "'";
  }
}

TEST(ParseBytes, KnowsDecimalAndBinaryUnits) {
  EXPECT_EQ(parse_bytes("5"), 5u);
  EXPECT_EQ(parse_bytes("7B"), 7u);
  EXPECT_EQ(parse_bytes("3kB"), 3000u);
  EXPECT_EQ(parse_bytes("2GB"), 2'000'000'000u);
  EXPECT_EQ(parse_bytes("1GiB"), std::uint64_t{1} << 30);
  EXPECT_EQ(parse_bytes("4TiB"), std::uint64_t{4} << 40);
  for (const char* text : {"", "GB", "-1", "1.5GB", "1 GB", "1gb", "1GBx", "99999999TB"}) {
    EXPECT_EQ(parse_bytes(text), std::nullopt) << "'" << text << "'";
  }
}

}  // namespace
}  // namespace switchyard
