// Exceptions that reach the C interface, and what becomes of them.
#include "c_api/guard.h"

#include <gtest/gtest.h>

#include <new>
#include <stdexcept>
#include <string>

#include "switchyard/error.h"

namespace switchyard::c_api {
namespace {

sy_error after(sy_status expected, void (*body)()) {
  EXPECT_EQ(guarded(body), expected);
  sy_error error = SY_ERROR_INIT;
  EXPECT_EQ(sy_last_error(&error), SY_OK);
  EXPECT_EQ(error.code, expected);
  return error;
}

TEST(Guard, EveryExceptionBecomesAStatus) {
  after(SY_MISSING_TENSOR, [] { throw Error(ErrorCode::kMissingTensor, "no such tensor"); });
  after(SY_OUT_OF_MEMORY, [] { throw std::bad_alloc(); });
  const sy_error other = after(SY_INTERNAL, [] { throw std::logic_error("what it was"); });
  EXPECT_STREQ(other.message, "what it was");
  after(SY_INTERNAL, [] { throw 1; });
}

TEST(Guard, TimeoutsKeepWhatTheWaiterSaw) {
  const sy_error error = after(SY_ABORTED, [] {
    throw TimeoutError(ErrorCode::kAborted, "rank 2 is late",
                       {.waiter_rank = 1,
                        .peer_rank = 2,
                        .phase = "dispatch",
                        .epoch = 7,
                        .expected = 7,
                        .observed = 6,
                        .waited_seconds = 0.5});
  });
  EXPECT_EQ(error.wait_failed, 1);
  EXPECT_EQ(error.waiter_rank, 1);
  EXPECT_EQ(error.peer_rank, 2);
  EXPECT_STREQ(error.phase, "dispatch");
  EXPECT_EQ(error.epoch, 7u);
  EXPECT_EQ(error.observed, 6u);
  EXPECT_EQ(after(SY_SYSTEM, [] { throw Error(ErrorCode::kSystem, "x"); }).wait_failed, 0);
}

TEST(Guard, LongMessagesAreCut) {
  const sy_error error =
      after(SY_INTERNAL, [] { throw std::runtime_error(std::string(10'000, 'x')); });
  EXPECT_EQ(std::string(error.message).size(), 4095u);
}

TEST(Guard, EveryStatusHasAName) {
  for (sy_status status = SY_OK; status <= SY_INTERRUPTED; ++status) {
    EXPECT_STRNE(sy_status_name(status), "unknown") << status;
  }
  EXPECT_STREQ(sy_status_name(-1), "unknown");
  EXPECT_STREQ(sy_status_name(SY_INTERRUPTED + 1), "unknown");
}

}  // namespace
}  // namespace switchyard::c_api
