// Errors of system calls on files.
#pragma once

#include <filesystem>

namespace switchyard {

// Throws Error{kSystem} for the current errno, which `call` has left for the file, with the remedy
// for that errno.
[[noreturn]] void throw_file_error(const std::filesystem::path& path, const char* call);

}  // namespace switchyard
