// Rows that go from the memory of a rank into that of a rank of another host, copied neither into
// chunks nor out of them. Chunks say how many of them must have come first: see ChunkHeader::rows.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "network/arena.h"
#include "network/network.h"

namespace switchyard::network {

class Proxy;

// A part of the sender's region, and its place in the receiver's.
struct RowsPut {
  std::uint64_t from = 0, to = 0;
  std::uint64_t bytes = 0;
};

// Memory of a rank that rows leave and come to; for one thread of the rank.
class RowsRegion {
 public:
  // `owner` keeps the memory. `dmabuf`: a descriptor of it if it is a device's, which may be closed
  // afterwards; -1: host memory. Throws what Network::add() does.
  RowsRegion(std::shared_ptr<Proxy> proxy, std::span<std::byte> memory,
             std::shared_ptr<const void> owner, int dmabuf);
  // Waits for nobody: memory that puts still read, because a world has failed, is kept until the
  // proxy ends.
  ~RowsRegion();
  RowsRegion(const RowsRegion&) = delete;
  RowsRegion& operator=(const RowsRegion&) = delete;

  RegionKey key() const { return key_; }
  // Starts puts into the region `to` of this rank's gateway on `host`. Records that the rank
  // appends to the lane and host from now on are applied behind them. The rows must stay until
  // all_sent().
  void put(Lane lane, int host, const RegionKey& to, std::span<const RowsPut> puts);
  bool all_sent() const { return unsent_host() < 0; }
  // A host for which some rows have not left yet; -1: none.
  int unsent_host() const;
  // How many puts have not left.
  std::uint64_t unsent() const;

 private:
  const std::shared_ptr<Proxy> proxy_;
  std::shared_ptr<const void> owner_;
  std::uint32_t region_ = 0;
  RegionKey key_;
  std::vector<std::shared_ptr<std::atomic<std::uint64_t>>> unsent_;  // by host
};

}  // namespace switchyard::network
