// Files and directories that appear whole or not at all.
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

// Makes something new beside `path` under a temporary name: calls `make` with names that nobody can
// guess, until it returns anything but EEXIST. Returns the name. Throws Error{kSystem} of `path`
// and `call` for any other errno that `make` returns than 0.
std::filesystem::path make_beside(const std::filesystem::path& path, const char* call,
                                  const std::function<int(const std::filesystem::path&)>& make);

// One of this text.
void write_whole(const std::filesystem::path& path, std::string_view text);

}  // namespace switchyard
