#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "model/errors.h"
#include "support/ranks.h"

namespace switchyard::test {
namespace {

using ::testing::HasSubstr;

bool is_mapped(std::byte* address) {
  unsigned char resident = 0;
  return ::mincore(address, 1, &resident) == 0 || errno != ENOMEM;
}

class ThreadWorld : public ::testing::TestWithParam<int> {};

TEST_P(ThreadWorld, GathersAndSharesMemory) {
  run_threads(World::threads(GetParam(), with_deadline(kGenerous)), [](World& world) {
    EXPECT_STREQ(world.fabric_name(), "threads");
    EXPECT_EQ(world.deadline(), kGenerous);
    for (const std::size_t count : {0, 1, 7, 10'000}) check_all_gather(world, count);
    check_symmetric_memory(world, (std::size_t{5} << 20) + 8);
    for (int i = 0; i < 200; ++i) check_all_gather(world, 1);
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, ThreadWorld, ::testing::Range(1, 9));

TEST(ThreadFabric, SingleIsAWorldOfOne) {
  World world = World::single();
  EXPECT_EQ(world.rank(), 0);
  EXPECT_EQ(world.size(), 1);
  check_all_gather(world, 3);
  check_symmetric_memory(world, 4096);
}

TEST(ThreadFabric, RejectsBadArguments) {
  EXPECT_ERROR(World::threads(0), kInvalidArgument, "0");
  EXPECT_ERROR(World::threads(2, with_deadline(milliseconds(-5))), kInvalidArgument, "-5 ms");
  World world = World::single();
  const std::array<std::byte, 2> mine{};
  std::array<std::byte, 3> all{};
  error_of(ErrorCode::kInvalidArgument, [&] { world.fabric().all_gather(mine, all); });
  error_of(ErrorCode::kInvalidArgument, [&] { world.fabric().allocate(0); });
}

TEST(ThreadFabric, AWaitThatRanksShareKeepsItsRecord) {
  run_threads(World::threads(3, with_deadline(kGenerous)), [](World& world) {
    std::optional<Error> mine;
    std::optional<WaitFailure> wait;
    if (world.rank() == 1) {
      mine = Error(ErrorCode::kTimeout, "rank 1 waited in vain");
      wait = bootstrap_failure(1, 2, 7, 3, 2, milliseconds(1500));
    }
    try {
      share_outcome(world.fabric(), mine, wait);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const TimeoutError& error) {
      EXPECT_EQ(error.code(), ErrorCode::kTimeout);
      EXPECT_STREQ(error.what(), "rank 1 waited in vain");
      EXPECT_EQ(error.failure().waiter_rank, 1);
      EXPECT_EQ(error.failure().peer_rank, 2);
      EXPECT_STREQ(error.failure().phase, "bootstrap");
      EXPECT_EQ(error.failure().slot, 7u);
      EXPECT_EQ(error.failure().expected, 3u);
      EXPECT_EQ(error.failure().observed, 2u);
      EXPECT_DOUBLE_EQ(error.failure().waited_seconds, 1.5);
    }
  });
}

TEST(ThreadFabric, MemoryBeyondTheAddressSpaceIsACapacityError) {
  run_threads(World::threads(2, with_deadline(kGenerous)), [](World& world) {
    for (const std::size_t bytes : {std::size_t{1} << 60, ~std::size_t{0}}) {
      EXPECT_THAT(error_of(ErrorCode::kCapacityExceeded, [&] { world.fabric().allocate(bytes); }),
                  HasSubstr(std::to_string(bytes)));
    }
    check_symmetric_memory(world, 4096);
  });
}

TEST(ThreadFabric, MemoryIsCommittedWhenTouched) {
  run_threads(World::threads(2, with_deadline(kGenerous)), [](World& world) {
    // More than most machines have, and as much as ThreadSanitizer's address space bears.
    const auto segment = world.fabric().allocate(std::size_t{1} << 38);
    for (int rank = 0; rank < world.size(); ++rank) {
      EXPECT_EQ(segment->base(rank)[segment->bytes() - 1], std::byte{0});
    }
    world.barrier();
  });
}

TEST(ThreadFabric, ABlockOutlivesItsOwnersHandle) {
  std::vector<World> worlds = World::threads(2, with_deadline(kGenerous));
  std::byte* base_of_rank_0 = nullptr;
  run_threads(worlds, [&](World& world) {
    auto segment = world.fabric().allocate(4096);
    world.barrier();
    if (world.rank() == 0) {
      base_of_rank_0 = segment->base(0);
      segment.reset();
    }
    world.barrier();
    if (world.rank() == 1) {
      segment->base(0)[4095] = std::byte{1};
      EXPECT_TRUE(is_mapped(segment->base(0)));
      segment.reset();
      EXPECT_FALSE(is_mapped(base_of_rank_0));
    }
  });
}

TEST(ThreadFabric, DifferentCallsAreASpecMismatchAndTheWorldGoesOn) {
  run_threads(World::threads(3, with_deadline(kGenerous)), [](World& world) {
    const auto odd = static_cast<std::size_t>(world.rank() == 1);
    const std::string message =
        error_of(ErrorCode::kSpecMismatch, [&] { world.fabric().allocate(4096 + odd); });
    EXPECT_THAT(message, HasSubstr("rank 1 called allocate of 4097 bytes"));
    error_of(ErrorCode::kSpecMismatch, [&] { check_all_gather(world, 1 + odd); });
    error_of(ErrorCode::kSpecMismatch, [&] {
      if (odd) world.fabric().allocate(1);
      world.barrier();
    });
    if (!odd) error_of(ErrorCode::kSpecMismatch, [&] { world.fabric().allocate(8); });
    if (odd) error_of(ErrorCode::kSpecMismatch, [&] { world.barrier(); });
    check_all_gather(world, 5);
  });
}

TEST(ThreadFabric, AMissingRankIsNamedWithinTheDeadline) {
  std::vector<World> worlds = World::threads(5, with_deadline(kShort));
  run_threads(worlds, [](World& world) {
    if (world.rank() == 1 || world.rank() == 3) return;
    const Clock::time_point start = Clock::now();
    const std::string message = timeout_of(ErrorCode::kTimeout, 1, [&] { world.barrier(); });
    EXPECT_THAT(message, HasSubstr("ranks 1 and 3 of 5 did not call all_gather"));
    EXPECT_LT(since(start), kAtOnce);
    EXPECT_THAT(timeout_of(ErrorCode::kAborted, 1, [&] { world.barrier(); }), HasSubstr("dead"));
  });
  // The late ones learn of it at once.
  timeout_of(ErrorCode::kAborted, 1, [&] { worlds[1].barrier(); });
  timeout_of(ErrorCode::kAborted, 1, [&] { worlds[3].fabric().allocate(1); });

  std::vector<World> next = World::threads(5, with_deadline(kGenerous));
  run_threads(next, [](World& world) { check_all_gather(world, 10); });
}

TEST(ThreadFabric, ARankThatDestroyedItsWorldIsNotWaitedFor) {
  for (const bool before : {true, false}) {
    std::vector<World> worlds = World::threads(3, with_deadline(kGenerous));
    const Clock::time_point start = Clock::now();
    World leaver = std::move(worlds.back());
    worlds.pop_back();
    if (before) World(std::move(leaver));
    std::thread leaving;
    if (!before) leaving = std::thread([moved = std::move(leaver)] {});
    run_threads(worlds, [](World& world) {
      EXPECT_THAT(timeout_of(ErrorCode::kAborted, 2, [&] { world.barrier(); }),
                  HasSubstr("rank 2"));
      EXPECT_THAT(world.fabric().liveness(2), HasSubstr("destroyed"));
      EXPECT_EQ(world.fabric().liveness(0), "");
    });
    EXPECT_LT(since(start), kAtOnce);
    if (leaving.joinable()) leaving.join();
  }
}

}  // namespace
}  // namespace switchyard::test
