// The connections to rank 0 that have not said who they are, and the rules that keep them from
// standing in the way of those that do.
//
// Any process of this host can connect to an abstract socket. Connections of other users are closed
// as they are accepted. Those of this user may say hello, and nothing else, within a short time.
// Where ranks come from several hosts, anybody can connect, and must first prove that it knows the
// secret (handshake.h).
// There is room for a bounded number of them. If it is full, the process that has the most loses
// one first.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/posix.h"
#include "fabric/channel.h"
#include "fabric/handshake.h"

namespace switchyard {

// The process at the other end, as the kernel knows it. Throws Error{kSystem}.
ucred credentials(int socket);

class Lobby {
 public:
  // A connection that has said hello, or speaks another version of the protocol.
  struct Arrival {
    Channel channel;
    ucred peer{};  // zeros if it comes from another host
    Frame hello;
    std::string who;                 // for messages
    std::optional<int> proved_rank;  // which it must not deny in its hello
  };

  static constexpr std::size_t kMaxWaiting = 128;
  // The time to say hello. A process that is stopped or starved for longer connects again.
  static constexpr std::chrono::seconds kHelloTime{2};
  // The limit per turn, so that a flood of connections cannot keep rank 0 from its other duties.
  static constexpr int kAcceptsPerTurn = 64;

  // `listener` is a listening socket that does not block.
  explicit Lobby(UniqueFd listener) : listener_(std::move(listener)) {}
  // A lobby of a TCP socket. `terms` must outlive it.
  Lobby(UniqueFd listener, const HandshakeTerms* terms)
      : listener_(std::move(listener)), terms_(terms) {}

  // Accepts some connections, reads from those that wait, and returns those that have said hello.
  // Does not block. Throws Error{kSystem}.
  std::vector<Arrival> take_turn();

  // The descriptors to poll for until the next turn, and the latest time for that turn.
  void add_interest(std::vector<pollfd>& fds) const;
  Clock::time_point next_turn() const;

  std::size_t num_waiting() const { return waiting_.size(); }

  // Tells of connections that could not prove that they belong here, for the error of a world that
  // does not form. They do not keep it from forming. Empty if there were none.
  std::string refusals() const;

 private:
  struct Waiting {
    Channel channel;
    ucred peer{};
    Clock::time_point since;
    std::string who;
    std::optional<ListenerHandshake> handshake;
  };

  // Accepts one connection; returns false if there is none.
  bool accept_one();
  void make_room();
  // Returns false if the connection is to be closed.
  bool prove(Waiting& waiting);

  UniqueFd listener_;
  const HandshakeTerms* terms_ = nullptr;
  std::size_t num_refused_ = 0;
  std::string last_refused_;
  std::vector<Waiting> waiting_;  // in order of arrival
};

}  // namespace switchyard
