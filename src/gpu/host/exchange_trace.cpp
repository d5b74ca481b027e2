#include "gpu/host/exchange_trace.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "gpu/host/cuda_error.h"
#include "gpu/host/device_clock.h"
#include "gpu/host/trace.h"

namespace switchyard::gpu {
namespace {

struct Part {
  TraceRole role;
  TraceWait wait;  // how the role waited before it began
};

Part part_of(ExchangeStage stage, TraceKind kind) {
  switch (stage) {
    case ExchangeStage::kSendTokens:
      if (kind == TraceKind::kRoute) return {TraceRole::kPass, TraceWait::kNothing};
      // Blocks that place rows early wait for them while they place.
      if (kind == TraceKind::kPack) return {TraceRole::kPack, TraceWait::kNothing};
      return {TraceRole::kSend, TraceWait::kNothing};
    case ExchangeStage::kAwaitDispatch: return {TraceRole::kPass, TraceWait::kDispatch};
    case ExchangeStage::kPlaceRows: return {TraceRole::kPack, TraceWait::kNothing};
    case ExchangeStage::kSendResults: return {TraceRole::kSend, TraceWait::kNothing};
    case ExchangeStage::kAwaitCombine: return {TraceRole::kPass, TraceWait::kCombine};
    case ExchangeStage::kSumTokens: return {TraceRole::kMath, TraceWait::kNothing};
  }
  return {TraceRole::kPass, TraceWait::kNothing};
}

}  // namespace

ExchangeTrace::ExchangeTrace(unsigned blocks)
    : blocks_(blocks), records_(std::size_t{kExchangeStages} * blocks * sizeof(ExchangeRecord)) {
  // No dispatch has number 0.
  SWITCHYARD_CUDA(cudaMemset(records_.data(), 0, records_.bytes()));
}

ExchangeRecords ExchangeTrace::records() const {
  return {reinterpret_cast<ExchangeRecord*>(records_.data()), blocks_};
}

void ExchangeTrace::read(std::uint64_t dispatch, std::uint64_t combine, const Stream& stream,
                         PassTrace& trace) const {
  std::vector<ExchangeRecord> records(records_.bytes() / sizeof(ExchangeRecord));
  const auto on = static_cast<cudaStream_t>(stream.handle());
  SWITCHYARD_CUDA(cudaMemcpyAsync(records.data(), records_.data(), records_.bytes(),
                                  cudaMemcpyDeviceToHost, on));
  SWITCHYARD_CUDA(cudaStreamSynchronize(on));
  const std::int64_t host_minus_device = host_minus_device_ns();
  trace.epoch = dispatch;
  trace.events.clear();
  for (std::size_t i = 0; i < records.size(); ++i) {
    const ExchangeRecord& record = records[i];
    const auto stage = static_cast<ExchangeStage>(i / blocks_);
    // Kernels of earlier calls may have had more blocks.
    if (record.dispatch == 0 || record.dispatch != dispatch) continue;
    if (stage >= ExchangeStage::kSendResults && record.combine != combine) continue;
    const auto host_time = [&](std::uint64_t stamp) {
      return static_cast<std::int64_t>(stamp) + host_minus_device;
    };
    const Part part = part_of(stage, record.kind);
    TraceEvent event;
    event.kind = record.kind;
    event.role = part.role;
    event.unit = static_cast<std::int32_t>(i % blocks_);
    event.ready_ns = host_time(record.ready);
    event.begin_ns = host_time(record.begin);
    event.end_ns = host_time(std::max(record.begin, record.end));
    if (event.begin_ns > event.ready_ns) event.wait = part.wait;
    trace.events.push_back(event);
  }
  sort_events(trace.events);
}

}  // namespace switchyard::gpu
