// Interruptible calls: their check is asked every so often, on the thread that made the call.
#include "base/interrupt.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

#include "base/posix.h"

namespace switchyard {
namespace {

int questions = 0;
bool answer = false;
void (*during_question)() = nullptr;

int check() {
  ++questions;
  if (during_question != nullptr) during_question();
  return answer ? 1 : 0;
}

class Interrupt : public ::testing::Test {
 protected:
  void SetUp() override {
    questions = 0;
    answer = false;
    during_question = nullptr;
    set_interrupt_check(check, ::pthread_self());
  }
  void TearDown() override { set_interrupt_check(nullptr, ::pthread_self()); }
};

// Looks every millisecond for so long.
bool wait_for(std::chrono::milliseconds time) {
  for (const auto until = Clock::now() + time; Clock::now() < until;) {
    if (interrupted()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

TEST_F(Interrupt, NobodyIsAskedOutsideOfCalls) {
  EXPECT_FALSE(asks_for_interrupts());
  EXPECT_FALSE(wait_for(3 * kInterruptInterval));
  EXPECT_EQ(questions, 0);
}

TEST_F(Interrupt, AShortWaitAsksNobody) {
  const InterruptibleCall call;
  EXPECT_TRUE(asks_for_interrupts());
  EXPECT_FALSE(wait_for(kInterruptInterval / 4));
  EXPECT_EQ(questions, 0);
}

TEST_F(Interrupt, ALongWaitAsksNowAndThen) {
  const InterruptibleCall call;
  EXPECT_FALSE(wait_for(4 * kInterruptInterval));
  EXPECT_GE(questions, 1);
  EXPECT_LE(questions, 4);
}

TEST_F(Interrupt, TheAnswerHoldsUntilTheCallEnds) {
  answer = true;
  {
    const InterruptibleCall call;
    EXPECT_FALSE(was_interrupted());
    EXPECT_TRUE(wait_for(std::chrono::seconds(10)));
    EXPECT_TRUE(was_interrupted());
    EXPECT_TRUE(interrupted());
    EXPECT_EQ(questions, 1);
  }
  EXPECT_FALSE(was_interrupted());
  const InterruptibleCall next;
  EXPECT_FALSE(was_interrupted());
}

TEST_F(Interrupt, OtherThreadsAskNobody) {
  std::thread([] {
    const InterruptibleCall call;
    EXPECT_FALSE(asks_for_interrupts());
    EXPECT_FALSE(wait_for(3 * kInterruptInterval));
  }).join();
  EXPECT_EQ(questions, 0);
}

// A handler of a signal may call the library. Its calls are not interrupted, and its end is not the
// end of the call that asked.
TEST_F(Interrupt, CallsOfTheCheckAskNobody) {
  during_question = [] {
    EXPECT_TRUE(asks_caller_now());
    answer = true;
    const InterruptibleCall inner;
    EXPECT_FALSE(asks_for_interrupts());
    EXPECT_FALSE(wait_for(2 * kInterruptInterval));
    EXPECT_FALSE(was_interrupted());
    answer = false;
  };
  const InterruptibleCall call;
  EXPECT_FALSE(wait_for(2 * kInterruptInterval));
  EXPECT_GE(questions, 1);
  EXPECT_FALSE(asks_caller_now());
  EXPECT_TRUE(asks_for_interrupts());
}

TEST_F(Interrupt, SleepsWakeUpToAsk) {
  const auto slept = [] {
    const auto start = Clock::now();
    std::vector<pollfd> nothing;
    wait_ready(nothing, start + 4 * kInterruptInterval);
    return Clock::now() - start;
  };
  EXPECT_GE(slept(), 4 * kInterruptInterval);
  const InterruptibleCall call;
  EXPECT_LT(slept(), 4 * kInterruptInterval);
}

}  // namespace
}  // namespace switchyard
