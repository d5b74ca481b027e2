#include "bench/exchange.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

#include "base/convert.h"
#include "base/names.h"
#include "base/plural.h"
#include "base/threads.h"
#include "bench/floor.h"
#include "bench/load.h"
#include "gpu/device.h"
#include "machine/description.h"
#include "switchyard/error.h"
#include "switchyard/routing.h"

namespace switchyard::bench {
namespace {

using Clock = std::chrono::steady_clock;
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

// A rank's tokens in bf16, their routing, and the sum of each token's weights.
struct RankInput {
  std::vector<std::uint16_t> tokens;
  SyntheticRouting routing;

  RankInput(const ExchangePoint& point, std::uint64_t seed)
      : tokens(static_cast<std::size_t>(point.tokens) * static_cast<std::size_t>(point.hidden)),
        routing(synthetic_routing(static_cast<int>(point.tokens), point.experts, point.top_k, 1.0,
                                  seed)) {
    std::uint64_t state = seed * 2 + 1;
    for (std::uint16_t& value : tokens) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      value = f32_to_bf16(static_cast<float>(static_cast<std::int32_t>(state >> 33) - (1 << 30)) *
                          0x1p-30f);
    }
  }
};

// The times that a rank measured.
struct RankTimes {
  std::vector<double> dispatch_us, combine_us;
  ExchangeStats stats;
  std::string problem;  // of a result that is wrong; empty if none is
};

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

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

// All experts return what they got, so a token's sum is the token times the sum of its weights.
std::string problem_of(const ExchangePoint& point, const RankInput& input, int rank,
                       const std::vector<std::uint16_t>& out) {
  const auto hidden = static_cast<std::size_t>(point.hidden);
  const bool quantised = point.dtype == DType::kF8E4M3;
  const auto top_k = static_cast<std::size_t>(point.top_k);
  // Weights multiply and sums are rounded on the way, once each.
  constexpr double kRoundings = 3 * 0x1p-8;
  for (std::size_t t = 0; t < static_cast<std::size_t>(point.tokens); ++t) {
    double sum = 0;
    for (std::size_t k = 0; k < top_k; ++k) {
      sum += static_cast<double>(input.routing.weights[t * top_k + k]);
    }
    for (std::size_t c = 0; c < hidden; ++c) {
      const double token =
          quantised ? 1 : static_cast<double>(bf16_to_f32(input.tokens[t * hidden + c]));
      const double expected = sum * token;
      const double found = static_cast<double>(bf16_to_f32(out[t * hidden + c]));
      if (std::abs(found - expected) <= kRoundings * std::abs(expected)) continue;
      return fmt::format("rank {} got {} for token {}, column {}, instead of {}", rank, found, t, c,
                         expected);
    }
  }
  return {};
}

// One rank with its arrays. Experts return the tokens that they get: of FP8 rows bf16 rows of ones.
class RankPlace {
 public:
  RankPlace(const World& world, const ExchangePoint& point, const ExchangeBenchOptions& options)
      : world_(world),
        point_(point),
        input_(point, options.seed * 64 + static_cast<std::uint64_t>(world.rank())),
        exchange_(world, spec_of(point, options.pre_sum)),
        handle_(exchange_.make_handle()) {
    received_.resize(static_cast<std::size_t>(exchange_.rows_needed()) * row_bytes(point.dtype));
    if (quantised()) {
      scales_.resize(static_cast<std::size_t>(exchange_.rows_needed() * groups()));
      results_.assign(static_cast<std::size_t>(exchange_.rows_needed()) * hidden(),
                      f32_to_bf16(1.0f));
    }
    out_.resize(input_.tokens.size());
    dispatch_input_.tokens = {input_.tokens.data(), kResults, point.tokens, point.hidden,
                              point.hidden};
    dispatch_input_.ids = input_.routing.ids;
    dispatch_input_.weights = input_.routing.weights;
    dispatch_output_.rows = received_.data();
    dispatch_output_.capacity = exchange_.rows_needed();
    dispatch_output_.scales = scales_.empty() ? nullptr : scales_.data();
    combine_input_.rows = {quantised() ? static_cast<const void*>(results_.data())
                                       : static_cast<const void*>(received_.data()),
                           kResults, exchange_.rows_needed(), point.hidden, point.hidden};
    combine_output_.data = out_.data();
  }

