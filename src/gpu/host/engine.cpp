// The GPU engine: what is prepared once, and the one launch that is a forward pass.
#include "layer/engine.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <concepts>
#include <cstring>
#include <future>
#include <limits>
#include <new>
#include <nvtx3/nvtx3.hpp>
#include <system_error>
#include <thread>

#include "base/quantize.h"
#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "gpu/host/abort_link.h"
#include "gpu/host/cuda_error.h"
#include "gpu/host/mapped_memory.h"
#include "gpu/host/symmetric_memory.h"
#include "gpu/host/tensor_map.h"
#include "gpu/host/trace.h"
#include "gpu/host/weights.h"
#include "gpu/schedule/rules.h"
#include "layer/agreement.h"
#include "layer/call.h"
#include "layer/compute.h"
#include "layer/failure.h"
#include "protocol/wait.h"
#include "routing/route.h"

namespace switchyard::gpu {
namespace {

// What profilers show of the host's calls, in a domain of their own.
struct NvtxDomain {
  static constexpr const char* name = "switchyard";
};
using HostRange = nvtx3::scoped_range_in<NvtxDomain>;

// Sizes within one allocation.
class Arena {
 public:
  std::size_t place(std::size_t bytes) {
    constexpr std::size_t kAlignment = 1024;
    const std::size_t at = size_;
    size_ += protocol::round_up(bytes, kAlignment);
    return at;
  }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_ = 0;
};

// Makes a device current for the calling thread while it lives.
class DeviceScope {
 public:
  explicit DeviceScope(int device) : before_(current_device()) {
    if (device != before_) set_device(device);
    changed_ = device != before_;
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_;
  bool changed_;
};

[[noreturn]] void unsupported(const std::string& message) {
  throw Error(ErrorCode::kUnsupported, message);
}

void require_aligned(const char* what, const void* data, std::int64_t row_stride, DType dtype,
                     std::int64_t rows) {
  const std::size_t stride = static_cast<std::size_t>(row_stride) * size_of(dtype);
  if (rows > 1 && row_stride < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} have a row stride of {} elements; the GPU engine takes rows in the "
                            "order of their addresses: pass a copy with row_stride >= 0",
                            what, row_stride));
  }
  if (rows == 0 || (reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride % 16 == 0)) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} start at {} with {} bytes from row to row; the GPU engine moves 16 "
                          "bytes at a time, so both must be multiples of 16",
                          what, data, stride));
}

KernelEntry choose_kernel(const World& world, const LayerSpec& spec, const MoeWeights& weights,
                          const LayerOptions& options) {
  validate(spec);
  validate(options.placement, spec.num_experts);
  const int places = options.placement.num_places(spec.num_experts);
  validate(spec, weights, own_experts(places, world.rank(), world.size()), places);
  const DType compute = resolve_compute(weights, options.compute);
  // What needs fp32 of itself gets it only if that was asked for, and then is refused.
  const bool rounds = compute == DType::kF32 && !options.compute;
  return find_kernel(spec.activation, rounds ? DType::kBF16 : compute, options.trace);
}

class Engine final : public LayerEngine {
 public:
  Engine(const World& world, const LayerSpec& spec, const MoeWeights& weights,
         const LayerOptions& options, const Engine* sharing);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void forward(const ForwardInput& input, const ForwardOutput& output) override;
  void check() override;
  void refresh(void* stream) override;
  void rebind(const MoeWeights& weights, const ExpertPlacement* placement) override;
  const ForwardStats& stats() override;
  PassTrace trace() override;
  bool traces() const override { return trace_.has_value(); }
  const LayerSpec& spec() const override { return spec_; }
  Backend backend() const override { return Backend::kCuda; }
  DType compute() const override { return policy().numerics.token; }
  int num_threads() const override { return 0; }
  std::uint64_t workspace_bytes() const override {
    return memory_->workspace.bytes() + (trace_ ? trace_->bytes() : 0);
  }

