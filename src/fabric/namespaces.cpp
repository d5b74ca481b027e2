#include "fabric/namespaces.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>

#include "base/posix.h"
#include "base/printable.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

// A command's output and its exit status. The command has only fixed words, and names made here.
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

}  // namespace

NetworkNamespaces::NetworkNamespaces(int num_hosts) {
  if (num_hosts < 1 || num_hosts > 250) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} network namespaces were asked for; use 1 to 250", num_hosts));
  }
  static std::atomic<int> count{0};
  const std::string prefix = fmt::format("sw{}-{}", ::getpid(), count.fetch_add(1));
  bridge_ = prefix + "-b";
  std::string script = fmt::format(
      "ip netns add {0} && ip -n {0} link add name switch type bridge && "
      "ip -n {0} link set switch up",
      bridge_);
  for (int host = 0; host < num_hosts; ++host) {
    names_.push_back(fmt::format("{}-{}", prefix, host));
    script += fmt::format(
        " && ip netns add {0} && ip -n {0} link add eth0 type veth peer name p{1} netns {2} && "
        "ip -n {2} link set p{1} master switch up && ip -n {0} addr add {3}/24 dev eth0 && "
        "ip -n {0} link set eth0 up && ip -n {0} link set lo up",
        names_.back(), host, bridge_, ip(host));
  }
  const Outcome outcome = run(script);
  if (outcome.status != 0) {
    remove();
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("network namespaces cannot be made here, which needs root and iproute2: "
                    "{}",
                    printable(outcome.text, 300)));
  }
  for (const std::string& name : names_) {
    entrances_.emplace_back(::open(("/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC));
    if (!entrances_.back()) {
      remove();
      throw_errno("cannot open a network namespace");
    }
  }
}

NetworkNamespaces::~NetworkNamespaces() { remove(); }

void NetworkNamespaces::remove() const noexcept {
  std::string script = fmt::format("ip netns del {}", bridge_);
  for (const std::string& name : names_) script += fmt::format("; ip netns del {}", name);
  try {
    run(script);
  } catch (const Error&) {
    // They stay until the machine restarts; nothing else depends on them.
  }
}

std::string NetworkNamespaces::ip(int host) const { return fmt::format("10.77.0.{}", host + 1); }

}  // namespace switchyard
