// Another rank's heap as its writers see it: the kernels of the layer and of Exchange write to
// other ranks with these verbs alone. A verb takes a region, which has the same offset in every
// heap, so a transport that reaches a rank in another way than by load and store replaces this
// file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/pipeline/copy_row.cuh"
#include "gpu/ptx/memory.cuh"
#include "protocol/atomics.h"
#include "protocol/control.h"
#include "protocol/region.h"

namespace switchyard::gpu {

class Peer {
 public:
  __device__ Peer(const protocol::Heaps& heaps, int rank) : base_(heaps.base[rank]) {}

  // Stores data that a later signal() publishes.
  template <typename T>
  __device__ __forceinline__ void put(protocol::Region<T> to, const T& value) const {
    *mapped(to) = value;
  }
  // Stores 16 bytes at a 16-byte boundary.
  template <typename T>
  __device__ __forceinline__ void put_vector(protocol::Region<T> to, const uint4& value) const {
    store_vector(mapped(to), value);
  }
  // Stores a warp's part of a row.
  template <std::uint32_t kVectors>
  __device__ __forceinline__ void put_row(protocol::Region<std::byte> to, const std::byte* from,
                                          std::uint32_t bytes, const RowPart& part) const {
    copy_row<kVectors>(mapped(to), from, bytes, part);
  }
  // Raises a flag after everything that this thread wrote or read before.
  template <typename Flag>
  __device__ __forceinline__ void signal(protocol::Region<Flag> flag, Flag value) const {
    protocol::store_release(mapped(flag), value);
  }
  // Raises a flag in no order: one that publishes nothing, or after fence_system(), where one fence
  // serves several signals.
  template <typename Flag>
  __device__ __forceinline__ void signal_relaxed(protocol::Region<Flag> flag, Flag value) const {
    protocol::store_relaxed(mapped(flag), value);
  }
  // Stores a word, or two, that hold data and flag together, so no signal has to follow.
  __device__ __forceinline__ void put_word(protocol::Region<std::uint64_t> to,
                                           std::uint64_t word) const {
    protocol::store_relaxed(mapped(to), word);
  }
  __device__ __forceinline__ void put_words(protocol::Region<std::uint64_t> to,
                                            const WordPair& words) const {
    store_words(mapped(to), words);
  }
  // The address of a row that is stored piece by piece, such as an epilogue's. A transport without
  // mapped memory would give a place to stage the row in.
  template <typename T>
  __device__ __forceinline__ T* mapped(protocol::Region<T> region) const {
    return region.in(base_);
  }

 private:
  std::byte* base_;
};

}  // namespace switchyard::gpu
