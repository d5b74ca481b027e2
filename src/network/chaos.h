// A network within one process, for tests, that does whatever a network may do: it copies late, in
// pieces, in any order, tells of it later still, and breaks down. All of it follows from a seed and
// from how the threads happen to run.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "network/network.h"

namespace switchyard::network {

struct ChaosOptions {
  std::uint64_t seed = 1;
  // The longest that a put, a signal or the news of it may take.
  std::chrono::microseconds longest_delay{300};
  double full_queue = 0.05;  // probability that put() or signal() is told to come again
  // The number of puts of all ranks after which the link between two ranks, of which `cut_rank` is
  // one, is lost; -1: never.
  std::int64_t cut_after = -1;
  // Takes memory of test devices, which is the host's.
  bool takes_device_memory = false;
  int cut_rank = 0;
};

class Chaos : public std::enable_shared_from_this<Chaos> {
 public:
  Chaos(int num_ranks, const ChaosOptions& options);
  // The network as `rank` has it: once for each.
  std::unique_ptr<Network> attach(int rank);

 private:
  friend class ChaosNetwork;
  using Time = std::chrono::steady_clock::time_point;

  struct Flight {
    int from = 0, to = 0;
    std::uint64_t source = 0, target = 0;  // offsets
    std::uint32_t bytes = 0, immediate = 0;
    std::uint64_t context = 0;
    bool has_context = false;
    std::uint32_t source_region = 0, target_region = 0;  // 0: that of add()
    Time due{};
  };
  struct News {
    Event event;
    Time due;
  };
  struct Site {
    std::vector<std::span<std::byte>> regions;
    std::vector<News> news;
  };

  std::size_t pair_of(int from, int to) const {
    return static_cast<std::size_t>(from) * sites_.size() + static_cast<std::size_t>(to);
  }
  std::span<std::byte> region_of(int rank, std::uint32_t region) const {
    const auto& regions = sites_[static_cast<std::size_t>(rank)].regions;
    return region < regions.size() ? regions[region] : std::span<std::byte>();
  }
  bool start(Flight flight);
  std::size_t poll(int rank, std::span<Event> events);
  void detach(int rank);
  void cut();
  Time later();
  bool chance(double probability);

  const ChaosOptions options_;
  std::mutex mutex_;
  std::mt19937_64 random_;
  std::vector<Site> sites_;
  std::vector<Flight> flights_;
  std::vector<bool> is_cut_;  // [from][to]
  std::int64_t puts_ = 0;
};

}  // namespace switchyard::network
