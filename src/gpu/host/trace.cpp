#include "gpu/host/trace.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "gpu/host/cuda_error.h"
#include "gpu/host/device_clock.h"

namespace switchyard::gpu {
namespace {

// The reasons for which a role waits: first for a task (`given`), then for the task's needs
// (`input`).
struct Waits {
  TraceWait given, input;
};
Waits waits_of(TraceRole role, TraceKind kind, bool elsewhere) {
  switch (role) {
    case TraceRole::kPass:
      return {TraceWait::kNothing,
              kind == TraceKind::kCounts ? TraceWait::kCounts : TraceWait::kInput};
    case TraceRole::kScheduler: return {TraceWait::kTask, TraceWait::kTask};
    case TraceRole::kWeights: return {TraceWait::kTask, TraceWait::kSlot};
    case TraceRole::kTokens: return {TraceWait::kTask, TraceWait::kInput};
    case TraceRole::kSend: return {TraceWait::kNothing, TraceWait::kInput};
    case TraceRole::kPack:
      return {TraceWait::kNothing, elsewhere ? TraceWait::kDispatch : TraceWait::kSlot};
    case TraceRole::kMath:
      return {TraceWait::kTask,
              kind == TraceKind::kCombine ? TraceWait::kCombine : TraceWait::kInput};
  }
  return {TraceWait::kNothing, TraceWait::kNothing};
}

TraceEvent event_of(const TraceRecord& record, TraceRole role, unsigned block,
                    std::int64_t host_minus_device) {
  const auto host_time = [&](std::uint64_t stamp) {
    return static_cast<std::int64_t>(stamp) + host_minus_device;
  };
  TraceEvent event;
  event.kind = static_cast<TraceKind>(record.kind);
  event.role = role;
  event.unit = static_cast<std::int32_t>(block);
  event.tile = record.tile;
  event.block = record.block;
  event.expert = record.expert;
  event.rows = record.rows;
  event.peer = record.peer;
  // A role leaves out the stamps that have no meaning for it, so values of earlier passes may be
  // left in those fields.
  const std::uint64_t begin = record.begin;
  const std::uint64_t ready = std::min(begin, record.ready == 0 ? begin : record.ready);
  const std::uint64_t given = std::clamp(record.given, ready, begin);
  event.ready_ns = host_time(ready);
  event.begin_ns = host_time(begin);
  event.end_ns = host_time(std::max(begin, record.end));
  if (record.products >= begin && record.products <= record.end) {
    event.products_ns = host_time(record.products);
  }
  const Waits waits = waits_of(role, event.kind, event.peer >= 0);
  if (begin > ready) event.wait = given - ready > begin - given ? waits.given : waits.input;
  return event;
}

}  // namespace

void sort_events(std::vector<TraceEvent>& events) {
  std::ranges::stable_sort(events, [](const TraceEvent& a, const TraceEvent& b) {
    return std::tie(a.unit, a.role, a.ready_ns) < std::tie(b.unit, b.role, b.ready_ns);
  });
}

DeviceTrace::DeviceTrace(unsigned blocks)
    : records_(std::size_t{blocks} * kTraceRoles * kTraceRecords * sizeof(TraceRecord)),
      dropped_(sizeof(std::uint32_t)) {
  SWITCHYARD_CUDA(cudaMemset(records_.data(), 0, records_.bytes()));
  SWITCHYARD_CUDA(cudaMemset(dropped_.data(), 0, dropped_.bytes()));
}

TraceBuffer DeviceTrace::buffer(const std::optional<SlowRole>& slow) const {
  TraceBuffer buffer{reinterpret_cast<TraceRecord*>(records_.data()),
                     reinterpret_cast<std::uint32_t*>(dropped_.data())};
  if (slow) {
    buffer.slow_role = static_cast<std::int32_t>(slow->role);
    buffer.slow_ns = slow->nanoseconds;
  }
  return buffer;
}

void DeviceTrace::read(std::uint64_t epoch, PassTrace& trace) {
  std::vector<TraceRecord> records(records_.bytes() / sizeof(TraceRecord));
  records_.download(records.data(), records_.bytes());
  std::uint32_t dropped = 0;
  dropped_.download(&dropped, sizeof dropped);
  SWITCHYARD_CUDA(cudaMemset(dropped_.data(), 0, dropped_.bytes()));
  const std::int64_t host_minus_device = host_minus_device_ns();
  trace.dropped = dropped;
  trace.events.clear();
  for (std::size_t i = 0; i < records.size(); ++i) {
    const TraceRecord& record = records[i];
    // (The epoch is 0 before the first pass, which has no records.)
    if (record.epoch == 0 || record.epoch != static_cast<std::uint32_t>(epoch)) continue;
    const auto role = static_cast<TraceRole>(i / kTraceRecords % kTraceRoles);
    const auto block = static_cast<unsigned>(i / kTraceRecords / kTraceRoles);
    trace.events.push_back(event_of(record, role, block, host_minus_device));
  }
  sort_events(trace.events);
}

}  // namespace switchyard::gpu
