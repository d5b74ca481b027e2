// Loads, stores, atomics and fences that C++ cannot express.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda/atomic>

namespace switchyard::gpu {

// --- Words shared by the blocks of one GPU. GPU scope suffices: other GPUs never look at them.

__device__ __forceinline__ std::uint32_t load_acquire_gpu(const std::uint32_t* word) {
  return cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device>(
             *const_cast<std::uint32_t*>(word))
      .load(cuda::memory_order_acquire);
}
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Adds with release order: after all writes of this thread, and after those of its block before the
// last block barrier that this thread passed.
__device__ __forceinline__ void add_release_gpu(std::uint32_t* word, std::uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
// Adds with release order like add_release_gpu() and returns the word's earlier value. A thread
// that does not use the result does not wait for it. A thread that uses it, and then reads what
// others released with their additions, needs a fence in between.
__device__ __forceinline__ std::uint32_t fetch_add_released_gpu(std::uint32_t* word,
                                                                std::uint32_t value) {
  std::uint32_t before;
  fence_gpu();
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(value)
               : "memory");
  return before;
}

// --- Words that ranks exchange.

// Orders this thread's earlier reads and writes before any flag it raises later.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Two words at a 16-byte boundary. Each word is read and written whole; the pair need not be.
struct WordPair {
  std::uint64_t first, second;
};
__device__ __forceinline__ void store_words(std::uint64_t* to, const WordPair& words) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(words.first),
               "l"(words.second)
               : "memory");
}
__device__ __forceinline__ WordPair load_words(const std::uint64_t* from) {
  WordPair words;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(words.first), "=l"(words.second)
               : "l"(from)
               : "memory");
  return words;
}

// --- The copy engine and the matrix unit read through the async proxy. These fences let them see
// what threads wrote with ordinary stores, and acquired from others.

__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async;" ::: "memory");
}
// Does the same for shared memory only.
__device__ __forceinline__ void fence_async_proxy_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- Vectors of 16 bytes.

// Stores a vector with one instruction. The compiler makes four of an assignment whose value comes
// out of inline assembly.
__device__ __forceinline__ void store_vector(void* to, const uint4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
// Loads a vector; returns zeros unless `valid`.
__device__ __forceinline__ uint4 load_vector(const std::uint16_t* from, bool valid) {
  return valid ? __ldg(reinterpret_cast<const uint4*>(from)) : uint4{0, 0, 0, 0};
}

// --- Shared memory by its 32-bit addresses.

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ void store_shared_vector(std::uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint4 load_shared_vector(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_float(std::uint32_t address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ float load_shared_float(std::uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ float2 load_shared_floats(std::uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_word(std::uint32_t address, std::uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

// --- Asynchronous copies by one thread from device to shared memory.

// Copies 16 bytes, bypassing the L1 cache.
__device__ __forceinline__ void copy_async(std::uint32_t to, const std::byte* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Copies if `valid`, else writes zeros.
__device__ __forceinline__ void copy_async(std::uint32_t to, const std::byte* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_word_async(std::uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_two_words_async(std::uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
// Makes a group of this thread's copies since the last group.
__device__ __forceinline__ void end_copy_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits for all groups but the newest kMostPending.
template <int kMostPending>
__device__ __forceinline__ void await_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kMostPending) : "memory");
}
// Waits for this thread's copies.
__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace switchyard::gpu