 private:
  const PolicyFacts& policy() const { return kernel_.policy; }
  int num_places() const { return options_.placement.num_places(spec_.num_experts); }
  int expert_of(int place) const {
    const std::vector<std::int32_t>& experts = options_.placement.expert_at;
    return experts.empty() ? place : experts[static_cast<std::size_t>(place)];
  }
  DeviceBuffer upload_places(const ExpertPlacement& placement) const;
  bool device_is_idle(std::chrono::milliseconds limit) const;
  bool device_is_idle() const { return device_is_idle(options_.deadline); }
  void choose_grid();
  void require_room();
  void choose_tile_order();
  bool distributed() const { return world_.size() > 1; }
  // Of single blocks or of pairs; fills `attributes`, to which it points.
  static constexpr unsigned kMaxAttributes = 2;
  cudaLaunchConfig_t launch_config(bool paired, cudaLaunchAttribute* attributes,
                                   cudaStream_t stream) const;
  std::uint32_t most_tiles(int experts, int ranks, int slots_per_token) const;
  std::vector<std::uint64_t> memory_shape() const;
  void share(const Engine* other);
  void lay_out_heap();
  void lay_out_workspace();
  void count_traffic(const std::uint32_t* counters);
  std::string describe(const BadId& bad) const;

  World world_;
  LayerSpec spec_;
  MoeWeights weights_;  // for their shapes; owner released if all were copied
  LayerOptions options_;
  int device_;
  KernelEntry kernel_;
  unsigned grid_ = 0;
  unsigned paired_grid_ = 0;
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
  bool let_go_ = false;    // of the weights' owner
  DeviceBuffer place_of_;  // see RouterParams
  // What passes work in, of one layer or of several that share it.
  struct Memory {
    std::uint64_t id;  // the same on all ranks, and no other's of theirs
    SymmetricMemory heap;
    DeviceBuffer workspace;
  };
  std::shared_ptr<Memory> memory_;
  std::optional<DeviceTrace> trace_;
  std::unique_ptr<MappedMemory<Failures>> failures_ = std::make_unique<MappedMemory<Failures>>();
  LayerParams params_{};
  ForwardStats stats_;
  std::unique_ptr<AbortLink> abort_link_;
  std::optional<Fabric::AbortHook> abort_hook_;  // uses the heap and the link
};

Engine::Engine(const World& world, const LayerSpec& spec, const MoeWeights& weights,
               const LayerOptions& options, const Engine* sharing)
    : world_(world),
      spec_(spec),
      weights_(weights),
      options_(options),
      device_(options.device),
      kernel_(choose_kernel(world, spec, weights, options)) {
  if (world.size() > kMaxDeviceRanks) {
    unsupported(fmt::format("the world has {} ranks; the GPU engine runs on up to {}", world.size(),
                            kMaxDeviceRanks));
  }
  if (spec.hidden % policy().alignment() != 0) {
    unsupported(fmt::format("hidden size {}; in {} the GPU engine needs a multiple of {}",
                            spec.hidden, to_string(policy().numerics.token), policy().alignment()));
  }
  if (spec.capacity_factor > 0) {
    unsupported(fmt::format("capacity factor {}; the GPU engine drops nothing, use 0",
                            spec.capacity_factor));
  }
  const int cells = spec.top_k + (spec.shared_intermediate > 0 ? 1 : 0);
  if (cells > protocol::kMaxTopK) {
    unsupported(
        fmt::format("top_k {} with the shared expert; the GPU engine sums up to {} outputs "
                    "for a token",
                    spec.top_k, protocol::kMaxTopK));
  }
  if (num_places() > kMaxDeviceExperts) {
    unsupported(fmt::format("{} experts, or places of them; the GPU engine has up to {}",
                            num_places(), kMaxDeviceExperts));
  }
  routing::check_routable(spec);
  if (distributed())
    agree(world.fabric(),
          {spec, options.max_tokens, policy().numerics.token, summary_of(options.placement)});
  const protocol::ExpertPartition experts{num_places(), world.size()};
  params_.first_expert = experts.begin(world.rank());
  params_.local_experts = experts.count(world.rank());
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
  params_.alpha = spec.activation.alpha;
  params_.limit = spec.activation.limit;
  params_.up_bias = spec.activation.up_bias;
  params_.clamps = std::isfinite(params_.limit) || params_.up_bias != 0;
  describe_weights();
  attempt_together(world_.fabric(), [&] { choose_grid(); });
  if (distributed()) require_room();
  choose_tile_order();
  share(sharing);
  lay_out_heap();
  // Nobody writes into a heap before its owner has come past here, with its flags zero.
  attempt_together(world_.fabric(), [&] {
    if (options_.trace) trace_.emplace(grid_);
    lay_out_workspace();  // and waits until the device has cleared all
    abort_link_ = std::make_unique<AbortLink>(device_);
  });
  abort_hook_.emplace(world_.fabric(), [this] { abort_link_->raise(params_.heaps); });
}

