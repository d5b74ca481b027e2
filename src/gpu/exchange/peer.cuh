// Another rank's heap, for those who write to it. On fabrics where peers are reached by load and
// store a put is a store; the verbs are those that other fabrics have, too.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/exchange/copy_row.cuh"
#include "gpu/ptx/memory.cuh"
#include "protocol/atomics.h"

namespace switchyard::gpu {

struct Peer {
  // Where its heap begins: places in it are found with Heap's functions.
  std::byte* base;

  // Data, for a signal to follow.
  template <typename T>
  __device__ __forceinline__ void put(T* to, const T& value) const {
    *to = value;
  }
  // A warp's part of a row.
  template <std::uint32_t kVectors>
  __device__ __forceinline__ void put_row(std::byte* to, const std::byte* from, std::uint32_t bytes,
                                          const RowPart& part) const {
    copy_row<kVectors>(to, from, bytes, part);
  }
  // Raises a flag behind everything that this thread wrote or saw before.
  __device__ __forceinline__ void signal(std::uint32_t* flag, std::uint32_t value) const {
    protocol::store_release(flag, value);
  }
  // The same where a fence_system() came first: one fence for several signals.
  __device__ __forceinline__ void signal_fenced(std::uint32_t* flag, std::uint32_t value) const {
    protocol::store_relaxed(flag, value);
  }
  // Words that are data and flag in one: nothing need be sent behind them.
  __device__ __forceinline__ void word(std::uint64_t* to, const WordPair& words) const {
    store_words(to, words);
  }
};

}  // namespace switchyard::gpu
