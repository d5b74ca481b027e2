// This library's kernels for the tuner: their configurations, and the timing of one.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "switchyard/layer.h"
#include "switchyard/layer_spec.h"
#include "switchyard/schedule.h"
#include "switchyard/tensor.h"
#include "switchyard/tuner.h"

namespace switchyard::bench {

// The kernel to tune: GroupedGemm with SwiGLU on gate and up, or a whole layer with given routing.
enum class TunedKernel : std::uint8_t { kGrouped, kLayer };
// "grouped", "layer". Throws Error{kInvalidArgument} for other names.
TunedKernel tuned_kernel_named(std::string_view name);

struct TuneModel {
  tuner::Model model;
  LayerSpec spec;  // routed experts alone
};

// The eight models of RaMP, with its sizes: dsv3-ep8 and dsv3-tp8 have I = 256, ramp-jamba and
// ramp-mixtral are as its table III has them. Phi, Jamba and DBRX are unseen.
std::vector<std::string> ramp_models();

// A model of ramp_models(), or one that bench_layer() knows, routed experts alone. Throws what
// bench_layer() throws.
TuneModel tune_model(std::string_view name, const ConfigOverrides& overrides = {});

struct TuneOptions {
  TunedKernel kernel = TunedKernel::kGrouped;
  Backend backend = Backend::kCpu;
  DType dtype = DType::kBF16;  // of weights and of the arithmetic
  std::vector<TuneModel> models;
  int max_tokens = 1024;
  int repeat = 0;  // timed repetitions; 0: at least 50 passes on a GPU, 3 to 20 elsewhere
  // On a GPU: fewer passes for each timing (12 to 28 in place of 50), and 4 alone where the first
  // ones take half again as long as the best configuration at the point, which decides nothing.
  bool quick = false;
  std::uint64_t seed = 0;
  std::function<void(const std::string& model)> preparing;  // before weights are made; or empty
};

// A configuration of a kernel, and what it sets. On the CPU, which has no schedule, threads alone.
struct GroupedChoice {
  tuner::Configuration configuration;
  GroupedSchedule schedule;
  int num_threads = 0;
};
struct LayerChoice {
  tuner::Configuration configuration;
  Schedule schedule;
  int num_threads = 0;
};
// "layer_bf16", "layer_fp8", ...: the kernel of profiles of layers. Its version grows whenever the
// layer kernel's times change.
std::string layer_kernel_name(DType compute);
inline constexpr std::int64_t kLayerKernelVersion = 1;

// The first is the kernel's own rule. On a GPU there are more than 134 in bf16 and in FP8. Throws
// Error{kUnsupported} for types that the kernel does not compute in there.
std::vector<GroupedChoice> grouped_choices(Backend backend, DType dtype, int hardware_threads);
std::vector<LayerChoice> layer_choices(Backend backend, DType dtype, int hardware_threads);

// The kernel "grouped_bf16", "layer_fp8", ... of these models on the current device. It makes a
// model's weights when it first times one, and keeps them until it times another's. On a GPU a time
// is the median of repetitions of a CUDA graph of 8 or more passes, on copies of the weights in
// turn, so that no weight is read from the cache, as `switchyard bench` has it. Some rows of every
// configuration's output are compared with the first one's: Error{kSystem} if they differ.
tuner::Kernel make_tuned_kernel(const TuneOptions& options);

// The current GPU, or this host.
tuner::Device tuned_device(Backend backend);

// Expert ids [tokens, top_k] that make this histogram, a token's all different. Throws
// Error{kUnsupported} if there are none: an expert has more rows than there are tokens, as in
// histograms drawn with repetition.
std::vector<std::int32_t> ids_of(std::span<const std::int64_t> counts, int top_k);

}  // namespace switchyard::bench
