// One outbox and what stands around it: slots, credits and commands.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "network/outbox.h"
#include "support/ranks.h"

namespace switchyard::network {
namespace {

using ::testing::HasSubstr;

class OutboxTest : public ::testing::Test {
 protected:
  static constexpr WindowOptions kWindows{2 << 10, 2};

  OutboxTest()
      : arena_(Hosts({0, 1}), 0, kWindows),
        ring_(4),
        outbox_(arena_, kWindows,
                {1,
                 0,
                 arena_.outgoing_at(1, Lane::kDispatch),
                 64,
                 {Immediate::Kind::kDispatchChunk, 0, 0}},
                ring_, [] {}) {}

  bool append(std::size_t bytes, std::size_t& done) {
    const std::vector<std::byte> payload(bytes);
    const Target target{0, 1, 0};
    return outbox_.append(RecordKind::kCopy, 0, {&target, 1}, payload.data(), bytes, done);
  }

  Arena arena_;
  CommandRing ring_;
  Outbox outbox_;
};

TEST_F(OutboxTest, APayloadWaitsForTheWindowAndGoesOn) {
  std::size_t done = 0;
  EXPECT_FALSE(append(10'000, done));  // both slots are full
  EXPECT_GT(done, 3'000U);
  EXPECT_LT(done, 4'096U);
  EXPECT_FALSE(outbox_.may_append());
  Command first, second, none;
  ASSERT_TRUE(ring_.pop(first));
  ASSERT_TRUE(ring_.pop(second));
  EXPECT_FALSE(ring_.pop(none));
  EXPECT_EQ(first.to, 64U);
  EXPECT_EQ(second.to, 64U + 2048U);

  // A credit alone frees nothing, and no more do sent bytes alone.
  EXPECT_TRUE(outbox_.credited(1));
  EXPECT_FALSE(outbox_.may_append());
  outbox_.sent(1);
  EXPECT_FALSE(outbox_.may_append());
  outbox_.sent(0);
  EXPECT_TRUE(outbox_.may_append());
  const std::size_t before = done;
  EXPECT_FALSE(append(10'000, done));
  EXPECT_GT(done, before);
}

// A thread that waits may go on in a chunk that another thread has opened, or both would wait: that
// one for the flag that this one is to append.
TEST_F(OutboxTest, AnOpenChunkIsRoomForEverybody) {
  std::size_t done = 0;
  EXPECT_FALSE(append(10'000, done));
  outbox_.sent(0);
  EXPECT_TRUE(outbox_.credited(1));
  done = 0;
  EXPECT_TRUE(append(100, done));  // the one free slot is open now
  EXPECT_TRUE(outbox_.may_append());
  done = 0;
  EXPECT_TRUE(append(100, done));
}

TEST_F(OutboxTest, CreditsForWhatWasNotSentAreRefused) {
  std::size_t done = 0;
  EXPECT_TRUE(append(100, done));
  outbox_.flush();
  EXPECT_TRUE(outbox_.credited(1));
  EXPECT_FALSE(outbox_.credited(1));
}

TEST_F(OutboxTest, ItIsIdleWhenEverythingWasRead) {
  EXPECT_TRUE(outbox_.is_idle());
  std::size_t done = 0;
  EXPECT_TRUE(append(100, done));
  outbox_.flush();
  EXPECT_FALSE(outbox_.is_idle());
  outbox_.sent(0);
  EXPECT_FALSE(outbox_.is_idle());
  EXPECT_TRUE(outbox_.credited(1));
  EXPECT_TRUE(outbox_.is_idle());
  outbox_.flush();  // nothing is open
  Command command;
  EXPECT_TRUE(ring_.pop(command));
  EXPECT_FALSE(ring_.pop(command));
}

// As outboxes use a ring: never more commands under way than lines.
void play_ring(int lines) {
  constexpr int kWriters = 4, kEach = 10'000;
  CommandRing ring(static_cast<std::uint64_t>(lines));
  std::atomic<int> free{lines};
  std::vector<std::thread> writers;
  for (int w = 0; w < kWriters; ++w) {
    writers.emplace_back([&, w] {
      for (int i = 0; i < kEach; ++i) {
        for (int left = free.load();; left = free.load()) {
          if (left > 0 && free.compare_exchange_weak(left, left - 1)) break;
          std::this_thread::yield();
        }
        Command command;
        command.rank = w;
        command.context = static_cast<std::uint64_t>(i);
        ring.push(command);
      }
    });
  }
  std::vector<std::uint64_t> next(kWriters);
  int wrong = 0;
  for (int i = 0; i < kWriters * kEach;) {
    Command command;
    if (!ring.pop(command)) {
      std::this_thread::yield();
      continue;
    }
    wrong += command.context != next[static_cast<std::size_t>(command.rank)]++;
    free.fetch_add(1);
    ++i;
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(wrong, 0);
}

TEST(CommandRingTest, ManyWritersLoseNothing) { play_ring(8); }

// The smallest: of two hosts with windows of one chunk.
TEST(CommandRingTest, TwoLinesLoseNothing) { play_ring(2); }

TEST(WindowOptionsTest, NonsenseIsNamed) {
  const auto refused = [](std::uint32_t chunk, std::uint32_t window) {
    return test::error_of(ErrorCode::kInvalidArgument, [&] { check({chunk, window}); });
  };
  EXPECT_THAT(refused(100, 4), HasSubstr("chunk_bytes is 100"));
  EXPECT_THAT(refused(4100, 4), HasSubstr("multiple of 64"));
  EXPECT_THAT(refused(4096, 0), HasSubstr("window is 0"));
  EXPECT_THAT(refused(4096, 40'000), HasSubstr("window is 40000"));
}

// Also where there is one host, so that a program that runs there runs on several.
TEST(WindowOptionsTest, EveryWorldOfProcessesChecksThem) {
  WorldOptions options = test::with_deadline(test::kShort, test::fresh_rendezvous());
  options.network.window = 0;
  EXPECT_THAT(test::error_of(ErrorCode::kInvalidArgument, [&] { World::processes(0, 2, options); }),
              HasSubstr("window is 0"));
}

}  // namespace
}  // namespace switchyard::network
