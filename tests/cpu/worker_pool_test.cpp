// The threads of a rank: what becomes of a rank that cannot have them.
#include "cpu/worker_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/interrupt.h"
#include "support/layers.h"

namespace switchyard::cpu {
namespace {

TEST(WorkerPool, EveryThreadHasItsPartOfEveryRegion) {
  WorkerPool pool(4, [] {});
  std::atomic<int> sum{0};
  for (int i = 0; i < 100; ++i) pool.run([&](int thread) { sum += 1 << 8 * thread; });
  EXPECT_EQ(sum, 100 * 0x01010101);
}

// The caller's own part is over, and it waits for the other threads: then it asks, if its call
// does.
TEST(WorkerPool, TheCallerAsksWhileItWaitsForTheOthers) {
  static std::atomic<int> questions;
  questions = 0;
  WorkerPool pool(2, [] {});
  const auto wait_in_vain = [](int thread) {
    if (thread != 0) std::this_thread::sleep_for(4 * kInterruptInterval);
  };
  pool.run(wait_in_vain, [] { (void)interrupted(); });
  EXPECT_EQ(questions, 0);
  set_interrupt_check([] { return ++questions, 0; }, ::pthread_self());
  {
    const InterruptibleCall call;
    pool.run(wait_in_vain, [] { (void)interrupted(); });
  }
  set_interrupt_check(nullptr, ::pthread_self());
  EXPECT_GE(questions, 1);
}

// Runs `body` in a process of its own, whose address space has room for dozens more threads, but
// not for hundreds. False if it returns false or throws.
bool holds_in_little_memory(const std::function<bool()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlim_t limit = pages * static_cast<std::size_t>(::getpagesize()) + (1u << 30);
    const rlimit limits{limit, limit};
    bool holds = ::setrlimit(RLIMIT_AS, &limits) == 0;
    try {
      holds = holds && body();
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
      holds = false;
    }
    ::_exit(holds ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  return status == 0;
}

bool is_refusal(const std::function<void()>& call, const std::string& words) {
  try {
    call();
  } catch (const Error& error) {
    const bool says = std::string(error.what()).find(words) != std::string::npos;
    if (error.code() == ErrorCode::kSystem && says) return true;
    ADD_FAILURE() << to_string(error.code()) << ": " << error.what();
  }
  return false;
}

class FewThreads : public ::testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "a sanitizer maps more than the limit";
#endif
  }
};

TEST_F(FewThreads, APoolThatCannotHaveThemIsAnError) {
  EXPECT_TRUE(holds_in_little_memory(
      [] { return is_refusal([] { WorkerPool(512, [] {}); }, "of 512 threads"); }));
}

// None that exists may wait for one that does not.
TEST_F(FewThreads, NoneBeginsIfNotAllCan) {
  EXPECT_TRUE(holds_in_little_memory([] {
    std::atomic<int> begun{0};
    const auto start = [&] { Threads(0, 512, "use fewer", [&](int) { ++begun; }); };
    return is_refusal(start, "; use fewer") && begun == 0;
  }));
}

// One rank asks for more threads than there can be: all ranks say so, before any deadline.
TEST_F(FewThreads, ARankThatCannotHaveThemIsToldToAll) {
  EXPECT_TRUE(holds_in_little_memory([] {
    const LayerSpec spec = testing::spec_of(64, 32, 4, 2);
    const MoeWeights weights = generate_weights(spec, DType::kF32, 1, {.num_threads = 1});
    const auto start = std::chrono::steady_clock::now();
    const std::vector<World> worlds = World::threads(3, {.deadline = std::chrono::minutes(1)});
    const auto failures = testing::run_ranks(worlds, [&](const World& world) {
      MoeLayer(world, spec, weights,
               {.max_tokens = 8, .cpu = {.num_threads = world.rank() == 1 ? 512 : 1}});
    });
    for (const std::exception_ptr& failure : failures) {
      if (!failure) return false;
      if (!is_refusal([&] { std::rethrow_exception(failure); }, "rank 1: only ")) return false;
    }
    return std::chrono::steady_clock::now() - start < std::chrono::seconds(20);
  }));
}

}  // namespace
}  // namespace switchyard::cpu
