// The ranks that share a host, and the rank that takes what another host sends.
#pragma once

#include <cstddef>
#include <vector>

namespace switchyard::network {

class Hosts {
 public:
  Hosts() = default;
  // Ranks with equal numbers share a host; numbers need not be dense.
  explicit Hosts(const std::vector<int>& number_by_rank);

  int num_hosts() const { return static_cast<int>(ranks_.size()); }
  int num_ranks() const { return static_cast<int>(host_of_.size()); }
  int host_of(int rank) const { return host_of_[static_cast<std::size_t>(rank)]; }
  bool same_host(int a, int b) const { return host_of(a) == host_of(b); }
  // The host's ranks, in order.
  const std::vector<int>& ranks_of(int host) const {
    return ranks_[static_cast<std::size_t>(host)];
  }
  // The place of the rank among those of its host.
  int local_index(int rank) const { return index_[static_cast<std::size_t>(rank)]; }

  // The rank of `host` that takes what `from`, of another host, sends to any rank there. A token
  // crosses once for a host, so one rank there passes it on; and rank i sends to rank i, so that
  // all links of a host are used.
  int gateway(int from, int host) const {
    const std::vector<int>& ranks = ranks_of(host);
    return ranks[static_cast<std::size_t>(local_index(from)) % ranks.size()];
  }
  // The ranks of other hosts whose gateway is `rank`, in order.
  std::vector<int> sources_of(int rank) const;
  // The place of `from` among the sources of its gateway on `host`, another than its own.
  int source_index(int from, int host) const { return source_index_[index(from, host)]; }
  // The most sources that a rank has.
  int max_sources() const { return max_sources_; }

 private:
  std::size_t index(int rank, int host) const {
    return static_cast<std::size_t>(rank) * ranks_.size() + static_cast<std::size_t>(host);
  }

  std::vector<int> host_of_, index_;
  std::vector<int> source_index_;  // [rank][host]
  int max_sources_ = 0;
  std::vector<std::vector<int>> ranks_;
};

}  // namespace switchyard::network
