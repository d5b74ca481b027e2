// SymmetricHeap in CPU memory: places, rounds of data and flags between ranks that are threads and
// processes, ranks that differ, and ranks that do not come.
#include "switchyard/symmetric_heap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "model/errors.h"
#include "support/ranks.h"
#include "switchyard/peer.h"
#include "symmetric/blocks.h"

namespace switchyard::testing {
namespace {

using std::chrono::milliseconds;
using test::error_of;
using test::run_threads;
using test::with_deadline;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// ---------------------------------------------------------------------------------------- blocks

// Against a map of bytes.
TEST(Blocks, KeepOutOfEachOthersWay) {
  constexpr std::uint64_t kBytes = 1 << 12;
  Blocks blocks(kBytes);
  std::vector<std::uint8_t> used(kBytes);
  struct Block {
    std::uint64_t offset, bytes;
  };
  std::vector<Block> live;
  std::mt19937 random(7);
  int refused = 0;
  for (int i = 0; i < 4000; ++i) {
    if (!live.empty() && random() % 100 < 45) {
      const std::size_t which = random() % live.size();
      const Block block = live[which];
      ASSERT_TRUE(blocks.free(block.offset));
      ASSERT_FALSE(blocks.free(block.offset));
      std::fill_n(used.begin() + static_cast<std::ptrdiff_t>(block.offset), block.bytes, 0);
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(which));
    } else {
      const std::uint64_t bytes = 1 + random() % 400, alignment = 1ull << random() % 9;
      // The lowest place that there is, if there is one.
      std::uint64_t expected = 0;
      const auto fits = [&](std::uint64_t at) {
        return at + bytes <= kBytes &&
               std::all_of(used.begin() + static_cast<std::ptrdiff_t>(at),
                           used.begin() + static_cast<std::ptrdiff_t>(at + bytes),
                           [](std::uint8_t byte) { return byte == 0; });
      };
      while (expected < kBytes && !fits(expected)) expected += alignment;
      const auto found = blocks.allocate(bytes, alignment);
      if (expected >= kBytes) {
        ASSERT_FALSE(found);
        ++refused;
        continue;
      }
      ASSERT_EQ(found, expected);
      std::fill_n(used.begin() + static_cast<std::ptrdiff_t>(*found), bytes, 1);
      live.push_back({*found, bytes});
    }
    ASSERT_EQ(blocks.count(), live.size());
    ASSERT_EQ(blocks.allocated(), std::accumulate(used.begin(), used.end(), std::uint64_t{0}));
  }
  EXPECT_GT(refused, 10);
  blocks.reset();
  EXPECT_EQ(blocks.largest_free(), kBytes);
  EXPECT_EQ(blocks.allocate(kBytes, 1), 0u);
  EXPECT_EQ(blocks.largest_free(), 0u);
}

// ------------------------------------------------------------------------------------ data, flags

// Every rank gives every other its block, in rounds: the flags are numbered, the blocks have two
// windows, and nothing else keeps ranks apart.
void gather_in_rounds(const World& world, int rounds) {
  constexpr std::size_t kWords = 300;
  SymmetricHeap heap(world, 1 << 20);
  const auto ranks = static_cast<std::size_t>(world.size());
  auto* const blocks = heap.allocate<std::uint32_t>(2 * ranks * kWords);
  auto* const flags = heap.allocate<std::uint64_t>(ranks);
  auto* const sum = heap.allocate<std::uint32_t>();
  // Nobody has written yet.
  EXPECT_THAT(std::vector<std::uint32_t>(blocks, blocks + 2 * ranks * kWords), Each(0u));
  heap.barrier();

  const PeerMap map = heap.peer_map();
  ASSERT_EQ(map.rank, world.rank());
  ASSERT_EQ(map.size, world.size());
  const auto me = static_cast<std::size_t>(world.rank());
  const auto word = [&](std::size_t rank, std::size_t i, int round) {
    return static_cast<std::uint32_t>((rank * 7919 + i * 31) ^ static_cast<std::size_t>(round));
  };
  std::vector<std::uint32_t> mine(kWords);
  for (int round = 1; round <= rounds; ++round) {
    std::uint32_t* const window = blocks + static_cast<std::size_t>(round % 2) * ranks * kWords;
    for (std::size_t i = 0; i < kWords; ++i) mine[i] = word(me, i, round);
    for (int peer = 0; peer < world.size(); ++peer) {
      host::put(translate(map, window + me * kWords, peer), mine.data(), kWords * 4);
      host::signal(translate(map, flags + me, peer), static_cast<std::uint64_t>(round));
    }
    for (int peer = 0; peer < world.size(); ++peer) {
      const auto source = static_cast<std::size_t>(peer);
      const PeerWait wait =
          host::wait_until(map, flags + source, static_cast<std::uint64_t>(round), peer);
      ASSERT_TRUE(wait) << "rank " << me << ", round " << round << ", from " << peer;
      for (std::size_t i = 0; i < kWords; ++i) {
        ASSERT_EQ(window[source * kWords + i], word(source, i, round)) << "round " << round;
      }
    }
  }
  // And a counter that all add to.
  for (int peer = 0; peer < world.size(); ++peer) {
    host::signal_add(translate(map, sum, peer), 1 + static_cast<std::uint32_t>(me));
  }
  const auto expected = static_cast<std::uint32_t>(ranks * (ranks + 1) / 2);
  EXPECT_TRUE(host::wait_until(map, sum, expected, 0, Until::kEqual));
  heap.barrier();
  heap.check();
}

class SymmetricHeapRanks : public ::testing::TestWithParam<int> {};

TEST_P(SymmetricHeapRanks, ThreadsGatherInRounds) {
  run_threads(World::threads(GetParam(), with_deadline(test::kGenerous)),
              [](World& world) { gather_in_rounds(world, 300); });
}

TEST_P(SymmetricHeapRanks, ProcessesGatherInRounds) {
  const std::string rendezvous = test::fresh_rendezvous();
  test::expect_processes(GetParam(), [&](int rank) {
    gather_in_rounds(World::processes(rank, GetParam(), with_deadline(test::kGenerous, rendezvous)),
                     100);
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, SymmetricHeapRanks, ::testing::Values(1, 2, 3, 4, 8));

// ----------------------------------------------------------------------------- places, arguments

TEST(SymmetricHeap, PlacesAreTheSameOnAllRanks) {
  std::vector<World> worlds = World::threads(3);
  std::vector<std::vector<std::ptrdiff_t>> places(3);
  run_threads(worlds, [&](World& world) {
    SymmetricHeap heap(world, 10'000);
    std::vector<void*> pointers;
    auto& mine = places[static_cast<std::size_t>(world.rank())];
    for (const std::size_t bytes : {1, 100, 4000, 7}) {
      for (const std::size_t alignment : {1, 128, 4096}) {
        try {
          pointers.push_back(heap.allocate(bytes, alignment));
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kCapacityExceeded);
          continue;
        }
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(pointers.back()) % alignment, 0u);
        mine.push_back(static_cast<std::byte*>(pointers.back()) - heap.base(world.rank()));
        if (pointers.size() == 3) heap.free(pointers[1]);
      }
    }
    heap.barrier();
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(heap.base(rank)) % SymmetricHeap::kMostAlignment,
                0u);
      auto* const there = static_cast<std::byte*>(heap.translate(pointers[0], rank));
      EXPECT_EQ(there - heap.base(rank), mine[0]);
      EXPECT_EQ(translate(heap.peer_map(), static_cast<std::byte*>(pointers[0]), rank), there);
    }
    heap.reset();
    EXPECT_EQ(heap.allocate(10'000, 1), heap.base(world.rank()));
  });
  EXPECT_GT(places[0].size(), 5u);
  EXPECT_EQ(places[1], places[0]);
  EXPECT_EQ(places[2], places[0]);
}

TEST(SymmetricHeap, RefusesBadArguments) {
  const World world = World::single();
  error_of(ErrorCode::kInvalidArgument, [&] { SymmetricHeap(world, 0); });
  error_of(ErrorCode::kInvalidArgument, [&] { SymmetricHeap(world, 64, {.device = 0}); });
  error_of(ErrorCode::kInvalidArgument,
           [&] { SymmetricHeap(world, 64, {.deadline = milliseconds(-1)}); });
  for (const std::size_t bytes : {~std::size_t{0}, ~std::size_t{0} - 4096, std::size_t{1} << 62}) {
    error_of(ErrorCode::kCapacityExceeded, [&] { SymmetricHeap(world, bytes); });
  }
  SymmetricHeap heap(world, 1000);
  for (const std::size_t alignment : {0, 3, 8192}) {
    EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { heap.allocate(8, alignment); }),
                HasSubstr(std::to_string(alignment)));
  }
  void* const block = heap.allocate(900);
  EXPECT_THAT(error_of(ErrorCode::kCapacityExceeded, [&] { heap.allocate(101, 1); }),
              AllOf(HasSubstr("101 bytes"), HasSubstr("1000 bytes has 100 in one piece")));
  EXPECT_THAT(error_of(ErrorCode::kCapacityExceeded,
                       [&] { heap.allocate<std::uint64_t>((std::size_t{1} << 61) + 1); }),
              HasSubstr("18446744073709551615 bytes"));
  int elsewhere = 0;
  error_of(ErrorCode::kInvalidArgument, [&] { heap.free(&elsewhere); });
  error_of(ErrorCode::kInvalidArgument, [&] { heap.free(static_cast<std::byte*>(block) + 1); });
  error_of(ErrorCode::kInvalidArgument, [&] { heap.translate(&elsewhere, 0); });
  error_of(ErrorCode::kInvalidArgument, [&] { heap.translate(block, 1); });
  error_of(ErrorCode::kInvalidArgument, [&] { (void)heap.base(-1); });
  error_of(ErrorCode::kInvalidArgument, [&] {
    heap.wait(reinterpret_cast<std::uint64_t*>(static_cast<std::byte*>(block) + 4), 1, 0);
  });
  error_of(ErrorCode::kInvalidArgument,
           [&] { heap.wait(reinterpret_cast<std::uint64_t*>(heap.base(0) + 1000), 1, 0); });
  EXPECT_EQ(heap.translate(heap.base(0) + 1000, 0), heap.base(0) + 1000);  // the end
  heap.free(nullptr);
  heap.free(block);
  error_of(ErrorCode::kInvalidArgument, [&] { heap.free(block); });
  void* const nothing = heap.allocate(0);
  EXPECT_NE(nothing, heap.allocate(0));
  const SymmetricHeapStats stats = heap.stats();
  EXPECT_EQ(stats.bytes, 1000u);
  EXPECT_GE(stats.bytes_reserved, 1000u);
  EXPECT_EQ(stats.bytes_allocated, 2u);
  EXPECT_EQ(stats.most_allocated, 900u);
  EXPECT_EQ(stats.allocations, 2u);
  EXPECT_EQ(stats.calls, 4u);
  EXPECT_EQ(stats.largest_free, 1000u - 129);
  EXPECT_EQ(heap.device(), -1);
}

