#include "network/chaos.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace switchyard::network {

class ChaosNetwork final : public Network {
 public:
  ChaosNetwork(std::shared_ptr<Chaos> chaos, int rank) : chaos_(std::move(chaos)), rank_(rank) {}
  ~ChaosNetwork() override { chaos_->detach(rank_); }

  void add(std::span<std::byte> memory) override {
    const std::lock_guard lock(chaos_->mutex_);
    chaos_->sites_[static_cast<std::size_t>(rank_)].regions = {memory};
  }
  Blob address() override { return Blob(1); }
  void connect(std::span<const Blob>) override {}

  bool put(int rank, std::uint64_t from, std::uint32_t bytes, std::uint64_t to,
           std::uint32_t immediate, std::uint64_t context) override {
    return chaos_->start({rank_, rank, from, to, bytes, immediate, context, true});
  }
  bool signal(int rank, std::uint32_t immediate) override {
    return chaos_->start({rank_, rank, 0, 0, 0, immediate, 0, false});
  }
  std::uint32_t add_rows(std::span<std::byte> memory, int) override {
    const std::lock_guard lock(chaos_->mutex_);
    auto& regions = chaos_->sites_[static_cast<std::size_t>(rank_)].regions;
    regions.push_back(memory);
    return static_cast<std::uint32_t>(regions.size() - 1);
  }
  void remove_rows(std::uint32_t region) override {
    const std::lock_guard lock(chaos_->mutex_);
    chaos_->sites_[static_cast<std::size_t>(rank_)].regions[region] = {};
  }
  RowsKey rows_key(std::uint32_t region) override { return {region, 0}; }
  bool takes_device_memory() const override { return chaos_->options_.takes_device_memory; }
  bool put_rows(int rank, std::uint32_t region, std::uint64_t from, std::uint32_t bytes,
                const RowsKey& key, std::uint64_t to, std::uint32_t immediate,
                std::uint64_t context) override {
    return chaos_->start({rank_, rank, from, to, bytes, immediate, context, true, region,
                          static_cast<std::uint32_t>(key.key)});
  }
  std::size_t poll(std::span<Event> events) override { return chaos_->poll(rank_, events); }
  int wait_fd() const override { return -1; }
  bool may_sleep() override { return true; }
  std::string name() const override { return "chaos"; }

 private:
  std::shared_ptr<Chaos> chaos_;
  int rank_;
};

Chaos::Chaos(int num_ranks, const ChaosOptions& options)
    : options_(options),
      random_(options.seed),
      sites_(static_cast<std::size_t>(num_ranks)),
      is_cut_(static_cast<std::size_t>(num_ranks * num_ranks)) {}

std::unique_ptr<Network> Chaos::attach(int rank) {
  return std::make_unique<ChaosNetwork>(shared_from_this(), rank);
}

bool Chaos::chance(double probability) {
  return std::uniform_real_distribution<>(0, 1)(random_) < probability;
}

Chaos::Time Chaos::later() {
  const auto longest = static_cast<int>(options_.longest_delay.count());
  return std::chrono::steady_clock::now() +
         std::chrono::microseconds(std::uniform_int_distribution<>(0, longest)(random_));
}

void Chaos::cut() {
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

bool Chaos::start(Flight flight) {
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

std::size_t Chaos::poll(int rank, std::span<Event> events) {
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

void Chaos::detach(int rank) {
  const std::lock_guard lock(mutex_);
  sites_[static_cast<std::size_t>(rank)] = {};
  std::erase_if(flights_, [&](const Flight& flight) { return flight.to == rank; });
}

}  // namespace switchyard::network
