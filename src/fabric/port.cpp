#include "fabric/port.h"

#include <fmt/core.h>
#include <netinet/in.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <cstdint>

#include "base/posix.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

constexpr int kTrials = 200;

// A listener's usual way. SO_REUSEADDR: connections of an earlier listener that wait for their end
// do not count.
bool can_bind(int family, const sockaddr* address, socklen_t size) {
  const UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1, off = 0;
  if (!fd) return false;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  // The socket takes IPv4's addresses, too.
  if (family == AF_INET6) ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  return ::bind(fd.get(), address, size) == 0;
}

bool is_free(int port) {
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(static_cast<std::uint16_t>(port));
  if (can_bind(AF_INET6, reinterpret_cast<const sockaddr*>(&v6), sizeof v6)) return true;
  // A host without IPv6 refuses every port.
  const UniqueFd has_v6(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 any{};
  any.sin6_family = AF_INET6;
  if (has_v6 && can_bind(AF_INET6, reinterpret_cast<const sockaddr*>(&any), sizeof any)) {
    return false;
  }
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(static_cast<std::uint16_t>(port));
  return can_bind(AF_INET, reinterpret_cast<const sockaddr*>(&v4), sizeof v4);
}

}  // namespace

int random_port() {
  std::uint32_t number = 0;
  if (::getrandom(&number, sizeof number, 0) != static_cast<ssize_t>(sizeof number)) {
    throw_errno("cannot read random bytes for a port");
  }
  return kFirstPort + static_cast<int>(number % kNumPorts);
}

int free_port() {
  for (int i = 0; i < kTrials; ++i) {
    if (const int port = random_port(); is_free(port)) return port;
  }
  throw Error(ErrorCode::kSystem,
              fmt::format("no free port was found among {} to {}; name one with --master-port",
                          kFirstPort, kFirstPort + kNumPorts - 1));
}

}  // namespace switchyard
