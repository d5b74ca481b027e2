// The routed experts of a layer whose ranks are on several hosts and compute on devices: tokens go
// from host memory to the hosts of their experts, devices compute, and results come back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "exchange/engine.h"
#include "exchange/staging.h"
#include "fabric/mapping.h"
#include "layer/compute.h"
#include "layer/engine.h"
#include "switchyard/world.h"

namespace switchyard {

// The state that the parts of a staged layer share.
struct StagedSite {
  using Buffer = std::shared_ptr<std::byte>;

  const World& world;
  const LayerSpec& spec;
  const LayerOptions& options;
  StagingDevice& device;
  Backend kernels;
  DType compute;
  std::int64_t most_rows;          // that go through the experts at a time
  std::uint64_t device_bytes = 0;  // of all allocate()

  bool quantised() const { return compute == DType::kF8E4M3; }
  DType value() const { return value_type(compute); }

  Buffer allocate(std::int64_t rows, std::size_t row_bytes) {
    const std::size_t bytes = bytes_of_rows(rows, row_bytes);
    device_bytes += bytes;
    return device.allocate(bytes);
  }
  // Copies in the order of the device's stream(): `from` must stay until await_stream().
  void store(void* to, const void* from, std::size_t bytes) const {
    if (bytes == 0) return;
    device.enqueue_to_device(to, bytes, static_cast<const std::byte*>(from), bytes, {bytes, 1});
  }
  // Makes a layer for the device, of the ranks of `of`, whose networks its caller chooses.
  std::unique_ptr<LayerEngine> make_networks(const World& of, const LayerSpec& networks,
                                             const MoeWeights& weights, std::int64_t max_tokens,
                                             std::chrono::milliseconds deadline) const;
};

// The spec of such a layer.
LayerSpec spec_of_networks(const LayerSpec& spec, int networks, int intermediate, bool biased);

class StagedExperts {
 public:
  virtual ~StagedExperts() = default;
  StagedExperts(const StagedExperts&) = delete;
  StagedExperts& operator=(const StagedExperts&) = delete;

  // The type that tokens must have, unless they are quantised on the way.
  virtual DType token_type() const { return exchange_->problem().spec.dispatch; }
  int groups() const { return exchange_->problem().groups(); }
  // Host memory where tokens of token_type() are best put, in rows one behind the other; or null.
  virtual std::byte* token_memory() { return nullptr; }
  // True: tokens of token_type() are taken from the device, or of any type if they are quantised.
  virtual bool takes_from_device() const { return false; }
  void check() { exchange_->check(); }
  virtual ExchangeStats traffic() { return exchange_->stats(); }

  // Tokens in host memory, or in the device's.
  struct Tokens {
    MatrixView rows;
    bool on_device = false;
  };
  // `ids` and `weights` are [T, K]. Adds to `rows` [E] how many rows came to this rank.
  virtual void compute(const Tokens& tokens, const std::vector<std::int32_t>& ids,
                       const std::vector<float>& weights, std::vector<std::int64_t>& rows) = 0;
  // After compute(): writes the tokens' sums into host memory.
  void sum(const CombineOutput& output) { exchange_->combine_recv(output, *handle_); }
  // True: sum_on_device() takes its place. It writes the sums into the device's memory, with the
  // rows of shared_memory() times the factors [T], if there are any.
  virtual bool sums_on_device() const { return false; }
  virtual void sum_on_device(const ForwardOutput& output, std::int64_t tokens,
                             const std::vector<float>& shared_factors) {
    (void)output, (void)tokens, (void)shared_factors;
  }
  // Device memory for the shared expert's results then, in the value type.
  virtual std::byte* shared_memory() { return nullptr; }

  virtual void refresh() = 0;
  virtual void rebind(const MoeWeights& weights) = 0;

 protected:
  explicit StagedExperts(StagedSite& site) : site_(site) {}
  // Collective.
  void make_exchange(const ExchangeProblem& problem);
  // Makes memory for `capacity` rows that may come, `chunk` of them at a time on the device.
  void make_rows(std::int64_t capacity, std::int64_t chunk);
  // Both halves of a dispatch: dispatch() into the host's rows, exchange() as `output` says.
  void dispatch(const DispatchInput& input, DispatchOutput output);
  void exchange(const DispatchInput& input, DispatchOutput output);
  // Loads rows [first, first + count) into the device's memory.
  MatrixView load_rows(std::int64_t first, std::int64_t count);
  void save_results(std::int64_t first, std::int64_t count);
  void send_results();
  const ExchangeProblem& problem() const { return exchange_->problem(); }
  std::size_t result_bytes() const { return problem().result_bytes(); }
  int expert_at(int place) const {
    const std::vector<std::int32_t>& experts = site_.options.placement.expert_at;
    return experts.empty() ? place : experts[static_cast<std::size_t>(place)];
  }

  StagedSite& site_;
  std::unique_ptr<ExchangeEngine> exchange_;
  std::unique_ptr<ExchangeHandle::State> handle_;
  std::int64_t chunk_ = 0;
  std::int32_t num_rows_ = 0;  // that came
  // Device memory for a chunk.
  StagedSite::Buffer rows_, row_scales_, results_;

 private:
  // Host memory, committed by the rows that really go through it.
  Mapping host_rows_, host_row_scales_, host_results_;
};

// Each rank computes the rows of its own experts, and a row for each slot crosses back. Collective.
std::unique_ptr<StagedExperts> make_experts_by_rank(StagedSite& site, const MoeWeights& weights);

// The ranks of a host are a layer of their own, with the host's experts. A token crosses once for
// each host that has experts of it, to one rank there, and that layer's sum crosses back.
std::unique_ptr<StagedExperts> make_experts_by_host(StagedSite& site, const MoeWeights& weights);
// False if the ranks of some host do not have as many experts each as in a layer of their own.
bool can_share_by_host(const World& world, int num_places);

}  // namespace switchyard
