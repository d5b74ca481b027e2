// How a pass that failed ends for the caller, in both engines.
#pragma once

#include "fabric/fabric.h"
#include "protocol/control.h"
#include "switchyard/world.h"

namespace switchyard {

// The record of a wait that a kernel gave up, with the rank that the world's record blames: the one
// that the kernel waited for may itself wait for another outside that pass.
protocol::FailureRecord followed(const World& world, const protocol::FailureRecord& record);

// Throws the record of a failed pass as TimeoutError (protocol/failure.h), with what is known of
// the awaited rank, and reports it to the launcher of the ranks. Here and below `what` is what
// failed: a "layer" or an "exchange".
[[noreturn]] void throw_failure(const World& world, const protocol::FailureRecord& record,
                                const char* what = "layer");

// Throws that `rank` was interrupted, or called World::abort(), or gave up a layer that it
// destroyed.
[[noreturn]] void throw_called_off(int rank, AbortCause cause, const char* what = "layer");
// Throws why this rank ended the world, if it did.
void throw_if_aborted(const World& world, const char* what = "layer");
// Why the rank did, by an abort word with kCalledOff.
inline AbortCause cause_of(std::uint64_t abort) {
  return (abort & protocol::kInterrupted) != 0 ? AbortCause::kInterrupted : AbortCause::kCalledOff;
}
// Throws one of the two, by a rank's abort word, which is not 0; `failure(rank)` returns that
// rank's record.
template <typename FailureOf>
[[noreturn]] void throw_abort(const World& world, std::uint64_t abort, FailureOf&& failure,
                              const char* what = "layer") {
  const int rank = static_cast<int>(abort & (protocol::kCalledOff - 1)) - 1;
  if ((abort & protocol::kCalledOff) != 0) throw_called_off(rank, cause_of(abort), what);
  throw_failure(world, failure(rank), what);
}

}  // namespace switchyard
