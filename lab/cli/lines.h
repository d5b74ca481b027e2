// The lines of a report for people.
#pragma once

#include <fmt/core.h>

#include <string>
#include <utility>
#include <vector>

#include "cli/format.h"

namespace switchyard::cli {

inline constexpr int kLabelColumns = 12;

// Lines of the form "label       text". A longer text goes on below.
class Lines {
 public:
  explicit Lines(const Palette& palette) : palette_(palette) {}

  void add(const std::string& label, const std::string& text) {
    const std::vector<std::string> parts = wrap(text, kReportColumns - kLabelColumns);
    for (std::size_t i = 0; i < parts.size(); ++i) add_painted(i == 0 ? label : "", parts[i]);
  }
  // Adds a text that has escape codes. It is not wrapped, so the caller must keep it short enough.
  void add_painted(const std::string& label, const std::string& text) {
    lines_.push_back(palette_.dim(fmt::format("{:<{}}", label, kLabelColumns)) + text);
  }
  void add_blank() { lines_.emplace_back(); }
  void add_whole(const std::string& line) { lines_.push_back(line); }
  std::vector<std::string> take() { return std::move(lines_); }

 private:
  const Palette& palette_;
  std::vector<std::string> lines_;
};

}  // namespace switchyard::cli