  RankTimes measure(int repeat) {
    RankTimes times;
    for (int i = 0; i < kWarmUps + repeat; ++i) {
      const double dispatch =
          time([&] { exchange_.dispatch(dispatch_input_, dispatch_output_, handle_); });
      const double combine =
          time([&] { exchange_.combine(combine_input_, combine_output_, handle_); });
      if (i < kWarmUps) continue;
      times.dispatch_us.push_back(dispatch);
      times.combine_us.push_back(combine);
    }
    times.stats = exchange_.stats();
    times.problem = problem_of(point_, input_, world_.rank(), out_);
    return times;
  }

 private:
  bool quantised() const { return point_.dtype == DType::kF8E4M3; }
  std::size_t hidden() const { return static_cast<std::size_t>(point_.hidden); }
  std::size_t row_bytes(DType dtype) const { return hidden() * size_of(dtype); }
  std::int64_t groups() const { return (point_.hidden + 127) / 128; }

  template <typename Call>
  double time(const Call& call) {
    world_.barrier();
    const Clock::time_point start = Clock::now();
    call();
    return microseconds_since(start);
  }

  World world_;
  ExchangePoint point_;
  RankInput input_;
  Exchange exchange_;
  ExchangeHandle handle_;
  std::vector<std::byte> received_;
  std::vector<float> scales_;
  std::vector<std::uint16_t> results_, out_;
  DispatchInput dispatch_input_;
  DispatchOutput dispatch_output_;
  CombineInput combine_input_;
  CombineOutput combine_output_;
};

// The same on a GPU. A time is of one call among kCalls of its kind in a graph, one behind the
// other: ranks are not started at the same time, but after the first call they wait for each other.
class DeviceRankPlace {
 public:
  DeviceRankPlace(const World& world, const ExchangePoint& point,
                  const ExchangeBenchOptions& options)
      : world_(world),
        point_(point),
        input_(point, options.seed * 64 + static_cast<std::uint64_t>(world.rank())),
        device_(set_device(world.rank() % gpu::device_count())),
        exchange_(world, spec_of(point, options.pre_sum), options_of(device_)),
        handle_(exchange_.make_handle()),
        tokens_(uploaded(input_.tokens.data(), input_.tokens.size() * 2)),
        ids_(uploaded(input_.routing.ids.data(), input_.routing.ids.size() * 4)),
        weights_(uploaded(input_.routing.weights.data(), input_.routing.weights.size() * 4)),
        received_(rows() * hidden() * size_of(point.dtype)),
        scales_(quantised() ? rows() * ((hidden() + 127) / 128) * 4 : 0),
        results_(quantised() ? rows() * hidden() * 2 : 0),
        out_(input_.tokens.size() * 2) {
    if (quantised()) {
      const std::vector<std::uint16_t> ones(rows() * hidden(), f32_to_bf16(1.0f));
      results_.upload(ones.data(), results_.bytes());
    }
    world_.barrier();
  }
  ~DeviceRankPlace() {
    try {
      world_.barrier();  // memory is freed when nobody waits any more
    } catch (const Error&) {
      // Another rank gave up, and told so.
    }
  }
  DeviceRankPlace(const DeviceRankPlace&) = delete;
  DeviceRankPlace& operator=(const DeviceRankPlace&) = delete;

  RankTimes measure(int repeat) {
    dispatch();
    combine();
    stream_.synchronize();
    exchange_.check();
    const auto captured = [&](auto&& call) {
      return gpu::Graph::capture(stream_, [&] {
        for (int i = 0; i < kCalls; ++i) call();
      });
    };
    gpu::Graph dispatches = captured([&] { dispatch(); });
    gpu::Graph combines = captured([&] { combine(); });
    RankTimes times;
    for (int i = 0; i < kWarmUps + repeat; ++i) {
      const double dispatch_us = time(dispatches), combine_us = time(combines);
      if (i < kWarmUps) continue;
      times.dispatch_us.push_back(dispatch_us);
      times.combine_us.push_back(combine_us);
    }
    times.stats = exchange_.stats();
    std::vector<std::uint16_t> out(input_.tokens.size());
    out_.download(out.data(), out_.bytes());
    times.problem = problem_of(point_, input_, world_.rank(), out);
    return times;
  }

 private:
  static constexpr int kCalls = 10;

