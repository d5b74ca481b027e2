#include "layer/shared_beside.h"

#include <algorithm>
#include <utility>

#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "layer/agreement.h"
#include "layer/call.h"
#include "layer/compute.h"
#include "layer/pass_memory.h"
#include "protocol/heap.h"

namespace switchyard {
namespace {

LayerSpec without_shared(LayerSpec spec) {
  spec.shared_intermediate = 0;
  spec.shared_sigmoid_gate = false;
  return spec;
}
MoeWeights without_shared(MoeWeights weights) {
  weights.shared = {};
  weights.shared_gate = {};
  return weights;
}

// The rows of the routed expert that a layer must have. No token goes to it.
int idle_rows(const LayerSpec& spec) { return std::min(128, spec.shared_intermediate); }
LayerSpec spec_of_shared(const LayerSpec& spec) {
  LayerSpec shared = spec_of_networks(spec, 1, idle_rows(spec), false);
  shared.shared_intermediate = spec.shared_intermediate;
  shared.shared_sigmoid_gate = spec.shared_sigmoid_gate;
  return shared;
}
MoeWeights weights_of_shared(const LayerSpec& spec, const MoeWeights& all) {
  MoeWeights shared = only_shared(all);
  FfnWeights& idle = shared.experts[0];
  if (!idle.gate.empty()) idle.gate.rows = idle_rows(spec);
  idle.up.rows = idle.down.cols = idle_rows(spec);
  shared.shared = all.shared;
  shared.shared_gate = all.shared_gate;
  return shared;
}

class SharedBeside final : public LayerEngine {
 public:
  SharedBeside(const World& world, const LayerSpec& spec, const MoeWeights& weights,
               const LayerOptions& options, std::shared_ptr<PassMemory> memory,
               const EngineMaker& make, const std::function<NoRouting()>& no_routing)
      : world_(world), spec_(spec), options_(options) {
    Fabric& fabric = world_.fabric();
    attempt_together(fabric, [&] { require_fit(weights, options_.placement); });
    compute_ = agree_on_compute(fabric, weights, options_.compute);
    // The engine of the routed experts does not know the rest of the spec.
    agree(fabric, {spec_, options_.max_tokens, compute_, summary_of(options_.placement), false,
                   agree_on_routed_type(fabric, weights).value_or(weights.shared.up.dtype)});
    LayerOptions of_routed = options_;
    of_routed.compute = compute_;
    keep_agreed_compute(world_, spec_, compute_, options_);
    routed_ =
        make(world_, without_shared(spec_), without_shared(weights), of_routed, std::move(memory));
    attempt_together(world_.fabric(), [&] {
      LayerOptions alone;
      alone.backend = options_.backend;
      alone.max_tokens = options_.max_tokens;
      alone.cpu = options_.cpu;
      alone.cuda = options_.cuda;
      alone.compute = compute_;
      alone.deadline = options_.deadline;
      shared_ =
          make(alone_, spec_of_shared(spec_), weights_of_shared(spec_, weights), alone, nullptr);
      nobody_ = no_routing();
    });
    keep(weights);
  }

  void forward(const ForwardInput& input, const ForwardOutput& output) override {
    // Before anything is sent; neither layer knows what the other's part of the call needs.
    check_call(spec_, weights_, options_.max_tokens, world_.rank(), input, output, compute_);
    ForwardInput of_routed = input;
    // The kernel for few tokens is not for layers with a shared expert.
    if (input.max_tokens_per_rank * world_.size() <= protocol::kMostFewRows) {
      of_routed.max_tokens_per_rank = 0;
    }
    routed_->forward(of_routed, output);
    const auto tokens = static_cast<std::size_t>(input.activations.rows);
    if (tokens == 0) return;
    const ForwardInput beside{.activations = input.activations,
                              .topk_ids = {nobody_.ids.get(), DType::kI32, tokens},
                              .topk_weights = {nobody_.weights.get(), DType::kF32, tokens},
                              .stream = input.stream};
    shared_->forward(beside, {.data = output.data,
                              .dtype = output.dtype,
                              .row_stride = output.row_stride,
                              .scale = output.scale,
                              .accumulate = true});
  }
  void check() override {
    routed_->check();
    shared_->check();
  }
  void refresh(void* stream) override {
    routed_->refresh(stream);
    shared_->refresh(stream);
  }
  bool copies() const override { return routed_->copies() || shared_->copies(); }
  void rebind(const MoeWeights& weights, const ExpertPlacement* placement) override {
    const auto check = [&] {
      require_fit(weights, placement == nullptr ? options_.placement : *placement);
      require_same_weights(weights_, weights, compute_, resolve_compute(weights, options_.compute));
    };
    if (placement == nullptr) {
      check();
    } else {
      attempt_together(world_.fabric(), check);
    }
    routed_->rebind(without_shared(weights), placement);
    if (placement != nullptr) options_.placement = *placement;
    shared_->rebind(weights_of_shared(spec_, weights), nullptr);
    keep(weights);
  }
  const ForwardStats& stats() override { return routed_->stats(); }
  Recording recording() override { return routed_->recording(); }
  bool records() const override { return routed_->records(); }
  PassTrace trace() override { return routed_->trace(); }
  bool traces() const override { return routed_->traces(); }
  const LayerSpec& spec() const override { return spec_; }
  Backend backend() const override { return routed_->backend(); }
  DType compute() const override { return compute_; }
  int num_threads() const override { return routed_->num_threads(); }
  std::uint64_t workspace_bytes() const override {
    return routed_->workspace_bytes() + shared_->workspace_bytes();
  }

 private:
  void require_fit(const MoeWeights& weights, const ExpertPlacement& placement) const {
    validate(spec_);
    validate(placement, spec_.num_experts);
    const int places = placement.num_places(spec_.num_experts);
    validate(spec_, weights, own_experts(places, world_.rank(), world_.size()), places);
  }
  // Which tensors there are, and in which forms. The engines hold what they read.
  void keep(MoeWeights weights) {
    weights.owner = nullptr;
    weights_ = std::move(weights);
  }

  World world_;
  LayerSpec spec_;
  LayerOptions options_;
  DType compute_{};
  MoeWeights weights_;
  World alone_ = World::single({.deadline = options_.deadline});
  NoRouting nobody_;
  std::unique_ptr<LayerEngine> routed_, shared_;
};

}  // namespace

LayerSpec spec_of_networks(const LayerSpec& spec, int networks, int intermediate, bool biased) {
  LayerSpec inner;
  inner.hidden = spec.hidden;
  inner.intermediate = intermediate;
  inner.num_experts = networks;
  inner.top_k = 1;
  inner.activation = spec.activation;
  inner.expert_bias = biased;
  return inner;
}

MoeWeights only_shared(const MoeWeights& all) {
  MoeWeights shared;
  shared.experts = {all.shared};
  shared.owner = all.owner;
  return shared;
}

std::unique_ptr<LayerEngine> make_shared_beside(const World& world, const LayerSpec& spec,
                                                const MoeWeights& weights,
                                                const LayerOptions& options,
                                                std::shared_ptr<PassMemory> memory,
                                                const EngineMaker& make,
                                                const std::function<NoRouting()>& no_routing) {
  return std::make_unique<SharedBeside>(world, spec, weights, options, std::move(memory), make,
                                        no_routing);
}

}  // namespace switchyard
