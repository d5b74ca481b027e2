#include "switchyard/trace.h"

namespace switchyard {

const char* to_string(TraceRole role) {
  switch (role) {
    case TraceRole::kPass: return "pass";
    case TraceRole::kScheduler: return "scheduler";
    case TraceRole::kWeights: return "weights";
    case TraceRole::kTokens: return "tokens";
    case TraceRole::kSend: return "send";
    case TraceRole::kPack: return "pack";
    case TraceRole::kMath: return "math";
  }
  return "unknown";
}

const char* to_string(TraceKind kind) {
  switch (kind) {
    case TraceKind::kGate: return "gate";
    case TraceKind::kRoute: return "route";
    case TraceKind::kCounts: return "counts";
    case TraceKind::kPlan: return "plan";
    case TraceKind::kSend: return "send";
    case TraceKind::kPack: return "pack";
    case TraceKind::kGemm1: return "gemm1";
    case TraceKind::kGemm2: return "gemm2";
    case TraceKind::kCombine: return "combine";
    case TraceKind::kSignal: return "signal";
  }
  return "unknown";
}

const char* to_string(TraceWait wait) {
  switch (wait) {
    case TraceWait::kNothing: return "nothing";
    case TraceWait::kTask: return "task";
    case TraceWait::kSlot: return "slot";
    case TraceWait::kInput: return "input";
    case TraceWait::kCounts: return "counts";
    case TraceWait::kDispatch: return "dispatch";
    case TraceWait::kCombine: return "combine";
    case TraceWait::kCore: return "core";
  }
  return "unknown";
}

}  // namespace switchyard