TEST(SymmetricHeap, OnlyABuildWithCudaHasGpuMemory) {
  const World world = World::single();
  try {
    SymmetricHeap heap(world, 64, {.backend = Backend::kCuda});
  } catch (const Error& error) {
    // Without the engine, or without a GPU.
    EXPECT_THAT(error.code(), ::testing::AnyOf(ErrorCode::kUnsupported, ErrorCode::kSystem));
  }
}

TEST(SymmetricHeap, MayBeMovedAndMadeAgain) {
  const World world = World::single();
  SymmetricHeap heap(world, 4096);
  void* const block = heap.allocate(64);
  SymmetricHeap other = std::move(heap);
  EXPECT_EQ(other.translate(block, 0), block);
  other = SymmetricHeap(world, 8192);
  EXPECT_EQ(other.bytes(), 8192u);
  world.abort();
  EXPECT_ERROR(other.check(), kAborted, "World::abort()");
}

// ------------------------------------------------------------------------------ ranks that differ

TEST(SymmetricHeap, DifferentHeapsAreASpecMismatch) {
  run_threads(World::threads(3), [](World& world) {
    const std::size_t odd = world.rank() == 2;
    const std::string message =
        error_of(ErrorCode::kSpecMismatch, [&] { SymmetricHeap(world, 4096 + odd); });
    EXPECT_THAT(message, AllOf(HasSubstr("rank 2"), HasSubstr("4096"), HasSubstr("4097")));
    EXPECT_THAT(error_of(ErrorCode::kSpecMismatch,
                         [&] {
                           SymmetricHeap(world, 4096,
                                         {.backend = odd == 1 ? Backend::kCuda : Backend::kCpu});
                         }),
                AllOf(HasSubstr("rank 2"), HasSubstr("cuda"), HasSubstr("cpu")));
    SymmetricHeap(world, 4096).barrier();  // the world lives
  });
}

