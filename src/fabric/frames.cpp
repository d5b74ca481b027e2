#include "fabric/frames.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "fabric/fabric.h"
#include "fabric/hash.h"

namespace switchyard {
namespace {

// The last value of ErrorCode.
constexpr auto kLastErrorCode = static_cast<std::int32_t>(ErrorCode::kSystem);

}  // namespace

std::uint64_t hash_of_job(std::string_view job) {
  return job.empty() ? 0 : fnv1a(kFnvBasis, job) | 1;
}

SharedPayload payload_of(const void* bytes, std::size_t num_bytes) {
  const std::byte* const begin = static_cast<const std::byte*>(bytes);
  return std::make_shared<const Payload>(begin, begin + num_bytes);
}

SharedPayload payload_of(const HelloBody& hello) { return payload_of(&hello, sizeof hello); }

FailureBody FailureBody::of(ErrorCode code, const WaitFailure& failure) {
  FailureBody body;
  body.code = static_cast<std::int32_t>(code);
  body.waiter_rank = failure.waiter_rank;
  body.peer_rank = failure.peer_rank;
  body.aborted = std::string_view(failure.phase) == kAbortPhase ? 1 : 0;
  body.slot = failure.slot;
  body.expected = failure.expected;
  body.observed = failure.observed;
  body.waited_seconds = failure.waited_seconds;
  return body;
}

WaitFailure FailureBody::failure() const {
  WaitFailure failure;
  failure.phase = aborted == 1 ? kAbortPhase : "bootstrap";
  failure.waiter_rank = waiter_rank;
  failure.peer_rank = peer_rank;
  failure.slot = slot;
  failure.expected = expected;
  failure.observed = observed;
  failure.waited_seconds = std::isfinite(waited_seconds) ? waited_seconds : 0;
  return failure;
}

SharedPayload failure_payload(ErrorCode code, std::string_view message,
                              const WaitFailure& failure) {
  const FailureBody body = FailureBody::of(code, failure);
  message = message.substr(0, kMaxFailureBytes - sizeof body);
  Payload payload(sizeof body + message.size());
  std::memcpy(payload.data(), &body, sizeof body);
  std::copy_n(reinterpret_cast<const std::byte*>(message.data()), message.size(),
              payload.begin() + sizeof body);
  return std::make_shared<const Payload>(std::move(payload));
}

SharedPayload welcome_payload(std::span<const pid_t> pids) {
  const std::vector<std::int64_t> numbers(pids.begin(), pids.end());
  return payload_of(numbers.data(), numbers.size() * sizeof numbers.front());
}

std::optional<std::vector<pid_t>> read_welcome(const Frame& frame, int size) {
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(size));
  const std::size_t bytes = numbers.size() * sizeof numbers.front();
  if (frame.header.kind != FrameKind::kWelcome || frame.payload->size() != bytes) {
    return std::nullopt;
  }
  std::memcpy(numbers.data(), frame.payload->data(), bytes);
  std::vector<pid_t> pids;
  for (const std::int64_t number : numbers) {
    const bool is_pid = number > 0 && number <= std::numeric_limits<pid_t>::max();
    pids.push_back(is_pid ? static_cast<pid_t>(number) : 0);
  }
  return pids;
}

ReceivedFailure read_failure(const Frame& frame) {
  FailureBody body;
  ReceivedFailure received;
  received.failure.phase = "bootstrap";
  const Payload& payload = *frame.payload;
  if (payload.size() >= sizeof body) std::memcpy(&body, payload.data(), sizeof body);
  if (payload.size() < sizeof body || body.code < 0 || body.code > kLastErrorCode) {
    received.message = fmt::format(
        "rank {} failed, but its report of {} bytes makes no sense; are all ranks of the same "
        "build?",
        frame.header.rank, payload.size());
    return received;
  }
  received.code = static_cast<ErrorCode>(body.code);
  received.message.assign(reinterpret_cast<const char*>(payload.data()) + sizeof body,
                          payload.size() - sizeof body);
  received.failure = body.failure();
  return received;
}

std::int64_t to_wire(Clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}

Clock::time_point from_wire(std::int64_t nanoseconds) {
  // This limit keeps the difference between any two times from overflowing.
  constexpr std::int64_t kLatest = std::numeric_limits<std::int64_t>::max() / 2;
  return Clock::time_point(
      std::chrono::nanoseconds(std::clamp<std::int64_t>(nanoseconds, 0, kLatest)));
}

Intake intake_before_hello() {
  return {.kinds = Intake::of(FrameKind::kHello), .payload_bytes = sizeof(HelloBody)};
}

Intake intake_from_waiting_member() { return {.kinds = Intake::of(FrameKind::kFailure)}; }

Intake intake_before_welcome(int size) {
  return {.kinds = Intake::of(FrameKind::kWelcome, FrameKind::kEntered, FrameKind::kFailure),
          .payload_bytes = static_cast<std::size_t>(size) * sizeof(std::int64_t)};
}

// The ranks' calls may differ, which is an error that leaves the world usable. So a longer payload
// is read, but not kept.
Intake intake_of_contributions(const Call& call) {
  return {.kinds = Intake::of(FrameKind::kContribution, FrameKind::kFailure),
          .payload_bytes = call.bytes,
          .skip_longer = true,
          .take_descriptors = call.kind == CallKind::kExchangeFds};
}

Intake intake_of_parts(const Call& call) {
  return {.kinds = Intake::of(FrameKind::kPart, FrameKind::kEntered, FrameKind::kFailure),
          .payload_bytes = call.bytes,
          .skip_longer = true,
          .take_descriptors = call.kind == CallKind::kExchangeFds};
}

Admission judge(const Frame& hello, std::uint64_t job, const std::vector<bool>& taken,
                HelloBody& body) {
  if (hello.header.version != kProtocolVersion) return Admission::kOtherVersion;
  if (hello.header.kind != FrameKind::kHello || hello.payload->size() != sizeof body) {
    return Admission::kNotAHello;
  }
  std::memcpy(&body, hello.payload->data(), sizeof body);
  if (body.job != 0 && job != 0 && body.job != job) return Admission::kOtherJob;
  if (body.size != static_cast<int>(taken.size())) return Admission::kOtherSize;
  if (body.rank < 0 || body.rank >= body.size) return Admission::kNotAHello;
  return taken[static_cast<std::size_t>(body.rank)] ? Admission::kTaken : Admission::kAdmitted;
}

}  // namespace switchyard
