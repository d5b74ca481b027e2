#include "fabric/place.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/interrupt.h"
#include "base/printable.h"
#include "fabric/bootstrap.h"
#include "fabric/frames.h"
#include "fabric/handshake.h"
#include "network/network.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

// The longest time of one attempt to connect. Another attempt follows.
constexpr std::chrono::seconds kLongestConnect{1};

// connect() then waits no longer than that, and not beyond `until`.
void set_connect_patience(int socket, Clock::time_point until) {
  const auto left = std::clamp<Clock::duration>(until - Clock::now(), std::chrono::milliseconds(1),
                                                kLongestConnect);
  const auto microseconds = std::chrono::duration_cast<std::chrono::microseconds>(left).count();
  const timeval patience{microseconds / 1'000'000, microseconds % 1'000'000};
  if (::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) != 0) {
    throw_errno("cannot set the timeout of a rendezvous connection");
  }
}

// ------------------------------------------------------------------------------------ one host

struct UnixAddress {
  explicit UnixAddress(std::string_view rendezvous) {
    const std::string name = rendezvous_socket_name(rendezvous);
    address.sun_family = AF_UNIX;
    // sun_path[0] stays 0, which puts the name in the abstract namespace.
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }

  sockaddr_un address{};
  socklen_t length = 0;
};

UniqueFd make_unix_socket() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) throw_errno("cannot create a Unix socket for the rendezvous");
  return socket;
}

class UnixPlace final : public Place {
 public:
  UnixPlace(const std::string& rendezvous, int size)
      : Place(rendezvous), address_(rendezvous), size_(size) {}

  bool is_one_host() const override { return true; }

  UniqueFd try_listen() const override {
    UniqueFd listener = make_unix_socket();
    ::fcntl(listener.get(), F_SETFL, O_NONBLOCK);
    if (::bind(listener.get(), address_.get(), address_.length) != 0) {
      if (errno == EADDRINUSE) return UniqueFd();
      throw_errno(fmt::format("cannot bind the socket of rendezvous '{}'", rendezvous()));
    }
    if (::listen(listener.get(), SOMAXCONN) != 0) throw_errno("cannot listen for the other ranks");
    return listener;
  }

  Lobby make_lobby(UniqueFd listener) const override { return Lobby(std::move(listener)); }

  Channel try_connect(Clock::time_point until) const override {
    UniqueFd socket = make_unix_socket();
    // The connections of others may fill the listener's queue. Then connect() waits for its turn. A
    // process that polled instead would leave every free place to those that wait.
    set_connect_patience(socket.get(), until);
    if (::connect(socket.get(), address_.get(), address_.length) != 0) {
      if (errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR) return Channel();
      throw_errno(fmt::format("cannot connect to rendezvous '{}'", rendezvous()));
    }
    if (const uid_t uid = credentials(socket.get()).uid; uid != ::geteuid()) {
      throw Error(ErrorCode::kSystem,
                  fmt::format("the socket of rendezvous '{}' is held by user {}, not by this user "
                              "({}); choose another rendezvous string",
                              rendezvous(), uid, ::geteuid()));
    }
    return Channel(std::move(socket), intake_before_welcome(size_));
  }

  std::string describe(int socket) const override {
    return fmt::format("process {}", credentials(socket).pid);
  }

 private:
  UnixAddress address_;
  int size_;
};

// ------------------------------------------------------------------------------- several hosts

struct Resolved {
  addrinfo* list = nullptr;
  ~Resolved() {
    if (list != nullptr) ::freeaddrinfo(list);
  }
};

std::string ip_of(const sockaddr_storage& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    // An IPv4 address that reached a socket of both families.
    if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
      ::inet_ntop(AF_INET, v6.sin6_addr.s6_addr + 12, text.data(), text.size());
    } else {
      ::inet_ntop(AF_INET6, &v6.sin6_addr, text.data(), text.size());
    }
  } else {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    ::inet_ntop(AF_INET, &v4.sin_addr, text.data(), text.size());
  }
  return text.data();
}

class TcpPlace final : public Place {
 public:
  TcpPlace(const std::string& rendezvous, int rank, int size, const network::Secret& secret)
      : Place(rendezvous),
        endpoint_(parse_tcp(rendezvous)),
        rank_(rank),
        terms_{secret, Purpose::kRendezvous, size} {}

  bool is_one_host() const override { return false; }

  UniqueFd try_listen() const override {
    int port = 0;
    std::from_chars(endpoint_.port.data(), endpoint_.port.data() + endpoint_.port.size(), port);
    // It listens on all addresses: this rank does not know which of them the others reach, and the
    // name may be that of a router in front of this host.
    return listen_tcp(endpoint_.host, port);
  }

  Lobby make_lobby(UniqueFd listener) const override { return Lobby(std::move(listener), &terms_); }

