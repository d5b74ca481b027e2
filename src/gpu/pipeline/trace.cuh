// Time stamps of the roles in traced kernels. In other kernels these functions are empty.
#pragma once

#include "gpu/pipeline/roles.h"
#include "gpu/pipeline/trace_record.h"
#include "gpu/pipeline/wait.cuh"
#include "gpu/ptx/compiler.cuh"

namespace switchyard::gpu {

using TraceStamp = std::uint64_t TraceRecord::*;

// The subject of a record. A field is -1 where it does not apply.
struct TraceSubject {
  TraceKind kind;
  std::int32_t tile = -1, block = -1, expert = -1, rows = 0, peer = -1;
};

template <bool kTraced>
struct Tracer {
  const TraceBuffer& buffer;
  Lifetime life;

  // Stamps a record. Called by one thread of the role.
  __device__ __forceinline__ void stamp(TraceRole role, std::uint32_t index,
                                        TraceStamp which) const {
    if constexpr (kTraced) {
      if (TraceRecord* const to = record(role, index); to != nullptr) {
        to->*which = device_now_ns();
      }
      if (which == &TraceRecord::end) slow_down(role, index);
    }
  }
  __device__ __forceinline__ void subject(TraceRole role, std::uint32_t index,
                                          const TraceSubject& of) const {
    if constexpr (kTraced) {
      TraceRecord* const to = record(role, index);
      if (to == nullptr) return;
      to->kind = static_cast<std::int32_t>(of.kind);
      to->tile = of.tile;
      to->block = of.block;
      to->expert = of.expert;
      to->rows = of.rows;
      to->peer = of.peer;
      to->epoch = life.flag();
    }
  }

  // Stamps a record of the math role, in the first thread of the math warps.
  __device__ __forceinline__ void math(std::uint32_t index, TraceStamp which) const {
    if constexpr (kTraced) {
      if (reread_thread_index<kThreads>() == kWarpgroup) stamp(TraceRole::kMath, index, which);
    }
  }
  // Completes a record of the math role, in the first thread of the math warps.
  __device__ __forceinline__ void math_end(std::uint32_t index, const TraceSubject& of) const {
    if constexpr (kTraced) {
      if (reread_thread_index<kThreads>() != kWarpgroup) return;
      subject(TraceRole::kMath, index, of);
      stamp(TraceRole::kMath, index, &TraceRecord::end);
    }
  }

  // Stamps a record of a step that the whole block does, in the block's first thread or in
  // `thread`.
  __device__ __forceinline__ void pass(std::uint32_t index, TraceStamp which,
                                       std::uint32_t thread = 0) const {
    if constexpr (kTraced) {
      if (reread_thread_index<kThreads>() == thread) stamp(TraceRole::kPass, index, which);
    }
  }
  // Ends the record of one step and begins that of the next, unless `next` is kTraceRecords.
  __device__ __forceinline__ void turn(std::uint32_t index, TraceKind kind, std::uint32_t next,
                                       std::uint32_t thread = 0) const {
    if constexpr (kTraced) {
      if (reread_thread_index<kThreads>() != thread) return;
      subject(TraceRole::kPass, index, {kind});
      stamp(TraceRole::kPass, index, &TraceRecord::end);
      if (next == kTraceRecords) return;
      stamp(TraceRole::kPass, next, &TraceRecord::ready);
      stamp(TraceRole::kPass, next, &TraceRecord::begin);
    }
  }

 private:
  // Returns record `index` of this block's role. Past the last record it returns null and counts
  // the loss.
  __device__ __forceinline__ TraceRecord* record(TraceRole role, std::uint32_t index) const {
    if (index >= kTraceRecords) {
      atomicAdd(buffer.dropped, 1u);
      return nullptr;
    }
    return buffer.records +
           (reread_block_index() * kTraceRoles + static_cast<std::uint32_t>(role)) * kTraceRecords +
           index;
  }
  // Delays the role after one in SlowRole::kOneIn of its tasks, chosen by a hash.
  __device__ __forceinline__ void slow_down(TraceRole role, std::uint32_t index) const {
    if (buffer.slow_role != static_cast<std::int32_t>(role)) return;
    const std::uint32_t mixed = (life.flag() * 31 + reread_block_index()) * 31 + index;
    if ((mixed * 2654435761u >> 16) % SlowRole::kOneIn != 0) return;
    const std::uint64_t start = device_now_ns();
    while (device_now_ns() - start < buffer.slow_ns) __nanosleep(1000);
  }
};

}  // namespace switchyard::gpu