// In place, or copied when it returns.
Engine::Weights Engine::lay_out_weights(const MoeWeights& weights) const {
  Weights result;
  result.routed = DeviceFfn(policy(),
                            std::span(weights.experts)
                                .subspan(static_cast<std::size_t>(params_.first_expert),
                                         static_cast<std::size_t>(params_.local_experts)),
                            spec_.hidden, spec_.intermediate, spec_.activation.gated);
  if (spec_.shared_intermediate > 0) {
    result.shared = DeviceFfn(policy(), {&weights.shared, 1}, spec_.hidden,
                              spec_.shared_intermediate, spec_.activation.gated);
  }
  result.gate = DeviceGate(spec_, weights);
  SWITCHYARD_CUDA(cudaStreamSynchronize(nullptr));
  return result;
}

void Engine::describe_weights() {
  const Weights& weights = on_device_;
  // Memory of the host's that was copied is not held on to: it is as large as the model.
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

// Tables of the device's, by which passes that are enqueued later find experts.
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
  require_same_weights(weights_, weights, policy().numerics.token, rounds ? DType::kBF16 : compute);
  const DeviceScope scope(device_);
  Weights fresh = lay_out_weights(weights);
  weights_ = weights;
  if (placement != nullptr) {
    place_of_ = upload_places(*placement);
    options_.placement = *placement;
  }
  on_device_ = std::move(fresh);
  describe_weights();
}

// Freeing memory waits for the device, however long that takes: so that is waited for first, by
// somebody who can be left behind.
Engine::~Engine() {
  abort_hook_.reset();
  if (abort_link_ == nullptr || device_is_idle()) return;
  abort_link_->raise(params_.heaps);
  if (device_is_idle(std::chrono::seconds(1))) return;
  const auto leak = [](auto& owner) { (void)new (std::nothrow) auto(std::move(owner)); };
  leak(memory_);
  leak(on_device_);
  leak(place_of_);
  leak(trace_);
  leak(failures_);
  leak(abort_link_);
}

// Whether the device does all that it was given within that time.
bool Engine::device_is_idle(std::chrono::milliseconds limit) const {
  auto done = std::make_shared<std::promise<void>>();
  std::future<void> future = done->get_future();
  try {
    std::thread([done, device = device_] {
      // An error is for whoever asks the device next.
      if (cudaSetDevice(device) == cudaSuccess) (void)cudaDeviceSynchronize();
      done->set_value();
    }).detach();
  } catch (const std::system_error&) {
    return true;  // no thread can be had: freeing waits
  }
  return future.wait_for(limit) == std::future_status::ready;
}

// One block per multiprocessor, all of them resident at once, or not at all.
void Engine::choose_grid() {
  const DeviceInfo info = device_info(device_);
  int blocks_per_sm = 1;
  for (const LayerKernel kernel : {kernel_.small, kernel_.large}) {
    const auto* const function = reinterpret_cast<const void*>(kernel);
    SWITCHYARD_CUDA(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(kernel_.shape.shared_bytes)));
    int blocks = 0;
    SWITCHYARD_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &blocks, function, kernel_.shape.threads, kernel_.shape.shared_bytes));
    blocks_per_sm = std::min(blocks_per_sm, blocks);
  }
  if (blocks_per_sm < 1) {
    unsupported(
        fmt::format("device {} ({}) has no room for a block of {} threads and {} bytes of shared "
                    "memory; use an H100 or H200",
                    device_, info.name, kernel_.shape.threads, kernel_.shape.shared_bytes));
  }
  grid_ = static_cast<unsigned>(info.num_sms - options_.reserved_sms);
  // A cluster takes neighbouring multiprocessors, so fewer of them may fit.
  cudaLaunchAttribute attributes[kMaxAttributes]{};
  const cudaLaunchConfig_t config = launch_config(true, attributes, nullptr);
  int clusters = 0;
  SWITCHYARD_CUDA(cudaOccupancyMaxActiveClusters(
      &clusters, reinterpret_cast<const void*>(kernel_.large), &config));
  paired_grid_ = std::min(grid_ / kPair, static_cast<unsigned>(clusters)) * kPair;
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

