// An owned range of virtual memory.
#pragma once

#include <cstddef>

namespace switchyard {

// Zero-filled, readable and writable, committed page by page when touched, aligned to 2 MiB so that
// the kernel may back it with huge pages where the host's policy says so.
class Mapping {
 public:
  // Memory of this process. Throws Error{kCapacityExceeded}.
  static Mapping anonymous(std::size_t bytes);
  // All `bytes` of a memory file whose size nobody can change, shared with whoever else maps it;
  // the descriptor may be closed afterwards. Throws Error{kCapacityExceeded}, and Error{kSystem} if
  // the file has another size or lacks the seals: it may be a peer's, and touching memory that a
  // file no longer has would end this process.
  static Mapping of_file(int fd, std::size_t bytes);
  // Of fcntl(F_ADD_SEALS).
  static const int kSeals;

  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  std::byte* data() const { return data_; }

 private:
  static Mapping map(std::size_t bytes, int flags, int fd);
  Mapping(std::byte* data, std::size_t bytes) : data_(data), bytes_(bytes) {}

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace switchyard
