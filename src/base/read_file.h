// Reads files of unknown origin, which may turn out not to be regular files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "base/unique_fd.h"

namespace switchyard {

// True if nothing has this name. False for a dangling link, and if the name cannot be looked up.
bool is_absent(const std::filesystem::path& path);

struct InputFile {
  UniqueFd fd;
  std::uint64_t bytes = 0;
  std::uint64_t device = 0, inode = 0;  // together they identify the file
};

// Opens a regular file for reading. Refuses everything else without waiting for it: a pipe without
// a writer would block for ever. Throws Error{kSystem, kInvalidFile}.
InputFile open_input(const std::filesystem::path& path);

// The contents of a regular file. Throws what open_input() does, and Error{kInvalidFile} for more
// than `most_bytes`.
std::string read_text(const std::filesystem::path& path, std::uint64_t most_bytes);

// Does the same for a file that a user named. Throws Error{kInvalidFile} if nothing has this name.
std::string read_named(const std::filesystem::path& path, std::uint64_t most_bytes);

}  // namespace switchyard
