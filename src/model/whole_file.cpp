#include "model/whole_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "switchyard/error.h"

namespace switchyard {

void throw_file_error(const std::filesystem::path& path, const char* call) {
  const int code = errno;
  const char* remedy = code == ENOENT   ? "check the path"
                       : code == EACCES ? "check the permissions"
                       : code == ENOSPC ? "free some disk space"
                       : code == EMFILE ? "raise the limit on open files (ulimit -n)"
                                        : "check the file system";
  throw Error(ErrorCode::kSystem, fmt::format("{}: {} failed: {}; {}", path.string(), call,
                                              std::strerror(code), remedy));
}

// Of this process alone: another may be writing the same file.
WholeFile::WholeFile(const std::filesystem::path& path)
    : path_(path),
      partial_(path.string() + fmt::format(".partial-{}", ::getpid())),
      fd_(::open(partial_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) {
  if (fd_ < 0) throw_file_error(path_, "open");
}

WholeFile::~WholeFile() { discard(); }

void WholeFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    // Linux writes at most 2 GiB per call.
    const ssize_t written =
        ::write(fd_, bytes.data(), std::min<std::size_t>(bytes.size(), 1u << 30));
    if (written < 0) {
      if (errno == EINTR) continue;
      fail("write");
    }
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void WholeFile::finish() {
  if (::close(std::exchange(fd_, -1)) != 0) fail("close");
  if (::rename(partial_.c_str(), path_.c_str()) != 0) fail("rename");
  partial_.clear();
}

void WholeFile::fail(const char* call) {
  const int code = errno;
  discard();
  errno = code;
  throw_file_error(path_, call);
}

void WholeFile::discard() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  if (!partial_.empty()) ::unlink(partial_.c_str());
  partial_.clear();
}

void write_whole(const std::filesystem::path& path, std::string_view text) {
  WholeFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.finish();
}

}  // namespace switchyard
