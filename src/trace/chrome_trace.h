// Traces as a file for ui.perfetto.dev, or chrome://tracing: the Trace Event Format,
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
#pragma once

#include <cstdint>
#include <ostream>
#include <span>
#include <string>

#include "switchyard/trace.h"

namespace switchyard::trace {

struct ChromeTraceOptions {
  std::string title;
  std::string unit = "thread";  // "SM": "SM 17 math"
  std::uint64_t row_bytes = 0;  // bytes of a token between ranks; 0: bytes are not shown
  std::int64_t shortest_wait_ns = 200;
};

// Writes a trace file. Every rank is a process, with a track for every role of a unit. A track has
// a slice for each event, preceded by one for what it waited for, if that took long enough. Arrows
// lead from a send to the first event of each tile that it fed on another rank; from the last pack
// of a tile to its first GEMM; from the last task of that GEMM to the first of its second; and from
// the last second GEMM before a combine task to that task. Counters show tasks in work and bytes
// sent to other ranks.
//
// Times are microseconds since the first event. Slices of a track must not overlap, so slices are
// moved where imperfect clocks make them, and every slice takes a nanosecond at least. Entries are
// in the order of their times.
void write_chrome_trace(std::ostream& out, std::span<const PassTrace> traces,
                        const ChromeTraceOptions& options);

}  // namespace switchyard::trace
