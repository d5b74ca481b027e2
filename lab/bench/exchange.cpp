#include "bench/exchange.h"

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>

#include "base/convert.h"
#include "base/names.h"
#include "base/plural.h"
#include "bench/floor.h"
#include "bench/load.h"
#include "bench/memory.h"
#include "bench/wall_clock.h"
#include "gpu/device.h"
#include "machine/description.h"
#include "run/ranks.h"
#include "switchyard/error.h"

namespace switchyard::bench {
namespace {

using results::ExchangeRow;

constexpr int kWarmUps = 2;
constexpr DType kResults = DType::kBF16;

std::string name_of(const ExchangePoint& point) {
  return fmt::format("H {}, top-{} of {}, {} a rank, {}", point.hidden, point.top_k, point.experts,
                     plural(point.tokens, "token"), short_name(point.dtype));
}

// Fewer repetitions of what takes long.
int repeats_of(const ExchangeBenchOptions& options, const ExchangePoint& point) {
  if (options.repeat > 0) return options.repeat;
  return static_cast<int>(std::clamp<std::int64_t>(8192 / point.tokens, 5, 50));
}

// The times that a rank measured.
struct RankTimes {
  std::vector<double> dispatch_us, combine_us;
  ExchangeStats stats;
  std::string problem;  // of a result that is wrong; empty if none is
};

ExchangeSpec spec_of(const ExchangePoint& point, bool pre_sum) {
  ExchangeSpec spec;
  spec.hidden = point.hidden;
  spec.num_experts = point.experts;
  spec.top_k = point.top_k;
  spec.max_tokens = static_cast<int>(point.tokens);
  spec.dispatch = point.dtype;
  spec.combine = kResults;
  spec.pre_sum = pre_sum;
  if (pre_sum) spec.weights = CombineWeights::kBySender;
  return spec;
}

// One rank with its arrays. Experts return the tokens that they get: of FP8 rows bf16 rows of ones.
class RankPlace {
 public:
  RankPlace(const World& world, const ExchangePoint& point, const ExchangeBenchOptions& options)
      : world_(world),
        input_(point.tokens, point.hidden, point.experts, point.top_k,
               options.seed * 64 + static_cast<std::uint64_t>(world.rank())),
        quantised_(point.dtype == DType::kF8E4M3),
        how_(options_of(world.rank(), options.backend)),
        exchange_(world, spec_of(point, options.pre_sum), how_),
        handle_(exchange_.make_handle()),
        tokens_(how_.backend, input_.x),
        ids_(how_.backend, input_.routing.ids),
        weights_(how_.backend, input_.routing.weights),
        received_(how_.backend, rows() * input_.hidden * size_of(point.dtype)),
        scales_(how_.backend, quantised_ ? rows() * ((input_.hidden + 127) / 128) * 4 : 0),
        ones_(how_.backend, std::vector<std::uint16_t>(quantised_ ? rows() * input_.hidden : 0,
                                                       f32_to_bf16(1.0f))),
        out_(how_.backend, input_.x.size() * 2) {
    if (how_.backend == Backend::kCuda) device_.emplace();
    void* const stream = device_ ? device_->stream.handle() : nullptr;
    dispatch_input_.tokens = {tokens_.as<std::byte>(), kResults, point.tokens, point.hidden,
                              point.hidden};
    dispatch_input_.ids = SlotView(ids_.as<std::int32_t>(), input_.routing.ids.size());
    dispatch_input_.weights = SlotView(weights_.as<float>(), input_.routing.weights.size());
    dispatch_output_.rows = received_.as<std::byte>();
    dispatch_output_.capacity = exchange_.rows_needed();
    if (quantised_) dispatch_output_.scales = scales_.as<float>();
    combine_input_.rows = {(quantised_ ? ones_ : received_).as<std::byte>(), kResults,
                           exchange_.rows_needed(), point.hidden, point.hidden};
    combine_output_.data = out_.as<std::byte>();
    dispatch_input_.stream = dispatch_output_.stream = combine_input_.stream =
        combine_output_.stream = stream;
    world_.barrier();
  }
  ~RankPlace() {
    if (!device_) return;
    try {
      world_.barrier();  // memory is freed when nobody waits any more
    } catch (const Error&) {
      // Another rank gave up, and told so.
    }
  }
  RankPlace(const RankPlace&) = delete;
  RankPlace& operator=(const RankPlace&) = delete;

  RankTimes measure(int repeat) {
    const auto dispatch = [this] {
      exchange_.dispatch(dispatch_input_, dispatch_output_, handle_);
    };
    const auto combine = [this] { exchange_.combine(combine_input_, combine_output_, handle_); };
    if (device_) {
      // Graphs are made when no rank waits for another.
      dispatch();
      combine();
      device_->stream.synchronize();
      exchange_.check();
    }
    const std::function<double()> time_dispatch = clock_of(dispatch),
                                  time_combine = clock_of(combine);
    RankTimes times;
    for (int i = 0; i < kWarmUps + repeat; ++i) {
      const double dispatch_us = time_dispatch(), combine_us = time_combine();
      if (i < kWarmUps) continue;
      times.dispatch_us.push_back(dispatch_us);
      times.combine_us.push_back(combine_us);
    }
    times.stats = exchange_.stats();
    const auto wrong = input_.wrong_sums(out_.read<std::uint16_t>(), quantised_);
    if (!wrong.empty()) {
      const auto& [token, column, found, expected] = wrong.front();
      times.problem = fmt::format("rank {} got {} for token {}, column {}, instead of {}",
                                  world_.rank(), found, token, column, expected);
    }
    return times;
  }

