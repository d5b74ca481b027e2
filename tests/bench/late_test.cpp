// The suite late, on a small layer: its rows, and what it finds out about late ranks.
#include "bench/late.h"

#include <gmock/gmock.h>

#include "model/errors.h"
#include "support/ranks.h"
#include "support/specs.h"

namespace switchyard::bench {
namespace {

using results::LateRow;

class Recorder : public LateObserver {
 public:
  void measuring(std::uint64_t, std::uint64_t) override {}
  void measured(const LateRow& row) override { rows.push_back(row); }
  void keep(const std::vector<LateRow>& kept) override { num_kept += kept.size(); }
  void failed(const std::string& what, const std::string& problem) override {
    failures.push_back(what + ": " + problem);
  }

  std::size_t num_kept = 0;
  std::vector<LateRow> rows;
  std::vector<std::string> failures;
};

LateOptions small_options() {
  LateOptions options;
  options.ranks = 2;
  options.models = {"small"};
  options.spec = testing::spec_of(128, 64, 8, 2);
  options.spec->shared_intermediate = 64;
  options.tokens = {96};
  options.late_us = {30'000};
  options.dtype = DType::kF32;
  options.repeat = 3;
  return options;
}

TEST(LateSuite, MeasuresBothPoliciesAndWays) {
  Recorder recorder;
  LateSession session(small_options(), recorder);
  session.run();
  EXPECT_THAT(recorder.failures, ::testing::IsEmpty());
  ASSERT_EQ(recorder.rows.size(), 6u);  // no rank, one and all late, with each policy
  EXPECT_EQ(recorder.num_kept, 6u);
  for (const LateRow& row : recorder.rows) {
    EXPECT_EQ(row.engine, "cpu");
    EXPECT_EQ(row.model, "small");
    EXPECT_EQ(row.repeats, 3);
    EXPECT_GT(row.prompt_us, 0);
    if (row.jitter) {
      EXPECT_FALSE(row.early_share.has_value());
      continue;
    }
    // The shared expert's tokens are a rank's own; the late rank has about half of the rest.
    EXPECT_GT(row.own_share, 0.2);
    EXPECT_LT(row.own_share, 0.45);
    ASSERT_TRUE(row.early_share.has_value());
    // Even a rank that should be prompt can be late, on a busy machine. What its tokens take part
    // in is not early then either; with "waits" only the shared expert's 6 tiles are, of 14 to 16.
    EXPECT_LE(*row.early_share, row.policy == "waits" ? 6.0 / 14 : 0.9);
  }
}

TEST(LateSuite, RanksWorkWhileOneIsLate) {
  LateOptions options = small_options();
  const auto enough = [&](test::milliseconds late) {
    options.late_us = {std::chrono::microseconds(late).count()};
    Recorder recorder;
    LateSession(options, recorder).run();
    const LateRow& waits = recorder.rows.at(1);
    const LateRow& works = recorder.rows.at(4);
    EXPECT_EQ(waits.policy, "waits");
    EXPECT_EQ(works.policy, "works");
    for (const LateRow* row : {&waits, &works}) EXPECT_EQ(row->late_us, options.late_us.front());
    // With "waits" a rank can multiply the shared expert's tiles, with "works" more.
    return waits.early_share > 0.3 && works.early_share > waits.early_share;
  };
  EXPECT_TRUE(test::holds_given_time(test::milliseconds(30), enough));
}

TEST(LateSuite, FourBitWeightsAreMultipliedInBf16) {
  Recorder recorder;
  LateOptions options = small_options();
  options.dtype = DType::kF4E2M1;
  LateSession session(options, recorder);
  session.run();
  EXPECT_TRUE(recorder.failures.empty());
  ASSERT_FALSE(recorder.rows.empty());
  for (const LateRow& row : recorder.rows) EXPECT_EQ(row.dtype, "mxfp4");
}

TEST(LateSuite, OneRankWaitsForNobody) {
  Recorder recorder;
  LateOptions options = small_options();
  options.ranks = 1;
  EXPECT_ERROR(LateSession(options, recorder), kInvalidArgument, "--ranks is 1");
}

TEST(LateSuite, APointThatFailsIsToldAndLeftOut) {
  Recorder recorder;
  LateOptions options = small_options();
  options.spec->top_k = 9;  // of 8 experts
  LateSession session(options, recorder);
  session.run();
  EXPECT_EQ(recorder.failures.size(), 1u);
  EXPECT_TRUE(recorder.rows.empty());
}

}  // namespace
}  // namespace switchyard::bench
