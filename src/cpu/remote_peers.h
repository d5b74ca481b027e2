// An engine on the CPU sends through this to ranks of other hosts, where a store would do on one
// host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "network/proxy.h"
#include "network/records.h"
#include "protocol/wait.h"

namespace switchyard::cpu {

// Copies of it are one object to the network. Any thread of the rank may send.
class RemotePeers {
 public:
  RemotePeers() = default;  // all ranks are on this host
  RemotePeers(network::RemoteHeap* heap, const protocol::Heaps& heaps, std::uint64_t deadline_ns)
      : heap_(heap), heaps_(&heaps), deadline_ns_(deadline_ns) {}

  // True if some ranks are on other hosts.
  explicit operator bool() const { return heap_ != nullptr; }
  // True if the rank's heap is mapped here, so that a plain store reaches it.
  bool reaches(int rank) const { return heap_ == nullptr || heap_->reaches(rank); }
  // The rank to which dispatch sends what a rank gets: itself, or the one that takes everything for
  // its host.
  int via(int rank) const { return reaches(rank) ? rank : heap_->gateway_to(rank); }
  int host_of(int rank) const { return heap_->hosts().host_of(rank); }
  std::span<const int> ranks_beside(int rank) const {
    return heap_->hosts().ranks_of(host_of(rank));
  }
  network::RemoteHeap* heap() const { return heap_; }

  // The rank whose heap has the sums (protocol/host_sums.h) for another rank, and which part of it.
  struct Collector {
    int rank;
    int source;
  };
  // The collector for tokens of a rank of another host, which this rank's host sums.
  Collector collector_of(int source) const {
    return collector(source, heap_->hosts().host_of(heaps_->rank));
  }
  // The collector on another host for this rank's own tokens.
  Collector collector_on(int host) const { return collector(heaps_->rank, host); }

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
  void flush(network::Lane lane, int host) const { heap_->flush(lane, host); }
  // Counts a pass, or a part of an exchange, that this rank has ended.
  void end_call() const {
    if (heap_ != nullptr) heap_->end_call();
  }

 private:
  Collector collector(int source, int host) const {
    const network::Hosts& hosts = heap_->hosts();
    return {hosts.gateway(source, host), hosts.source_index(source, host)};
  }
  std::uint64_t offset(int rank, const void* address) const {
    return static_cast<std::uint64_t>(static_cast<const std::byte*>(address) - heaps_->base[rank]);
  }
  void send(network::Lane lane, std::uint64_t epoch, int host, network::RecordKind kind,
            std::span<const network::Target> targets, const void* from, std::size_t bytes) const;

  network::RemoteHeap* heap_ = nullptr;
  const protocol::Heaps* heaps_ = nullptr;
  std::uint64_t deadline_ns_ = 0;
};

}  // namespace switchyard::cpu
