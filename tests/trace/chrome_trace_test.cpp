// The file, read back as JSON; tests/cli/perfetto_check.py has Perfetto read it.
#include "trace/chrome_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "trace/events.h"

namespace switchyard::trace {
namespace {

using ::testing::ElementsAre;
using Json = nlohmann::json;

Json file_of(const std::vector<PassTrace>& traces, const ChromeTraceOptions& options = {}) {
  std::ostringstream out;
  write_chrome_trace(out, traces, options);
  return Json::parse(out.str());
}

std::vector<Json> entries_of(const Json& file, const std::string& phase,
                             const std::string& name = "") {
  std::vector<Json> found;
  for (const Json& e : file["traceEvents"]) {
    if (e["ph"] == phase && (name.empty() || e["name"] == name)) found.push_back(e);
  }
  return found;
}

// Whole nanoseconds: the file has microseconds with three decimals.
std::int64_t ns(const Json& microseconds) {
  return std::llround(microseconds.get<double>() * 1000);
}

TEST(ChromeTrace, SlicesAreWhatHappened) {
  const Json file = file_of(two_ranks(), {.title = "a \"layer\"", .unit = "SM"});
  EXPECT_EQ(file["otherData"]["title"], "a \"layer\"");
  EXPECT_EQ(file["otherData"]["dropped_events"], 3);
  EXPECT_EQ(file["otherData"]["epoch"], 7);
  std::map<std::string, int> slices;
  for (const Json& e : entries_of(file, "X")) ++slices[e["name"]];
  // Waits of 50 and 150 ns are too short to be shown.
  EXPECT_EQ(slices, (std::map<std::string, int>{{"gate", 2},
                                                {"counts", 2},
                                                {"plan", 2},
                                                {"send", 4},
                                                {"gemm1", 3},
                                                {"gemm2", 2},
                                                {"combine", 1},
                                                {"wait: dispatch (rank 0)", 2},
                                                {"wait: combine (rank 1)", 1}}));
  const Json gemm2 = entries_of(file, "X", "gemm2")[1];
  EXPECT_EQ(gemm2["pid"], 2);
  EXPECT_EQ(ns(gemm2["ts"]), 1100);
  EXPECT_EQ(ns(gemm2["dur"]), 700);
  EXPECT_EQ(gemm2["args"],
            (Json{{"tile", 2}, {"block", 0}, {"expert", 5}, {"rows", 70}, {"wait", "input"}}));
  const Json wait = entries_of(file, "X", "wait: combine (rank 1)")[0];
  EXPECT_EQ(ns(wait["ts"]), 500);
  EXPECT_EQ(ns(wait["dur"]), 1500);
  EXPECT_EQ(entries_of(file, "X", "combine")[0]["args"]["chunk"], 0);
}

TEST(ChromeTrace, TracksHaveNamesInOrder) {
  const Json file = file_of(two_ranks(), {.unit = "SM"});
  std::vector<std::string> processes, tracks;
  std::vector<int> order;
  for (const Json& e : entries_of(file, "M", "process_name"))
    processes.push_back(e["args"]["name"]);
  for (const Json& e : entries_of(file, "M", "thread_name")) {
    if (e["pid"] == 1) tracks.push_back(e["args"]["name"]);
  }
  for (const Json& e : entries_of(file, "M", "thread_sort_index")) {
    if (e["pid"] == 1) order.push_back(e["args"]["sort_index"]);
  }
  EXPECT_THAT(processes, ElementsAre("rank 0", "rank 1"));
  EXPECT_THAT(tracks, ElementsAre("SM 0 pass", "SM 0 send", "SM 0 math", "SM 1 send", "SM 1 math"));
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST(ChromeTrace, ArrowsLeadFromCauseToEffect) {
  const Json file = file_of(two_ranks());
  const auto from = entries_of(file, "s"), to = entries_of(file, "f");
  std::map<std::int64_t, Json> begin;
  for (const Json& e : from) begin[e["id"]] = e;
  ASSERT_EQ(begin.size(), from.size());
  ASSERT_EQ(to.size(), from.size());
  std::vector<std::string> arrows;
  for (const Json& e : to) {
    const Json& s = begin.at(e["id"]);
    EXPECT_EQ(e["bp"], "e");
    EXPECT_EQ(e["cat"], s["cat"]);
    arrows.push_back(e["name"].get<std::string>() + " " + s["pid"].dump() + ":" +
                     std::to_string(ns(s["ts"])) + " " + e["pid"].dump() + ":" +
                     std::to_string(ns(e["ts"])));
  }
  // The dispatch from the word that expert 5's rows are there, not from the send that ended later;
  // the second GEMM from the first one's later block.
  EXPECT_THAT(arrows,
              ::testing::UnorderedElementsAre("dispatch 1:409 2:450", "tile 1:649 1:650",
                                              "tile 2:1059 2:1100", "combine 2:1799 1:2000"));
}

TEST(ChromeTrace, PackedTilesHaveTheirArrowsThere) {
  using K = TraceKind;
  const auto pack = [](std::int32_t tile, std::int64_t begin, std::int64_t end) {
    return Made(K::kPack, 0, begin, begin, end).by(TraceRole::kPack).of_tile(tile, 9, 16);
  };
  // Another tile is packed later, and what brings a task's weights is not the task.
  const std::vector<PassTrace> traces = {
      trace_of(0, 2, {send(0, 0, 100, 1, 10, 8), send(0, 100, 200, 1, 10, 9)}),
      trace_of(1, 2,
               {pack(4, 250, 300), pack(4, 300, 350), pack(5, 350, 380),
                Made(K::kGemm1, 0, 0, 400, 500).of_tile(4, 9, 32),
                Made(K::kGemm1, 0, 0, 100, 550).by(TraceRole::kWeights).of_tile(4, 9, 32),
                Made(K::kGemm2, 0, 500, 600, 700).of_tile(4, 9, 32)})};
  std::vector<std::string> arrows;
  for (const Json& e : entries_of(file_of(traces), "s")) {
    arrows.push_back(e["name"].get<std::string>() + " " + std::to_string(ns(e["ts"])));
  }
  // Both tiles' first packs come after the send of expert 9.
  EXPECT_THAT(arrows, ElementsAre("dispatch 199", "dispatch 199", "tile 349", "tile 499"));
}

TEST(ChromeTrace, Counters) {
  const Json file = file_of(two_ranks(), {.row_bytes = 100});
  std::vector<std::pair<std::int64_t, std::int64_t>> tasks, bytes;
  for (const Json& e : entries_of(file, "C", "tasks in work")) {
    if (e["pid"] == 2) tasks.emplace_back(ns(e["ts"]), e["args"]["tasks"]);
  }
  for (const Json& e : entries_of(file, "C", "bytes sent to others")) {
    EXPECT_EQ(e["pid"], 1);
    bytes.emplace_back(ns(e["ts"]), e["args"]["bytes"]);
  }
  using Point = std::pair<std::int64_t, std::int64_t>;
  EXPECT_THAT(tasks, ElementsAre(Point{450, 1}, Point{460, 2}, Point{950, 1}, Point{1060, 0},
                                 Point{1100, 1}, Point{1800, 0}));
  EXPECT_THAT(bytes, ElementsAre(Point{250, 0}, Point{400, 6400}, Point{500, 8000}));
  EXPECT_TRUE(entries_of(file_of(two_ranks()), "C", "bytes sent to others").empty());
}

TEST(ChromeTrace, TimesNeverGoBackAndSlicesOfATrackNeverOverlap) {
  using K = TraceKind;
  // A clock that jumps, events of no length, and a wait that began before the event ahead ended.
  std::vector<PassTrace> traces = two_ranks();
  traces.push_back(
      trace_of(2, 3,
               {Made(K::kGemm1, 0, 500, 900, 800), Made(K::kGemm1, 0, 850, 850, 1000),
                Made(K::kGemm2, 0, 1000, 1000, 1000), Made(K::kGemm2, 0, 1000, 1000, 1000),
                Made(K::kCombine, 0, 100, 1400, 1500).waiting(TraceWait::kTask)}));
  const Json file = file_of(traces);
  std::int64_t last = 0;
  std::map<std::pair<int, int>, std::int64_t> free;
  for (const Json& e : file["traceEvents"]) {
    if (e["ph"] == "M") continue;
    EXPECT_GE(ns(e["ts"]), last) << e;
    last = ns(e["ts"]);
    if (e["ph"] != "X") continue;
    EXPECT_GT(ns(e["dur"]), 0) << e;
    std::int64_t& until = free[{e["pid"], e["tid"]}];
    EXPECT_GE(ns(e["ts"]), until) << e;
    until = ns(e["ts"]) + ns(e["dur"]);
  }
}

TEST(ChromeTrace, OfNothing) {
  EXPECT_EQ(file_of({})["traceEvents"].size(), 0u);
  EXPECT_TRUE(entries_of(file_of({trace_of(0, 1, {})}), "X").empty());
}

}  // namespace
}  // namespace switchyard::trace
