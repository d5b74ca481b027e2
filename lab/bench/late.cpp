#include "bench/late.h"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <random>

#include "base/mix64.h"
#include "base/names.h"
#include "base/plural.h"
#include "bench/activations.h"
#include "bench/load.h"
#include "bench/measure.h"
#include "bench/memory.h"
#include "bench/suite.h"
#include "gpu/device.h"
#include "machine/description.h"
#include "models/generate.h"
#include "protocol/control.h"
#include "run/devices.h"
#include "run/late.h"
#include "run/ranks.h"
#include "switchyard/error.h"
#include "switchyard/weights.h"

namespace switchyard::bench {
namespace {

using Clock = std::chrono::steady_clock;
using results::LateRow;

constexpr std::uint64_t kWarmUps = 3;
constexpr int kRepeats = 20;
// As before a rank could work ahead of late counts: longer than any pass.
constexpr std::chrono::microseconds kForEver = std::chrono::hours(1);

enum class Policy { kWorks, kWaits };
const char* to_string(Policy policy) { return policy == Policy::kWorks ? "works" : "waits"; }

// A way to be late: the last rank by that time, or every rank by a random one up to it.
struct Way {
  std::int64_t late_us;
  bool jitter;
};

std::vector<Way> ways_of(const std::vector<std::int64_t>& late_us) {
  std::vector<Way> ways = {{0, false}};
  for (const std::int64_t us : late_us) {
    if (us == 0) continue;
    ways.push_back({us, false});
    ways.push_back({us, true});
  }
  return ways;
}

// How late a rank is in the n-th pass of a way: the same for all policies.
std::chrono::microseconds lateness_of(const Way& way, int rank, int ranks, std::uint64_t n) {
  if (!way.jitter) return std::chrono::microseconds(rank + 1 == ranks ? way.late_us : 0);
  std::mt19937_64 random(n * protocol::kMaxRanks + static_cast<std::uint64_t>(rank));
  return std::chrono::microseconds(random() % static_cast<std::uint64_t>(way.late_us + 1));
}

// One pass of one rank. Times count from the moment when all ranks were ready.
struct RankPass {
  double start_us = 0, end_us = 0;
};

double microseconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double, std::micro>(end - start).count();
}

// All ranks of a point have this in common.
struct Problem {
  const LayerSpec& spec;
  const MoeWeights& weights;
  DType compute;
  std::int64_t tokens;
  Policy policy;
  std::uint64_t seed;

  DType dtype() const { return activation_dtype(compute); }
  std::size_t slots() const {
    return static_cast<std::size_t>(tokens) * static_cast<std::size_t>(spec.top_k);
  }
  std::vector<std::byte> activations_of(int rank) const {
    return random_activations(dtype(), tokens, spec.hidden,
                              mix64(seed + static_cast<std::uint64_t>(rank)));
  }
  std::size_t activation_bytes() const {
    return static_cast<std::size_t>(tokens * spec.hidden) * size_of(dtype());
  }
  LayerOptions options() const {
    LayerOptions o{.max_tokens = static_cast<int>(tokens), .compute = compute};
    if (policy == Policy::kWaits) o.patience = kForEver;
    return o;
  }
};

// Counts the GEMM tasks of all ranks but the last, before and after that one's start.
struct TaskCount {
  std::atomic<bool> last_started{false};
  std::atomic<std::uint64_t> early{0}, all{0};
};

// One rank with its layer and its tokens. All ranks call pass() at the same time.
class LateRank {
 public:
  LateRank(const World& world, const Problem& problem, Backend backend, TaskCount& tasks)
      : world_(world),
        problem_(problem),
        tasks_(tasks),
        how_(options_for(backend)),
        x_(backend, problem.activations_of(world.rank())),
        y_(backend, problem.activation_bytes()),
        ids_(backend, problem.slots() * sizeof(std::int32_t)),
        layer_(world, problem.spec, problem.weights, how_) {
    if (backend == Backend::kCuda) device_.emplace();
    world_.barrier();
  }
  ~LateRank() {
    if (!device_) return;
    try {
      world_.barrier();  // memory is freed when nobody waits any more
    } catch (const Error&) {
      // Another rank gave up, and told so.
    }
  }
  LateRank(const LateRank&) = delete;
  LateRank& operator=(const LateRank&) = delete;

