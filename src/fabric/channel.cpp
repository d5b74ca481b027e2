#include "fabric/channel.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

namespace switchyard {
namespace {

constexpr std::size_t kHeaderBytes = sizeof(FrameHeader);
// The part of the header that all versions of the protocol have in common.
constexpr std::size_t kVersionEnd = offsetof(FrameHeader, version) + sizeof(FrameHeader::version);
// The payload's buffer grows as data arrives, so that a false length alone cannot make us commit
// memory.
constexpr std::size_t kReceiveChunkBytes = std::size_t{1} << 20;
// The room for descriptors of one message. A stranger may attach more than the one we ask for, and
// we must take them to close them.
constexpr std::size_t kMaxFdsPerMessage = 8;

}  // namespace

void Channel::queue(Frame frame) {
  frame.header.payload_bytes = frame.payload ? frame.payload->size() : 0;
  if (!send_failed_) outbox_.push_back(std::move(frame));
}

void Channel::flush() {
  congested_ = false;
  while (!outbox_.empty()) {
    const Frame& frame = outbox_.front();
    const std::size_t payload_bytes = frame.header.payload_bytes;
    FrameHeader header = frame.header;
    iovec parts[2];
    std::size_t num_parts = 0;
    if (sent_ < kHeaderBytes) {
      parts[num_parts++] = {reinterpret_cast<std::byte*>(&header) + sent_, kHeaderBytes - sent_};
    }
    const std::size_t payload_sent = sent_ > kHeaderBytes ? sent_ - kHeaderBytes : 0;
    if (payload_sent < payload_bytes) {
      // iovec has no const form; sendmsg only reads.
      parts[num_parts++] = {const_cast<std::byte*>(frame.payload->data()) + payload_sent,
                            payload_bytes - payload_sent};
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = num_parts;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (frame.fd && sent_ == 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* const rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(sizeof(int));
      const int fd = frame.fd->get();
      std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    }
    const ssize_t sent = ::sendmsg(fd(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      if (errno == ETOOMANYREFS || errno == ENOBUFS || errno == ENOMEM) {
        congested_ = true;
        return;
      }
      send_failed_ = true;
      outbox_.clear();
      return;
    }
    sent_ += static_cast<std::size_t>(sent);
    if (sent_ == kHeaderBytes + payload_bytes) {
      outbox_.pop_front();
      sent_ = 0;
    }
  }
}

bool Channel::receive_some(std::byte* into, std::size_t bytes, std::size_t& received) {
  for (;;) {
    iovec part{into, bytes};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(kMaxFdsPerMessage * sizeof(int))];
    if (intake_.take_descriptors) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
    }
    const ssize_t got = ::recvmsg(fd(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (got <= 0) {
      at_end_ = true;
      return false;
    }
    // We ask for no more than the rest of one header or payload. This keeps a descriptor with the
    // frame that it was attached to: the kernel delivers it with the first byte of that frame.
    for (cmsghdr* item = CMSG_FIRSTHDR(&message); item != nullptr;
         item = CMSG_NXTHDR(&message, item)) {
      if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
      const std::size_t num_fds = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < num_fds; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(item) + i * sizeof(int), sizeof fd);
        in_fd_ = UniqueFd(fd);
      }
    }
    received += static_cast<std::size_t>(got);
    return true;
  }
}

void Channel::check_header() {
  if (in_header_bytes_ < kHeaderBytes) return;
  const auto kind = static_cast<std::uint32_t>(in_header_.kind);
  const bool expected = kind <= static_cast<std::uint32_t>(FrameKind::kFailure) &&
                        (intake_.kinds & Intake::bit(in_header_.kind)) != 0;
  const bool is_failure = in_header_.kind == FrameKind::kFailure;
  const std::uint64_t longest = is_failure ? kMaxFailureBytes : intake_.payload_bytes;
  skipping_ = in_header_.payload_bytes > longest;
  garbled_ = !expected || in_header_.payload_bytes > kMaxPayloadBytes ||
             (skipping_ && (is_failure || !intake_.skip_longer));
}

bool Channel::receive_payload() {
  const std::size_t left = in_header_.payload_bytes - in_payload_bytes_;
  const std::size_t kept = skipping_ ? 0 : in_payload_bytes_;
  in_payload_.resize(kept + std::min(left, kReceiveChunkBytes));
  return receive_some(in_payload_.data() + kept, in_payload_.size() - kept, in_payload_bytes_);
}

std::optional<Frame> Channel::receive() {
  while (!finished()) {
    if (in_header_bytes_ < kHeaderBytes) {
      std::byte* const header = reinterpret_cast<std::byte*>(&in_header_);
      if (!receive_some(header + in_header_bytes_, kHeaderBytes - in_header_bytes_,
                        in_header_bytes_)) {
        break;
      }
      garbled_ = in_header_bytes_ >= sizeof in_header_.magic && in_header_.magic != kFrameMagic;
      if (garbled_ || in_header_bytes_ < kVersionEnd) continue;
      if (in_header_.version != kProtocolVersion) {
        garbled_ = true;
        Frame foreign;
        foreign.header.version = in_header_.version;
        foreign.payload = std::make_shared<const Payload>();
        return foreign;
      }
      check_header();
      continue;
    }
    if (in_payload_bytes_ < in_header_.payload_bytes) {
      if (!receive_payload()) break;
      continue;
    }
    Frame frame;
    frame.header = in_header_;
    in_payload_.resize(skipping_ ? 0 : in_payload_bytes_);
    frame.payload = std::make_shared<const Payload>(std::move(in_payload_));
    if (in_fd_) frame.fd = std::make_shared<const UniqueFd>(std::move(in_fd_));
    in_header_bytes_ = 0;
    in_payload_ = {};
    in_payload_bytes_ = 0;
    return frame;
  }
  return std::nullopt;
}

pollfd Channel::interest() const {
  const short output = has_unsent() && !congested_ ? POLLOUT : 0;
  return {fd(), static_cast<short>(POLLIN | output), 0};
}

}  // namespace switchyard
