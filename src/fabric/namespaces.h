// Network namespaces of this kernel as hosts, for tests and demonstrations of worlds over hosts
// without a second machine: `switchyard launch --namespaces 2`.
#pragma once

#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace switchyard {

// The name of each host's virtual Ethernet device in its own namespace.
inline constexpr const char* kNamespaceInterface = "eth0";

// A bridge in a namespace of its own, and one namespace for each host, connected by a pair of
// virtual Ethernet devices. Needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN) and iproute2.
class NetworkNamespaces {
 public:
  // Throws Error{kUnsupported}, saying why this process may not make them.
  explicit NetworkNamespaces(int num_hosts);
  ~NetworkNamespaces();
  NetworkNamespaces(const NetworkNamespaces&) = delete;
  NetworkNamespaces& operator=(const NetworkNamespaces&) = delete;

  int size() const { return static_cast<int>(entrances_.size()); }
  std::string ip(int host) const;
  // The names of the bridge's namespace and of a host's.
  const std::string& bridge() const { return bridge_; }
  const std::string& name(int host) const { return names_[static_cast<std::size_t>(host)]; }
  // The descriptor for setns(), which a forked child may call before exec.
  int fd(int host) const { return entrances_[static_cast<std::size_t>(host)].get(); }

 private:
  void remove() const noexcept;

  std::string bridge_;
  std::vector<std::string> names_;
  std::vector<UniqueFd> entrances_;
};

}  // namespace switchyard
