// Worlds over hosts for tests: hosts as groups of threads with a chaotic network between them, or
// as network namespaces.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/posix.h"
#include "fabric/hosts_fabric.h"
#include "support/chaos.h"
#include "support/numbers.h"
#include "support/ranks.h"

namespace switchyard::test {

// {2, 1} is ranks 0 and 1 on host 0, and rank 2 on host 1; or, dealt out in turn, ranks 0 and 2 on
// host 0.
inline std::vector<int> hosts_by_rank(std::vector<int> ranks_of_hosts, bool in_turn = false) {
  std::vector<int> hosts;
  for (bool any = in_turn; any;) {
    any = false;
    for (std::size_t h = 0; h < ranks_of_hosts.size(); ++h) {
      if (ranks_of_hosts[h]-- <= 0) continue;
      hosts.push_back(static_cast<int>(h));
      any = true;
    }
  }
  if (in_turn) return hosts;
  for (std::size_t h = 0; h < ranks_of_hosts.size(); ++h) {
    hosts.insert(hosts.end(), static_cast<std::size_t>(ranks_of_hosts[h]), static_cast<int>(h));
  }
  return hosts;
}

struct ChaosHosts {
  std::vector<int> ranks_of_hosts;
  bool in_turn = false;  // see hosts_by_rank()
  network::ChaosOptions chaos;
  network::WindowOptions windows{4 << 10, 2};
  milliseconds deadline = kGenerous;
  // Long, because threads of many ranks share few cores: who decides is no question of time here.
  milliseconds verdict_time = kGenerous;
};

// A network whose delays, refusals and windows follow from the seed.
inline void draw_network(ChaosHosts& hosts, Numbers& numbers, std::uint64_t seed) {
  hosts.chaos.seed = seed;
  hosts.chaos.longest_delay = std::chrono::microseconds(numbers.between(0, 400));
  hosts.chaos.full_queue = numbers.between(0, 3) * 0.1;
  hosts.windows.window = static_cast<std::uint32_t>(numbers.between(1, 3));
  hosts.windows.chunk_bytes = static_cast<std::uint32_t>(numbers.between(32, 80) * 64);
}

// Plays body(world) as every rank, each on a thread, and returns what each threw.
inline std::vector<std::exception_ptr> run_over_chaos(
    const ChaosHosts& how, const std::function<void(const World&)>& body) {
  const std::vector<int> host_of = hosts_by_rank(how.ranks_of_hosts, how.in_turn);
  const network::Hosts hosts(host_of);
  const int size = hosts.num_ranks();
  const auto fabric_of = [](World world) {
    const auto owner = std::make_shared<World>(std::move(world));
    return std::shared_ptr<Fabric>(owner, &owner->fabric());
  };
  std::vector<std::shared_ptr<Fabric>> all, host_fabrics(static_cast<std::size_t>(size));
  for (World& world : World::threads(size, with_deadline(how.deadline))) {
    all.push_back(fabric_of(std::move(world)));
  }
  for (int h = 0; h < hosts.num_hosts(); ++h) {
    const std::vector<int>& ranks = hosts.ranks_of(h);
    std::vector<World> worlds =
        World::threads(static_cast<int>(ranks.size()), with_deadline(how.deadline));
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      host_fabrics[static_cast<std::size_t>(ranks[i])] = fabric_of(std::move(worlds[i]));
    }
  }
  const auto chaos = std::make_shared<network::Chaos>(size, how.chaos);
  std::vector<HostsParts> parts(static_cast<std::size_t>(size));
  for (int a = 0; a < size; ++a) {
    HostsParts& mine = parts[static_cast<std::size_t>(a)];
    mine.world = std::move(all[static_cast<std::size_t>(a)]);
    mine.host = std::move(host_fabrics[static_cast<std::size_t>(a)]);
    mine.hosts = hosts;
    mine.options.windows = how.windows;
    mine.options.deadline = how.deadline;
    mine.options.verdict_time = how.verdict_time;
    mine.network = chaos->attach(a);
    mine.channels.resize(static_cast<std::size_t>(size));
    for (const int host : host_of) mine.where.push_back("host " + std::to_string(host));
  }
  for (int a = 0; a < size; ++a) {
    for (int b = a + 1; b < size; ++b) {
      if (hosts.same_host(a, b)) continue;
      int ends[2];
      EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
      const auto i = static_cast<std::size_t>(a), j = static_cast<std::size_t>(b);
      parts[i].channels[j] = network::ControlChannel(UniqueFd(ends[0]), size);
      parts[j].channels[i] = network::ControlChannel(UniqueFd(ends[1]), size);
    }
  }
  std::vector<std::exception_ptr> thrown(parts.size());
  Threads threads(0, size, kThreadRemedy, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    try {
      const World world(make_hosts_fabric(std::move(parts[r])));
      body(world);
    } catch (...) {
      thrown[r] = std::current_exception();
    }
  });
  threads.join();
  return thrown;
}

inline void expect_nothing_thrown(const std::vector<std::exception_ptr>& thrown) {
  for (const std::exception_ptr& failure : thrown) {
    try {
      if (failure) std::rethrow_exception(failure);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }
}

}  // namespace switchyard::test
