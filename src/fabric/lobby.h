// The connections to rank 0 that have not said who they are, and the rules that keep them from
// standing in the way of those that do.
//
// Any process of this host can connect to an abstract socket. Connections of other users are closed
// as they are accepted. Those of this user may say hello, and nothing else, within a short time.
// There is room for a bounded number of them. If it is full, the process that has the most loses
// one first.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <utility>
#include <vector>

#include "base/posix.h"
#include "fabric/channel.h"

namespace switchyard {

// The process at the other end, as the kernel knows it. Throws Error{kSystem}.
ucred credentials(int socket);

class Lobby {
 public:
  // A connection that has said hello, or speaks another version of the protocol.
  struct Arrival {
    Channel channel;
    ucred peer{};
    Frame hello;
  };

  static constexpr std::size_t kMaxWaiting = 128;
  // The time to say hello. A process that is stopped or starved for longer connects again.
  static constexpr std::chrono::seconds kHelloTime{2};
  // The limit per turn, so that a flood of connections cannot keep rank 0 from its other duties.
  static constexpr int kAcceptsPerTurn = 64;

  // `listener` is a listening socket that does not block.
  explicit Lobby(UniqueFd listener) : listener_(std::move(listener)) {}

  // Accepts some connections, reads from those that wait, and returns those that have said hello.
  // Does not block. Throws Error{kSystem}.
  std::vector<Arrival> take_turn();

  // The descriptors to poll for until the next turn, and the latest time for that turn.
  void add_interest(std::vector<pollfd>& fds) const;
  Clock::time_point next_turn() const;

  std::size_t num_waiting() const { return waiting_.size(); }

 private:
  struct Waiting {
    Channel channel;
    ucred peer{};
    Clock::time_point since;
  };

  // Accepts one connection; returns false if there is none.
  bool accept_one();
  void make_room();

  UniqueFd listener_;
  std::vector<Waiting> waiting_;  // in order of arrival
};

}  // namespace switchyard