TEST(SymmetricHeap, TheBarrierNamesTheCallInWhichRanksDiffer) {
  run_threads(World::threads(4), [](World& world) {
    const bool odd = world.rank() == 3;
    {
      SymmetricHeap heap(world, 1 << 20);
      heap.allocate(64);
      heap.barrier();
      heap.allocate(256);
      heap.allocate(odd ? 1000 : 1024);
      for (int again = 0; again < 2; ++again) {
        EXPECT_THAT(error_of(ErrorCode::kSpecMismatch, [&] { heap.barrier(); }),
                    AllOf(HasSubstr("call 3"),
                          HasSubstr("rank 0 called allocate(1024 bytes, alignment 128)"),
                          HasSubstr("rank 3 called allocate(1000 bytes")));
      }
    }
    {
      // One call less.
      SymmetricHeap heap(world, 1 << 20);
      void* const first = heap.allocate(64);
      void* const second = heap.allocate(64);
      heap.free(first);
      if (!odd) heap.free(second);
      EXPECT_THAT(error_of(ErrorCode::kSpecMismatch, [&] { heap.barrier(); }),
                  AllOf(HasSubstr("call 4"), HasSubstr("rank 0 called free(offset 128)"),
                        HasSubstr("rank 3 called nothing more")));
    }
    {
      SymmetricHeap heap(world, 1 << 20);
      heap.allocate(8, odd ? 256 : 128);
      heap.reset();
      EXPECT_THAT(error_of(ErrorCode::kSpecMismatch, [&] { heap.barrier(); }),
                  AllOf(HasSubstr("call 1"), HasSubstr("alignment 256")));
    }
    {
      // More calls than are remembered: that ranks differ is noticed all the same.
      SymmetricHeap heap(world, 1 << 20);
      for (int i = 0; i < (1 << 16) + (odd ? 2 : 0); ++i) heap.reset();
      EXPECT_THAT(error_of(ErrorCode::kSpecMismatch, [&] { heap.barrier(); }),
                  AllOf(HasSubstr("rank 0 made 65536"), HasSubstr("rank 3 made 65538")));
    }
  });
}

