// How a pass that failed ends for the caller, in both engines.
#pragma once

#include "protocol/control.h"
#include "switchyard/world.h"

namespace switchyard {

// Throws the record of a failed pass as TimeoutError (protocol/failure.h), with what is known of
// the awaited rank, and reports it to whoever started the ranks.
[[noreturn]] void throw_failure(const World& world, const protocol::FailureRecord& record);

}  // namespace switchyard
