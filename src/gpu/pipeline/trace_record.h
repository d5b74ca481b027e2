// The records that traced kernels write and the host reads.
#pragma once

#include <cstdint>

#include "switchyard/trace.h"

namespace switchyard::gpu {

// One event. Roles stamp its fields one by one, because they have no registers to keep them in.
// Times are nanoseconds of the device's global timer.
struct TraceRecord {
  std::uint64_t ready;     // the role became free
  std::uint64_t given;     // it had a task
  std::uint64_t begin;     // the task's inputs were there
  std::uint64_t products;  // a GEMM's sums were complete
  std::uint64_t end;
  std::uint32_t epoch;  // the number, from 1, of the pass that wrote the record
  std::int32_t kind;    // TraceKind
  std::int32_t tile, block, expert, rows, peer;
};

// The records of one role of a block. A role's n-th task, or group of rows, uses the n-th.
inline constexpr std::uint32_t kTraceRecords = 2048, kTraceRoles = 7;
static_assert(static_cast<std::uint32_t>(TraceRole::kMath) + 1 == kTraceRoles);
// The math warps' records before their first task, and the sending warp's last record.
inline constexpr std::uint32_t kGateRecord = 0, kFirstSendsRecord = 1, kFirstRowsRecord = 2,
                               kFirstTaskRecord = 3, kSignalRecord = kTraceRecords - 1;
// The records of the steps that a block does one after the other: route, count, plan.
inline constexpr std::uint32_t kRouteRecord = 0, kCountsRecord = 1, kPlanRecord = 2;

struct TraceBuffer {
  TraceRecord* records = nullptr;    // [block, role, kTraceRecords]
  std::uint32_t* dropped = nullptr;  // stamps past the last record
  std::int32_t slow_role = -1;       // SlowRole
  std::uint32_t slow_ns = 0;
};

}  // namespace switchyard::gpu
