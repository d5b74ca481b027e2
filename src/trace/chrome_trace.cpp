#include "trace/chrome_trace.h"

#include <fmt/core.h>

#include <limits>
#include <map>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "base/json.h"
#include "trace/causes.h"

namespace switchyard::trace {
namespace {

// Entries of one time are written in this order, so that arrows find their slices open.
enum class EntryType : std::uint8_t { kWait, kSlice, kArrowFrom, kArrowTo, kTasks, kBytes };

struct Entry {
  std::int64_t time_ns;
  EntryType type;
  RankEvent of;  // kTasks, kBytes: only the rank
  // kWait, kSlice: nanoseconds; kArrowFrom, kArrowTo: its number; kTasks, kBytes: the value.
  std::int64_t value;
  const char* name;  // of arrows
};

// The place of a slice after it was moved, if it was.
struct Placed {
  std::int64_t begin_ns, end_ns;
};

// Process 0 and thread 0 are the kernel's idle task to Perfetto.
int process_of(int rank) { return rank + 1; }
int thread_of(const TraceEvent& e) {
  constexpr int kRolesPerUnit = 10;
  return 1000 + e.unit * kRolesPerUnit + static_cast<int>(e.role);
}

class Writer {
 public:
  Writer(std::span<const PassTrace> traces, const ChromeTraceOptions& options)
      : traces_(traces), options_(options), index_(traces) {
    for (const PassTrace& trace : traces_) {
      place(trace);
      count_tasks(trace);
      count_bytes(trace);
    }
    for (const PassTrace& trace : traces_) draw_arrows(trace);
    std::stable_sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
      return std::tie(a.time_ns, a.type) < std::tie(b.time_ns, b.type);
    });
  }

  void write(std::ostream& out) const {
    out << "{\"displayTimeUnit\":\"ns\",\"otherData\":" << about().dump() << ",\"traceEvents\":[\n";
    const char* separator = "";
    const auto put = [&](const std::string& line) {
      out << separator << line;
      separator = ",\n";
    };
    name_tracks(put);
    const std::int64_t start = entries_.empty() ? 0 : entries_.front().time_ns;
    for (const Entry& entry : entries_) put(line_of(entry, start));
    out << "\n]}\n";
  }

 private:
  // Places the slices and waits of a rank's tracks.
  void place(const PassTrace& trace) {
    std::map<int, std::vector<const TraceEvent*>> tracks;
    for (const TraceEvent& e : trace.events) tracks[thread_of(e)].push_back(&e);
    for (auto& [thread, events] : tracks) {
      std::stable_sort(events.begin(), events.end(), [](const TraceEvent* a, const TraceEvent* b) {
        return a->begin_ns < b->begin_ns;
      });
      std::int64_t free = std::numeric_limits<std::int64_t>::min();
      for (const TraceEvent* e : events) {
        const std::int64_t ready = std::max(e->ready_ns, free);
        const std::int64_t begin = std::max(e->begin_ns, free);
        const std::int64_t end = std::max(e->end_ns, begin + 1);
        if (e->wait != TraceWait::kNothing && begin - ready >= options_.shortest_wait_ns) {
          entries_.push_back({ready, EntryType::kWait, {trace.rank, e}, begin - ready, nullptr});
        }
        entries_.push_back({begin, EntryType::kSlice, {trace.rank, e}, end - begin, nullptr});
        placed_[e] = {begin, end};
        free = end;
      }
    }
  }

  void count_tasks(const PassTrace& trace) {
    std::map<std::int64_t, std::int64_t> changes;
    for (const TraceEvent& e : trace.events) {
      if (!is_task(e)) continue;
      ++changes[placed_[&e].begin_ns];
      --changes[placed_[&e].end_ns];
    }
    std::int64_t in_work = 0;
    for (const auto& [time, change] : changes) {
      if (change == 0) continue;
      in_work += change;
      entries_.push_back({time, EntryType::kTasks, {trace.rank, nullptr}, in_work, nullptr});
    }
  }

