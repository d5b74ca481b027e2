// A failure record as the typed error that callers get.
#pragma once

#include <string>

#include "protocol/control.h"
#include "switchyard/error.h"

namespace switchyard::protocol {

// kTimeout if `rank` itself waited too long, kAborted if another did. `liveness` is what else is
// known of the awaited rank; it may be empty.
TimeoutError timeout_error(const FailureRecord& record, int rank, const std::string& liveness);

}  // namespace switchyard::protocol
