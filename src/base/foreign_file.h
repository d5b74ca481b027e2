// Recognises files that are not what their names say, most often because a download went wrong.
#pragma once

#include <string>
#include <string_view>

namespace switchyard {

// Tells by its first bytes what such a file is and what to do, as "is a Git LFS pointer, ...".
// Empty if the contents are none of the known ones.
std::string foreign_contents(std::string_view begin);

}  // namespace switchyard
