// The GPU engine: it prepares everything once, so that a forward pass is one launch.
#include "layer/engine.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <new>
#include <nvtx3/nvtx3.hpp>

#include "fabric/agreement.h"
#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "gpu/host/abort_link.h"
#include "gpu/host/activation_form.h"
#include "gpu/host/cuda_error.h"
#include "gpu/host/device_scope.h"
#include "gpu/host/few_tokens.h"
#include "gpu/host/mapped_memory.h"
#include "gpu/host/pass_memory.h"
#include "gpu/host/shown_word.h"
#include "gpu/host/tensor_map.h"
#include "gpu/host/trace.h"
#include "gpu/host/weights.h"
#include "gpu/schedule/rules.h"
#include "layer/agreement.h"
#include "layer/call.h"
#include "layer/compute.h"
#include "layer/failure.h"
#include "layer/recorder.h"
#include "layer/shared_beside.h"
#include "protocol/wait.h"
#include "routing/route.h"

namespace switchyard::gpu {
namespace {

// The profilers' domain of the host's calls.
struct NvtxDomain {
  static constexpr const char* name = "switchyard";
};
using HostRange = nvtx3::scoped_range_in<NvtxDomain>;

[[noreturn]] void unsupported(const std::string& message) {
  throw Error(ErrorCode::kUnsupported, message);
}

// Chooses it on all ranks or none: others may have no reason to refuse, and would wait for this
// one. A rank without experts has the kernel of the others.
KernelEntry choose_kernel(const World& world, const LayerSpec& spec, const MoeWeights& weights,
                          const LayerOptions& options) {
  Fabric& fabric = world.fabric();
  attempt_together(fabric, [&] {
    validate(spec);
    validate(options.placement, spec.num_experts);
    const int places = options.placement.num_places(spec.num_experts);
    validate(spec, weights, own_experts(places, world.rank(), world.size()), places);
    for (const FfnWeights& expert : weights.experts) {
      if (!expert.up.empty()) require_multiplied(expert.up);
    }
  });
  const std::optional<DType> routed = agree_on_routed_type(fabric, weights);
  const DType compute = agree_on_compute(fabric, weights, options.compute);
  KernelEntry kernel{};
  attempt_together(fabric, [&] {
    if (routed && is_four_bit(*routed)) {
      for (const FfnWeights& expert : weights.experts) {
        if (!expert.up.empty()) require_boxes(expert.up, compute);
      }
      kernel = find_kernel(spec.activation, *routed, compute, options.diagnostics.trace);
      return;
    }
    // Weights that need fp32 are computed in bf16, unless the caller asked for fp32: that is
    // refused.
    const bool rounds = compute == DType::kF32 && !options.compute;
    const DType type = rounds ? DType::kBF16 : compute;
    kernel = find_kernel(spec.activation, type, type, options.diagnostics.trace);
  });
  return kernel;
}

class Engine final : public LayerEngine {
 public:
  Engine(const World& world, const LayerSpec& spec, const MoeWeights& weights,
         const LayerOptions& options, std::shared_ptr<PassMemory> memory);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void forward(const ForwardInput& input, const ForwardOutput& output) override;
  void check() override;
  void refresh(void* stream) override;
  bool copies() const override {
    return std::ranges::any_of(on_device_.layouts(),
                               [](const WeightLayout* layout) { return !layout->empty(); });
  }
  void rebind(const MoeWeights& weights, const ExpertPlacement* placement) override;
  const ForwardStats& stats() override;
  Recording recording() override;
  bool records() const override { return options_.diagnostics.recorded_steps > 0; }
  PassTrace trace() override;
  bool traces() const override { return trace_.has_value(); }
  const LayerSpec& spec() const override { return spec_; }
  Backend backend() const override { return Backend::kCuda; }
  DType compute() const override { return policy().numerics.token.compute; }
  int num_threads() const override { return 0; }
  std::uint64_t workspace_bytes() const override {
    return memory_->private_bytes() + ring_.bytes() + block_rows_.bytes() +
           (trace_ ? trace_->bytes() : 0);
  }

 private:
  const PolicyFacts& policy() const { return kernel_.policy; }
  int num_places() const { return options_.placement.num_places(spec_.num_experts); }
  int expert_of(int place) const {
    const std::vector<std::int32_t>& experts = options_.placement.expert_at;
    return experts.empty() ? place : experts[static_cast<std::size_t>(place)];
  }
  DeviceBuffer upload_places(const ExpertPlacement& placement) const;
  void choose_grid();
  unsigned choose_low_grid() const;
  int resident_blocks(LayerKernel kernel, std::uint32_t shared_bytes) const;
  TileOrder order_of(unsigned blocks, const PolicyFacts& facts) const;
  void describe_low();
  std::uint64_t patience_ns_for(std::int64_t tokens) const;
  void require_room();
  PassSizes pass_sizes() const;
  bool runs_few_tokens(const ForwardInput& input, const CallParams& call, bool small) const;
  std::optional<std::int64_t> low_tokens(const ForwardInput& input) const;
  CallParams route_before(CallParams& call) const;
  void route(CallParams& routing, cudaStream_t stream);
  bool distributed() const { return world_.size() > 1; }
  // Describes a launch. Fills `attributes`, to which the result points.
  static constexpr unsigned kMaxAttributes = 3;
  cudaLaunchConfig_t launch_config(Launch launch, cudaLaunchAttribute* attributes,
                                   cudaStream_t stream) const;
  void describe_memory();
  void count_traffic(const std::uint32_t* counters);
  std::uint64_t recorded_steps() const;
  std::string describe(const BadId& bad) const;

