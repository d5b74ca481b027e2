// Files that a command writes.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace switchyard::cli {

// Where the file that `option` names is to be written: where symbolic links lead. Throws
// Error{kInvalidArgument} where something else than a file is, or no file can be made, or where it
// is one of `inputs`, or in one that is a directory.
std::filesystem::path output_file(const char* option, const std::filesystem::path& path,
                                  std::span<const std::string> inputs = {});

// Makes or replaces the file, which appears whole or not at all. Throws Error{kSystem}.
void write_whole(const std::filesystem::path& path, std::string_view text);

}  // namespace switchyard::cli
