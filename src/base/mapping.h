// An owned range of virtual memory.
#pragma once

#include <cstddef>

namespace switchyard {

// Memory that is zero-filled, readable and writable, and committed page by page when touched. It is
// aligned to 2 MiB so that the kernel may back it with huge pages where the host's policy says so.
class Mapping {
 public:
  // Maps memory of this process; none for 0 bytes. Throws Error{kCapacityExceeded} with `remedy`.
  static Mapping anonymous(std::size_t bytes, const char* remedy = kFewerBytes);
  // Reserves addresses of which only the first `usable` bytes are memory. A load or store behind
  // them ends the process. Throws Error{kCapacityExceeded}.
  static Mapping reserved(std::size_t bytes, std::size_t usable);
  // Maps all `bytes` of a memory file whose size nobody can change, shared with others that map it.
  // The descriptor may be closed afterwards. Throws Error{kCapacityExceeded}, and Error{kSystem} if
  // the file has another size or lacks the seals: it may be a peer's, and touching memory that a
  // file no longer has would end this process.
  static Mapping of_file(int fd, std::size_t bytes);
  // The seals to set with fcntl(F_ADD_SEALS).
  static const int kSeals;

  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  static constexpr const char* kFewerBytes =
      "ask for fewer bytes (a layer: fewer tokens), or raise `ulimit -v` or vm.overcommit_memory";
  static Mapping map(std::size_t bytes, int protection, int flags, int fd,
                     const char* remedy = kFewerBytes);
  Mapping(std::byte* data, std::size_t bytes) : data_(data), bytes_(bytes) {}

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace switchyard