  World world_;
  LayerSpec spec_;
  MoeWeights weights_;  // for their shapes; owner released if all were copied
  LayerOptions options_;
  int device_;
  KernelEntry kernel_;
  FewKernel few_kernel_ = nullptr;
  bool few_over_ranks_ = false;  // all ranks' passes of few tokens may run it
  unsigned grid_ = 0;
  unsigned paired_grid_ = 0;
  unsigned low_grid_ = 0;  // 0: no pass is low
  struct Weights {
    DeviceFfn routed, shared;
    DeviceGate gate;
    std::array<const WeightLayout*, 3> layouts() const {
      return {&routed.layout(), &shared.layout(), &gate.layout()};
    }
  };
  Weights lay_out_weights(const MoeWeights& weights) const;
  void describe_weights();
  Weights on_device_;
  bool let_go_ = false;    // the weights' owner has been released
  DeviceBuffer place_of_;  // see RouterParams
  std::shared_ptr<PassMemory> memory_;
  std::optional<PassLayout> layout_;
  std::optional<unsigned> described_;  // the memory's version() then
  DeviceBuffer counts_;                // see LayerParams::stats
  DeviceBuffer ring_;                  // see LayerParams::ring
  DeviceBuffer block_rows_;            // see ListParams
  // Placements by the step from which they hold, if a recording layer got new ones.
  std::vector<std::pair<std::uint64_t, ExpertPlacement>> placements_;
  std::optional<DeviceTrace> trace_;
  std::unique_ptr<MappedMemory<Failures>> failures_ = std::make_unique<MappedMemory<Failures>>();
  LayerParams params_{}, low_params_{}, tall_low_params_{};
  ForwardStats stats_;
  std::unique_ptr<AbortLink> abort_link_;
  std::unique_ptr<ShownWord> shown_;             // uses the heap and the link
  std::optional<Fabric::AbortHook> abort_hook_;  // so does this
};

Engine::Engine(const World& world, const LayerSpec& spec, const MoeWeights& weights,
               const LayerOptions& options, std::shared_ptr<PassMemory> memory)
    : world_(world),
      spec_(spec),
      weights_(weights),
      options_(options),
      device_(options.cuda.device),
      kernel_(choose_kernel(world, spec, weights, options)),
      memory_(std::move(memory)) {
  if (world.size() > kMaxDeviceRanks) {
    unsupported(fmt::format("the world has {} ranks; the GPU engine runs on up to {}", world.size(),
                            kMaxDeviceRanks));
  }
  if (spec.hidden % policy().numerics.alignment() != 0) {
    unsupported(fmt::format("hidden size {}; in {} the GPU engine needs a multiple of {}",
                            spec.hidden, to_string(policy().numerics.token.compute),
                            policy().numerics.alignment()));
  }
  const int cells = spec.top_k + (spec.shared_intermediate > 0 ? 1 : 0);
  if (cells > protocol::kMaxTopK) {
    unsupported(
        fmt::format("top_k {} with the shared expert; the GPU engine sums up to {} outputs "
                    "for a token",
                    spec.top_k, protocol::kMaxTopK));
  }
  if (num_places() > kMaxDeviceExperts) {
    unsupported(fmt::format(
        "{} places of experts; the GPU engine has up to {}: use fewer replicas or more layers, or "
        "the CPU engine",
        num_places(), kMaxDeviceExperts));
  }
  routing::check_routable(spec);
  if (distributed())
    agree(world.fabric(), {spec, options.max_tokens, policy().numerics.token.compute,
                           summary_of(options.placement), false, policy().numerics.weight.storage});
  const protocol::ExpertPartition experts{num_places(), world.size()};
  params_.first_expert = experts.begin(world.rank());
  params_.local_experts = experts.count(world.rank());
  keep_agreed_compute(world, spec, policy().numerics.token.compute, options_);
  params_.levels = distributed() ? static_cast<std::uint32_t>(experts.max_count()) : 1;
  for (int r = 0; r <= world.size(); ++r) params_.rank_begin[r] = experts.begin(r);
  const DeviceScope scope(device_);
  attempt_together(world_.fabric(), [&] {
    place_of_ = upload_places(options.placement);
    on_device_ = lay_out_weights(weights);
  });
  params_.routing = routing::make_device_routing(spec);
  params_.deadline_ns = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(options.deadline).count());
  params_.block_deadline_ns = block_deadline(params_.deadline_ns);
  params_.hidden = spec.hidden;
  params_.num_experts = num_places();
  params_.num_routed = spec.num_experts;
  params_.top_k = spec.top_k;
  params_.cells_per_token = cells;
  params_.max_tokens = options.max_tokens;
  params_.weight_on_input = spec.weight_on_input;
  params_.form = form_of(spec.activation);
  params_.limit = spec.activation.limit;
  params_.up_bias = spec.activation.up_bias;
  params_.clamps = std::isfinite(params_.limit) || params_.up_bias != 0;
  describe_weights();
  attempt_together(world_.fabric(), [&] { choose_grid(); });
  if (distributed()) {
    require_room();
    // (A rank that records or traces runs other kernels.)
    const bool mine = !options.diagnostics.trace && options.diagnostics.recorded_steps == 0 &&
                      options.cuda.schedule.small_tokens != 0 && num_places() >= world.size() &&
                      spec.capacity_factor == 0;
    few_over_ranks_ = std::ranges::all_of(gather(world.fabric(), unsigned{mine}),
                                          [](unsigned can) { return can != 0; });
  }
  const PassSizes sizes = pass_sizes();
  params_.order = sizes.order;
  static_cast<LargeStorage&>(params_) = num_places() > kUsualExperts ? kernel_.many : kernel_.usual;
  layout_.emplace(sizes);
  const std::uint64_t id = agree_on_memory(world_.fabric(), memory_.get());
  if (memory_ == nullptr) {
    memory_ = std::make_shared<PassMemory>(world_, device_, layout_->needs(), id);
  }
  attempt_together(world_.fabric(), [&] {
    memory_->require_room(layout_->needs(), device_);
    if (options_.diagnostics.trace) trace_.emplace(grid_);
    counts_ = DeviceBuffer((static_cast<std::size_t>(num_places()) + 1) * sizeof(std::uint32_t));
    SWITCHYARD_CUDA(cudaMemset(counts_.data(), 0, counts_.bytes()));
    SWITCHYARD_CUDA(cudaDeviceSynchronize());
    params_.stats = reinterpret_cast<std::uint32_t*>(counts_.data());
    if (spec_.capacity_factor > 0) {
      const auto blocks = static_cast<std::size_t>(device_info(device_).num_sms);
      block_rows_ =
          DeviceBuffer(blocks * static_cast<std::size_t>(num_places()) * sizeof(std::uint32_t));
      params_.block_rows = reinterpret_cast<std::uint32_t*>(block_rows_.data());
    }
    if (options_.diagnostics.recorded_steps > 0) {
      params_.ring.slots = static_cast<std::uint32_t>(options_.diagnostics.recorded_steps);
      params_.ring.experts = static_cast<std::uint32_t>(num_places());
      ring_ = DeviceBuffer(params_.ring.num_words() * sizeof(std::uint64_t));
      SWITCHYARD_CUDA(cudaMemset(ring_.data(), 0, ring_.bytes()));
      params_.ring.words = reinterpret_cast<std::uint64_t*>(ring_.data());
      placements_.emplace_back(0, options_.placement);
    }
    params_.failures = failures_->on_device();
    describe_memory();
    abort_link_ = std::make_unique<AbortLink>(device_);
    if (distributed()) {
      shown_ = std::make_unique<ShownWord>(world_.fabric().view(), params_.heaps, *abort_link_);
    }
  });
  abort_hook_.emplace(world_.fabric(), [this] {
    if (memory_->released()) return;
    abort_link_->raise(params_.heaps, world_.fabric().abort_word());
  });
}

// Uses weights in place or copies them; copies are complete when it returns.
Engine::Weights Engine::lay_out_weights(const MoeWeights& weights) const {
  Weights result;
  result.routed = DeviceFfn(policy().numerics,
                            std::span(weights.experts)
                                .subspan(static_cast<std::size_t>(params_.first_expert),
                                         static_cast<std::size_t>(params_.local_experts)),
                            spec_.hidden, spec_.intermediate, spec_.activation.gated);
  if (spec_.shared_intermediate > 0) {
    result.shared = DeviceFfn(policy().numerics, {&weights.shared, 1}, spec_.hidden,
                              spec_.shared_intermediate, spec_.activation.gated);
  }
  result.gate = DeviceGate(spec_, weights);
  SWITCHYARD_CUDA(cudaStreamSynchronize(nullptr));
  return result;
}

void Engine::describe_weights() {
  const Weights& weights = on_device_;
  // Host memory that was copied is not kept: it is as large as the model.
  const bool reads_again = weights.routed.borrows() || weights.shared.borrows() ||
                           std::ranges::any_of(weights.layouts(), [](const WeightLayout* layout) {
                             return layout->reads_device();
                           });
  let_go_ = weights_.owner != nullptr && !reads_again;
  if (let_go_) weights_.owner.reset();
  for (const auto& [ffn, device] :
       {std::pair{&params_.routed, &weights.routed}, {&params_.shared, &weights.shared}}) {
    const TokenMaps h_maps = ffn->h_maps;
    *ffn = device->params();
    ffn->h_maps = h_maps;
    ffn->more_of_first = (spec_.weight_on_input && ffn == &params_.routed) || params_.clamps ||
                         ffn->up_scale != nullptr || ffn->up_bias != nullptr;
    ffn->more_of_second = ffn->down_scale != nullptr || ffn->down_bias != nullptr;
  }
  weights.gate.describe(params_);
  params_.place_of = reinterpret_cast<const std::int32_t*>(place_of_.data());
}

void Engine::refresh(void* stream) {
  if (let_go_) {
    unsupported(
        "all weights were copied from host memory, which the layer does not hold on to; call "
        "rebind() with the weights, or give them without an owner");
  }
  const DeviceScope scope(device_);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  SWITCHYARD_CUDA(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture));
  for (const WeightLayout* const layout : on_device_.layouts()) {
    if (capture == cudaStreamCaptureStatusNone || layout->capturable()) continue;
    unsupported(
        "refresh() is captured in a graph, but weights that the layer copied are in host memory; "
        "put them into the device's, or call it outside of graphs");
  }
  for (const WeightLayout* const layout : on_device_.layouts()) layout->run(stream);
}

