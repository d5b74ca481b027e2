// How waits on the critical path are told.
#include "cli/trace_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace switchyard::cli {
namespace {

using trace::PathStep;

TEST(TraceReport, WaitsInWords) {
  TraceEvent gemm1{TraceKind::kGemm1, TraceRole::kMath, TraceWait::kDispatch};
  gemm1.ready_ns = 1'000;
  gemm1.begin_ns = 42'200;
  gemm1.end_ns = 50'000;
  gemm1.expert = 17;
  gemm1.tile = 4;
  TraceEvent cause{TraceKind::kSend, TraceRole::kSend};
  cause.unit = 6;
  cause.expert = 9;
  PathStep step{{3, &gemm1}, {5, &cause}, true};
  EXPECT_EQ(describe_wait(step, "SM"), "rank 3 waited 41.2 us for rank 5's dispatch of expert 17");
  gemm1.wait = TraceWait::kCounts;
  EXPECT_EQ(describe_wait(step, "SM"), "rank 3 waited 41.2 us for rank 5's counts");
  gemm1.wait = TraceWait::kCore;
  EXPECT_EQ(describe_wait(step, "thread"),
            "rank 3 waited 41.2 us for a core, before gemm1 of expert 17");
  cause.kind = TraceKind::kGemm2;
  gemm1.wait = TraceWait::kSlot;
  EXPECT_EQ(describe_wait(step, "SM"),
            "rank 3 waited 41.2 us for room, until gemm2 of expert 9 on SM 6");
  gemm1.wait = TraceWait::kInput;
  gemm1.expert = -1;
  EXPECT_EQ(
      describe_wait(step, "SM"),
      "rank 3 waited 41.2 us for gemm2 of expert 9 on SM 6, before gemm1 of the shared expert");
  gemm1.kind = TraceKind::kCombine;
  gemm1.wait = TraceWait::kCombine;
  EXPECT_EQ(describe_wait(step, "SM"),
            "rank 3 waited 41.2 us for rank 5's gemm2 of expert 9, to combine tokens of chunk 4");
}

TEST(TraceReport, DroppedEventsAreTold) {
  PassTrace trace;
  trace.events.push_back({TraceKind::kCombine, TraceRole::kMath});
  trace.events[0].end_ns = 10;
  trace.dropped = 12;
  const trace::Summary summary = trace::summarize(std::span(&trace, 1));
  const std::vector<std::string> text = to_text(summary, "thread", Palette(false));
  EXPECT_THAT(text.back(), ::testing::HasSubstr("12 events: there was no room"));
  EXPECT_EQ(to_json(summary, "thread")["dropped_events"].integer(), 12);
}

}  // namespace
}  // namespace switchyard::cli
