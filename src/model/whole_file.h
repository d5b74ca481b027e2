// A file that appears whole or not at all.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

namespace switchyard {

// Throws Error{kSystem} for the current errno, which `call` has left for the file.
[[noreturn]] void throw_file_error(const std::filesystem::path& path, const char* call);

// Makes or replaces `path` in finish(); until then its bytes are in a file beside it, which goes if
// there is no finish(). Errors are Error{kSystem}.
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
  int fd_ = -1;
};

// One of this text.
void write_whole(const std::filesystem::path& path, std::string_view text);

}  // namespace switchyard
