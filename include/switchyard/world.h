// The ranks that share an MoE layer, and the memory they share.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace switchyard {

class Fabric;

// Limits of the traffic between hosts. At most `window` chunks of dispatch, and as many of combine,
// are on their way from one rank to another. The same on all ranks. chunk_bytes * window should
// exceed the network's bandwidth times its round-trip time.
struct NetworkOptions {
  std::uint32_t chunk_bytes = 256 << 10;  // 2 KiB to 1 GiB, a multiple of 64
  std::uint32_t window = 4;               // 1 to 32768
};

struct WorldOptions {
  // Longest time any rank waits for another, at start-up and in a forward pass.
  std::chrono::milliseconds deadline{30'000};
  // Process worlds only: a string that all ranks of this world share and no other world on this
  // host uses at the same time. Empty: derived from the launcher's environment and a per-process
  // count of worlds made. "tcp://HOST:PORT", with the host of rank 0, joins ranks of several hosts:
  // see docs/hosts.md.
  std::string rendezvous{};
  // Process worlds only; used over several hosts.
  NetworkOptions network{};
  // With a rendezvous tcp://...: the secret that ranks prove to each other, at least 16 bytes, the
  // same on all ranks. Empty: that of SWITCHYARD_SECRET_FILE or SWITCHYARD_SECRET.
  std::string secret{};
};

// A handle; copies refer to the same rank of the same world. Thread-compatible: one thread per
// rank, except for abort(). Letting go of the last handle waits for nobody; other ranks that wait
// for this one in a collective call learn of it. (Over several hosts, letting go of a layer or an
// exchange waits, at most for the deadline, until the host's other ranks have ended their calls,
// because this rank may have to pass on what they still receive.)
//
// After fork() the child may let go of the world and of all that was made with it, which disturbs
// nobody. Calls with them throw Error{kInvalidArgument} there: the child makes its own.
class World {
 public:
  // A world of `size` ranks in this process; element r is to be used by the thread that plays rank
  // r.
  static std::vector<World> threads(int size, const WorldOptions& options = {});

  // A world of one.
  static World single(const WorldOptions& options = {});

  // This process as rank `rank` of `size` processes, on this host or, with a rendezvous tcp://...,
  // on several. Collective: returns when all have arrived. Throws TimeoutError naming the ranks
  // that did not arrive within the deadline, Error{kInvalidArgument} for network options that make
  // no sense, and Error{kSpecMismatch} where they differ between ranks of several hosts.
  static World processes(int rank, int size, WorldOptions options = {});

  // Like processes(), with rank and size from the environment: RANK / WORLD_SIZE (torchrun,
  // `switchyard launch`), OMPI_COMM_WORLD_RANK / _SIZE, PMI_RANK / PMI_SIZE, or SLURM_PROCID /
  // SLURM_NTASKS. A world of one where none is set. Ranks on several hosts meet at
  // SWITCHYARD_RENDEZVOUS=tcp://HOST:PORT or at MASTER_ADDR, and need a shared secret: see
  // docs/hosts.md. Throws Error{kInvalidArgument} for values that make no sense and where no secret
  // is set, Error{kUnsupported} for several hosts in a build without libfabric.
  static World from_environment(WorldOptions options = {});

  int rank() const;
  int size() const;
  std::chrono::milliseconds deadline() const;
  // "threads", "shared memory", or "2 hosts, libfabric tcp;ofi_rxm"
  const char* fabric_name() const;

  // Collective, for start-up and tests; forward passes never use one.
  void barrier();

  // Ends the world, for a rank that cannot go on and does not want the others to wait for their
  // deadlines. Any thread may call it, while others of this rank wait or work; it does not wait.
  // Every rank that waits in a forward pass of a layer made with this world, or in a collective
  // call, throws TimeoutError{kAborted}, whose failure() names this rank and has phase "abort"; so
  // does every later call, here and there. (Ranks that are processes hear of it in collective calls
  // through rank 0, as soon as that is in one.) With kCuda kernels end,
  // and check() throws. No layer of the world can be used any more.
  void abort() const noexcept;

  // Throws Error{kInvalidArgument} in a process that inherited the world through fork().
  Fabric& fabric() const;
  explicit World(std::shared_ptr<Fabric> fabric) : fabric_(std::move(fabric)) {}

 private:
  std::shared_ptr<Fabric> fabric_;
};

}  // namespace switchyard
