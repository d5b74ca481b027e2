// Ranks for tests: as threads, or as children of the test process.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <functional>
#include <iterator>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/threads.h"
#include "base/unique_fd.h"
#include "fabric/fabric.h"
#include "switchyard/error.h"
#include "switchyard/world.h"

namespace switchyard::test {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// For waits that should succeed; only a hang reaches it, however loaded the machine.
inline constexpr milliseconds kGenerous{60'000};
// For waits that should fail.
inline constexpr milliseconds kShort{300};
// How fast "at once" must be: far below kGenerous, far above any scheduling delay.
inline constexpr milliseconds kAtOnce{20'000};

inline milliseconds since(Clock::time_point start) {
  return std::chrono::duration_cast<milliseconds>(Clock::now() - start);
}

WorldOptions with_deadline(milliseconds deadline, std::string rendezvous = "");

// Unique to this process and call, so that concurrent test runs do not meet.
inline std::string fresh_rendezvous() {
  static int count = 0;
  return "test " + std::to_string(::getpid()) + "." + std::to_string(count++);
}

// Polls, because what is waited for has no descriptor; false after `limit`.
bool eventually(const std::function<bool()>& condition, milliseconds limit = kGenerous);

// For what one thread does while another sleeps: a busy machine may keep the first from its core
// for as long. Calls `holds` with `sleep`, then ten and a hundred times as much, until it is true.
bool holds_given_time(milliseconds sleep, const std::function<bool(milliseconds)>& holds);

void run_threads(std::vector<World>& worlds, const std::function<void(World&)>& body);

inline void run_threads(std::vector<World>&& worlds, const std::function<void(World&)>& body) {
  run_threads(worlds, body);
}

constexpr int kKilled = 128 + SIGKILL;

// True if this thread is the only one of its process. A child forked while another thread holds a
// lock, of the allocator for example, can never take that lock.
bool may_fork();

// Runs body(rank) in `count` forked children and returns their exit codes, 128 + signal for those
// that were killed. A child's failed expectation or escaped exception is a non-zero exit code.
std::vector<int> run_processes(int count, const std::function<void(int)>& body,
                               milliseconds limit = kGenerous);

// As run_processes; every process must end well.
inline void expect_processes(int count, const std::function<void(int)>& body,
                             milliseconds limit = kGenerous) {
  EXPECT_EQ(run_processes(count, body, limit), std::vector<int>(static_cast<std::size_t>(count)));
}

inline World join(int rank, int size, const std::string& rendezvous,
                  milliseconds deadline = kGenerous) {
  return World::processes(rank, size, with_deadline(deadline, rendezvous));
}

// Runs body(world) in `ranks` forked children, which are the ranks of a world.
void expect_world(int ranks, const std::function<void(World&)>& body);

// Expects `call` to throw Error with `code` and returns its message.
std::string error_of(ErrorCode code, const std::function<void()>& call);

// The contents of a TimeoutError.
struct Blame {
  ErrorCode code{};
  WaitFailure failure;
  std::string words;
};

// Expects `call` to throw TimeoutError that blames `peer`, in this phase if one is given.
Blame blame_of(int peer, const std::function<void()>& call, const char* phase = nullptr);

// All descriptors that this process may still open, except `spare`.
std::vector<UniqueFd> hoard_fds(std::size_t spare);

// Memory that a test shares with the children it forks.
template <typename T>
class SharedWithChildren {
 public:
  SharedWithChildren() {
    void* const page =
        ::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) throw std::bad_alloc();
    value_ = new (page) T{};
  }
  SharedWithChildren(const SharedWithChildren&) = delete;
  SharedWithChildren& operator=(const SharedWithChildren&) = delete;
  ~SharedWithChildren() { ::munmap(value_, sizeof(T)); }
  T* operator->() { return value_; }
  T& operator*() { return *value_; }

 private:
  T* value_;
};

// Holds whoever enters until it is opened.
class Gate {
 public:
  void wait() {
    std::unique_lock lock(mutex_);
    entered_ = true;
    opened_.wait(lock, [this] { return open_; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }
  bool entered() {
    const std::lock_guard lock(mutex_);
    return entered_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool entered_ = false, open_ = false;
};

// As error_of, for a TimeoutError at start-up that blames `peer`.
inline std::string timeout_of(ErrorCode code, int peer, const std::function<void()>& call) {
  const Blame blame = blame_of(peer, call, "bootstrap");
  EXPECT_STREQ(to_string(blame.code), to_string(code)) << blame.words;
  return blame.words;
}

// Every rank gives its own block of `count` numbers and checks everybody's.
void check_all_gather(World& world, std::size_t count);

// Every rank adds to the first word of every block, atomically, and checks the sum and the zeros.
void check_symmetric_memory(World& world, std::size_t bytes);

}  // namespace switchyard::test
