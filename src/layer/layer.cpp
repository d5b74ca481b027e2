// MoeLayer: which engine, and whether the options make sense for it.
#include "switchyard/layer.h"

#include <fmt/core.h>

#include <utility>

#include "base/limits.h"
#include "base/posix.h"
#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "layer/compute.h"
#include "layer/engine.h"
#include "layer/pass_memory.h"
#include "layer/recorder.h"
#include "model/mapped_weights.h"

namespace switchyard {
namespace {

constexpr const char* kName = "the layer";

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void check_schedule(const Schedule& schedule) {
  const auto power_of_two = [](int n) { return n > 0 && (n & (n - 1)) == 0; };
  if (schedule.small_tokens &&
      (*schedule.small_tokens < 0 || *schedule.small_tokens > kMostSmallTokens)) {
    refuse(fmt::format("schedule.small_tokens is {}; use 0 for none, or at most {}",
                       *schedule.small_tokens, kMostSmallTokens));
  }
  if (schedule.low_rows && *schedule.low_rows < 0) {
    refuse(
        fmt::format("schedule.low_rows is {}; use a number of rows per expert, or 0 for no low "
                    "pass",
                    *schedule.low_rows));
  }
  if (schedule.paired_rows && *schedule.paired_rows < -1) {
    refuse(
        fmt::format("schedule.paired_rows is {}; use a number of rows per expert, 0 for pairs "
                    "wherever there can be, or -1 for none",
                    *schedule.paired_rows));
  }
  if (schedule.lag && (*schedule.lag < 1 || *schedule.lag > kMostLag)) {
    refuse(fmt::format("schedule.lag is {}; use 1 to {}", *schedule.lag, kMostLag));
  }
  if (schedule.band && (!power_of_two(*schedule.band) || *schedule.band > kMostBand)) {
    refuse(fmt::format("schedule.band is {}; use 1, or a power of two up to {}", *schedule.band,
                       kMostBand));
  }
  if (schedule.splits && (!power_of_two(*schedule.splits) || *schedule.splits > kMostSplits)) {
    refuse(fmt::format("schedule.splits is {}; use 1, 2 or {}", *schedule.splits, kMostSplits));
  }
}

void check_options(const LayerOptions& options) {
  require_max_tokens(options.max_tokens);
  require_threads(options.cpu.num_threads);
  require_device(options.cuda.device);
  require_sms("reserved_sms", options.cuda.reserved_sms);
  require_within("recorded_steps", options.diagnostics.recorded_steps, 0, kMostRecordedSteps,
                 " (0: nothing is recorded)");
  if (options.bad_ids > BadIds::kSkip) {
    refuse(fmt::format("bad_ids is {}; use BadIds::kRaise or BadIds::kSkip",
                       static_cast<int>(options.bad_ids)));
  }
  constexpr std::chrono::years kMostPatience(1);
  if (options.patience && (options.patience->count() < 0 || *options.patience > kMostPatience)) {
    refuse(fmt::format("patience is {} us; use 0 for none, or at most a year",
                       options.patience->count()));
  }
  if (options.compute) check_compute_type(*options.compute);
  check_schedule(options.cuda.schedule);
}

void check_cpu_options(const LayerOptions& options) {
  if (options.diagnostics.slow_role) {
    refuse("slow_role is set, but the backend is cpu; use on_step, or Backend::kCuda");
  }
  const auto refuse_set = [](const std::string& set, const char* value) {
    refuse(
        fmt::format("{}, but the backend is cpu; use Backend::kCuda, or leave it {}", set, value));
  };
  const CudaOptions& cuda = options.cuda;
  if (cuda.device != -1) refuse_set(fmt::format("device is {}", cuda.device), "at -1");
  if (cuda.reserved_sms != 0) {
    refuse_set(fmt::format("reserved_sms is {}", cuda.reserved_sms), "at 0");
  }
  if (cuda.schedule != Schedule{}) refuse_set("schedule is set", "empty");
  if (!cuda.cooperative_launch) refuse_set("cooperative_launch is false", "true");
}

// Kernels of GPUs multiply a shared expert in the type of the routed ones, and none is for both of
// four bits.
void require_wide_shared_expert(const FfnWeights& shared) {
  for (const auto& [name, matrix] :
       {std::pair{"gate", &shared.gate}, {"up", &shared.up}, {"down", &shared.down}}) {
    if (!is_four_bit(matrix->dtype)) continue;
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("shared.{} is {}, and the backend is cuda, which takes no shared expert "
                    "of four bits; convert it to bf16, or use the backend cpu",
                    name, to_string(matrix->dtype)));
  }
}

void check_cuda_options(const LayerOptions& options) {
  if (options.cpu.num_threads != 0) {
    refuse(fmt::format("num_threads is {}, but the backend is cuda, which has none; leave it at 0",
                       options.cpu.num_threads));
  }
  if (options.diagnostics.on_step) {
    refuse(
        "on_step is set, but the backend is cuda, whose steps are on the device; leave it empty");
  }
  if (options.diagnostics.slow_role && !options.diagnostics.trace) {
    refuse("slow_role is set, but only kernels that trace are slow when told to; set trace, too");
  }
}

// Returns the memory of the workspace's slot; null if there is no workspace, and the layer gets its
// own.
std::shared_ptr<PassMemory> memory_for(const World& world, const LayerOptions& options,
                                       const std::vector<std::shared_ptr<PassMemory>>* slots) {
  const int slot = options.workspace_slot;
  if (slots == nullptr) {
    if (slot == 0) return nullptr;
    refuse(
        fmt::format("workspace_slot is {}, but there is no workspace; set workspace, too", slot));
  }
  if (slot < 0 || slot >= static_cast<int>(slots->size())) {
    refuse(fmt::format("workspace_slot is {}; the workspace has slots 0 to {}", slot,
                       slots->size() - 1));
  }
  std::shared_ptr<PassMemory> memory = (*slots)[static_cast<std::size_t>(slot)];
  if (memory->backend() != options.backend) {
    refuse(fmt::format("workspace is of the {} backend, and the layer of the {} one; use the same",
                       to_string(memory->backend()), to_string(options.backend)));
  }
  if (&memory->world().fabric() != &world.fabric()) {
    refuse("workspace is of another world; make both with the same one");
  }
  return memory;
}

std::unique_ptr<LayerEngine> make_engine(const World& world, const LayerSpec& spec,
                                         const MoeWeights& weights, LayerOptions options,
                                         const std::vector<std::shared_ptr<PassMemory>>* slots) {
  std::shared_ptr<PassMemory> memory;
  // Other ranks' options may be good, and these ranks would wait for this one.
  attempt_together(world.fabric(), [&] {
    check_options(options);
    memory = memory_for(world, options, slots);
    options.deadline =
        options.deadline.count() == 0 ? world.deadline() : checked_deadline(options.deadline);
    switch (options.backend) {
      case Backend::kCpu: return check_cpu_options(options);
      case Backend::kCuda:
        check_cuda_options(options);
        require_wide_shared_expert(weights.shared);
        options.cuda.device = gpu::choose_device(options);
        return;
    }
    refuse(fmt::format("backend is {}; use Backend::kCpu or Backend::kCuda",
                       static_cast<int>(options.backend)));
  });
  if (options.backend == Backend::kCpu) {
    return cpu::make_engine(world, spec, weights, options, std::move(memory));
  }
  if (world.fabric().proxy() != nullptr) {
    return gpu::make_engine_over_hosts(world, spec, weights, options);
  }
  return gpu::make_engine(world, spec, weights, options, std::move(memory));
}

// Weights may just have been copied from a mapped file that became shorter meanwhile.
void require_whole(const MoeWeights& weights) { MappedWeights(weights).require_whole(); }

}  // namespace

