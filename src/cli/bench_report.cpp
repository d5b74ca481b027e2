#include "cli/bench_rows.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <numeric>
#include <system_error>

#include "base/json_text.h"
#include "base/posix.h"
#include "base/printable.h"
#include "base/whole_file.h"
#include "cli/arguments.h"
#include "cli/output_file.h"
#include "protocol/partition.h"
#include "report/rows.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// As in src/report/rows.cpp: the sizes, too, which may be overridden.
constexpr std::array kKey = {"suite",   "model",   "hidden", "intermediate",
                             "experts", "top_k",   "dtype",  "compute",
                             "ranks",   "routing", "beta",   "tokens_per_rank"};
constexpr std::array kRivalFields = {"rival", "rival_us", "rival_p10_us", "rival_p90_us"};

double rounded(double value, int digits) {
  const double scale = std::pow(10.0, digits);
  return std::round(value * scale) / scale;
}
// Events resolve half a microsecond or worse; more digits only make the files longer.
double hundredths(double value) { return rounded(value, 2); }

Json microseconds(const std::vector<double>& values) {
  Json list = Json::array();
  for (const double value : values) list.push_back(hundredths(value));
  return list;
}

template <typename T>
Json or_null(const std::optional<T>& value) {
  return value ? Json(*value) : Json(nullptr);
}

// What a row has where it lacks a field of its key.
Json absent(std::string_view field) {
  // Rows were all computed in bf16 before they told it.
  return field == "compute" ? Json(dtype_argument(DType::kBF16)) : Json(nullptr);
}

Json key_of(const Json& row) {
  Json key = Json::array();
  for (const char* field : kKey) key.push_back(row.contains(field) ? row[field] : absent(field));
  return key;
}

[[noreturn]] void not_rows(const fs::path& path, const std::string& problem) {
  throw Error(ErrorCode::kInvalidFile,
              fmt::format("{} {}; give --json a file of rows, or one that does not exist yet",
                          printable(path), problem));
}

std::vector<Json> read_rows(const fs::path& path) {
  std::error_code ignored;
  if (fs::status(path, ignored).type() == fs::file_type::not_found) return {};
  const std::string text = report::read_file(path);
  if (const auto at = too_deep_at(text)) {
    not_rows(path, fmt::format("nests too deep at byte {}", *at));
  }
  const Json rows = Json::parse(text, nullptr, false);
  if (rows.is_discarded()) not_rows(path, "is not JSON");
  if (!rows.is_array()) not_rows(path, "is not a JSON array");
  for (const Json& row : rows) {
    if (!row.is_object()) not_rows(path, "has elements that are not objects");
  }
  return {rows.begin(), rows.end()};
}

// A row to a line: differences between versions of the file then show which points changed.
std::string text_of(const std::vector<Json>& rows) {
  std::string text;
  for (const Json& row : rows) {
    text += text.empty() ? "[\n" : ",\n";
    // A command line need not be UTF-8, as JSON is.
    text += row.dump(-1, ' ', false, Json::error_handler_t::replace);
  }
  return text.empty() ? "[]\n" : text + "\n]\n";
}

// Held by one process at a time, as long as it lives. Of the directory: a file of rows is replaced,
// and a lock file would stay. Where the file system has no locks, nothing is lost but the lock.
class DirectoryLock {
 public:
  explicit DirectoryLock(const fs::path& directory)
      : fd_(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    while (fd_ && ::flock(fd_.get(), LOCK_EX) != 0 && errno == EINTR) {
    }
  }

 private:
  UniqueFd fd_;
};

std::string point_heading() {
  return fmt::format("{:<16} {:>4} {:>5} {:>6} {:>5}", "model", "exp.", "ranks", "tokens", "beta");
}
std::string point_text(const BenchRow& row) {
  return fmt::format("{:<16} {:>4} {:>5} {:>6} {:>5.2f}", row.layer.model,
                     row.layer.spec.num_experts, row.ranks, row.tokens_per_rank, row.beta_reached);
}

std::string point_name(const BenchRow& row) {
  return fmt::format("{}, {} experts, {} tokens{}, beta {:.2g}", row.layer.model,
                     row.layer.spec.num_experts, row.tokens_per_rank,
                     row.ranks == 1 ? "" : fmt::format(" on each of {} ranks", row.ranks),
                     row.beta);
}

}  // namespace

