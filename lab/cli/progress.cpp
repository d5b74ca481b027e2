#include "cli/progress.h"

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "cli/format.h"

namespace switchyard::cli {
namespace {

constexpr std::chrono::milliseconds kRedrawInterval{100};
constexpr int kWidestBar = 40;
constexpr int kNarrowestBar = 4;

int terminal_columns() {
  winsize size{};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

std::string bar(double fraction, int width) {
  const int filled = static_cast<int>(fraction * width);
  std::string text(static_cast<std::size_t>(filled), '=');
  if (filled < width) text += '>';
  text.resize(static_cast<std::size_t>(width), ' ');
  return "[" + text + "]";
}

}  // namespace

std::string progress_line(const std::string& label, std::uint64_t done, std::uint64_t total,
                          double elapsed, int columns, Counted counted) {
  const auto amount = [&](std::uint64_t n) {
    return counted == Counted::kBytes ? format_bytes(static_cast<double>(n)) : fmt::format("{}", n);
  };
  const double fraction =
      total == 0 ? 1.0 : std::min(1.0, static_cast<double>(done) / static_cast<double>(total));
  std::string tail = fmt::format("{:3.0f} %  {} of {}{}", std::floor(100 * fraction), amount(done),
                                 amount(total), counted == Counted::kPoints ? " points" : "");
  if (fraction > 0 && fraction < 1) {
    tail += fmt::format("  ETA {:.0f} s", std::ceil(elapsed * (1 - fraction) / fraction));
  }
  const int left = columns - display_width(label) - display_width(tail) - 6;
  std::string line = label + "  ";
  if (left >= kNarrowestBar) line += bar(fraction, std::min(left, kWidestBar)) + "  ";
  line += tail;
  return line.substr(0, static_cast<std::size_t>(std::max(columns, 0)));
}

ProgressBar::ProgressBar(std::string label, bool wanted, Counted counted)
    : label_(std::move(label)),
      enabled_(wanted && ::isatty(STDERR_FILENO) == 1),
      counted_(counted) {}

ProgressBar::~ProgressBar() { clear(); }

void ProgressBar::clear() {
  if (!drawn_) return;
  drawn_ = false;
  last_draw_ = {};
  fmt::print(stderr, "\r\x1b[K");
  std::fflush(stderr);
}

void ProgressBar::update(std::uint64_t done, std::uint64_t total) {
  const Clock::time_point now = Clock::now();
  if (!enabled_ || now - last_draw_ < kRedrawInterval) return;
  last_draw_ = now;
  drawn_ = true;
  // The line is one column short of the terminal, because some terminals wrap a full line.
  const std::string line =
      progress_line(label_, done, total, std::chrono::duration<double>(now - start_).count(),
                    terminal_columns() - 1, counted_);
  fmt::print(stderr, "\r{}\x1b[K", line);
  std::fflush(stderr);
}

}  // namespace switchyard::cli
