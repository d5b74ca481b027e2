// Another rank's heap as its writers see it. Where peers are reached by load and store, a put is a
// store; other fabrics can implement the same verbs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/exchange/copy_row.cuh"
#include "gpu/ptx/memory.cuh"
#include "protocol/atomics.h"

namespace switchyard::gpu {

struct Peer {
  // The start of the peer's heap. Heap's functions find the regions in it.
  std::byte* base;

  // Stores data that a later signal() publishes.
  template <typename T>
  __device__ __forceinline__ void put(T* to, const T& value) const {
    *to = value;
  }
  // Stores a warp's part of a row.
  template <std::uint32_t kVectors>
  __device__ __forceinline__ void put_row(std::byte* to, const std::byte* from, std::uint32_t bytes,
                                          const RowPart& part) const {
    copy_row<kVectors>(to, from, bytes, part);
  }
  // Raises a flag after everything that this thread wrote or read before.
  __device__ __forceinline__ void signal(std::uint32_t* flag, std::uint32_t value) const {
    protocol::store_release(flag, value);
  }
  // Raises a flag like signal(), for callers that have called fence_system(): one fence serves
  // several signals.
  __device__ __forceinline__ void signal_fenced(std::uint32_t* flag, std::uint32_t value) const {
    protocol::store_relaxed(flag, value);
  }
  // Stores words that hold data and flag together, so no signal has to follow.
  __device__ __forceinline__ void word(std::uint64_t* to, const WordPair& words) const {
    store_words(to, words);
  }
};

}  // namespace switchyard::gpu
