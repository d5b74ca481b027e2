// One rank's link to the others, for both engines of the CPU: all ranks' heaps, this rank's
// threads, how they wait and how they end the world, and how they write to another rank.
//
// A rank of this host is written to by stores into its heap. To a rank of another host this one
// sends records (network/records.h), which that host's proxies store. Only this file knows which of
// both it is.
#pragma once

#include <array>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/interrupt.h"
#include "cpu/pace.h"
#include "cpu/thread_trace.h"
#include "cpu/worker_pool.h"
#include "fabric/fabric.h"
#include "network/proxy.h"
#include "network/records.h"
#include "protocol/atomics.h"
#include "protocol/host_sums.h"
#include "protocol/wait.h"
#include "switchyard/trace.h"
#include "switchyard/world.h"

namespace switchyard::cpu {

// The hosts of a world's ranks; null in a world of one host.
inline const network::Hosts* hosts_of(const World& world) {
  const network::Proxy* const proxy = world.fabric().proxy();
  return proxy == nullptr ? nullptr : &proxy->hosts();
}

// Any thread of the rank may wait, send and end the world.
class RankLink {
 public:
  // `what` uses the heaps: a "layer" or an "exchange". From here on World::abort() ends its calls.
  // `sums`: see below.
  RankLink(const World& world, std::shared_ptr<const SymmetricSegment> segment,
           const protocol::ExpertPartition& experts, const protocol::HostSums& sums,
           std::chrono::nanoseconds deadline, const char* what);
  RankLink(const RankLink&) = delete;
  RankLink& operator=(const RankLink&) = delete;

  const protocol::Heaps& heaps() const { return heaps_; }
  int rank() const { return heaps_.rank; }
  int num_ranks() const { return heaps_.size(); }
  // The i-th rank in the order in which this one sends: itself first, then the next.
  int peer(int i) const { return (rank() + i) % num_ranks(); }
  // The distance (protocol/heap.h) of this rank from another one.
  std::uint32_t distance_from(int other) const {
    const int distance = rank() - other;
    return static_cast<std::uint32_t>(distance < 0 ? distance + num_ranks() : distance);
  }

  // ------------------------------------------------------------------------------------- threads

  // Each of `threads` threads records so many events of a call at most.
  void record(int threads, std::size_t trace_events);
  // Makes the rank's threads, which may fail. `enter`: see WorkerPool.
  void start_threads(int threads, std::function<void()> enter);
  int num_threads() const { return pool_->size(); }
  // Runs body(i) on every thread of the rank, or on this one alone. The first exception ends call
  // number `epoch` for all ranks.
  void in_parallel(std::uint64_t epoch, const std::function<void(int)>& body, bool alone = false);

  // Null where nothing is recorded.
  ThreadTrace* trace_of(int thread) {
    return traces_.empty() ? nullptr : &traces_[static_cast<std::size_t>(thread)];
  }
  void clear_traces() {
    for (ThreadTrace& trace : traces_) trace.clear();
    set_free();
  }
  // Notes that all threads are free from now on.
  void set_free() {
    for (ThreadTrace& trace : traces_) trace.set_free();
  }
  std::size_t trace_bytes() const { return trace_bytes_; }
  // All threads' events of call number `epoch`.
  PassTrace trace(std::uint64_t epoch) const;

  // ------------------------------------------------------------------------- waiting and failing

  // As protocol::wait_until() with this link's deadline. `stays_awake`: see HostPace.
  template <typename Ready, typename WhatIsMissing>
  protocol::WaitResult wait(std::uint64_t epoch, bool stays_awake, Ready&& ready,
                            WhatIsMissing&& missing) const {
    HostPace pace(view_, remote_, stays_awake);
    // True on the thread that made the call. It looks at the clock every few milliseconds at least.
    const bool asks = asks_for_interrupts();
    return protocol::wait_until(heaps_, epoch, deadline_ns_, pace, ready, [&] {
      if (asks) heed_interrupts();
      return missing();
    });
  }
  bool aborted() const { return protocol::aborted(heaps_); }
  void check() const {
    if (aborted()) fail();
  }
  // Throws why the world ended.
  [[noreturn]] void fail() const;
  // Ends the world because of `record`, unless it ends for another reason.
  void give_up(const protocol::FailureRecord& record) const;
  // `hook` is called once the world has ended, where some ranks are on other hosts: see RemoteHeap.
  void on_abort(std::function<void()> hook) const {
    if (remote_ != nullptr) remote_->on_abort(std::move(hook));
  }
  // Counts a pass, or a part of an exchange, that this rank has ended.
  void end_call() const {
    if (remote_ != nullptr) remote_->end_call();
  }

  // ------------------------------------------------------------------------------ reaching ranks