  // On a GPU the host is late with its launch. A rank's end is its launch plus the time that its
  // device takes, which includes no synchronisation of the host.
  RankPass pass(std::chrono::microseconds late) {
    const bool last = world_.rank() + 1 == world_.size();
    ForwardInput input;
    input.activations = {x_.as<std::byte>(), problem_.dtype(), problem_.tokens,
                         problem_.spec.hidden, problem_.spec.hidden};
    ForwardOutput output{.data = y_.as<std::byte>(), .dtype = problem_.dtype()};
    output.topk_ids = {ids_.as<std::int32_t>(), problem_.slots()};
    if (device_) input.stream = device_->stream.handle();
    if (last) tasks_.last_started = false;
    world_.barrier();
    const Clock::time_point ready = Clock::now();
    run::wait_until(ready + late);
    if (last) tasks_.last_started = true;
    const double start = microseconds_between(ready, Clock::now());
    if (!device_) {
      layer_.forward(input, output);
      return {start, microseconds_between(ready, Clock::now())};
    }
    device_->start.record(device_->stream);
    layer_.forward(input, output);
    device_->end.record(device_->stream);
    world_.barrier();  // no rank waits for its device before all have launched
    device_->stream.synchronize();
    layer_.check();
    return {start, start + gpu::Event::elapsed_us(device_->start, device_->end)};
  }
  std::vector<std::byte> output() const { return y_.read<std::byte>(); }
  std::vector<std::int32_t> ids() const { return ids_.read<std::int32_t>(); }

 private:
  struct Device {
    gpu::Stream stream;
    gpu::Event start, end;
  };

  // Makes the rank's device the current one.
  LayerOptions options_for(Backend backend) {
    LayerOptions o = problem_.options();
    if (backend == Backend::kCuda) {
      const run::RankDevice place = run::rank_device(world_.rank(), world_.size(), {});
      gpu::set_device(place.device);
      o.backend = Backend::kCuda;
      o.cuda.device = place.device;
      o.cuda.reserved_sms = place.reserved_sms;
    } else if (world_.rank() + 1 < world_.size()) {
      o.diagnostics.on_step = [&tasks = tasks_](const ProtocolStep& step) {
        using Kind = ProtocolStep::Kind;
        if (step.kind != Kind::kGemm1 && step.kind != Kind::kGemm2) return;
        tasks.all.fetch_add(1, std::memory_order_relaxed);
        if (!tasks.last_started.load(std::memory_order_relaxed)) {
          tasks.early.fetch_add(1, std::memory_order_relaxed);
        }
      };
    }
    return o;
  }

