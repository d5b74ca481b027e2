// Ranks of an exchange that stall, die, skip a call or abort: every other rank says so, within the
// deadline, and names it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>

#include <condition_variable>
#include <mutex>

#include "support/exchanges.h"
#include "support/ranks.h"

namespace switchyard::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using Kind = ProtocolStep::Kind;

constexpr int kRanks = 4, kStopped = 2;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr milliseconds kDeadline{2'000};
#else
constexpr milliseconds kDeadline{500};
#endif

ExchangeSpec fault_spec() { return {.hidden = 16, .num_experts = 8, .top_k = 2, .max_tokens = 40}; }

const ExchangeBatch& fault_batch() {
  static const ExchangeBatch batch(fault_spec(), kRanks, DType::kBF16, 1, {40, 40, 40, 40});
  return batch;
}

struct Player : HostPlayer {
  explicit Player(const World& its_world, const ExchangeOptions& options = {})
      : HostPlayer(its_world, fault_spec(), 1, options) {
    load(fault_batch());
  }
  void combine() {
    upload_results(fault_batch(), got());
    enqueue_combine(DType::kF32);
    wrong_sums(fault_batch(), rank, sums(fault_batch(), DType::kF32));
  }
  void round() {
    enqueue_dispatch();
    combine();
  }
};

// Expects TimeoutError that blames `peer`; returns its phase.
std::string blame_of(int peer, const std::function<void()>& call) {
  const test::Blame blame = test::blame_of(peer, call);
  EXPECT_THAT(blame.words, HasSubstr("exchange"));
  return blame.failure.phase;
}

WorldOptions options_of(const std::string& rendezvous = "") {
  return test::with_deadline(kDeadline, rendezvous);
}

struct Stop {
  Kind kind;
  const char* phase;  // that the others lack
};

class ExchangeStall : public ::testing::TestWithParam<Stop> {};

TEST_P(ExchangeStall, EveryOtherRankNamesTheStalledOne) {
  test::Gate gate;
  std::atomic<int> others{0};
  std::vector<World> worlds = World::threads(kRanks, options_of());
  test::run_threads(worlds, [&](World& world) {
    ExchangeOptions options{.num_threads = world.rank() % 2 + 1};
    const bool stalls = world.rank() == kStopped;
    if (stalls) {
      options.on_step = [&](const ProtocolStep& step) {
        // In the third dispatch or combine.
        if (step.kind == GetParam().kind && step.epoch >= 5) gate.wait();
      };
    }
    Player player(world, options);
    const std::string phase = blame_of(kStopped, [&] {
      for (int i = 0; i < 6; ++i) player.round();
    });
    if (!stalls) {
      EXPECT_EQ(phase, GetParam().phase);
      // And again, of every call.
      blame_of(kStopped, [&] { player.enqueue_dispatch(); });
      blame_of(kStopped, [&] { player.made.check(); });
      if (++others == kRanks - 1) gate.open();
    }
  });
  // The world lives.
  test::run_threads(worlds, [&](World& world) { Player(world).round(); });
}

INSTANTIATE_TEST_SUITE_P(Steps, ExchangeStall,
                         ::testing::Values(Stop{Kind::kPublishCounts, "counts"},
                                           Stop{Kind::kDispatch, "dispatch"},
                                           Stop{Kind::kArrived, "dispatch"},
                                           Stop{Kind::kFinished, "combine"},
                                           Stop{Kind::kCombine, "counts"}));

TEST(ExchangeFault, ARankSkipsACall) {
  test::run_threads(World::threads(kRanks, options_of()), [&](World& world) {
    Player player(world);
    player.round();
    if (world.rank() == kStopped) return;
    EXPECT_EQ(blame_of(kStopped, [&] { player.round(); }), "counts");
  });
}

TEST(ExchangeFault, ARankDoesNotReturnResults) {
  test::run_threads(World::threads(kRanks, options_of()), [&](World& world) {
    Player player(world);
    player.enqueue_dispatch();
    if (world.rank() == kStopped) return;
    EXPECT_EQ(blame_of(kStopped, [&] { player.combine(); }), "combine");
  });
}

TEST(ExchangeFault, ADeadlineOfItsOwn) {
  test::run_threads(World::threads(2, test::with_deadline(test::kGenerous)), [&](World& world) {
    const ExchangeOptions options{.deadline = kDeadline};
    ExchangeSpec spec = fault_spec();
    Exchange exchange(world, spec, options);
    if (world.rank() == 1) return;
    ExchangeHandle handle = exchange.make_handle();
    const auto start = test::Clock::now();
    exchange.dispatch_send({}, handle);
    EXPECT_EQ(blame_of(1, [&] { exchange.rows_needed(handle); }), "counts");
    EXPECT_LT(test::since(start), test::kAtOnce);
  });
}

TEST(ExchangeFault, AbortIsToldAtOnce) {
  test::run_threads(World::threads(kRanks, test::with_deadline(test::kGenerous)),
                    [&](World& world) {
                      Player player(world);
                      player.round();
                      // A rank that has ended its round must not end another's.
                      world.barrier();
                      const auto start = test::Clock::now();
                      if (world.rank() == kStopped) world.abort();
                      EXPECT_EQ(blame_of(kStopped, [&] { player.round(); }), "abort");
                      EXPECT_LT(test::since(start), test::kAtOnce);
                    });
}

TEST(ExchangeFault, AHookThatThrowsEndsTheCallOnAllRanks) {
  test::run_threads(World::threads(kRanks, test::with_deadline(test::kGenerous)),
                    [&](World& world) {
                      ExchangeOptions options;
                      const bool throws = world.rank() == kStopped;
                      if (throws) {
                        options.on_step = [](const ProtocolStep& step) {
                          if (step.kind == Kind::kArrived && step.epoch == 3)
                            throw std::runtime_error("no more");
                        };
                      }
                      Player player(world, options);
                      player.round();
                      if (throws) {
                        EXPECT_THROW(player.round(), std::runtime_error);
                      }
                      EXPECT_EQ(blame_of(kStopped, [&] { player.round(); }), "experts");
                    });
}

#if !defined(__SANITIZE_THREAD__)
// A process that is stopped or killed at any step of any round, of several by seed.
void stop_process(int signal, std::uint64_t seed) {
  const int last_step = test::Numbers(seed).between(20, 400);
  SCOPED_TRACE(::testing::Message() << "seed " << seed << ": at step " << last_step);
  struct Shared {
    std::atomic<pid_t> stopped;
    std::atomic<int> done;
  };
  test::SharedWithChildren<Shared> shared;
  const std::string rendezvous = test::fresh_rendezvous();
  const std::vector<int> codes = test::run_processes(kRanks, [&](int rank) {
    const World world = World::processes(rank, kRanks, options_of(rendezvous));
    ExchangeOptions options{.num_threads = 1};
    int steps = 0;
    if (rank == kStopped) {
      shared->stopped = ::getpid();
      options.on_step = [&](const ProtocolStep&) {
        if (++steps == last_step) ::raise(signal);
      };
    }
    Player player(world, options);
    blame_of(kStopped, [&] {
      for (;;) player.round();
    });
    // The last one lets the stopped rank go on, which then says the same.
    if (signal == SIGSTOP && ++shared->done == kRanks - 1) ::kill(shared->stopped, SIGCONT);
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    const bool killed = rank == kStopped && signal == SIGKILL;
    EXPECT_EQ(codes[static_cast<std::size_t>(rank)], killed ? test::kKilled : 0) << "rank " << rank;
  }
}
TEST(ExchangeFault, AStoppedProcessIsNamed) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) stop_process(SIGSTOP, seed);
}
TEST(ExchangeFault, AKilledProcessIsNamed) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) stop_process(SIGKILL, seed);
}
#endif

}  // namespace
}  // namespace switchyard::testing
