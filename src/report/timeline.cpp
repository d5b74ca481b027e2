#include "report/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/json_text.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "switchyard/error.h"

namespace switchyard::report {
namespace {

using Json = nlohmann::json;

// Beyond ten years a time is not one, and nanoseconds leave 64 bits.
constexpr double kMostMicroseconds = 3.2e14;
// The largest trace of a pass has 100 MB.
constexpr std::uint64_t kMostFileBytes = std::uint64_t{1} << 30;

class TimelineReader {
 public:
  explicit TimelineReader(const std::string& source) : source_(source) {}

  // An event is dropped once it is read: traces have millions.
  void parse(std::string_view text) {
    if (const auto at = too_deep_at(text)) {
      not_a_trace(fmt::format("is not a trace: it nests too deep at byte {}", *at));
    }
    bool in_events = false;
    const auto filter = [&](int depth, Json::parse_event_t event, Json& parsed) {
      if (depth == 0) {
        if (event == Json::parse_event_t::array_start) event_depth_ = 1;
        if (event == Json::parse_event_t::object_start) event_depth_ = 2;
        return true;
      }
      if (event == Json::parse_event_t::key && depth == 1 && event_depth_ == 2) {
        in_events = parsed == "traceEvents";
        has_events_ = has_events_ || in_events;
        return in_events || parsed == "otherData";  // no more of the file is drawn
      }
      if (depth != event_depth_ || (event_depth_ == 2 && !in_events)) return true;
      if (event == Json::parse_event_t::object_end) {
        ++number_;
        add(parsed);
        return false;
      }
      if (event == Json::parse_event_t::value || event == Json::parse_event_t::array_end) {
        ++number_;
        refuse("", parsed, "an object");
      }
      return true;
    };
    try {
      const Json rest = Json::parse(text, filter);
      if (event_depth_ == 0) {
        not_a_trace(fmt::format("is not a list of events, but {}", excerpt(rest)));
      }
      const Json::json_pointer dropped("/otherData/dropped_events");
      if (rest.contains(dropped) && rest[dropped].is_number_integer()) {
        timeline_.num_dropped = rest[dropped].get<std::int64_t>();
      }
    } catch (const Json::exception& error) {
      not_a_trace(fmt::format("is not JSON ({})", error.what()));
    }
    if (event_depth_ == 2 && !has_events_) not_a_trace("has no 'traceEvents'");
    if (timeline_.num_slices == 0) not_a_trace("has no slices (events of phase \"X\")");
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
    if (const auto arguments = event.find("args"); arguments != event.end()) {
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
    const auto arguments = event.find("args");
    if (arguments == event.end() || !arguments->is_object()) {
      refuse("args", arguments == event.end() ? Json() : *arguments, "an object with a 'name'");
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
    const auto found = object.find(field);
    if (found != object.end()) return *found;
    throw Error(ErrorCode::kInvalidFile,
                fmt::format("{} event {}: has no '{}'; give a trace in Chrome's format, such as "
                            "'switchyard trace' writes",
                            printable(source_), number_, field));
  }

  std::string text(const Json& object, const char* field) const {
    const Json& value = required(object, field);
    if (!value.is_string()) refuse(field, value, "a text");
    return value.get<std::string>();
  }

  std::int64_t whole(const Json& object, const char* field) const {
    const Json& value = required(object, field);
    if (!value.is_number_integer()) refuse(field, value, "a whole number");
    return value.get<std::int64_t>();
  }

  std::int64_t argument(const Json& arguments, const char* field) const {
    return arguments.contains(field) ? whole(arguments, field) : -1;
  }

  std::int64_t nanoseconds(const Json& event, const char* field, double least) const {
    const Json& value = required(event, field);
    const double us = value.is_number() ? value.get<double>() : std::nan("");
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

  // Slices shorter than a cell of time become one per track, cell and name. Cells double until few
  // enough are left: a page draws some thousand pixels, and a browser must load it.
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
  int event_depth_ = 0;  // of an event's object: 1 in a bare list, 2 in "traceEvents"
  bool has_events_ = false;
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
