#include "base/join.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace switchyard {
namespace {

TEST(Join, ItemsOfAnyTypeThatFmtPrints) {
  EXPECT_EQ(join(std::vector<int>{}, ", "), "");
  EXPECT_EQ(join(std::vector<int>{7}, ", "), "7");
  EXPECT_EQ(join(std::vector<double>{1, 0.25}, ","), "1,0.25");
  EXPECT_EQ(join(std::set<std::string>{"b", "a"}, " and "), "a and b");
  EXPECT_EQ(join(std::vector<const char*>{"", "x", ""}, "-"), "-x-");
}

}  // namespace
}  // namespace switchyard
