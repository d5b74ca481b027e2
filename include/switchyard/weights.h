// The weights of a layer, and which of its experts each rank has.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "switchyard/layer_spec.h"
#include "switchyard/tensor.h"

namespace switchyard {

// One feed-forward network. gate is empty for a plain FFN. gate, up: [I, H]; down: [H, I].
struct FfnWeights {
  MatrixView gate{}, up{}, down{};
  VectorView gate_bias{}, up_bias{}, down_bias{};  // [I], [I], [H]; empty where the model has none
};

// The weights of one MoE layer: views into memory that `owner` keeps alive.
struct MoeWeights {
  MatrixView router{};           // [E, H]; empty where routing is given from outside
  VectorView router_bias{};      // [E]
  VectorView correction_bias{};  // [E]
  MatrixView hash_table{};       // [vocabulary, K] of i32 or i64: DeepSeek-V4's token-id table
  // [E]; a rank's own are enough, see own_experts(). With an ExpertPlacement [places].
  std::vector<FfnWeights> experts{};
  FfnWeights shared{};       // empty() up: none
  VectorView shared_gate{};  // [H]
  std::shared_ptr<const void> owner{};
};

// Experts [begin, end).
struct ExpertRange {
  int begin = 0, end = 0;
};
// The experts of rank `rank` of `num_ranks`, whose weights it must be given: contiguous shards
// whose sizes differ by at most one. Throws Error{kInvalidArgument} for numbers that make no sense.
ExpertRange own_experts(int num_experts, int rank, int num_ranks);

// The expert at each place, for layers whose experts do not stand in contiguous shards, or not once
// each: after load balancing (EPLB), say. Every expert has a place or several; places are numbered
// over all ranks, and rank r of R has those that own_experts(places, r, R) says. This is the table
// that vLLM and SGLang call physical_to_logical_map.
struct ExpertPlacement {
  std::vector<std::int32_t>
      expert_at{};  // [places]; empty: expert e is at place e, and nowhere else

  int num_places(int num_experts) const {
    return expert_at.empty() ? num_experts : static_cast<int>(expert_at.size());
  }
  friend bool operator==(const ExpertPlacement&, const ExpertPlacement&) = default;
};
// Throws Error{kInvalidArgument} for an expert that does not exist, or one without a place.
void validate(const ExpertPlacement& placement, int num_experts);
// [E]: the place at which each expert computes the tokens of `rank`: the first that the rank itself
// has, or else number `rank` modulo n of the expert's n places. The same in every pass.
std::vector<std::int32_t> places_for(const ExpertPlacement& placement, int num_experts, int rank,
                                     int num_ranks);

// Throws Error{kMissingTensor, kShapeMismatch, kDTypeMismatch} if the weights cannot serve the
// spec. Experts that are not among `own` may be empty. With `num_places` the weights are those of
// places instead of experts, and `own` are places.
void validate(const LayerSpec& spec, const MoeWeights& weights, ExpertRange own);
void validate(const LayerSpec& spec, const MoeWeights& weights, ExpertRange own, int num_places);
void validate(const LayerSpec& spec, const MoeWeights& weights);  // all experts

// Throws Error{kInvalidArgument} with the place of the first scale that is NaN, or zero point above
// 15, among four-bit weights of `own` experts and of the shared one, which are in host memory and
// have passed validate().
void check_values(const MoeWeights& weights, ExpertRange own);

// Bytes of expert weight (routed and shared, scales included) that a forward pass touches when
// exactly the experts with tokens_per_expert[e] > 0 are active.
std::uint64_t touched_weight_bytes(const MoeWeights& weights,
                                   const std::vector<std::int64_t>& tokens_per_expert);

}  // namespace switchyard
