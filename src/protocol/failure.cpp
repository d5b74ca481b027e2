#include "protocol/failure.h"

#include <fmt/core.h>

namespace switchyard::protocol {

TimeoutError timeout_error(const FailureRecord& record, int rank, const std::string& liveness,
                           const char* what) {
  WaitFailure failure;
  failure.waiter_rank = record.waiter;
  failure.peer_rank = record.peer;
  failure.phase = phase_name(record.phase);
  failure.epoch = record.epoch;
  failure.slot = record.slot;
  failure.expected = record.expected;
  failure.observed = record.observed;
  failure.waited_seconds = static_cast<double>(record.waited_ns) * 1e-9;
  std::string message =
      record.phase == Phase::kLink
          ? fmt::format("rank {} was lost in epoch {}, {:.3f} s after rank {} had heard of it last",
                        record.peer, record.epoch, failure.waited_seconds, record.waiter)
      : record.waited_ns == 0
          ? fmt::format("rank {} gave up epoch {} because of an error of its own", record.waiter,
                        record.epoch)
          : fmt::format(
                "rank {} did not do its part of {} in epoch {}: rank {} waited {:.3f} s "
                "without progress of any rank ({})",
                record.peer, failure.phase, record.epoch, record.waiter, failure.waited_seconds,
                record.witness == record.waiter
                    ? fmt::format("slot {}: expected {}, saw {}", record.slot, record.expected,
                                  record.observed)
                    : fmt::format("rank {} waits for rank {}", record.witness, record.peer));
  if (record.phase == Phase::kSlots) {
    message += "; all ranks must give the same max_tokens_per_rank";
  }
  if (!liveness.empty()) message += "; " + liveness;
  message += fmt::format("; this {} cannot be used any more, make a new one on every rank", what);
  // (A lost link is not a wait of any rank.)
  const bool first = record.waiter == rank && record.phase != Phase::kLink;
  return {first ? ErrorCode::kTimeout : ErrorCode::kAborted, message, failure};
}

}  // namespace switchyard::protocol