const char* to_string(Backend backend) {
  switch (backend) {
    case Backend::kCpu: return "cpu";
    case Backend::kCuda: return "cuda";
  }
  return "unknown";
}

MoeLayer::MoeLayer(const World& world, const LayerSpec& spec, const MoeWeights& weights,
                   const LayerOptions& options)
    : engine_(
          make_engine(world, spec, weights, options,
                      options.workspace == nullptr ? nullptr : &options.workspace->state_->slots)) {
  require_whole(weights);
}
MoeLayer::~MoeLayer() { leave_inherited(engine_); }
MoeLayer::MoeLayer(MoeLayer&&) noexcept = default;
MoeLayer& MoeLayer::operator=(MoeLayer&& other) noexcept {
  leave_inherited(engine_);
  engine_ = std::move(other.engine_);
  return *this;
}

LayerEngine& MoeLayer::engine() const { return held_here(engine_, kName); }

void MoeLayer::forward(const ForwardInput& input, const ForwardOutput& output) {
  engine().forward(input, output);
}
void MoeLayer::refresh(void* stream) { engine().refresh(stream); }
bool MoeLayer::copies() const { return engine().copies(); }
void MoeLayer::rebind(const MoeWeights& weights) {
  engine().rebind(weights, nullptr);
  require_whole(weights);
}
void MoeLayer::rebind(const MoeWeights& weights, const ExpertPlacement& placement) {
  engine().rebind(weights, &placement);
  require_whole(weights);
}
void MoeLayer::check() { engine().check(); }
const ForwardStats& MoeLayer::stats() const { return engine().stats(); }
Recording MoeLayer::recording() const {
  if (!engine().records()) {
    refuse("the layer records no routing; make it with recorded_steps of 1 or more");
  }
  return engine().recording();
}
PassTrace MoeLayer::trace() const {
  if (!engine().traces()) {
    refuse("the layer records no trace; make it with the option trace set");
  }
  return engine().trace();
}
const LayerSpec& MoeLayer::spec() const { return held(engine_, kName).spec(); }
Backend MoeLayer::backend() const { return held(engine_, kName).backend(); }
DType MoeLayer::compute() const { return held(engine_, kName).compute(); }
int MoeLayer::num_threads() const { return held(engine_, kName).num_threads(); }
std::uint64_t MoeLayer::workspace_bytes() const { return held(engine_, kName).workspace_bytes(); }

}  // namespace switchyard