  Channel try_connect(Clock::time_point until) const override {
    UniqueFd socket = connect_tcp(endpoint_, until);
    if (!socket) return Channel();
    switch (join_handshake(socket.get(), terms_, rank_, until)) {
      case JoinResult::kProved:
        return Channel(std::move(socket), intake_before_welcome(terms_.size));
      case JoinResult::kNoAnswer: return Channel();
      case JoinResult::kDisagrees: break;
    }
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("whoever listens at {} does not know this rank's secret: give all ranks "
                    "the same SWITCHYARD_SECRET_FILE or SWITCHYARD_SECRET, or choose "
                    "another rendezvous if another program has the port",
                    rendezvous()));
  }

  std::string describe(int socket) const override {
    return fmt::format("a process on {}", remote_ip(socket));
  }

 private:
  TcpEndpoint endpoint_;
  int rank_;
  HandshakeTerms terms_;
};

}  // namespace

std::unique_ptr<Place> Place::of(const std::string& rendezvous, int rank, int size,
                                 const network::Secret& secret) {
  if (!std::string_view(rendezvous).starts_with(kTcpScheme)) {
    return std::make_unique<UnixPlace>(rendezvous, size);
  }
  network::require_built_in();
  return std::make_unique<TcpPlace>(rendezvous, rank, size, secret);
}

void set_no_delay(int socket) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

TcpEndpoint parse_tcp(const std::string& rendezvous) {
  const auto refuse = [&] {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the rendezvous is '{}'; use tcp://HOST:PORT, with the host of rank 0 "
                            "and a free port of 1 to 65535 there",
                            printable(rendezvous)));
  };
  std::string_view text = rendezvous;
  if (text.starts_with(kTcpScheme)) text.remove_prefix(kTcpScheme.size());
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) refuse();
  TcpEndpoint endpoint{std::string(text.substr(0, colon)), std::string(text.substr(colon + 1))};
  if (endpoint.host.starts_with('[') && endpoint.host.ends_with(']')) {
    endpoint.host = endpoint.host.substr(1, endpoint.host.size() - 2);
  }
  int port = 0;
  const char* const end = endpoint.port.data() + endpoint.port.size();
  const auto [parsed_to, error] = std::from_chars(endpoint.port.data(), end, port);
  if (endpoint.host.empty() || error != std::errc() || parsed_to != end || port < 1 ||
      port > 65'535) {
    refuse();
  }
  return endpoint;
}

std::string local_ip(int socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    throw_errno("cannot read this host's address");
  }
  return ip_of(address);
}

std::string remote_ip(int socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getpeername(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0) return "?";
  return ip_of(address);
}

UniqueFd listen_tcp(const std::string& like, int port) {
  const bool v6 = like.find(':') != std::string::npos;
  UniqueFd listener(
      ::socket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener) throw_errno("cannot create a TCP socket for the other ranks");
  const int on = 1, off = 0;
  // A world that was made here a moment ago does not keep the port.
  ::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  // The socket takes IPv4's addresses, too.
  if (v6) ::setsockopt(listener.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  sockaddr_storage address{};
  socklen_t length = 0;
  if (v6) {
    auto& any = reinterpret_cast<sockaddr_in6&>(address);
    any.sin6_family = AF_INET6;
    any.sin6_port = htons(static_cast<std::uint16_t>(port));
    length = sizeof any;
  } else {
    auto& any = reinterpret_cast<sockaddr_in&>(address);
    any.sin_family = AF_INET;
    any.sin_port = htons(static_cast<std::uint16_t>(port));
    length = sizeof any;
  }
  if (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno == EADDRINUSE) return UniqueFd();
    throw_errno(fmt::format("cannot bind TCP port {}", port));
  }
  if (::listen(listener.get(), SOMAXCONN) != 0) {
    if (errno == EADDRINUSE) return UniqueFd();
    throw_errno("cannot listen for the other ranks");
  }
  return listener;
}

int port_of(int socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    throw_errno("cannot read the port of a socket");
  }
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

UniqueFd connect_tcp(const TcpEndpoint& endpoint, Clock::time_point until) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  Resolved found;
  const int code = ::getaddrinfo(endpoint.host.c_str(), endpoint.port.c_str(), &hints, &found.list);
  if (code == EAI_AGAIN) return UniqueFd();
  if (code != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the host '{}' of the rendezvous cannot be found: {}; name the host of "
                            "rank 0 as the other hosts know it, or by its IP address",
                            printable(endpoint.host), ::gai_strerror(code)));
  }
  // A signal ends connect(). One that comes right before must not wait for a host that is silent.
  const Clock::time_point longest =
      asks_for_interrupts() ? std::min(until, Clock::now() + std::chrono::seconds(1)) : until;
  for (const addrinfo* info = found.list; info != nullptr; info = info->ai_next) {
    UniqueFd socket(::socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket) continue;
    set_connect_patience(socket.get(), longest);
    if (::connect(socket.get(), info->ai_addr, info->ai_addrlen) != 0) continue;
    set_no_delay(socket.get());
    return socket;
  }
  return UniqueFd();
}

}  // namespace switchyard
