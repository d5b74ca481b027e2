// Turns a failure record into the typed error that callers get.
#pragma once

#include <string>

#include "protocol/control.h"
#include "switchyard/error.h"

namespace switchyard::protocol {

// The code is kTimeout if `rank` itself waited too long, kAborted if another rank did. `liveness`
// adds what is known of the awaited rank; it may be empty. `what` names the object that cannot be
// used any more: a "layer".
TimeoutError timeout_error(const FailureRecord& record, int rank, const std::string& liveness,
                           const char* what = "layer");

}  // namespace switchyard::protocol
