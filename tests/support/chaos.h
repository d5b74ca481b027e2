// A network within one process, for tests, that does whatever a network may do: it copies late, in
// pieces, in any order, tells of it later still, and breaks down. All of it follows from a seed and
// from how the threads happen to run.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <utility>
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

class ChaosNetwork final : public Network {
 public:
  ChaosNetwork(std::shared_ptr<Chaos> chaos, int rank) : chaos_(std::move(chaos)), rank_(rank) {}
  ~ChaosNetwork() override { chaos_->detach(rank_); }

  std::uint32_t add(std::span<std::byte> memory, int) override {
    const std::lock_guard lock(chaos_->mutex_);
    auto& regions = chaos_->sites_[static_cast<std::size_t>(rank_)].regions;
    regions.push_back(memory);
    return static_cast<std::uint32_t>(regions.size() - 1);
  }
  void remove(std::uint32_t region) override {
    const std::lock_guard lock(chaos_->mutex_);
    chaos_->sites_[static_cast<std::size_t>(rank_)].regions[region] = {};
  }
  RegionKey key(std::uint32_t region) override { return {region, 0}; }
  bool takes_device_memory() const override { return chaos_->options_.takes_device_memory; }
  Blob address() override { return Blob(1); }
  void connect(std::span<const Blob>) override {}

  bool put(const Put& put) override {
    const RegionKey to = put.key.value_or(RegionKey());
    return chaos_->start({rank_, put.rank, put.from, put.to, put.bytes, put.immediate, put.context,
                          true, put.region, static_cast<std::uint32_t>(to.key)});
  }
  bool signal(int rank, std::uint32_t immediate) override {
    return chaos_->start({rank_, rank, 0, 0, 0, immediate, 0, false});
  }
  std::size_t poll(std::span<Event> events) override { return chaos_->poll(rank_, events); }
  int wait_fd() const override { return -1; }
  bool may_sleep() override { return true; }
  std::string name() const override { return "chaos"; }

 private:
  std::shared_ptr<Chaos> chaos_;
  int rank_;
};

inline Chaos::Chaos(int num_ranks, const ChaosOptions& options)
    : options_(options),
      random_(options.seed),
      sites_(static_cast<std::size_t>(num_ranks)),
      is_cut_(static_cast<std::size_t>(num_ranks * num_ranks)) {}

inline std::unique_ptr<Network> Chaos::attach(int rank) {
  return std::make_unique<ChaosNetwork>(shared_from_this(), rank);
}

inline bool Chaos::chance(double probability) {
  return std::uniform_real_distribution<>(0, 1)(random_) < probability;
}

inline Chaos::Time Chaos::later() {
  const auto longest = static_cast<int>(options_.longest_delay.count());
  return std::chrono::steady_clock::now() +
         std::chrono::microseconds(std::uniform_int_distribution<>(0, longest)(random_));
}

inline void Chaos::cut() {
  const int num_ranks = static_cast<int>(sites_.size());
  const int one = options_.cut_rank;
  const int other =
      (one + 1 + std::uniform_int_distribution<>(0, num_ranks - 2)(random_)) % num_ranks;
  for (const auto& [from, to] : {std::pair(one, other), std::pair(other, one)}) {
    is_cut_[pair_of(from, to)] = true;
    Event event;
    event.kind = Event::Kind::kLost;
    event.rank = to;
    event.why = "the link was cut";
    sites_[static_cast<std::size_t>(from)].news.push_back({event, later()});
  }
  std::erase_if(flights_,
                [&](const Flight& flight) { return is_cut_[pair_of(flight.from, flight.to)]; });
}

inline bool Chaos::start(Flight flight) {
  const std::lock_guard lock(mutex_);
  if (chance(options_.full_queue)) return false;
  if (flight.has_context && puts_++ == options_.cut_after) cut();
  if (is_cut_[pair_of(flight.from, flight.to)]) return true;
  const std::span<std::byte> target = region_of(flight.to, flight.target_region);
  // From now on the target may hold anything: a receiver that still reads it has given a credit too
  // early.
  if (!target.empty()) std::memset(target.data() + flight.target, 0xee, flight.bytes);
  flight.due = later();
  flights_.push_back(flight);
  return true;
}

inline std::size_t Chaos::poll(int rank, std::span<Event> events) {
  const std::lock_guard lock(mutex_);
  const Time now = std::chrono::steady_clock::now();
  Site& mine = sites_[static_cast<std::size_t>(rank)];
  std::size_t count = 0;
  const auto landed = [&](const Flight& flight) {
    if (flight.to != rank || flight.due > now) return false;
    const std::span<std::byte> source = region_of(flight.from, flight.source_region);
    const std::span<std::byte> target = region_of(flight.to, flight.target_region);
    if (source.empty() || target.empty()) return true;  // its rank has left
    // The source is read only now: a rank that writes it before kSent sends something else.
    if (flight.bytes > 0) {
      std::memcpy(target.data() + flight.target, source.data() + flight.source, flight.bytes);
    }
    Event arrived;
    arrived.kind = Event::Kind::kArrived;
    arrived.immediate = flight.immediate;
    mine.news.push_back({arrived, later()});
    if (flight.has_context) {
      Event sent;
      sent.kind = Event::Kind::kSent;
      sent.context = flight.context;
      sites_[static_cast<std::size_t>(flight.from)].news.push_back({sent, later()});
    }
    return true;
  };
  std::shuffle(flights_.begin(), flights_.end(), random_);
  std::erase_if(flights_, landed);
  std::shuffle(mine.news.begin(), mine.news.end(), random_);
  std::erase_if(mine.news, [&](News& news) {
    if (count == events.size() || news.due > now) return false;
    events[count++] = std::move(news.event);
    return true;
  });
  return count;
}

inline void Chaos::detach(int rank) {
  const std::lock_guard lock(mutex_);
  sites_[static_cast<std::size_t>(rank)] = {};
  std::erase_if(flights_, [&](const Flight& flight) { return flight.to == rank; });
}

}  // namespace switchyard::network
