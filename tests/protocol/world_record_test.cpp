// Whom the record of a world blames, by the words of its ranks.
#include "protocol/world_record.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "support/ranks.h"

namespace switchyard::protocol {
namespace {

using std::chrono::milliseconds;

constexpr int kRanks = 5;
constexpr milliseconds kDeadline{4'000};  // waits of the last second count

// The words of a world, and the record as rank 0 sees it.
class WorldRecordTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::vector<std::uint64_t*> addresses;
    for (std::uint64_t& word : words_) addresses.push_back(&word);
    record_ = std::make_unique<WorldRecord>(0, addresses, nullptr, std::vector<UniqueFd>());
  }
  // All of these ranks wait, for several beats.
  void wait_on(const std::vector<std::pair<int, WaitsFor>>& waits) {
    for (std::uint32_t beat = 1; beat <= 6; ++beat) {
      for (const auto& [rank, wait] : waits) words_[rank] = wait.pack(beat);
      record_->look();
      std::this_thread::sleep_for(WorldRecord::kBeat);
    }
    record_->look();
  }
  int culprit(int suspect) const { return record_->culprit(suspect, kDeadline).rank; }

  std::uint64_t words_[kRanks]{};
  std::unique_ptr<WorldRecord> record_;
};

WaitsFor in_pass(int peer) { return {Phase::kCombine, peer, 3, false}; }
WaitsFor in_collective(std::uint64_t number) { return {Phase::kBootstrap, 0, number, false}; }

TEST_F(WorldRecordTest, ARankThatDoesNotWaitIsToBlame) {
  EXPECT_EQ(culprit(2), 2);
  wait_on({{1, in_pass(2)}});
  EXPECT_EQ(culprit(2), 2);
}

TEST_F(WorldRecordTest, AWaitIsFollowedToItsEnd) {
  wait_on({{1, in_pass(2)}, {2, {Phase::kSignal, 3, 0, false}}});
  const WorldRecord::Culprit found = record_->culprit(1, kDeadline);
  EXPECT_EQ(found.rank, 3);
  EXPECT_EQ(found.witness, 2);
  EXPECT_EQ(found.wait.phase, Phase::kSignal);
}

TEST_F(WorldRecordTest, AWordThatStandsStillIsNotBelieved) {
  wait_on({{1, in_pass(2)}});
  std::this_thread::sleep_for(kDeadline / 4 + milliseconds(100));
  record_->look();
  EXPECT_EQ(culprit(1), 1);
}

TEST_F(WorldRecordTest, AWaitForItsOwnThreadsIsNoExcuse) {
  wait_on({{1, {Phase::kExperts, 1, 3, true}}});
  EXPECT_EQ(culprit(1), 1);
}

// Ranks 0 and 1 are in the collective, rank 2 waits for rank 3 in a pass, and rank 3 does not move.
TEST_F(WorldRecordTest, ACollectiveWaitsForAllThatAreNotInIt) {
  wait_on({{0, in_collective(7)}, {1, in_collective(7)}, {2, in_pass(3)}, {4, in_collective(7)}});
  EXPECT_EQ(culprit(1), 3);
  EXPECT_EQ(culprit(0), 3);
}

TEST_F(WorldRecordTest, ARankThatGaveUpNamesAnother) {
  wait_on({{1, in_pass(2)}});
  words_[2] = WaitsFor{Phase::kGaveUp, 4, 0, false}.pack(0);
  EXPECT_EQ(culprit(1), 4);
  EXPECT_EQ(record_->given_up_by(2), 4);
  EXPECT_EQ(record_->given_up_by(1), 1);
}

TEST_F(WorldRecordTest, RanksThatWaitInACircleAreNotFollowed) {
  wait_on({{1, in_pass(2)}, {2, in_pass(1)}});
  EXPECT_EQ(culprit(1), 1);
}

TEST_F(WorldRecordTest, ARankThatLeftIsGone) {
  EXPECT_FALSE(record_->is_gone(3));
  words_[3] = WaitsFor{Phase::kLeft, 3, 0, false}.pack(0);
  EXPECT_TRUE(record_->is_gone(3));
  wait_on({{1, in_pass(3)}});
  EXPECT_EQ(culprit(1), 3);
}

TEST_F(WorldRecordTest, WhatARankSaysOfItself) {
  record_->show(in_pass(3));
  const std::uint64_t first = words_[0];
  EXPECT_EQ(WaitsFor::unpack(first).peer, 3);
  record_->show(in_pass(3));
  EXPECT_NE(words_[0], first);
  const std::uint64_t second = words_[0];
  record_->show({Phase::kExperts, 0, 3, true});  // another thread waits for this one
  EXPECT_EQ(words_[0], second);
  record_->end_wait();
  EXPECT_EQ(words_[0], 0u);
  record_->give_up(2);
  record_->end_wait();  // of another thread
  record_->leave();
  EXPECT_EQ(record_->given_up_by(0), 2);
  record_->go_on();
  EXPECT_EQ(record_->given_up_by(0), 0);
  record_->leave();
  EXPECT_TRUE(record_->is_gone(0));
}

// The record holds no descriptor of a process of another host. What such a rank did may come after
// its word.
TEST(WorldRecordLives, ARankOfAnotherHostIsGoneWhenItIsSeenOff) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const UniqueFd kept(ends[1]);
  std::uint64_t words[2]{};
  std::vector<UniqueFd> lives(2);
  lives[0] = UniqueFd(ends[0]);
  WorldRecord record(0, {&words[0], &words[1]}, nullptr, std::move(lives));
  record.mirror(1, WaitsFor{Phase::kLeft, 1, 0, false}.pack(0));
  record.look();
  EXPECT_TRUE(record.has_left(1));
  EXPECT_FALSE(record.is_gone(1));
  record.see_off(1);
  EXPECT_TRUE(record.is_gone(1));
  EXPECT_FALSE(record.has_ended(1));
}

// A process that the record holds a descriptor of.
TEST(WorldRecordLives, AProcessThatEndedIsGoneAndEndsWaitsOfKernels) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  std::uint64_t words[2]{};
  std::vector<UniqueFd> lives(2);
  lives[1] = UniqueFd(ends[0]);
  UniqueFd kept(ends[1]);
  WorldRecord record(0, {&words[0], &words[1]}, nullptr, std::move(lives));
  std::atomic<int> lost{-1};
  const WorldRecord::LossHook hook(record, [&](const WaitsFor& wait) { lost = wait.peer; });
  record.look();
  EXPECT_FALSE(record.is_gone(1));
  kept.reset();
  EXPECT_TRUE(test::eventually([&] {
    record.look();
    return record.is_gone(1);
  }));
  // This rank does not wait for it yet.
  std::this_thread::sleep_for(3 * WorldRecord::kBeat);
  EXPECT_EQ(lost, -1);
  EXPECT_TRUE(test::eventually([&] {
    record.show(in_pass(1));
    return lost == 1;
  }));
}

TEST(WorldRecordLives, ADescriptorOfThisProcessIsNotReadable) {
  UniqueFd kept;
  const UniqueFd mine = life_of_process(kept);
  pollfd entry{mine.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 0), 0);
}

}  // namespace
}  // namespace switchyard::protocol
