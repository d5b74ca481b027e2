#include "bench/tune.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "base/join.h"
#include "base/names.h"
#include "base/plural.h"
#include "base/printable.h"
#include "bench/gpu_timing.h"
#include "bench/load.h"
#include "bench/suite.h"
#include "bench/tune_subjects.h"
#include "bench/wall_clock.h"
#include "machine/description.h"
#include "machine/host.h"
#include "switchyard/error.h"
#include "switchyard/grouped_gemm.h"

namespace switchyard::bench {
namespace {

using tuner::Timing;

struct RampModel {
  const char* name;
  int num_experts, top_k, n, k;
  bool unseen;
};
constexpr RampModel kRampModels[] = {
    {"ramp-olmoe", 64, 8, 2048, 2048, false},   {"ramp-qwen3", 128, 8, 1536, 2048, false},
    {"ramp-dsv3-ep8", 32, 8, 512, 7168, false}, {"ramp-dsv3-tp8", 256, 8, 512, 7168, false},
    {"ramp-mixtral", 8, 2, 32768, 6144, false}, {"ramp-phi", 16, 2, 12800, 4096, true},
    {"ramp-jamba", 16, 2, 16384, 4096, true},   {"ramp-dbrx", 16, 4, 21504, 6144, true},
};

constexpr int kWarmUps = 3;
constexpr int kLeastRepeats = 7;
constexpr int kTimedPasses = 50;
constexpr int kQuickPasses = 4;  // of a replay
// Threads that were started beside another process may share a processor with it for as long as
// they live, and passes then take three times as long. So the rule would look slower than the same
// number of threads. Each configuration is timed with several sets of threads, and the best one's
// time is taken.
constexpr int kHostRounds = 3;
constexpr double kHostRoundUs = 1e5, kLeastHostRepeats = 3, kMostHostRepeats = 200;
// Two configurations of one kernel add up the same products, in another order at most.
constexpr double kMostDifference = 0.02;

Timing timing_of(const std::vector<double>& times) {
  const double mean =
      std::accumulate(times.begin(), times.end(), 0.0) / static_cast<double>(times.size());
  double squares = 0;
  for (const double time : times) squares += (time - mean) * (time - mean);
  return {percentile(times, 0.5), std::sqrt(squares / static_cast<double>(times.size())) / mean};
}

std::vector<double> time_on_host(TuneSubject& subject, int repeat) {
  const auto run = [&] { subject.run(0); };
  const double pilot = wall_times(1, run).front();
  const int chosen = static_cast<int>(
      std::clamp(kHostRoundUs / std::max(pilot, 1.0), kLeastHostRepeats, kMostHostRepeats));
  return wall_times(repeat > 0 ? repeat : chosen, run);
}

// `best_us`: of other configurations; infinity if there are none yet.
std::vector<double> time_quickly(const gpu::Stream& stream, const Rotation& rotation,
                                 double best_us, const std::function<void()>& replay) {
  constexpr double kFarFromBest = 1.5, kEnoughUs = 8000;
  const double first = time_on_stream(stream, rotation, 1, replay).front();
  if (first > kFarFromBest * best_us) return {first};
  const double replays = kEnoughUs / (first * rotation.passes);
  return time_on_stream(stream, rotation, static_cast<int>(std::clamp(replays, 3.0, 7.0)), replay);
}

std::vector<double> time_on_gpu(TuneSubject& subject, const Rotation& rotation, int repeat,
                                bool quick, double best_us) {
  const auto passes = [&] {
    for (int i = 0; i < rotation.passes; ++i) subject.run(i % rotation.copies);
  };
  gpu::Graph graph = gpu::Graph::capture(subject.stream(), passes);
  const auto replay = [&] { graph.launch(subject.stream()); };
  if (quick) return time_quickly(subject.stream(), rotation, best_us, replay);
  time_on_stream(subject.stream(), rotation, kWarmUps, replay);
  const int chosen =
      std::max(kLeastRepeats, (kTimedPasses + rotation.passes - 1) / rotation.passes);
  return time_on_stream(subject.stream(), rotation, repeat > 0 ? repeat : chosen, replay);
}

double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(double{a[i]} - b[i], 2);
    size += std::pow(double{b[i]}, 2);
  }
  return std::sqrt(difference / std::max(size, 1e-30));
}

