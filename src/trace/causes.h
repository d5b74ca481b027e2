// Finds what an event waited for. Traces record who waited, for what and until when; these
// functions look up who ended the wait. If several could have, the answer is a guess: the last to
// have ended before the wait did.
#pragma once

#include "trace/event_index.h"

namespace switchyard::trace {

// The last kSend event from `source` to `rank` that ended by `time`. It is of `expert` where the
// trace tells experts apart.
const TraceEvent* find_send(const EventIndex& index, int source, int rank, std::int32_t expert,
                            std::int64_t time);

// The last event of the kind, for that tile of the rank, that ended by `time`. GEMMs are those of
// the math role.
const TraceEvent* find_of_tile(const EventIndex& index, int rank, TraceKind kind, std::int32_t tile,
                               std::int64_t time);

// The last second GEMM that a combine task of `rank` had to wait for.
RankEvent find_result(const EventIndex& index, int rank, const TraceEvent& combine);

struct Cause {
  RankEvent by;
  bool awaited = false;  // false: `by` is the previous event of the same unit
};
// Finds the cause of an event; empty if the event began the pass. The cause ended before `event`
// began.
Cause cause_of(const EventIndex& index, const RankEvent& event);

}  // namespace switchyard::trace
