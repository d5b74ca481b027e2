// How a pass that failed ends for the caller, in both engines.
#pragma once

#include "protocol/control.h"
#include "switchyard/world.h"

namespace switchyard {

// Throws the record of a failed pass as TimeoutError (protocol/failure.h), with what is known of
// the awaited rank, and reports it to whoever started the ranks.
[[noreturn]] void throw_failure(const World& world, const protocol::FailureRecord& record);

// Throws that `rank` called World::abort(), or gave up a layer that it destroyed.
[[noreturn]] void throw_called_off(int rank);
// Which of the two, by a rank's abort word, which is not 0; `failure` gets the record of a rank.
template <typename FailureOf>
[[noreturn]] void throw_abort(const World& world, std::uint64_t abort, FailureOf&& failure) {
  const int rank = static_cast<int>(abort & (protocol::kCalledOff - 1)) - 1;
  if ((abort & protocol::kCalledOff) != 0) throw_called_off(rank);
  throw_failure(world, failure(rank));
}

}  // namespace switchyard