// Everything that the kernel's callback keeps between two timings.
class Bench {
 public:
  explicit Bench(TuneOptions options) : options_(std::move(options)) {
    const int threads = machine::hardware_threads();
    if (options_.kernel == TunedKernel::kGrouped) {
      grouped_ = grouped_choices(options_.backend, options_.dtype, threads);
    } else {
      layer_ = layer_choices(options_.backend, options_.dtype, threads);
    }
  }

  std::vector<tuner::Configuration> configurations() const {
    std::vector<tuner::Configuration> all;
    for (const GroupedChoice& choice : grouped_) all.push_back(choice.configuration);
    for (const LayerChoice& choice : layer_) all.push_back(choice.configuration);
    return all;
  }

  Timing time(const tuner::Model& model, std::size_t configuration,
              std::span<const std::int64_t> counts) {
    prepare(model);
    if (!std::equal(counts.begin(), counts.end(), counts_.begin(), counts_.end())) {
      counts_.clear();  // of no use if set_counts() throws
      reference_.clear();
      subject_->set_counts(counts);
      counts_.assign(counts.begin(), counts.end());
      best_us_ = std::numeric_limits<double>::infinity();
    }
    const bool gpu = options_.backend == Backend::kCuda;
    const bool quick = gpu && options_.quick;
    Rotation rotation = gpu ? choose_rotation(subject_->touched_bytes(counts)) : Rotation{};
    if (quick) rotation.passes = std::max(rotation.copies, kQuickPasses);
    try {
      subject_->choose(configuration, rotation.copies);
      // Every copy's first call may allocate, which a captured one may not.
      for (int copy = rotation.copies; copy-- > 1;) subject_->run(copy);
      subject_->poison_output();
      for (int i = 0; i < (quick ? 1 : kWarmUps); ++i) subject_->run(0);
    } catch (const Error& error) {
      // A configuration may need more memory than there is, for sums of parts of K, say.
      if (error.code() != ErrorCode::kCapacityExceeded) throw;
      throw Error(ErrorCode::kUnsupported, error.what());
    }
    require_same_output(configuration);
    Timing timing =
        timing_of(gpu ? time_on_gpu(*subject_, rotation, options_.repeat, quick, best_us_)
                      : time_on_host(*subject_, options_.repeat));
    for (int round = 1; !gpu && round < kHostRounds; ++round) {
      subject_->choose(configuration, 1);
      for (int i = 0; i < kWarmUps; ++i) subject_->run(0);
      const Timing again = timing_of(time_on_host(*subject_, options_.repeat));
      if (again.median_us < timing.median_us) timing = again;
    }
    best_us_ = std::min(best_us_, timing.median_us);
    return timing;
  }

 private:
  void prepare(const tuner::Model& model) {
    if (subject_ && prepared_ == model.name) return;
    const auto known = std::find_if(options_.models.begin(), options_.models.end(),
                                    [&](const TuneModel& m) { return m.model.name == model.name; });
    if (known == options_.models.end()) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("the model {} is not one of those to tune; name it with --models",
                              printable(model.name)));
    }
    subject_.reset();  // before the next one needs its memory
    counts_.clear();
    reference_.clear();
    prepared_ = model.name;
    if (options_.preparing) options_.preparing(model.name);
    subject_ = options_.kernel == TunedKernel::kGrouped
                   ? make_grouped_subject(*known, options_, grouped_)
                   : make_layer_subject(*known, options_, layer_);
  }

  void require_same_output(std::size_t configuration) {
    const std::vector<float> sample = subject_->sample();
    const std::string name = configurations()[configuration].name;
    if (!std::all_of(sample.begin(), sample.end(), [](float v) { return std::isfinite(v); })) {
      throw Error(ErrorCode::kSystem,
                  fmt::format("the configuration '{}' of {} leaves values that are not finite; it "
                              "must not be used",
                              name, prepared_));
    }
    if (reference_.empty()) {
      reference_ = sample;
      return;
    }
    const double difference = relative_difference(sample, reference_);
    if (difference <= kMostDifference) return;
    throw Error(ErrorCode::kSystem,
                fmt::format("the configuration '{}' of {} computes something else than the first "
                            "one (a relative difference of {:.2e}); it must not be used",
                            name, prepared_, difference));
  }

  TuneOptions options_;
  std::vector<GroupedChoice> grouped_;
  std::vector<LayerChoice> layer_;
  std::string prepared_;
  std::unique_ptr<TuneSubject> subject_;
  std::vector<std::int64_t> counts_;
  double best_us_ = std::numeric_limits<double>::infinity();  // of these counts
  std::vector<float> reference_;  // rows of the first configuration's output for these counts
};

}  // namespace

