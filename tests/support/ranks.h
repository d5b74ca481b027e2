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

inline WorldOptions with_deadline(milliseconds deadline, std::string rendezvous = "") {
  WorldOptions options;
  options.deadline = deadline;
  options.rendezvous = std::move(rendezvous);
  return options;
}

// Unique to this process and call, so that concurrent test runs do not meet.
inline std::string fresh_rendezvous() {
  static int count = 0;
  return "test " + std::to_string(::getpid()) + "." + std::to_string(count++);
}

// Polls, because what is waited for has no descriptor; false after `limit`.
inline bool eventually(const std::function<bool()>& condition, milliseconds limit = kGenerous) {
  const Clock::time_point start = Clock::now();
  while (!condition()) {
    if (since(start) > limit) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

inline void run_threads(std::vector<World>& worlds, const std::function<void(World&)>& body) {
  Threads threads(0, static_cast<int>(worlds.size()), kThreadRemedy, [&](int rank) {
    try {
      body(worlds[static_cast<std::size_t>(rank)]);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << rank << " threw: " << error.what();
    }
  });
}

inline void run_threads(std::vector<World>&& worlds, const std::function<void(World&)>& body) {
  run_threads(worlds, body);
}

constexpr int kKilled = 128 + SIGKILL;

// True if this thread is the only one of its process. A child forked while another thread holds a
// lock, of the allocator for example, can never take that lock.
inline bool may_fork() {
#if defined(__SANITIZE_THREAD__)
  return true;  // the sanitizer has a thread of its own, and takes care of its locks
#else
  // A thread that was joined may still be listed for a moment.
  return eventually([] {
    namespace fs = std::filesystem;
    return std::distance(fs::directory_iterator("/proc/self/task"), fs::directory_iterator()) == 1;
  });
#endif
}

// Runs body(rank) in `count` forked children and returns their exit codes, 128 + signal for those
// that were killed. A child's failed expectation or escaped exception is a non-zero exit code.
inline std::vector<int> run_processes(int count, const std::function<void(int)>& body,
                                      milliseconds limit = kGenerous) {
  EXPECT_TRUE(may_fork()) << "start threads after the processes, or in one of them";
  std::fflush(nullptr);
  const pid_t parent = ::getpid();
  std::vector<pid_t> children;
  for (int rank = 0; rank < count; ++rank) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(1);
      try {
        body(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << " threw: " << error.what();
      }
      std::fflush(nullptr);
      ::_exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    children.push_back(pid);
  }
  std::vector<int> codes(children.size(), -1);
  for (std::size_t i = 0; i < children.size(); ++i) {
    int status = 0;
    if (!eventually([&] { return ::waitpid(children[i], &status, WNOHANG) == children[i]; },
                    limit)) {
      ADD_FAILURE() << "rank " << i << " hangs; killing it";
      ::kill(children[i], SIGKILL);
      ::waitpid(children[i], &status, 0);
    }
    codes[i] = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  return codes;
}

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
inline void expect_world(int ranks, const std::function<void(World&)>& body) {
  const std::string rendezvous = fresh_rendezvous();
  expect_processes(ranks, [&](int rank) {
    World world = join(rank, ranks, rendezvous);
    EXPECT_EQ(world.rank(), rank);
    EXPECT_EQ(world.size(), ranks);
    body(world);
  });
}

// Expects `call` to throw Error with `code` and returns its message.
inline std::string error_of(ErrorCode code, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_STREQ(to_string(error.code()), to_string(code)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "expected an error: " << to_string(code);
  return "";
}

// The contents of a TimeoutError.
struct Blame {
  ErrorCode code{};
  WaitFailure failure;
  std::string words;
};

// Expects `call` to throw TimeoutError that blames `peer`, in this phase if one is given.
inline Blame blame_of(int peer, const std::function<void()>& call, const char* phase = nullptr) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const TimeoutError& error) {
    EXPECT_EQ(error.failure().peer_rank, peer) << error.what();
    if (phase != nullptr) {
      EXPECT_STREQ(error.failure().phase, phase) << error.what();
    }
    return {error.code(), error.failure(), error.what()};
  } catch (const Error& error) {
    ADD_FAILURE() << "not a TimeoutError: " << error.what();
  }
  return {};
}

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
inline void check_all_gather(World& world, std::size_t count) {
  const auto number = [&](int rank, std::size_t i) {
    return static_cast<std::uint64_t>(rank) << 32 | (i * 2654435761U & 0xffff'ffffU);
  };
  std::vector<std::uint64_t> mine(count);
  std::vector<std::uint64_t> all(count * static_cast<std::size_t>(world.size()));
  for (std::size_t i = 0; i < count; ++i) mine[i] = number(world.rank(), i);
  world.fabric().all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  std::size_t num_wrong = 0;
  for (int rank = 0; rank < world.size(); ++rank) {
    for (std::size_t i = 0; i < count; ++i) {
      num_wrong += all[static_cast<std::size_t>(rank) * count + i] != number(rank, i);
    }
  }
  EXPECT_EQ(num_wrong, 0U) << "rank " << world.rank() << ", " << count << " numbers each";
}

// Every rank adds to the first word of every block, atomically, and checks the sum and the zeros.
inline void check_symmetric_memory(World& world, std::size_t bytes) {
  const auto segment = world.fabric().allocate(bytes);
  EXPECT_EQ(segment->bytes(), bytes);
  const auto word = [&](int rank, std::size_t i) {
    return std::atomic_ref(reinterpret_cast<std::uint64_t*>(segment->base(rank))[i]);
  };
  const std::size_t last = bytes / sizeof(std::uint64_t) - 1;
  for (int rank = 0; rank < world.size(); ++rank) {
    EXPECT_EQ(word(rank, last / 2).load(), 0U);
    EXPECT_EQ(word(rank, last).load(), 0U);
  }
  world.barrier();
  std::uint64_t expected = 0;
  for (int rank = 0; rank < world.size(); ++rank) {
    word(rank, 0).fetch_add(std::uint64_t{1} << world.rank());
    word(rank, last).fetch_add(1);
    expected |= std::uint64_t{1} << rank;
  }
  EXPECT_TRUE(eventually([&] { return word(world.rank(), 0).load() == expected; }));
  world.barrier();
  for (int rank = 0; rank < world.size(); ++rank) {
    EXPECT_EQ(word(rank, 0).load(), expected);
    EXPECT_EQ(word(rank, last).load(), static_cast<std::uint64_t>(world.size()));
  }
}

}  // namespace switchyard::test
