#include "cli/trace_report.h"

#include <fmt/core.h>

#include <algorithm>

#include "cli/format.h"
#include "cli/lines.h"

namespace switchyard::cli {
namespace {

using trace::PathStep;
using trace::RankSummary;
using trace::Summary;

constexpr std::size_t kMostWaits = 6;

std::string time_text(std::int64_t ns) {
  return ns == 0 ? "0" : format_seconds(static_cast<double>(ns) * 1e-9);
}

double ratio(std::int64_t part, std::int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0;
}

std::string expert_text(std::int32_t expert) {
  return expert < 0 ? "the shared expert" : fmt::format("expert {}", expert);
}

// Returns a text like "gemm1 of expert 5" or "combine".
std::string event_text(const TraceEvent& e) {
  switch (e.kind) {
    case TraceKind::kGemm1:
    case TraceKind::kGemm2:
    case TraceKind::kPack: return fmt::format("{} of {}", to_string(e.kind), expert_text(e.expert));
    case TraceKind::kSend: return e.peer < 0 ? "send" : fmt::format("send to rank {}", e.peer);
    default: return to_string(e.kind);
  }
}

// The time of the critical path by kind of event, and the time between its events.
struct PathTimes {
  std::array<std::int64_t, trace::kNumKinds> work_ns{};
  std::int64_t between_ns = 0;
  std::int64_t all_ns = 0;
};

PathTimes times_of(const std::vector<PathStep>& path) {
  PathTimes times;
  for (const PathStep& step : path) {
    times.work_ns[static_cast<std::size_t>(step.event.event->kind)] += step.work_ns();
    times.between_ns += step.gap_ns();
    times.all_ns += step.work_ns() + step.gap_ns();
  }
  return times;
}

// Returns a text like "core 3.10 ms, dispatch 210 us", with the longest wait first.
std::string waits_text(const std::array<std::int64_t, trace::kNumWaits>& wait_ns) {
  std::vector<std::pair<std::int64_t, std::string>> waits;
  for (std::size_t w = 0; w < wait_ns.size(); ++w) {
    if (wait_ns[w] == 0) continue;
    const auto wait = static_cast<TraceWait>(w);
    waits.emplace_back(wait_ns[w], wait == TraceWait::kNothing ? "taking tasks" : to_string(wait));
  }
  std::sort(waits.rbegin(), waits.rend());
  std::string text;
  for (const auto& [ns, name] : waits) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, time_text(ns));
  }
  return text.empty() ? "none" : text;
}

void add_shares(const Summary& s, const char* unit, Lines& lines, const Palette& palette) {
  std::int64_t units = 0;
  for (const RankSummary& rank : s.ranks) units += rank.units;
  lines.add_painted("pass", fmt::format("{}  on {}, from the first event to the last",
                                        palette.bold(time_text(s.pass_ns)), plural(units, unit)));
  lines.add_painted(
      "busy", fmt::format("{}  of the time in tasks; {}s active {}",
                          palette.bold(format_percent(s.busy)), unit, format_percent(s.active)));
  lines.add("waiting",
            fmt::format("{} (math role, all {}s together)", waits_text(s.wait_ns), unit));
  if (s.ranks.size() > 1) {
    lines.add("overlap", fmt::format("{} of {} of sending, while the rank also computes",
                                     format_percent(ratio(s.overlapped_ns, s.communication_ns)),
                                     time_text(s.communication_ns)));
  }
}

void add_ranks(const Summary& s, Lines& lines) {
  std::vector<std::vector<std::string>> rows = {
      {"rank", "pass", "busy", "first task", "last task", "overlap", "longest wait"}};
  for (const RankSummary& r : s.ranks) {
    const auto longest = std::max_element(r.wait_ns.begin(), r.wait_ns.end());
    const auto wait = static_cast<TraceWait>(longest - r.wait_ns.begin());
    rows.push_back(
        {fmt::format("{}", r.rank), time_text(r.pass_ns), format_percent(r.busy),
         r.first_task_ns < 0 ? "none" : time_text(r.first_task_ns),
         r.last_task_ns < 0 ? "none" : time_text(r.last_task_ns),
         r.communication_ns == 0 ? "-" : format_percent(ratio(r.overlapped_ns, r.communication_ns)),
         *longest == 0
             ? "-"
             : fmt::format("{} {}", wait == TraceWait::kNothing ? "taking tasks" : to_string(wait),
                           time_text(*longest))});
  }
  constexpr std::size_t kRight[] = {0, 1, 2, 3, 4, 5};
  for (const std::string& line : align_columns(rows, kRight)) {
    lines.add_whole(std::string(kLabelColumns, ' ') + line);
  }
}

void add_path(const Summary& s, const char* unit, Lines& lines) {
  if (s.path.empty()) return;
  const PathTimes times = times_of(s.path);
  std::string text = fmt::format(
      "{} back from rank {}'s {}:", plural(static_cast<std::int64_t>(s.path.size()), "event"),
      s.path.front().event.rank, event_text(*s.path.front().event.event));
  for (std::size_t k = 0; k < times.work_ns.size(); ++k) {
    if (times.work_ns[k] == 0) continue;
    text += fmt::format(" {} {},", to_string(static_cast<TraceKind>(k)),
                        format_percent(ratio(times.work_ns[k], times.all_ns)));
  }
  text += fmt::format(" between {}", format_percent(ratio(times.between_ns, times.all_ns)));
  lines.add("path", text);
  for (const PathStep& step : longest_waits(s, kMostWaits)) {
    lines.add("", describe_wait(step, unit));
  }
}

