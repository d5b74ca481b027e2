// Common parts of the tests of worlds of processes.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string>

#include "fabric/bootstrap.h"
#include "support/ranks.h"

namespace switchyard::test {

class RendezvousAddress {
 public:
  explicit RendezvousAddress(const std::string& rendezvous) {
    const std::string name = rendezvous_socket_name(rendezvous);
    address_.sun_family = AF_UNIX;
    std::memcpy(address_.sun_path + 1, name.data(), name.size());
    length_ = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  // False with errno, as connect() itself.
  bool connect(int socket) const { return ::connect(socket, get(), length_) == 0; }
  bool bind(int socket) const { return ::bind(socket, get(), length_) == 0; }

 private:
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address_); }

  sockaddr_un address_{};
  socklen_t length_ = 0;
};

// A connection that says whatever a test wants.
inline UniqueFd connect_to(const std::string& rendezvous) {
  const RendezvousAddress address(rendezvous);
  UniqueFd socket;
  EXPECT_TRUE(eventually([&] {
    socket = UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    return address.connect(socket.get());
  }));
  return socket;
}

inline std::size_t num_open_fds() {
  return static_cast<std::size_t>(std::distance(
      std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator()));
}

}  // namespace switchyard::test
