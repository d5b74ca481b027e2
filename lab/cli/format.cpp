#include "cli/format.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

namespace switchyard::cli {
namespace {

// Writes a value below 1000 with three significant digits, and never with an exponent.
std::string three_digits(double value) {
  const int decimals = value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return fmt::format("{:.{}f}", value, decimals);
}

struct Prefix {
  double factor;
  const char* name;
};

std::string scaled(double value, std::span<const Prefix> prefixes, std::string_view unit) {
  // 999.5 with one prefix would be rounded to "1000", so the next prefix begins there.
  for (const Prefix& prefix : prefixes) {
    if (value < 0.9995 * prefix.factor && &prefix != &prefixes.back()) continue;
    return fmt::format("{} {}{}", three_digits(value / prefix.factor), prefix.name, unit);
  }
  return {};
}

// Returns the end of the first word, or of its unit if the word is a number, because a line must
// not break within "4.10 kB".
std::size_t unbroken_end(std::string_view text) {
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  std::size_t end = std::min(text.find(' '), text.size());
  if (end > 0 && end + 1 < text.size() && is_digit(text[end - 1]) && !is_digit(text[end + 1])) {
    end = std::min(text.find(' ', end + 1), text.size());
  }
  return end;
}

}  // namespace

std::string format_quantity(double value, std::string_view unit) {
  constexpr Prefix kPrefixes[] = {{1e15, "P"}, {1e12, "T"}, {1e9, "G"},
                                  {1e6, "M"},  {1e3, "k"},  {1, ""}};
  return scaled(value, kPrefixes, unit);
}

std::string format_bytes(double bytes) {
  if (bytes < 999.5) return fmt::format("{:.0f} B", bytes);
  return format_quantity(bytes, "B");
}

std::string format_seconds(double seconds) {
  constexpr Prefix kPrefixes[] = {{1, ""}, {1e-3, "m"}, {1e-6, "u"}, {1e-9, "n"}};
  return scaled(seconds, kPrefixes, "s");
}

std::string format_percent(double fraction) {
  const double percent = 100 * fraction;
  const int decimals = percent >= 9.95 || percent == 0 ? 0 : percent >= 0.995 ? 1 : 2;
  return fmt::format("{:.{}f} %", percent, decimals);
}

int display_width(std::string_view text) {
  // Continuation bytes of UTF-8 are 10xxxxxx.
  return static_cast<int>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0u) != 0x80u;
  }));
}

std::vector<std::string> wrap(std::string_view text, int width) {
  std::vector<std::string> lines;
  while (!text.empty()) {
    const std::size_t word_end = unbroken_end(text);
    const std::string_view word = text.substr(0, word_end);
    text.remove_prefix(std::min(word_end + 1, text.size()));
    if (!lines.empty() && display_width(lines.back()) + 1 + display_width(word) <= width) {
      lines.back().append(" ").append(word);
    } else {
      lines.emplace_back(word);
    }
  }
  return lines;
}

std::vector<std::string> bar_chart(std::span<const std::int64_t> counts, int per_line) {
  constexpr const char* kBlocks[] = {"·", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  const std::int64_t largest = counts.empty() ? 0 : *std::max_element(counts.begin(), counts.end());
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (i % static_cast<std::size_t>(per_line) == 0) lines.emplace_back();
    const std::int64_t height = counts[i] == 0 ? 0 : (8 * counts[i] + largest - 1) / largest;
    lines.back() += kBlocks[height];
  }
  return lines;
}

Palette Palette::for_output(int fd) {
  const char* const no_color = std::getenv("NO_COLOR");
  return Palette(::isatty(fd) == 1 && (no_color == nullptr || *no_color == 0));
}

std::string Palette::paint(std::string_view code, std::string_view text) const {
  return enabled_ ? fmt::format("\x1b[{}m{}\x1b[0m", code, text) : std::string(text);
}

std::vector<std::string> align_columns(const std::vector<std::vector<std::string>>& rows,
                                       std::span<const std::size_t> right) {
  std::vector<int> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t c = 0; c < row.size(); ++c) {
      widths[c] = std::max(widths[c], display_width(row[c]));
    }
  }
  std::vector<std::string> lines;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) {
      const std::string padding(static_cast<std::size_t>(widths[c] - display_width(row[c])), ' ');
      const bool is_right = std::find(right.begin(), right.end(), c) != right.end();
      if (c > 0) line += "  ";
      line += is_right ? padding + row[c] : row[c] + padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    lines.push_back(std::move(line));
  }
  return lines;
}

}  // namespace switchyard::cli
