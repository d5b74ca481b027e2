// Places in a symmetric heap, without saying whose.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"

namespace switchyard::protocol {

// Elements at an offset that is the same in every rank's heap. Whoever has the heap mapped reads
// and writes at in(base); a transport without mapped memory needs only the rank and the offset.
template <typename T>
struct Region {
  std::uint64_t offset = 0;  // in bytes

  SWITCHYARD_HOST_DEVICE constexpr Region operator+(std::uint64_t elements) const {
    return {offset + elements * sizeof(T)};
  }
  // Returns the place `bytes` behind the start, for elements of another type.
  template <typename U>
  SWITCHYARD_HOST_DEVICE constexpr Region<U> as(std::uint64_t bytes = 0) const {
    return {offset + bytes};
  }
  SWITCHYARD_HOST_DEVICE T* in(std::byte* base) const {
    return reinterpret_cast<T*>(base + offset);
  }
};

}  // namespace switchyard::protocol
