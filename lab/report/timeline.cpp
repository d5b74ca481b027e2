#include "report/timeline.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "base/json.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "switchyard/error.h"

namespace switchyard::report {
namespace {

// Ten years. A longer time is an error of the file, and could be too long for 64 bits of
// nanoseconds.
constexpr double kMostMicroseconds = 3.2e14;
// The largest trace of a pass has 100 MB.
constexpr std::uint64_t kMostFileBytes = std::uint64_t{1} << 30;

class TimelineReader {
 public:
  explicit TimelineReader(const std::string& source) : source_(source) {}

  void parse(std::string_view text) {
    const auto take = [this](const Json& event) {
      ++number_;
      if (!event.is_object()) refuse("", event, "an object");
      add(event);
    };
    try {
      read_rest(parse_long_list(text, "traceEvents", "otherData", take));
    } catch (const JsonError& error) {
      not_a_trace(error.reason() == JsonError::Reason::kTooDeep
                      ? fmt::format("is not a trace: it {}", error.what())
                      : fmt::format("is not JSON ({})", error.what()));
    }
  }

  Timeline finish(std::size_t most_slices) {
    std::int64_t first = std::numeric_limits<std::int64_t>::max();
    std::int64_t last = std::numeric_limits<std::int64_t>::min();
    for (auto& [key, track] : tracks_) {
      std::stable_sort(track.slices.begin(), track.slices.end(),
                       [](const Slice& a, const Slice& b) { return a.start_ns < b.start_ns; });
      for (const Slice& slice : track.slices) {
        first = std::min(first, slice.start_ns);
        last = std::max(last, slice.end_ns);
      }
    }
    timeline_.span_ns = last - first;
    std::set<std::int64_t> ranks;
    for (auto& [key, track] : tracks_) {
      if (track.slices.empty()) continue;  // named, but nothing happened there
      for (Slice& slice : track.slices) {
        slice.start_ns -= first;
        slice.end_ns -= first;
      }
      track.rank = key.first;
      track.id = key.second;
      ranks.insert(key.first);
      timeline_.tracks.push_back(std::move(track));
    }
    for (const std::int64_t rank : ranks) timeline_.ranks.push_back({rank, rank_names_[rank]});
    for (const auto& [key, total] : totals_) timeline_.totals.push_back(total);
    merge_short(most_slices);
    return std::move(timeline_);
  }

 private:
  // Reads what the file has besides its events.
  void read_rest(const Json& file) {
    if (!file.is_array() && !file.is_object()) {
      not_a_trace(fmt::format("is not a list of events, but {}", excerpt(file)));
    }
    if (file.is_object() && !file.contains("traceEvents")) not_a_trace("has no 'traceEvents'");
    if (timeline_.num_slices == 0) not_a_trace("has no slices (events of phase \"X\")");
    const Json* const about = file.find("otherData");
    const Json* const dropped = about != nullptr ? about->find("dropped_events") : nullptr;
    if (dropped != nullptr && dropped->is_integer()) timeline_.num_dropped = dropped->integer();
  }

  void add(const Json& event) {
    const std::string phase = text(event, "ph");
    if (phase == "X") {
      add_slice(event);
    } else if (phase == "M") {
      add_name(event);
    } else {
      ++timeline_.num_other;
    }
  }

  void add_slice(const Json& event) {
    Slice slice;
    slice.start_ns = nanoseconds(event, "ts", -kMostMicroseconds);
    slice.busy_ns = nanoseconds(event, "dur", 0);
    slice.end_ns = slice.start_ns + slice.busy_ns;
    slice.name = index_of(text(event, "name"));
    if (const Json* const arguments = event.find("args")) {
      if (!arguments->is_object()) refuse("args", *arguments, "an object");
      slice.tile = argument(*arguments, "tile");
      slice.block = argument(*arguments, "block");
      slice.expert = argument(*arguments, "expert");
      slice.rows = argument(*arguments, "rows");
      slice.peer = argument(*arguments, "peer");
    }
    const std::int64_t rank = whole(event, "pid");
    NameTotal& total = totals_[{rank, slice.name}];
    total.rank = rank;
    total.name = slice.name;
    ++total.count;
    total.total_ns += slice.busy_ns;
    total.longest_ns = std::max(total.longest_ns, slice.busy_ns);
    tracks_[{rank, whole(event, "tid")}].slices.push_back(slice);
    ++timeline_.num_slices;
  }

  void add_name(const Json& event) {
    const std::string what = text(event, "name");
    if (what != "process_name" && what != "thread_name") return;  // sort orders and the like
    const Json* const arguments = event.find("args");
    if (arguments == nullptr || !arguments->is_object()) {
      refuse("args", arguments == nullptr ? Json() : *arguments, "an object with a 'name'");
    }
    const std::string name = text(*arguments, "name");
    const std::int64_t rank = whole(event, "pid");
    if (what == "process_name") {
      rank_names_[rank] = name;
    } else {
      tracks_[{rank, whole(event, "tid")}].name = name;
    }
  }

