// --verify notices errors: these tests spoil the results after the run.
#include "run/verify.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "cli/source.h"
#include "layer/compute.h"
#include "model/errors.h"
#include "switchyard/routing.h"

namespace switchyard::cli {
namespace {

using run::Batch;
using run::BatchOptions;
using run::make_batch;
using run::RankOptions;
using run::run_as_threads;
using run::RunResult;
using run::Verification;
using run::verify;

struct FinishedRun {
  Source source;
  Batch batch;
  RankOptions ranks;
  RunResult result;
};

FinishedRun run_small(DType compute, float capacity_factor = 0, std::optional<double> beta = {}) {
  FinishedRun s;
  SourceOptions source{.model = "olmoe", .dtype = compute};
  source.overrides.num_experts = 16;
  source.overrides.top_k = 4;
  source.overrides.hidden = 64;
  source.overrides.intermediate = 32;
  s.source = load_source(source, 1, false);
  s.source.spec.capacity_factor = capacity_factor;
  s.batch = make_batch({.tokens = 61, .balancedness = beta}, s.source, value_type(compute));
  s.ranks.ranks = 3;
  s.ranks.threads = 1;
  s.ranks.compute = compute;
  s.ranks.repeat = 1;
  s.result = run_as_threads(s.source, s.batch, s.ranks);
  return s;
}

Verification verify(const FinishedRun& s) {
  return verify(s.source, s.batch, s.result, s.ranks.compute);
}

TEST(Verify, AcceptsWhatTheEngineComputes) {
  for (const DType compute : {DType::kF32, DType::kBF16, DType::kF8E4M3}) {
    const FinishedRun s = run_small(compute);
    const Verification v = verify(s);
    EXPECT_TRUE(v.ok()) << v.error << " > " << v.bound;
    EXPECT_GT(v.error, 0);
    EXPECT_EQ(v.yardstick.has_value(), compute != DType::kF32);
    EXPECT_LT(v.undecided_tokens, 5);
  }
}

TEST(Verify, NoticesOneWrongValue) {
  FinishedRun s = run_small(DType::kF32);
  auto* output = reinterpret_cast<float*>(s.result.output.data());
  output[100] += 0.01f;
  EXPECT_FALSE(verify(s).error_ok());
}

TEST(Verify, NoticesNaN) {
  FinishedRun s = run_small(DType::kF32);
  reinterpret_cast<float*>(s.result.output.data())[0] = NAN;
  EXPECT_FALSE(verify(s).ok());
}

TEST(Verify, NoticesSwappedTokensInBf16AndFp8) {
  for (const DType compute : {DType::kBF16, DType::kF8E4M3}) {
    FinishedRun s = run_small(compute);
    constexpr std::size_t kRow = 64 * 2;
    std::swap_ranges(s.result.output.begin(), s.result.output.begin() + kRow,
                     s.result.output.begin() + kRow);
    EXPECT_FALSE(verify(s).error_ok());
  }
}

TEST(Verify, NoticesAWrongExpert) {
  FinishedRun s = run_small(DType::kF32);
  std::swap(s.result.topk_ids[8], s.result.topk_ids[9]);
  EXPECT_EQ(verify(s).misrouted_tokens, 1);
}

TEST(Verify, NoticesAWrongRoutingWeight) {
  FinishedRun s = run_small(DType::kF32);
  s.result.topk_weights[8] *= 1.01f;
  EXPECT_EQ(verify(s).misrouted_tokens, 1);
}

TEST(Verify, NoticesASlotThatWasNotToBeDropped) {
  FinishedRun s = run_small(DType::kF32);
  s.result.topk_ids[8] = kNoExpert;
  EXPECT_EQ(verify(s).misrouted_tokens, 1);
}

TEST(Verify, KnowsTheCapacityRule) {
  FinishedRun s = run_small(DType::kF32, 1.0f, 0.7);
  ASSERT_GT(s.result.dropped_slots, 0);
  EXPECT_TRUE(verify(s).ok());
  // The first dropped slot had found no room.
  for (std::size_t i = 0; i < s.result.topk_ids.size(); ++i) {
    if (s.result.topk_ids[i] != kNoExpert) continue;
    s.result.topk_ids[i] = s.batch.topk_ids[i];
    break;
  }
  EXPECT_EQ(verify(s).misrouted_tokens, 1);
}

TEST(Source, RefusesMoreThanMemoryHolds) {
  SourceOptions source{.model = "olmoe"};
  source.overrides.num_experts = 512;
  source.overrides.hidden = 65536;
  source.overrides.intermediate = 65536;
  EXPECT_ERROR(load_source(source, 1000, false), kCapacityExceeded, "--experts", "--dtype fp8",
               "make-checkpoint");
}

}  // namespace
}  // namespace switchyard::cli
