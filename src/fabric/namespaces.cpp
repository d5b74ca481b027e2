#include "fabric/namespaces.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sched.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <future>
#include <string_view>

#include "base/posix.h"
#include "base/printable.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

// A command's output and its exit status. The command has only fixed words, and numbers made here.
struct Outcome {
  int status = -1;
  std::string text;
};
Outcome run(const std::string& command) {
  FILE* const pipe = ::popen(("( " + command + " ) 2>&1").c_str(), "re");
  if (pipe == nullptr) throw_errno("cannot start a shell for iproute2");
  Outcome outcome;
  std::array<char, 256> buffer;
  while (std::fgets(buffer.data(), buffer.size(), pipe) != nullptr) outcome.text += buffer.data();
  outcome.status = ::pclose(pipe);
  return outcome;
}

[[noreturn]] void throw_unsupported(std::string_view why) {
  throw Error(ErrorCode::kUnsupported,
              fmt::format("network namespaces cannot be made here, which needs root and iproute2: "
                          "{}",
                          printable(why, 300)));
}

// Moves the calling thread into a new network namespace, and returns its descriptor.
UniqueFd unshare_network() {
  if (::unshare(CLONE_NEWNET) != 0) throw_unsupported(errno_text(errno));
  UniqueFd entrance(::open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
  if (!entrance) throw_errno("cannot open a network namespace");
  return entrance;
}

// Moves the calling thread into a namespace, and runs a script there.
void run_in(const UniqueFd& entrance, const std::string& script) {
  if (::setns(entrance.get(), CLONE_NEWNET) != 0) throw_errno("cannot enter a network namespace");
  const Outcome outcome = run(script);
  if (outcome.status != 0) throw_unsupported(outcome.text);
}

}  // namespace

NetworkNamespaces::NetworkNamespaces(int num_hosts) {
  if (num_hosts < 1 || num_hosts > 250) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} network namespaces were asked for; use 1 to 250", num_hosts));
  }
  // A namespace is a property of a thread, so a thread that ends here makes them, and the caller
  // stays where it is.
  std::async(std::launch::async, [&] {
    bridge_ = unshare_network();
    for (int host = 0; host < num_hosts; ++host) hosts_.push_back(unshare_network());
    std::string cables = "ip link add name switch type bridge && ip link set switch up";
    for (int host = 0; host < num_hosts; ++host) {
      // `ip` takes a path in place of a namespace's name.
      cables += fmt::format(
          " && ip link add p{0} type veth peer name {1} netns /proc/{2}/fd/{3} && "
          "ip link set p{0} master switch up",
          host, kNamespaceInterface, ::getpid(), fd(host));
    }
    run_in(bridge_, cables);
    for (int host = 0; host < num_hosts; ++host) {
      run_in(hosts_[static_cast<std::size_t>(host)],
             fmt::format("ip addr add {0}/24 dev {1} && ip link set {1} up && ip link set lo up",
                         ip(host), kNamespaceInterface));
    }
  }).get();
}

std::string NetworkNamespaces::ip(int host) const { return fmt::format("10.77.0.{}", host + 1); }

}  // namespace switchyard