  std::int32_t index_of(const std::string& name) {
    const auto [found, is_new] =
        name_index_.emplace(name, static_cast<std::int32_t>(timeline_.names.size()));
    if (is_new) timeline_.names.push_back(name);
    return found->second;
  }

  const Json& required(const Json& object, const char* field) const {
    if (const Json* const found = object.find(field)) return *found;
    throw Error(ErrorCode::kInvalidFile,
                fmt::format("{} event {}: has no '{}'; give a trace in Chrome's format, such as "
                            "'switchyard trace' writes",
                            printable(source_), number_, field));
  }

  std::string text(const Json& object, const char* field) const {
    const Json& value = required(object, field);
    if (!value.is_string()) refuse(field, value, "a text");
    return value.text();
  }

  std::int64_t whole(const Json& object, const char* field) const {
    const Json& value = required(object, field);
    if (!value.is_integer()) refuse(field, value, "a whole number");
    return value.integer();
  }

  std::int64_t argument(const Json& arguments, const char* field) const {
    return arguments.contains(field) ? whole(arguments, field) : -1;
  }

  std::int64_t nanoseconds(const Json& event, const char* field, double least) const {
    const Json& value = required(event, field);
    const double us = value.is_number() ? value.number() : std::nan("");
    if (!(us >= least && us <= kMostMicroseconds)) {
      refuse(field, value, least == 0 ? "microseconds, at least 0" : "microseconds");
    }
    return std::llround(us * 1e3);
  }

  [[noreturn]] void refuse(const std::string& field, const Json& value,
                           const std::string& wanted) const {
    throw Error(ErrorCode::kInvalidFile,
                fmt::format("{} event {}: {}is {}, not {}; write the trace again, with 'switchyard "
                            "trace'",
                            printable(source_), number_, field.empty() ? "" : "'" + field + "' ",
                            excerpt(value), wanted));
  }

  [[noreturn]] void not_a_trace(const std::string& problem) const {
    throw Error(ErrorCode::kInvalidFile,
                fmt::format("{} {}; give --trace a trace in Chrome's format, such as 'switchyard "
                            "trace' writes",
                            printable(source_), problem));
  }

  std::size_t count_slices() const {
    std::size_t count = 0;
    for (const Track& track : timeline_.tracks) count += track.slices.size();
    return count;
  }

  // Merges slices that are shorter than a cell of time into one per track, cell and name. Cells
  // double until few enough slices are left. A browser must be able to load the page, and its few
  // thousand pixels show no more.
  void merge_short(std::size_t most_slices) {
    std::int64_t cell_ns = std::max<std::int64_t>(1, timeline_.span_ns >> 16);
    while (count_slices() > most_slices && cell_ns <= timeline_.span_ns) {
      for (Track& track : timeline_.tracks) track.slices = merged(track.slices, cell_ns);
      timeline_.merged_below_ns = cell_ns;
      cell_ns *= 2;
    }
  }

  static std::vector<Slice> merged(const std::vector<Slice>& slices, std::int64_t cell_ns) {
    std::vector<Slice> result;
    std::map<std::int32_t, std::size_t> open;  // by name: where the current cell's slice is
    std::int64_t cell = -1;
    for (const Slice& slice : slices) {
      if (slice.start_ns / cell_ns != cell) {
        cell = slice.start_ns / cell_ns;
        open.clear();
      }
      if (slice.busy_ns >= cell_ns) {
        result.push_back(slice);
        continue;
      }
      const auto [found, is_new] = open.emplace(slice.name, result.size());
      if (is_new) {
        result.push_back(slice);
        continue;
      }
      Slice& sum = result[found->second];
      sum.end_ns = std::max(sum.end_ns, slice.end_ns);
      sum.busy_ns += slice.busy_ns;
      sum.count += slice.count;
      sum.tile = sum.block = sum.expert = sum.rows = sum.peer = -1;
    }
    return result;
  }

  const std::string& source_;
  std::size_t number_ = 0;
  Timeline timeline_;
  std::map<std::string, std::int32_t> name_index_;
  std::map<std::pair<std::int64_t, std::int64_t>, Track> tracks_;
  std::map<std::int64_t, std::string> rank_names_;
  std::map<std::pair<std::int64_t, std::int32_t>, NameTotal> totals_;
};

}  // namespace

Timeline parse_timeline(std::string_view text, const std::string& source, std::size_t most_slices) {
  TimelineReader reader(source);
  reader.parse(text);
  return reader.finish(most_slices);
}

Timeline read_timeline(const std::filesystem::path& path) {
  return parse_timeline(read_named(path, kMostFileBytes), path.string());
}

}  // namespace switchyard::report
