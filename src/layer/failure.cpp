#include "layer/failure.h"

#include <fmt/core.h>

#include "fabric/fabric.h"
#include "protocol/failure.h"

namespace switchyard {

void throw_failure(const World& world, const protocol::FailureRecord& record, const char* what) {
  const Fabric& fabric = world.fabric();
  const TimeoutError error =
      protocol::timeout_error(record, fabric.rank(), fabric.liveness(record.peer), what);
  fabric.report(error.failure());
  throw error;
}

void throw_called_off(int rank, const char* what) {
  throw TimeoutError(
      ErrorCode::kAborted,
      fmt::format("{}, or destroyed this {} while it had work under way; this {} cannot be used "
                  "any more",
                  abort_message(rank), what, what),
      abort_failure(rank));
}

}  // namespace switchyard