// Uploads the tables by which later passes find experts.
DeviceBuffer Engine::upload_places(const ExpertPlacement& placement) const {
  if (placement.expert_at.empty()) return {};
  const std::vector<std::int32_t> places =
      places_for(placement, spec_.num_experts, world_.rank(), world_.size());
  DeviceBuffer buffer(places.size() * sizeof(std::int32_t));
  buffer.upload(places.data(), buffer.bytes());
  return buffer;
}

void Engine::rebind(const MoeWeights& weights, const ExpertPlacement* placement) {
  check();
  if (placement != nullptr) {
    validate(*placement, spec_.num_experts);
    require_as_many_places(placement->num_places(spec_.num_experts), num_places());
    agree_on_placement(world_.fabric(), *placement);
  }
  validate(spec_, weights, own_experts(num_places(), world_.rank(), world_.size()), num_places());
  const DType compute = resolve_compute(weights, options_.compute);
  const bool rounds = compute == DType::kF32 && !options_.compute;
  require_same_weights(weights_, weights, policy().numerics.token.compute,
                       rounds ? DType::kBF16 : compute);
  const DeviceScope scope(device_);
  Weights laid_out = lay_out_weights(weights);
  weights_ = weights;
  if (placement != nullptr) {
    if (options_.diagnostics.recorded_steps > 0)
      placements_.emplace_back(recorded_steps(), *placement);
    place_of_ = upload_places(*placement);
    options_.placement = *placement;
  }
  on_device_ = std::move(laid_out);
  describe_weights();
  described_.reset();
}

