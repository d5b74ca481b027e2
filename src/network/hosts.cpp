#include "network/hosts.h"

#include <algorithm>
#include <map>

namespace switchyard::network {

Hosts::Hosts(const std::vector<int>& number_by_rank) {
  std::map<int, int> dense;  // hosts in the order of their first ranks
  for (std::size_t rank = 0; rank < number_by_rank.size(); ++rank) {
    const auto [entry, fresh] =
        dense.try_emplace(number_by_rank[rank], static_cast<int>(ranks_.size()));
    if (fresh) ranks_.emplace_back();
    std::vector<int>& ranks = ranks_[static_cast<std::size_t>(entry->second)];
    host_of_.push_back(entry->second);
    index_.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(static_cast<int>(rank));
  }
  source_index_.assign(host_of_.size() * ranks_.size(), 0);
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const std::vector<int> sources = sources_of(rank);
    max_sources_ = std::max(max_sources_, static_cast<int>(sources.size()));
    for (std::size_t i = 0; i < sources.size(); ++i) {
      source_index_[index(sources[i], host_of(rank))] = static_cast<int>(i);
    }
  }
}

std::vector<int> Hosts::sources_of(int rank) const {
  std::vector<int> sources;
  for (int from = 0; from < num_ranks(); ++from) {
    if (!same_host(from, rank) && gateway(from, host_of(rank)) == rank) sources.push_back(from);
  }
  return sources;
}

}  // namespace switchyard::network
