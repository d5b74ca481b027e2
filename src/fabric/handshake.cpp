#include "fabric/handshake.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <vector>

#include "base/interrupt.h"
#include "fabric/channel.h"

namespace switchyard {
namespace {

enum class Progress { kDone, kLater, kEnded };

// Moves bytes [done, bytes) of `data`, as far as the socket goes now.
template <typename Move>
Progress move_bytes(std::byte* data, std::size_t bytes, std::size_t& done, const Move& move) {
  while (done < bytes) {
    const ssize_t moved = move(data + done, bytes - done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Progress::kLater;
    if (moved <= 0) return Progress::kEnded;
    done += static_cast<std::size_t>(moved);
  }
  return Progress::kDone;
}

template <typename T>
Progress read_into(int socket, T& value, std::size_t& done) {
  return move_bytes(
      reinterpret_cast<std::byte*>(&value), sizeof value, done,
      [&](std::byte* to, std::size_t bytes) { return ::recv(socket, to, bytes, MSG_DONTWAIT); });
}
template <typename T>
Progress write_from(int socket, T& value, std::size_t& done) {
  return move_bytes(reinterpret_cast<std::byte*>(&value), sizeof value, done,
                    [&](std::byte* from, std::size_t bytes) {
                      return ::send(socket, from, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
                    });
}

}  // namespace

ListenerHandshake::State ListenerHandshake::advance(int socket) {
  if (state_ != State::kUnderWay) return state_;
  if (read_ < sizeof opening_) {
    const Progress read = read_into(socket, opening_, read_);
    // A stranger's first bytes already differ.
    if (read_ >= sizeof opening_.magic && opening_.magic != network::Opening::kMagic) {
      return refuse(false);
    }
    if (read == Progress::kEnded) return refuse(false);
    if (read == Progress::kLater) return state_;
    if (!network::is_opening(opening_, kProtocolVersion) ||
        opening_.purpose != static_cast<std::uint32_t>(terms_->purpose) ||
        opening_.size != terms_->size || opening_.rank < 0 || opening_.rank >= terms_->size) {
      return refuse(true);
    }
    challenge_.nonce = network::random_nonce();
    challenge_.proof =
        network::prove(terms_->secret, network::Side::kListener, opening_, challenge_.nonce);
  }
  if (written_ < sizeof challenge_) {
    const Progress written = write_from(socket, challenge_, written_);
    if (written == Progress::kEnded) return refuse(false);
    if (written == Progress::kLater) return state_;
  }
  std::size_t answered = read_ - sizeof opening_;
  const Progress read = read_into(socket, answer_, answered);
  read_ = sizeof opening_ + answered;
  // A joiner with another secret sees that at the challenge, and hangs up.
  if (read == Progress::kEnded) return refuse(true);
  if (read == Progress::kLater) return state_;
  const network::Digest expected =
      network::prove(terms_->secret, network::Side::kJoiner, opening_, challenge_.nonce);
  if (!network::equal(answer_.proof, expected)) return refuse(true);
  return state_ = State::kProved;
}

JoinResult join_handshake(int socket, const HandshakeTerms& terms, int rank,
                          Clock::time_point until) {
  network::Opening opening;
  opening.version = kProtocolVersion;
  opening.purpose = static_cast<std::uint32_t>(terms.purpose);
  opening.rank = rank;
  opening.size = terms.size;
  opening.nonce = network::random_nonce();
  const auto complete = [&](short event, const auto& step) {
    for (;;) {
      const Progress progress = step();
      if (progress != Progress::kLater) return progress == Progress::kDone;
      if (Clock::now() >= until || interrupted()) return false;
      std::vector<pollfd> fds{{socket, event, 0}};
      wait_ready(fds, until);
    }
  };
  std::size_t done = 0;
  if (!complete(POLLOUT, [&] { return write_from(socket, opening, done); })) {
    return JoinResult::kNoAnswer;
  }
  network::Challenge challenge;
  done = 0;
  if (!complete(POLLIN, [&] { return read_into(socket, challenge, done); })) {
    return JoinResult::kNoAnswer;
  }
  if (!network::equal(challenge.proof, network::prove(terms.secret, network::Side::kListener,
                                                      opening, challenge.nonce))) {
    return JoinResult::kDisagrees;
  }
  network::Answer answer{
      network::prove(terms.secret, network::Side::kJoiner, opening, challenge.nonce)};
  done = 0;
  return complete(POLLOUT, [&] { return write_from(socket, answer, done); })
             ? JoinResult::kProved
             : JoinResult::kNoAnswer;
}

}  // namespace switchyard
