// Any bytes from a rendezvous connection are frames that were expected there, or end it. The first
// byte chooses who listens to whom at which point, the second in how large pieces the rest arrives;
// the pieces must make no difference.
//   fuzz_frames fuzz/corpus/frames -max_len=4096

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "fabric/frames.h"

namespace {

using namespace switchyard;
using Bytes = std::span<const std::uint8_t>;

constexpr int kSize = 4;

void require(bool condition) {
  if (!condition) std::abort();
}

struct Heard {
  std::vector<Frame> frames;
  bool garbled = false;
};

Heard listen_to(Bytes stream, std::size_t piece, const Intake& intake) {
  int ends[2];
  require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  UniqueFd peer(ends[0]);
  Channel channel(UniqueFd(ends[1]), intake);
  Heard heard;
  const auto receive_all = [&] {
    while (std::optional<Frame> frame = channel.receive()) heard.frames.push_back(*frame);
  };
  // Bytes that nobody reads any more would fill the socket.
  while (!stream.empty() && !channel.finished()) {
    const Bytes now = stream.first(std::min(piece, stream.size()));
    require(::send(peer.get(), now.data(), now.size(), MSG_NOSIGNAL) ==
            static_cast<ssize_t>(now.size()));
    stream = stream.subspan(now.size());
    receive_all();
  }
  peer.reset();
  receive_all();
  require(channel.finished());
  heard.garbled = channel.garbled();
  return heard;
}

void check_same(const Heard& a, const Heard& b) {
  require(a.garbled == b.garbled && a.frames.size() == b.frames.size());
  for (std::size_t i = 0; i < a.frames.size(); ++i) {
    require(std::memcmp(&a.frames[i].header, &b.frames[i].header, sizeof(FrameHeader)) == 0);
    require(*a.frames[i].payload == *b.frames[i].payload);
  }
}

// A peer that is admitted claims a place of this world that is free.
void check_hello(const Frame& frame) {
  for (const bool second_taken : {false, true}) {
    const std::vector<bool> taken = {true, second_taken, false, false};
    for (const std::uint64_t job : {std::uint64_t{0}, hash_of_job("job")}) {
      HelloBody body;
      const Admission verdict = judge(frame, job, taken, body);
      if (verdict != Admission::kAdmitted && verdict != Admission::kTaken) continue;
      require(body.size == kSize && body.rank >= 0 && body.rank < kSize);
      require(taken[static_cast<std::size_t>(body.rank)] == (verdict == Admission::kTaken));
      require(job == 0 || body.job == 0 || body.job == job);
    }
  }
}

void check_failure(const Frame& frame) {
  const ReceivedFailure failure = read_failure(frame);
  require(std::string_view(to_string(failure.code)) != "unknown");
  Frame again = frame;
  again.payload = failure_payload(failure.code, failure.message, failure.failure);
  const ReceivedFailure reread = read_failure(again);
  require(reread.code == failure.code && reread.message == failure.message &&
          reread.failure.peer_rank == failure.failure.peer_rank);
}

void check_frame(const Frame& frame, const Intake& intake, bool last) {
  const FrameHeader& header = frame.header;
  if (header.version != kProtocolVersion) {
    require(last && frame.payload->empty());
    HelloBody body;
    require(judge(frame, 0, std::vector<bool>(kSize), body) == Admission::kOtherVersion);
    return;
  }
  require(header.magic == kFrameMagic && (intake.kinds & Intake::bit(header.kind)) != 0);
  const bool is_failure = header.kind == FrameKind::kFailure;
  require(frame.payload->size() <= (is_failure ? kMaxFailureBytes : intake.payload_bytes));
  require(frame.has_payload() || (intake.skip_longer && !is_failure && frame.payload->empty()));
  require(from_wire(header.deadline_ns) - Clock::now() > -std::chrono::hours(24 * 365 * 100));

  check_hello(frame);
  if (is_failure) check_failure(frame);
  if (const auto pids = read_welcome(frame, kSize)) {
    require(header.kind == FrameKind::kWelcome && pids->size() == kSize);
    for (const pid_t pid : *pids) require(pid >= 0);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const Intake intakes[] = {intake_before_hello(), intake_from_waiting_member(),
                            intake_before_welcome(kSize),
                            intake_of_contributions({CallKind::kAllGather, 16}),
                            intake_of_parts({CallKind::kExchangeFds, 0})};
  const Intake& intake = intakes[data[0] % std::size(intakes)];
  const std::size_t piece = 1 + data[1] % 64;
  const Bytes stream(data + 2, size - 2);

  const Heard whole = listen_to(stream, std::max<std::size_t>(stream.size(), 1), intake);
  check_same(whole, listen_to(stream, piece, intake));
  std::size_t bytes = 0;
  for (const Frame& frame : whole.frames) {
    const bool last = &frame == &whole.frames.back();
    check_frame(frame, intake, last && whole.garbled);
    const bool other_version = frame.header.version != kProtocolVersion;
    bytes += other_version ? sizeof frame.header.magic + sizeof frame.header.version
                           : sizeof frame.header + frame.header.payload_bytes;
  }
  require(bytes <= stream.size());
  return 0;
}
