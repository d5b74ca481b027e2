// The common part of both ways of sharing experts by host: where tokens go, and the layer of a
// host's ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "exchange/staged_experts.h"
#include "network/hosts.h"
#include "protocol/partition.h"
#include "switchyard/routing.h"

namespace switchyard {

class ExpertsByHost : public StagedExperts {
 public:
  void refresh() final {
    if (layer_) layer_->refresh(site_.device.stream());
  }
  void rebind(const MoeWeights& weights) final {
    if (layer_) layer_->rebind(weights_of_host(weights), nullptr);
  }

 protected:
  // A slot of a token, as it travels beside it.
  struct Slot {
    std::int32_t place;  // over all ranks; -1: none
    float weight;
  };

  explicit ExpertsByHost(StagedSite& site);
  // The exchange's spec for both ways: ranks take the place of experts.
  ExchangeSpec spec_of_ranks(int most_hosts) const;
  std::size_t attached_bytes() const { return top_k() * sizeof(Slot); }
  // Collective. Makes room for all rows that may come. At most `most` of them go through passes of
  // the host's layer.
  void make_slots(std::int64_t most);
  void make_layer(const MoeWeights& weights);

  std::size_t top_k() const { return static_cast<std::size_t>(site_.spec.top_k); }
  int rank() const { return site_.world.rank(); }
  std::span<Slot> slots() const {
    return {reinterpret_cast<Slot*>(slots_.data()),
            static_cast<std::size_t>(site_.options.max_tokens) * top_k()};
  }
  const Slot* came_slots() const { return reinterpret_cast<const Slot*>(came_slots_.data()); }
  // Notes the slots of each token of this rank, and calls goes(token, host) for each host that has
  // experts of it, in the order of k.
  template <typename Goes>
  void address(const std::vector<std::int32_t>& ids, const std::vector<float>& weights,
               const Goes& goes);
  // Adds rows to the next pass of the host's layer: those of their slots that are this host's, in
  // the order of k. Counts them in `rows`.
  void clear_rows() { host_ids_.clear(), host_weights_.clear(); }
  void add_rows(std::span<const Slot> slots, std::vector<std::int64_t>& rows);
  // Runs the host's layer with the rows that were added.
  void pass(const MatrixView& tokens, void* results);
  // Waits for the host's ranks, and calls `passes`. If they fail, all ranks of the world learn
  // which rank is to blame, and if this rank fails, those that wait for it in the host's layer.
  template <typename Passes>
  void together(const Passes& passes);

  const network::Hosts& hosts_;
  const int host_;
  const protocol::ExpertPartition places_;
  int passes_ = 1;                      // of the host's layer in each of this one: on all its ranks
  std::unique_ptr<LayerEngine> layer_;  // null if the host has no experts

 private:
  MoeWeights weights_of_host(const MoeWeights& all) const;
  [[noreturn]] void blame(const TimeoutError& error);

  std::vector<std::int32_t> place_of_;  // [E]; empty: an expert's place is its number
  std::vector<std::int32_t> on_host_;   // [places]: the number among this host's, or -1
  int num_on_host_ = 0, top_k_ = 0;     // of the host's layer
  World beside_;                        // the ranks of this host
  StagedSite::Buffer ids_, weights_;    // [chunk, top_k_], on the device
  Mapping slots_, came_slots_;          // of own tokens, and of rows of the exchange
  std::vector<std::int32_t> host_ids_;
  std::vector<float> host_weights_;
};

template <typename Goes>
void ExpertsByHost::address(const std::vector<std::int32_t>& ids, const std::vector<float>& weights,
                            const Goes& goes) {
  const std::size_t tokens = ids.size() / top_k();
  for (std::size_t t = 0; t < tokens; ++t) {
    std::uint64_t seen = 0;  // hosts
    for (std::size_t s = t * top_k(); s < (t + 1) * top_k(); ++s) {
      const std::int32_t id = ids[s];
      const std::int32_t place =
          id < 0 || place_of_.empty() ? id : place_of_[static_cast<std::size_t>(id)];
      slots()[s] = {place, weights[s]};
      if (place < 0) continue;
      const int host = hosts_.host_of(places_.owner(place));
      const std::uint64_t bit = std::uint64_t{1} << host;
      if ((seen & bit) == 0) goes(t, host);
      seen |= bit;
    }
  }
}

template <typename Passes>
void ExpertsByHost::together(const Passes& passes) {
  try {
    // A rank of this host that still waits for another host is no fault of its own.
    exchange_->await_host();
    passes();
  } catch (const TimeoutError& error) {
    beside_.abort();
    blame(error);
  } catch (...) {
    beside_.abort();
    throw;
  }
}

}  // namespace switchyard
