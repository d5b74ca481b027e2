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

}  // namespace switchyard
