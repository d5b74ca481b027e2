// Atomic access to words that other threads, processes or GPUs read and write.
//
// Everything shared in the symmetric heap is a plain word accessed through these functions, so the
// heap has one layout whoever maps it. All of them act at system scope.
#pragma once

#include <cstdint>

#include "base/host_device.h"

#if defined(__CUDACC__)
#include <cuda/atomic>
#else
#include <atomic>
#endif

namespace switchyard::protocol {

#if defined(__CUDACC__)
template <typename T>
using SystemAtomic = cuda::atomic_ref<T, cuda::thread_scope_system>;
namespace order = cuda;
#else
template <typename T>
using SystemAtomic = std::atomic_ref<T>;
namespace order = std;
#endif

template <typename T>
SWITCHYARD_HOST_DEVICE T load_acquire(const T* word) {
  return SystemAtomic<T>(*const_cast<T*>(word)).load(order::memory_order_acquire);
}

template <typename T>
SWITCHYARD_HOST_DEVICE T load_relaxed(const T* word) {
  return SystemAtomic<T>(*const_cast<T*>(word)).load(order::memory_order_relaxed);
}

template <typename T>
SWITCHYARD_HOST_DEVICE void store_release(T* word, T value) {
  SystemAtomic<T>(*word).store(value, order::memory_order_release);
}

template <typename T>
SWITCHYARD_HOST_DEVICE void store_relaxed(T* word, T value) {
  SystemAtomic<T>(*word).store(value, order::memory_order_relaxed);
}

// Returns the value before the addition. It is acquire and release: whoever brings a counter to its
// last value sees everything the other contributors wrote, and passes it on with its next release.
template <typename T>
SWITCHYARD_HOST_DEVICE T fetch_add(T* word, T value) {
  return SystemAtomic<T>(*word).fetch_add(value, order::memory_order_acq_rel);
}

// Stores `desired` in `word` if it holds `expected`. Returns what the word held.
template <typename T>
SWITCHYARD_HOST_DEVICE T compare_exchange(T* word, T expected, T desired) {
  SystemAtomic<T>(*word).compare_exchange_strong(expected, desired, order::memory_order_acq_rel);
  return expected;
}

}  // namespace switchyard::protocol
