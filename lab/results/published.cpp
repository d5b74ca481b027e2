#include "results/published.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "base/read_file.h"
#include "common/numbers.h"
#include "results/fields.h"

namespace switchyard::results {
namespace {

constexpr const char* kRemedy =
    "write it like results/published.json: a list of series with rival, source, model, experts, "
    "ranks and time_us";
constexpr Remedies kRemedies = {kRemedy, kRemedy, kRemedy};

Published published_of(const Json& json, const std::string& source, std::size_t number) {
  const FieldReader read(json, source, number, kRemedies);
  Published series{
      .rival = read.text("rival"), .source = read.text("source"), .model = read.text("model")};
  if (read.present("compute")) series.compute = read.text("compute");
  series.experts = read.count("experts");
  series.ranks = read.count("ranks");
  const Json& times = read.required("time_us");
  if (!times.is_object() || times.members().empty()) {
    read.refuse("time_us", "an object of microseconds by tokens per rank");
  }
  for (const auto& [key, value] : times.members()) {
    const std::optional<std::int64_t> tokens = parse_whole(key);
    const double time = value.is_number() ? value.number() : 0;
    if (!tokens || *tokens < 1 || !(time > 0) || !std::isfinite(time)) {
      read.refuse("time_us", "an object of microseconds, above 0, by tokens per rank");
    }
    series.time_us.emplace_back(*tokens, time);
  }
  std::sort(series.time_us.begin(), series.time_us.end());
  return series;
}

}  // namespace

std::vector<Published> parse_published(std::string_view text, const std::string& source) {
  const Json file = parse(text, source, kRemedy);
  if (!file.is_array() || file.elements().empty()) {
    refuse_file(source, fmt::format("is not a list of series, but {}", excerpt(file)), kRemedy);
  }
  std::vector<Published> all;
  for (const Json& element : file.elements())
    all.push_back(published_of(element, source, all.size() + 1));
  return all;
}

std::vector<Published> read_published(const std::filesystem::path& path) {
  return parse_published(read_named(path, kMostFileBytes), path.string());
}

}  // namespace switchyard::results
