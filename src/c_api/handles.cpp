#include "c_api/handles.h"

#include <mutex>
#include <vector>

#include "switchyard/error.h"

namespace switchyard::c_api {

void Call::refuse_inside_check() {
  if (!asks_caller_now()) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      "a handler of a signal makes this call while its thread waits in another one; let the "
      "handler note the signal, and make the call after the other one has returned");
}

void leave_behind(void* handle) {
  struct Left {
    std::mutex mutex;
    std::vector<void*> handles;
  };
  static Left& left = *new Left();
  const std::lock_guard lock(left.mutex);
  left.handles.push_back(handle);
}

}  // namespace switchyard::c_api
