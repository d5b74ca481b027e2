// Ranks that wait for each other in different objects of a world: a pass, a collective, a symmetric
// heap. All name the rank that stopped, and none the rank that it waits for itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "support/layers.h"
#include "support/ranks.h"
#include "switchyard/symmetric_heap.h"

namespace switchyard::testing {
namespace {

using std::chrono::milliseconds;
using Kind = ProtocolStep::Kind;

// A busy host, or a sanitizer, keeps a rank that is well from its next step for less.
constexpr milliseconds kDeadline{4'000};
constexpr int kRanks = 3;

struct Named {
  std::atomic<int> rank;
  char words[400];
};

// Runs body(world, stop) in processes, the ranks of a world. In `victim`, stop() ends or stops the
// process. Expects the others to name it.
void expect_named(int victim, int signal,
                  const std::function<void(World&, const std::function<void()>& stop)>& body) {
  const std::string rendezvous = test::fresh_rendezvous();
  test::SharedWithChildren<std::array<Named, kRanks>> named;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < kRanks; ++rank) {
    const pid_t pid = ::fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      Named& mine = (*named)[static_cast<std::size_t>(rank)];
      mine.rank = -1;
      try {
        World world = test::join(rank, kRanks, rendezvous, kDeadline);
        body(world, [&] { ::raise(signal); });
      } catch (const TimeoutError& error) {
        std::snprintf(mine.words, sizeof mine.words, "%s", error.what());
        mine.rank = error.failure().peer_rank;
      } catch (const std::exception& error) {
        std::snprintf(mine.words, sizeof mine.words, "%s", error.what());
      }
      ::_exit(0);
    }
    pids.push_back(pid);
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    const pid_t pid = pids[static_cast<std::size_t>(rank)];
    if (rank == victim) continue;
    const bool ended =
        test::eventually([&] { return ::waitpid(pid, nullptr, WNOHANG) == pid; }, test::kGenerous);
    EXPECT_TRUE(ended) << "rank " << rank << " hangs";
    EXPECT_EQ((*named)[static_cast<std::size_t>(rank)].rank, victim)
        << "rank " << rank << ": " << (*named)[static_cast<std::size_t>(rank)].words;
    if (!ended) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }
  ::kill(pids[static_cast<std::size_t>(victim)], SIGKILL);
  ::waitpid(pids[static_cast<std::size_t>(victim)], nullptr, 0);
}

// A layer whose tokens go to the experts of one rank.
class Routed {
 public:
  Routed(World& world, int to, std::function<void(const ProtocolStep&)> on_step = {})
      : layer_(world, spec(), weights(), options(std::move(on_step))), tokens_(8, 64) {
    for (int t = 0; t < 8; ++t) {
      for (int e = 0; e < 2; ++e) ids_.push_back(2 * to + e);
    }
  }
  void forward() {
    const std::vector<float> shares(ids_.size(), 0.5F);
    ForwardInput input;
    input.activations = tokens_.x.view();
    input.topk_ids = ids_;
    input.topk_weights = shares;
    ForwardOutput output;
    output.data = tokens_.y.row(0);
    output.dtype = DType::kF32;
    layer_.forward(input, output);
  }

 private:
  static LayerSpec spec() { return spec_of(64, 32, 2 * kRanks, 2); }
  static MoeWeights weights() {
    return generate_weights(spec(), DType::kF32, 1, {.num_threads = 1});
  }
  static LayerOptions options(std::function<void(const ProtocolStep&)> on_step) {
    LayerOptions options;
    options.max_tokens = 8;
    options.cpu.num_threads = 1;
    options.diagnostics.on_step = std::move(on_step);
    return options;
  }

  MoeLayer layer_;
  GatedTokens tokens_;
  std::vector<std::int32_t> ids_;
};

// Rank `waiter` waits in its third pass for the victim's results, and the third rank, which lacks
// nothing there, for both in the barrier behind it.
void stop_amid_experts(int victim, int waiter, int signal) {
  SCOPED_TRACE(::testing::Message() << "rank " << victim << " stops by signal " << signal
                                    << ", rank " << waiter << " waits in the pass");
  expect_named(victim, signal, [&](World& world, const std::function<void()>& stop) {
    const int rank = world.rank();
    Routed layer(world, rank == waiter ? victim : rank, [&](const ProtocolStep& step) {
      if (rank == victim && step.kind == Kind::kGemm1 && step.epoch == 3) stop();
    });
    for (;;) {
      layer.forward();
      world.barrier();
    }
  });
}

TEST(Blame, ABarrierBehindAPassNamesTheRankThatWasKilledInIt) {
  stop_amid_experts(2, 0, SIGKILL);
  stop_amid_experts(2, 1, SIGKILL);
}

TEST(Blame, ABarrierBehindAPassNamesTheRankThatStoppedInIt) {
  stop_amid_experts(2, 0, SIGSTOP);
  stop_amid_experts(0, 1, SIGSTOP);
}

// A rank whose layer failed leaves, and the others are then in a barrier.
TEST(Blame, ARankThatLeavesAfterAFailedPassIsNotBlamed) {
  expect_named(2, SIGSTOP, [&](World& world, const std::function<void()>& stop) {
    const int rank = world.rank();
    {
      Routed layer(world, rank == 0 ? 2 : rank, [&](const ProtocolStep& step) {
        if (rank == 2 && step.kind == Kind::kGemm1 && step.epoch == 3) stop();
      });
      for (int epoch = 0; epoch < 3; ++epoch) layer.forward();
    }
    std::this_thread::sleep_for(kDeadline / 2);
    world.barrier();
  });
}

// Rank 0 waits for a flag of rank 1, which waits for rank 2 in a barrier.
TEST(Blame, AWaitForAFlagNamesTheRankThatItsRaiserWaitsFor) {
  for (const int signal : {SIGKILL, SIGSTOP}) {
    expect_named(2, signal, [&](World& world, const std::function<void()>& stop) {
      SymmetricHeap heap(world, 4096);
      auto* const flag = static_cast<std::uint64_t*>(heap.allocate(sizeof(std::uint64_t)));
      heap.barrier();
      if (world.rank() == 2) stop();
      if (world.rank() == 0) heap.wait(flag, 1, 1);
      world.barrier();
    });
  }
}

// Rank 1 waits for rank 0 in a barrier, and rank 0 in the pass for rank 2, whose thread stands
// still.
TEST(Blame, RanksThatAreThreadsAreFollowedToo) {
  std::vector<World> worlds = World::threads(kRanks, test::with_deadline(milliseconds(1'000)));
  test::Gate gate;
  std::array<int, kRanks> named{-1, -1, -1};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      World& world = worlds[static_cast<std::size_t>(rank)];
      try {
        Routed layer(world, rank == 0 ? 2 : rank, [&](const ProtocolStep& step) {
          if (rank == 2 && step.kind == Kind::kGemm1) gate.wait();
        });
        layer.forward();
        world.barrier();
      } catch (const TimeoutError& error) {
        named[static_cast<std::size_t>(rank)] = error.failure().peer_rank;
      }
      if (rank == 1) gate.open();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(named[0], 2);
  EXPECT_EQ(named[1], 2);
}

}  // namespace
}  // namespace switchyard::testing
