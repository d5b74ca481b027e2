// The trace of one thread of a rank in a pass, for MoeLayer::trace(). Only that thread writes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "switchyard/trace.h"
#include "trace/clock.h"

namespace switchyard::cpu {

// Aligned to a cache line of its own, because threads record at the same time.
class alignas(64) ThreadTrace {
 public:
  ThreadTrace(std::int32_t unit, std::size_t most_events) : unit_(unit), most_events_(most_events) {
    events_.reserve(most_events);  // takes only address space until it is written
  }

  void clear() {
    events_.clear();
    dropped_ = 0;
    open_ = false;
  }

  // Notes that the thread is free from now on.
  void set_free() { free_since_ns_ = trace::now_ns(); }
  std::int64_t free_since_ns() const { return free_since_ns_; }

  // Begins `event`, for which the thread has waited since it was free.
  void begin(const TraceEvent& event) {
    current_ = event;
    current_.unit = unit_;
    current_.ready_ns = free_since_ns_;
    current_.begin_ns = trace::now_ns();
    open_ = true;
  }
  // Ends the event; the thread is free again.
  void end() { end(current_.rows); }
  void end(std::int32_t rows) {
    free_since_ns_ = trace::now_ns();
    if (!open_) return;
    current_.rows = rows;
    close(free_since_ns_);
  }

  // Ends the event within a task that goes on: the result that others wait for is complete, and
  // flags are about to be raised. Ending it here keeps it from overlapping what it causes.
  void complete() {
    told_ns_ = trace::now_ns();
    close(told_ns_);
  }
  // Records that `peer` is about to be told of a result; called after complete(). The rest of the
  // task is in no event.
  void set_subject(TraceKind kind, std::int32_t peer, std::int32_t tile, std::int32_t expert,
                   std::int32_t rows) {
    TraceEvent event = current_;
    event.kind = kind;
    event.wait = TraceWait::kNothing;
    event.ready_ns = event.begin_ns = told_ns_;
    event.end_ns = told_ns_ = trace::now_ns();
    event.tile = tile;
    event.block = -1;
    event.expert = expert;
    event.rows = rows;
    event.peer = peer;
    add(event);
  }

  const std::vector<TraceEvent>& events() const { return events_; }
  std::int64_t dropped() const { return dropped_; }

 private:
  void close(std::int64_t time_ns) {
    open_ = false;
    current_.end_ns = time_ns;
    add(current_);
  }
  void add(const TraceEvent& event) {
    if (events_.size() == most_events_) {
      ++dropped_;
    } else {
      events_.push_back(event);
    }
  }

  std::int32_t unit_;
  std::size_t most_events_;
  std::vector<TraceEvent> events_;
  std::int64_t dropped_ = 0;
  std::int64_t free_since_ns_ = 0;
  std::int64_t told_ns_ = 0;
  TraceEvent current_{};
  bool open_ = false;
};

// An event that ends with the scope. `trace` is null where nothing is recorded.
class Traced {
 public:
  Traced(ThreadTrace* trace, const TraceEvent& event) : trace_(trace) {
    if (trace_ != nullptr) trace_->begin(event);
  }
  ~Traced() {
    if (trace_ != nullptr) trace_->end();
  }
  Traced(const Traced&) = delete;
  Traced& operator=(const Traced&) = delete;

 private:
  ThreadTrace* trace_;
};

}  // namespace switchyard::cpu
