// One rank's link to the others, for both engines of the CPU: all ranks' heaps, this rank's
// threads, how they wait and how they end the world, and how they send to ranks of other hosts,
// where a store would do on one host.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "cpu/pace.h"
#include "cpu/thread_trace.h"
#include "cpu/worker_pool.h"
#include "fabric/fabric.h"
#include "network/proxy.h"
#include "network/records.h"
#include "protocol/wait.h"
#include "switchyard/trace.h"
#include "switchyard/world.h"

namespace switchyard::cpu {

// Any thread of the rank may wait, send and end the world.
class RankLink {
 public:
  // `what` uses the heaps: a "layer" or an "exchange". From here on World::abort() ends its calls.
  RankLink(const World& world, std::shared_ptr<const SymmetricSegment> segment,
           const protocol::ExpertPartition& experts, std::chrono::nanoseconds deadline,
           const char* what);
  RankLink(const RankLink&) = delete;
  RankLink& operator=(const RankLink&) = delete;

  const protocol::Heaps& heaps() const { return heaps_; }
  int rank() const { return heaps_.rank; }
  int num_ranks() const { return heaps_.size(); }
  // The i-th rank in the order in which this one sends: itself first, then the next.
  int peer(int i) const { return (rank() + i) % num_ranks(); }

  // ------------------------------------------------------------------------------------- threads

  // Makes the rank's threads, which may fail. Each of them records `trace_events` events of a call
  // at most; with 0 none is recorded. `enter`: see WorkerPool.
  void start_threads(int threads, std::size_t trace_events, std::function<void()> enter);
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
    HostPace pace(remote_, stays_awake);
    return protocol::wait_until(heaps_, epoch, deadline_ns_, pace, ready, missing);
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

  // True if some ranks are on other hosts.
  bool spans_hosts() const { return remote_ != nullptr; }
  // True if the rank's heap is mapped here, so that a plain store reaches it.
  bool reaches(int rank) const { return (mapped_ >> rank & 1) != 0; }
  // The rank to which dispatch sends what a rank gets: itself, or the one that takes everything for
  // its host.
  int via(int rank) const { return reaches(rank) ? rank : remote_->gateway_to(rank); }
  int host_of(int rank) const { return remote_->hosts().host_of(rank); }
  std::span<const int> ranks_beside(int rank) const {
    return remote_->hosts().ranks_of(host_of(rank));
  }

  // The rank whose heap has the sums (protocol/host_sums.h) for another rank, and which part of it.
  struct Collector {
    int rank;
    int source;
  };
  // The collector for tokens of a rank of another host, which this rank's host sums.
  Collector collector_of(int source) const { return collector(source, host_of(rank())); }
  // The collector on another host for this rank's own tokens.
  Collector collector_on(int host) const { return collector(rank(), host); }

  // A place in the heap of a rank that this one does not reach.
  network::Target target(int rank, const void* address) const {
    return {offset(rank, address), rank, 0};
  }
  network::Store store(int rank, const void* address, std::uint32_t value) const {
    return {offset(rank, address), rank, value};
  }

  // The following wait while the window is full, and return early if the pass was given up, which
  // the caller sees for itself. All targets are on `host`. Records of a lane are stored in the
  // order in which they were sent.
  void copy(network::Lane lane, std::uint64_t epoch, int host,
            std::span<const network::Target> targets, const void* from, std::size_t bytes) const {
    send(lane, epoch, host, network::RecordKind::kCopy, targets, from, bytes);
  }
  void words(network::Lane lane, std::uint64_t epoch, int host,
             std::span<const network::Target> targets, std::span<const std::uint64_t> words) const {
    send(lane, epoch, host, network::RecordKind::kWords, targets, words.data(), words.size_bytes());
  }
  void stores(network::Lane lane, std::uint64_t epoch, int host,
              std::span<const network::Store> stores) const {
    send(lane, epoch, host, network::RecordKind::kStores, {}, stores.data(), stores.size_bytes());
  }
  void flush(network::Lane lane, int host) const { remote_->flush(lane, host); }

 private:
  Collector collector(int source, int host) const {
    const network::Hosts& hosts = remote_->hosts();
    return {hosts.gateway(source, host), hosts.source_index(source, host)};
  }
  std::uint64_t offset(int rank, const void* address) const {
    return static_cast<std::uint64_t>(static_cast<const std::byte*>(address) - heaps_.base[rank]);
  }
  void send(network::Lane lane, std::uint64_t epoch, int host, network::RecordKind kind,
            std::span<const network::Target> targets, const void* from, std::size_t bytes) const;
  // Waits until the abort word is raised, for a second at most.
  void await_abort() const;

  World world_;
  std::shared_ptr<const SymmetricSegment> segment_;
  protocol::Heaps heaps_;
  network::RemoteHeap* remote_ = nullptr;  // null where all ranks are on this host
  std::uint64_t mapped_ = 0;               // a bit for each rank whose heap is mapped here
  std::uint64_t deadline_ns_;
  const char* what_;
  std::size_t trace_bytes_ = 0;
  std::vector<ThreadTrace> traces_;  // of every thread, or empty
  std::unique_ptr<WorkerPool> pool_;
  std::mutex exception_mutex_;
  std::exception_ptr exception_;
  std::optional<Fabric::AbortHook> abort_hook_;  // last: it uses the heap
};

}  // namespace switchyard::cpu