Load heaviest_load(const LayerSpec& spec, const MoeWeights& weights,
                   const std::vector<std::int64_t>& tokens_per_expert, std::int64_t tokens_per_rank,
                   int ranks) {
  const protocol::ExpertPartition experts{spec.num_experts, ranks};
  const double flops_per_width = 2.0 * (spec.activation.gated ? 3 : 2) * spec.hidden;
  Load most;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::int64_t> own(tokens_per_expert.size());
    const auto first = tokens_per_expert.begin() + experts.begin(rank);
    std::copy(first, first + experts.count(rank), own.begin() + experts.begin(rank));
    const auto rows = static_cast<double>(std::accumulate(own.begin(), own.end(), std::int64_t{0}));
    const double shared = static_cast<double>(tokens_per_rank) * spec.shared_intermediate;
    most.flops = std::max(most.flops, flops_per_width * (rows * spec.intermediate + shared));
    most.touched_bytes = std::max(most.touched_bytes, touched_weight_bytes(weights, own));
  }
  return most;
}

double floor_us(const Load& load, DType compute, int ranks) {
  const double launch = ranks == 1 ? H200::kLaunchSeconds : H200::kRanksLaunchSeconds;
  const double rate =
      compute == DType::kF8E4M3 ? H200::kFp8FlopsPerSecond : H200::kBf16FlopsPerSecond;
  const double read = static_cast<double>(load.touched_bytes) / H200::kReadBytesPerSecond;
  const double sent = static_cast<double>(load.nvlink_bytes) / H200::kNvlinkBytesPerSecond;
  return std::max({launch + read, load.flops / rate, sent}) * 1e6;
}

std::vector<double> load_quantiles(std::vector<std::int64_t> tokens_per_expert) {
  constexpr std::size_t kMost = 64;
  const auto sum = std::accumulate(tokens_per_expert.begin(), tokens_per_expert.end(), 0.0);
  if (sum == 0) return {};
  std::sort(tokens_per_expert.begin(), tokens_per_expert.end());
  const double mean = sum / static_cast<double>(tokens_per_expert.size());
  const std::size_t last = tokens_per_expert.size() - 1;
  const std::size_t count = std::min(tokens_per_expert.size(), kMost);
  std::vector<double> quantiles;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t at = count == 1 ? last : (i * last + (count - 1) / 2) / (count - 1);
    quantiles.push_back(static_cast<double>(tokens_per_expert[at]) / mean);
  }
  return quantiles;
}

double percentile(std::vector<double> values, double share) {
  if (values.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "a percentile of no values; measure at least once");
  }
  const auto last = static_cast<double>(values.size() - 1);
  const auto at = static_cast<std::ptrdiff_t>(std::lround(share * last));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<std::size_t>(at)];
}

Json to_json(const BenchRow& row) {
  const LayerSpec& spec = row.layer.spec;
  const bool both = !row.graph_us.empty() && !row.no_graph_us.empty();
  const Json no_graph =
      row.no_graph_us.empty() ? Json(nullptr) : Json(hundredths(percentile(row.no_graph_us, 0.5)));
  Json expert_load = Json::array();
  for (const double load : row.expert_load) expert_load.push_back(rounded(load, 3));
  Json json = {{"suite", row.suite},
               {"machine", row.machine},
               {"commit", row.commit},
               {"command", row.command},
               {"model", row.layer.model},
               {"hidden", spec.hidden},
               {"intermediate", spec.intermediate},
               {"experts", spec.num_experts},
               {"top_k", spec.top_k},
               {"dtype", dtype_argument(row.dtype)},
               {"compute", dtype_argument(row.compute)},
               {"ranks", row.ranks},
               {"tokens_per_rank", row.tokens_per_rank},
               {"beta", row.beta},
               {"median_us", hundredths(row.median_us())},
               {"p10_us", hundredths(percentile(row.times(), 0.1))},
               {"p90_us", hundredths(percentile(row.times(), 0.9))},
               {"repeats", row.times().size()},
               {"touched_bytes", row.load.touched_bytes},
               {"flops", static_cast<std::uint64_t>(row.load.flops)},
               {"nvlink_bytes", row.load.nvlink_bytes},
               {"floor_us", row.floor_us ? Json(hundredths(*row.floor_us)) : Json(nullptr)},
               {"rival", row.rival ? Json(row.rival->name) : Json(nullptr)},
               {"rival_us", nullptr},
               {"rival_p10_us", nullptr},
               {"rival_p90_us", nullptr},
               {"median_us_no_graph", no_graph},
               {"beta_reached", rounded(row.beta_reached, 4)},
               {"experts_hit", row.experts_hit},
               {"expert_load", expert_load.empty() ? Json(nullptr) : expert_load},
               {"routing", row.given_routing ? "given" : "gate"},
               {"rotation_copies", row.rotation.copies},
               {"rotation_passes", row.rotation.passes},
               {"graph_nodes", or_null(row.graph_nodes)},
               {"error", or_null(row.error)},
               {"error_bound", or_null(row.error_bound)},
               {"times_us", microseconds(row.times())}};
  if (both) json["times_us_no_graph"] = microseconds(row.no_graph_us);
  if (row.rival) {
    json["rival_us"] = hundredths(row.rival->median_us);
    json["rival_p10_us"] = hundredths(row.rival->p10_us);
    json["rival_p90_us"] = hundredths(row.rival->p90_us);
  }
  return json;
}

