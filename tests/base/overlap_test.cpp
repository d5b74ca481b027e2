// Which arrays share bytes: rows behind each other, between each other's, in reverse.
#include "base/overlap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "model/errors.h"

namespace switchyard {
namespace {

constexpr auto kBad = ErrorCode::kInvalidArgument;

struct Rows {
  std::int64_t at, rows, bytes, stride;  // in a buffer

  bool has_gaps() const { return rows > 1 && std::abs(stride) > bytes; }
  std::set<std::int64_t> touched() const {
    std::set<std::int64_t> all;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t b = 0; b < bytes; ++b) all.insert(at + r * stride + b);
    }
    return all;
  }
};
std::ostream& operator<<(std::ostream& out, const Rows& r) {
  return out << r.rows << " rows of " << r.bytes << " at " << r.at << ", " << r.stride << " apart";
}

class Overlap : public ::testing::Test {
 protected:
  CallArray array(const char* name, const Rows& r) const {
    return {name, buffer_.data() + r.at, r.rows, r.bytes, r.stride};
  }
  bool refused(const Rows& out, const Rows& in) const {
    try {
      require_apart({array("out", out)}, {array("in", in)});
      return false;
    } catch (const Error&) {
      return true;
    }
  }
  std::vector<std::byte> buffer_ = std::vector<std::byte>(4096);
};

// Never silent about bytes that are shared, and exact unless both arrays have gaps.
TEST_F(Overlap, IsThatOfTheBytes) {
  std::mt19937 random(5);
  const auto between = [&](int low, int high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  int apart = 0, between_rows = 0;
  for (int i = 0; i < 20'000; ++i) {
    const auto rows = [&](std::int64_t distance) {
      const std::int64_t bytes = between(1, static_cast<int>(distance));
      const bool reverse = between(0, 3) == 0;
      return Rows{between(reverse ? 400 : 0, 600), between(1, 8), bytes,
                  reverse ? -distance : distance};
    };
    const std::int64_t distance = between(1, 40);
    const Rows a = rows(distance), b = rows(between(0, 2) == 0 ? between(1, 40) : distance);
    const std::set<std::int64_t> of_a = a.touched(), of_b = b.touched();
    const bool share = std::ranges::any_of(of_a, [&](auto byte) { return of_b.contains(byte); });
    if (share) {
      EXPECT_TRUE(refused(a, b)) << a << "; " << b;
      continue;
    }
    ++apart;
    const bool meet = *of_a.begin() <= *of_b.rbegin() && *of_b.begin() <= *of_a.rbegin();
    between_rows += meet && !refused(a, b) ? 1 : 0;
    if (!meet || !a.has_gaps() || !b.has_gaps()) {
      EXPECT_FALSE(refused(a, b)) << a << "; " << b;
    }
  }
  EXPECT_GT(apart, 1000);
  EXPECT_GT(between_rows, 100);
}

TEST_F(Overlap, HalvesOfTheColumnsAreApart) {
  const Rows left{0, 8, 32, 64}, right{32, 8, 32, 64};
  EXPECT_FALSE(refused(left, right));
  EXPECT_FALSE(refused(right, left));
  EXPECT_TRUE(refused(left, {31, 8, 32, 64}));
  EXPECT_TRUE(refused(left, {32, 8, 33, 64}));
  // Every other row.
  EXPECT_FALSE(refused({0, 4, 64, 128}, {64, 4, 64, 128}));
}

TEST_F(Overlap, MessagesNameBoth) {
  const Rows rows{0, 4, 16, 16}, same_row{0, 4, 16, 0};
  EXPECT_ERROR(require_apart({array("out", rows)}, {array("x", {48, 1, 8, 8})}), kBad,
               "out overlaps x, which the call reads");
  EXPECT_ERROR(require_apart({array("out", rows), array("ids_out", rows)}, {}), kBad,
               "out overlaps ids_out, and the call writes both");
  EXPECT_ERROR(require_apart({array("out", same_row)}, {}), kBad, "out's rows overlap each other");
  EXPECT_ERROR(require_apart({array("out", {0, 2, 16, 15})}, {}), kBad,
               "they have 16 bytes and begin 15 bytes apart");
}

TEST_F(Overlap, WhatIsReadMayOverlapItselfAndOthersThatAreRead) {
  const Rows expanded{256, 8, 16, 0};
  require_apart({array("out", {0, 4, 16, 16})}, {array("x", expanded), array("logits", expanded)});
  EXPECT_TRUE(refused({0, 17, 16, 16}, expanded));
}

TEST_F(Overlap, WhatIsNotThereOverlapsNothing) {
  require_apart({{"out", nullptr, 4, 16, 16}, array("none", {0, 0, 16, 16})},
                {array("x", {0, 4, 16, 16}), {"scale", nullptr, 4, 4, 4}});
}

}  // namespace
}  // namespace switchyard