  // Verbs that write to one rank whose heap is mapped here.
  class ByStore;
  // The same verbs towards another host, to any of its ranks.
  class ByRecord;

  // Calls body(to) with one of the two, for what this rank writes to `peer`. So a body asks once
  // how `peer` is reached, however many rows it writes. The records of calls with the same host and
  // lane are stored there in the order in which they were sent. They are of call number `epoch`,
  // and wait while the window is full; if the call is given up meanwhile, they return early, which
  // the caller sees for itself.
  template <typename Body>
  void to(int peer, network::Lane lane, std::uint64_t epoch, Body&& body) const;
  // Raises a flag of a rank behind all that this thread wrote to it in the lane.
  template <typename Word>
  void signal(network::Lane lane, std::uint64_t epoch, int rank, Word* flag, Word value) const;

  // True if some ranks are on other hosts.
  bool spans_hosts() const { return remote_ != nullptr; }
  // The rank to which this one sends what `rank` gets: itself, or the one that takes everything for
  // its host.
  int via(int rank) const { return via_[static_cast<std::size_t>(rank)]; }
  // The ranks that get what is sent to `peer`: itself, or all ranks of another host if it takes
  // what this rank sends there, or none if another rank does.
  std::span<const int> ranks_behind(int peer) const {
    if (reaches(peer)) return {&via_[static_cast<std::size_t>(peer)], 1};
    if (via(peer) != peer) return {};
    return remote_->hosts().ranks_of(host_of(peer));
  }
  // All ranks of this rank's host where some are on others, else none.
  std::span<const int> ranks_beside() const {
    if (remote_ == nullptr) return {};
    return remote_->hosts().ranks_of(host_of(rank()));
  }

  // How a rank gets the results for its tokens.
  enum class Return : std::uint8_t {
    kInPlace,  // they are stored into its cells
    kSummed,   // this host's ranks sum them (protocol/host_sums.h), and send the sum
    kSent      // each is made here, and then sent
  };
  Return way_back(int rank) const {
    if (reaches(rank)) return Return::kInPlace;
    return sums_ ? Return::kSummed : Return::kSent;
  }
  // False unless results are summed per host.
  const protocol::HostSums& sums() const { return sums_; }
  // The sums for tokens of `source`, of another host, which this host's ranks keep.
  protocol::HostSums::Part sums_for(int source, std::uint64_t window = 0) const {
    return part(source, host_of(rank()), window);
  }
  // The sums for this rank's own tokens on the host of `gateway`, which keeps them.
  protocol::HostSums::Part sums_at(int gateway, std::uint64_t window = 0) const {
    return part(rank(), host_of(gateway), window);
  }
  // True if the sums for tokens of a rank of another host are in this rank's heap.
  bool keeps_sums_for(int source) const {
    return way_back(source) == Return::kSummed &&
           remote_->hosts().gateway(source, host_of(rank())) == rank();
  }

 private:
  // True if the rank's heap is mapped here, so that a plain store reaches it.
  bool reaches(int rank) const { return (mapped_ >> rank & 1) != 0; }
  int host_of(int rank) const { return remote_->hosts().host_of(rank); }
  protocol::HostSums::Part part(int source, int host, std::uint64_t window) const {
    const network::Hosts& hosts = remote_->hosts();
    return sums_.part(heaps_.base[hosts.gateway(source, host)], hosts.source_index(source, host),
                      window);
  }
  std::uint64_t offset(int rank, const void* address) const {
    return static_cast<std::uint64_t>(static_cast<const std::byte*>(address) - heaps_.base[rank]);
  }
  void send(network::Lane lane, std::uint64_t epoch, int host, network::RecordKind kind,
            std::span<const network::Target> targets, const void* from, std::size_t bytes) const;
  // Ends the world if this rank's caller interrupts it.
  void heed_interrupts() const;
  // Waits until the abort word is raised, for a second at most.
  void await_abort() const;

  World world_;
  protocol::WorldView view_;
  std::shared_ptr<const SymmetricSegment> segment_;
  protocol::Heaps heaps_;
  network::RemoteHeap* remote_ = nullptr;  // null where all ranks are on this host
  std::uint64_t mapped_ = 0;               // a bit for each rank whose heap is mapped here
  std::array<int, protocol::kMaxRanks> via_{};
  protocol::HostSums sums_;
  std::uint64_t deadline_ns_;
  const char* what_;
  std::size_t trace_bytes_ = 0;
  std::vector<ThreadTrace> traces_;  // of every thread, or empty
  std::unique_ptr<WorkerPool> pool_;
  std::mutex exception_mutex_;
  std::exception_ptr exception_;
  std::optional<Fabric::AbortHook> abort_hook_;  // last: it uses the heap
};

class RankLink::ByStore {
 public:
  // Rows are made where their ranks read them: nothing else is to be sent.
  static constexpr bool kInPlace = true;

