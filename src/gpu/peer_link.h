// The link between two GPUs of this machine, for `switchyard doctor`.
#pragma once

#include <string>

namespace switchyard::gpu {

struct PeerLink {
  bool reachable = false;  // kernels on one can read and write memory of the other
  bool atomics = false;    // they can do atomic additions there
  std::string kind;  // "NVLink", "PCIe" or, without the driver's management library, "unknown"
};
// Looks at the link between two different devices. Throws as device.h says.
PeerLink peer_link(int from, int to);

// Bytes per second that a kernel on all multiprocessors of `from` stores into memory of `to`, 16
// bytes at a time, as the layer kernel does. The two must be reachable.
double peer_write_rate(int from, int to);

}  // namespace switchyard::gpu
