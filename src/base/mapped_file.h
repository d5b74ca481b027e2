// Files that are mapped for reading, and may be cut while they are.
//
// Reading a page that a file no longer has raises SIGBUS, which would end the process. So the first
// file that is mapped installs a handler. For a fault inside one of these mappings it puts zero
// pages there and marks the file, and the thread goes on; whoever reads the file asks afterwards
// whether it is whole, and throws away what was made of zeros. The handler gives every other SIGBUS
// to the handler that was there before.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>

namespace switchyard {

struct MappingSlot;

// A file mapped read-only and shared. Safe to use from many threads.
class MappedFile : public std::enable_shared_from_this<MappedFile> {
 public:
  // Throws Error{kSystem, kInvalidFile}.
  static std::shared_ptr<const MappedFile> map(const std::filesystem::path& path);
  // The mapping that an address lies in, or null.
  static std::shared_ptr<const MappedFile> at(const void* address);
  // Asks all files that are mapped, for programs that cannot name those that they read.
  static void require_all_whole();
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  const std::byte* data() const { return data_; }  // null if the file is empty
  std::size_t size() const { return size_; }

  // Throws Error{kInvalidFile} if the file has become shorter since it was mapped. Makes no system
  // call. It sees faults and, once require_size() was called, any cut that takes something away.
  // Call it after reading.
  void require_whole() const {
    if (!is_whole()) throw_cut();
  }
  bool is_whole() const;
  // Does the same with a look at the file's size. Call it before reading many bytes.
  void require_size() const;

 private:
  MappedFile() = default;
  [[noreturn]] void throw_cut() const;
  void set_probe() const;

  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  std::uint64_t device_ = 0, inode_ = 0;
  MappingSlot* slot_ = nullptr;
  // A cut inside a page raises no signal: the rest of the page reads as zeros. So the last byte
  // that is not zero is looked at, too. Null until require_size() has chosen it.
  mutable std::once_flag probe_once_;
  mutable std::atomic<const volatile std::byte*> probe_{nullptr};
  mutable std::byte probe_value_{};
};

}  // namespace switchyard
