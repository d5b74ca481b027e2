// Where the ranks of a world meet: an abstract Unix socket of one host, or a TCP port that several
// hosts reach.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/posix.h"
#include "fabric/channel.h"
#include "fabric/lobby.h"
#include "network/secret.h"

namespace switchyard {

class Place {
 public:
  // tcp://host:port is a port, whose ranks prove that they know `secret`; every other string is the
  // name of a Unix socket. Throws Error{kInvalidArgument} for a tcp:// that is none, and for a port
  // what network::require_built_in() throws.
  static std::unique_ptr<Place> of(const std::string& rendezvous, int rank, int size,
                                   const network::Secret& secret);

  explicit Place(std::string rendezvous) : rendezvous_(std::move(rendezvous)) {}
  virtual ~Place() = default;
  const std::string& rendezvous() const { return rendezvous_; }

  // All ranks share a clock, process ids and memory.
  virtual bool is_one_host() const = 0;
  // A listening socket that does not block; closed if another process has the place.
  virtual UniqueFd try_listen() const = 0;
  virtual Lobby make_lobby(UniqueFd listener) const = 0;
  // Connects to rank 0, and proves that this rank may. Closed if nobody listens there yet, or if
  // the listener has no room for a connection until `until`.
  virtual Channel try_connect(Clock::time_point until) const = 0;
  // The process at the other end of a connection, for messages.
  virtual std::string describe(int socket) const = 0;

 private:
  std::string rendezvous_;
};

struct TcpEndpoint {
  std::string host;
  std::string port;
};
inline constexpr std::string_view kTcpScheme = "tcp://";
// Reads "tcp://host:port" or "tcp://[::1]:port". Throws Error{kInvalidArgument} naming the string.
TcpEndpoint parse_tcp(const std::string& rendezvous);

// The IP address of this end of a connection, and of the other.
std::string local_ip(int socket);
std::string remote_ip(int socket);

// A TCP socket that listens on all addresses of the same family as `like` (an IP address), at
// `port` or, if that is 0, at any. Closed if the port is taken.
UniqueFd listen_tcp(const std::string& like, int port);
int port_of(int socket);
// Frames and beats are short, and must not wait for the answer to the one before.
void set_no_delay(int socket);
// Connects within `until`. Closed if that does not work now and may work later.
UniqueFd connect_tcp(const TcpEndpoint& endpoint, Clock::time_point until);

}  // namespace switchyard