// Freeing memory would wait for the device without a limit. So a thread that can be left behind
// waits for it first.
Engine::~Engine() {
  abort_hook_.reset();
  const bool idle = abort_link_ == nullptr || device_is_idle(device_, options_.deadline);
  if (idle) {
    shown_.reset();
    return;
  }
  abort_link_->raise(params_.heaps);
  if (device_is_idle(device_, std::chrono::seconds(1))) return;
  const auto leak = [](auto& owner) { (void)new (std::nothrow) auto(std::move(owner)); };
  leak(memory_);
  leak(counts_);
  leak(ring_);
  leak(on_device_);
  leak(place_of_);
  leak(trace_);
  leak(failures_);
  leak(shown_);
  leak(abort_link_);
}

// Lets the kernel use so much shared memory, and returns how many of its blocks a multiprocessor
// holds.
int Engine::resident_blocks(LayerKernel kernel, std::uint32_t shared_bytes) const {
  const auto* const function = reinterpret_cast<const void*>(kernel);
  SWITCHYARD_CUDA(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(shared_bytes)));
  int blocks = 0;
  SWITCHYARD_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &blocks, function, kernel_.shape.threads, shared_bytes));
  return blocks;
}

// Takes one block per multiprocessor. All of them must be resident at once.
void Engine::choose_grid() {
  const DeviceInfo info = device_info(device_);
  int blocks_per_sm = 1;
  for (const LayerKernel kernel : {kernel_.small, kernel_.large}) {
    blocks_per_sm = std::min(blocks_per_sm, resident_blocks(kernel, kernel_.shape.shared_bytes));
  }
  few_kernel_ = few_kernel(few_numbers(policy().numerics), spec_.activation.gated, distributed());
  SWITCHYARD_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void*>(few_kernel_),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(kMostFewSharedBytes)));
  if (blocks_per_sm < 1) {
    unsupported(
        fmt::format("device {} ({}) has no room for a block of {} threads and {} bytes of shared "
                    "memory; use an H100 or H200",
                    device_, info.name, kernel_.shape.threads, kernel_.shape.shared_bytes));
  }
  grid_ = static_cast<unsigned>(info.num_sms - options_.cuda.reserved_sms);
  // A cluster takes neighbouring multiprocessors, so fewer of them may fit.
  cudaLaunchAttribute attributes[kMaxAttributes]{};
  const cudaLaunchConfig_t config = launch_config(Launch::kPaired, attributes, nullptr);
  int clusters = 0;
  SWITCHYARD_CUDA(cudaOccupancyMaxActiveClusters(
      &clusters, reinterpret_cast<const void*>(kernel_.large), &config));
  paired_grid_ = std::min(grid_ / kPair, static_cast<unsigned>(clusters)) * kPair;
  low_grid_ = choose_low_grid();
}

// Returns the blocks of low passes. All of them are resident at once, two on each multiprocessor.
// Spread over more multiprocessors, they would leave none to others.
unsigned Engine::choose_low_grid() const {
  const KernelEntry::Low& low = kernel_.low;
  if (low.large == nullptr || options_.cuda.reserved_sms != 0 || num_places() > kUsualExperts ||
      spec_.capacity_factor > 0 || spec_.shared_intermediate > 0) {
    return 0;
  }
  int blocks = low.blocks_per_sm;
  for (const LayerKernel kernel : {low.small, low.large, low.tall}) {
    if (kernel == nullptr) continue;
    blocks = std::min(blocks, resident_blocks(kernel, low.shared_bytes));
  }
  return blocks < low.blocks_per_sm ? 0 : static_cast<unsigned>(low.blocks_per_sm) * grid_;
}

