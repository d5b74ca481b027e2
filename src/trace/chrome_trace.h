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
  std::uint64_t row_bytes = 0;  // of a token between ranks; 0: bytes are not shown
  std::int64_t shortest_wait_ns = 200;
};

// A process for every rank, in it a track for every role of a unit, with a slice for what it did
// and one before that for what it waited for, if long enough. Arrows: from a send to the first
// event of each tile that it fed on another rank; from the last pack of a tile to its first GEMM,
// and from the last of its first GEMM to the first of its second; from the last second GEMM before
// a combine task to that. Counters: tasks in work, and bytes sent to other ranks.
//
// Times are microseconds since the first event. Slices of a track do not overlap: what traces of
// imperfect clocks say is moved, and every slice takes a nanosecond at least. Entries are in the
// order of their times.
void write_chrome_trace(std::ostream& out, std::span<const PassTrace> traces,
                        const ChromeTraceOptions& options);

}  // namespace switchyard::trace
