// Putting data into other ranks' memory, and raising and awaiting flags, in kernels: for heaps of
// GPU memory (symmetric_heap.h). Needs nvcc in C++17 or later, peer_map.h, and nothing else of
// Switchyard. switchyard/peer.h has the same functions for the host.
//
// Order. put_*() are plain stores: nobody may read what they store before a flag says so. signal*()
// has release order at system scope: whatever this thread put, wrote or read before comes before
// the flag, and so does what the threads did that it has met since, at a __syncwarp(), a
// __syncthreads() or another synchronisation. wait_until() has acquire order at system scope: a
// thread that sees the flag sees all of that, and so do the threads that it meets afterwards.
// signal_warp(), signal_block() and wait_until_block() have these meetings in them.
//
//   device::put_block(translate(map, inbox, peer), data, bytes);   // all threads of the block
//   device::signal_block(translate(map, flag, peer), round);
//   const PeerWait wait = device::wait_until_block(map, flag, round, source);
//   if (!wait) { device::give_up_block(map, wait); return; }
//
// Data that came is read with ordinary loads, but not with those of the read-only path (__ldg,
// const __restrict__), whose cache acquiring does not clear. Copies of the asynchronous proxy (TMA)
// need a fence.proxy.async in between.
//
// A flag has one writer, or is only added to, and counts on: it is never reset, so none is lost.
// The blocks of a grid that put something for one flag each add 1 to it with signal_add(), and the
// reader waits for blocks * round. A second round may overwrite what the first one brought only
// when its reader has said so, with a flag of its own or with the data that it sends back.
//
// Kernels that wait. A kernel waits for kernels of other ranks, which must run meanwhile. On GPUs
// of their own nothing else is needed. Ranks that share a GPU need: few enough blocks that all fit
// at once; a stream of its own for each rank, with a hardware queue of its own (in a process with
// several ranks CUDA_DEVICE_MAX_CONNECTIONS=32); kernels that were loaded beforehand, because
// loading waits for the device (cudaFuncGetAttributes() loads one); and no allocation meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "switchyard/peer_map.h"

#if !defined(__CUDACC__)
#error "switchyard/device/peer.cuh is for nvcc; on the host include switchyard/peer.h"
#endif

