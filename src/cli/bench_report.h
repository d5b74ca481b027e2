// What a measurement is compared with, and how it is kept: one JSON row per point.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/bench_suite.h"
#include "switchyard/weights.h"

namespace switchyard::cli {

// What one GPU has to do in a pass. Weights are as stored, scales included.
struct Load {
  std::uint64_t touched_bytes = 0;  // of expert weights
  double flops = 0;
  std::uint64_t nvlink_bytes = 0;  // sent to other ranks
};

// The most that any of `ranks` ranks has to do, in each respect by itself, when tokens_per_expert
// [E] counts the tokens of all of them: the experts that are the rank's, and the shared expert for
// its tokens_per_rank tokens. The bytes it sends are for the layer to tell.
Load heaviest_load(const LayerSpec& spec, const MoeWeights& weights,
                   const std::vector<std::int64_t>& tokens_per_expert, std::int64_t tokens_per_rank,
                   int ranks);

// The floor of one launch on an H200:
//   F = max(7 us + touched weight bytes / 4.6 TB/s, FLOPs / 750 TFLOP/s),
// with 1300 TFLOP/s for a layer that computes in FP8, and with several ranks, a GPU each,
//   F = max(10 us + touched weight bytes / 4.6 TB/s, FLOPs / 750 TFLOP/s, NVLink bytes / 330 GB/s).
// Measured on that chip: the launch and the rate are those of a bulk read of 16 MB to 8 GiB by one
// kernel; the arithmetic is cuBLAS's bf16 product of 8192^3 (758 TFLOP/s), a little rounded down,
// and cuBLASLt's FP8 product of 8192^3 with one scale per tensor (1272 TFLOP/s), a little rounded
// up. Ranks add two crossings of NVLink, to the experts and back, of 1.4 us each from the store of
// a flag until its reader sees it; 330 GB/s is what every one of eight GPUs gets out while it
// writes to the seven others (329 to 344), of the 450 of its links. The gate, where it is timed, is
// in the time, not in the floor.
struct H200 {
  static constexpr double kLaunchSeconds = 7e-6;
  static constexpr double kRanksLaunchSeconds = 10e-6;
  static constexpr double kReadBytesPerSecond = 4.6e12;
  static constexpr double kNvlinkBytesPerSecond = 330e9;
  static constexpr double kBf16FlopsPerSecond = 750e12;
  static constexpr double kFp8FlopsPerSecond = 1300e12;
};
double floor_us(const Load& load, DType compute, int ranks);

// The load of experts that got `tokens_per_expert` tokens, sorted, as multiples of their mean: of
// each expert, or of more than 64 the quantiles from the least to the most (nearest rank). Empty
// where no token came.
std::vector<double> load_quantiles(std::vector<std::int64_t> tokens_per_expert);

// The value below which `share` of the values lie (nearest rank). Throws Error{kInvalidArgument}
// for no values.
double percentile(std::vector<double> values, double share);

// How passes follow each other when they are timed; {1, 1}: by themselves.
struct Rotation {
  int copies = 1;  // of the layer's weights
  int passes = 1;  // between two looks at the clock
};

struct Rival {
  std::string name;  // "torch 2.11.0 ordered"
  double median_us = 0;
  double p10_us = 0;
  double p90_us = 0;
  int experts_hit = 0;  // by its own gate, to be seen that it had the same load
};

struct BenchRow {
  std::string suite, machine, commit, command;
  BenchLayer layer;
  DType dtype = DType::kBF16;  // of the expert weights
  DType compute = DType::kBF16;
  int ranks = 1;
  std::int64_t tokens_per_rank = 0;
  double beta = 1;          // as asked for
  double beta_reached = 1;  // of the experts' histogram
  int experts_hit = 0;
  bool given_routing = false;
  // Of every repetition, in their order. Either may be empty where it was not asked for; the rows'
  // main numbers are those of the graph if there are any.
  std::vector<double> graph_us, no_graph_us;
  Rotation rotation;
  Load load;                        // of the most loaded rank
  std::vector<double> expert_load;  // load_quantiles(), over all ranks
  std::optional<double> floor_us;   // none for a machine that the constants are not of
  std::optional<int> graph_nodes;   // GPU operations of one pass
  std::optional<Rival> rival;
  std::optional<double> error, error_bound;  // of --verify

  const std::vector<double>& times() const { return graph_us.empty() ? no_graph_us : graph_us; }
  double median_us() const { return percentile(times(), 0.5); }
  std::optional<double> time_over_floor() const {
    return floor_us ? std::optional(median_us() / *floor_us) : std::nullopt;
  }
};

nlohmann::ordered_json to_json(const BenchRow& row);

// Throws what merge_rows() would throw for this file, before there are rows to lose.
void require_rows_file(const std::string& path);

// Replaces the rows of a file (an array of objects) that are of the same suite, model, sizes,
// tokens, beta, dtype, compute, ranks and source of routing as one of `rows`, and appends the
// others; the file appears whole or not at all, and processes that do it at once wait for each
// other. `keep_rival`: a row without a rival inherits that of the row it replaces. Throws
// Error{kInvalidFile} for a file that is something else, and what output_file() and write_whole()
// throw.
void merge_rows(const std::filesystem::path& path, std::span<const BenchRow> rows, bool keep_rival);

// One line per row under one line of names, at most kReportColumns columns.
std::string row_heading();
std::string row_text(const BenchRow& row);
// The rows that have a rival, beside it.
std::vector<std::string> rival_text(std::span<const BenchRow> rows);
// Geometric mean of time / floor, the worst point, and those slower than their rival.
std::vector<std::string> summary_text(std::span<const BenchRow> rows);

}  // namespace switchyard::cli
