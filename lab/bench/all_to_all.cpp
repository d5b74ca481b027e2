#include "bench/all_to_all.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <ostream>

#include "base/join.h"
#include "bench/floor.h"
#include "bench/load.h"
#include "gpu/device.h"
#include "machine/description.h"
#include "run/ranks.h"
#include "switchyard/error.h"

namespace switchyard::bench {
namespace {

using all_to_all::CallRecords;
using all_to_all::CallTimes;
using all_to_all::Case;
using all_to_all::Features;
using all_to_all::Grids;
using all_to_all::kStages;
using all_to_all::Rank;
using all_to_all::RankOptions;
using all_to_all::Record;
using all_to_all::Rung;
using all_to_all::Stage;
using all_to_all::StageRecords;
using all_to_all::StandIn;
using results::AllToAllRow;

static_assert(all_to_all::kNumStages == results::kNumStages);

constexpr int kWarmUps = 2;
constexpr int kTuningCalls = 5;  // of each number of blocks

std::size_t at(int index) { return static_cast<std::size_t>(index); }
std::size_t at(Stage stage) { return static_cast<std::size_t>(stage); }

int repeats_of(const AllToAllOptions& options) {
  if (options.repeat > 0) return options.repeat;
  return options.backend == Backend::kCuda ? 100 : 5;
}

// The results of one rank on a rung.
struct RankOutcome {
  std::vector<CallTimes> calls;  // the timed ones
  Grids grids{};
  CallRecords records;
  std::string fault;  // in words; empty if all results were right
};

// Calls play(rank, world) on every rank, on a thread each, over fresh ranks for the case. Throws
// the first failure.
void on_ranks(const AllToAllOptions& options, int num_gpus, const Case& problem,
              const std::function<void(Rank&, World&)>& play) {
  std::vector<World> worlds = World::threads(options.ranks);
  run::on_every_rank(options.ranks, [&](int r) {
    // A rank that fails leaves its world, so that the others need not wait for it.
    World world = std::move(worlds[at(r)]);
    RankOptions of_rank;
    of_rank.backend = options.backend;
    of_rank.stand_in = options.stand_in;
    of_rank.deadline = options.deadline;
    if (options.backend == Backend::kCuda) {
      of_rank.device = r % num_gpus;
      of_rank.ranks_on_device = (options.ranks + num_gpus - 1) / num_gpus;
    }
    const std::unique_ptr<Rank> rank = make_rank(world, problem, of_rank);
    play(*rank, world);
    world.barrier();  // nobody reads this rank's memory any more
  });
}

// A number of every rank, of which all ranks get the largest.
class LargestOf {
 public:
  explicit LargestOf(int ranks) : values_(at(ranks)) {}

  double operator()(World& world, double mine) {
    values_[at(world.rank())] = mine;
    world.barrier();
    const double largest = *std::max_element(values_.begin(), values_.end());
    world.barrier();  // all have read
    return largest;
  }

