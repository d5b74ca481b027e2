// Short messages between the proxies of two ranks of different hosts, over a connected stream
// socket. They need no credit, and the socket's end tells at once that the other process ended.
#pragma once

#include <poll.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/unique_fd.h"
#include "protocol/control.h"

namespace switchyard::network {

struct ControlMessage {
  enum class Kind : std::uint32_t {
    kAlive = 1,  // the proxy runs; nothing else has changed
    kBeat,       // the words that its rank shows others in the heap of `segment`
    kAbort,      // the heap of `segment` is given up; `word` is its abort word
    kGoodbye,    // the rank let go of its World, and needs nothing more
    kPropose,    // the heap of `segment` should be given up because of `record`: decide
    kDecline,    // to the proposer: the rank does not have that heap any more
    kRecord,     // the rank's `word` in the record of the world
  };
  std::uint32_t magic = kMagic;
  Kind kind = Kind::kAlive;
  std::uint32_t segment = 0;
  std::uint32_t reserved = 0;
  std::uint64_t word = 0;            // kBeat: waits_for; kAbort: abort; kRecord
  std::uint64_t progress = 0;        // kBeat
  protocol::FailureRecord record{};  // kAbort: of the rank that `word` names; kPropose

  static constexpr std::uint32_t kMagic = 0x6c74'6373;  // "sctl", little-endian
};
static_assert(sizeof(ControlMessage) == 32 + sizeof(protocol::FailureRecord));

// A message as it came, if it makes sense in a world of `num_ranks` ranks.
std::optional<ControlMessage> read_control_message(const std::byte* bytes, int num_ranks);

class ControlChannel {
 public:
  ControlChannel() = default;  // closed
  // `socket` becomes non-blocking.
  ControlChannel(UniqueFd socket, int num_ranks);

  bool is_open() const { return static_cast<bool>(socket_); }
  int fd() const { return socket_.get(); }
  void close() { socket_.reset(); }
  // Tells the other end that nothing more comes.
  void end_sending();

  // Sends now or later; messages that only say what the next one says again are left out while
  // earlier ones have not gone.
  void send(const ControlMessage& message);
  void send_if_idle(const ControlMessage& message) {
    if (unsent_.empty()) send(message);
  }
  void flush();
  bool has_unsent() const { return !unsent_.empty(); }

  // The next message, if there is one.
  std::optional<ControlMessage> receive();
  // The other end is closed, and all that it sent was received.
  bool at_end() const { return at_end_; }
  bool garbled() const { return garbled_; }

 private:
  UniqueFd socket_;
  int num_ranks_ = 0;
  std::vector<std::byte> unsent_;
  std::array<std::byte, sizeof(ControlMessage)> incoming_{};
  std::size_t received_ = 0;
  bool at_end_ = false, garbled_ = false;
};

}  // namespace switchyard::network