  void count_bytes(const PassTrace& trace) {
    if (options_.row_bytes == 0) return;
    std::map<std::int64_t, std::int64_t> sent;
    for (const TraceEvent& e : trace.events) {
      if (e.kind != TraceKind::kSend || e.peer == trace.rank || e.rows == 0) continue;
      sent.try_emplace(placed_[&e].begin_ns, 0);
      sent[placed_[&e].end_ns] += e.rows * static_cast<std::int64_t>(options_.row_bytes);
    }
    std::int64_t bytes = 0;
    for (const auto& [time, more] : sent) {
      if (more == 0 && bytes > 0) continue;  // the first makes the counter begin at 0
      bytes += more;
      entries_.push_back({time, EntryType::kBytes, {trace.rank, nullptr}, bytes, nullptr});
    }
  }

  void draw_arrows(const PassTrace& trace) {
    // The events of a tile, in the order of the kinds.
    struct Tile {
      const TraceEvent* first_pack = nullptr;
      const TraceEvent* first_gemm1 = nullptr;
      const TraceEvent* first_gemm2 = nullptr;
    };
    std::map<std::int32_t, Tile> tiles;
    const auto keep_first = [](const TraceEvent*& first, const TraceEvent& e) {
      if (first == nullptr || e.begin_ns < first->begin_ns) first = &e;
    };
    for (const TraceEvent& e : trace.events) {
      if (e.kind == TraceKind::kPack && e.tile >= 0) keep_first(tiles[e.tile].first_pack, e);
      if (!is_task(e)) continue;
      if (e.kind == TraceKind::kGemm1) keep_first(tiles[e.tile].first_gemm1, e);
      if (e.kind == TraceKind::kGemm2) keep_first(tiles[e.tile].first_gemm2, e);
      if (e.kind == TraceKind::kCombine) {
        draw("combine", find_result(index_, trace.rank, e), {trace.rank, &e});
      }
    }
    for (const auto& entry : tiles) {
      const std::int32_t number = entry.first;
      const Tile& tile = entry.second;
      const TraceEvent* const first =
          tile.first_pack != nullptr ? tile.first_pack : tile.first_gemm1;
      for (int source = 0; first != nullptr && first->expert >= 0 && source < index_.num_ranks();
           ++source) {
        if (source == trace.rank) continue;
        draw("dispatch",
             {source, find_send(index_, source, trace.rank, first->expert, first->begin_ns)},
             {trace.rank, first});
      }
      const auto draw_from = [&](TraceKind kind, const TraceEvent* to) {
        if (to == nullptr) return;
        draw("tile", {trace.rank, find_of_tile(index_, trace.rank, kind, number, to->begin_ns)},
             {trace.rank, to});
      };
      draw_from(TraceKind::kPack, tile.first_gemm1);
      draw_from(TraceKind::kGemm1, tile.first_gemm2);
    }
  }

  // Draws an arrow from the last moment of one slice to the first of the other.
  void draw(const char* name, const RankEvent& from, const RankEvent& to) {
    if (from.event == nullptr) return;
    const std::int64_t begin = placed_[from.event].end_ns - 1, end = placed_[to.event].begin_ns;
    if (begin > end) return;  // one of them has been moved past the other
    ++num_arrows_;
    entries_.push_back({begin, EntryType::kArrowFrom, from, num_arrows_, name});
    entries_.push_back({end, EntryType::kArrowTo, to, num_arrows_, name});
  }

  Json about() const {
    Json json = {{"title", options_.title}};
    std::int64_t dropped = 0;
    for (const PassTrace& trace : traces_) dropped += trace.dropped;
    if (!traces_.empty()) json["epoch"] = traces_.front().epoch;
    json["ranks"] = traces_.size();
    json["dropped_events"] = dropped;
    return json;
  }

