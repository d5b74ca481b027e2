#include "layer/failure.h"

#include <fmt/core.h>

#include <string>

#include "fabric/fabric.h"
#include "protocol/failure.h"

namespace switchyard {

void throw_failure(const World& world, const protocol::FailureRecord& record, const char* what) {
  const Fabric& fabric = world.fabric();
  protocol::FailureRecord blamed = record;
  // The rank that a kernel waited for may itself wait for another outside that pass. (A rank with
  // an error of its own, or that is lost, is to blame itself.)
  if (record.waited_ns != 0 && record.phase != protocol::Phase::kLink &&
      record.peer != fabric.rank()) {
    if (fabric.view().record) fabric.view().record->catch_up();
    const auto found =
        fabric.view().culprit(record.peer, std::chrono::nanoseconds(record.waited_ns));
    if (found && found->rank != fabric.rank() && found->witness >= 0) {
      blamed.peer = found->rank;
      blamed.witness = found->witness;
    }
  }
  const TimeoutError error =
      protocol::timeout_error(blamed, fabric.rank(), fabric.liveness(blamed.peer), what);
  fabric.report(error);
  throw error;
}

void throw_called_off(int rank, AbortCause cause, const char* what) {
  const std::string or_destroyed =
      cause == AbortCause::kInterrupted
          ? ""
          : fmt::format(", or destroyed this {} while it had work under way", what);
  throw TimeoutError(ErrorCode::kAborted,
                     fmt::format("{}{}; this {} cannot be used any more",
                                 abort_message(rank, cause), or_destroyed, what),
                     abort_failure(rank));
}

void throw_if_aborted(const World& world, const char* what) {
  const Fabric& fabric = world.fabric();
  if (fabric.was_aborted()) throw_called_off(fabric.rank(), fabric.abort_cause(), what);
}

}  // namespace switchyard
