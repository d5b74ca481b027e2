#include "c_api/guard.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <new>
#include <string_view>

#include "c_api/structs.h"
#include "switchyard/error.h"

namespace switchyard::c_api {
namespace {

sy_status status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument: return SY_INVALID_ARGUMENT;
    case ErrorCode::kInvalidConfig: return SY_INVALID_CONFIG;
    case ErrorCode::kInvalidFile: return SY_INVALID_FILE;
    case ErrorCode::kMissingTensor: return SY_MISSING_TENSOR;
    case ErrorCode::kShapeMismatch: return SY_SHAPE_MISMATCH;
    case ErrorCode::kDTypeMismatch: return SY_DTYPE_MISMATCH;
    case ErrorCode::kUnsupported: return SY_UNSUPPORTED;
    case ErrorCode::kCapacityExceeded: return SY_CAPACITY_EXCEEDED;
    case ErrorCode::kSpecMismatch: return SY_SPEC_MISMATCH;
    case ErrorCode::kTimeout: return SY_TIMEOUT;
    case ErrorCode::kAborted: return SY_ABORTED;
    case ErrorCode::kSystem: return SY_SYSTEM;
  }
  return SY_INTERNAL;
}

// Its memory is there from the start, because the failure may be a lack of memory.
struct LastError {
  sy_status code = SY_OK;
  bool wait_failed = false;
  WaitFailure failure;
  std::array<char, 4096> message{};
  std::array<char, 32> phase{};
};
thread_local LastError last_error;

template <std::size_t N>
void store(std::array<char, N>& to, std::string_view text) {
  const std::size_t size = std::min(text.size(), N - 1);
  std::memcpy(to.data(), text.data(), size);
  to[size] = '\0';
}

sy_status remember(sy_status code, std::string_view message, const WaitFailure* failure) {
  last_error.code = code;
  store(last_error.message, message);
  last_error.wait_failed = failure != nullptr;
  last_error.failure = failure != nullptr ? *failure : WaitFailure{};
  store(last_error.phase, last_error.failure.phase == nullptr ? "" : last_error.failure.phase);
  return code;
}

}  // namespace

sy_status remember_current_exception() noexcept {
  try {
    throw;
  } catch (const TimeoutError& error) {
    return remember(status_of(error.code()), error.what(), &error.failure());
  } catch (const Error& error) {
    return remember(status_of(error.code()), error.what(), nullptr);
  } catch (const std::bad_alloc&) {
    return remember(SY_OUT_OF_MEMORY,
                    "the host has no memory left for this; free some, or ask for less", nullptr);
  } catch (const std::exception& error) {
    return remember(SY_INTERNAL, error.what(), nullptr);
  } catch (...) {
    return remember(SY_INTERNAL, "an exception of an unknown type; report it as a fault", nullptr);
  }
}

sy_status remember_interruption() noexcept {
  return remember(
      SY_INTERRUPTED,
      "the caller interrupted the call while it waited; the world that it waited in has "
      "ended, make a new one on every rank",
      nullptr);
}

}  // namespace switchyard::c_api

using switchyard::c_api::guarded;
using switchyard::c_api::last_error;

sy_status sy_last_error(sy_error* out) {
  // A call that asks for the error must not replace it.
  const auto kept = last_error;
  const sy_status status = guarded([&] {
    sy_error error = SY_ERROR_INIT;
    error.code = last_error.code;
    error.message = last_error.message.data();
    error.wait_failed = last_error.wait_failed ? 1 : 0;
    error.waiter_rank = last_error.failure.waiter_rank;
    error.peer_rank = last_error.failure.peer_rank;
    error.phase = last_error.phase.data();
    error.epoch = last_error.failure.epoch;
    error.slot = last_error.failure.slot;
    error.expected = last_error.failure.expected;
    error.observed = last_error.failure.observed;
    error.waited_seconds = last_error.failure.waited_seconds;
    switchyard::c_api::write_struct("sy_error", error, out);
  });
  if (status != SY_OK) last_error = kept;
  return status;
}

const char* sy_status_name(sy_status status) {
  constexpr std::array kNames = {"ok",
                                 "invalid_argument",
                                 "invalid_config",
                                 "invalid_file",
                                 "missing_tensor",
                                 "shape_mismatch",
                                 "dtype_mismatch",
                                 "unsupported",
                                 "capacity_exceeded",
                                 "spec_mismatch",
                                 "timeout",
                                 "aborted",
                                 "system",
                                 "out_of_memory",
                                 "internal",
                                 "interrupted"};
  const auto i = static_cast<std::size_t>(status);
  return status >= 0 && i < kNames.size() ? kNames[i] : "unknown";
}
