#include "failures/judge.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace switchyard::failures {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(FailureJudge, FindsWhomAMessageAccuses) {
  const std::vector<int> pids{100, 101, 102, 103};
  EXPECT_THAT(accused_by("rank 2 did not do its part of counts in epoch 5: rank 0 waited 4.000 s "
                         "without progress of any rank (rank 3 waits for rank 2)",
                         pids),
              ElementsAre(2));
  EXPECT_THAT(accused_by("ranks 1, 2 and 3 of 4 did not call all_gather within 4000 ms; rank 0 was "
                         "waiting; process 101 (rank 1) still runs",
                         pids),
              ElementsAre(1, 2, 3));
  EXPECT_THAT(accused_by("rank 0 (process 100) of 4 did not complete all_gather within 4000 ms, "
                         "process 103 is stopped, by a signal; rank 1 was waiting",
                         pids),
              ElementsAre(0, 3));
  EXPECT_THAT(accused_by("rank 3 (process 103) of 4 closed its connection during all_gather: the "
                         "process ended, or destroyed or aborted its World",
                         pids),
              ElementsAre(3));
  EXPECT_THAT(accused_by("rank 1 on 10.0.0.2 closed its connection: its process has ended", pids),
              ElementsAre(1));
  EXPECT_THAT(accused_by("rank 3 was lost in epoch 2, 0.100 s after rank 1 had heard of it last; "
                         "process 102 has exited",
                         pids),
              ElementsAre(2, 3));
  EXPECT_THAT(
      accused_by("rank 1 could not exchange data with rank 2 by libfabric tcp within 900 ms", pids),
      ElementsAre(2));
  EXPECT_THAT(accused_by("rank 1 could not connect to rank 2 at 10.0.0.2 within 4000 ms", pids),
              ElementsAre(2));
  EXPECT_THAT(accused_by("rank 0 was waiting; process 101 (rank 1) still runs", pids), IsEmpty());
}

TEST(FailureJudge, TakesTheLaunchersLastLine) {
  EXPECT_EQ(named_by_launcher("switchyard launch: rank 2 (process 5) failed first: exit code 4"),
            2);
  EXPECT_EQ(named_by_launcher("switchyard launch: rank 1 (process 5) is stopped by signal 19 and "
                              "did not do its part; rank 0 noticed first (exit code 4)"),
            1);
  EXPECT_EQ(named_by_launcher(""), -1);
}

TEST(FailureJudge, AFailureBeforeTheHarmIsNotOfIt) {
  const Trial trial(1);
  const int other = trial.victim == 0 ? 1 : 0;
  for (const int failing : {other, trial.victim}) {
    for (const bool before : {true, false}) {
      Board board{};
      board.harmed_ns = 1'000'000'000;
      for (int r = 0; r < trial.ranks; ++r) {
        board.ranks[r].outcome = Outcome::kDone;
        board.ranks[r].ended_ns = 1'000'000'100;
      }
      board.ranks[failing].outcome = Outcome::kTimeout;
      board.ranks[failing].peer = trial.victim;
      board.ranks[failing].failed_ns = board.harmed_ns + (before ? -1 : 1);
      const auto ranks = static_cast<std::size_t>(trial.ranks);
      const Ending ending{std::vector<bool>(ranks), std::vector<int>(ranks)};
      EXPECT_EQ(judge(trial, {}, board, ending, nullptr).before_harm, before)
          << "rank " << failing << ", the victim is " << trial.victim;
    }
  }
}

TEST(FailureTrial, FollowsFromItsSeed) {
  for (std::uint64_t seed = 0; seed < 3'000; ++seed) {
    const Trial trial(seed);
    EXPECT_EQ(trial.words(), Trial(seed).words());
    EXPECT_LE(trial.ranks, kMostRanks);
    EXPECT_LT(trial.victim, trial.ranks);
    EXPECT_EQ(trial.ranks % trial.hosts, 0);
    EXPECT_TRUE(trial.hosts == 1 || !trial.uses(Act::kHeapRing, Act::kHeapBarrier))
        << trial.words();
  }
}

}  // namespace
}  // namespace switchyard::failures
