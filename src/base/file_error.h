// Errors of system calls on files.
#pragma once

#include <filesystem>

namespace switchyard {

// Throws Error{kSystem} for the errno that `call` on the file has just set, with the remedy for
// that errno.
[[noreturn]] void throw_file_error(const std::filesystem::path& path, const char* call);

}  // namespace switchyard
