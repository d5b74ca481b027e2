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
inline constexpr std::uint32_t kProtocolVersion = 4;
// The longest payload. No start-up exchange needs so much; a longer claim is garbage.
inline constexpr std::uint64_t kMaxPayloadBytes = std::uint64_t{1} << 30;
// The longest payload of a failure report, text included.
inline constexpr std::uint64_t kMaxFailureBytes = std::uint64_t{16} << 10;

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
  std::uint64_t world = 0;       // the sender's world; 0 until rank 0 has told it
  std::int64_t deadline_ns = 0;  // when the sender stops waiting, on Clock; 0 if it does not wait
  std::uint64_t payload_bytes = 0;
  std::int32_t rank = 0;  // the rank that the message, or the part in it, comes from
  CallKind call = CallKind::kAllGather;
};
static_assert(sizeof(FrameHeader) == 48, "no padding: every byte of it is sent");

using Payload = std::vector<std::byte>;

// Payload and descriptor are shared because the root sends one part to every member.
struct Frame {
  // True if the payload is here. A payload that is longer than expected is not kept; the header
  // tells its length.
  bool has_payload() const { return payload && payload->size() == header.payload_bytes; }

  FrameHeader header;
  std::shared_ptr<const Payload> payload;
  std::shared_ptr<const UniqueFd> fd;
};

// The frames that a channel accepts from its peer at this point of the conversation. A frame of
// another kind garbles the channel as soon as its header has arrived, so nobody can send what is
// not expected.
struct Intake {
  std::uint32_t kinds = 0;          // a bit per FrameKind
  std::uint64_t payload_bytes = 0;  // the longest payload, except of a failure report
  bool skip_longer = false;  // a longer one is read and dropped; otherwise it garbles the channel
  bool take_descriptors = false;  // otherwise the kernel closes attached descriptors

  static constexpr std::uint32_t bit(FrameKind kind) {
    return std::uint32_t{1} << static_cast<std::uint32_t>(kind);
  }
  template <typename... Kinds>
  static constexpr std::uint32_t of(Kinds... kinds) {
    return (bit(kinds) | ...);
  }
};

class Channel {
 public:
  Channel() = default;  // closed
  Channel(UniqueFd socket, const Intake& intake) : socket_(std::move(socket)), intake_(intake) {}

  int fd() const { return socket_.get(); }

  // Sets the intake for all frames whose headers have not been received yet.
  void set_intake(const Intake& intake) { intake_ = intake; }

  // Appends to what flush() sends. Frames for a peer that no longer reads are dropped.
  void queue(Frame frame);
  // Sends what the socket takes now.
  void flush();
  bool has_unsent() const { return !outbox_.empty(); }
  // True if the peer no longer reads. It may have said why, so call receive() first.
  bool send_failed() const { return send_failed_; }
  // True if the kernel holds too many descriptors in flight; poll() does not tell when that ends.
  bool congested() const { return congested_; }

  // Returns the next whole frame if there is one. If the peer speaks another version of the
  // protocol, it returns one frame of which only the version is known, and receives nothing more.
  std::optional<Frame> receive();
  // True if the peer closed its end and everything it sent has been received.
  bool at_end() const { return at_end_; }
  // True if the peer does not speak this protocol, or sent a frame that it may not send now.
  // Nothing more is received.
  bool garbled() const { return garbled_; }
  bool finished() const { return at_end_ || garbled_; }

  pollfd interest() const;

 private:
  bool receive_some(std::byte* into, std::size_t bytes, std::size_t& received);
  bool receive_payload();
  // Checks a header of which at least the version has arrived.
  void check_header();

  UniqueFd socket_;
  Intake intake_;
  std::deque<Frame> outbox_;
  std::size_t sent_ = 0;  // bytes of outbox_.front(), header included
  bool send_failed_ = false;
  bool congested_ = false;

  FrameHeader in_header_;
  std::size_t in_header_bytes_ = 0;
  Payload in_payload_;
  std::size_t in_payload_bytes_ = 0;  // received, and kept unless skipping_
  bool skipping_ = false;
  UniqueFd in_fd_;
  bool at_end_ = false;
  bool garbled_ = false;
};

}  // namespace switchyard
