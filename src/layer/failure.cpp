#include "layer/failure.h"

#include <fmt/core.h>

#include <chrono>
#include <string>
#include <thread>

#include "fabric/fabric.h"
#include "protocol/failure.h"

namespace switchyard {

protocol::FailureRecord followed(const World& world, const protocol::FailureRecord& record) {
  // (A rank with an error of its own, or that is lost, is to blame itself.)
  const int rank = world.rank();
  if (record.waited_ns == 0 || record.phase == protocol::Phase::kLink || record.peer == rank) {
    return record;
  }
  const auto found =
      world.fabric().view().culprit(record.peer, std::chrono::nanoseconds(record.waited_ns));
  protocol::FailureRecord blamed = record;
  if (found && found->rank != rank && found->witness >= 0) {
    blamed.peer = found->rank;
    blamed.witness = found->witness;
  }
  return blamed;
}

namespace {

// Returns what is known of the rank to blame. If a link was lost, another rank may have said so
// before the goodbye of the lost one is here, so this waits a little for the reason.
std::string liveness_of_blamed(const Fabric& fabric, const protocol::FailureRecord& record) {
  constexpr std::chrono::milliseconds kGrace{200}, kStep{1};
  const auto end = std::chrono::steady_clock::now() + kGrace;
  for (;;) {
    std::string known = fabric.liveness(record.peer);
    if (!known.empty() || record.phase != protocol::Phase::kLink ||
        std::chrono::steady_clock::now() >= end) {
      return known;
    }
    std::this_thread::sleep_for(kStep);
  }
}

}  // namespace

void throw_failure(const World& world, const protocol::FailureRecord& record, const char* what) {
  const Fabric& fabric = world.fabric();
  const TimeoutError error =
      protocol::timeout_error(record, fabric.rank(), liveness_of_blamed(fabric, record), what);
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
