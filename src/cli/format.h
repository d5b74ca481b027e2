// Numbers to text, for the command line.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard::cli {

// The width that every report fits in.
inline constexpr int kReportColumns = 100;

// Three significant digits with a decimal prefix: "805 MB", "1.32 TFLOP/s", "0 B".
std::string format_quantity(double value, std::string_view unit);
std::string format_bytes(double bytes);
// A duration with a unit: "41.2 ms", "3.07 s", "812 us".
std::string format_seconds(double seconds);
// 12345 -> "12,345".
std::string format_count(std::int64_t value);
// "1 rank", "12,345 tokens".
std::string plural(std::int64_t count, const char* noun);
// 0.7132 -> "71 %"; small fractions keep two significant digits: "0.42 %".
std::string format_percent(double fraction);

// Columns of a terminal that a UTF-8 text of single-width characters takes.
int display_width(std::string_view text);

// Breaks at blanks so that lines have at most `width` columns, but neither within a longer word nor
// between a number and the word after it.
std::vector<std::string> wrap(std::string_view text, int width);

// One block character per count, eight heights relative to the largest, at most `per_line` to a
// line. A count of 0 is a middle dot, so that it cannot be taken for a small one.
std::vector<std::string> bar_chart(std::span<const std::int64_t> counts, int per_line);

// Escape codes for colours if they are wanted, else empty strings.
class Palette {
 public:
  explicit Palette(bool enabled) : enabled_(enabled) {}
  // The palette for text that goes to `fd`: coloured on a terminal, unless NO_COLOR is set
  // (https://no-color.org).
  static Palette for_output(int fd);

  std::string bold(std::string_view text) const { return paint("1", text); }
  std::string dim(std::string_view text) const { return paint("2", text); }
  std::string red(std::string_view text) const { return paint("1;31", text); }
  std::string green(std::string_view text) const { return paint("32", text); }
  std::string cyan(std::string_view text) const { return paint("36", text); }

 private:
  std::string paint(std::string_view code, std::string_view text) const;
  bool enabled_;
};

// Rows of cells as aligned columns, two blanks apart; numbers are the caller's to format. Columns
// whose index is in `right` are right-aligned. Lines have no trailing blanks.
std::vector<std::string> align_columns(const std::vector<std::vector<std::string>>& rows,
                                       std::span<const std::size_t> right);

}  // namespace switchyard::cli
