// World::abort(): who waits, in a pass or in a collective call, is told at once. Letting go of
// layers and worlds waits for nobody.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <thread>

#include "support/layers.h"
#include "support/ranks.h"

namespace switchyard::testing {
namespace {

using test::Clock;
using test::kAtOnce;
using test::kGenerous;

constexpr int kTokens = 40;

struct Share : GatedTokens {
  Share() : GatedTokens(kTokens, 64) {}
  LayerSpec spec = spec_of(64, 32, 16, 4);
  MoeWeights weights = generate_weights(spec, DType::kF32, 1, {.num_threads = 1});

  MoeLayer layer(const World& world, int threads = 1) const {
    const LayerOptions options{.max_tokens = kTokens, .cpu = {.num_threads = threads}};
    return {world, spec, weights, options};
  }
};

void expect_aborted_by(int rank, const std::function<void()>& call) {
  const test::Blame blame = test::blame_of(rank, call, "abort");
  EXPECT_EQ(blame.code, ErrorCode::kAborted) << blame.words;
  EXPECT_THAT(blame.words, ::testing::HasSubstr("World::abort()"));
}

// One rank comes to the third pass, and aborts instead of making it.
void abort_in_place_of_a_pass(const World& world, int quitter) {
  Share share;
  MoeLayer layer = share.layer(world);
  MoeLayer other = share.layer(world);
  share.forward(layer);
  share.forward(layer);
  const Clock::time_point start = Clock::now();
  if (world.rank() == quitter) {
    std::this_thread::sleep_for(test::milliseconds(50));
    world.abort();
    world.abort();
  }
  expect_aborted_by(quitter, [&] { share.forward(layer); });
  expect_aborted_by(quitter, [&] { share.forward(layer); });
  expect_aborted_by(quitter, [&] { layer.check(); });
  expect_aborted_by(quitter, [&] { share.forward(other); });
  EXPECT_LT(test::since(start), kAtOnce);
}

TEST(Abort, WakesThreadsOutOfAPass) {
  for (const int quitter : {0, 2}) {
    test::run_threads(World::threads(4, test::with_deadline(kGenerous)), [&](World& world) {
      abort_in_place_of_a_pass(world, quitter);
      expect_aborted_by(quitter, [&] { world.barrier(); });
    });
  }
}

TEST(Abort, WakesProcessesOutOfAPass) {
  for (const int quitter : {0, 1}) {
    const std::string rendezvous = test::fresh_rendezvous();
    EXPECT_THAT(test::run_processes(3,
                                    [&](int rank) {
                                      const World world = World::processes(
                                          rank, 3, test::with_deadline(kGenerous, rendezvous));
                                      abort_in_place_of_a_pass(world, quitter);
                                    }),
                ::testing::Each(0));
  }
}

// The thread that waits and the one that aborts are of one rank.
TEST(Abort, WakesItsOwnRank) {
  test::run_threads(World::threads(2, test::with_deadline(kGenerous)), [](World& world) {
    Share share;
    MoeLayer layer = share.layer(world, 2);
    share.forward(layer);
    std::optional<std::thread> thread;
    if (world.rank() == 0) {
      thread.emplace([&] {
        std::this_thread::sleep_for(test::milliseconds(50));
        world.abort();
      });
      expect_aborted_by(0, [&] { share.forward(layer); });
      thread->join();
    } else {
      std::this_thread::sleep_for(test::milliseconds(200));  // rank 0 waits for it meanwhile
    }
    expect_aborted_by(0, [&] { share.forward(layer); });
  });
}

TEST(Abort, EndsCollectiveCallsOfThreads) {
  std::vector<World> worlds = World::threads(3, test::with_deadline(kGenerous));
  const Clock::time_point start = Clock::now();
  test::run_threads(worlds, [](World& world) {
    world.barrier();
    if (world.rank() == 1) {
      std::this_thread::sleep_for(test::milliseconds(50));
      world.abort();
    }
    expect_aborted_by(1, [&] { world.barrier(); });
    expect_aborted_by(1, [&] { world.barrier(); });
    expect_aborted_by(1, [&] { Share().layer(world); });
  });
  EXPECT_LT(test::since(start), kAtOnce);
}

// Others see the connection end.
TEST(Abort, EndsCollectiveCallsOfProcesses) {
  for (const int quitter : {0, 1}) {
    const std::string rendezvous = test::fresh_rendezvous();
    EXPECT_THAT(test::run_processes(
                    3,
                    [&](int rank) {
                      World world =
                          World::processes(rank, 3, test::with_deadline(kGenerous, rendezvous));
                      world.barrier();
                      const Clock::time_point start = Clock::now();
                      std::optional<std::thread> thread;
                      if (rank == quitter) {
                        thread.emplace([&] {
                          std::this_thread::sleep_for(test::milliseconds(50));
                          world.abort();
                        });
                        expect_aborted_by(quitter, [&] {
                          for (;;) world.barrier();
                        });
                        thread->join();
                      } else {
                        const std::string message = test::error_of(ErrorCode::kAborted, [&] {
                          for (;;) world.barrier();
                        });
                        EXPECT_THAT(message, ::testing::HasSubstr("aborted its World"));
                      }
                      EXPECT_LT(test::since(start), kAtOnce);
                    }),
                ::testing::Each(0));
  }
}

TEST(Abort, OfAWorldOfOne) {
  World world = World::single(test::with_deadline(kGenerous));
  Share share;
  MoeLayer layer = share.layer(world);
  share.forward(layer);
  world.abort();
  expect_aborted_by(0, [&] { share.forward(layer); });
  expect_aborted_by(0, [&] { world.barrier(); });
}

TEST(Destruction, WaitsForNobody) {
  test::run_threads(World::threads(2, test::with_deadline(kGenerous)), [&](World& world) {
    Share share;
    std::optional<MoeLayer> layer(share.layer(world));
    share.forward(*layer);
    if (world.rank() == 0) return;  // lets go of its layer while the other waits in a pass
    std::thread thread([&] {
      std::this_thread::sleep_for(test::milliseconds(50));
      world.abort();
    });
    expect_aborted_by(1, [&] { share.forward(*layer); });
    thread.join();
    const Clock::time_point start = Clock::now();
    layer.reset();
    world = World::single();
    EXPECT_LT(test::since(start), kAtOnce);
  });
  const std::string rendezvous = test::fresh_rendezvous();
  EXPECT_THAT(test::run_processes(2,
                                  [&](int rank) {
                                    const Clock::time_point start = Clock::now();
                                    {
                                      const World world = World::processes(
                                          rank, 2, test::with_deadline(kGenerous, rendezvous));
                                      const Share share;
                                      MoeLayer layer = share.layer(world);
                                      if (rank == 1) {
                                        std::this_thread::sleep_for(test::milliseconds(200));
                                      }
                                    }
                                    EXPECT_LT(test::since(start), kAtOnce);
                                  }),
              ::testing::Each(0));
}

}  // namespace
}  // namespace switchyard::testing
