#include "base/origin.h"

#include <fmt/core.h>
#include <pthread.h>

#include "switchyard/error.h"

namespace switchyard {

std::atomic<std::uint64_t> process_generation{0};
std::atomic<bool> process_is_ending{false};

namespace {
[[maybe_unused]] const int registered = pthread_atfork(
    nullptr, nullptr, [] { process_generation.fetch_add(1, std::memory_order_relaxed); });
}  // namespace

void refuse_moved(const char* what) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} was moved out of this variable; use the one that has it now", what));
}

void Origin::refuse_inherited(const char* what) {
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{} was made in another process, before fork(); make it anew after fork", what));
}

}  // namespace switchyard
