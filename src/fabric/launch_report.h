// The reports of a rank to the launcher that started it: how long it may wait for the others, and
// whom it blames when it gives up. With them the launcher lets the survivors of a failure reach
// their own deadlines, and its last line names the culprit, not the rank that noticed first.
//
// The ranks find a datagram socket to the launcher under SWITCHYARD_LAUNCHER, as
// "descriptor:inode". The inode exposes another launcher's variable, and a descriptor that was
// closed and used again.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "base/posix.h"
#include "switchyard/error.h"

namespace switchyard {

inline constexpr const char* kLauncherVariable = "SWITCHYARD_LAUNCHER";

struct LaunchReport {
  enum class Kind : std::uint32_t { kDeadline = 1, kFailure };

  std::uint64_t magic = kMagic;
  Kind kind = Kind::kDeadline;
  std::int32_t rank = -1;  // the rank that reports
  std::int64_t deadline_ms = 0;
  std::int32_t culprit = -1;
  std::int32_t reserved = 0;
  std::uint64_t epoch = 0;
  char phase[24] = {};

  static constexpr std::uint64_t kMagic = 0x7472'6f70'6572'7773;  // "swreport", little-endian
};
static_assert(sizeof(LaunchReport) == 64, "no padding: every byte of it is sent");

// Both functions do nothing if no launcher listens. They never throw and never wait.
void tell_launcher_deadline(int rank, std::chrono::milliseconds deadline) noexcept;
void tell_launcher_failure(int rank, const WaitFailure& failure) noexcept;

// The launcher's end.
class LaunchReports {
 public:
  LaunchReports();

  // The descriptor to keep open in the ranks; variable() is the variable's value that names it.
  int rank_end() const { return rank_end_.get(); }
  std::string variable() const;

  int fd() const { return own_end_.get(); }
  struct Received {
    LaunchReport report;
    pid_t process = 0;  // the sender, as the kernel says; 0: of a pid namespace not seen from here
  };
  // Returns the next report, if there is one. Datagrams that are not reports are skipped.
  std::optional<Received> next();

 private:
  UniqueFd own_end_, rank_end_;
};

}  // namespace switchyard
