// The two sides of network/secret.h over a connected stream socket.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/posix.h"
#include "network/secret.h"

namespace switchyard {

// A connection between hosts is for one of these. A proof of one kind is none of the other.
enum class Purpose : std::uint32_t { kRendezvous = 1, kControl };

// The secret, and the terms on which both sides must agree beside it.
struct HandshakeTerms {
  network::Secret secret;
  Purpose purpose = Purpose::kRendezvous;
  int size = 1;
};

// The listener's side, which never blocks: anybody may have connected.
class ListenerHandshake {
 public:
  explicit ListenerHandshake(const HandshakeTerms& terms) : terms_(&terms) {}

  enum class State { kUnderWay, kProved, kRefused };
  // Reads and writes what is possible now, and no byte behind the joiner's answer. kRefused: hang
  // up.
  State advance(int socket);
  // The other side has sent a whole message that this one cannot agree to: it is no passing
  // stranger, but has another secret, version, purpose or size.
  bool disagrees() const { return disagrees_; }
  // The joiner's rank, after kProved.
  int rank() const { return opening_.rank; }

 private:
  State refuse(bool disagrees) {
    disagrees_ = disagrees;
    return state_ = State::kRefused;
  }

  const HandshakeTerms* terms_;
  State state_ = State::kUnderWay;
  bool disagrees_ = false;
  network::Opening opening_;
  network::Challenge challenge_;
  network::Answer answer_;
  std::size_t read_ = 0, written_ = 0;  // of the opening and the answer; of the challenge
};

enum class JoinResult {
  kProved,
  kNoAnswer,   // the listener hung up, or did not answer in time
  kDisagrees,  // it has another secret, or is no rank of this version
};
// The joiner's side; waits until `until`. Throws Error{kSystem}.
JoinResult join_handshake(int socket, const HandshakeTerms& terms, int rank,
                          Clock::time_point until);

}  // namespace switchyard
