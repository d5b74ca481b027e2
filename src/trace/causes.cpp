#include "trace/causes.h"

namespace switchyard::trace {
namespace {

bool is_to(const TraceEvent& event, int rank) { return event.peer == rank || event.peer < 0; }

// Calls `find` for each rank that `event` may have waited for, and returns the found event that
// ended last.
template <typename Find>
RankEvent last_of_peers(const EventIndex& index, const RankEvent& event, bool also_own,
                        Find&& find) {
  RankEvent last;
  const int peer = event.event->peer;
  for (int r = 0; r < index.num_ranks(); ++r) {
    if (peer >= 0 ? r != peer : r == event.rank && !also_own) continue;
    const TraceEvent* const found = find(r);
    if (found == nullptr) continue;
    if (last.event == nullptr || found->end_ns > last.event->end_ns) last = {r, found};
  }
  return last;
}

RankEvent find_counts(const EventIndex& index, const RankEvent& event) {
  return last_of_peers(index, event, false, [&](int r) {
    const auto any = [](const TraceEvent&) { return true; };
    const std::int64_t time = event.event->begin_ns;
    const TraceEvent* const counts = index.last_ended(r, TraceKind::kCounts, time, any);
    return counts != nullptr ? counts : index.last_ended(r, TraceKind::kRoute, time, any);
  });
}

RankEvent find_input(const EventIndex& index, const RankEvent& event) {
  const TraceEvent& e = *event.event;
  const TraceKind of_tile = e.kind == TraceKind::kGemm1 ? TraceKind::kPack : TraceKind::kGemm1;
  return {event.rank, find_of_tile(index, event.rank, of_tile, e.tile, e.begin_ns)};
}

// Finds an event of the same rank: the one that handed the task out, or else the last that ended.
RankEvent find_task(const EventIndex& index, const RankEvent& event) {
  const TraceEvent& e = *event.event;
  const TraceEvent* const handed =
      index.last_ended(event.rank, e.kind, e.begin_ns, [&](const TraceEvent& other) {
        return other.role == TraceRole::kScheduler && &other != &e && other.unit == e.unit &&
               other.tile == e.tile && other.block == e.block;
      });
  if (handed != nullptr) return {event.rank, handed};
  return {event.rank, index.last_ended(event.rank, e.begin_ns,
                                       [&](const TraceEvent& other) { return &other != &e; })};
}

RankEvent find_awaited(const EventIndex& index, const RankEvent& event) {
  const TraceEvent& e = *event.event;
  switch (e.wait) {
    case TraceWait::kNothing:
    case TraceWait::kCore: return {};
    case TraceWait::kTask: return find_task(index, event);
    case TraceWait::kSlot:
      return {event.rank, index.last_ended(event.rank, TraceKind::kGemm2, e.begin_ns,
                                           [&](const TraceEvent& other) { return &other != &e; })};
    case TraceWait::kInput: return find_input(index, event);
    case TraceWait::kCounts: return find_counts(index, event);
    case TraceWait::kDispatch:
      return last_of_peers(index, event, false, [&](int r) {
        return find_send(index, r, event.rank, e.expert, e.begin_ns);
      });
    case TraceWait::kCombine: return find_result(index, event.rank, e);
  }
  return {};
}

}  // namespace

const TraceEvent* find_send(const EventIndex& index, int source, int rank, std::int32_t expert,
                            std::int64_t time) {
  const TraceEvent* const of_expert = index.last_ended(
      source, TraceKind::kSend, time,
      [&](const TraceEvent& e) { return is_to(e, rank) && e.expert >= 0 && e.expert == expert; });
  if (of_expert != nullptr) return of_expert;
  return index.last_ended(source, TraceKind::kSend, time,
                          [&](const TraceEvent& e) { return is_to(e, rank) && e.expert < 0; });
}

const TraceEvent* find_of_tile(const EventIndex& index, int rank, TraceKind kind, std::int32_t tile,
                               std::int64_t time) {
  return index.last_ended(rank, kind, time, [&](const TraceEvent& e) {
    return e.tile == tile && (kind == TraceKind::kPack || is_task(e));
  });
}

RankEvent find_result(const EventIndex& index, int rank, const TraceEvent& combine) {
  TraceEvent waiter = combine;
  if (combine.wait != TraceWait::kCombine) waiter.peer = -1;
  return last_of_peers(index, {rank, &waiter}, true, [&](int r) {
    // The kSignal events of a rank tell which of its tiles had rows of this rank.
    const TraceEvent* const word =
        r == rank
            ? nullptr
            : index.last_ended(r, TraceKind::kSignal, combine.begin_ns,
                               [&](const TraceEvent& e) { return e.peer == rank && e.tile >= 0; });
    return word == nullptr ? index.last_ended(r, TraceKind::kGemm2, combine.begin_ns, is_task)
                           : find_of_tile(index, r, TraceKind::kGemm2, word->tile, word->end_ns);
  });
}

Cause cause_of(const EventIndex& index, const RankEvent& event) {
  const TraceEvent& e = *event.event;
  if (e.begin_ns > e.ready_ns) {
    const RankEvent awaited = find_awaited(index, event);
    if (awaited.event != nullptr) return {awaited, true};
  }
  const TraceEvent* const before = index.last_ended(
      event.rank, std::min(e.ready_ns, e.begin_ns),
      [&](const TraceEvent& other) { return &other != &e && other.unit == e.unit; });
  return {{event.rank, before}, false};
}

}  // namespace switchyard::trace
