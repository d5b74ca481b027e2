#include "report/rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/json_text.h"
#include "base/printable.h"
#include "base/read_file.h"

namespace switchyard::report {
namespace {

using Json = nlohmann::json;

// The page's numbers are JavaScript's, which has no whole numbers beyond.
constexpr double kMostWhole = 9007199254740992;  // 2^53
constexpr std::size_t kMostQuantiles = 64;
// The largest trace of a pass has 100 MB.
constexpr std::uint64_t kMostFileBytes = std::uint64_t{1} << 30;

[[noreturn]] void refuse_file(const std::string& source, const std::string& problem,
                              const std::string& remedy) {
  throw Error(ErrorCode::kInvalidFile,
              fmt::format("{} {}; {}", printable(source), problem, remedy));
}

constexpr const char* kRowsRemedy = "give files that 'switchyard bench --json' wrote";
constexpr const char* kPublishedRemedy =
    "write it like results/published.json: a list of series with rival, source, model, experts, "
    "ranks and time_us";

// Of what is no object, of a field that is absent, of one out of its domain.
struct Remedies {
  const char *other, *absent, *wrong;
};
constexpr Remedies kOfRows = {
    kRowsRemedy, "give files that 'switchyard bench --json' wrote, or measure the point again",
    "measure the point again with 'switchyard bench --json'"};
constexpr Remedies kOfPublished = {kPublishedRemedy, kPublishedRemedy, kPublishedRemedy};

// What is given by mistake for a file of rows is most likely one of these.
void require_rows(const Json& file, const std::string& source) {
  if (file.is_object() && file.contains("traceEvents")) {
    refuse_file(source, "is a trace", "give it with --trace, beside files of rows");
  }
  if (file.is_object() && file.contains("benchmarks")) {
    refuse_file(source, "is a result of Google Benchmark, which has other rows", kRowsRemedy);
  }
  if (!file.is_array()) {
    refuse_file(source, fmt::format("is not a list of rows, but {}", excerpt(file)), kRowsRemedy);
  }
  if (file.empty()) {
    refuse_file(source, "is an empty list", "measure something with 'switchyard bench --json'");
  }
  if (file.front().is_object() && file.front().contains("ph")) {
    refuse_file(source, "is a trace", "give it with --trace, beside files of rows");
  }
}

// One element of a file's list. Every getter refuses what is absent or out of its domain.
class RowReader {
 public:
  RowReader(const Json& row, const std::string& source, std::size_t number,
            const Remedies& remedies)
      : row_(row), source_(source), number_(number), remedies_(remedies) {
    if (row.is_object()) return;
    refuse_file(source, fmt::format("row {}: is not an object, but {}", number, excerpt(row)),
                remedies.other);
  }

  std::string text(const char* field) const {
    const Json& value = required(field);
    if (!value.is_string() || value.get_ref<const std::string&>().empty()) {
      refuse(field, value, "a text that is not empty");
    }
    return value.get<std::string>();
  }
  std::string text_or(const char* field, const char* otherwise) const {
    return present(field) ? text(field) : otherwise;
  }

  std::int64_t count(const char* field) const { return static_cast<std::int64_t>(whole(field, 1)); }
  double whole(const char* field, double least = 0) const {
    const Json& value = required(field);
    const double number = value.is_number() ? value.get<double>() : -1;
    if (number < least || number > kMostWhole || number != std::floor(number)) {
      refuse(field, value, fmt::format("a whole number from {}", least));
    }
    return number;
  }

  double microseconds(const char* field) const {
    const Json& value = required(field);
    const double number = value.is_number() ? value.get<double>() : 0;
    // Not finite: there is no such JSON, but a number too large for a double becomes it.
    if (!(number > 0) || !std::isfinite(number)) {
      refuse(field, value, "microseconds, above 0");
    }
    return number;
  }
  std::optional<double> microseconds_if_any(const char* field) const {
    return present(field) ? std::optional(microseconds(field)) : std::nullopt;
  }

  double share(const char* field) const {
    const Json& value = required(field);
    const double number = value.is_number() ? value.get<double>() : -1;
    if (!(number >= 0 && number <= 1)) refuse(field, value, "a number from 0 to 1");
    return number;
  }
  std::optional<double> share_if_any(const char* field) const {
    return present(field) ? std::optional(share(field)) : std::nullopt;
  }

  std::vector<double> ascending(const char* field) const {
    if (!present(field)) return {};
    const Json& list = row_[field];
    const std::string wanted =
        fmt::format("1 to {} ascending numbers, the least not below 0", kMostQuantiles);
    if (!list.is_array() || list.empty() || list.size() > kMostQuantiles) {
      refuse(field, list, wanted);
    }
    std::vector<double> values;
    for (const Json& element : list) {
      const double value = element.is_number() ? element.get<double>() : -1;
      if (!(value >= (values.empty() ? 0 : values.back())) || !std::isfinite(value)) {
        refuse(field, list, wanted);
      }
      values.push_back(value);
    }
    return values;
  }

  bool present(const char* field) const { return row_.contains(field) && !row_[field].is_null(); }

  [[noreturn]] void refuse(const char* field, const Json& value, const std::string& wanted) const {
    refuse_file(source_,
                fmt::format("row {}: '{}' is {}, not {}", number_, field, excerpt(value), wanted),
                remedies_.wrong);
  }

  const Json& required(const char* field) const {
    if (row_.contains(field)) return row_[field];
    refuse_file(source_, fmt::format("row {}: has no '{}'", number_, field), remedies_.absent);
  }