Json waits_json(const std::array<std::int64_t, trace::kNumWaits>& wait_ns) {
  Json json;
  for (std::size_t w = 0; w < wait_ns.size(); ++w) {
    json[to_string(static_cast<TraceWait>(w))] = wait_ns[w];
  }
  return json;
}

Json event_json(const trace::RankEvent& of, std::int64_t start) {
  const TraceEvent& e = *of.event;
  return {{"rank", of.rank},
          {"unit", e.unit},
          {"role", to_string(e.role)},
          {"kind", to_string(e.kind)},
          {"tile", e.tile},
          {"block", e.block},
          {"expert", e.expert},
          {"rows", e.rows},
          {"peer", e.peer},
          {"wait", to_string(e.wait)},
          {"ready_ns", e.ready_ns - start},
          {"begin_ns", e.begin_ns - start},
          {"end_ns", e.end_ns - start}};
}

Json path_json(const Summary& s, const char* unit) {
  const PathTimes times = times_of(s.path);
  Json json;
  for (std::size_t k = 0; k < times.work_ns.size(); ++k) {
    json["work_ns"][to_string(static_cast<TraceKind>(k))] = times.work_ns[k];
  }
  json["between_ns"] = times.between_ns;
  json["waits"] = Json::array();
  for (const PathStep& step : longest_waits(s, kMostWaits)) {
    json["waits"].push_back(describe_wait(step, unit));
  }
  // The path begins with its last event, but the list begins with the first.
  json["events"] = Json::array();
  const std::int64_t start = s.path.empty() ? 0 : s.path.back().event.event->begin_ns;
  for (auto step = s.path.rbegin(); step != s.path.rend(); ++step) {
    json["events"].push_back(event_json(step->event, start));
    json["events"].elements().back()["awaited"] = step->awaited;
  }
  return json;
}

}  // namespace

std::string describe_wait(const PathStep& step, const char* unit) {
  const TraceEvent& e = *step.event.event;
  const std::string start =
      fmt::format("rank {} waited {} for ", step.event.rank, time_text(step.waited_ns()));
  const std::string whose =
      step.cause.rank < 0 ? "another rank" : fmt::format("rank {}", step.cause.rank);
  switch (e.wait) {
    case TraceWait::kCounts: return fmt::format("{}{}'s counts", start, whose);
    case TraceWait::kDispatch:
      return fmt::format("{}{}'s dispatch of {}", start, whose, expert_text(e.expert));
    case TraceWait::kCombine:
      return fmt::format("{}{}'s {}, to combine tokens of chunk {}", start, whose,
                         event_text(*step.cause.event), e.tile);
    case TraceWait::kInput:
    case TraceWait::kTask:
      return fmt::format("{}{} on {} {}, before {}", start, event_text(*step.cause.event), unit,
                         step.cause.event->unit, event_text(e));
    case TraceWait::kSlot:
      return fmt::format("{}room, until {} on {} {}", start, event_text(*step.cause.event), unit,
                         step.cause.event->unit);
    case TraceWait::kCore: return fmt::format("{}a core, before {}", start, event_text(e));
    case TraceWait::kNothing: break;
  }
  return fmt::format("{}{}", start, event_text(e));
}

std::vector<std::string> to_text(const Summary& summary, const char* unit, const Palette& palette) {
  Lines lines(palette);
  add_shares(summary, unit, lines, palette);
  lines.add_blank();
  add_ranks(summary, lines);
  lines.add_blank();
  add_path(summary, unit, lines);
  if (summary.dropped > 0) {
    lines.add_painted(
        "dropped", palette.red(fmt::format("{}: there was no room; what is told above lacks them",
                                           plural(summary.dropped, "event"))));
  }
  return lines.take();
}

Json to_json(const Summary& s, const char* unit) {
  Json json = {{"unit", unit},
               {"pass_ns", s.pass_ns},
               {"busy", s.busy},
               {"active", s.active},
               {"wait_ns", waits_json(s.wait_ns)},
               {"communication_ns", s.communication_ns},
               {"overlapped_ns", s.overlapped_ns},
               {"dropped_events", s.dropped},
               {"ranks", Json::array()}};
  for (const RankSummary& r : s.ranks) {
    json["ranks"].push_back({{"rank", r.rank},
                             {"pass_ns", r.pass_ns},
                             {"units", r.units},
                             {"busy", r.busy},
                             {"active", r.active},
                             {"wait_ns", waits_json(r.wait_ns)},
                             {"communication_ns", r.communication_ns},
                             {"overlapped_ns", r.overlapped_ns},
                             {"first_task_ns", r.first_task_ns},
                             {"last_task_ns", r.last_task_ns},
                             {"sent_rows", r.sent_rows},
                             {"events", r.events},
                             {"dropped_events", r.dropped}});
  }
  json["path"] = path_json(s, unit);
  return json;
}

}  // namespace switchyard::cli