void Engine::choose_tile_order() {
  constexpr std::uint32_t kLeastBandRows = 32 * kTileRows;
  std::uint32_t rows = params_.routed.gemm1_rows;
  if (spec_.shared_intermediate > 0 && (rows == 0 || params_.shared.gemm1_rows < rows)) {
    rows = params_.shared.gemm1_rows;
  }
  int depth = std::max(1, params_.routed.intermediate);
  if (spec_.shared_intermediate > 0) depth = std::min(depth, params_.shared.intermediate);
  const int stages = protocol::ceil_div(depth * policy().numerics.token_bytes(), kStageRowBytes);
  params_.order = choose_order(
      options_.schedule, {grid_, rows, static_cast<std::uint32_t>(policy().tile.weight_rows),
                          static_cast<std::uint32_t>(policy().tile.max_height()), kLeastBandRows,
                          static_cast<std::uint32_t>(stages)});
}

// What the layouts of heap and workspace follow from.
std::vector<std::uint64_t> Engine::memory_shape() const {
  const auto u = [](std::integral auto number) { return static_cast<std::uint64_t>(number); };
  return {u(device_),
          u(grid_),
          u(options_.max_tokens),
          u(policy().numerics.token_bytes()),
          u(spec_.hidden),
          u(num_places()),
          u(spec_.top_k),
          u(spec_.weight_on_input),
          u(params_.cells_per_token),
          u(params_.gate_columns),
          u(spec_.intermediate),
          u(params_.routed.gemm1_rows),
          u(spec_.shared_intermediate),
          u(params_.shared.gemm1_rows),
          h_slots(params_.order, std::numeric_limits<std::uint64_t>::max())};
}

// All ranks share the memory of the same layer, or none does, and it has yet to be allocated.
void Engine::share(const Engine* other) {
  static std::atomic<std::uint64_t> count{0};
  const std::vector<std::uint64_t> ids =
      gather(world_.fabric(), other != nullptr ? other->memory_->id << 1 | 1 : ++count << 1);
  for (std::size_t r = 1; r < ids.size(); ++r) {
    if ((ids[0] & 1) == (ids[r] & 1) && (ids[0] == ids[r] || (ids[0] & 1) == 0)) continue;
    throw Error(ErrorCode::kSpecMismatch,
                fmt::format("rank 0 and rank {} do not share the memory of the same layer; give "
                            "share_memory_with the same layer on all ranks, or on none",
                            r));
  }
  attempt_together(world_.fabric(), [&] {
    if (other == nullptr) return;
    if (&other->world_.fabric() != &world_.fabric()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "share_memory_with is a layer of another world; make both with the same one");
    }
    if (other->memory_shape() != memory_shape()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "share_memory_with is a layer of other sizes, types or options; share with one "
                  "that is like this one, or leave it null");
    }
  });
  memory_ =
      other != nullptr ? other->memory_ : std::make_shared<Memory>(Memory{ids[0] >> 1, {}, {}});
}

void Engine::lay_out_heap() {
  const auto tokens = static_cast<std::size_t>(options_.max_tokens);
  // Small passes may have several cells for a slot.
  const std::size_t cell_tokens =
      distributed()
          ? tokens
          : std::max(tokens, std::min(tokens, static_cast<std::size_t>(policy().small_tokens))
                                 << kMaxLog2Splits);
  protocol::Heap::Shape shape;
  shape.num_ranks = world_.size();
  shape.num_experts = num_places();
  shape.hidden = spec_.hidden;
  shape.max_tokens = options_.max_tokens;
  shape.element_bytes = policy().numerics.token_bytes();
  shape.scaled = policy().numerics.scaled();
  shape.weighs_input = spec_.weight_on_input;
  shape.max_tiles = most_tiles(num_places(), world_.size(), spec_.top_k);
  shape.cell_bytes = cell_tokens * static_cast<std::size_t>(params_.cells_per_token) *
                     static_cast<std::size_t>(spec_.hidden) * 2;
  params_.heap = protocol::Heap(shape);
  const bool shares = memory_->heap.bytes() != 0;
  if (!shares) memory_->heap = SymmetricMemory(world_.fabric(), params_.heap.bytes());
  const SymmetricMemory& heap = memory_->heap;
  params_.heaps.experts = {num_places(), world_.size()};
  params_.heaps.rank = world_.rank();
  for (int r = 0; r < world_.size(); ++r) params_.heaps.base[r] = heap.base(r);
  std::byte* const mine = heap.base(world_.rank());
  params_.mine = mine;
  params_.cells = reinterpret_cast<std::uint16_t*>(params_.heap.cells(mine));
  if (shares) return;
  // NaN in all that is not a flag, so that no pass can get away with reading what nobody wrote.
  const std::size_t flags = params_.heap.flag_bytes();
  SWITCHYARD_CUDA(cudaMemset(mine, 0, flags));
  SWITCHYARD_CUDA(cudaMemset(mine + flags, 0xff, params_.heap.bytes() - flags));
}

