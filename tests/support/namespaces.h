// Worlds over network namespaces as hosts: who makes them, how a rank joins, and what ranks tell
// the test.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/posix.h"
#include "fabric/namespaces.h"
#include "support/layers.h"
#include "support/ranks.h"
#include "switchyard/error.h"
#include "switchyard/world.h"

namespace switchyard::testing {

inline constexpr const char* kSecret = "a secret for tests only";
inline constexpr int kPort = 24'680;  // each test has namespaces of its own

// Moves the calling thread into a host.
inline void enter(const NetworkNamespaces& hosts, int host) {
  if (::setns(hosts.fd(host), CLONE_NEWNET) != 0) throw_errno("cannot enter a network namespace");
}

// Runs `ip` in a namespace.
inline void run_ip(int namespace_fd, const std::string& command) {
  const std::string line = "nsenter --net=/proc/" + std::to_string(::getpid()) + "/fd/" +
                           std::to_string(namespace_fd) + " ip " + command;
  ASSERT_EQ(std::system(line.c_str()), 0) << line;
}
// Takes the host's cable out, or puts it in again.
inline void set_connected(const NetworkNamespaces& hosts, int host, bool connected) {
  run_ip(hosts.bridge_fd(), "link set p" + std::to_string(host) + (connected ? " up" : " down"));
}
// From now on nothing that one host sends to the other arrives: frames go to an address that no
// card has.
inline void cut_path(const NetworkNamespaces& hosts, int from, int to) {
  run_ip(hosts.fd(from),
         "neigh replace " + hosts.ip(to) + " lladdr 02:00:00:00:00:01 dev eth0 nud permanent");
}

class HostsTest : public ::testing::Test {
 protected:
  void make_hosts(int num_hosts) {
    try {
      hosts_.emplace(num_hosts);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
      GTEST_SKIP() << error.what();
    }
    // Providers of real fabrics have nothing to do with namespaces.
    ::setenv("FI_PROVIDER", "tcp", 1);
    ::setenv("SWITCHYARD_SECRET", kSecret, 1);
    ::unsetenv("SWITCHYARD_SECRET_FILE");
  }

  // Runs `body` as each of `num_ranks` ranks, dealt evenly to `num_hosts` hosts. Without
  // namespaces, skips the test.
  void on_hosts(int num_hosts, int num_ranks, const std::function<void(int rank)>& body) {
    ASSERT_NO_FATAL_FAILURE(make_hosts(num_hosts));
    if (IsSkipped()) return;
    const std::vector<int> codes = test::run_processes(num_ranks, [&](int rank) {
      enter(*hosts_, rank * num_hosts / num_ranks);
      body(rank);
    });
    EXPECT_THAT(codes, ::testing::Each(0));
  }

  // Ranks meet on the cables between the hosts, or where a test says.
  virtual std::string root_ip() const { return hosts_->ip(0); }
  std::string rendezvous() const { return "tcp://" + root_ip() + ":" + std::to_string(kPort); }

  // This process, which runs on `host`, as a rank.
  World join(int rank, int size, test::milliseconds deadline = test::kGenerous,
             NetworkOptions network = {}) const {
    WorldOptions options = test::with_deadline(deadline, rendezvous());
    options.network = network;
    return World::processes(rank, size, options);
  }

  // Ranks in turn: the first `ranks_of_host` on host 0, and so on.
  void enter_host_of(int rank, int ranks_of_host) const { enter(*hosts_, rank / ranks_of_host); }

  std::optional<NetworkNamespaces> hosts_;
};

// `mine` has the rank's rows, and all others are as they were made.
inline void expect_same_rows(const Matrix& mine, const Matrix& expected, const Shares& shares,
                             int rank, int hidden) {
  const auto r = static_cast<std::size_t>(rank);
  std::int64_t wrong = 0;
  for (std::int64_t i = shares.first[r] * hidden; i < (shares.first[r] + shares.count[r]) * hidden;
       ++i) {
    wrong += mine.get(i) != expected.get(i);
  }
  EXPECT_EQ(wrong, 0) << "rank " << rank;
}

// Memory that a test shares with the ranks it forks.
struct Board {
  std::atomic<std::uint64_t> epochs[8];
  std::atomic<int> blamed[8];
  std::atomic<std::uint64_t> found[8];     // number_of() the failure
  std::atomic<std::int64_t> failed_at[8];  // ns
  char words[8][500];
};

// The same for ranks that report the same failure.
inline std::uint64_t number_of(const WaitFailure& failure) {
  return static_cast<std::uint64_t>(failure.waiter_rank) << 56 |
         static_cast<std::uint64_t>(failure.peer_rank) << 48 | failure.epoch;
}

inline std::int64_t now_ns() {
  return std::chrono::nanoseconds(test::Clock::now().time_since_epoch()).count();
}

}  // namespace switchyard::testing