// Ranks on one device wait for each other, so all of their blocks must find room on it.
void Engine::require_room() {
  const std::vector<DeviceSite> sites = gather_device_sites(world_.fabric());
  const std::vector<unsigned> grids = gather(world_.fabric(), grid_);
  const char* const mine = sites[static_cast<std::size_t>(world_.rank())].bus_id;
  attempt_together(world_.fabric(), [&] {
    std::vector<int> sharing;
    unsigned blocks = 0;
    for (std::size_t r = 0; r < sites.size(); ++r) {
      if (std::strcmp(sites[r].bus_id, mine) != 0) continue;
      sharing.push_back(static_cast<int>(r));
      blocks += grids[r];
    }
    const int sms = device_info(device_).num_sms;
    if (blocks <= static_cast<unsigned>(sms)) return;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} share the GPU {} and want {} of its {} SMs; give each rank a GPU "
                            "of its own (device), or leave SMs to the others (reserved_sms)",
                            list_ranks(sharing), mine, blocks, sms));
  });
}

TileOrder Engine::order_of(unsigned blocks, const PolicyFacts& facts) const {
  int depth = std::max(1, params_.routed.intermediate);
  if (spec_.shared_intermediate > 0) depth = std::min(depth, params_.shared.intermediate);
  return tile_order(facts, options_.cuda.schedule, blocks, params_.routed.gemm1_rows,
                    params_.shared.gemm1_rows, depth);
}

// Makes what low passes see of the layer, whenever anything of it has changed.
void Engine::describe_low() {
  if (low_grid_ == 0) return;
  const auto describe = [&](LayerParams& params, const LargeStorage& storage, int rows, int parts) {
    params = params_;
    static_cast<LargeStorage&>(params) = storage;
    PolicyFacts low = policy();
    low.tile.token_rows.max_height = rows;
    low.stage_parts = parts;
    params.order = order_of(low_grid_, low);
    layout_->cut_slots(params, rows);
  };
  const KernelEntry::Low& low = kernel_.low;
  describe(low_params_, low.storage, kLowRows, low.parts);
  describe(tall_low_params_, low.tall_storage, low.tall_rows, low.tall_parts);
}

std::uint64_t Engine::patience_ns_for(std::int64_t tokens) const {
  if (!distributed()) return kWaitsForAll;
  if (options_.patience) {
    if (*options_.patience >= options_.deadline) return kWaitsForAll;
    return static_cast<std::uint64_t>(options_.patience->count()) * 1000;
  }
  if (tokens < kLeastTokensOfRounds) return kWaitsForAll;
  const double expert = static_cast<double>(params_.hidden) *
                        (params_.routed.gemm1_rows + params_.routed.intermediate);
  const double shared = static_cast<double>(params_.hidden) *
                        (params_.shared.gemm1_rows + params_.shared.intermediate);
  return static_cast<std::uint64_t>(patience_ns(
      {tokens, num_places(), spec_.top_k, world_.size(),
       params_.local_experts * expert * policy().numerics.weight_bits() / 8,
       static_cast<double>(tokens) * (spec_.top_k * expert + shared), policy().numerics.scaled()}));
}

PassSizes Engine::pass_sizes() const {
  PassSizes sizes;
  sizes.policy = policy();
  sizes.order = order_of(grid_, policy());
  if (low_grid_ != 0) {
    sizes.low_rows =
        low_rows_here(options_.cuda.schedule, kernel_.low.tall_rows, num_places(), world_.size());
  }
  sizes.num_ranks = world_.size();
  sizes.num_places = num_places();
  sizes.own_places = params_.local_experts;
  sizes.hidden = spec_.hidden;
  sizes.intermediate = params_.routed.intermediate;
  sizes.shared_intermediate = params_.shared.intermediate;
  sizes.top_k = spec_.top_k;
  sizes.max_tokens = options_.max_tokens;
  sizes.gate_columns = params_.gate_columns;
  sizes.weighs_input = spec_.weight_on_input;
  sizes.has_shared = spec_.shared_intermediate > 0;
  return sizes;
}

// Whether the kernel for few tokens runs the pass. Over ranks all must answer alike, so what only
// this rank knows is no reason for another kernel.
bool Engine::runs_few_tokens(const ForwardInput& input, const CallParams& call, bool small) const {
  if (!distributed()) {
    return small && few_tokens_serve(params_, policy(), call.tokens) &&
           few_tokens_take(params_, call);
  }
  const int most = input.max_tokens_per_rank;
  if (!few_over_ranks_ || most == 0 || !few_tokens_serve(params_, policy(), most)) return false;
  // (route_before() has made `call` one that gives the routing, perhaps.)
  if (call.tokens != 0 && (input.topk_ids.empty() || !few_tokens_take(params_, call))) {
    unsupported(fmt::format(
        "max_tokens_per_rank is {}, and passes of so few tokens over ranks take bf16 activations, "
        "topk_ids with topk_weights, and outputs in bf16 that are not accumulated; give those, or "
        "max_tokens_per_rank 0 on all ranks",
        most));
  }
  return true;
}