// Of tokens of so many ranks with so many slots each, over so many experts.
std::uint32_t Engine::most_tiles(int experts, int ranks, int slots_per_token) const {
  const std::int64_t rows = std::int64_t{options_.max_tokens} * ranks * slots_per_token;
  return static_cast<std::uint32_t>(experts + rows / policy().tile.max_height());
}

void Engine::lay_out_workspace() {
  const auto tokens = static_cast<std::size_t>(options_.max_tokens);
  const auto experts = static_cast<std::size_t>(num_places());
  const std::size_t slots = tokens * static_cast<std::size_t>(spec_.top_k);
  const auto height = static_cast<std::size_t>(policy().tile.max_height());
  const bool has_shared = spec_.shared_intermediate > 0;
  const std::size_t tiles = most_tiles(std::max(1, params_.local_experts), world_.size(),
                                       std::min(spec_.top_k, params_.local_experts)) +
                            (has_shared ? protocol::ceil_div(tokens, height) : 0);
  params_.max_tiles = static_cast<std::uint32_t>(tiles);
  params_.h_slots = static_cast<std::uint32_t>(h_slots(params_.order, tiles));
  params_.h_stride = static_cast<std::uint32_t>(
      std::max(params_.routed.intermediate, params_.shared.intermediate));

  // Logits of kNominalBlocks slices of tiles at most, or of one slice; see route/gate.cuh.
  const std::size_t logits_columns = static_cast<std::size_t>(params_.gate_columns);
  const std::size_t logits_tokens = std::max(
      tokens,
      std::min<std::size_t>(tokens * kMaxGateSlices, std::size_t{kNominalBlocks} * kGateBoxRows));
  const auto groups = [&](std::int64_t columns) {
    return policy().numerics.scaled()
               ? static_cast<std::uint32_t>(protocol::ceil_div<std::int64_t>(columns, kQuantGroup))
               : 0;
  };
  params_.x_groups = groups(spec_.hidden);
  params_.h_groups = groups(params_.h_stride);
  params_.group_words =
      distributed() ? 0 : protocol::ceil_div(params_.h_groups, PassWords::kGroupsOfWord);
  const std::size_t words = PassWords::count(static_cast<std::uint32_t>(experts), params_.max_tiles,
                                             params_.group_words) *
                            4;
  Arena arena;
  // First what must be zero when the first pass begins.
  const std::size_t epoch = arena.place(sizeof(std::uint64_t));
  const std::size_t readers = arena.place(sizeof(std::uint32_t));
  const std::size_t even = arena.place(words), odd = arena.place(words);
  const std::size_t stats = arena.place((experts + 1) * 4);
  const std::size_t zeroed = arena.size();
  const std::size_t logits = arena.place(logits_tokens * logits_columns * sizeof(float));
  const std::size_t ids = arena.place(slots * 4);
  const std::size_t weights =
      arena.place(tokens * static_cast<std::size_t>(params_.cells_per_token) * 4);
  const std::size_t positions = arena.place(slots * 4);
  const std::size_t lists = arena.place(experts * tokens * 4);
  const std::size_t converted = arena.place(tokens * static_cast<std::size_t>(spec_.hidden) * 2);
  // Rows that are packed together wait together: none for another's tile to leave its slot.
  params_.packed_slots = static_cast<std::uint32_t>(
      std::max<std::size_t>(params_.h_slots, std::min<std::size_t>(tiles, kPackedTogether)));
  const auto element = static_cast<std::size_t>(policy().numerics.token_bytes());
  const std::size_t packed =
      arena.place(params_.packed_slots * height * static_cast<std::size_t>(spec_.hidden) * element);
  const std::size_t h = arena.place(params_.h_slots * height * params_.h_stride * element);
  const std::size_t packed_scales =
      arena.place(params_.packed_slots * params_.x_groups * height * sizeof(float));
  const std::size_t h_scales =
      arena.place(params_.h_slots * params_.h_groups * height * sizeof(float));
  const std::size_t quantized =
      arena.place(policy().numerics.scaled() ? tokens * static_cast<std::size_t>(spec_.hidden) : 0);
  const std::size_t quantized_scales = arena.place(tokens * params_.x_groups * sizeof(float));
  DeviceBuffer& workspace = memory_->workspace;
  if (workspace.bytes() == 0) {  // not shared
    workspace = DeviceBuffer(arena.size());
    SWITCHYARD_CUDA(cudaMemset(workspace.data(), 0, zeroed));
    // NaN everywhere else, so that no pass can get away with reading what it did not write.
    SWITCHYARD_CUDA(cudaMemset(workspace.data() + zeroed, 0xff, arena.size() - zeroed));
    SWITCHYARD_CUDA(cudaDeviceSynchronize());
  }

  const auto at = [&]<typename T>(std::size_t offset, T*& pointer) {
    pointer = reinterpret_cast<T*>(workspace.data() + offset);
  };
  at(epoch, params_.epoch_word);
  at(readers, params_.readers);
  at(even, params_.pass_words[0].words);
  at(odd, params_.pass_words[1].words);
  at(stats, params_.stats);
  at(logits, params_.partial_logits);
  at(ids, params_.ids);
  at(weights, params_.weights);
  at(positions, params_.positions);
  at(lists, params_.lists);
  at(converted, params_.converted);
  at(packed, params_.packed);
  at(packed_scales, params_.packed_scales);
  at(h, params_.h);
  at(h_scales, params_.h_scales);
  at(quantized, params_.quantized);
  at(quantized_scales, params_.quantized_scales);
  params_.failures = failures_->on_device();
  const auto rows_of = [&](std::uint32_t n) {
    return std::int64_t{n} * policy().tile.max_height();
  };
  params_.x_maps = token_maps(params_.packed, policy().numerics.token_bytes(),
                              rows_of(params_.packed_slots), spec_.hidden, spec_.hidden);
  for (FfnParams* ffn : {&params_.routed, &params_.shared}) {
    if (ffn->intermediate == 0) continue;
    ffn->h_maps = token_maps(params_.h, policy().numerics.token_bytes(), rows_of(params_.h_slots),
                             ffn->intermediate, params_.h_stride);
  }
}

