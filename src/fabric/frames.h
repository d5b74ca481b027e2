// The contents of the rendezvous frames: payloads, which sender may send which kind when, and whom
// rank 0 admits. All of this reads what another process wrote, so nothing is taken for granted.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/posix.h"
#include "fabric/channel.h"
#include "fabric/collective.h"
#include "switchyard/error.h"

namespace switchyard {

// The payload of kHello.
struct HelloBody {
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::int64_t pid = 0;
  std::uint64_t job = 0;  // hash_of_job()
};
static_assert(sizeof(HelloBody) == 24, "no padding: every byte of it is sent");

// A hash of launched_job(). It is 0 only for an empty string, which means that the job is not
// known.
std::uint64_t hash_of_job(std::string_view job);

// A failure as it is sent. In a failure report's payload the message's text follows it.
struct FailureBody {
  std::int32_t code = 0;
  std::int32_t waiter_rank = 0;
  std::int32_t peer_rank = 0;
  std::int32_t aborted = 0;  // 1: the phase is "abort", else "bootstrap"
  std::uint64_t slot = 0;
  std::uint64_t expected = 0;
  std::uint64_t observed = 0;
  double waited_seconds = 0;

  static FailureBody of(ErrorCode code, const WaitFailure& failure);
  WaitFailure failure() const;
};
static_assert(sizeof(FailureBody) == 48, "no padding: every byte of it is sent");

struct ReceivedFailure {
  ErrorCode code = ErrorCode::kAborted;
  std::string message;
  WaitFailure failure;
};

using SharedPayload = std::shared_ptr<const Payload>;
SharedPayload payload_of(const void* bytes, std::size_t num_bytes);
SharedPayload payload_of(const HelloBody& hello);
// The payload of a failure report. A message that is too long is cut.
SharedPayload failure_payload(ErrorCode code, std::string_view message, const WaitFailure& failure);
// The payload of kWelcome: every rank's process id, 0 where it is not known.
SharedPayload welcome_payload(std::span<const pid_t> pids);

std::optional<std::vector<pid_t>> read_welcome(const Frame& frame, int size);
// Reads a failure report. One that cannot be read becomes an abort that says so.
ReceivedFailure read_failure(const Frame& frame);

std::int64_t to_wire(Clock::time_point time);
Clock::time_point from_wire(std::int64_t nanoseconds);

// The frames that rank 0 accepts from a connection that has not said who it is.
Intake intake_before_hello();
// The frames that rank 0 accepts from a member while others are missing: only why it gave up.
Intake intake_from_waiting_member();
// The frames that a member accepts from rank 0 until the world is complete.
Intake intake_before_welcome(int size);
// The frames that rank 0 accepts from a member, and a member from rank 0, in a collective.
Intake intake_of_contributions(const Call& call);
Intake intake_of_parts(const Call& call);

enum class Admission {
  kAdmitted,
  kNotAHello,     // not a rank: hang up
  kOtherVersion,  // another version of the protocol
  kOtherJob,      // another world has the same rendezvous string
  kOtherSize,     // another number of ranks
  kTaken,         // the rank has already arrived
};
// Decides if rank 0 of `taken.size()` ranks lets in the sender of `hello`. From kOtherJob on,
// `body` receives the contents of `hello`.
Admission judge(const Frame& hello, std::uint64_t job, const std::vector<bool>& taken,
                HelloBody& body);

}  // namespace switchyard
