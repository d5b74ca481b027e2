#include "base/whole_file.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "base/file_error.h"

namespace switchyard {

std::filesystem::path make_beside(const std::filesystem::path& path, const char* call,
                                  const std::function<int(const std::filesystem::path&)>& make) {
  constexpr int kMostNames = 100;
  for (int i = 0;; ++i) {
    std::uint64_t chance = 0;
    if (::getentropy(&chance, sizeof chance) != 0) throw_file_error(path, "getentropy");
    std::filesystem::path name = path;
    name += fmt::format(".partial-{:016x}", chance);
    errno = make(name);
    if (errno == 0) return name;
    if (errno != EEXIST || i == kMostNames) throw_file_error(path, call);
  }
}

WholeFile::WholeFile(const std::filesystem::path& path) : path_(path) {
  // O_EXCL refuses whatever is there, symbolic links included; O_NOFOLLOW says so again.
  constexpr int kNew = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  partial_ = make_beside(path, "open", [this](const std::filesystem::path& name) {
    fd_ = UniqueFd(::open(name.c_str(), kNew, 0666));
    return fd_ ? 0 : errno;
  });
}

WholeFile::~WholeFile() { discard(); }

void WholeFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    // Linux writes at most 2 GiB per call.
    const ssize_t written =
        ::write(fd_.get(), bytes.data(), std::min<std::size_t>(bytes.size(), 1u << 30));
    if (written < 0) {
      if (errno == EINTR) continue;
      fail("write");
    }
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void WholeFile::finish() {
  if (::close(fd_.release()) != 0) fail("close");
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
  fd_.reset();
  if (!partial_.empty()) ::unlink(partial_.c_str());
  partial_.clear();
}

void write_whole(const std::filesystem::path& path, std::string_view text) {
  WholeFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.finish();
}

}  // namespace switchyard