TunedKernel tuned_kernel_named(std::string_view name) {
  if (name == "grouped") return TunedKernel::kGrouped;
  if (name == "layer") return TunedKernel::kLayer;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("--kernel is '{}'; use grouped or layer", printable(name)));
}

std::vector<std::string> ramp_models() {
  std::vector<std::string> names;
  for (const RampModel& model : kRampModels) names.emplace_back(model.name);
  return names;
}

TuneModel tune_model(std::string_view name, const ConfigOverrides& overrides) {
  TuneModel tuned;
  tuned.model.name = name;
  for (const RampModel& known : kRampModels) {
    if (name != known.name) continue;
    ConfigOverrides sizes = overrides;
    const auto fill = [](int& size, int its) { size = size > 0 ? size : its; };
    fill(sizes.num_experts, known.num_experts);
    fill(sizes.top_k, known.top_k);
    fill(sizes.hidden, known.k);
    fill(sizes.intermediate, known.n / 2);
    // Any model with SwiGLU and nothing beside its routed experts.
    tuned.spec = bench_layer("olmoe", sizes).spec;
    tuned.model.unseen = known.unseen;
  }
  if (tuned.spec.num_experts == 0) tuned.spec = bench_layer(name, overrides).spec;
  tuned.spec.shared_intermediate = 0;
  tuned.spec.shared_sigmoid_gate = false;
  tuned.spec.expert_bias = false;
  if (!tuned.spec.activation.gated) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("the experts of {} have no gate, and tuning is of gated ones; choose "
                            "another model",
                            printable(name)));
  }
  tuned.model.num_experts = tuned.spec.num_experts;
  tuned.model.top_k = tuned.spec.top_k;
  tuned.model.n = 2 * tuned.spec.intermediate;
  tuned.model.k = tuned.spec.hidden;
  return tuned;
}

std::string layer_kernel_name(DType compute) { return std::string("layer_") + short_name(compute); }

tuner::Kernel make_tuned_kernel(const TuneOptions& options) {
  const bool grouped = options.kernel == TunedKernel::kGrouped;
  const auto bench = std::make_shared<Bench>(options);
  tuner::Kernel kernel;
  kernel.name = grouped ? grouped_kernel_name(options.dtype) : layer_kernel_name(options.dtype);
  kernel.version = grouped ? kGroupedKernelVersion : kLayerKernelVersion;
  kernel.configurations = bench->configurations();
  kernel.time = [bench](const tuner::Model& model, std::size_t configuration,
                        std::span<const std::int64_t> counts) {
    return bench->time(model, configuration, counts);
  };
  return kernel;
}

tuner::Device tuned_device(Backend backend) {
  tuner::Device device;
  device.machine = machine::describe_machine(backend, 1);
  if (backend == Backend::kCuda) {
    const gpu::DeviceInfo info = gpu::device_info(gpu::current_device());
    device.num_sms = info.num_sms;
    device.l2_bytes = info.l2_bytes;
  } else {
    device.num_sms = machine::hardware_threads();
  }
  return device;
}

std::vector<std::int32_t> ids_of(std::span<const std::int64_t> counts, int top_k) {
  const std::int64_t slots = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  if (slots % top_k != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("counts sum up to {}, which is no multiple of top_k {}", slots, top_k));
  }
  const std::int64_t tokens = slots / top_k;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(slots));
  // Slots in the order of experts are dealt to the tokens in turn. An expert's rows then go to as
  // many tokens, if it has no more rows than there are tokens.
  std::int64_t slot = 0;
  for (std::size_t e = 0; e < counts.size(); ++e) {
    if (counts[e] > tokens) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("expert {} has {} of {}, which no router chooses; draw "
                              "with --generator distinct",
                              e, plural(counts[e], "row"), plural(tokens, "token")));
    }
    for (std::int64_t i = 0; i < counts[e]; ++i, ++slot) {
      ids[static_cast<std::size_t>(slot % tokens * top_k + slot / tokens)] =
          static_cast<std::int32_t>(e);
    }
  }
  return ids;
}

}  // namespace switchyard::bench
