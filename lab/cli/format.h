// Numbers to text, for the command line.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/plural.h"

namespace switchyard::cli {

// The width that every report fits in.
inline constexpr int kReportColumns = 100;

// Three significant digits with a decimal prefix: "805 MB", "1.32 TFLOP/s", "0 B".
std::string format_quantity(double value, std::string_view unit);
std::string format_bytes(double bytes);
// A duration with a unit: "41.2 ms", "3.07 s", "812 us".
std::string format_seconds(double seconds);
// 0.7132 -> "71 %"; small fractions keep two significant digits: "0.42 %".
std::string format_percent(double fraction);

// Returns the columns of a terminal that a UTF-8 text takes if all its characters have single
// width.
int display_width(std::string_view text);

// Breaks a text at blanks into lines of at most `width` columns. A word that is longer is not
// broken, and a number stays on one line with the word after it.
std::vector<std::string> wrap(std::string_view text, int width);

// Draws one block character per count, and at most `per_line` of them on a line. A block has one of
// eight heights, relative to the largest count. A count of 0 is a middle dot, so that it cannot be
// taken for a small one.
std::vector<std::string> bar_chart(std::span<const std::int64_t> counts, int per_line);

// Adds escape codes for colours to texts, if colours are enabled.
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

// Aligns rows of cells as columns, two blanks apart. The caller formats numbers. Columns whose
// index is in `right` are right-aligned. Lines have no trailing blanks.
std::vector<std::string> align_columns(const std::vector<std::vector<std::string>>& rows,
                                       std::span<const std::size_t> right);

}  // namespace switchyard::cli
