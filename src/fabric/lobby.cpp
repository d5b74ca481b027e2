#include "fabric/lobby.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <utility>

#include "fabric/frames.h"
#include "fabric/place.h"

namespace switchyard {

ucred credentials(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    throw_errno("cannot read the credentials of a rendezvous connection");
  }
  return peer;
}

bool Lobby::accept_one() {
  UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (socket) {
    ucred peer{};
    std::string who;
    std::optional<ListenerHandshake> handshake;
    if (terms_ == nullptr) {
      peer = credentials(socket.get());
      if (peer.uid != ::geteuid()) return true;
      who = fmt::format("process {}", peer.pid);
    } else {
      who = fmt::format("a process on {}", remote_ip(socket.get()));
      set_no_delay(socket.get());
      handshake.emplace(*terms_);
    }
    if (waiting_.size() == kMaxWaiting) make_room();
    waiting_.push_back({Channel(std::move(socket), intake_before_hello()), peer, Clock::now(),
                        std::move(who), handshake});
    return true;
  }
  if (errno == EINTR || errno == ECONNABORTED) return true;
  if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
  const int error_number = errno;
  if (error_number == EMFILE || error_number == ENFILE) {
    // accept() fails with these even if nobody waits to be accepted.
    pollfd listener{listener_.get(), POLLIN, 0};
    if (::poll(&listener, 1, 0) == 0) return false;
    if (!waiting_.empty()) {
      make_room();
      return true;
    }
  }
  errno = error_number;
  throw_errno("cannot accept the connection of another rank");
}

// Drops the oldest connection among those of the processes, or of the hosts, that have the most. A
// rank has only one.
void Lobby::make_room() {
  std::map<std::string, std::size_t> counts;
  std::size_t most = 0;
  for (const Waiting& w : waiting_) most = std::max(most, ++counts[w.who]);
  waiting_.erase(std::find_if(waiting_.begin(), waiting_.end(),
                              [&](const Waiting& w) { return counts[w.who] == most; }));
}

bool Lobby::prove(Waiting& waiting) {
  if (!waiting.handshake) return true;
  if (waiting.handshake->advance(waiting.channel.fd()) != ListenerHandshake::State::kRefused) {
    return true;
  }
  if (waiting.handshake->disagrees()) {
    ++num_refused_;
    last_refused_ = waiting.who;
  }
  return false;
}

std::string Lobby::refusals() const {
  if (num_refused_ == 0) return "";
  return fmt::format(
      "; {} connection(s) were refused, the last of {}: its secret, its size of the "
      "world or its version of Switchyard is another",
      num_refused_, last_refused_);
}

std::vector<Lobby::Arrival> Lobby::take_turn() {
  for (int i = 0; i < kAcceptsPerTurn && accept_one(); ++i) {
  }
  std::vector<Arrival> arrivals;
  std::vector<Waiting> still_waiting;
  const Clock::time_point now = Clock::now();
  for (Waiting& w : waiting_) {
    if (!prove(w)) continue;
    const bool may_speak =
        !w.handshake || w.handshake->advance(w.channel.fd()) == ListenerHandshake::State::kProved;
    std::optional<Frame> hello;
    if (may_speak) hello = w.channel.receive();
    if (hello) {
      std::optional<int> proved_rank;
      if (w.handshake) proved_rank = w.handshake->rank();
      arrivals.push_back(
          {std::move(w.channel), w.peer, std::move(*hello), std::move(w.who), proved_rank});
    } else if (!w.channel.finished() && now - w.since < kHelloTime) {
      still_waiting.push_back(std::move(w));
    }
  }
  waiting_ = std::move(still_waiting);
  return arrivals;
}

void Lobby::add_interest(std::vector<pollfd>& fds) const {
  fds.push_back({listener_.get(), POLLIN, 0});
  for (const Waiting& w : waiting_) fds.push_back(w.channel.interest());
}

Clock::time_point Lobby::next_turn() const {
  return waiting_.empty() ? Clock::time_point::max() : waiting_.front().since + kHelloTime;
}

}  // namespace switchyard
