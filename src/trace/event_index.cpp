#include "trace/event_index.h"

namespace switchyard::trace {

EventIndex::EventIndex(std::span<const PassTrace> traces) {
  for (const PassTrace& trace : traces) {
    const auto rank = static_cast<std::size_t>(trace.rank);
    ranks_.resize(std::max(ranks_.size(), rank + 1));
    OfRank& mine = ranks_[rank];
    for (const TraceEvent& event : trace.events) {
      mine.all.push_back(&event);
      mine.by_kind[static_cast<std::size_t>(event.kind)].push_back(&event);
    }
  }
  const auto sort = [](ByEnd& events) {
    std::stable_sort(events.begin(), events.end(), [](const TraceEvent* a, const TraceEvent* b) {
      return a->end_ns < b->end_ns;
    });
  };
  for (OfRank& rank : ranks_) {
    sort(rank.all);
    for (ByEnd& events : rank.by_kind) sort(events);
  }
}

}  // namespace switchyard::trace
