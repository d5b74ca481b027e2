#include "run/trace_summary.h"

#include <limits>
#include <map>
#include <set>

#include "trace/causes.h"

namespace switchyard::trace {
namespace {

struct Span {
  std::int64_t begin = std::numeric_limits<std::int64_t>::max();
  std::int64_t end = std::numeric_limits<std::int64_t>::min();

  std::int64_t length() const { return end > begin ? end - begin : 0; }
  void include(const TraceEvent& event) {
    begin = std::min(begin, event.begin_ns);
    end = std::max(end, event.end_ns);
  }
};

// The union of the spans as disjoint spans in order.
std::vector<Span> united(std::vector<Span> spans) {
  std::sort(spans.begin(), spans.end(), [](Span a, Span b) { return a.begin < b.begin; });
  std::vector<Span> result;
  for (const Span span : spans) {
    if (result.empty() || span.begin > result.back().end) {
      result.push_back(span);
    } else {
      result.back().end = std::max(result.back().end, span.end);
    }
  }
  return result;
}

std::int64_t length(const std::vector<Span>& spans) {
  std::int64_t sum = 0;
  for (const Span& span : spans) sum += span.length();
  return sum;
}

// The time that both lists cover. Each list is disjoint and in order.
std::int64_t overlap(const std::vector<Span>& a, const std::vector<Span>& b) {
  std::int64_t sum = 0;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    sum += Span{std::max(a[i].begin, b[j].begin), std::min(a[i].end, b[j].end)}.length();
    ++(a[i].end < b[j].end ? i : j);
  }
  return sum;
}

bool sends(const TraceEvent& e) {
  return e.kind == TraceKind::kSend || e.kind == TraceKind::kSignal;
}
// True for events of the math role except sends, which math warps may do before their first task.
bool is_math(const TraceEvent& e) { return e.role == TraceRole::kMath && !sends(e); }

RankSummary summarize(const PassTrace& trace) {
  RankSummary s;
  s.rank = trace.rank;
  s.events = static_cast<std::int64_t>(trace.events.size());
  s.dropped = trace.dropped;
  Span pass, tasks;
  std::map<std::int32_t, Span> units;
  std::vector<Span> math, communication;
  std::int64_t math_ns = 0;
  for (const TraceEvent& e : trace.events) {
    pass.include(e);
    units[e.unit].include(e);
    if (is_task(e)) tasks.include(e);
    if (is_math(e)) {
      math.push_back({e.begin_ns, e.end_ns});
      math_ns += math.back().length();
      s.wait_ns[static_cast<std::size_t>(e.wait)] += Span{e.ready_ns, e.begin_ns}.length();
    }
    if (sends(e) && e.peer != trace.rank) {
      communication.push_back({e.begin_ns, e.end_ns});
      if (e.kind == TraceKind::kSend) s.sent_rows += e.rows;
    }
  }
  communication = united(std::move(communication));
  s.pass_ns = pass.length();
  s.units = static_cast<int>(units.size());
  s.communication_ns = length(communication);
  s.overlapped_ns = overlap(communication, united(std::move(math)));
  if (tasks.length() > 0) {
    s.first_task_ns = tasks.begin - pass.begin;
    s.last_task_ns = tasks.end - pass.begin;
  }
  std::int64_t active_ns = 0;
  for (const auto& [unit, span] : units) active_ns += span.length();
  if (const double all = static_cast<double>(s.pass_ns) * s.units; all > 0) {
    s.active = static_cast<double>(active_ns) / all;
    s.busy = static_cast<double>(math_ns) / all;
  }
  return s;
}

std::vector<PathStep> walk_back(const EventIndex& index) {
  RankEvent at;
  for (int r = 0; r < index.num_ranks(); ++r) {
    const TraceEvent* const last = index.last(r);
    if (last != nullptr && (at.event == nullptr || last->end_ns > at.event->end_ns)) at = {r, last};
  }
  std::vector<PathStep> path;
  // Guards against a cycle: events that take no time may be each other's causes.
  std::set<const TraceEvent*> seen;
  while (at.event != nullptr && seen.insert(at.event).second) {
    const Cause cause = cause_of(index, at);
    path.push_back({at, cause.by, cause.awaited});
    at = cause.by;
  }
  if (!path.empty() && at.event != nullptr) path.back().cause = {};
  return path;
}

}  // namespace

Summary summarize(std::span<const PassTrace> traces) {
  Summary all;
  Span pass;
  double units = 0, active = 0, busy = 0;
  for (const PassTrace& trace : traces) {
    const RankSummary rank = summarize(trace);
    for (const TraceEvent& e : trace.events) pass.include(e);
    const double unit_time = static_cast<double>(rank.pass_ns) * rank.units;
    units += rank.units;
    active += rank.active * unit_time;
    busy += rank.busy * unit_time;
    for (std::size_t w = 0; w < kNumWaits; ++w) all.wait_ns[w] += rank.wait_ns[w];
    all.communication_ns += rank.communication_ns;
    all.overlapped_ns += rank.overlapped_ns;
    all.dropped += rank.dropped;
    all.ranks.push_back(rank);
  }
  all.pass_ns = pass.length();
  if (const double time = static_cast<double>(all.pass_ns) * units; time > 0) {
    all.active = active / time;
    all.busy = busy / time;
  }
  all.path = walk_back(EventIndex(traces));
  return all;
}

std::vector<PathStep> longest_waits(const Summary& summary, std::size_t most) {
  std::vector<PathStep> waits;
  for (const PathStep& step : summary.path) {
    const bool core = step.event.event->wait == TraceWait::kCore && step.waited_ns() > 0;
    if (step.awaited || core) waits.push_back(step);
  }
  std::stable_sort(waits.begin(), waits.end(), [](const PathStep& a, const PathStep& b) {
    return a.waited_ns() > b.waited_ns();
  });
  waits.resize(std::min(waits.size(), most));
  return waits;
}

}  // namespace switchyard::trace