namespace switchyard::device {

inline constexpr std::uint64_t kDeadlineOfMap = ~std::uint64_t{0};

namespace detail {

__device__ __forceinline__ unsigned thread_of_block() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
__device__ __forceinline__ unsigned threads_of_block() {
  return blockDim.x * blockDim.y * blockDim.z;
}

__device__ __forceinline__ std::uint64_t now_ns() {
  std::uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// Four elements of a thread are on their way at a time.
template <typename V>
__device__ __forceinline__ void copy(V* to, const V* from, std::size_t count, unsigned thread,
                                     unsigned threads) {
  std::size_t i = thread;
  for (; i + 3 * std::size_t{threads} < count; i += 4 * std::size_t{threads}) {
    const V a = from[i], b = from[i + threads], c = from[i + 2 * threads],
            d = from[i + 3 * threads];
    to[i] = a;
    to[i + threads] = b;
    to[i + 2 * threads] = c;
    to[i + 3 * threads] = d;
  }
  for (; i < count; i += threads) to[i] = from[i];
}

// Copies 16 bytes at a time where both addresses allow it, and less elsewhere.
__device__ inline void put(void* to, const void* from, std::size_t bytes, unsigned thread,
                           unsigned threads) {
  auto* target = static_cast<unsigned char*>(to);
  const auto* source = static_cast<const unsigned char*>(from);
  const auto apart = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(target) ^
                                           reinterpret_cast<std::uintptr_t>(source));
  const unsigned unit = (apart & 15) == 0 ? 16 : (apart & 3) == 0 ? 4 : 1;
  std::size_t head = (unit - (reinterpret_cast<std::uintptr_t>(target) & (unit - 1))) & (unit - 1);
  if (head > bytes) head = bytes;
  copy(target, source, head, thread, threads);
  target += head;
  source += head;
  bytes -= head;
  if (unit == 16) {
    copy(reinterpret_cast<uint4*>(target), reinterpret_cast<const uint4*>(source), bytes / 16,
         thread, threads);
  } else if (unit == 4) {
    copy(reinterpret_cast<std::uint32_t*>(target), reinterpret_cast<const std::uint32_t*>(source),
         bytes / 4, thread, threads);
  }
  const std::size_t done = unit == 1 ? 0 : bytes / unit * unit;
  copy(target + done, source + done, bytes - done, thread, threads);
}

// Words of 32 and 64 bits. The instructions are spelt out because the runtime's own atomics of
// older toolkits have no order but relaxed.
__device__ __forceinline__ std::uint32_t load_acquire(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ std::uint64_t load_acquire(const std::uint64_t* word) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ void store_release(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ void add_release(std::uint32_t* word, std::uint32_t value) {
  asm volatile("red.release.sys.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ void add_release(std::uint64_t* word, std::uint64_t value) {
  asm volatile("red.release.sys.add.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
// Returns what the word held.
__device__ __forceinline__ std::uint64_t set_if_zero(std::uint64_t* word, std::uint64_t value) {
  std::uint64_t before;
  asm volatile("atom.acq_rel.sys.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(word), "l"(std::uint64_t{0}), "l"(value)
               : "memory");
  return before;
}

template <typename T>
struct Same {
  using Type = T;
};
template <typename W>
inline constexpr bool kIsFlag = false;
template <>
inline constexpr bool kIsFlag<std::uint32_t> = true;
template <>
inline constexpr bool kIsFlag<std::uint64_t> = true;

}  // namespace detail

// ------------------------------------------------------------------------------------------- put

// Copies bytes by a whole warp, or a whole block: all of its threads call it with the same
// arguments. `to` and `from` may not overlap, and may be at any address: vectors of 16 bytes move
// where both addresses leave the same rest modulo 16, words of 4 where they do modulo 4, otherwise
// bytes. `from` may be shared memory. Does not synchronise.
__device__ inline void put_warp(void* to, const void* from, std::size_t bytes) {
  detail::put(to, from, bytes, detail::thread_of_block() % 32, 32);
}
__device__ inline void put_block(void* to, const void* from, std::size_t bytes) {
  detail::put(to, from, bytes, detail::thread_of_block(), detail::threads_of_block());
}
// Stores a value by the thread that calls it.
template <typename T>
__device__ __forceinline__ void put_value(T* to, const typename detail::Same<T>::Type& value) {
  *to = value;
}

// ---------------------------------------------------------------------------------------- signal

// Flags are 32 or 64 bits, at a multiple of their size. Memory of a heap is 0 at first.
template <typename W>
__device__ __forceinline__ void signal(W* flag, typename detail::Same<W>::Type value) {
  static_assert(detail::kIsFlag<W>, "flags are std::uint32_t or std::uint64_t");
  detail::store_release(flag, value);
}
// Adds to a flag that several ranks, blocks or threads raise.
template <typename W>
__device__ __forceinline__ void signal_add(W* flag, typename detail::Same<W>::Type value) {
  static_assert(detail::kIsFlag<W>, "flags are std::uint32_t or std::uint64_t");
  detail::add_release(flag, value);
}
// Raises a flag after what all threads of the warp, or of the block, did before: all of them call
// it.
template <typename W>
__device__ __forceinline__ void signal_warp(W* flag, typename detail::Same<W>::Type value) {
  __syncwarp();
  if (detail::thread_of_block() % 32 == 0) signal(flag, value);
}
template <typename W>
__device__ __forceinline__ void signal_block(W* flag, typename detail::Same<W>::Type value) {
  __syncthreads();
  if (detail::thread_of_block() == 0) signal(flag, value);
}
// Like signal_block(), but adds: for a grid whose blocks all put something for one flag.
template <typename W>
__device__ __forceinline__ void signal_add_block(W* flag, typename detail::Same<W>::Type value) {
  __syncthreads();
  if (detail::thread_of_block() == 0) signal_add(flag, value);
}
template <typename W>
__device__ __forceinline__ W load(const W* flag) {
  static_assert(detail::kIsFlag<W>, "flags are std::uint32_t or std::uint64_t");
  return detail::load_acquire(flag);
}

// ------------------------------------------------------------------------------------------ wait

// True if the heap is dead. `*rank`, if given, is then the rank at fault.
__device__ inline bool aborted(const PeerMap& map, std::int32_t* rank = nullptr) {
  const std::uint64_t word = detail::load_acquire(&control_of(map, map.rank)->abort);
  if (word == 0) return false;
  if (rank != nullptr) {
    const auto by = static_cast<std::int32_t>(word & (PeerControl::kCalledOff - 1)) - 1;
    *rank = (word & PeerControl::kCalledOff) != 0 ? by : control_of(map, by)->failure.peer;
  }
  return true;
}

// Waits, in the thread that calls it, until the flag, which is in this rank's memory and which
// `peer` raises, has the value. Returns the outcome, which is false if the deadline passed or the
// heap is dead. Other ranks are not told: see give_up(). `deadline_ns` counts from the call, by the
// GPU's global timer; 0 looks once.
template <typename W>
[[nodiscard]] __device__ inline PeerWait wait_until(const PeerMap& map, const W* flag,
                                                    typename detail::Same<W>::Type value, int peer,
                                                    Until until = Until::kAtLeast,
                                                    std::uint64_t deadline_ns = kDeadlineOfMap) {
  static_assert(detail::kIsFlag<W>, "flags are std::uint32_t or std::uint64_t");
  constexpr W kHalf = W{1} << (8 * sizeof(W) - 1);
  PeerWait wait{PeerWait::State::kReady, peer, 0, value, 0, 0};
  wait.flag = reinterpret_cast<std::uintptr_t>(flag) -
              reinterpret_cast<std::uintptr_t>(map.bases[map.rank]);
  if (deadline_ns == kDeadlineOfMap) deadline_ns = map.deadline_ns;
  std::uint64_t start = 0;
#pragma unroll 1
  for (std::uint32_t looks = 0;; ++looks) {
    const W seen = load(flag);
    const W ahead = seen - value;
    wait.seen = seen;
    if (until == Until::kEqual ? ahead == 0 : ahead < kHalf) return wait;
    // A look at the abort word costs as much as a look at the flag.
    if (looks % 32 != 0) continue;
    if (aborted(map, &wait.rank)) {
      wait.state = PeerWait::State::kAborted;
      return wait;
    }
    const std::uint64_t now = detail::now_ns();
    if (looks == 0) start = now;
    wait.waited_ns = now - start;
    if (wait.waited_ns >= deadline_ns) {
      wait.state = PeerWait::State::kTimeout;
      return wait;
    }
    // After so many looks the flag is not imminent: leave the memory to others.
    if (looks >= 1024) __nanosleep(256);
  }
}
// The same for a whole block: all of its threads call it with the same arguments, one of them
// waits, and all get the answer.
template <typename W>
[[nodiscard]] __device__ inline PeerWait wait_until_block(
    const PeerMap& map, const W* flag, typename detail::Same<W>::Type value, int peer,
    Until until = Until::kAtLeast, std::uint64_t deadline_ns = kDeadlineOfMap) {
  __shared__ PeerWait shared;
  if (detail::thread_of_block() == 0) {
    shared = wait_until(map, flag, value, peer, until, deadline_ns);
  }
  __syncthreads();
  const PeerWait wait = shared;
  __syncthreads();  // The next call overwrites it.
  return wait;
}

// Ends all waits of all ranks, now and later, because of a wait that failed. SymmetricHeap::check()
// then throws on every rank and names wait.rank. If several ranks give up, all report the first.
__device__ inline void give_up(const PeerMap& map, const PeerWait& wait) {
  if (wait.state != PeerWait::State::kTimeout) return;  // whoever ended the heap has told all ranks
  PeerControl& mine = *control_of(map, map.rank);
  // Other threads of this rank may be here: one record is enough.
  if (detail::set_if_zero(&mine.claim, 1) != 0) return;
  mine.failure = {map.rank, wait.rank, wait.flag, wait.expected, wait.seen, wait.waited_ns};
  // Releases the record; where another rank was first, acquires its record for those told below.
  const std::uint64_t own = static_cast<std::uint64_t>(map.rank) + 1;
  std::uint64_t verdict = detail::set_if_zero(&control_of(map, 0)->verdict, own);
  if (verdict == 0) verdict = own;
#pragma unroll 1
  for (int r = 0; r < map.size; ++r) {
    // The first failure that ended a rank stays.
    (void)detail::set_if_zero(&control_of(map, r)->abort, verdict);
  }
}
// give_up() by one thread of a block. All threads of the block call it.
__device__ inline void give_up_block(const PeerMap& map, const PeerWait& wait) {
  if (detail::thread_of_block() == 0) give_up(map, wait);
}

}  // namespace switchyard::device
