#include "network/control_channel.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace switchyard::network {

std::optional<ControlMessage> read_control_message(const std::byte* bytes, int num_ranks) {
  ControlMessage message;
  // The record's phase is an enumeration: it is looked at before it becomes one.
  std::uint8_t phase = 0;
  std::memcpy(&phase,
              bytes + offsetof(ControlMessage, record) + offsetof(protocol::FailureRecord, phase),
              sizeof phase);
  if (phase > static_cast<std::uint8_t>(protocol::Phase::kLink)) return std::nullopt;
  std::uint32_t kind = 0;
  std::memcpy(&kind, bytes + offsetof(ControlMessage, kind), sizeof kind);
  if (kind < 1 || kind > static_cast<std::uint32_t>(ControlMessage::Kind::kRecord)) {
    return std::nullopt;
  }
  std::memcpy(&message, bytes, sizeof message);
  if (message.magic != ControlMessage::kMagic) return std::nullopt;
  const auto is_rank = [&](std::int64_t rank) { return rank >= 0 && rank < num_ranks; };
  const bool names_ranks = is_rank(message.record.waiter) && is_rank(message.record.peer) &&
                           is_rank(message.record.witness);
  if (message.kind == ControlMessage::Kind::kPropose && !names_ranks) return std::nullopt;
  if (message.kind == ControlMessage::Kind::kAbort) {
    const auto failed = static_cast<std::int64_t>(message.word & (protocol::kCalledOff - 1)) - 1;
    const bool called_off = (message.word & protocol::kCalledOff) != 0;
    const bool is_interrupted = (message.word & protocol::kInterrupted) != 0;
    if (message.word >> 34 != 0 || !is_rank(failed)) return std::nullopt;
    if (!called_off && (is_interrupted || !names_ranks)) return std::nullopt;
  }
  return message;
}

ControlChannel::ControlChannel(UniqueFd socket, int num_ranks)
    : socket_(std::move(socket)), num_ranks_(num_ranks) {
  ::fcntl(fd(), F_SETFL, ::fcntl(fd(), F_GETFL) | O_NONBLOCK);
}

void ControlChannel::send(const ControlMessage& message) {
  if (!is_open()) return;
  const auto* const bytes = reinterpret_cast<const std::byte*>(&message);
  unsent_.insert(unsent_.end(), bytes, bytes + sizeof message);
  flush();
}

void ControlChannel::end_sending() {
  if (is_open()) ::shutdown(fd(), SHUT_WR);
}

void ControlChannel::flush() {
  while (is_open() && !unsent_.empty()) {
    const ssize_t sent = ::send(fd(), unsent_.data(), unsent_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (sent < 0) {
      // The other end is gone; receive() tells so, after what it said before.
      unsent_.clear();
      return;
    }
    unsent_.erase(unsent_.begin(), unsent_.begin() + sent);
  }
}

std::optional<ControlMessage> ControlChannel::receive() {
  while (is_open() && !at_end_ && !garbled_) {
    const ssize_t got =
        ::recv(fd(), incoming_.data() + received_, incoming_.size() - received_, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return std::nullopt;
    if (got <= 0) {
      at_end_ = true;
      return std::nullopt;
    }
    received_ += static_cast<std::size_t>(got);
    if (received_ < incoming_.size()) continue;
    received_ = 0;
    const std::optional<ControlMessage> message =
        read_control_message(incoming_.data(), num_ranks_);
    garbled_ = !message;
    return message;
  }
  return std::nullopt;
}

}  // namespace switchyard::network
