// Framed messages, each with at most one file descriptor, over a connected Unix stream socket.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "base/posix.h"
#include "fabric/collective.h"

namespace switchyard {

inline constexpr std::uint64_t kFrameMagic = 0x6179'6863'7469'7773;  // "switchya", little-endian
inline constexpr std::uint32_t kProtocolVersion = 1;
// More than any start-up exchange needs; a longer claim is garbage.
inline constexpr std::uint64_t kMaxPayloadBytes = std::uint64_t{1} << 30;

enum class FrameKind : std::uint32_t {
  kHello,         // member to root: who I am
  kWelcome,       // root to member: all have arrived; the process ids
  kEntered,       // root to member: rank 0 is in this collective and will give a verdict
  kContribution,  // member to root: my part of a collective
  kPart,          // root to member: rank `rank`'s part of the collective
  kFailure,       // either way: why there will be no result
};

// Both ends run on one host, so the bytes travel as they lie in memory. Magic and version come
// first in every version of the protocol.
struct FrameHeader {
  std::uint64_t magic = kFrameMagic;
  std::uint32_t version = kProtocolVersion;
  FrameKind kind = FrameKind::kHello;
  std::int64_t deadline_ns = 0;  // until when the sender waits, on Clock; 0 where it does not
  std::uint64_t payload_bytes = 0;
  std::int32_t rank = 0;  // whose message this is; of a part, whose contribution
  CallKind call = CallKind::kAllGather;
};
static_assert(sizeof(FrameHeader) == 40, "no padding: every byte of it is sent");

using Payload = std::vector<std::byte>;

// Payload and descriptor are shared because the root sends one part to every member.
struct Frame {
  FrameHeader header;
  std::shared_ptr<const Payload> payload;
  std::shared_ptr<const UniqueFd> fd;
};

class Channel {
 public:
  Channel() = default;  // closed
  explicit Channel(UniqueFd socket) : socket_(std::move(socket)) {}

  int fd() const { return socket_.get(); }

  // Appends to what flush() sends. Frames for a peer that no longer reads are dropped.
  void queue(Frame frame);
  // Sends what the socket takes now.
  void flush();
  bool has_unsent() const { return !outbox_.empty(); }
  // The peer does not read any more; it may have said why, so receive() first.
  bool send_failed() const { return send_failed_; }
  // The kernel holds too many descriptors in flight; poll() does not tell when that ends.
  bool congested() const { return congested_; }

  // The next whole frame if there is one.
  std::optional<Frame> receive();
  // The peer closed its end, and everything it sent has been received.
  bool at_end() const { return at_end_; }
  // The peer does not speak this protocol. Nothing more is received.
  bool garbled() const { return garbled_; }
  bool finished() const { return at_end_ || garbled_; }

  pollfd interest() const;

 private:
  bool receive_some(std::byte* into, std::size_t bytes, std::size_t& received);

  UniqueFd socket_;
  std::deque<Frame> outbox_;
  std::size_t sent_ = 0;  // bytes of outbox_.front(), header included
  bool send_failed_ = false;
  bool congested_ = false;

  FrameHeader in_header_;
  std::size_t in_header_bytes_ = 0;
  Payload in_payload_;
  std::size_t in_payload_bytes_ = 0;
  UniqueFd in_fd_;
  bool at_end_ = false;
  bool garbled_ = false;
};

}  // namespace switchyard
