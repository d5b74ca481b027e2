// SymmetricHeap in GPU memory, and the functions that kernels have for it. Where there are fewer
// GPUs than ranks, ranks share them: kernels have few blocks, and each rank a stream of its own.
#include "switchyard/symmetric_heap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <vector>

#include "gpu/device.h"
#include "gpu/symmetric_heap_kernels.h"
#include "model/errors.h"
#include "support/on_gpu.h"
#include "support/ranks.h"

namespace switchyard::testing {
namespace {

using std::chrono::milliseconds;
using test::run_threads;
using test::with_deadline;
using ::testing::HasSubstr;

// A stream with work behind a kernel that waits holds one of the device's queues, of which there
// are 8 unless this says otherwise.
const bool kManyQueues = ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0) == 0;

constexpr milliseconds kDeadline{10'000};

// The findings of a kernel, in memory of one rank's device.
struct Report {
  std::uint32_t wrong;
  std::uint32_t reserved;
  PeerWait wait;
};

// One rank. Nothing may be allocated while ranks that share a GPU wait for each other, so all
// memory is there before the first launch.
struct Player {
  World& world;
  int device;
  SymmetricHeap heap;
  gpu::Stream stream;
  gpu::DeviceBuffer report{sizeof(Report)};

  Player(World& of, std::size_t bytes, milliseconds deadline = kDeadline)
      : world(of),
        device(choose(of)),
        heap(of, bytes, {.backend = Backend::kCuda, .deadline = deadline}) {
    const Report none{};
    report.upload(&none, sizeof none);
    EXPECT_EQ(load_heap_kernels(), 0);
  }
  static int choose(const World& world) {
    const int device = world.rank() % gpu::device_count();
    gpu::set_device(device);
    return device;
  }
  std::uint32_t* wrong() const { return &reinterpret_cast<Report*>(report.data())->wrong; }
  PeerWait* wait() const { return &reinterpret_cast<Report*>(report.data())->wait; }
  Report fetch() {
    stream.synchronize();
    Report seen{};
    report.download(&seen, sizeof seen);
    return seen;
  }
};

class GpuSymmetricHeap : public OnGpu<::testing::TestWithParam<int>> {};

// Bytes at all kinds of addresses, by blocks and warps, from one block and several, in many rounds
// without a barrier between them.
void gather(World& world) {
  constexpr std::uint64_t kRoom = 1 << 16;
  constexpr std::uint32_t kMostBlocks = 4, kRounds = 40;
  const auto ranks = static_cast<std::uint64_t>(world.size());
  Player player(world, 4 * ranks * kRoom + (1 << 20));
  SymmetricHeap& heap = player.heap;
  ASSERT_EQ(heap.device(), player.device);
  GatherCall call{};
  call.map = heap.peer_map();
  call.room = kRoom;
  call.rounds = kRounds;
  call.wrong = player.wrong();
  call.failed = player.wait();
  call.windows = heap.allocate<std::uint8_t>(2 * ranks * kRoom);
  call.source = heap.allocate<std::uint8_t>(kMostBlocks * kRoom);
  // A window's worth of zeros, read back.
  std::vector<std::uint8_t> zeros(kRoom, 1);
  gpu::copy_memory(zeros.data(), call.windows, zeros.size());
  EXPECT_THAT(zeros, ::testing::Each(0));
  for (const std::uint32_t blocks : {1u, kMostBlocks}) {
    for (const bool by_warps : {false, true}) {
      for (const std::uint64_t shift : {0, 4, 3}) {
        // A round more than the last has flags of its own.
        call.flags = heap.allocate<std::uint64_t>(ranks);
        call.first_round = 1;
        call.blocks = blocks;
        call.by_warps = by_warps;
        call.shift = shift;
        heap.barrier();
        for (const std::uint64_t bytes :
             {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1000}, kRoom - 16}) {
          call.bytes = bytes;
          const gpu::LaunchTurn turn;
          ASSERT_EQ(launch_gather(call, player.stream.handle()), 0);
          call.first_round += kRounds;
        }
        const Report seen = player.fetch();
        EXPECT_EQ(seen.wrong, 0u) << "blocks " << blocks << ", by warps " << by_warps << ", shift "
                                  << shift << ", rank " << world.rank();
        heap.check();
        heap.barrier();
      }
    }
  }
}
TEST_P(GpuSymmetricHeap, GathersInRounds) {
  run_threads(World::threads(GetParam(), with_deadline(test::kGenerous)), gather);
}

TEST_P(GpuSymmetricHeap, PassesValuesAroundTheRing) {
  run_threads(World::threads(GetParam(), with_deadline(test::kGenerous)), [](World& world) {
    Player player(world, 1 << 20);
    RingCall call{};
    call.map = player.heap.peer_map();
    call.value = player.heap.allocate<std::uint64_t>();
    call.flag = player.heap.allocate<std::uint32_t>();
    call.taken = player.heap.allocate<std::uint32_t>();
    call.first_round = 1;
    call.rounds = 2000;
    call.wrong = player.wrong();
    call.failed = player.wait();
    player.heap.barrier();
    {
      const gpu::LaunchTurn turn;
      ASSERT_EQ(launch_ring(call, player.stream.handle()), 0);
    }
    EXPECT_EQ(player.fetch().wrong, 0u) << "rank " << world.rank();
    player.heap.check();
    std::uint32_t flag = 0;
    gpu::copy_memory(&flag, call.flag, sizeof flag);
    EXPECT_EQ(flag, call.rounds);
    player.heap.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuSymmetricHeap, ::testing::Values(1, 2, 4, 8));

using GpuSymmetricHeapFault = OnGpu<::testing::Test>;

StallCall stall_of(Player& player, int peer, milliseconds deadline, bool gives_up) {
  StallCall call{};
  call.map = player.heap.peer_map();
  call.flag = player.heap.allocate<std::uint64_t>();
  call.deadline_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(deadline).count());
  call.peer = peer;
  call.gives_up = gives_up;
  call.outcome = player.wait();
  return call;
}

TEST_F(GpuSymmetricHeapFault, AWaitSaysWhomItWaitedFor) {
  World world = World::single();
  Player player(world, 1 << 20);
  const StallCall call = stall_of(player, 0, milliseconds(200), false);
  const auto start = test::Clock::now();
  ASSERT_EQ(launch_stall(call, player.stream.handle()), 0);
  const PeerWait wait = player.fetch().wait;
  EXPECT_GE(test::since(start), milliseconds(150));
  EXPECT_LT(test::since(start), test::kAtOnce);
  EXPECT_EQ(wait.state, PeerWait::State::kTimeout);
  EXPECT_EQ(wait.rank, 0);
  EXPECT_EQ(wait.flag, 0u);
  EXPECT_EQ(wait.expected, 1u);
  EXPECT_EQ(wait.seen, 0u);
  EXPECT_GE(wait.waited_ns, 200'000'000u);
  player.heap.check();  // nobody was told
}

// Rank 1 raises nothing; rank 0's kernel gives up, and rank 2's, which would wait much longer, ends
// with it.
TEST_F(GpuSymmetricHeapFault, ARankThatDoesNotSignalIsNamedOnAllRanks) {
  constexpr int kRanks = 3, kLate = 1;
  run_threads(World::threads(kRanks, with_deadline(test::kGenerous)), [&](World& world) {
    Player player(world, 1 << 20);
    const milliseconds deadline = world.rank() == 0 ? milliseconds(300) : test::kGenerous;
    const StallCall call = stall_of(player, kLate, deadline, true);
    player.heap.barrier();
    const auto start = test::Clock::now();
    if (world.rank() != kLate) {
      {
        const gpu::LaunchTurn turn;
        ASSERT_EQ(launch_stall(call, player.stream.handle()), 0);
      }
      const PeerWait wait = player.fetch().wait;
      EXPECT_EQ(wait.state,
                world.rank() == 0 ? PeerWait::State::kTimeout : PeerWait::State::kAborted);
      EXPECT_EQ(wait.rank, kLate);
    }
    const auto dead = [&] {
      try {
        player.heap.check();
        return false;
      } catch (const TimeoutError& error) {
        EXPECT_EQ(error.code(), world.rank() == 0 ? ErrorCode::kTimeout : ErrorCode::kAborted);
        EXPECT_EQ(error.failure().waiter_rank, 0);
        EXPECT_EQ(error.failure().peer_rank, kLate);
        EXPECT_THAT(error.what(), HasSubstr("rank 1 did not raise the flag at offset 0"));
        return true;
      }
    };
    EXPECT_TRUE(test::eventually(dead));
    EXPECT_LT(test::since(start), test::kAtOnce);
    // The world lives.
    SymmetricHeap(world, 4096, {.backend = Backend::kCuda}).barrier();
  });
}

TEST_F(GpuSymmetricHeapFault, AbortEndsKernelsThatWait) {
  run_threads(World::threads(2, with_deadline(test::kGenerous)), [](World& world) {
    Player player(world, 1 << 20);
    const StallCall call = stall_of(player, 1, test::kGenerous, true);
    player.heap.barrier();
    const auto start = test::Clock::now();
    if (world.rank() == 1) {
      world.abort();
    } else {
      ASSERT_EQ(launch_stall(call, player.stream.handle()), 0);
      const PeerWait wait = player.fetch().wait;
      EXPECT_EQ(wait.state, PeerWait::State::kAborted);
      EXPECT_EQ(wait.rank, 1);
    }
    EXPECT_ERROR(player.heap.check(), kAborted, "rank 1 called World::abort()");
    EXPECT_LT(test::since(start), test::kAtOnce);
  });
}

TEST_F(GpuSymmetricHeapFault, TooLargeAHeapIsRefusedOnAllRanks) {
  run_threads(World::threads(2, with_deadline(test::kGenerous)), [](World& world) {
    gpu::set_device(world.rank() % gpu::device_count());
    test::error_of(ErrorCode::kCapacityExceeded, [&] {
      SymmetricHeap(world, std::size_t{1} << 42, {.backend = Backend::kCuda});
    });
    test::error_of(ErrorCode::kInvalidArgument,
                   [&] { SymmetricHeap(world, 4096, {.backend = Backend::kCuda, .device = 99}); });
  });
}

}  // namespace
}  // namespace switchyard::testing
