// A summary of how a pass spent its time, from the traces of all ranks.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "trace/event_index.h"

namespace switchyard::trace {

struct RankSummary {
  int rank = 0;
  std::int64_t pass_ns = 0;  // from the first begin of an event to the last end of one
  int units = 0;             // units that have events
  // Shares of the units' time in the pass, averaged over units. `active`: between the begin of a
  // unit's first event and the end of its last (the SM utilisation of the FlashDMoE thesis, section
  // 6.4, counts an SM with a warp in flight). `busy`: within events of the math role, except sends.
  double active = 0;
  double busy = 0;
  std::array<std::int64_t, kNumWaits> wait_ns{};  // of the math role, over all units
  // The time in which some unit sends rows or signals to another rank; overlapped_ns is the part of
  // it in which some unit's math role is busy.
  std::int64_t communication_ns = 0;
  std::int64_t overlapped_ns = 0;
  // From the begin of the pass to the begin of its first GEMM or combine task, and to the end of
  // the last; -1 if there are none.
  std::int64_t first_task_ns = -1;
  std::int64_t last_task_ns = -1;
  std::int64_t sent_rows = 0;  // tokens sent to other ranks
  std::int64_t events = 0;
  std::int64_t dropped = 0;
};

// An event on the critical path, and the event that it followed.
struct PathStep {
  RankEvent event;
  RankEvent cause;  // event.event is null for the first of the pass
  bool awaited =
      false;  // true: `event` waited for `cause`; false: the same unit did `cause` before

  std::int64_t work_ns() const { return event.event->end_ns - event.event->begin_ns; }
  // The time from the cause's end to the event's begin.
  std::int64_t gap_ns() const {
    return cause.event == nullptr ? 0 : event.event->begin_ns - cause.event->end_ns;
  }
  std::int64_t waited_ns() const { return event.event->begin_ns - event.event->ready_ns; }
};

struct Summary {
  std::vector<RankSummary> ranks;
  std::int64_t pass_ns = 0;  // from the first begin on any rank to the last end
  // The same numbers over all ranks' units.
  double active = 0;
  double busy = 0;
  std::array<std::int64_t, kNumWaits> wait_ns{};
  std::int64_t communication_ns = 0;
  std::int64_t overlapped_ns = 0;
  std::int64_t dropped = 0;
  // The critical path, from the last event of the pass back to one that waited for none.
  std::vector<PathStep> path;
};

// Summarises a pass. The summary refers to the events of `traces`, which must stay where they are.
Summary summarize(std::span<const PassTrace> traces);

// The steps of the path that waited longest, for another event or for a core; the longest first.
std::vector<PathStep> longest_waits(const Summary& summary, std::size_t most);

}  // namespace switchyard::trace
