// Files and directories that appear complete or not at all.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <span>
#include <string_view>

#include "base/unique_fd.h"

namespace switchyard {

// Makes or replaces `path` in finish(); until then its bytes are in a new file beside it, which is
// removed if there is no finish(). Other users who can write to the directory cannot redirect the
// bytes: if a file or a link already has the temporary name, it is left alone and another name is
// taken. Errors are Error{kSystem}.
class WholeFile {
 public:
  explicit WholeFile(const std::filesystem::path& path);
  ~WholeFile();
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void finish();

  const std::filesystem::path& path() const { return path_; }

 private:
  [[noreturn]] void fail(const char* call);
  void discard();

  std::filesystem::path path_, partial_;
  UniqueFd fd_;
};

// Makes something new beside `path` under a temporary name, and returns the name. It calls `make`
// with names that nobody can guess, until `make` returns anything but EEXIST. If that is an errno
// other than 0, it throws Error{kSystem} naming `path` and `call`.
std::filesystem::path make_beside(const std::filesystem::path& path, const char* call,
                                  const std::function<int(const std::filesystem::path&)>& make);

// Writes a whole file with this text.
void write_whole(const std::filesystem::path& path, std::string_view text);

}  // namespace switchyard