void require_rows_file(const std::string& path) { read_rows(output_file("--json", path)); }

void merge_rows(const fs::path& path, std::span<const BenchRow> rows, bool keep_rival) {
  const fs::path file = output_file("--json", path);
  const DirectoryLock lock(file.parent_path());
  std::vector<Json> all = read_rows(file);
  for (const BenchRow& row : rows) {
    Json json = to_json(row);
    const auto same = std::find_if(all.begin(), all.end(), [key = key_of(json)](const Json& old) {
      return key_of(old) == key;
    });
    if (same == all.end()) {
      all.push_back(std::move(json));
      continue;
    }
    if (keep_rival && !row.rival) {
      for (const char* field : kRivalFields) {
        if (same->contains(field)) json[field] = (*same)[field];
      }
    }
    *same = std::move(json);
  }
  write_whole(file, text_of(all));
}

std::string row_heading() {
  return fmt::format("{} {:>9} {:>19} {:>8} {:>6} {:>7} {:>5}", point_heading(), "time us",
                     "p10 .. p90 us", "no graph", "time/F", "TFLOP/s", "GB/s");
}

std::string row_text(const BenchRow& row) {
  const double seconds = row.median_us() * 1e-6;
  const bool both = !row.graph_us.empty() && !row.no_graph_us.empty();
  const std::string no_graph =
      both ? fmt::format("{:.1f}", percentile(row.no_graph_us, 0.5)) : std::string("-");
  const std::string over_floor =
      row.floor_us ? fmt::format("{:.3f}", *row.time_over_floor()) : std::string("-");
  return fmt::format("{} {:>9.1f} {:>8.1f} .. {:>7.1f} {:>8} {:>6} {:>7.1f} {:>5.0f}",
                     point_text(row), row.median_us(), percentile(row.times(), 0.1),
                     percentile(row.times(), 0.9), no_graph, over_floor,
                     row.load.flops / seconds * 1e-12,
                     static_cast<double>(row.load.touched_bytes) / seconds * 1e-9);
}

std::vector<std::string> rival_text(std::span<const BenchRow> rows) {
  std::vector<std::string> lines;
  for (const BenchRow& row : rows) {
    if (!row.rival) continue;
    if (lines.empty()) {
      lines.push_back(fmt::format("{} {:>9} {:>9} {:>9}  {}", point_heading(), "time us",
                                  "rival us", "speed-up", "rival"));
    }
    lines.push_back(fmt::format("{} {:>9.1f} {:>9.1f} {:>9.2f}  {}", point_text(row),
                                row.median_us(), row.rival->median_us,
                                row.rival->median_us / row.median_us(), row.rival->name));
  }
  return lines;
}

std::vector<std::string> summary_text(std::span<const BenchRow> rows) {
  std::vector<std::string> lines;
  double log_sum = 0;
  std::int64_t with_floor = 0, with_rival = 0;
  const BenchRow* worst = nullptr;
  std::vector<std::string> slower;
  for (const BenchRow& row : rows) {
    if (row.floor_us) {
      ++with_floor;
      log_sum += std::log(*row.time_over_floor());
      if (worst == nullptr || *row.time_over_floor() > *worst->time_over_floor()) worst = &row;
    }
    if (!row.rival) continue;
    ++with_rival;
    if (row.median_us() < row.rival->median_us) continue;
    slower.push_back(fmt::format("  {}: {:.1f} us, {} {:.1f} us", point_name(row), row.median_us(),
                                 row.rival->name, row.rival->median_us));
  }
  if (worst != nullptr) {
    lines.push_back(fmt::format("time / floor: geometric mean {:.3f} over {} points",
                                std::exp(log_sum / static_cast<double>(with_floor)), with_floor));
    lines.push_back(
        fmt::format("worst: {:.3f} ({})", *worst->time_over_floor(), point_name(*worst)));
  }
  if (with_rival > 0) {
    lines.push_back(fmt::format("slower than the rival: {} of {} points{}", slower.size(),
                                with_rival, slower.empty() ? "" : ":"));
    lines.insert(lines.end(), slower.begin(), slower.end());
  }
  return lines;
}

}  // namespace switchyard::cli