 private:
  std::vector<double> values_;
};

double time_of(Rank& rank, int calls) {
  std::vector<double> times;
  for (int i = 0; i < calls; ++i) {
    rank.get_ready();
    times.push_back(rank.call().total_us);
  }
  return percentile(times, 0.5);
}

// Finds a number of blocks for one stage after the other, each time of the slowest rank.
Grids tuned_grids(Rank& rank, World& world, const Features& features, LargestOf& largest) {
  Grids best = rank.default_grids();
  const std::vector<int> choices = rank.grids_to_try();
  rank.start(features, best);
  double best_us = largest(world, time_of(rank, kTuningCalls));
  for (const Stage stage : kStages) {
    if (stage == Stage::kExperts && features.fused) continue;
    Grids tried = best;
    for (const int blocks : choices) {
      if (blocks == best[at(stage)]) continue;
      tried[at(stage)] = blocks;
      rank.start(features, tried);
      const double us = largest(world, time_of(rank, kTuningCalls));
      if (us >= best_us) continue;
      best_us = us;
      best = tried;
    }
  }
  return best;
}

// The first of two calls that is wrong, in memory that held no numbers before; or nothing.
std::string fault_of_calls(Rank& rank, World& world, const Case& problem, StandIn stand_in,
                           CallRecords* records) {
  std::string fault;
  for (int i = 0; i < 2; ++i) {
    rank.poison();
    rank.call(i == 0 ? records : nullptr);
    const std::string found =
        fault_of(problem, world.rank(), world.size(), stand_in, rank.result());
    if (fault.empty()) fault = found;
  }
  return fault;
}

RankOutcome play_rung(Rank& rank, World& world, const Case& problem, const Rung& rung,
                      const AllToAllOptions& options, LargestOf& largest) {
  RankOutcome outcome;
  outcome.grids =
      rung.features.tuned ? tuned_grids(rank, world, rung.features, largest) : rank.default_grids();
  rank.start(rung.features, outcome.grids);
  outcome.fault = fault_of_calls(rank, world, problem, options.stand_in, nullptr);
  for (int i = 0; i < kWarmUps + repeats_of(options); ++i) {
    rank.get_ready();
    const CallTimes times = rank.call();
    if (i >= kWarmUps) outcome.calls.push_back(times);
  }
  const std::string after =
      fault_of_calls(rank, world, problem, options.stand_in, &outcome.records);
  if (outcome.fault.empty()) outcome.fault = after;
  return outcome;
}

std::vector<double> total_times(const RankOutcome& outcome) {
  std::vector<double> times;
  for (const CallTimes& call : outcome.calls) times.push_back(call.total_us);
  return times;
}

}  // namespace

AllToAllSession::AllToAllSession(AllToAllOptions options, AllToAllObserver& observer)
    : options_(std::move(options)), observer_(observer) {
  for (const std::vector<Case>* cases : {&options_.tests, &options_.benchmarks}) {
    for (const Case& problem : *cases) require_playable(problem, options_.ranks);
  }
  machine_ = machine::describe_machine(options_.backend, options_.ranks);
  if (options_.backend == Backend::kCuda) num_gpus_ = std::min(gpu::device_count(), options_.ranks);
}

std::vector<AllToAllRow> AllToAllSession::run() {
  const std::uint64_t all = options_.tests.size() + options_.benchmarks.size();
  std::uint64_t done = 0;
  bool right = true;
  for (const Case& problem : options_.tests) {
    observer_.measuring(done++, all);
    right = check(problem) && right;
  }
  if (right) observer_.checked(options_.tests.size());
  std::vector<AllToAllRow> rows;
  for (const Case& problem : options_.benchmarks) {
    observer_.measuring(done++, all);
    const std::vector<AllToAllRow> of_case = measure(problem);
    for (const AllToAllRow& row : of_case) observer_.measured(row);
    if (!of_case.empty()) observer_.keep(of_case);
    rows.insert(rows.end(), of_case.begin(), of_case.end());
  }
  return rows;
}

bool AllToAllSession::check(const Case& problem) {
  // [rung][rank]
  std::vector<std::vector<std::string>> faults(options_.rungs.size(),
                                               std::vector<std::string>(at(options_.ranks)));
  bool right = true;
  try {
    on_ranks(options_, num_gpus_, problem, [&](Rank& rank, World& world) {
      for (std::size_t i = 0; i < options_.rungs.size(); ++i) {
        rank.start(options_.rungs[i].features, rank.default_grids());
        faults[i][at(world.rank())] =
            fault_of_calls(rank, world, problem, options_.stand_in, nullptr);
      }
    });
  } catch (const Error& error) {
    observer_.failed_by(name_of(problem), error);
    return false;
  }
  for (std::size_t i = 0; i < faults.size(); ++i) {
    for (const std::string& fault : faults[i]) {
      if (fault.empty()) continue;
      right = false;
      observer_.failed(fmt::format("{}, rung {}", name_of(problem), options_.rungs[i].name), fault);
    }
  }
  return right;
}

std::vector<AllToAllRow> AllToAllSession::measure(const Case& problem) {
  // [rung][rank]
  std::vector<std::vector<RankOutcome>> outcomes(options_.rungs.size(),
                                                 std::vector<RankOutcome>(at(options_.ranks)));
  LargestOf largest(options_.ranks);
  try {
    on_ranks(options_, num_gpus_, problem, [&](Rank& rank, World& world) {
      for (std::size_t i = 0; i < options_.rungs.size(); ++i) {
        outcomes[i][at(world.rank())] =
            play_rung(rank, world, problem, options_.rungs[i], options_, largest);
      }
    });
  } catch (const Error& error) {
    observer_.failed_by(name_of(problem), error);
    return {};
  }
  const double bytes = 2 * static_cast<double>(traffic_of(problem, options_.ranks).busiest()) *
                       static_cast<double>(problem.hidden) * 2;
  std::vector<AllToAllRow> rows;
  traces_.clear();
  for (std::size_t i = 0; i < options_.rungs.size(); ++i) {
    const std::vector<RankOutcome>& ranks = outcomes[i];
    traces_.push_back({options_.rungs[i].name, {}});
    bool right = true;
    auto row = row_of_run<AllToAllRow>(kAllToAllSuite, machine_, options_);
    for (const RankOutcome& rank : ranks) {
      traces_.back().of_rank.push_back(rank.records);
      row.receive_imbalance =
          std::max(row.receive_imbalance.value_or(0), receive_imbalance(rank.records));
      const std::vector<double> times = total_times(rank);
      row.rank_us.push_back(percentile(times, 0.5));
      row.times_us.resize(times.size());
      for (std::size_t n = 0; n < times.size(); ++n) {
        row.times_us[n] = std::max(row.times_us[n], times[n]);
      }
      for (const Stage stage : kStages) {
        if (stage == Stage::kExperts && options_.rungs[i].features.fused) continue;
        std::vector<double> of_stage;
        for (const CallTimes& call : rank.calls) of_stage.push_back(call.stage_us[at(stage)]);
        row.stage_us[at(stage)].push_back(percentile(of_stage, 0.5));
      }
      if (rank.fault.empty()) continue;
      right = false;
      observer_.failed(fmt::format("{}, rung {}", name_of(problem), options_.rungs[i].name),
                       rank.fault);
    }
    if (!right) continue;  // the time of a wrong result is no time
    row.problem = name_of(problem);
    row.experts = problem.num_experts;
    row.top_k = problem.top_k;
    row.hidden = problem.hidden;
    row.max_tokens = problem.max_tokens;
    row.rung = options_.rungs[i].name;
    row.stand_in = options_.stand_in == StandIn::kRank ? "rank" : "random";
    row.ranks = options_.ranks;
    if (num_gpus_ > 0) row.gpus = num_gpus_;
    set_times(row, row.times_us);
    row.nvlink_bytes = bytes;
    row.floor_us = links_floor_us(bytes, options_.ranks, num_gpus_);
    row.blocks = join(ranks.front().grids, ", ");
    rows.push_back(std::move(row));
  }
  return rows;
}

std::vector<RungMean> rung_means(const std::vector<AllToAllRow>& rows) {
  std::vector<RungMean> means;
  for (const AllToAllRow& row : rows) {
    auto mean = std::find_if(means.begin(), means.end(),
                             [&](const RungMean& other) { return other.rung == row.rung; });
    if (mean == means.end()) mean = means.insert(means.end(), {row.rung, 0, 0});
    ++mean->cases;
    mean->mean_us += std::log(row.median_us);  // the sum, until the end
  }
  for (RungMean& mean : means) {
    mean.mean_us = std::exp(mean.mean_us / static_cast<double>(mean.cases));
  }
  return means;
}

double receive_imbalance(const CallRecords& records) {
  const StageRecords& receive = records[at(Stage::kDispatchReceive)];
  std::uint64_t most = 0, sum = 0;
  for (int block = 0; block < receive.blocks; ++block) {
    std::uint64_t of_block = 0;
    for (int warp = 0; warp < receive.warps; ++warp) {
      of_block += receive.of_worker[at(block * receive.warps + warp)].rows;
    }
    most = std::max(most, of_block);
    sum += of_block;
  }
  if (sum == 0) return 0;
  return static_cast<double>(most) * receive.blocks / static_cast<double>(sum);
}

void write_all_to_all_trace(std::ostream& out, const std::vector<AllToAllTrace>& traces) {
  out << "{\"displayTimeUnit\": \"ns\", \"traceEvents\": [\n";
  const char* separator = "";
  const auto event = [&](const std::string& text) {
    out << separator << text;
    separator = ",\n";
  };
  int process = 0;
  for (const AllToAllTrace& trace : traces) {
    for (std::size_t r = 0; r < trace.of_rank.size(); ++r) {
      const CallRecords& records = trace.of_rank[r];
      ++process;
      event(fmt::format(R"({{"ph": "M", "name": "process_name", "pid": {}, "args": {{"name": )"
                        R"("{}, rank {}"}}}})",
                        process, trace.rung, r));
      std::uint64_t start = ~std::uint64_t{0};
      int blocks = 0;
      for (const StageRecords& stage : records) {
        blocks = std::max(blocks, stage.blocks);
        for (const Record& record : stage.of_worker) {
          if (record.valid != 0) start = std::min(start, record.begin_ns);
        }
      }
      for (int block = 0; block < blocks; ++block) {
        event(fmt::format(R"({{"ph": "M", "name": "thread_name", "pid": {}, "tid": {}, "args": )"
                          R"({{"name": "block {}"}}}})",
                          process, block, block));
      }
      for (const Stage stage : kStages) {
        const StageRecords& of_stage = records[at(stage)];
        for (int block = 0; block < of_stage.blocks; ++block) {
          Record whole{~std::uint64_t{0}, 0, 0, 0, 0};
          for (int warp = 0; warp < of_stage.warps; ++warp) {
            const Record& record = of_stage.of_worker[at(block * of_stage.warps + warp)];
            if (record.valid == 0) continue;
            whole.begin_ns = std::min(whole.begin_ns, record.begin_ns);
            whole.end_ns = std::max(whole.end_ns, record.end_ns);
            whole.waited_ns = std::max(whole.waited_ns, record.waited_ns);
            whole.rows += record.rows;
            whole.valid = 1;
          }
          if (whole.valid == 0) continue;
          event(fmt::format(R"({{"ph": "X", "name": "{}", "pid": {}, "tid": {}, "ts": {:.3f}, )"
                            R"("dur": {:.3f}, "args": {{"rows": {}, "longest_wait_us": {:.3f}}}}})",
                            to_string(stage), process, block,
                            static_cast<double>(whole.begin_ns - start) * 1e-3,
                            static_cast<double>(whole.end_ns - whole.begin_ns) * 1e-3, whole.rows,
                            static_cast<double>(whole.waited_ns) * 1e-3));
        }
      }
    }
  }
  out << "\n]}\n";
}

}  // namespace switchyard::bench
