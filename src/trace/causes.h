// What an event waited for: traces tell who waited, for what and until when, and here it is looked
// up who ended the wait. The answer is a guess where several could have: the last to have ended
// before the wait did.
#pragma once

#include "trace/event_index.h"

namespace switchyard::trace {

// By `time` at the latest: the last that `source` sent to `rank`, of `expert` where the trace tells
// experts apart.
const TraceEvent* find_send(const EventIndex& index, int source, int rank, std::int32_t expert,
                            std::int64_t time);

// By `time` at the latest: the last event of the kind of that tile of the rank. GEMMs are those of
// the math role.
const TraceEvent* find_of_tile(const EventIndex& index, int rank, TraceKind kind, std::int32_t tile,
                               std::int64_t time);

// The last second GEMM that a combine task of `rank` had to wait for.
RankEvent find_result(const EventIndex& index, int rank, const TraceEvent& combine);

struct Cause {
  RankEvent by;
  bool awaited = false;  // false: what the unit did before
};
// Empty for what began a pass. What it returns has ended when `event` began.
Cause cause_of(const EventIndex& index, const RankEvent& event);

}  // namespace switchyard::trace