  template <typename Put>
  void name_tracks(const Put& put) const {
    for (const PassTrace& trace : traces_) {
      const int pid = process_of(trace.rank);
      const auto process = [&](const char* what, const std::string& value) {
        put(fmt::format(R"({{"ph":"M","name":"process_{}","pid":{},"args":{{{}}}}})", what, pid,
                        value));
      };
      process("name", fmt::format(R"("name":"rank {}")", trace.rank));
      process("sort_index", fmt::format(R"("sort_index":{})", trace.rank));
      std::map<int, const TraceEvent*> tracks;
      for (const TraceEvent& e : trace.events) tracks.try_emplace(thread_of(e), &e);
      for (const auto& [tid, e] : tracks) {
        put(fmt::format(
            R"({{"ph":"M","name":"thread_name","pid":{},"tid":{},"args":{{"name":"{} {} {}"}}}})",
            pid, tid, options_.unit, e->unit, to_string(e->role)));
        put(fmt::format(
            R"({{"ph":"M","name":"thread_sort_index","pid":{0},"tid":{1},"args":{{"sort_index":{1}}}}})",
            pid, tid));
      }
    }
  }

  static std::string microseconds(std::int64_t ns) {
    return fmt::format("{}.{:03}", ns / 1000, ns % 1000);
  }

  static std::string arguments_of(const TraceEvent& e) {
    std::string text;
    const auto add = [&text](const char* name, std::int32_t value) {
      text += fmt::format("{}\"{}\":{}", text.empty() ? "" : ",", name, value);
    };
    if (e.tile >= 0) add(e.kind == TraceKind::kCombine ? "chunk" : "tile", e.tile);
    if (e.block >= 0) add("block", e.block);
    if (e.expert >= 0) add("expert", e.expert);
    if (e.rows > 0) add("rows", e.rows);
    if (e.peer >= 0) add("peer", e.peer);
    if (e.wait != TraceWait::kNothing) {
      text += fmt::format("{}\"wait\":\"{}\"", text.empty() ? "" : ",", to_string(e.wait));
    }
    return text;
  }

  static std::string line_of(const Entry& entry, std::int64_t start) {
    const int pid = process_of(entry.of.rank);
    const std::string ts = microseconds(entry.time_ns - start);
    switch (entry.type) {
      case EntryType::kWait: {
        const TraceEvent& e = *entry.of.event;
        const std::string peer =
            is_for_peer(e.wait) && e.peer >= 0 ? fmt::format(" (rank {})", e.peer) : std::string();
        return fmt::format(
            R"({{"ph":"X","name":"wait: {}{}","cat":"wait","pid":{},"tid":{},"ts":{},"dur":{}}})",
            to_string(e.wait), peer, pid, thread_of(e), ts, microseconds(entry.value));
      }
      case EntryType::kSlice: {
        const TraceEvent& e = *entry.of.event;
        return fmt::format(
            R"({{"ph":"X","name":"{}","cat":"{}","pid":{},"tid":{},"ts":{},"dur":{},"args":{{{}}}}})",
            to_string(e.kind), to_string(e.role), pid, thread_of(e), ts, microseconds(entry.value),
            arguments_of(e));
      }
      case EntryType::kArrowFrom:
        return fmt::format(
            R"({{"ph":"s","name":"{0}","cat":"{0}","id":{1},"pid":{2},"tid":{3},"ts":{4}}})",
            entry.name, entry.value, pid, thread_of(*entry.of.event), ts);
      case EntryType::kArrowTo:
        return fmt::format(
            R"({{"ph":"f","bp":"e","name":"{0}","cat":"{0}","id":{1},"pid":{2},"tid":{3},"ts":{4}}})",
            entry.name, entry.value, pid, thread_of(*entry.of.event), ts);
      case EntryType::kTasks:
        return fmt::format(
            R"({{"ph":"C","name":"tasks in work","pid":{},"ts":{},"args":{{"tasks":{}}}}})", pid,
            ts, entry.value);
      case EntryType::kBytes:
        return fmt::format(
            R"({{"ph":"C","name":"bytes sent to others","pid":{},"ts":{},"args":{{"bytes":{}}}}})",
            pid, ts, entry.value);
    }
    return {};
  }

  std::span<const PassTrace> traces_;
  const ChromeTraceOptions& options_;
  EventIndex index_;
  std::unordered_map<const TraceEvent*, Placed> placed_;
  std::vector<Entry> entries_;
  std::int64_t num_arrows_ = 0;
};

}  // namespace

void write_chrome_trace(std::ostream& out, std::span<const PassTrace> traces,
                        const ChromeTraceOptions& options) {
  Writer(traces, options).write(out);
}

}  // namespace switchyard::trace
