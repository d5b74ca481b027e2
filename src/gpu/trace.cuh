// Time stamps of the roles, in kernels of traced policies; in others these functions are empty.
#pragma once

#include "gpu/layer/storage.cuh"

namespace switchyard::gpu {

using TraceStamp = std::uint64_t TraceRecord::*;

// Record `index` of this block's role; null past the last, which is counted.
template <typename P>
__device__ __forceinline__ TraceRecord* trace_record(const Pass<P>& pass, TraceRole role,
                                                     std::uint32_t index) {
  const TraceBuffer& trace = pass.call.trace;
  if (index >= kTraceRecords) {
    atomicAdd(trace.dropped, 1u);
    return nullptr;
  }
  return trace.records +
         (fresh_block_index() * kTraceRoles + static_cast<std::uint32_t>(role)) * kTraceRecords +
         index;
}

// What the role does next it does late, after one in so many of its tasks: see SlowRole.
template <typename P>
__device__ __forceinline__ void slow_down(const Pass<P>& pass, TraceRole role,
                                          std::uint32_t index) {
  const TraceBuffer& trace = pass.call.trace;
  if (trace.slow_role != static_cast<std::int32_t>(role)) return;
  const std::uint32_t mixed = (pass.flag() * 31 + fresh_block_index()) * 31 + index;
  if ((mixed * 2654435761u >> 16) % SlowRole::kOneIn != 0) return;
  const std::uint64_t start = device_now_ns();
  while (device_now_ns() - start < trace.slow_ns) __nanosleep(1000);
}

// By one thread of the role.
template <typename P>
__device__ __forceinline__ void trace_stamp(const Pass<P>& pass, TraceRole role,
                                            std::uint32_t index, TraceStamp stamp) {
  if constexpr (P::kTraced) {
    if (TraceRecord* const record = trace_record(pass, role, index); record != nullptr) {
      record->*stamp = device_now_ns();
    }
    if (stamp == &TraceRecord::end) slow_down(pass, role, index);
  }
}
// What the record is of. -1 where there is none.
struct TraceSubject {
  TraceKind kind;
  std::int32_t tile = -1, block = -1, expert = -1, rows = 0, peer = -1;
};
template <typename P>
__device__ __forceinline__ void trace_subject(const Pass<P>& pass, TraceRole role,
                                              std::uint32_t index, const TraceSubject& subject) {
  if constexpr (P::kTraced) {
    TraceRecord* const record = trace_record(pass, role, index);
    if (record == nullptr) return;
    record->kind = static_cast<std::int32_t>(subject.kind);
    record->tile = subject.tile;
    record->block = subject.block;
    record->expert = subject.expert;
    record->rows = subject.rows;
    record->peer = subject.peer;
    record->epoch = pass.flag();
  }
}
template <typename P>
__device__ __forceinline__ void trace_task(const Pass<P>& pass, TraceRole role, std::uint32_t index,
                                           const TileTask& task) {
  if constexpr (P::kTraced) {
    const TraceKind kind = task.work == Work::kGemm1   ? TraceKind::kGemm1
                           : task.work == Work::kGemm2 ? TraceKind::kGemm2
                                                       : TraceKind::kCombine;
    const std::uint32_t log2_splits = task.work == Work::kGemm2 ? pass.state().log2_splits : 0;
    const bool routed = task.work != Work::kCombine && task.shared == 0;
    trace_subject(pass, role, index,
                  {kind, static_cast<std::int32_t>(task.tile),
                   static_cast<std::int32_t>((task.block << log2_splits) + task.split),
                   routed ? static_cast<std::int32_t>(pass.first_expert() + task.expert) : -1,
                   static_cast<std::int32_t>(task.rows)});
    trace_stamp(pass, role, index, &TraceRecord::given);
  }
}

// Of the math warps, by their first thread.
template <typename P>
__device__ __forceinline__ void trace_math(const Pass<P>& pass, std::uint32_t index,
                                           TraceStamp stamp) {
  if constexpr (P::kTraced) {
    if (fresh_thread_index<kThreads>() == kWarpgroup) {
      trace_stamp(pass, TraceRole::kMath, index, stamp);
    }
  }
}

// What they have done, now.
template <typename P>
__device__ __forceinline__ void trace_math_end(const Pass<P>& pass, std::uint32_t index,
                                               const TraceSubject& subject) {
  if constexpr (P::kTraced) {
    if (fresh_thread_index<kThreads>() != kWarpgroup) return;
    trace_subject(pass, TraceRole::kMath, index, subject);
    trace_stamp(pass, TraceRole::kMath, index, &TraceRecord::end);
  }
}

// Of what all warps do in turn, by the block's first thread or another.
template <typename P>
__device__ __forceinline__ void trace_pass(const Pass<P>& pass, std::uint32_t index,
                                           TraceStamp stamp, std::uint32_t thread = 0) {
  if constexpr (P::kTraced) {
    if (fresh_thread_index<kThreads>() == thread) trace_stamp(pass, TraceRole::kPass, index, stamp);
  }
}
// One turn ends, and the next, if there is one, begins.
template <typename P>
__device__ __forceinline__ void trace_turn(const Pass<P>& pass, std::uint32_t index, TraceKind kind,
                                           std::uint32_t next, std::uint32_t thread = 0) {
  if constexpr (P::kTraced) {
    if (fresh_thread_index<kThreads>() != thread) return;
    trace_subject(pass, TraceRole::kPass, index, {kind});
    trace_stamp(pass, TraceRole::kPass, index, &TraceRecord::end);
    if (next == kTraceRecords) return;
    trace_stamp(pass, TraceRole::kPass, next, &TraceRecord::ready);
    trace_stamp(pass, TraceRole::kPass, next, &TraceRecord::begin);
  }
}

}  // namespace switchyard::gpu
