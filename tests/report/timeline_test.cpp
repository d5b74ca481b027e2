// Chrome traces: what is drawn of them, and how others are refused.
#include "report/timeline.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "model/errors.h"

namespace switchyard::report {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

json slice(const std::string& name, int rank, int track, double ts, double dur) {
  return {{"ph", "X"}, {"name", name}, {"pid", rank}, {"tid", track}, {"ts", ts}, {"dur", dur}};
}

json name_of_rank(int rank, const std::string& name) {
  return {{"ph", "M"}, {"name", "process_name"}, {"pid", rank}, {"args", {{"name", name}}}};
}

json small_trace() {
  json gemm = slice("gemm1", 1, 7, 1000.5, 2.25);
  gemm["args"] = {{"tile", 3}, {"block", 2}, {"expert", 17}, {"rows", 64}, {"wait", "input"}};
  return json::array(
      {name_of_rank(1, "rank 0"),
       {{"ph", "M"}, {"name", "process_sort_index"}, {"pid", 1}, {"args", {{"sort_index", 0}}}},
       {{"ph", "M"}, {"name", "thread_name"}, {"pid", 1}, {"tid", 7}, {"args", {{"name", "math"}}}},
       {{"ph", "M"}, {"name", "thread_name"}, {"pid", 1}, {"tid", 9}, {"args", {{"name", "idle"}}}},
       gemm,
       slice("gate", 1, 7, 1000, 0.5),
       slice("gate", 2, 7, 1001, 1),
       {{"ph", "C"}, {"name", "bytes"}, {"pid", 1}, {"ts", 1000}, {"args", {{"bytes", 3}}}}});
}

void expect_small_trace(const Timeline& timeline) {
  EXPECT_THAT(timeline.names, ElementsAre("gemm1", "gate"));
  ASSERT_EQ(timeline.ranks.size(), 2u);
  EXPECT_EQ(timeline.ranks[0].rank, 1);
  EXPECT_EQ(timeline.ranks[0].name, "rank 0");
  EXPECT_EQ(timeline.ranks[1].name, "");
  EXPECT_EQ(timeline.span_ns, 2750);
  EXPECT_EQ(timeline.num_slices, 3);
  EXPECT_EQ(timeline.num_other, 1);
  EXPECT_EQ(timeline.merged_below_ns, 0);
  ASSERT_EQ(timeline.tracks.size(), 2u);  // none for the idle one
  EXPECT_EQ(timeline.tracks[0].name, "math");
  const std::vector<Slice>& slices = timeline.tracks[0].slices;
  ASSERT_EQ(slices.size(), 2u);
  EXPECT_EQ(slices[0].name, 1);
  EXPECT_EQ(slices[0].start_ns, 0);
  EXPECT_EQ(slices[0].expert, -1);
  EXPECT_EQ(slices[1].start_ns, 500);
  EXPECT_EQ(slices[1].end_ns, 2750);
  EXPECT_EQ(slices[1].tile, 3);
  EXPECT_EQ(slices[1].block, 2);
  EXPECT_EQ(slices[1].expert, 17);
  EXPECT_EQ(slices[1].rows, 64);
  EXPECT_EQ(slices[1].peer, -1);
}

TEST(ReportTimeline, BothFormsOfTheFormat) {
  expect_small_trace(parse_timeline(small_trace().dump(), "t.json"));
  const json object = {{"displayTimeUnit", "ns"},
                       {"otherData", {{"dropped_events", 5}, {"title", "olmoe"}}},
                       {"traceEvents", small_trace()},
                       {"stackFrames", {{"1", {{"name", "no event"}}}}}};
  const Timeline timeline = parse_timeline(object.dump(), "t.json");
  expect_small_trace(timeline);
  EXPECT_EQ(timeline.num_dropped, 5);
}

TEST(ReportTimeline, TotalsOfRanksAndNames) {
  json events = small_trace();
  events.push_back(slice("gate", 1, 8, 1001, 1.5));
  const Timeline timeline = parse_timeline(events.dump(), "t.json");
  ASSERT_EQ(timeline.totals.size(), 3u);
  EXPECT_EQ(timeline.totals[1].rank, 1);
  EXPECT_EQ(timeline.totals[1].name, 1);
  EXPECT_EQ(timeline.totals[1].count, 2);
  EXPECT_EQ(timeline.totals[1].total_ns, 2000);
  EXPECT_EQ(timeline.totals[1].longest_ns, 1500);
}

TEST(ReportTimeline, ShortSlicesAreMergedUntilFewAreLeft) {
  json events = json::array();
  constexpr int kPairs = 1000;
  for (int i = 0; i < kPairs; ++i) {
    events.push_back(slice("wait: input", 0, 0, i, 0.25));
    events.push_back(slice("gemm1", 0, 0, i + 0.25, 0.5));
  }
  events.push_back(slice("combine", 0, 0, kPairs, 400));
  const Timeline whole = parse_timeline(events.dump(), "t.json");
  EXPECT_EQ(whole.merged_below_ns, 0);
  EXPECT_EQ(whole.tracks[0].slices.size(), 2u * kPairs + 1);

  constexpr std::size_t kMost = 100;
  const Timeline merged = parse_timeline(events.dump(), "t.json", kMost);
  EXPECT_GT(merged.merged_below_ns, 0);
  const std::vector<Slice>& slices = merged.tracks[0].slices;
  EXPECT_LE(slices.size(), kMost);
  // Nothing is lost, and what is longer stays as it is.
  std::int64_t count = 0, busy_ns = 0;
  for (const Slice& s : slices) {
    count += s.count;
    busy_ns += s.busy_ns;
    EXPECT_LE(s.busy_ns, s.end_ns - s.start_ns);
  }
  EXPECT_EQ(count, 2 * kPairs + 1);
  EXPECT_EQ(busy_ns, kPairs * 750 + 400'000);
  EXPECT_EQ(slices.back().count, 1);
  EXPECT_EQ(slices.back().busy_ns, 400'000);
  EXPECT_EQ(merged.totals[1].count, kPairs);
}

TEST(ReportTimeline, WhatIsNoTraceIsRefused) {
  const auto refused = [](const std::string& text, std::initializer_list<const char*> parts) {
    test::expect_error([&] { parse_timeline(text, "t.json"); }, ErrorCode::kInvalidFile, parts);
  };
  refused("", {"t.json is not JSON", "--trace"});
  refused("[{", {"t.json is not JSON"});
  refused(std::string(1'000'000, '['), {"nests too deep at byte 64"});
  refused("7", {"t.json is not a list of events, but 7"});
  refused("{}", {"t.json has no 'traceEvents'", "switchyard trace"});
  refused(R"({"traceEvents": 3})", {"t.json has no slices"});
  refused("[]", {"t.json has no slices"});
  refused("[3]", {"t.json event 1: is 3, not an object"});
  refused(R"([{"suite": "a"}])", {"t.json event 1: has no 'ph'", "switchyard trace"});
}

TEST(ReportTimeline, EveryFieldOfASliceHasItsDomain) {
  const std::vector<std::pair<const char*, json>> cases = {
      {"ph", 3},    {"name", 3},
      {"pid", "0"}, {"tid", 1.5},
      {"ts", "1"},  {"ts", 1e30},
      {"dur", -1},  {"dur", nullptr},
      {"args", 3},  {"args", json::object({{"tile", "3"}})}};
  for (const auto& [field, value] : cases) {
    json event = slice("gate", 0, 0, 1, 1);
    event[field] = value;
    const std::string text = json::array({slice("gate", 0, 0, 0, 1), event}).dump();
    SCOPED_TRACE(text);
    EXPECT_ERROR(parse_timeline(text, "t.json"), kInvalidFile, "t.json event 2: '",
                 "switchyard trace");
  }
  for (const char* field : {"ph", "name", "pid", "tid", "ts", "dur"}) {
    json event = slice("gate", 0, 0, 1, 1);
    event.erase(field);
    const std::string named = std::string("t.json event 1: has no '") + field + "'";
    EXPECT_ERROR(parse_timeline(json::array({event}).dump(), "t.json"), kInvalidFile,
                 named.c_str());
  }
  json unnamed = name_of_rank(0, "");
  unnamed.erase("args");
  EXPECT_ERROR(parse_timeline(json::array({unnamed}).dump(), "t.json"), kInvalidFile,
               "event 1: 'args'", "'name'");
}

}  // namespace
}  // namespace switchyard::report
