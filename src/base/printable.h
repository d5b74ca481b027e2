// Text from outside (files, arguments, the environment) made safe to show in a message.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>

namespace switchyard {

// The longest name that messages show whole. A path in a model cache has 200 bytes, a file's name
// up to 255.
inline constexpr std::size_t kMostShown = 512;

// The start of a text, as it may be shown: one character, or the escape that stands for it.
struct ShownCharacter {
  std::array<char, 12> bytes;
  std::size_t size = 0;      // of `bytes`
  std::size_t consumed = 0;  // bytes of the text
  std::string_view view() const { return {bytes.data(), size}; }
};

// Returns the first character of `text`, which must not be empty, or its escape. It escapes control
// characters, which a terminal obeys; line breaks, which would let a name forge a line of its own;
// invisible characters and those that change the direction of text, which would let it look like
// another; and bytes that are not UTF-8. Examples: \n, \x1b, \u{202e}. A backslash stays as it is,
// so escaping twice is the same as escaping once. Allocates nothing: signal handlers may call it.
ShownCharacter show_character(std::string_view text);

// Returns `text` with every character as show_character() gives it, in at most `most` bytes (at
// least 64). If it is longer, its middle is replaced by a note of how many bytes the text has.
std::string printable(std::string_view text, std::size_t most = kMostShown);
template <std::same_as<std::filesystem::path> Path>  // not for types that convert to a path
std::string printable(const Path& path) {
  return printable(std::string_view(path.native()));
}

}  // namespace switchyard
