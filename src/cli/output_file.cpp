#include "cli/output_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>

#include "fabric/posix.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse_output(const char* option, const fs::path& path,
                                const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} is '{}', {}", option, path.string(), problem));
}

// Of this process alone: another may be writing the same file.
fs::path partial_of(const fs::path& path) {
  return path.string() + fmt::format(".partial-{}", ::getpid());
}

}  // namespace

fs::path output_file(const char* option, const fs::path& path,
                     std::span<const std::string> inputs) {
  std::error_code ignored;
  const fs::file_status status = fs::status(path, ignored);
  if (fs::is_directory(status)) {
    refuse_output(option, path, "which is a directory; name a file in it");
  }
  if (fs::is_other(status)) {
    refuse_output(option, path, "which is a pipe, a socket or a device; name a file");
  }
  fs::path target = fs::absolute(path);
  constexpr int kMostLinks = 40;  // as the kernel follows
  for (int links = 0; fs::is_symlink(fs::symlink_status(target, ignored)); ++links) {
    if (links == kMostLinks) refuse_output(option, path, "a link that ends nowhere; name a file");
    target = target.parent_path() / fs::read_symlink(target);
  }
  if (!fs::is_directory(target.parent_path(), ignored)) {
    refuse_output(option, path,
                  fmt::format("but there is no directory '{}'; make it first",
                              target.parent_path().string()));
  }
  for (const std::string& input : inputs) {
    std::error_code absent;  // the input's reader says so
    if (fs::equivalent(input, target, absent) ||
        fs::equivalent(input, target.parent_path(), absent)) {
      refuse_output(option, path, "which is also read; name another file");
    }
  }
  const fs::path partial = partial_of(target);
  if (!UniqueFd(::open(partial.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666))) {
    refuse_output(
        option, path,
        fmt::format("but no file can be made there: {}; choose another place", errno_text(errno)));
  }
  fs::remove(partial, ignored);
  return target;
}

void write_whole(const char* option, const fs::path& path, std::string_view text) {
  const fs::path partial = partial_of(path);
  std::FILE* const file = std::fopen(partial.c_str(), "we");
  bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (file != nullptr) written = std::fclose(file) == 0 && written;
  if (written && std::rename(partial.c_str(), path.c_str()) == 0) return;
  const int error_number = errno;
  std::error_code ignored;
  fs::remove(partial, ignored);
  throw Error(ErrorCode::kSystem, fmt::format("cannot write {}: {}; check {} and the disk",
                                              path.string(), errno_text(error_number), option));
}

}  // namespace switchyard::cli
