#include "cli/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/format.h"

namespace switchyard::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::uint64_t kMega = 1'000'000;

TEST(ProgressLine, TellsShareBytesAndTimeLeft) {
  const std::string line = progress_line("writing", 200 * kMega, 800 * kMega, 5.0, 80);
  EXPECT_THAT(line, HasSubstr("writing"));
  EXPECT_THAT(line, HasSubstr(" 25 %"));
  EXPECT_THAT(line, HasSubstr("200 MB of 800 MB"));
  EXPECT_THAT(line, HasSubstr("ETA 15 s"));
  EXPECT_THAT(line, HasSubstr("[======"));
}

TEST(ProgressLine, CountsPoints) {
  const std::string line = progress_line("measuring", 14, 56, 30.0, 80, Counted::kPoints);
  EXPECT_THAT(line, HasSubstr(" 25 %  14 of 56 points  ETA 90 s"));
}

TEST(ProgressLine, HasNoEstimateAtEitherEnd) {
  EXPECT_THAT(progress_line("x", 0, 100, 1, 80), Not(HasSubstr("ETA")));
  const std::string done = progress_line("x", 100, 100, 1, 80);
  EXPECT_THAT(done, HasSubstr("100 %"));
  EXPECT_THAT(done, Not(HasSubstr("ETA")));
  EXPECT_THAT(done, Not(HasSubstr(">")));
}

TEST(ProgressLine, FitsEveryTerminal) {
  for (const int columns : {0, 1, 20, 40, 60, 79, 200}) {
    for (const std::uint64_t done : {0u, 1u, 500u, 999u, 1000u}) {
      const std::string line =
          progress_line("generating weights", done * kMega, 1000 * kMega, 12345, columns);
      EXPECT_LE(display_width(line), columns);
    }
  }
}

TEST(ProgressLine, NothingToDoIsDone) {
  EXPECT_THAT(progress_line("x", 0, 0, 0, 80), HasSubstr("100 %"));
}

}  // namespace
}  // namespace switchyard::cli
