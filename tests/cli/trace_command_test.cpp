// `switchyard trace`: the file, by a JSON parser that the writer does not use, and the summary.
// What Perfetto makes of the file is checked by perfetto_check.py, where the packages it needs are.
#include <gmock/gmock.h>

#include <cmath>
#include <map>

#include "cli/command.h"
#include "cli/format.h"
#include "support/ranks.h"

namespace switchyard::cli {
namespace {

struct TracedRun {
  nlohmann::json file, summary;
};

TracedRun trace(const Arguments& arguments) {
  const TemporaryDirectory directory;
  const std::string path = (directory / "trace.json").string();
  const Completed done =
      run_well(join(join({"trace", "--backend", "cpu", "--json", "-o", path}, arguments), kTiny));
  TracedRun run{nlohmann::json::parse(read_file(path)), nlohmann::json::parse(done.out)};
  EXPECT_EQ(run.summary["file"], path);
  return run;
}

int count(const nlohmann::json& file, const std::string& name) {
  int found = 0;
  for (const auto& e : file["traceEvents"]) found += e["ph"] == "X" && e["name"] == name;
  return found;
}

TEST(Trace, FileHasEveryRankAndEveryTask) {
  for (const char* ranks : {"1", "2", "4"}) {
    const TracedRun run =
        trace({"--ranks", ranks, "--tokens", "100", "--threads", "1", "--passes", "2"});
    const int num_ranks = std::atoi(ranks);
    std::vector<std::string> names;
    std::map<int, std::int64_t> combined;
    std::map<std::pair<int, int>, double> free;
    std::map<std::int64_t, double> arrows;
    double last = 0;
    int arrows_to = 0;
    std::int64_t events = 0;
    for (const auto& e : run.file["traceEvents"]) {
      const std::string phase = e["ph"];
      if (phase == "M") {
        if (e["name"] == "process_name") names.push_back(e["args"]["name"]);
        continue;
      }
      EXPECT_GE(e["ts"].get<double>(), last);
      last = e["ts"];
      if (phase == "X") {
        EXPECT_GT(e["dur"], 0);
        double& until = free[{e["pid"], e["tid"]}];
        EXPECT_GE(e["ts"].get<double>() + 1e-6, until) << e;
        until = e["ts"].get<double>() + e["dur"].get<double>();
        events += e["cat"] != "wait";
        if (e["name"] == "combine") combined[e["pid"]] += e["args"]["rows"].get<std::int64_t>();
      } else if (phase == "s") {
        arrows[e["id"]] = e["ts"];
      } else if (phase == "f") {
        ++arrows_to;
        EXPECT_TRUE(arrows.contains(e["id"]));
        EXPECT_LE(arrows[e["id"]], e["ts"].get<double>());
      }
    }
    EXPECT_EQ(static_cast<int>(names.size()), num_ranks);
    EXPECT_EQ(names.front(), "rank 0");
    EXPECT_EQ(static_cast<int>(arrows.size()), arrows_to);
    for (const auto& [pid, rows] : combined) EXPECT_EQ(rows, 100 / num_ranks) << pid;
    EXPECT_EQ(static_cast<int>(combined.size()), num_ranks);
    // 16 experts with 50 rows each or so: a tile of one block of both GEMMs.
    // A rank that found others late has done some experts' rows in two tiles, each placed in a step
    // of its own.
    const auto early = count(run.file, "gemm1") - 16;
    EXPECT_GE(early, 0);
    EXPECT_LE(early, num_ranks == 1 ? 0 : 16 * (num_ranks - 1));
    EXPECT_EQ(count(run.file, "gemm2"), 16 + early);
    EXPECT_GE(count(run.file, "plan"), num_ranks);
    EXPECT_GE(count(run.file, "plan") - num_ranks, early);

    EXPECT_EQ(run.summary["unit"], "thread");
    EXPECT_EQ(run.summary["dropped_events"], 0);
    ASSERT_EQ(static_cast<int>(run.summary["ranks"].size()), num_ranks);
    std::int64_t told = 0;
    for (const auto& rank : run.summary["ranks"]) {
      told += rank["events"].get<std::int64_t>();
      EXPECT_EQ(rank["units"], 1);
      EXPECT_GT(rank["busy"], 0);
      EXPECT_LE(rank["busy"], rank["active"]);
      EXPECT_LE(rank["active"], 1);
      EXPECT_GT(rank["first_task_ns"], 0);
      EXPECT_LT(rank["first_task_ns"], rank["last_task_ns"]);
      EXPECT_EQ(rank["sent_rows"] > 0, num_ranks > 1);
    }
    EXPECT_EQ(told, events);
    EXPECT_EQ(run.summary["path"]["events"].back()["kind"], "combine");
    EXPECT_EQ(run.summary["path"]["events"].front()["kind"], "gate");
  }
}

TEST(Trace, TextTellsWhereTheTimeWent) {
  const TemporaryDirectory directory;
  const std::string path = (directory / "out.json").string();
  const Completed done = run_well(
      join({"trace", "--tokens", "64", "--ranks", "3", "--threads", "1", "--out", path}, kTiny));
  for (const char* part : {"3 threads", "of the time in tasks", "waiting", "overlap", "first task",
                           "events back from rank", "ui.perfetto.dev"}) {
    EXPECT_THAT(done.out, HasSubstr(part));
  }
  std::istringstream lines(done.out);
  for (std::string line; std::getline(lines, line);) {
    if (line.find(path) == std::string::npos) {
      EXPECT_LE(display_width(line), kReportColumns) << line;
    }
  }
  EXPECT_GT(read_file(path).size(), 1000u);
}

TEST(Trace, MakesThePageThatReportMakes) {
  const TemporaryDirectory directory;
  const auto path = [&](const char* name) { return (directory / name).string(); };
  const Arguments command = join({"trace", "--backend", "cpu", "--tokens", "8", "--ranks", "2",
                                  "--threads", "1", "-o", path("trace.json")},
                                 kTiny);
  const Completed done = run_well(join(command, {"--html", path("trace.html")}));
  EXPECT_THAT(done.out, HasSubstr("trace.html"));
  run_well({"report", "--trace", path("trace.json"), "-o", path("report.html")});
  EXPECT_EQ(read_file(path("trace.html")), read_file(path("report.html")));
  expect_told(join(command, {"--html", path("trace.json")}), 2, "another file");
}

TEST(Trace, LaunchedProcessesShareAFile) {
  const TemporaryDirectory directory;
  const std::string path = (directory / "trace.json").string();
  const Completed done =
      run_well(join({"launch", "-n", "2", "--", SWITCHYARD_COMMAND, "trace", "--tokens", "40",
                     "--backend", "cpu", "--threads", "1", "--json", "-o", path},
                    kTiny));
  EXPECT_EQ(nlohmann::json::parse(done.out)["ranks"].size(), 2u);       // one rank reports
  EXPECT_GE(count(nlohmann::json::parse(read_file(path)), "plan"), 2);  // more if one came late
}

TEST(Trace, TheLastRankComesLate) {
  const auto apart = [](test::milliseconds late) {
    const std::string late_us = std::to_string(std::chrono::microseconds(late).count());
    const TracedRun run = trace(
        {"--ranks", "2", "--tokens", "40", "--threads", "1", "--late", late_us, "--passes", "1"});
    std::map<int, double> gate;  // its begin in microseconds, by process
    for (const auto& e : run.file["traceEvents"]) {
      if (e["ph"] == "X" && e["name"] == "gate") gate.try_emplace(e["pid"], e["ts"].get<double>());
    }
    EXPECT_EQ(gate.size(), 2u);
    return gate.rbegin()->second - gate.begin()->second >
           0.75e3 * static_cast<double>(late.count());
  };
  EXPECT_TRUE(test::holds_given_time(test::milliseconds(200), apart));
}

TEST(Trace, OneRankIsNotLate) {
  expect_told(join({"trace", "--ranks", "1", "--late", "10"}, kTiny), 2,
              "--late 10 is for several ranks; give --ranks, too");
}

TEST(Trace, WhatCannotBeWrittenIsToldBeforeTheRun) {
  expect_told(join({"trace", "-o", "/nowhere/at/all/trace.json"}, kTiny), 2,
              "--output is '/nowhere/at/all/trace.json'");
  expect_told(join({"trace", "--tokens", "8", "--backend", "cpu", "-o", "/dev/full"}, kTiny), 2,
              "--output is '/dev/full', which is a pipe, a socket or a device");
  EXPECT_EQ(run_switchyard(join({"trace", "--passes", "0"}, kTiny)).exit_code, 2);
}

TEST(Trace, HelpListsTheCommand) {
  const Completed done = run_well({"--help"});
  EXPECT_THAT(done.out, HasSubstr("trace"));
  EXPECT_THAT(run_switchyard({"trace", "--help"}).out, HasSubstr("--passes"));
}

}  // namespace
}  // namespace switchyard::cli
