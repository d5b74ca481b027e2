// How callers end calls that wait, and Python's signals.
#include "base/interrupt.h"

#include "c_api/guard.h"
#include "c_api/structs.h"
#include "switchyard/error.h"

namespace switchyard::c_api {
namespace {

// The functions are written once, before any call asks.
sy_python python{};

// The exception that a handler raised. Only Python's main thread runs handlers, so there is one at
// most. The lock of the interpreter guards it.
struct Exception {
  void *type = nullptr, *value = nullptr, *traceback = nullptr;
};
Exception kept;

int run_python_handlers() {
  const std::int32_t state = python.ensure();
  const bool raised = python.check_signals() != 0;
  if (raised) {
    // Clears the exception, as the call must not return to Python with one.
    Exception now;
    python.fetch(&now.type, &now.value, &now.traceback);
    if (kept.type != nullptr) {
      // Nobody asked for the last one: another handler's exception came before the caller could.
      python.restore(kept.type, kept.value, kept.traceback);
      python.restore(nullptr, nullptr, nullptr);
    }
    kept = now;
  }
  python.release(state);
  return raised ? 1 : 0;
}

}  // namespace
}  // namespace switchyard::c_api

using namespace switchyard::c_api;

sy_status sy_set_interrupt_check(sy_interrupt_check check, uint64_t thread) {
  return guarded([&] { switchyard::set_interrupt_check(check, static_cast<pthread_t>(thread)); });
}

sy_status sy_watch_python_signals(const sy_python* functions, uint64_t main_thread) {
  return guarded([&] {
    const sy_python given = read_struct("sy_python", functions);
    if (given.ensure == nullptr || given.release == nullptr || given.check_signals == nullptr ||
        given.fetch == nullptr || given.restore == nullptr) {
      throw switchyard::Error(switchyard::ErrorCode::kInvalidArgument,
                              "a function of sy_python is null; pass all of them");
    }
    python = given;
    switchyard::set_interrupt_check(run_python_handlers, static_cast<pthread_t>(main_thread));
  });
}

sy_status sy_raise_in_python() {
  return guarded([&] {
    if (kept.type == nullptr) return;
    const Exception exception = kept;
    kept = {};
    python.restore(exception.type, exception.value, exception.traceback);
  });
}