// ------------------------------------------------------------------------- ranks that do not come

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr milliseconds kDeadline{2'000};
#else
constexpr milliseconds kDeadline{400};
#endif

// Expects TimeoutError with phase "signal" that blames `peer`.
WaitFailure failure_of(int peer, const std::function<void()>& call) {
  const test::Blame blame = test::blame_of(peer, call);
  EXPECT_THAT(blame.words, HasSubstr("symmetric heap"));
  return blame.failure;
}

TEST(SymmetricHeapFault, AWaitSaysWhomItWaitedFor) {
  const World world = World::single();
  SymmetricHeap heap(world, 4096);
  auto* const wide = heap.allocate<std::uint64_t>(4);
  auto* const narrow = heap.allocate<std::uint32_t>(4);
  const PeerMap map = heap.peer_map();
  *wide = 6;
  const auto start = test::Clock::now();
  const PeerWait wait = host::wait_until(map, wide, 7, 0, Until::kAtLeast, 50'000'000);
  EXPECT_GE(test::since(start), milliseconds(50));
  EXPECT_FALSE(wait);
  EXPECT_EQ(wait.state, PeerWait::State::kTimeout);
  EXPECT_EQ(wait.rank, 0);
  EXPECT_EQ(wait.flag, 0u);
  EXPECT_EQ(wait.expected, 7u);
  EXPECT_EQ(wait.seen, 6u);
  EXPECT_GE(wait.waited_ns, 50'000'000u);
  // Nobody else was told.
  heap.check();
  // One look.
  EXPECT_FALSE(host::wait_until(map, wide, 7, 0, Until::kAtLeast, 0));
  EXPECT_TRUE(host::wait_until(map, wide, 6, 0, Until::kAtLeast, 0));
  EXPECT_TRUE(host::wait_until(map, wide, 5, 0, Until::kAtLeast, 0));
  EXPECT_FALSE(host::wait_until(map, wide, 5, 0, Until::kEqual, 0));
  EXPECT_TRUE(host::wait_until(map, wide, 6, 0, Until::kEqual, 0));
  // Numbers wrap around.
  *narrow = 3;
  EXPECT_TRUE(host::wait_until(map, narrow, 0xffff'fff0u, 0, Until::kAtLeast, 0));
  *narrow = 0xffff'fff0u;
  EXPECT_FALSE(host::wait_until(map, narrow, 3, 0, Until::kAtLeast, 0));
}

TEST(SymmetricHeapFault, ARankThatDoesNotSignalIsNamedOnAllRanks) {
  constexpr int kRanks = 4, kLate = 2;
  std::vector<World> worlds = World::threads(kRanks, with_deadline(test::kGenerous));
  std::atomic<int> first_ones{0};
  run_threads(worlds, [&](World& world) {
    SymmetricHeap heap(world, 4096, {.deadline = kDeadline});
    auto* const flags = heap.allocate<std::uint64_t>(kRanks);
    heap.barrier();
    const PeerMap map = heap.peer_map();
    EXPECT_EQ(map.deadline_ns, static_cast<std::uint64_t>(kDeadline.count()) * 1'000'000);
    for (int peer = 0; peer < kRanks && world.rank() != kLate; ++peer) {
      host::signal(translate(map, flags + world.rank(), peer), 1u);
    }
    const auto start = test::Clock::now();
    const WaitFailure failure = failure_of(kLate, [&] {
      // The late rank itself waits for nothing that does not come, and hears of it here.
      if (world.rank() == kLate) {
        EXPECT_TRUE(test::eventually([&] { return host::aborted(map); }));
        heap.check();
      }
      for (int peer = 0; peer < kRanks; ++peer) heap.wait(flags + peer, 1, peer);
    });
    EXPECT_LT(test::since(start), test::kAtOnce);
    EXPECT_STREQ(failure.phase, "signal");
    EXPECT_EQ(failure.slot, kLate * sizeof(std::uint64_t));
    EXPECT_EQ(failure.expected, 1u);
    EXPECT_EQ(failure.observed, 0u);
    EXPECT_GE(failure.waited_seconds, std::chrono::duration<double>(kDeadline).count());
    // kTimeout where the deadline passed, kAborted elsewhere.
    const bool first = failure.waiter_rank == world.rank();
    error_of(first ? ErrorCode::kTimeout : ErrorCode::kAborted, [&] { heap.check(); });
    first_ones += first;
    // It stays dead, with the same reason, and every wait says so at once.
    failure_of(kLate, [&] { heap.check(); });
    failure_of(kLate, [&] { heap.barrier(); });
    const PeerWait wait = host::wait_until(map, flags + kLate, 1, kLate);
    EXPECT_EQ(wait.state, PeerWait::State::kAborted);
    EXPECT_EQ(wait.rank, kLate);
    host::give_up(map, wait);
    // The world lives.
    gather_in_rounds(world, 3);
  });
  EXPECT_EQ(first_ones, 1);
}

TEST(SymmetricHeapFault, AbortEndsWaitsAtOnce) {
  run_threads(World::threads(3, with_deadline(test::kGenerous)), [](World& world) {
    SymmetricHeap heap(world, 4096);
    auto* const flag = heap.allocate<std::uint64_t>();
    heap.barrier();
    const auto start = test::Clock::now();
    if (world.rank() == 1) world.abort();
    const PeerWait wait = host::wait_until(heap.peer_map(), flag, 1, 0);
    EXPECT_EQ(wait.state, PeerWait::State::kAborted);
    EXPECT_EQ(wait.rank, 1);
    const WaitFailure failure = failure_of(1, [&] { heap.check(); });
    EXPECT_STREQ(failure.phase, "abort");
    EXPECT_LT(test::since(start), test::kAtOnce);
  });
}

#if !defined(__SANITIZE_THREAD__)
TEST(SymmetricHeapFault, AKilledProcessIsNamedByItsDeadline) {
  constexpr int kRanks = 3, kDead = 1;
  const std::string rendezvous = test::fresh_rendezvous();
  const std::vector<int> codes = test::run_processes(kRanks, [&](int rank) {
    const World world = World::processes(rank, kRanks, with_deadline(test::kGenerous, rendezvous));
    SymmetricHeap heap(world, 1 << 16, {.deadline = kDeadline});
    auto* const flags = heap.allocate<std::uint64_t>(kRanks);
    heap.barrier();
    const PeerMap map = heap.peer_map();
    for (std::uint64_t round = 1;; ++round) {
      if (rank == kDead && round == 20) ::raise(SIGKILL);
      for (int peer = 0; peer < kRanks; ++peer) {
        host::signal(translate(map, flags + rank, peer), round);
      }
      try {
        for (int peer = 0; peer < kRanks; ++peer) heap.wait(flags + peer, round, peer);
      } catch (const TimeoutError& error) {
        EXPECT_EQ(error.failure().peer_rank, kDead) << error.what();
        EXPECT_EQ(error.failure().expected, 20u);
        EXPECT_EQ(error.failure().observed, 19u);
        EXPECT_THAT(error.what(), HasSubstr("has exited"));
        return;
      }
    }
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(codes[static_cast<std::size_t>(rank)], rank == kDead ? test::kKilled : 0)
        << "rank " << rank;
  }
}
#endif

TEST(SymmetricHeapFault, ARankThatDoesNotComeIsNamedByTheBarrier) {
  run_threads(World::threads(2, with_deadline(kDeadline)), [](World& world) {
    SymmetricHeap heap(world, 4096);
    if (world.rank() == 1) return;
    test::blame_of(
        1, [&] { heap.barrier(); }, "bootstrap");
  });
}

}  // namespace
}  // namespace switchyard::testing
