#include "base/printable.h"

#include <fmt/core.h>

#include <algorithm>
#include <vector>

namespace switchyard {
namespace {

struct CodePoint {
  char32_t value = 0;
  std::size_t size = 0;  // bytes of UTF-8; 0: the text does not start with UTF-8
};

// Refuses what the Unicode standard (table 3-7) does: overlong forms, surrogates, numbers above
// U+10FFFF.
CodePoint decode(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const std::size_t size = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < size) return {};
  char32_t value = lead & (0xffu >> (size + 1));
  for (std::size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0u) != 0x80u) return {};
    value = value << 6 | (byte(i) & 0x3fu);
  }
  constexpr std::array<char32_t, 5> kSmallest = {0, 0, 0x80, 0x800, 0x10000};
  if (value < kSmallest[size] || value > 0x10ffff || (value >= 0xd800 && value <= 0xdfff)) {
    return {};
  }
  return {value, size};
}

bool must_be_escaped(char32_t c) {
  struct Range {
    char32_t first, last;
  };
  constexpr Range kRanges[] = {
      {0x00, 0x1f},        // control characters
      {0x7f, 0x9f},        // delete; the C1 control characters, of which U+009B starts a command
      {0xad, 0xad},        // soft hyphen
      {0x61c, 0x61c},      // Arabic letter mark
      {0x115f, 0x1160},    // Hangul fillers
      {0x180e, 0x180e},    // Mongolian vowel separator
      {0x200b, 0x200f},    // zero width, and marks of direction
      {0x2028, 0x202e},    // separators of lines and paragraphs; embeddings, overrides
      {0x2060, 0x206f},    // word joiner, invisible operators, isolates
      {0x3164, 0x3164},    // Hangul filler
      {0xfeff, 0xfeff},    // byte order mark
      {0xfff9, 0xfffb},    // interlinear annotation
      {0xe0000, 0xe0fff},  // tags and variation selectors
  };
  return std::any_of(std::begin(kRanges), std::end(kRanges),
                     [c](const Range& range) { return c >= range.first && c <= range.last; });
}

constexpr char kHexDigits[] = "0123456789abcdef";

void put(ShownCharacter& shown, char c) { shown.bytes[shown.size++] = c; }

void put_byte(ShownCharacter& shown, unsigned value) {
  put(shown, '\\');
  put(shown, 'x');
  put(shown, kHexDigits[value >> 4 & 0xfu]);
  put(shown, kHexDigits[value & 0xfu]);
}

void put_escape(ShownCharacter& shown, char32_t value) {
  if (value == '\n' || value == '\r' || value == '\t') {
    put(shown, '\\');
    put(shown, value == '\n' ? 'n' : value == '\r' ? 'r' : 't');
  } else if (value < 0x80) {
    put_byte(shown, static_cast<unsigned>(value));
  } else {
    put(shown, '\\');
    put(shown, 'u');
    put(shown, '{');
    int shift = 20;
    while ((value >> shift) == 0) shift -= 4;
    for (; shift >= 0; shift -= 4) put(shown, kHexDigits[value >> shift & 0xfu]);
    put(shown, '}');
  }
}

// The characters from the front of `text` that fit whole in `most` bytes; all of it if they do.
struct Front {
  std::string shown;
  std::size_t consumed = 0;
};
Front show_front(std::string_view text, std::size_t most) {
  Front front;
  while (front.consumed < text.size()) {
    const ShownCharacter next = show_character(text.substr(front.consumed));
    if (front.shown.size() + next.size > most) break;
    front.shown += next.view();
    front.consumed += next.consumed;
  }
  return front;
}

std::string show_back(std::string_view text, std::size_t most) {
  text = text.substr(text.size() - std::min(text.size(), most));
  // The text must not begin in the middle of a character, which would look like damage.
  for (int i = 0; i < 3 && !text.empty() && (text.front() & 0xc0) == 0x80; ++i) {
    text.remove_prefix(1);
  }
  std::vector<ShownCharacter> characters;
  std::size_t size = 0;
  while (!text.empty()) {
    characters.push_back(show_character(text));
    size += characters.back().size;
    text.remove_prefix(characters.back().consumed);
  }
  std::string shown;
  for (const ShownCharacter& character : characters) {
    if (size <= most) {
      shown += character.view();
    } else {
      size -= character.size;  // escapes are longer than what they stand for: too many for `most`
    }
  }
  return shown;
}

}  // namespace

ShownCharacter show_character(std::string_view text) {
  ShownCharacter shown;
  const CodePoint c = decode(text);
  shown.consumed = std::max<std::size_t>(c.size, 1);
  if (c.size == 0) {
    put_byte(shown, static_cast<unsigned char>(text[0]));
  } else if (must_be_escaped(c.value)) {
    put_escape(shown, c.value);
  } else {
    for (std::size_t i = 0; i < c.size; ++i) put(shown, text[i]);
  }
  return shown;
}

std::string printable(std::string_view text, std::size_t most) {
  Front whole = show_front(text, most);
  if (whole.consumed == text.size()) return std::move(whole.shown);
  const std::string middle = fmt::format("...[{} bytes]...", text.size());
  const std::size_t left = most - middle.size();
  const std::size_t back = left / 3;
  return show_front(text, left - back).shown + middle + show_back(text, back);
}

}  // namespace switchyard
