// Ranks that stop anywhere: a process by SIGSTOP or SIGKILL at any moment, a thread at any step or
// inside any wait. Every other rank must name the one that stopped, and so must that one if it goes
// on. Each trial is made from a seed, which a failure prints.
//
//   SWITCHYARD_STOP_TRIALS=1000   of each kind (default 60)
//   SWITCHYARD_STOP_SEED=7        another set of trials
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>

#include <atomic>
#include <condition_variable>
#include <mutex>

#include "fabric/launch.h"
#include "support/layers.h"
#include "support/numbers.h"
#include "support/ranks.h"

namespace switchyard::testing {
namespace {

using std::chrono::milliseconds;
using Kind = ProtocolStep::Kind;

// Far longer than a busy host, or a sanitizer, keeps a rank that is well from its next step.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr milliseconds kDeadline{3'000};
#else
constexpr milliseconds kDeadline{1'000};
#endif
// Most of a trial is waiting, so many share the cores.
constexpr std::uint64_t kAtOnce = 8;
// Exit codes of a rank's process: kNamed + the rank that it blamed.
constexpr int kNamed = 100;
constexpr int kNoTimeout = 90;

enum class Stop { kProcessAtAnyMoment, kProcessAtAStep, kKill, kThread };

struct Trial {
  Stop stop;
  int ranks, victim, slow;  // slow: a rank all of whose steps take long; -1: none
  int threads;              // of each rank
  Kind kind;                // of the step at which the victim stops
  int at;                   // after that many such steps, from the third epoch on
  std::chrono::microseconds moment, slowness;
  bool shared_expert;
  std::uint64_t seed;

  Trial(Stop how, std::uint64_t number) : stop(how), seed(number) {
    test::Numbers numbers(number);
    ranks = numbers.between(2, 8);
    victim = numbers.between(0, ranks - 1);
    slow = numbers.between(-1, ranks - 1);
    threads = numbers.between(1, 2);
    kind = static_cast<Kind>(numbers.between(0, static_cast<int>(Kind::kWait)));
    at = numbers.between(0, 20);
    moment = std::chrono::microseconds(numbers.between(0, 20'000));
    slowness = std::chrono::microseconds(numbers.between(20, 400));
    shared_expert = numbers.between(0, 1) == 1;
    if (kind == Kind::kWait) {  // there must be something to wait for
      slow = (victim + 1) % ranks;
      slowness += std::chrono::microseconds(200);
    }
  }

  LayerSpec spec() const {
    LayerSpec spec = spec_of(64, 32, 16, 4);
    if (shared_expert) spec.shared_intermediate = 32;
    return spec;
  }
};

std::ostream& operator<<(std::ostream& out, const Trial& t) {
  return out << "seed " << t.seed << ": rank " << t.victim << " of " << t.ranks
             << " stops, step kind " << static_cast<int>(t.kind) << " number " << t.at
             << ", moment " << t.moment.count() << " us; " << t.threads
             << " threads a rank, slow rank " << t.slow << " (" << t.slowness.count() << " us)";
}

// Passes until one fails; the rank that is blamed, or -1. `on_victims_step` stops the victim.
int play(const World& world, const Trial& trial, std::string& words,
         const std::function<void(std::uint64_t epoch)>& on_epoch,
         const std::function<void()>& on_victims_step) {
  const LayerSpec spec = trial.spec();
  const MoeWeights weights = generate_weights(spec, DType::kF32, 1, {.num_threads = 1});
  std::atomic<int> steps_left{trial.at};
  LayerOptions options{
      .max_tokens = 64, .cpu = {.num_threads = trial.threads}, .deadline = kDeadline};
  options.diagnostics.on_step = [&, rank = world.rank()](const ProtocolStep& step) {
    if (rank == trial.victim && step.epoch >= 3 && step.kind == trial.kind &&
        steps_left.fetch_sub(1) == 0) {
      on_victims_step();
    }
    if (rank == trial.slow && step.kind != Kind::kWait) {
      std::this_thread::sleep_for(trial.slowness);
    }
  };
  GatedTokens share(40, spec.hidden);
  try {
    MoeLayer layer(world, spec, weights, options);
    for (std::uint64_t epoch = 1;; ++epoch) {
      on_epoch(epoch);
      share.forward(layer);
    }
  } catch (const TimeoutError& error) {
    words = error.what();
    // Not that the world could not be made.
    return std::string(error.failure().phase) == "bootstrap" ? -1 : error.failure().peer_rank;
  }
}

// As processes. The parent stops the victim at some moment, or the victim stops itself.
void try_processes(const Trial& trial) {
  SCOPED_TRACE(::testing::Message() << trial);
  struct Shared {
    std::atomic<std::uint64_t> epochs[8];
    std::atomic<bool> stopping;
    char words[8][400];
  };
  test::SharedWithChildren<Shared> shared;
  const std::string rendezvous = test::fresh_rendezvous();
  std::vector<pid_t> pids;
  for (int rank = 0; rank < trial.ranks; ++rank) {
    const pid_t pid = ::fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      int code = kNoTimeout;
      try {
        std::string words;
        const World world =
            World::processes(rank, trial.ranks, test::with_deadline(test::kGenerous, rendezvous));
        const int blamed = play(
            world, trial, words, [&](std::uint64_t epoch) { shared->epochs[rank] = epoch; },
            [&] {
              if (trial.stop == Stop::kProcessAtAnyMoment) return;
              shared->stopping = true;
              ::raise(trial.stop == Stop::kKill ? SIGKILL : SIGSTOP);
            });
        std::snprintf(shared->words[rank], sizeof shared->words[rank], "%s", words.c_str());
        code = kNamed + blamed;
      } catch (const std::exception& error) {
        std::snprintf(shared->words[rank], sizeof shared->words[rank], "%s", error.what());
      }
      ::_exit(code);
    }
    pids.push_back(pid);
  }
  const pid_t victim = pids[static_cast<std::size_t>(trial.victim)];
  if (trial.stop == Stop::kProcessAtAnyMoment) {
    EXPECT_TRUE(test::eventually([&] {
      return std::all_of(shared->epochs, shared->epochs + trial.ranks,
                         [](const auto& epoch) { return epoch >= 3; });
    }));
    std::this_thread::sleep_for(trial.moment);
    ::kill(victim, SIGSTOP);
  } else {
    EXPECT_TRUE(test::eventually([&] { return shared->stopping.load(); }));
  }
  const auto expect_name = [&](int rank) {
    int status = 0;
    const pid_t pid = pids[static_cast<std::size_t>(rank)];
    if (!test::eventually([&] { return ::waitpid(pid, &status, WNOHANG) == pid; },
                          milliseconds(30'000))) {
      ADD_FAILURE() << "rank " << rank << " hangs";
      ::kill(pid, SIGKILL);
      ::waitpid(pid, &status, 0);
      return;
    }
    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), kNamed + trial.victim)
        << "rank " << rank << ": " << shared->words[rank];
  };
  for (int rank = 0; rank < trial.ranks; ++rank) {
    if (rank == trial.victim) continue;
    expect_name(rank);
    EXPECT_THAT(shared->words[rank],
                ::testing::HasSubstr(trial.stop == Stop::kKill ? "has exited" : "is stopped"));
  }
  if (trial.stop == Stop::kKill) {
    ::waitpid(victim, nullptr, 0);
  } else {
    ::kill(victim, SIGCONT);
    expect_name(trial.victim);
  }
}

// As threads of this process. The victim is held until all others have failed.
void try_threads(const Trial& trial) {
  SCOPED_TRACE(::testing::Message() << trial);
  std::mutex mutex;
  std::condition_variable changed;
  int others_done = 0;
  std::vector<int> blamed(static_cast<std::size_t>(trial.ranks), -1);
  std::vector<std::string> words(blamed.size());
  run_all_ranks(World::threads(trial.ranks, test::with_deadline(test::kGenerous)),
                [&](const World& world) {
                  const auto rank = static_cast<std::size_t>(world.rank());
                  blamed[rank] = play(
                      world, trial, words[rank], [](std::uint64_t) {},
                      [&] {
                        std::unique_lock lock(mutex);
                        changed.wait(lock, [&] { return others_done == trial.ranks - 1; });
                      });
                  const std::lock_guard lock(mutex);
                  if (world.rank() != trial.victim) ++others_done;
                  changed.notify_all();
                });
  for (std::size_t rank = 0; rank < blamed.size(); ++rank) {
    EXPECT_EQ(blamed[rank], trial.victim) << "rank " << rank << ": " << words[rank];
  }
}

class Stops : public ::testing::TestWithParam<Stop> {};

TEST_P(Stops, EveryRankNamesTheOneThatStopped) {
  const std::uint64_t trials = test::number_from("SWITCHYARD_STOP_TRIALS", 60);
  const std::uint64_t seed = test::number_from("SWITCHYARD_STOP_SEED", 1);
  RecordProperty("seed", std::to_string(seed));
  test::expect_processes(
      static_cast<int>(std::min(kAtOnce, trials)),
      [&](int worker) {
        for (auto i = static_cast<std::uint64_t>(worker); i < trials; i += kAtOnce) {
          const Trial trial(GetParam(), seed * 1'000'000 + i);
          GetParam() == Stop::kThread ? try_threads(trial) : try_processes(trial);
        }
      },
      std::chrono::minutes(9));
}

// A rank of the tests below, as a program of its own.
TEST(LaunchedRank, DISABLED_StopsOrNamesTheOneThatStops) {
  const Trial trial(test::number_from("TRIAL_STOP", 0) == 0 ? Stop::kProcessAtAStep : Stop::kKill,
                    test::number_from("TRIAL_SEED", 0));
  const World world = World::from_environment({.deadline = kDeadline});
  std::string words;
  const int blamed = play(
      world, trial, words, [](std::uint64_t) {},
      [&] { ::raise(trial.stop == Stop::kKill ? SIGKILL : SIGSTOP); });
  std::printf("told %d\n", blamed);
  std::fflush(stdout);
  ::_exit(4);
}

class Launched : public ::testing::TestWithParam<Stop> {};

TEST_P(Launched, TheLastLineNamesTheCulpritAndSurvivorsReport) {
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    const Trial trial(GetParam(), seed);
    SCOPED_TRACE(::testing::Message() << trial);
    LaunchOptions options{.num_ranks = trial.ranks};
    options.command = {"/proc/self/exe", "--gtest_also_run_disabled_tests",
                       "--gtest_filter=LaunchedRank.*"};
    options.environment = {{"TRIAL_SEED", std::to_string(seed)},
                           {"TRIAL_STOP", GetParam() == Stop::kKill ? "1" : "0"}};
    options.label_output = true;
    // Too short for survivors that wait for their deadlines, were these not known.
    options.grace = kDeadline / 2;
    ::testing::internal::CaptureStderr();
    ::testing::internal::CaptureStdout();
    const int code = launch(options);
    const std::string lines = ::testing::internal::GetCapturedStdout();
    const std::string errors = ::testing::internal::GetCapturedStderr();
    const std::string victim = "rank " + std::to_string(trial.victim) + " (process ";
    EXPECT_THAT(errors, ::testing::HasSubstr("switchyard launch: " + victim));
    if (GetParam() == Stop::kKill) {
      EXPECT_EQ(code, test::kKilled);
      EXPECT_THAT(errors, ::testing::HasSubstr("failed first: killed by signal 9"));
    } else {
      EXPECT_EQ(code, 4);
      EXPECT_THAT(errors, ::testing::HasSubstr("is stopped by signal 19"));
    }
    for (int rank = 0; rank < trial.ranks; ++rank) {
      if (rank == trial.victim) continue;
      EXPECT_THAT(lines, ::testing::HasSubstr("[rank " + std::to_string(rank) + "] told " +
                                              std::to_string(trial.victim)));
    }
  }
}

std::string stop_name(const ::testing::TestParamInfo<Stop>& stop) {
  constexpr const char* kNames[] = {"ProcessAtAnyMoment", "ProcessAtAStep", "Kill", "Thread"};
  return kNames[static_cast<int>(stop.param)];
}

INSTANTIATE_TEST_SUITE_P(Anywhere, Stops,
                         ::testing::Values(Stop::kProcessAtAnyMoment, Stop::kProcessAtAStep,
                                           Stop::kKill, Stop::kThread),
                         stop_name);
INSTANTIATE_TEST_SUITE_P(Processes, Launched, ::testing::Values(Stop::kProcessAtAStep, Stop::kKill),
                         stop_name);

}  // namespace
}  // namespace switchyard::testing