 private:
  static constexpr int kCalls = 10;  // in a graph
  struct Device {
    gpu::Stream stream;
    gpu::Event start, end;
  };

  static ExchangeOptions options_of(int rank, Backend backend) {
    ExchangeOptions options;
    options.backend = backend;
    if (backend == Backend::kCuda) {
      options.device = rank % gpu::device_count();
      gpu::set_device(options.device);
    }
    return options;
  }
  std::size_t rows() const { return static_cast<std::size_t>(exchange_.rows_needed()); }

  // Returns a function that makes the call and returns its microseconds. On a GPU they are of one
  // call among kCalls of its kind in a graph, one behind the other: ranks are not started at the
  // same time, but after the first call they wait for each other.
  std::function<double()> clock_of(const std::function<void()>& call) {
    if (!device_) {
      return [this, call] {
        world_.barrier();
        return wall_times(1, call).front();
      };
    }
    const auto graph = std::make_shared<gpu::Graph>(gpu::Graph::capture(device_->stream, [&] {
      for (int i = 0; i < kCalls; ++i) call();
    }));
    return [this, graph] {
      world_.barrier();
      device_->start.record(device_->stream);
      graph->launch(device_->stream);
      device_->end.record(device_->stream);
      device_->stream.synchronize();
      exchange_.check();
      return gpu::Event::elapsed_us(device_->start, device_->end) / kCalls;
    };
  }

  World world_;
  RankTokens input_;
  bool quantised_;
  ExchangeOptions how_;
  std::optional<Device> device_;
  Exchange exchange_;
  ExchangeHandle handle_;
  Memory tokens_, ids_, weights_, received_, scales_, ones_, out_;
  DispatchInput dispatch_input_;
  DispatchOutput dispatch_output_;
  CombineInput combine_input_;
  CombineOutput combine_output_;
};

// All ranks, on a thread each. Throws the first failure.
std::vector<RankTimes> measure(const ExchangePoint& point, const ExchangeBenchOptions& options) {
  std::vector<World> worlds = World::threads(options.ranks);
  std::vector<RankTimes> times(worlds.size());
  run::on_every_rank(options.ranks, [&](int r) {
    const auto i = static_cast<std::size_t>(r);
    // A rank that fails leaves its world, so that the others need not wait for it.
    const World world = std::move(worlds[i]);
    times[i] = RankPlace(world, point, options).measure(repeats_of(options, point));
  });
  return times;
}

// Returns the slowest rank's time for each repetition.
std::vector<double> slowest(const std::vector<RankTimes>& ranks,
                            std::vector<double> RankTimes::*stage) {
  std::vector<double> times = ranks.front().*stage;
  for (const RankTimes& rank : ranks) {
    for (std::size_t i = 0; i < times.size(); ++i) {
      times[i] = std::max(times[i], (rank.*stage)[i]);
    }
  }
  return times;
}

std::uint64_t most_bytes(const std::vector<RankTimes>& ranks, std::uint64_t ExchangeStats::*bytes) {
  std::uint64_t most = 0;
  for (const RankTimes& rank : ranks) most = std::max(most, rank.stats.*bytes);
  return most;
}

}  // namespace

std::vector<ExchangePoint> exchange_suite() {
  std::vector<ExchangePoint> points;
  for (const DType dtype : {DType::kBF16, DType::kF8E4M3}) {
    for (const std::int64_t tokens : {1, 8, 32, 128, 512, 2048, 8192}) {
      points.push_back({7168, 256, 8, tokens, dtype});
    }
  }
  return points;
}

ExchangeSession::ExchangeSession(ExchangeBenchOptions options, ExchangeObserver& observer)
    : options_(std::move(options)),
      observer_(observer),
      machine_(machine::describe_machine(options_.backend, options_.ranks)) {}

void ExchangeSession::run(const std::vector<ExchangePoint>& points) {
  std::uint64_t done = 0;
  for (const ExchangePoint& point : points) {
    observer_.measuring(done++, points.size());
    std::vector<RankTimes> ranks;
    try {
      ranks = measure(point, options_);
    } catch (const Error& error) {
      observer_.failed_by(name_of(point), error);
      continue;
    }
    for (const RankTimes& rank : ranks) {
      if (!rank.problem.empty()) observer_.failed(name_of(point), rank.problem);
    }
    const auto row_of = [&](const char* stage, const std::vector<double>& times,
                            std::uint64_t bytes) {
      auto row = row_of_run<ExchangeRow>(kExchangeSuite, machine_, options_);
      row.stage = stage;
      row.dtype = short_name(point.dtype);
      row.hidden = point.hidden;
      row.experts = point.experts;
      row.top_k = point.top_k;
      row.ranks = options_.ranks;
      row.tokens_per_rank = point.tokens;
      row.pre_sum = options_.pre_sum;
      set_times(row, times);
      row.nvlink_bytes = static_cast<double>(bytes);
      row.floor_us = links_floor_us(row.nvlink_bytes, options_.ranks,
                                    options_.backend == Backend::kCuda ? gpu::device_count() : 0);
      row.times_us = times;
      return row;
    };
    const std::vector<ExchangeRow> rows = {
        row_of("dispatch", slowest(ranks, &RankTimes::dispatch_us),
               most_bytes(ranks, &ExchangeStats::dispatch_bytes)),
        row_of("combine", slowest(ranks, &RankTimes::combine_us),
               most_bytes(ranks, &ExchangeStats::combine_bytes))};
    for (const ExchangeRow& row : rows) observer_.measured(row);
    observer_.keep(rows);
  }
}

}  // namespace switchyard::bench