  World world_;
  const Problem& problem_;
  TaskCount& tasks_;
  LayerOptions how_;
  std::optional<Device> device_;
  Memory x_, y_, ids_;
  MoeLayer layer_;
};

// The cost of one kind of lateness, for each repetition.
struct Times {
  std::vector<double> us;
  std::uint64_t early_tasks = 0, tasks = 0;
};

// From the late rank's start to the end of the others; with jitter, from the last start to the last
// end.
double after_start_us(const std::vector<RankPass>& passes, const Way& way) {
  double last_start = 0, last_end = 0;
  for (std::size_t s = 0; s < passes.size(); ++s) {
    const bool last_rank = s + 1 == passes.size();
    if (way.jitter || last_rank) last_start = std::max(last_start, passes[s].start_us);
    if (way.jitter || !last_rank) last_end = std::max(last_end, passes[s].end_us);
  }
  return last_end - last_start;
}

// The share that the late rank's tokens are of what another rank has to multiply: the largest over
// the other ranks.
double own_share(const LayerSpec& spec, const std::vector<std::vector<std::int32_t>>& ids,
                 std::int64_t tokens) {
  const auto ranks = static_cast<int>(ids.size());
  double largest = 0;
  for (int r = 0; r + 1 < ranks; ++r) {
    const ExpertRange own = own_experts(spec.num_experts, r, ranks);
    double of_late = 0;
    double all = static_cast<double>(tokens) * spec.shared_intermediate;
    for (int s = 0; s < ranks; ++s) {
      for (const std::int32_t e : ids[static_cast<std::size_t>(s)]) {
        if (e < own.begin || e >= own.end) continue;
        all += spec.intermediate;
        if (s + 1 == ranks) of_late += spec.intermediate;
      }
    }
    if (all > 0) largest = std::max(largest, of_late / all);
  }
  return largest;
}

// All ranks of one point, with each policy a layer of its own. The policies pass by turns, so that
// a busy machine is the same for both.
class Point {
 public:
  Point(const LateOptions& options, const LayerSpec& spec, const MoeWeights& weights,
        std::int64_t tokens, const std::vector<Policy>& policies, const std::vector<Way>& ways)
      : options_(options), ways_(ways), tasks_(policies.size()), passes_(ranks()), ids_(ranks()) {
    for (const Policy policy : policies) {
      problems_.push_back(
          {spec, weights, default_compute(options.dtype), tokens, policy, options.seed + 1});
      worlds_.push_back(World::threads(options.ranks));
    }
    times_.assign(policies.size(), std::vector<Times>(ways.size()));
    run::on_every_rank(options.ranks, [this](int rank) { play(rank); });
  }

  const Times& times(std::size_t policy, std::size_t way) const { return times_[policy][way]; }
  double own_share() const {
    return bench::own_share(problems_.front().spec, ids_, problems_.front().tokens);
  }
  // Says which output had other bits than the first; empty if none had.
  const std::string& problem() const { return problem_; }

 private:
  std::size_t ranks() const { return static_cast<std::size_t>(options_.ranks); }

  // One rank's part.
  void play(int rank) {
    const auto r = static_cast<std::size_t>(rank);
    std::vector<std::unique_ptr<LateRank>> places;
    for (std::size_t p = 0; p < problems_.size(); ++p) {
      places.push_back(
          std::make_unique<LateRank>(worlds_[p][r], problems_[p], options_.backend, tasks_[p]));
    }
    const auto repeat =
        static_cast<std::uint64_t>(options_.repeat > 0 ? options_.repeat : kRepeats);
    std::vector<std::byte> expected;
    for (std::uint64_t n = 0; n < kWarmUps + repeat; ++n) {
      for (std::size_t w = 0; w < ways_.size(); ++w) {
        for (std::size_t p = 0; p < places.size(); ++p) {
          const std::uint64_t early = tasks_[p].early, all = tasks_[p].all;
          passes_[r] = places[p]->pass(lateness_of(ways_[w], rank, options_.ranks, n));
          worlds_[p][r].barrier();
          if (rank == 0 && n >= kWarmUps) {
            Times& times = times_[p][w];
            times.us.push_back(after_start_us(passes_, ways_[w]));
            times.early_tasks += tasks_[p].early - early;
            times.tasks += tasks_[p].all - all;
          }
          std::vector<std::byte> output = places[p]->output();
          if (expected.empty())
            expected = std::move(output);
          else if (output != expected)
            note_difference(rank, ways_[w], problems_[p].policy);
          worlds_[p][r].barrier();  // nobody counts for the next pass before this one is kept
        }
      }
    }
    ids_[r] = places.front()->ids();
  }
  void note_difference(int rank, const Way& way, Policy policy) {
    const std::lock_guard lock(mutex_);
    problem_ =
        fmt::format("rank {} got other bits where {} {} us late, with the policy {}", rank,
                    way.jitter ? "all were up to" : "one was", way.late_us, to_string(policy));
  }