void Engine::forward(const ForwardInput& input, const ForwardOutput& output) {
  const HostRange range{"forward", nvtx3::payload{input.activations.rows}};
  check_call(spec_, weights_, options_.max_tokens, world_.rank(), input, output,
             policy().numerics.token);
  check();
  const MatrixView& x = input.activations;
  CallParams call{};
  call.x = x.data;
  call.x_stride = x.row_stride;
  call.x_type = x.dtype;
  call.x_scales = x.scale;
  call.x_scale_stride = x.scale_stride;
  call.tokens = static_cast<std::uint32_t>(x.rows);
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
  if (trace_) call.trace = trace_->buffer(options_.slow_role);
  require_aligned("activations", call.x, call.x_stride, call.x_type, x.rows);
  require_aligned("outputs", call.y, call.y_stride, call.y_type, x.rows);

  const DeviceScope scope(device_);
  const Launch launch = choose_launch(
      options_.schedule, {x.rows, num_places(), spec_.top_k, world_.size(), policy().small_tokens,
                          policy().small_logits, paired_grid_ >= kPair});
  const bool small = launch == Launch::kSmall, pairs = launch == Launch::kPaired;
  call.paired = pairs ? 1 : 0;
  const bool overlaps = x.rows > 1 && x.row_stride < spec_.hidden;
  call.converts = x.dtype == DType::kF32 || x.dtype == DType::kF16 ||
                  (!small && overlaps && x.dtype == DType::kBF16);
  const bool gives_routing = call.given_ids != nullptr || call.logits != nullptr;
  call.gated = (on_device_.gate.has_router() && !gives_routing) || spec_.shared_sigmoid_gate;
  if (call.gated && !small && x.rows != 0) {
    const bool dense = call.converts || x.rows == 1;
    call.x_map = rows_map(call.converts ? params_.converted : x.data, sizeof(std::uint16_t), x.rows,
                          spec_.hidden, dense ? spec_.hidden : x.row_stride, kGateBoxRows);
  }
  void* arguments[] = {&params_, &call};
  cudaLaunchAttribute attributes[kMaxAttributes]{};
  const cudaLaunchConfig_t config =
      launch_config(pairs, attributes, static_cast<cudaStream_t>(input.stream));
  SWITCHYARD_CUDA(cudaLaunchKernelExC(
      &config, reinterpret_cast<const void*>(small ? kernel_.small : kernel_.large), arguments));
}

