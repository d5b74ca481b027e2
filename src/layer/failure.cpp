#include "layer/failure.h"

#include "fabric/fabric.h"
#include "protocol/failure.h"

namespace switchyard {

void throw_failure(const World& world, const protocol::FailureRecord& record) {
  const Fabric& fabric = world.fabric();
  const TimeoutError error =
      protocol::timeout_error(record, fabric.rank(), fabric.liveness(record.peer));
  fabric.report(error.failure());
  throw error;
}

void throw_called_off(int rank) {
  throw TimeoutError(ErrorCode::kAborted,
                     abort_message(rank) +
                         ", or destroyed this layer while it had passes under "
                         "way; this layer cannot be used any more",
                     abort_failure(rank));
}

}  // namespace switchyard