 private:
  const Json& row_;
  const std::string& source_;
  std::size_t number_;
  const Remedies& remedies_;
};

std::optional<Rival> rival_of(const RowReader& read) {
  if (!read.present("rival") && !read.present("rival_us")) return std::nullopt;
  return Rival{.name = read.text("rival"),
               .median_us = read.microseconds("rival_us"),
               .p10_us = read.microseconds_if_any("rival_p10_us"),
               .p90_us = read.microseconds_if_any("rival_p90_us")};
}

Row row_of(const Json& json, const std::string& source, std::size_t number) {
  const RowReader read(json, source, number, kOfRows);
  Row row;
  row.suite = read.text("suite");
  row.machine = read.text("machine");
  row.commit = read.text("commit");
  row.command = read.text("command");
  row.date = read.text_or("date", "");
  row.model = read.text("model");
  row.hidden = read.count("hidden");
  row.intermediate = read.count("intermediate");
  row.experts = read.count("experts");
  row.top_k = read.count("top_k");
  row.dtype = read.text("dtype");
  // As bench takes rows from before they told it.
  row.compute = read.text_or("compute", "bf16");
  row.routing = read.text_or("routing", "gate");
  row.ranks = read.count("ranks");
  row.tokens_per_rank = read.count("tokens_per_rank");
  row.beta = read.share("beta");
  row.beta_reached = read.share_if_any("beta_reached");
  row.median_us = read.microseconds("median_us");
  row.p10_us = read.microseconds("p10_us");
  row.p90_us = read.microseconds("p90_us");
  if (row.p10_us > row.median_us) {
    read.refuse("p10_us", json["p10_us"], fmt::format("at most the median, {}", row.median_us));
  }
  if (row.p90_us < row.median_us) {
    read.refuse("p90_us", json["p90_us"], fmt::format("at least the median, {}", row.median_us));
  }
  row.repeats = read.count("repeats");
  row.touched_bytes = read.whole("touched_bytes");
  row.flops = read.whole("flops");
  row.nvlink_bytes = read.whole("nvlink_bytes");
  row.floor_us = read.microseconds_if_any("floor_us");
  row.rival = rival_of(read);
  row.expert_load = read.ascending("expert_load");
  return row;
}

// What makes two rows the same point: bench's key, and the sizes, which may be overridden.
std::string point_of(const Row& row) {
  return fmt::format(
      "{}: {}, H {}, I {}, {} experts, top-{}, {} computed in {}, {} ranks, routing {}, "
      "{} tokens, beta {}",
      row.suite, row.model, row.hidden, row.intermediate, row.experts, row.top_k, row.dtype,
      row.compute, row.ranks, row.routing, row.tokens_per_rank, row.beta);
}

Json parse(std::string_view text, const std::string& source, const char* remedy) {
  if (const auto at = too_deep_at(text)) {
    refuse_file(source, fmt::format("nests too deep at byte {}", *at), remedy);
  }
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    refuse_file(source, fmt::format("is not JSON ({})", printable(error.what())), remedy);
  }
}

Published published_of(const Json& json, const std::string& source, std::size_t number) {
  const RowReader read(json, source, number, kOfPublished);
  Published series;
  series.rival = read.text("rival");
  series.source = read.text("source");
  series.model = read.text("model");
  series.compute = read.text_or("compute", "");
  series.experts = read.count("experts");
  series.ranks = read.count("ranks");
  const Json& times = read.required("time_us");
  if (!times.is_object() || times.empty()) {
    read.refuse("time_us", times, "an object of microseconds by tokens per rank");
  }
  for (const auto& [key, value] : times.items()) {
    std::int64_t tokens = 0;
    const auto [end, failed] = std::from_chars(key.data(), key.data() + key.size(), tokens);
    const double time = value.is_number() ? value.get<double>() : 0;
    if (failed != std::errc() || end != key.data() + key.size() || tokens < 1 || !(time > 0) ||
        !std::isfinite(time)) {
      read.refuse("time_us", times, "an object of microseconds, above 0, by tokens per rank");
    }
    series.time_us.emplace_back(tokens, time);
  }
  std::sort(series.time_us.begin(), series.time_us.end());
  return series;
}

}  // namespace

std::vector<Published> parse_published(std::string_view text, const std::string& source) {
  const Json file = parse(text, source, kPublishedRemedy);
  if (!file.is_array() || file.empty()) {
    refuse_file(source, fmt::format("is not a list of series, but {}", excerpt(file)),
                kPublishedRemedy);
  }
  std::vector<Published> all;
  for (const Json& element : file) all.push_back(published_of(element, source, all.size() + 1));
  return all;
}

std::string read_file(const std::filesystem::path& path) {
  if (is_absent(path)) {
    throw Error(ErrorCode::kInvalidFile,
                fmt::format("there is no file {}; check its name", printable(path)));
  }
  return read_text(path, kMostFileBytes);
}

std::vector<Row> parse_rows(std::string_view text, const std::string& source) {
  const Json file = parse(text, source, kRowsRemedy);
  require_rows(file, source);
  std::vector<Row> rows;
  for (const Json& element : file) rows.push_back(row_of(element, source, rows.size() + 1));
  return rows;
}

std::vector<Row> read_rows(std::span<const std::filesystem::path> paths) {
  std::vector<Row> all;
  std::map<std::string, std::string> place_of;
  for (const std::filesystem::path& path : paths) {
    std::size_t number = 0;
    for (Row& row : parse_rows(read_file(path), path.string())) {
      const std::string point = point_of(row);
      const std::string place = fmt::format("{} row {}", printable(path), ++number);
      const auto [first, is_new] = place_of.emplace(point, place);
      if (!is_new) {
        throw Error(ErrorCode::kInvalidFile,
                    fmt::format("{} is of the same point as {} ({}); give only one of them", place,
                                first->second, point));
      }
      all.push_back(std::move(row));
    }
  }
  return all;
}

}  // namespace switchyard::report
