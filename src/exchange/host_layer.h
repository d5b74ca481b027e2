// The ranks of one host as a layer, with the experts of all of them: a part of a layer over several
// hosts, which sends it the tokens of other hosts that have slots here.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "exchange/staging.h"
#include "layer/compute.h"
#include "layer/engine.h"
#include "network/hosts.h"
#include "protocol/partition.h"
#include "switchyard/world.h"

namespace switchyard {

// The state that the parts of a layer over hosts share.
struct StagedContext {
  using Buffer = std::shared_ptr<std::byte>;

  const World& world;
  const LayerSpec& spec;
  const LayerOptions& options;
  StagingDevice& device;
  Backend kernels;
  DType compute;
  bool by_row;                     // tokens in FP8 have one scale, as the device's layer takes them
  std::int64_t most_rows;          // of a pass of the host's layer
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

// Throws Error{kUnsupported} unless each host can be such a layer, and has as many ranks as every
// other: rank i of a host sends to rank i of the others. All ranks throw the same.
void require_host_layers(const network::Hosts& hosts, const protocol::ExpertPartition& places);

class HostLayer {
 public:
  // A slot of a token, as it travels to other hosts.
  struct Slot {
    std::int32_t place;  // over all ranks; -1: none
    float weight;
  };

  explicit HostLayer(StagedContext& context);
  // Collective over the host's ranks. At most `most_rows` rows are added to a pass.
  void make(const MoeWeights& weights, std::int64_t most_rows);
  // False if the host has no experts. Then it has no passes.
  bool exists() const { return engine_ != nullptr; }
  void refresh() {
    if (engine_) engine_->refresh(context_.device.stream());
  }
  void rebind(const MoeWeights& weights) {
    if (engine_) engine_->rebind(weights_of_host(weights), nullptr);
  }

  // The place of the expert that slots of this rank use; none for a negative one.
  std::int32_t place_of(std::int32_t expert) const {
    if (expert < 0 || place_of_.empty()) return expert;
    return place_of_[static_cast<std::size_t>(expert)];
  }
  int host_of(std::int32_t place) const { return hosts_.host_of(places_.owner(place)); }

  // Adds rows to the next pass, with those of their slots that are this host's, in the order of k.
  // Counts these slots in `rows` [E].
  void clear_rows() { ids_.clear(), weights_.clear(); }
  void add_rows(std::span<const Slot> slots, std::vector<std::int64_t>& rows);
  // Enqueues a pass with the rows that were added.
  void pass(const MatrixView& tokens, void* results);
  // Throws what a pass has found.
  void check() {
    if (engine_) engine_->check();
  }
  // Ends the layer on all ranks of the host.
  void abort() { world_.abort(); }
  // Call it from any thread, also when this object has ended.
  std::function<void()> abort_later() const {
    return [world = world_] { world.abort(); };
  }

 private:
  MoeWeights weights_of_host(const MoeWeights& all) const;
  std::size_t top_k() const { return static_cast<std::size_t>(context_.spec.top_k); }

  StagedContext& context_;
  const network::Hosts& hosts_;
  const protocol::ExpertPartition places_;
  std::vector<std::int32_t> place_of_;  // [E]; empty: an expert's place is its number
  std::vector<std::int32_t> expert_;    // [places]: the number among this host's experts, or -1
  int num_experts_ = 0, top_k_ = 0;     // of the host's layer
  World world_;                         // the ranks of this host
  std::unique_ptr<LayerEngine> engine_;
  StagedContext::Buffer device_ids_, device_weights_;  // [most_rows, top_k_]
  std::vector<std::int32_t> ids_;
  std::vector<float> weights_;
};

}  // namespace switchyard
