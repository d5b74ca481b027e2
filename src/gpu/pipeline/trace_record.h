// What traced kernels write down, and the host reads.
#pragma once

#include <cstdint>

#include "switchyard/trace.h"

namespace switchyard::gpu {

// One event. Roles stamp it bit by bit, because they have no registers to keep anything of it.
// Times are nanoseconds of the device's global timer.
struct TraceRecord {
  std::uint64_t ready;     // the role had nothing to do any more
  std::uint64_t given;     // it had a task
  std::uint64_t begin;     // and what the task needs
  std::uint64_t products;  // of a GEMM: the sums are complete
  std::uint64_t end;
  std::uint32_t epoch;  // of a record that belongs to this pass: its number, from 1
  std::int32_t kind;    // TraceKind
  std::int32_t tile, block, expert, rows, peer;
};

// A block has so many records for each role; a role's n-th task, or group of rows, has the n-th.
inline constexpr std::uint32_t kTraceRecords = 2048, kTraceRoles = 7;
static_assert(static_cast<std::uint32_t>(TraceRole::kMath) + 1 == kTraceRoles);
// What the math warps do before their first task; and the sending warp's last record.
inline constexpr std::uint32_t kGateRecord = 0, kFirstSendsRecord = 1, kFirstRowsRecord = 2,
                               kFirstTaskRecord = 3, kSignalRecord = kTraceRecords - 1;
// What a block's warps do in turn: route, count, plan.
inline constexpr std::uint32_t kRouteRecord = 0, kCountsRecord = 1, kPlanRecord = 2;

struct TraceBuffer {
  TraceRecord* records = nullptr;    // [block, role, kTraceRecords]
  std::uint32_t* dropped = nullptr;  // stamps past the last record
  std::int32_t slow_role = -1;       // SlowRole
  std::uint32_t slow_ns = 0;
};

}  // namespace switchyard::gpu