cudaLaunchConfig_t Engine::launch_config(bool paired, cudaLaunchAttribute* attributes,
                                         cudaStream_t stream) const {
  unsigned count = 0;
  if (paired) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {kPair, 1, 1};
  }
  if (options_.cooperative_launch) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(paired ? std::max(paired_grid_, kPair) : grid_);
  config.blockDim = dim3(static_cast<unsigned>(kernel_.shape.threads));
  config.dynamicSmemBytes = kernel_.shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return config;
}

std::string Engine::describe(const BadId& bad) const {
  const auto what = [&] {
    switch (bad.kind) {
      case BadId::Kind::kTwice:
        return fmt::format("token {} names expert {} twice; ids must be distinct within a token",
                           bad.token, bad.id);
      case BadId::Kind::kToken:
        return fmt::format(
            "token id {} of token {} is outside the routing table's vocabulary of {}", bad.id,
            bad.token, params_.hash_rows);
      case BadId::Kind::kTable:
        return fmt::format("the routing table has expert {} for token {}; expert ids are 0 to {}",
                           bad.id, bad.token, spec_.num_experts - 1);
      case BadId::Kind::kExpert:
        break;
    }
    return fmt::format("token {} has expert id {}; expert ids are 0 to {}, or {} for none",
                       bad.token, bad.id, spec_.num_experts - 1, kNoExpert);
  };
  return what() + " (in a pass that has ended; such slots were skipped)";
}

void Engine::check() {
  volatile Failures& failures = **failures_;
  if (world_.fabric().was_aborted()) throw_called_off(world_.rank());
  if (failures.given_up == 0) {
    // Waits for nothing: on a device with other ranks, their passes may wait for this one's next.
    const std::uint64_t bad = failures.bad_id;
    if (bad == 0) return;
    failures.bad_id = 0;
    throw Error(ErrorCode::kInvalidArgument, describe(BadId::unpack(bad)));
  }
  const DeviceScope scope(device_);
  SWITCHYARD_CUDA(cudaDeviceSynchronize());
  const auto control_of = [this](int rank) {
    protocol::Control control;
    SWITCHYARD_CUDA(
        cudaMemcpy(&control, params_.heaps.control(rank), sizeof control, cudaMemcpyDeviceToHost));
    return control;
  };
  std::uint64_t abort = control_of(world_.rank()).abort;
  if (abort == 0) abort = static_cast<std::uint64_t>(world_.rank()) + 1;
  throw_abort(world_, abort, [&](int failed) {
    protocol::FailureRecord record = control_of(failed).failure;
    ++record.epoch;  // kernels number passes from 0, callers from 1
    return record;
  });
}

const ForwardStats& Engine::stats() {
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
  if (distributed()) count_traffic(counters.data());
  stats_.heap_bytes_reserved = memory_->heap.bytes();
  stats_.workspace_bytes_used = memory_->workspace.bytes();
  return stats_;
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
                          counters[kSentRows] * params_.heap.entry_bytes();
  stats_.combine_bytes = counters[kReturnedRows] * row_bytes;
  // Counts go two at a time, in words with the epoch.
  const auto pairs = static_cast<std::uint64_t>(protocol::ceil_div(num_places(), 2));
  stats_.signal_bytes = others * pairs * 2 * sizeof(std::uint64_t) + 4 * counters[kRaisedFlags];
}

}  // namespace

std::unique_ptr<LayerEngine> make_engine(const World& world, const LayerSpec& spec,
                                         const MoeWeights& weights, const LayerOptions& options,
                                         const LayerEngine* sharing) {
  const HostRange range{"make layer"};
  const auto* const other = dynamic_cast<const Engine*>(sharing);
  if (sharing != nullptr && other == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                "share_memory_with is a layer of the cpu backend; share with one of the GPU's");
  }
  return std::make_unique<Engine>(world, spec, weights, options, other);
}

}  // namespace switchyard::gpu
