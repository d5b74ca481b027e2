// Files that a command writes.
#pragma once

#include <filesystem>
#include <span>
#include <string>

namespace switchyard::cli {

// Where the file that `option` names is to be written: where symbolic links lead. Throws
// Error{kInvalidArgument} where something else than a file is, or no file can be made, or where it
// is one of the files `inputs`, or in the directory `checkpoint`. Either may be "": there is none.
std::filesystem::path output_file(const char* option, const std::filesystem::path& path,
                                  std::span<const std::string> inputs = {},
                                  const std::string& checkpoint = "");

}  // namespace switchyard::cli
