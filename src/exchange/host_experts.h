// The routed experts of a layer whose ranks compute on devices of several hosts. A token goes once
// to each other host that has experts of it, from the memory of a rank straight into that of the
// rank with its number there. The layer of that host's ranks computes it like a token of its own,
// and its sum comes back. The CPU engine's exchange carries the tokens' slots, and the flags.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/mapping.h"
#include "exchange/engine.h"
#include "exchange/host_layer.h"
#include "network/rows.h"

namespace switchyard {

// The places of everything in the memory that networks read and write. T is max_tokens, or a little
// more so that every part begins a page, as pinning wants it; S is the number of other hosts, which
// number from 0 on without the own one. Windows are there twice, and used in turn: see
// docs/exchange.md, "Why nobody is lapped".
//
//   tokens    [T]           this rank's, as they leave
//   received  [2][S][T]     others'
//   results   [T + S T]     of this rank's tokens, then of received ones
//   returned  [2][S][T]     sums of this rank's tokens
struct NetworkLayout {
  std::uint64_t tokens = 0, hosts = 0;              // T and S
  std::uint64_t token_bytes = 0, result_bytes = 0;  // of a row

  NetworkLayout() = default;
  NetworkLayout(std::uint64_t max_tokens, std::uint64_t others, std::uint64_t bytes_of_token,
                std::uint64_t bytes_of_result);

  std::uint64_t window(std::uint64_t parity, std::uint64_t host) const {
    return (parity * hosts + host) * tokens;
  }
  std::uint64_t received(std::uint64_t parity, std::uint64_t host) const {
    return (tokens + window(parity, host)) * token_bytes;
  }
  // Results and returned rows are numbered together.
  std::uint64_t returned_row(std::uint64_t parity, std::uint64_t host) const {
    return (1 + hosts) * tokens + window(parity, host);
  }
  std::uint64_t result(std::uint64_t row) const {
    return (1 + 2 * hosts) * tokens * token_bytes + row * result_bytes;
  }
  std::uint64_t bytes() const { return result((1 + 3 * hosts) * tokens); }
};

class HostExperts {
 public:
  // Collective.
  HostExperts(StagedContext& context, const MoeWeights& weights);
  HostExperts(const HostExperts&) = delete;
  HostExperts& operator=(const HostExperts&) = delete;

  void check() { exchange_->check(); }
  void refresh() { layer_.refresh(); }
  void rebind(const MoeWeights& weights) { layer_.rebind(weights); }
  ExchangeStats traffic();

  // A pass is the next three, in this order. Takes tokens of the device; they are where the network
  // reads them after await_stream().
  void load_tokens(const MatrixView& x);
  // `ids` and `weights` are [T, K]. Adds to `rows` [E] how many rows came to this rank's host
  // through this rank.
  void compute(const std::vector<std::int32_t>& ids, const std::vector<float>& weights,
               std::vector<std::int64_t>& rows);
  // Writes the tokens' sums into the device's memory, with the rows of shared_results() times the
  // factors [T], if there are any.
  void sum(const ForwardOutput& output, const std::vector<float>& shared_factors);
  // Device memory for the shared expert's results, in the value type; null without that expert.
  std::byte* shared_results() { return shared_ ? result_at(shared_row_) : nullptr; }

 private:
  using Slot = HostLayer::Slot;

  // The rank of another host to which this one sends tokens, and which sends tokens to it.
  struct Peer {
    int host = 0;
    int rank = 0;
    std::uint64_t window = 0;              // this rank's, in the peer's memory
    std::vector<std::uint32_t> sent;       // tokens, in order
    std::int64_t first = 0, received = 0;  // rows from there: among all, and how many
  };

  void set_up();
  bool share_device_memory();
  void share_host_memory();
  bool on_device() const { return device_memory_ != nullptr; }
  std::byte* memory() const { return on_device() ? device_memory_.get() : host_memory_->data(); }
  // A row of the device's results and the sums that were returned.
  std::byte* result_at(std::uint64_t row) const {
    return (on_device() ? device_memory_.get() + layout_.result(0) : results_.get()) +
           row * layout_.result_bytes;
  }
  std::size_t top_k() const { return static_cast<std::size_t>(context_.spec.top_k); }
  // Slots of this rank's tokens, and of received ones.
  Slot* slots() const { return reinterpret_cast<Slot*>(slots_.data()); }
  Slot* received_slots() const { return reinterpret_cast<Slot*>(received_slots_.data()); }
  Peer& peer_on(int host) { return peers_[static_cast<std::size_t>(host - (host > host_))]; }
  std::uint64_t parity() const { return calls_ & 1; }
  // The terms of a token's sum: one for each host, and the shared expert.
  std::size_t terms() const { return peers_.size() + 1 + (shared_ ? 1 : 0); }

  void round(const MatrixView& x);
  void quantise(const MatrixView& x, std::byte* to) const;
  void address(const std::vector<std::int32_t>& ids, const std::vector<float>& weights);
  void put_tokens();
  void exchange_slots();
  void run_passes(std::vector<std::int64_t>& rows);
  MatrixView load(std::int64_t first, std::int64_t count);
  void put_results();
  [[noreturn]] void blame(const TimeoutError& error);
  void await_sent();

  StagedContext& context_;
  const network::Hosts& hosts_;
  const int host_;
  const bool shared_;
  HostLayer layer_;
  std::int64_t chunk_ = 0;  // rows of a pass of the host's layer
  int passes_ = 1;          // of that layer in each of this one: the same on all its ranks
  NetworkLayout layout_;
  std::shared_ptr<Mapping> host_memory_;  // the memory that networks see,
  StagedContext::Buffer device_memory_;   // or this
  // Device memory: a pass's rows; the numbers 0, 1, ...; terms of sums, and their factors. Beside
  // host memory that networks see: this rank's quantised tokens; results and returned sums
  // [T + 2 S T, + T].
  StagedContext::Buffer rows_, identity_, positions_, factors_, quantised_, results_;
  std::unique_ptr<network::RowsRegion> region_;
  std::vector<network::RegionKey> keys_;  // by rank
  std::vector<Peer> peers_;               // by host, without the own one
  std::unique_ptr<ExchangeEngine> exchange_;
  std::unique_ptr<ExchangeHandle::State> handle_;
  Mapping slots_, received_slots_;
  std::vector<RowOrigin> origins_;
  std::vector<std::int32_t> gateways_, terms_;
  std::vector<float> factor_of_term_;
  std::vector<network::RowsPut> puts_;
  std::int64_t tokens_ = 0;  // of this pass
  std::int32_t num_received_ = 0;
  std::uint64_t calls_ = 0, shared_row_ = 0;
  std::uint64_t token_bytes_sent_ = 0, result_bytes_sent_ = 0;
};

}  // namespace switchyard
