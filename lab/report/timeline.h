// One forward pass on a time axis, from a file in Chrome's trace event format.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard::report {

// An event on a track. Times are nanoseconds after the earliest slice's start. Here and below, a
// rank is the number of a process in the file, and 'switchyard trace' counts these from 1.
struct Slice {
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
  std::int64_t busy_ns = 0;  // end - start; less where `count` slices with gaps became one
  std::int32_t count = 1;
  std::int32_t name = 0;  // index of Timeline::names
  // -1 if the event lacks the field, and in slices that stand for several events.
  std::int64_t tile = -1, block = -1, expert = -1, rows = -1, peer = -1;
};

// The slices of one thread or warp role of a rank, ordered by start.
struct Track {
  std::int64_t rank = 0;
  std::int64_t id = 0;
  std::string name;  // empty if the file gives none
  std::vector<Slice> slices;
};

// The sum over all slices of one name on one rank, before any are merged.
struct NameTotal {
  std::int64_t rank = 0;
  std::int32_t name = 0;
  std::int64_t count = 0;
  std::int64_t total_ns = 0;
  std::int64_t longest_ns = 0;
};

struct RankName {
  std::int64_t rank = 0;
  std::string name;
};

struct Timeline {
  std::vector<std::string> names;  // in order of appearance
  std::vector<RankName> ranks;     // ascending
  std::vector<Track> tracks;       // by rank and id
  std::vector<NameTotal> totals;   // by rank and name
  std::int64_t span_ns = 0;
  std::int64_t num_slices = 0;       // in the file
  std::int64_t num_other = 0;        // events that are neither slices nor names
  std::int64_t num_dropped = 0;      // events that the file says it lacks
  std::int64_t merged_below_ns = 0;  // shorter slices were merged; 0: none
};

// The most slices of a page. With so many, the page has a few megabytes.
inline constexpr std::size_t kMostSlices = 200'000;

// Reads a trace. Throws Error{kInvalidFile} naming `source`, the event (from 1) and the field.
Timeline parse_timeline(std::string_view text, const std::string& source,
                        std::size_t most_slices = kMostSlices);
Timeline read_timeline(const std::filesystem::path& path);

}  // namespace switchyard::report
