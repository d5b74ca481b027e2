// A progress bar on stderr. It is shown only on a terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace switchyard::cli {

enum class Counted { kBytes, kPoints };

// A line such as "writing  [=====>      ]  42 %  338 MB of 805 MB  ETA 3 s", at most `columns`
// wide. `elapsed` seconds have passed; the ETA assumes that the rest goes at the same rate.
std::string progress_line(const std::string& label, std::uint64_t done, std::uint64_t total,
                          double elapsed, int columns, Counted counted = Counted::kBytes);

// A bar that is drawn at most ten times a second and erased when it is destroyed. Only one thread
// may use it at a time.
class ProgressBar {
 public:
  // Draws only if `wanted` and stderr is a terminal.
  ProgressBar(std::string label, bool wanted, Counted counted = Counted::kBytes);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void update(std::uint64_t done, std::uint64_t total);
  // Erases the bar to make room for other output. The next update draws it again.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;

  std::string label_;
  bool enabled_;
  Counted counted_;
  bool drawn_ = false;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_draw_;
};

}  // namespace switchyard::cli
