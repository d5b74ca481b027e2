#include "base/read_file.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/file_error.h"
#include "base/printable.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

void require_regular(const std::filesystem::path& path, const struct stat& status) {
  if (S_ISREG(status.st_mode)) return;
  const bool directory = S_ISDIR(status.st_mode);
  const char* const kind = directory                  ? "directory"
                           : S_ISFIFO(status.st_mode) ? "pipe"
                           : S_ISSOCK(status.st_mode) ? "socket"
                                                      : "device";
  throw Error(ErrorCode::kInvalidFile,
              fmt::format("{}: is a {}, not a regular file; {}", printable(path), kind,
                          directory ? "put the file in its place, or name another"
                                    : "save its contents as a file first"));
}

[[noreturn]] void too_large(const std::filesystem::path& path, std::uint64_t most_bytes) {
  throw Error(ErrorCode::kInvalidFile,
              fmt::format("{}: has more than the {} bytes that are read of such a file; it is not "
                          "what its name says, replace it",
                          printable(path), most_bytes));
}

}  // namespace

bool is_absent(const std::filesystem::path& path) {
  struct stat status = {};
  return ::lstat(path.c_str(), &status) != 0 && (errno == ENOENT || errno == ENOTDIR);
}

InputFile open_input(const std::filesystem::path& path) {
  struct stat status = {};
  // The first look is before opening: opening a device may already do something.
  if (::stat(path.c_str(), &status) != 0) {
    if (errno == ENOENT && !is_absent(path)) {
      throw Error(ErrorCode::kInvalidFile,
                  fmt::format("{}: is a symbolic link to a file that is not there; download that "
                              "file, or correct the link",
                              printable(path)));
    }
    throw_file_error(path, "open");
  }
  require_regular(path, status);
  InputFile file;
  // Opening must not block: a pipe may have taken the file's place since.
  file.fd = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file.fd) throw_file_error(path, "open");
  if (::fstat(file.fd.get(), &status) != 0) throw_file_error(path, "stat");
  require_regular(path, status);
  file.bytes = static_cast<std::uint64_t>(status.st_size);
  file.device = status.st_dev;
  file.inode = status.st_ino;
  return file;
}

std::string read_text(const std::filesystem::path& path, std::uint64_t most_bytes) {
  const InputFile file = open_input(path);
  if (file.bytes > most_bytes) too_large(path, most_bytes);
  std::string text;
  // One byte more gives the read that meets the end some room.
  text.resize(static_cast<std::size_t>(file.bytes) + 1);
  std::size_t size = 0;
  for (;;) {
    const ssize_t got = ::read(file.fd.get(), text.data() + size, text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_file_error(path, "read");
    if (got == 0) break;
    size += static_cast<std::size_t>(got);
    if (size > most_bytes) too_large(path, most_bytes);
    // The file grows, or its file system tells no sizes, as /proc does.
    if (size == text.size()) text.resize(2 * size);
  }
  text.resize(size);
  return text;
}

std::string read_named(const std::filesystem::path& path, std::uint64_t most_bytes) {
  if (is_absent(path)) {
    throw Error(ErrorCode::kInvalidFile,
                fmt::format("there is no file {}; check its name", printable(path)));
  }
  return read_text(path, most_bytes);
}

}  // namespace switchyard
