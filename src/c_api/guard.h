// Where exceptions end: every function of the C interface runs its body in guarded(), which makes a
// status and this thread's last error of what is thrown, and of an interruption by the caller.
#pragma once

#include "base/interrupt.h"
#include "switchyard/c.h"

namespace switchyard::c_api {

// Remembers the exception that is being handled as this thread's last error.
sy_status remember_current_exception() noexcept;

// Remembers that the caller interrupted the call, in the place of what the call itself failed with.
sy_status remember_interruption() noexcept;

template <typename Body>
sy_status guarded(Body&& body) noexcept {
  const InterruptibleCall call;
  sy_status status = SY_OK;
  try {
    body();
  } catch (...) {
    status = remember_current_exception();
  }
  // A body may succeed nevertheless, if what it waited for came at that moment.
  return call.was_interrupted() ? remember_interruption() : status;
}

}  // namespace switchyard::c_api
