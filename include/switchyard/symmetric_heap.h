// The symmetric heap for kernels and programs of your own: memory of the same size on every rank,
// which all ranks read and write, and in which an allocation has the same place everywhere.
//
//   SymmetricHeap heap(world, 64 << 20, {.backend = Backend::kCuda});
//   auto* inbox = heap.allocate<float>(n);                  // on all ranks alike
//   auto* flag = heap.allocate<std::uint64_t>(world.size());
//   heap.barrier();                                         // and a check that they were alike
//   my_kernel<<<grid, block, 0, stream>>>(heap.peer_map(), inbox, flag, round);
//
// In the kernel translate(map, inbox, peer) is the address of the inbox of `peer`. device/peer.cuh
// has what kernels do with it: put, signal, wait; peer.h has the same for the host, with CPU
// memory.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "switchyard/layer.h"
#include "switchyard/peer_map.h"
#include "switchyard/world.h"

namespace switchyard {

struct SymmetricHeapOptions {
  Backend backend = Backend::kCpu;  // whose memory; the same on all ranks
  int device = -1;                  // kCuda only: of this rank; -1: the current one
  // The deadline of waits for flags that are given no other (PeerMap::deadline_ns), a year at most.
  // Zero: the world's.
  std::chrono::milliseconds deadline{0};
};

struct SymmetricHeapStats {
  std::uint64_t bytes = 0;           // of this rank's memory
  std::uint64_t bytes_reserved = 0;  // with what the library adds to it
  std::uint64_t bytes_allocated = 0;
  std::uint64_t most_allocated = 0;  // ever
  std::uint64_t largest_free = 0;    // that an allocation could have
  std::uint64_t allocations = 0;     // that live
  std::uint64_t calls = 0;           // of allocate(), free() and reset() that did something
};

// One thread per rank. All ranks call allocate(), free() and reset() with the same arguments in the
// same order: then all get the same places. These calls cost no communication, so they cannot see
// that ranks differ; the next barrier() does, and throws Error{kSpecMismatch} on all ranks, naming
// a rank and the first call in which it differs from rank 0. Until then the ranks' addresses do not
// fit each other, so call barrier() after allocating, before the first byte is put anywhere. After
// it all ranks are known to have the memory that others are about to write.
class SymmetricHeap {
 public:
  static constexpr std::size_t kAlignment = 128;       // if no other is asked for
  static constexpr std::size_t kMostAlignment = 4096;  // of an address

  // Collective. All bytes are 0. With kCpu address space is reserved, and memory committed as it is
  // touched; with kCuda device memory is allocated. Throws Error{kInvalidArgument} for no bytes or
  // a device that is none, {kSpecMismatch} naming a rank if the ranks disagree on bytes or backend,
  // {kCapacityExceeded} if memory cannot be had, {kUnsupported} for GPUs that cannot reach each
  // other, in a build without CUDA, and for more than kMaxPeers ranks; TimeoutError if a rank does
  // not come.
  SymmetricHeap(const World& world, std::size_t bytes, const SymmetricHeapOptions& options = {});
  // Not collective: other ranks may still write into this rank's memory, which lives as long as
  // their heaps do. With kCuda it waits for the device first, and if that still works after the
  // deadline, the heap's waits are ended as by World::abort(). Pointers into the heap are invalid
  // then.
  ~SymmetricHeap();
  SymmetricHeap(SymmetricHeap&&) noexcept;
  SymmetricHeap& operator=(SymmetricHeap&&) noexcept;

  // Allocates memory of this rank; all ranks have the same place for it. It holds 0 where it was
  // never allocated before, and otherwise its old contents. `alignment`, a power of two, is that of
  // the address, on every rank. 0 bytes take as little as 1. Throws Error{kCapacityExceeded} if
  // there is no room, {kInvalidArgument} for an alignment that is none; both change nothing.
  void* allocate(std::size_t bytes, std::size_t alignment = kAlignment);
  template <typename T>
  T* allocate(std::size_t count = 1, std::size_t alignment = kAlignment) {
    // A count beyond memory becomes a number of bytes beyond memory, and not a small one.
    const std::size_t most = ~std::size_t{0} / sizeof(T);
    return static_cast<T*>(allocate(count > most ? ~std::size_t{0} : count * sizeof(T),
                                    alignment < alignof(T) ? alignof(T) : alignment));
  }
  // Gives an allocation back; null does nothing. Throws Error{kInvalidArgument} for a pointer that
  // allocate() did not return, or that was freed. The caller must know that no other rank still
  // writes there.
  void free(void* pointer);
  // Frees all.
  void reset();

  // The place in the memory of `rank` that corresponds to `pointer`, anywhere in this rank's memory
  // or at its end. Throws Error{kInvalidArgument} for other pointers, and ranks that do not exist.
  void* translate(const void* pointer, int rank) const;
  template <typename T>
  T* translate(T* pointer, int rank) const {
    return static_cast<T*>(translate(static_cast<const void*>(pointer), rank));
  }
  // The start of a rank's memory, as this rank reaches it; a multiple of kMostAlignment. Throws as
  // translate() does.
  std::byte* base(int rank) const;
  // The map for kernels, which take it by value, and for the functions of peer.h.
  PeerMap peer_map() const;

  // Waits for a flag in this rank's memory that `peer` raises, as host::wait_until() does, and ends
  // the heap on all ranks if the deadline passes. Throws as check() does. kCpu only: with kCuda
  // kernels wait, and this throws Error{kUnsupported}.
  void wait(const std::uint64_t* flag, std::uint64_t value, int peer);

  // Collective: waits for all ranks on the host, and checks that their allocations are alike. With
  // kCuda it does not wait for streams. Throws as check() does, on all ranks, if the heap is dead
  // on any; Error{kSpecMismatch} for allocations that differ; TimeoutError, phase "bootstrap",
  // naming the ranks that did not come within the world's deadline.
  void barrier();

  // Throws TimeoutError if a wait was given up (give_up() in peer.h and device/peer.cuh, or
  // wait()): kTimeout on the rank that gave up first, kAborted on the others. failure() names the
  // ranks and has phase "signal", and the flag's offset as its slot. The heap is dead then, for
  // this and all ranks: every wait ends at once. The world lives, and can make another. Throws
  // TimeoutError{kAborted}, phase "abort", after World::abort(). With kCuda it waits for a copy
  // from the device, but not for kernels.
  void check() const;

  SymmetricHeapStats stats() const;
  std::size_t bytes() const;
  Backend backend() const;
  int device() const;  // kCpu: -1
  const World& world() const;

 private:
  class State;
  State& state() const;  // of this process

  std::unique_ptr<State> state_;
};

}  // namespace switchyard
