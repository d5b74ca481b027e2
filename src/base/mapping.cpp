#include "base/mapping.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <limits>
#include <utility>

#include "base/posix.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

// The size of a huge page on x86-64 and, with 4 KiB base pages, on AArch64.
constexpr std::size_t kAlignment = std::size_t{2} << 20;

constexpr int kReadWrite = PROT_READ | PROT_WRITE;

[[noreturn]] void throw_no_memory(std::size_t bytes, int error_number, const char* remedy) {
  throw Error(ErrorCode::kCapacityExceeded, fmt::format("cannot map {} bytes of memory: {}; {}",
                                                        bytes, errno_text(error_number), remedy));
}

std::size_t whole_pages(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

}  // namespace

Mapping Mapping::anonymous(std::size_t bytes, const char* remedy) {
  return bytes == 0 ? Mapping() : map(bytes, kReadWrite, MAP_PRIVATE | MAP_ANONYMOUS, -1, remedy);
}

Mapping Mapping::reserved(std::size_t bytes, std::size_t usable) {
  Mapping memory = map(bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  if (::mprotect(memory.data_, whole_pages(std::min(usable, bytes)), kReadWrite) != 0) {
    throw_no_memory(bytes, errno, kFewerBytes);
  }
  return memory;
}

const int Mapping::kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

Mapping Mapping::of_file(int fd, std::size_t bytes) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 && errno != EINVAL) throw_errno("cannot read the seals of a shared memory file");
  if (seals < 0 || (seals & kSeals) != kSeals) {
    throw Error(ErrorCode::kSystem,
                "the descriptor is not of a memory file whose size is sealed; use one build of "
                "Switchyard for all ranks");
  }
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw_errno("cannot read the size of a shared memory file");
  if (static_cast<std::uint64_t>(status.st_size) != bytes) {
    throw Error(ErrorCode::kSystem,
                fmt::format("the shared memory file has {} bytes, not the {} that were agreed; use "
                            "one build of Switchyard for all ranks",
                            status.st_size, bytes));
  }
  return map(bytes, kReadWrite, MAP_SHARED, fd);
}

Mapping Mapping::map(std::size_t bytes, int protection, int flags, int fd, const char* remedy) {
  if (bytes > std::numeric_limits<std::size_t>::max() - 2 * kAlignment) {
    throw_no_memory(bytes, ENOMEM, remedy);
  }
  const std::size_t length = whole_pages(bytes);

  // mmap aligns to pages only. Reserve enough to contain an aligned range, place the real mapping
  // over it, give the rest back.
  const std::size_t reserved_length = length + kAlignment;
  void* const reserved = ::mmap(nullptr, reserved_length, PROT_NONE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) throw_no_memory(bytes, errno, remedy);
  std::byte* const begin = static_cast<std::byte*>(reserved);
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(begin) % kAlignment;
  const std::size_t head = misaligned == 0 ? 0 : kAlignment - misaligned;
  std::byte* const data = begin + head;
  if (::mmap(data, length, protection, flags | MAP_NORESERVE | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int error_number = errno;
    ::munmap(reserved, reserved_length);
    throw_no_memory(bytes, error_number, remedy);
  }
  if (head != 0) ::munmap(begin, head);
  ::munmap(data + length, kAlignment - head);
  return Mapping(data, bytes);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

}  // namespace switchyard
