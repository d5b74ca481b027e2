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
//
// The namespaces have no names. The kernel frees each one with the last process in it and the last
// descriptor of it, so nothing is left behind however this process ends.
class NetworkNamespaces {
 public:
  // Throws Error{kUnsupported}, saying why this process may not make them.
  explicit NetworkNamespaces(int num_hosts);

  int size() const { return static_cast<int>(hosts_.size()); }
  std::string ip(int host) const;
  // The descriptors for setns(), which a forked child may call before exec.
  int fd(int host) const { return hosts_[static_cast<std::size_t>(host)].get(); }
  int bridge_fd() const { return bridge_.get(); }

 private:
  UniqueFd bridge_;
  std::vector<UniqueFd> hosts_;
};

}  // namespace switchyard
