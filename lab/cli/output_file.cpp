#include "cli/output_file.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <system_error>

#include "base/printable.h"
#include "base/whole_file.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse_output(const char* option, const fs::path& path,
                                const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} is '{}', {}", option, printable(path), problem));
}

// Refuses a file that another option of this command writes.
void require_own(const char* option, const fs::path& path, const fs::path& target) {
  static std::map<fs::path, std::string> options;
  std::error_code ignored;
  const fs::path file = fs::canonical(target.parent_path(), ignored) / target.filename();
  const std::string& first = options.try_emplace(file, option).first->second;
  if (first != option) {
    refuse_output(option, path, fmt::format("which {} names, too; name another file", first));
  }
}

}  // namespace

fs::path output_file(const char* option, const fs::path& path, std::span<const std::string> inputs,
                     const std::string& checkpoint) {
  std::error_code ignored;
  const fs::file_status status = fs::status(path, ignored);
  if (fs::is_directory(status)) {
    refuse_output(option, path, "which is a directory; name a file in it");
  }
  if (fs::is_other(status)) {
    refuse_output(option, path, "which is a pipe, a socket or a device; name a file");
  }
  fs::path target = fs::absolute(path);
  constexpr int kMostLinks = 40;  // as many as the kernel follows
  for (int links = 0; fs::is_symlink(fs::symlink_status(target, ignored)); ++links) {
    const fs::path next = fs::read_symlink(target, ignored);
    if (next.empty() || links == kMostLinks) {
      refuse_output(option, path, "a link that ends nowhere; name a file");
    }
    target = target.parent_path() / next;
  }
  if (!fs::is_directory(target.parent_path(), ignored)) {
    refuse_output(option, path,
                  fmt::format("but there is no directory '{}'; make it first",
                              printable(target.parent_path())));
  }
  // Returns false if a file is absent. The code that reads the file reports that.
  const auto same = [&ignored](const fs::path& a, const fs::path& b) {
    return fs::equivalent(a, b, ignored);
  };
  if (std::any_of(inputs.begin(), inputs.end(),
                  [&](const std::string& input) { return same(input, target); })) {
    refuse_output(option, path, "which is also read; name another file");
  }
  // This also refuses a file that does not exist yet: it could pass for a shard of the checkpoint.
  if (same(checkpoint, target.parent_path())) {
    refuse_output(option, path,
                  "which is in the checkpoint's directory, where it could pass for a part of the "
                  "checkpoint; name a file in another directory");
  }
  require_own(option, path, target);
  try {
    (void)WholeFile(target);
  } catch (const Error& e) {
    refuse_output(option, path, fmt::format("but no file can be made there: {}", e.what()));
  }
  return target;
}

}  // namespace switchyard::cli
