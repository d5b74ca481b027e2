// Ranks of several hosts: a fabric of all for collectives, one of each host's ranks for memory, and
// a proxy for what goes between hosts.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fabric/bootstrap.h"
#include "fabric/fabric.h"
#include "network/hosts.h"
#include "network/network.h"
#include "network/proxy.h"

namespace switchyard {

// The parts of a fabric over hosts. Tests put in fabrics of threads and a chaotic network.
struct HostsParts {
  std::shared_ptr<Fabric> world;  // collectives of all ranks; its memory is not used
  std::shared_ptr<Fabric> host;   // the ranks of this host, in the order of the world
  network::Hosts hosts;
  network::ProxyOptions options;
  std::unique_ptr<network::Network> network;
  std::vector<network::ControlChannel> channels;  // by rank
  std::vector<std::string> where;                 // by rank: its host, for messages
};
// Collective.
std::shared_ptr<Fabric> make_hosts_fabric(HostsParts parts);

// Collective: this process as a rank of a world that meets at tcp://host:port. `secret` as in
// WorldOptions. Throws what Bootstrap and network::secret_of() do, and Error{kUnsupported} if this
// build has no network.
std::shared_ptr<Fabric> join_hosts(int rank, int size, const std::string& rendezvous,
                                   std::chrono::milliseconds deadline,
                                   const network::WindowOptions& windows,
                                   const std::string& secret);

// A number that processes have in common if they share a kernel and a network namespace, so that
// they can share memory through its abstract sockets. Throws Error{kSystem}.
std::uint64_t host_number();

}  // namespace switchyard
