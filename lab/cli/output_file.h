// Chooses where a command writes its files.
#pragma once

#include <filesystem>
#include <span>
#include <string>

namespace switchyard::cli {

// Returns where to write the file that `option` names: the path with symbolic links resolved.
// Throws Error{kInvalidArgument} if something other than a file is there, if no file can be made,
// if it is one of the files `inputs`, if it was returned for another option, or if it is in the
// directory `checkpoint`. An input or a checkpoint that is "" is ignored.
std::filesystem::path output_file(const char* option, const std::filesystem::path& path,
                                  std::span<const std::string> inputs = {},
                                  const std::string& checkpoint = "");

}  // namespace switchyard::cli
