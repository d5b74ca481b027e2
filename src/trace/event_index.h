// An index of the events of a pass on all ranks, by the time at which they ended.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/trace.h"

namespace switchyard::trace {

inline constexpr std::size_t kNumKinds = static_cast<std::size_t>(TraceKind::kSignal) + 1;
inline constexpr std::size_t kNumWaits = static_cast<std::size_t>(TraceWait::kCore) + 1;

struct RankEvent {
  int rank = -1;
  const TraceEvent* event = nullptr;  // null: there is none
};

// True for a GEMM or a combine task, as opposed to events that bring their operands.
inline bool is_task(const TraceEvent& e) {
  return e.role == TraceRole::kMath &&
         (e.kind == TraceKind::kGemm1 || e.kind == TraceKind::kGemm2 ||
          e.kind == TraceKind::kCombine);
}

// True if TraceEvent::peer is the rank that was waited for.
inline bool is_for_peer(TraceWait wait) {
  return wait == TraceWait::kCounts || wait == TraceWait::kDispatch || wait == TraceWait::kCombine;
}

class EventIndex {
 public:
  // Keeps pointers into the traces, which must stay where they are.
  explicit EventIndex(std::span<const PassTrace> traces);

  int num_ranks() const { return static_cast<int>(ranks_.size()); }

  // Returns the last event of the kind on the rank that ended by `time` and for which suits(event)
  // holds; null if there is none.
  template <typename Suits>
  const TraceEvent* last_ended(int rank, TraceKind kind, std::int64_t time, Suits&& suits) const {
    return last_ended(of(rank).by_kind[static_cast<std::size_t>(kind)], time, suits);
  }
  // Returns the same among events of all kinds.
  template <typename Suits>
  const TraceEvent* last_ended(int rank, std::int64_t time, Suits&& suits) const {
    return last_ended(of(rank).all, time, suits);
  }
  // Returns the last event of the rank to end; null if it has none.
  const TraceEvent* last(int rank) const {
    return of(rank).all.empty() ? nullptr : of(rank).all.back();
  }

 private:
  using ByEnd = std::vector<const TraceEvent*>;
  struct OfRank {
    ByEnd all;
    std::array<ByEnd, kNumKinds> by_kind;
  };

  const OfRank& of(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }

  template <typename Suits>
  static const TraceEvent* last_ended(const ByEnd& events, std::int64_t time, Suits&& suits) {
    auto at = std::upper_bound(events.begin(), events.end(), time,
                               [](std::int64_t t, const TraceEvent* e) { return t < e->end_ns; });
    while (at != events.begin()) {
      if (suits(**--at)) return *at;
    }
    return nullptr;
  }

  std::vector<OfRank> ranks_;  // by number
};

}  // namespace switchyard::trace
