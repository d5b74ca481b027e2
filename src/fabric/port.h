// Ports of this host that no connection takes by chance.
#pragma once

namespace switchyard {

// Launchers' ports lie below those that kernels give to connections (from 32768 on Linux).
inline constexpr int kFirstPort = 20'000, kNumPorts = 10'000;

// One of these ports, at random. It may be taken: it is for another host.
int random_port();

// One of these ports that nothing on this host listens at now, on any address. Throws
// Error{kSystem} if none is found.
int free_port();

}  // namespace switchyard