// See LaunchFacts.
std::optional<std::int64_t> Engine::low_tokens(const ForwardInput& input) const {
  if (low_grid_ == 0) return std::nullopt;
  if (!distributed()) return input.activations.rows;
  if (input.max_tokens_per_rank == 0) return std::nullopt;
  return input.max_tokens_per_rank;
}

// Describes the memory to kernels: at first, and when its addresses have changed.
void Engine::describe_memory() {
  layout_->describe(*memory_, params_);
  described_ = memory_->version();
  describe_low();
}

void Engine::forward(const ForwardInput& input, const ForwardOutput& output) {
  const HostRange range{"forward", nvtx3::payload{input.activations.rows}};
  check_call(spec_, weights_, options_.max_tokens, world_.rank(), input, output,
             policy().numerics.token.compute);
  check();
  require_restored(*memory_);
  if (described_ != memory_->version()) describe_memory();
  const MatrixView& x = input.activations;
  CallParams call{};
  call.x = x.data;
  call.x_stride = x.row_stride;
  call.x_type = x.dtype;
  call.x_scales = x.f32_scale();
  call.x_scale_stride = x.scale_stride;
  call.tokens = static_cast<std::uint32_t>(x.rows);
  call.capacity = expert_capacity(spec_, x.rows);
  call.y = output.data;
  call.y_stride = output.row_stride == 0 ? spec_.hidden : output.row_stride;
  call.y_type = output.dtype;
  call.scale = output.scale;
  call.accumulate = output.accumulate;
  call.given_ids = input.topk_ids.empty() ? nullptr : input.topk_ids.data();
  call.given_weights = input.topk_weights.data();
  call.wide_ids = input.topk_ids.dtype() == DType::kI64;
  call.bf16_weights = input.topk_weights.dtype() == DType::kBF16;
  call.large_ids_are_none = options_.large_ids_are_none;
  call.skips_bad_ids = options_.bad_ids == BadIds::kSkip;
  call.logits = input.logits.data;
  call.logits_stride = input.logits.row_stride;
  call.bf16_logits = input.logits.dtype == DType::kBF16;
  call.token_ids = input.token_ids.data();
  call.out_ids = output.topk_ids.empty() ? nullptr : output.topk_ids.data();
  call.out_weights = output.topk_weights.empty() ? nullptr : output.topk_weights.data();
  if (trace_) call.trace = trace_->buffer(options_.diagnostics.slow_role);
  require_aligned("activations", call.x, call.x_stride, call.x_type, x.rows);
  require_aligned("outputs", call.y, call.y_stride, call.y_type, x.rows);

  const bool gives_routing = call.given_ids != nullptr || call.logits != nullptr;
  call.gated = (on_device_.gate.has_router() && !gives_routing) || spec_.shared_sigmoid_gate;
  const DeviceScope scope(device_);
  const Launch launch =
      choose_launch(options_.cuda.schedule,
                    {x.rows, num_places(), spec_.top_k, world_.size(), policy().small_tokens,
                     policy().small_logits, paired_grid_ >= kPair, low_tokens(input),
                     kernel_.low.small != nullptr, kernel_.low.tall_rows});
  const bool small = launch == Launch::kSmall || launch == Launch::kSmallLow;
  const bool routes_first = is_low(launch) && x.rows != 0 && call.given_ids == nullptr;
  const bool in_place = small && !routes_first;  // it reads x's rows wherever they are
  const bool overlaps = x.rows > 1 && x.row_stride < spec_.hidden;
  call.converts = x.dtype == DType::kF32 || x.dtype == DType::kF16 ||
                  (!in_place && overlaps && x.dtype == DType::kBF16);
  if (call.gated && !in_place && x.rows != 0) {
    const bool dense = call.converts || x.rows == 1;
    call.x_map = rows_map(call.converts ? params_.converted : x.data, sizeof(std::uint16_t), x.rows,
                          spec_.hidden, dense ? spec_.hidden : x.row_stride, kGateBoxRows);
  }
  call.patience_ns = patience_ns_for(x.rows);
  std::optional<CallParams> routing;
  if (routes_first) routing = route_before(call);
  call.paired = launch == Launch::kPaired ? 1 : 0;
  const auto stream = static_cast<cudaStream_t>(input.stream);
  cudaLaunchAttribute attributes[kMaxAttributes]{};
  cudaLaunchConfig_t config = launch_config(launch, attributes, stream);
  if (runs_few_tokens(input, call, small)) {
    const std::int64_t rows = distributed() ? input.max_tokens_per_rank : x.rows;
    FewParams few = few_params(params_, call, on_device_.routed, policy(), rows);
    config = launch_config(Launch::kSmall, attributes, stream);
    config.blockDim = dim3(kFewThreads);
    config.dynamicSmemBytes =
        few_shared_bytes(few.operand_bytes, few_numbers(policy().numerics), distributed());
    void* arguments[] = {&few};
    const LaunchTurn turn;
    if (routing) route(*routing, stream);
    SWITCHYARD_CUDA(
        cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(few_kernel_), arguments));
    return;
  }
  LayerKernel kernel = nullptr;
  LayerParams* params = &params_;
  switch (launch) {
    case Launch::kSmall: kernel = kernel_.small; break;
    case Launch::kSmallLow: kernel = kernel_.low.small, params = &low_params_; break;
    case Launch::kLow: kernel = kernel_.low.large, params = &low_params_; break;
    case Launch::kTallLow: kernel = kernel_.low.tall, params = &tall_low_params_; break;
    case Launch::kSingle:
    case Launch::kPaired: kernel = kernel_.large; break;
  }
  void* arguments[] = {params, &call};
  const LaunchTurn turn;
  if (routing) route(*routing, stream);
  SWITCHYARD_CUDA(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments));
}

