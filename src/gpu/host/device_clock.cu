#include <cstdint>
#include <limits>

#include "gpu/host/cuda_error.h"
#include "gpu/host/device_clock.h"
#include "gpu/host/mapped_memory.h"
#include "gpu/ptx/clock.cuh"
#include "switchyard/error.h"
#include "trace/clock.h"

namespace switchyard::gpu {
namespace {

constexpr std::uint64_t kQuestions = 200, kPatienceNs = 1'000'000'000;

// Words in host memory that the host and the device see. The answer is a time and so never 0.
struct Mail {
  std::uint64_t question, answer;
};

__global__ void answer_questions(volatile Mail* mail) {
  for (std::uint64_t i = 1; i <= kQuestions; ++i) {
    const std::uint64_t start = device_now_ns();
    while (mail->question != i) {
      if (device_now_ns() - start > kPatienceNs) return;
    }
    mail->answer = device_now_ns();
    __threadfence_system();
  }
}

}  // namespace

std::int64_t host_minus_device_ns() {
  const MappedMemory<Mail> mail;
  answer_questions<<<1, 1>>>(mail.on_device());
  SWITCHYARD_CUDA(cudaGetLastError());
  std::int64_t shortest = std::numeric_limits<std::int64_t>::max(), difference = 0;
  bool answered = true;
  for (std::uint64_t i = 1; i <= kQuestions && answered; ++i) {
    const std::uint64_t before = mail->answer;
    const std::int64_t asked = trace::now_ns();
    mail->question = i;
    std::int64_t heard = asked;
    // (No two answers are equal: the timer advances while a word crosses the bus.)
    while (mail->answer == before && heard - asked < static_cast<std::int64_t>(kPatienceNs)) {
      heard = trace::now_ns();
    }
    answered = mail->answer != before;
    if (answered && heard - asked < shortest) {
      shortest = heard - asked;
      difference = asked + (heard - asked) / 2 - static_cast<std::int64_t>(mail->answer);
    }
  }
  SWITCHYARD_CUDA(cudaDeviceSynchronize());
  if (!answered) {
    throw Error(ErrorCode::kSystem,
                "the device did not tell its time within a second; is another kernel keeping it "
                "busy?");
  }
  return difference;
}

}  // namespace switchyard::gpu
