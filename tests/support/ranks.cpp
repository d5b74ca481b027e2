#include "support/ranks.h"

#include <fcntl.h>

namespace switchyard::test {

WorldOptions with_deadline(milliseconds deadline, std::string rendezvous) {
  WorldOptions options;
  options.deadline = deadline;
  options.rendezvous = std::move(rendezvous);
  return options;
}

bool eventually(const std::function<bool()>& condition, milliseconds limit) {
  const Clock::time_point start = Clock::now();
  while (!condition()) {
    if (since(start) > limit) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

bool holds_given_time(milliseconds sleep, const std::function<bool(milliseconds)>& holds) {
  return holds(sleep) || holds(10 * sleep) || holds(100 * sleep);
}

void run_threads(std::vector<World>& worlds, const std::function<void(World&)>& body) {
  Threads threads(0, static_cast<int>(worlds.size()), kThreadRemedy, [&](int rank) {
    try {
      body(worlds[static_cast<std::size_t>(rank)]);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << rank << " threw: " << error.what();
    }
  });
}

bool may_fork() {
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

std::vector<int> run_processes(int count, const std::function<void(int)>& body,
                               milliseconds limit) {
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

void expect_world(int ranks, const std::function<void(World&)>& body) {
  const std::string rendezvous = fresh_rendezvous();
  expect_processes(ranks, [&](int rank) {
    World world = join(rank, ranks, rendezvous);
    EXPECT_EQ(world.rank(), rank);
    EXPECT_EQ(world.size(), ranks);
    body(world);
  });
}

std::string error_of(ErrorCode code, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_STREQ(to_string(error.code()), to_string(code)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "expected an error: " << to_string(code);
  return "";
}

Blame blame_of(int peer, const std::function<void()>& call, const char* phase) {
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

std::vector<UniqueFd> hoard_fds(std::size_t spare) {
  std::vector<UniqueFd> hoard;
  for (;;) {
    UniqueFd fd(::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0));
    if (!fd) break;
    hoard.push_back(std::move(fd));
  }
  hoard.resize(hoard.size() - spare);
  return hoard;
}

void check_all_gather(World& world, std::size_t count) {
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

void check_symmetric_memory(World& world, std::size_t bytes) {
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
