// Workspace: slots of memory, each made by an engine.
#include "switchyard/workspace.h"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>

#include "base/limits.h"
#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "layer/compute.h"
#include "layer/pass_memory.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

constexpr const char* kName = "the workspace";

constexpr int kMostSlots = 16;

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void check_options(std::span<const LayerSpec> specs, const WorkspaceOptions& options) {
  if (specs.empty()) refuse("a workspace for no layers; give the spec of the largest");
  for (const LayerSpec& spec : specs) validate(spec);
  require_max_tokens(options.max_tokens);
  if (options.slots < 1 || options.slots > kMostSlots) {
    refuse(fmt::format("slots is {}; use 1 to {}", options.slots, kMostSlots));
  }
  check_compute_type(options.compute);
  if (options.weights && !is_four_bit(*options.weights)) {
    refuse(fmt::format("weights is {}; give f4_e2m1 or u4 for weights of four bits, or leave it",
                       to_string(*options.weights)));
  }
  require_threads(options.num_threads);
  require_sms("reserved_sms", options.reserved_sms);
  require_device(options.device);
  if (options.backend != Backend::kCpu && options.backend != Backend::kCuda) {
    refuse(fmt::format("backend is {}; use Backend::kCpu or Backend::kCuda",
                       static_cast<int>(options.backend)));
  }
  const bool cpu = options.backend == Backend::kCpu;
  if (cpu && (options.device != -1 || options.reserved_sms != 0)) {
    refuse("device or reserved_sms is set, but the backend is cpu; use Backend::kCuda");
  }
  if (cpu && options.allocator) {
    refuse(
        "an allocator is given, but the backend is cpu, which commits memory as it is used; use "
        "Backend::kCuda, or leave it empty");
  }
  if (!cpu && options.num_threads != 0) {
    refuse(fmt::format("num_threads is {}, but the backend is cuda, which has none; leave it at 0",
                       options.num_threads));
  }
  if ((options.allocator.allocate == nullptr) != (options.allocator.free == nullptr)) {
    refuse("an allocator with one function of two; give allocate and free, or neither");
  }
}

}  // namespace

Workspace::Workspace(const World& world, std::span<const LayerSpec> specs,
                     const WorkspaceOptions& options)
    : state_(make_shared_here<State>()) {
  attempt_together(world.fabric(), [&] {
    check_options(specs, options);
    if (options.backend == Backend::kCuda) require_one_host(world.fabric(), kGpuRanks);
  });
  state_->options = options;
  for (int i = 0; i < options.slots; ++i) {
    const std::uint64_t id = agree_on_memory(world.fabric(), nullptr);
    state_->slots.push_back(options.backend == Backend::kCpu
                                ? cpu::make_memory(world, specs, options, id)
                                : gpu::make_memory(world, specs, options, id));
  }
}
Workspace::Workspace(const World& world, const LayerSpec& largest, const WorkspaceOptions& options)
    : Workspace(world, std::span(&largest, 1), options) {}
Workspace::~Workspace() = default;
Workspace::Workspace(const Workspace&) = default;
Workspace& Workspace::operator=(const Workspace&) = default;
Workspace::Workspace(Workspace&&) noexcept = default;
Workspace& Workspace::operator=(Workspace&&) noexcept = default;

std::uint64_t Workspace::bytes() const {
  const auto& slots = held(state_, kName).slots;
  return std::accumulate(slots.begin(), slots.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const auto& slot) { return sum + slot->bytes(); });
}
int Workspace::slots() const { return static_cast<int>(held(state_, kName).slots.size()); }
Backend Workspace::backend() const { return held(state_, kName).options.backend; }
bool Workspace::released() const {
  return std::ranges::any_of(held(state_, kName).slots,
                             [](const auto& slot) { return slot->released(); });
}

void Workspace::release() {
  const State& state = held_here(state_, kName);
  attempt_together(state.slots.front()->world().fabric(), [&] {
    for (const auto& slot : state.slots) slot->end_passes();
  });
  for (const auto& slot : state.slots) slot->release();
}

void Workspace::restore() {
  for (const auto& slot : held_here(state_, kName).slots) slot->restore();
}

}  // namespace switchyard
