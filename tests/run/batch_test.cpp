#include "run/batch.h"

#include <gtest/gtest.h>

namespace switchyard::run {
namespace {

TEST(Shares, CoverAllTokensOnce) {
  for (const std::int64_t tokens : {1, 5, 64, 1023}) {
    for (const int ranks : {1, 3, 8}) {
      std::int64_t next = 0;
      for (int r = 0; r < ranks; ++r) {
        const Share share = share_of(tokens, r, ranks);
        EXPECT_EQ(share.first, next);
        EXPECT_LE(share.count, largest_share(tokens, ranks));
        next += share.count;
      }
      EXPECT_EQ(next, tokens);
    }
  }
}

}  // namespace
}  // namespace switchyard::run