// Makes of a call that chooses its experts one that is given them, and returns the call that
// chooses them, to be launched before it.
CallParams Engine::route_before(CallParams& call) const {
  CallParams routing = call;
  routing.only_routes = true;
  routing.out_ids = nullptr;
  routing.out_weights = nullptr;
  call.gated = false;
  call.logits = nullptr;
  call.given_ids = params_.ids;
  call.given_weights = params_.weights;
  call.wide_ids = call.bf16_weights = false;
  if (call.converts) {
    call.x = params_.converted;
    call.x_stride = params_.hidden;
    call.x_type = DType::kBF16;
    call.converts = false;
  }
  return routing;
}

void Engine::route(CallParams& routing, cudaStream_t stream) {
  cudaLaunchAttribute attributes[kMaxAttributes]{};
  const cudaLaunchConfig_t config = launch_config(Launch::kSingle, attributes, stream);
  void* arguments[] = {&params_, &routing};
  SWITCHYARD_CUDA(
      cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel_.large), arguments));
}

cudaLaunchConfig_t Engine::launch_config(Launch launch, cudaLaunchAttribute* attributes,
                                         cudaStream_t stream) const {
  const bool paired = launch == Launch::kPaired, low = is_low(launch);
  unsigned count = 0;
  if (paired) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {kPair, 1, 1};
  }
  if (options_.cuda.cooperative_launch) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(paired ? std::max(paired_grid_, kPair) : low ? low_grid_ : grid_);
  config.blockDim = dim3(static_cast<unsigned>(kernel_.shape.threads));
  config.dynamicSmemBytes = low ? kernel_.low.shared_bytes : kernel_.shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return config;
}

std::string Engine::describe(const BadId& bad) const {
  const auto what = [&] {
    switch (bad.kind) {
      case BadId::Kind::kDuplicate:
        return fmt::format("token {} names expert {} twice; ids must be distinct within a token",
                           bad.token, bad.id);
      case BadId::Kind::kToken:
        return fmt::format(
            "token id {} of token {} is outside the routing table's vocabulary of {}", bad.id,
            bad.token, params_.hash_rows);
      case BadId::Kind::kTable:
        return fmt::format("the routing table has expert {} for token {}; expert ids are 0 to {}",
                           bad.id, bad.token, spec_.num_experts - 1);
      case BadId::Kind::kExpert: break;
    }
    return fmt::format("token {} has expert id {}; expert ids are 0 to {}, or {} for none",
                       bad.token, bad.id, spec_.num_experts - 1, kNoExpert);
  };
  return what() + " (in a pass that has ended; such slots were skipped)";
}

void Engine::check() {
  volatile Failures& failures = **failures_;
  throw_if_aborted(world_);
  if (failures.given_up == 0) {
    // This must not wait: on a device with other ranks, their passes may wait for this one's next.
    const std::uint64_t bad = failures.bad_id;
    if (bad == 0) return;
    failures.bad_id = 0;
    throw Error(ErrorCode::kInvalidArgument, describe(BadId::unpack(bad)));
  }
  // (A kernel gives up when a rank's record is complete and the word says whose it is.)
  const DeviceScope scope(device_);
  const auto control_of = [this](int rank) { return abort_link_->read(params_.heaps, rank); };
  std::uint64_t abort = control_of(world_.rank()).abort;
  if (abort == 0) abort = static_cast<std::uint64_t>(world_.rank()) + 1;
  throw_abort(world_, abort, [&](int failed) {
    protocol::FailureRecord record = control_of(failed).failure;
    ++record.epoch;  // kernels number passes from 0, callers from 1
    return followed(world_, record);
  });
}

const ForwardStats& Engine::stats() {
  require_restored(*memory_);
  const DeviceScope scope(device_);
  SWITCHYARD_CUDA(cudaDeviceSynchronize());
  check();
  SWITCHYARD_CUDA(
      cudaMemcpy(&stats_.epoch, params_.epoch_word, sizeof stats_.epoch, cudaMemcpyDeviceToHost));
  const auto experts = static_cast<std::size_t>(num_places());
  std::vector<std::uint32_t> rows(experts + 1), counters(kNumPassCounters);
  SWITCHYARD_CUDA(cudaMemcpy(rows.data(), params_.stats, rows.size() * 4, cudaMemcpyDeviceToHost));
  stats_.tokens = rows.back();
  rows.pop_back();
  // Passes are numbered from 0 on the device.
  const PassWords words = params_.pass_words[(stats_.epoch - 1) & 1];
  SWITCHYARD_CUDA(
      cudaMemcpy(counters.data(), words.counters(), counters.size() * 4, cudaMemcpyDeviceToHost));
  stats_.tokens_per_expert.assign(static_cast<std::size_t>(spec_.num_experts), 0);
  for (std::size_t p = 0; p < experts; ++p) {
    stats_.tokens_per_expert[static_cast<std::size_t>(expert_of(static_cast<int>(p)))] += rows[p];
  }
  stats_.nan_logits = counters[kNanLogits];
  stats_.nan_tokens = counters[kNanTokens];
  stats_.bad_slots = counters[kBadSlots];
  stats_.dropped_slots = counters[kDroppedSlots];
  if (distributed()) count_traffic(counters.data());
  stats_.heap_bytes_reserved = memory_->heap().bytes();
  stats_.workspace_bytes_used = memory_->private_bytes();
  return stats_;
}

