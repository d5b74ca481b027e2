// Where exceptions end: every function of the C interface runs its body in guarded(), which makes a
// status and this thread's last error of what is thrown.
#pragma once

#include "switchyard/c.h"

namespace switchyard::c_api {

// Remembers the exception that is being handled as this thread's last error.
sy_status remember_current_exception() noexcept;

template <typename Body>
sy_status guarded(Body&& body) noexcept {
  try {
    body();
    return SY_OK;
  } catch (...) {
    return remember_current_exception();
  }
}

}  // namespace switchyard::c_api
