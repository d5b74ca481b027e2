// Private memory whose pages are allocated when they are first touched.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <string>
#include <utility>

#include "switchyard/error.h"

namespace switchyard::cpu {

class LazyBuffer {
 public:
  LazyBuffer() = default;
  explicit LazyBuffer(std::size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      throw Error(ErrorCode::kCapacityExceeded,
                  "cannot reserve " + std::to_string(bytes) +
                      " bytes of address space for intermediate activations; lower max_tokens");
    }
    data_ = static_cast<std::byte*>(memory);
  }
  ~LazyBuffer() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  LazyBuffer(LazyBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  LazyBuffer& operator=(LazyBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace switchyard::cpu
