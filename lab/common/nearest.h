// Names that look like one that is not known, for messages.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard {

// The `count` of `names` that need the fewest letters changed, added or dropped, the nearest first.
std::vector<std::string> nearest(std::string_view wanted, std::span<const std::string> names,
                                 std::size_t count);
// The nearest one, if it is near enough to be a misspelling; else empty.
std::string likely_name(std::string_view wanted, std::span<const std::string> names);

}  // namespace switchyard