  static int set_device(int device) {
    gpu::set_device(device);
    return device;
  }
  static ExchangeOptions options_of(int device) {
    ExchangeOptions options;
    options.backend = Backend::kCuda;
    options.device = device;
    return options;
  }
  static gpu::DeviceBuffer uploaded(const void* data, std::size_t bytes) {
    gpu::DeviceBuffer buffer(bytes);
    buffer.upload(data, bytes);
    return buffer;
  }
  bool quantised() const { return point_.dtype == DType::kF8E4M3; }
  std::size_t hidden() const { return static_cast<std::size_t>(point_.hidden); }
  std::size_t rows() const { return static_cast<std::size_t>(exchange_.rows_needed()); }

  void dispatch() {
    DispatchInput input;
    input.tokens = {tokens_.data(), kResults, point_.tokens, point_.hidden, point_.hidden};
    input.ids = {ids_.data(), DType::kI32, input_.routing.ids.size()};
    input.weights = {weights_.data(), DType::kF32, input_.routing.weights.size()};
    input.stream = stream_.handle();
    DispatchOutput output;
    output.rows = received_.data();
    output.capacity = exchange_.rows_needed();
    output.scales = reinterpret_cast<float*>(scales_.data());
    output.stream = stream_.handle();
    exchange_.dispatch(input, output, handle_);
  }
  void combine() {
    CombineInput input;
    input.rows = {quantised() ? results_.data() : received_.data(), kResults,
                  exchange_.rows_needed(), point_.hidden, point_.hidden};
    input.stream = stream_.handle();
    CombineOutput output;
    output.data = out_.data();
    output.stream = stream_.handle();
    exchange_.combine(input, output, handle_);
  }
  double time(gpu::Graph& graph) {
    world_.barrier();
    start_.record(stream_);
    graph.launch(stream_);
    end_.record(stream_);
    stream_.synchronize();
    exchange_.check();
    return gpu::Event::elapsed_us(start_, end_) / kCalls;
  }

  World world_;
  ExchangePoint point_;
  RankInput input_;
  int device_;
  gpu::Stream stream_;
  gpu::Event start_, end_;
  Exchange exchange_;
  ExchangeHandle handle_;
  gpu::DeviceBuffer tokens_, ids_, weights_, received_, scales_, results_, out_;
};

// All ranks, on a thread each. Throws the first failure.
std::vector<RankTimes> measure(const ExchangePoint& point, const ExchangeBenchOptions& options) {
  const std::vector<World> worlds = World::threads(options.ranks);
  std::vector<RankTimes> times(worlds.size());
  std::mutex mutex;
  std::exception_ptr failure;
  Threads threads(0, options.ranks, "use fewer ranks (--ranks)", [&](int rank) {
    const World& world = worlds[static_cast<std::size_t>(rank)];
    try {
      RankTimes& mine = times[static_cast<std::size_t>(rank)];
      if (options.backend == Backend::kCuda) {
        mine = DeviceRankPlace(world, point, options).measure(repeats_of(options, point));
      } else {
        mine = RankPlace(world, point, options).measure(repeats_of(options, point));
      }
    } catch (...) {
      {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
      }
      world.abort();
    }
  });
  threads.join();
  if (failure) std::rethrow_exception(failure);
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
      observer_.failed(name_of(point),
                       fmt::format("{}: {}", to_string(error.code()), error.what()));
      continue;
    }
    for (const RankTimes& rank : ranks) {
      if (!rank.problem.empty()) observer_.failed(name_of(point), rank.problem);
    }
    const auto row_of = [&](const char* stage, const std::vector<double>& times,
                            std::uint64_t bytes) {
      ExchangeRow row;
      row.suite = kExchangeSuite;
      row.machine = machine_;
      row.commit = options_.commit;
      row.command = options_.command;
      row.stage = stage;
      row.dtype = short_name(point.dtype);
      row.hidden = point.hidden;
      row.experts = point.experts;
      row.top_k = point.top_k;
      row.ranks = options_.ranks;
      row.tokens_per_rank = point.tokens;
      row.pre_sum = options_.pre_sum;
      row.median_us = percentile(times, 0.5);
      row.p10_us = percentile(times, 0.1);
      row.p90_us = percentile(times, 0.9);
      row.repeats = static_cast<std::int64_t>(times.size());
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
