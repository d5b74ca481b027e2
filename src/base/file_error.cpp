#include "base/file_error.h"

#include <fmt/core.h>

#include <cerrno>
#include <cstring>

#include "base/printable.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

const char* remedy_for(int code) {
  switch (code) {
    case ENOENT:
    case ENOTDIR: return "check the path";
    case EISDIR: return "name a file";
    case ENAMETOOLONG: return "shorten the path";
    case ELOOP: return "make the symbolic link lead to a file; it leads back to itself";
    case EACCES:
    case EPERM: return "check the permissions of the file and of the directories above it";
    case ENOSPC:
    case EDQUOT: return "free some disk space";
    case EROFS: return "choose a file system that can be written";
    case EMFILE:
    case ENFILE: return "raise the limit on open files (ulimit -n)";
    case ENOMEM:
      return "free some memory, or raise the limit on address space (ulimit -v) or on mappings "
             "(vm.max_map_count)";
    case ENODEV: return "copy it to a file system that can map files into memory";
    case EIO:
    case ESTALE: return "check the disk or the network file system";
    default: return "check the file system";
  }
}

}  // namespace

void throw_file_error(const std::filesystem::path& path, const char* call) {
  const int code = errno;
  char buffer[128];
  throw Error(ErrorCode::kSystem,
              fmt::format("{}: {} failed: {}; {}", printable(path), call,
                          ::strerror_r(code, buffer, sizeof buffer), remedy_for(code)));
}

}  // namespace switchyard