// Counts the steps of passes that the device has done; waits for those that it was given.
std::uint64_t Engine::recorded_steps() const {
  SWITCHYARD_CUDA(cudaDeviceSynchronize());
  std::uint64_t steps = 0;
  SWITCHYARD_CUDA(cudaMemcpy(&steps, ring_.data(), sizeof steps, cudaMemcpyDeviceToHost));
  return steps;
}

Recording Engine::recording() {
  const HostRange range{"read recording"};
  const DeviceScope scope(device_);
  SWITCHYARD_CUDA(cudaDeviceSynchronize());
  check();
  std::vector<std::uint64_t> words(ring_.bytes() / sizeof(std::uint64_t));
  SWITCHYARD_CUDA(cudaMemcpy(words.data(), ring_.data(), ring_.bytes(), cudaMemcpyDeviceToHost));
  protocol::RoutingRing ring = params_.ring;
  ring.words = words.data();
  Recording recording = empty_recording(spec_, options_, world_);
  read_ring(
      ring,
      [&](std::uint64_t step, int place) {
        const auto after = std::find_if(placements_.begin(), placements_.end(),
                                        [&](const auto& its) { return its.first > step; });
        const std::vector<std::int32_t>& experts = std::prev(after)->second.expert_at;
        return experts.empty() ? place : experts[static_cast<std::size_t>(place)];
      },
      recording);
  return recording;
}

PassTrace Engine::trace() {
  const HostRange range{"read trace"};
  PassTrace trace;
  trace.rank = world_.rank();
  trace.num_ranks = world_.size();
  trace.epoch = stats().epoch;
  const DeviceScope scope(device_);
  trace_->read(trace.epoch, trace);
  for (TraceEvent& event : trace.events) {
    if (event.expert >= 0) event.expert = expert_of(event.expert);
  }
  return trace;
}

void Engine::count_traffic(const std::uint32_t* counters) {
  const auto others = static_cast<std::uint64_t>(world_.size() - 1);
  const std::uint64_t row_bytes = static_cast<std::uint64_t>(spec_.hidden) * 2;
  stats_.dispatch_bytes = counters[kSentTokens] * params_.heap.token_bytes() +
                          counters[kSentRows] * params_.heap.entry_bytes() +
                          counters[kDispatchBytes];
  stats_.combine_bytes = counters[kReturnedRows] * row_bytes + counters[kCombineBytes];
  if (counters[kDispatchBytes] != 0) {  // a pass of few tokens, whose data are their own signals
    stats_.signal_bytes = 0;
    return;
  }
  // Counts go two at a time, in words with the epoch.
  const auto pairs = static_cast<std::uint64_t>(protocol::ceil_div(num_places(), 2));
  stats_.signal_bytes = others * pairs * 2 * sizeof(std::uint64_t) + 4 * counters[kRaisedFlags];
}

std::unique_ptr<LayerEngine> make_fused(const World& world, const LayerSpec& spec,
                                        const MoeWeights& weights, const LayerOptions& options,
                                        std::shared_ptr<switchyard::PassMemory> memory) {
  // MoeLayer has seen that it is of this backend.
  return std::make_unique<Engine>(world, spec, weights, options,
                                  std::static_pointer_cast<PassMemory>(std::move(memory)));
}

// The routing of so many tokens to nobody.
NoRouting no_routing(int device, int tokens) {
  const DeviceScope scope(device);
  const auto repeated = [&](std::int32_t word) {
    const std::vector<std::int32_t> words(static_cast<std::size_t>(tokens), word);
    const auto buffer = std::make_shared<DeviceBuffer>(words.size() * sizeof(word));
    buffer->upload(words.data(), buffer->bytes());
    return std::shared_ptr<const void>(buffer, buffer->data());
  };
  return {repeated(kNoExpert), repeated(0)};
}

}  // namespace

std::unique_ptr<LayerEngine> make_engine(const World& world, const LayerSpec& spec,
                                         const MoeWeights& weights, const LayerOptions& options,
                                         std::shared_ptr<switchyard::PassMemory> memory) {
  const HostRange range{"make layer"};
  const std::optional<DType> routed = agree_on_routed_type(world.fabric(), weights);
  const bool four_bits = routed && is_four_bit(*routed);
  // The choice below decides which collective calls come next.
  agree(world.fabric(),
        {{"weights", std::string(four_bits ? to_string(*routed) : "of more than four bits")},
         {"spec.shared_intermediate", spec.shared_intermediate}},
        "give every rank the same layer and limits");
  if (!four_bits || spec.shared_intermediate == 0) {
    return make_fused(world, spec, weights, options, std::move(memory));
  }
  // A kernel multiplies experts of one type.
  return make_shared_beside(world, spec, weights, options, std::move(memory), make_fused,
                            [&] { return no_routing(options.cuda.device, options.max_tokens); });
}

}  // namespace switchyard::gpu
