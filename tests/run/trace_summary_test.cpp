// Summaries of traces whose answer is known.
#include "run/trace_summary.h"

#include <gtest/gtest.h>

#include "trace/events.h"

namespace switchyard::trace {
namespace {

std::int64_t wait_of(const RankSummary& rank, TraceWait wait) {
  return rank.wait_ns[static_cast<std::size_t>(wait)];
}

TEST(Summary, OfTwoRanks) {
  const std::vector<PassTrace> traces = two_ranks();
  const Summary s = summarize(traces);
  ASSERT_EQ(s.ranks.size(), 2u);
  EXPECT_EQ(s.pass_ns, 2100);
  EXPECT_EQ(s.dropped, 3);

  const RankSummary& first = s.ranks[0];
  EXPECT_EQ(first.pass_ns, 2100);
  EXPECT_EQ(first.units, 2);
  EXPECT_EQ(first.events, 10);
  EXPECT_EQ(first.dropped, 0);
  // Unit 0 from 0 to 2100, unit 1 from 300 to 750; math 300 + 100 + 100.
  EXPECT_DOUBLE_EQ(first.active, (2100 + 450) / (2 * 2100.0));
  EXPECT_DOUBLE_EQ(first.busy, 500 / (2 * 2100.0));
  EXPECT_EQ(wait_of(first, TraceWait::kCombine), 1500);
  EXPECT_EQ(wait_of(first, TraceWait::kCounts), 0);  // not the math role's
  EXPECT_EQ(wait_of(first, TraceWait::kNothing), 0);
  // To rank 1 from 250 to 500, and from 350 on unit 1 computes.
  EXPECT_EQ(first.communication_ns, 250);
  EXPECT_EQ(first.overlapped_ns, 150);
  EXPECT_EQ(first.first_task_ns, 350);
  EXPECT_EQ(first.last_task_ns, 2100);
  EXPECT_EQ(first.sent_rows, 80);

  const RankSummary& second = s.ranks[1];
  EXPECT_EQ(second.pass_ns, 1780);
  EXPECT_DOUBLE_EQ(second.active, (1780 + 600) / (2 * 1780.0));
  EXPECT_DOUBLE_EQ(second.busy, 1800 / (2 * 1780.0));
  EXPECT_EQ(wait_of(second, TraceWait::kDispatch), 230 + 240);
  EXPECT_EQ(wait_of(second, TraceWait::kInput), 150);
  EXPECT_EQ(second.communication_ns, 0);
  EXPECT_EQ(second.sent_rows, 0);
  EXPECT_EQ(second.dropped, 3);

  EXPECT_DOUBLE_EQ(s.busy, (500 + 1800) / (4 * 2100.0));
  EXPECT_DOUBLE_EQ(s.active, (2100 + 450 + 1780 + 600) / (4 * 2100.0));
  EXPECT_EQ(s.wait_ns[static_cast<std::size_t>(TraceWait::kDispatch)], 470);
  EXPECT_EQ(s.communication_ns, 250);
  EXPECT_EQ(s.overlapped_ns, 150);
}

TEST(Summary, CriticalPathGoesFromRankToRank) {
  const std::vector<PassTrace> traces = two_ranks();
  const Summary s = summarize(traces);
  struct Link {
    int rank;
    TraceKind kind;
    bool awaited;
  };
  // The second GEMM waited for the later of the first one's blocks, that for the word of expert 5,
  // whose unit had made the plan after the counts of rank 1.
  const std::vector<Link> expected = {{0, TraceKind::kCombine, true}, {1, TraceKind::kGemm2, true},
                                      {1, TraceKind::kGemm1, true},   {0, TraceKind::kSend, false},
                                      {0, TraceKind::kSend, false},   {0, TraceKind::kPlan, true},
                                      {1, TraceKind::kCounts, false}, {1, TraceKind::kGate, false}};
  ASSERT_EQ(s.path.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(s.path[i].event.rank, expected[i].rank) << i;
    EXPECT_STREQ(to_string(s.path[i].event.event->kind), to_string(expected[i].kind)) << i;
    EXPECT_EQ(s.path[i].awaited, expected[i].awaited) << i;
  }
  EXPECT_EQ(s.path[2].event.event->block, 1);
  EXPECT_EQ(s.path[3].event.event->expert, 5);
  EXPECT_EQ(s.path.back().cause.event, nullptr);
  // The path has no holes: work and what lies between add up.
  std::int64_t sum = 0;
  for (const PathStep& step : s.path) sum += step.work_ns() + step.gap_ns();
  EXPECT_EQ(sum, 2100 - 20);

  const std::vector<PathStep> waits = longest_waits(s, 3);
  ASSERT_EQ(waits.size(), 3u);
  EXPECT_EQ(waits[0].waited_ns(), 1500);
  EXPECT_EQ(waits[1].waited_ns(), 240);
  EXPECT_EQ(waits[1].cause.rank, 0);
  EXPECT_EQ(waits[2].waited_ns(), 150);
  EXPECT_EQ(longest_waits(s, 100).size(), 4u);
}

TEST(Summary, OverlapCountsNoMomentTwice) {
  using K = TraceKind;
  // Two senders at once, two GEMMs at once; what is sent to the rank itself is no communication.
  const std::vector<PassTrace> traces = {
      trace_of(0, 2,
               {send(0, 100, 300, 1, 1), send(1, 200, 400, 1, 1), send(2, 0, 90, 0, 1),
                Made(K::kGemm1, 3, 0, 50, 150), Made(K::kGemm1, 4, 0, 60, 120),
                Made(K::kSignal, 3, 350, 350, 380), Made(K::kCombine, 4, 350, 350, 360)})};
  const RankSummary rank = summarize(traces).ranks[0];
  EXPECT_EQ(rank.communication_ns, 300);
  EXPECT_EQ(rank.overlapped_ns, 50 + 10);
  EXPECT_EQ(rank.units, 5);
}

TEST(Summary, OfSlotsTasksAndCores) {
  using K = TraceKind;
  const std::vector<PassTrace> traces = {
      trace_of(0, 1,
               {Made(K::kGemm2, 0, 0, 0, 100).of_tile(0, 0, 1),
                Made(K::kGemm1, 1, 0, 0, 140).of_tile(1, 1, 1),
                Made(K::kGemm1, 0, 100, 120, 200).of_tile(2, 2, 1).waiting(TraceWait::kSlot),
                Made(K::kCombine, 1, 140, 300, 310).of_tile(0, -1, 1).waiting(TraceWait::kTask),
                Made(K::kCombine, 1, 310, 350, 360).of_tile(1, -1, 1).waiting(TraceWait::kCore),
                Made(K::kCombine, 2, 300, 300, 310).of_tile(2, -1, 1)})};
  const Summary s = summarize(traces);
  ASSERT_EQ(s.path.size(), 4u);
  EXPECT_FALSE(s.path[0].awaited);            // who had the core is not known
  EXPECT_EQ(s.path[1].event.event->unit, 1);  // not another that ended then, too
  EXPECT_TRUE(s.path[1].awaited);
  EXPECT_EQ(s.path[2].event.event->tile, 2);
  EXPECT_TRUE(s.path[2].awaited);
  EXPECT_EQ(s.path[3].event.event->kind, K::kGemm2);
  EXPECT_EQ(longest_waits(s, 9).size(), 3u);
}

TEST(Summary, OfNothing) {
  EXPECT_EQ(summarize(std::vector<PassTrace>{}).pass_ns, 0);
  const std::vector<PassTrace> empty = {trace_of(0, 1, {})};
  const Summary s = summarize(empty);
  EXPECT_EQ(s.pass_ns, 0);
  EXPECT_EQ(s.busy, 0);
  EXPECT_TRUE(s.path.empty());
  EXPECT_EQ(s.ranks[0].first_task_ns, -1);
}

// Clocks that do not tell two events apart must not make the walk go round.
TEST(Summary, EventsThatTakeNoTimeEndThePath) {
  using K = TraceKind;
  const std::vector<PassTrace> traces = {trace_of(0, 1,
                                                  {Made(K::kGemm1, 0, 5, 5, 5).of_tile(0, 0, 1),
                                                   Made(K::kGemm1, 0, 5, 5, 5).of_tile(1, 0, 1)})};
  EXPECT_EQ(summarize(traces).path.size(), 2u);
}

}  // namespace
}  // namespace switchyard::trace
