// Traces made by hand.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "switchyard/trace.h"

namespace switchyard::trace {

// An event of the math role; the other members by with().
struct Made : TraceEvent {
  Made(TraceKind what, std::int32_t on_unit, std::int64_t ready, std::int64_t begin,
       std::int64_t end)
      : TraceEvent{what, TraceRole::kMath} {
    unit = on_unit;
    ready_ns = ready;
    begin_ns = begin;
    end_ns = end;
  }
  Made by(TraceRole who) const {
    return with([&](Made& e) { e.role = who; });
  }
  Made of_tile(std::int32_t number, std::int32_t of_expert, std::int32_t count) const {
    return with([&](Made& e) {
      e.tile = number;
      e.expert = of_expert;
      e.rows = count;
    });
  }
  Made in_block(std::int32_t number) const {
    return with([&](Made& e) { e.block = number; });
  }
  Made waiting(TraceWait what, std::int32_t whom = -1) const {
    return with([&](Made& e) {
      e.wait = what;
      e.peer = whom;
    });
  }

 private:
  template <typename Change>
  Made with(Change&& change) const {
    Made e = *this;
    change(e);
    return e;
  }
};

inline Made send(std::int32_t unit, std::int64_t begin, std::int64_t end, std::int32_t to,
                 std::int32_t rows, std::int32_t expert = -1) {
  Made e = Made(TraceKind::kSend, unit, begin, begin, end).by(TraceRole::kSend);
  e.peer = to;
  e.rows = rows;
  e.expert = expert;
  return e;
}

inline PassTrace trace_of(int rank, int num_ranks, const std::vector<Made>& events) {
  PassTrace trace{.rank = rank, .num_ranks = num_ranks, .epoch = 7};
  trace.events.assign(events.begin(), events.end());
  return trace;
}

// Two ranks with two units each. Rank 0 sends to rank 1, whose tile waits for it; rank 0 combines
// what rank 1 made of it. The clock starts at a million.
inline std::vector<PassTrace> two_ranks() {
  constexpr std::int64_t t = 1'000'000;
  using K = TraceKind;
  std::vector<PassTrace> traces;
  traces.push_back(
      trace_of(0, 2,
               {Made(K::kGate, 0, t, t, t + 100).by(TraceRole::kPass),
                Made(K::kCounts, 0, t + 100, t + 100, t + 150).by(TraceRole::kPass),
                Made(K::kPlan, 0, t + 150, t + 200, t + 250)
                    .by(TraceRole::kPass)
                    .waiting(TraceWait::kCounts, 1),
                send(0, t + 250, t + 400, 1, 64), send(0, t + 400, t + 410, 1, 0, 5),
                send(0, t + 410, t + 500, 1, 16), send(1, t + 300, t + 350, 0, 8),
                Made(K::kGemm1, 1, t + 350, t + 350, t + 650).of_tile(0, 1, 8).in_block(0),
                Made(K::kGemm2, 1, t + 650, t + 650, t + 750).of_tile(0, 1, 8).in_block(0),
                Made(K::kCombine, 0, t + 500, t + 2000, t + 2100)
                    .of_tile(0, -1, 32)
                    .waiting(TraceWait::kCombine, 1)}));
  traces.push_back(trace_of(1, 2,
                            {Made(K::kGate, 0, t + 20, t + 20, t + 120).by(TraceRole::kPass),
                             Made(K::kCounts, 0, t + 120, t + 120, t + 180).by(TraceRole::kPass),
                             Made(K::kPlan, 0, t + 180, t + 180, t + 220).by(TraceRole::kPass),
                             Made(K::kGemm1, 0, t + 220, t + 450, t + 950)
                                 .of_tile(2, 5, 70)
                                 .in_block(0)
                                 .waiting(TraceWait::kDispatch, 0),
                             Made(K::kGemm1, 1, t + 220, t + 460, t + 1060)
                                 .of_tile(2, 5, 70)
                                 .in_block(1)
                                 .waiting(TraceWait::kDispatch, 0),
                             Made(K::kGemm2, 0, t + 950, t + 1100, t + 1800)
                                 .of_tile(2, 5, 70)
                                 .in_block(0)
                                 .waiting(TraceWait::kInput)}));
  traces[1].dropped = 3;
  return traces;
}

}  // namespace switchyard::trace