  explicit ByStore(int peer) : peer_(peer) {}

  // True for a rank that these verbs write to; -1 is none.
  bool takes(int rank) const { return rank == peer_; }

  // Adds a rank that gets what the next of put(), make() and words() writes, and where.
  void target(int, void* address) { target_ = address; }
  // Copies a row.
  void put(const void* from, std::size_t bytes) const { std::memcpy(target_, from, bytes); }
  // The same for a row of so many bytes that make(address) writes.
  template <typename Make>
  void make(std::size_t, Make&& make) const {
    make(static_cast<std::byte*>(target_));
  }
  // Writes words of which each is a flag by itself.
  void words(std::span<const std::uint64_t> words) const {
    auto* to = static_cast<std::uint64_t*>(target_);
    for (const std::uint64_t word : words) protocol::store_release(to++, word);
  }
  // Writes a word of 32 bits of a rank.
  template <typename Word>
  void store(int, Word* address, Word value) const {
    *address = value;
  }
  // Raises a flag of a rank. Release: behind all that this thread wrote to it, or acquired of what
  // others wrote.
  template <typename Word>
  void signal(int, Word* flag, Word value) const {
    protocol::store_release(flag, value);
  }

 private:
  int peer_;
  void* target_ = nullptr;
};

// Every verb appends a record to the host's lane, and the other proxy stores records in their order
// (network/records.h), each flag with release. So a flag is raised behind all that this thread
// appended, and behind all that others had appended when it acquired their counts.
class RankLink::ByRecord {
 public:
  static constexpr bool kInPlace = false;

  ByRecord(const RankLink& link, int peer, network::Lane lane, std::uint64_t epoch)
      : link_(link), host_(link.host_of(peer)), lane_(lane), epoch_(epoch) {}

  bool takes(int rank) const { return rank >= 0 && link_.host_of(rank) == host_; }

  // A row crosses once for all its targets. A rank's first one counts.
  void target(int rank, const void* address) {
    if ((ranks_ >> rank & 1) != 0) return;
    ranks_ |= std::uint64_t{1} << rank;
    targets_.push_back({link_.offset(rank, address), rank, 0});
  }
  void put(const void* from, std::size_t bytes) {
    send(network::RecordKind::kCopy, from, bytes);
    send_stores();
  }
  template <typename Make>
  void make(std::size_t bytes, Make&& make) {
    row_.resize(bytes);
    make(row_.data());
    put(row_.data(), bytes);
  }
  void words(std::span<const std::uint64_t> words) {
    send_stores();
    send(network::RecordKind::kWords, words.data(), words.size_bytes());
    flushes_ = true;
  }
  // Stores follow the next row, or are sent when the body returns.
  template <typename Word>
  void store(int rank, const Word* address, Word value) {
    static_assert(sizeof(Word) == sizeof(std::uint32_t));
    stores_.push_back({link_.offset(rank, address), rank, std::bit_cast<std::uint32_t>(value)});
  }
  // Flags leave when the body returns, and what was appended before leaves with them.
  void signal(int rank, const std::uint32_t* flag, std::uint32_t value) {
    store(rank, flag, value);
    flushes_ = true;
  }
  void signal(int rank, const std::uint64_t* flag, std::uint64_t value) {
    target(rank, flag);
    words({&value, 1});
  }

 private:
  friend class RankLink;
  void send(network::RecordKind kind, const void* from, std::size_t bytes) {
    link_.send(lane_, epoch_, host_, kind, targets_, from, bytes);
    targets_.clear();
    ranks_ = 0;
  }
  void send_stores() {
    if (stores_.empty()) return;
    link_.send(lane_, epoch_, host_, network::RecordKind::kStores, {}, stores_.data(),
               stores_.size() * sizeof(network::Store));
    stores_.clear();
  }
  void finish() {
    send_stores();
    if (flushes_) link_.remote_->flush(lane_, host_);
  }

  const RankLink& link_;
  const int host_;
  const network::Lane lane_;
  const std::uint64_t epoch_;
  std::uint64_t ranks_ = 0;  // a bit for each target's
  std::vector<network::Target> targets_;
  std::vector<network::Store> stores_;
  std::vector<std::byte> row_;
  bool flushes_ = false;
};

template <typename Body>
void RankLink::to(int peer, network::Lane lane, std::uint64_t epoch, Body&& body) const {
  if (reaches(peer)) {
    ByStore to(peer);
    body(to);
    return;
  }
  ByRecord to(*this, peer, lane, epoch);
  body(to);
  to.finish();
}

template <typename Word>
void RankLink::signal(network::Lane lane, std::uint64_t epoch, int rank, Word* flag,
                      Word value) const {
  to(rank, lane, epoch, [&](auto& to) { to.signal(rank, flag, value); });
}

}  // namespace switchyard::cpu
