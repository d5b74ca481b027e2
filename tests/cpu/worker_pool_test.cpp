// The threads of a rank: what becomes of a rank that cannot have them.
#include "cpu/worker_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <string>

namespace switchyard::cpu {
namespace {

TEST(WorkerPool, EveryThreadHasItsPartOfEveryRegion) {
  WorkerPool pool(4, [] {});
  std::atomic<int> sum{0};
  for (int i = 0; i < 100; ++i) pool.run([&](int thread) { sum += 1 << 8 * thread; });
  EXPECT_EQ(sum, 100 * 0x01010101);
}

// In a process of its own, whose address space has no room for so many stacks.
TEST(WorkerPool, ThreadsThatCannotBeStartedAreAnError) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer maps more than the limit";
#endif
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlim_t limit = pages * static_cast<std::size_t>(::getpagesize()) + (256u << 20);
    const rlimit limits{limit, limit};
    if (::setrlimit(RLIMIT_AS, &limits) != 0) ::_exit(3);
    try {
      WorkerPool(512, [] {});
      ::_exit(2);
    } catch (const Error& error) {
      const bool says = std::string(error.what()).find("of 512 threads") != std::string::npos;
      ::_exit(error.code() == ErrorCode::kSystem && says ? 0 : 1);
    }
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace switchyard::cpu