  const LateOptions& options_;
  const std::vector<Way>& ways_;
  std::vector<Problem> problems_;           // [policy]
  std::vector<std::vector<World>> worlds_;  // [policy][rank]
  std::vector<TaskCount> tasks_;            // [policy]
  std::vector<std::vector<Times>> times_;   // [policy][way]
  std::vector<RankPass> passes_;            // [rank], between two barriers
  std::vector<std::vector<std::int32_t>> ids_;
  std::mutex mutex_;
  std::string problem_;
};

}  // namespace

LateOptions late_suite(Backend backend) {
  LateOptions options;
  options.backend = backend;
  if (backend == Backend::kCuda) {
    options.models = {"olmoe", "deepseek-v2-lite"};
    options.tokens = {1, 8, 128, 2048, 8192};
    options.late_us = {50, 200, 2000};
  } else {
    // Passes take a hundred milliseconds and more here.
    options.models = {"olmoe", "qwen1.5-moe"};
    options.tokens = {8, 256};
    options.late_us = {200, 2000, 20000, 200000};
  }
  return options;
}

LateSession::LateSession(LateOptions options, LateObserver& observer)
    : options_(std::move(options)), observer_(observer) {
  if (options_.ranks < 2) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--ranks is {}, but nobody waits for a late rank with less than 2",
                            options_.ranks));
  }
  if (options_.backend == Backend::kCuda && gpu::device_count() == 0) {
    throw Error(ErrorCode::kUnsupported,
                "bench late has no GPU here; use --backend cpu, or leave it out");
  }
  machine_ = machine::describe_machine(options_.backend, options_.ranks);
}

void LateSession::run() {
  if (options_.spec) {
    measure(options_.models.front(), *options_.spec);
    return;
  }
  for (const std::string& model : options_.models) measure(model, bench_layer(model, {}).spec);
}

void LateSession::measure(const std::string& model, const LayerSpec& spec) {
  const bool cuda = options_.backend == Backend::kCuda;
  const std::vector<Policy> policies = {Policy::kWaits, Policy::kWorks};
  const std::vector<Way> ways = ways_of(options_.late_us);
  try {
    const MoeWeights weights =
        generate_weights(spec, options_.dtype, layer_seed(options_.seed, 0), {});
    for (const std::int64_t tokens : options_.tokens) {
      observer_.measuring(done_++, options_.models.size() * options_.tokens.size());
      const Point point(options_, spec, weights, tokens, policies, ways);
      if (!point.problem().empty()) {
        observer_.failed(fmt::format("{}, {} a rank", model, plural(tokens, "token")),
                         point.problem());
        continue;
      }
      std::vector<LateRow> rows;
      for (std::size_t p = 0; p < policies.size(); ++p) {
        for (std::size_t w = 0; w < ways.size(); ++w) {
          const Times& times = point.times(p, w);
          auto row = row_of_run<LateRow>(kLateSuite, machine_, options_);
          row.engine = switchyard::to_string(options_.backend);
          row.policy = to_string(policies[p]);
          row.model = model;
          row.dtype = short_name(options_.dtype);
          row.ranks = options_.ranks;
          row.tokens_per_rank = tokens;
          row.jitter = ways[w].jitter;
          row.late_us = static_cast<double>(ways[w].late_us);
          row.prompt_us = percentile(point.times(p, 0).us, 0.5);
          set_times(row, times.us);
          row.own_share = ways[w].jitter ? 0 : point.own_share();
          if (!cuda && !ways[w].jitter && times.tasks > 0) {
            row.early_share =
                static_cast<double>(times.early_tasks) / static_cast<double>(times.tasks);
          }
          observer_.measured(row);
          rows.push_back(std::move(row));
        }
      }
      observer_.keep(rows);
    }
  } catch (const Error& error) {
    observer_.failed_by(model, error);
  }
}

}  // namespace switchyard::bench
