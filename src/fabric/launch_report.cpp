#include "fabric/launch_report.h"

#include <fmt/core.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>

namespace switchyard {
namespace {

std::uint64_t inode_of(int fd) {
  struct stat status {};
  return ::fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode) ? status.st_ino : 0;
}

// Returns -1 if there is none.
int launcher_socket() noexcept {
  const char* const text = std::getenv(kLauncherVariable);
  if (text == nullptr) return -1;
  const char* const end = text + std::strlen(text);
  int fd = -1;
  std::uint64_t inode = 0;
  const auto [colon, fd_error] = std::from_chars(text, end, fd);
  if (fd_error != std::errc() || colon == end || *colon != ':') return -1;
  const auto [rest, inode_error] = std::from_chars(colon + 1, end, inode);
  if (inode_error != std::errc() || rest != end || inode == 0) return -1;
  return inode_of(fd) == inode ? fd : -1;
}

void send(const LaunchReport& report) noexcept {
  const int fd = launcher_socket();
  // A launcher that has ended, or is too slow to read, is told nothing.
  if (fd >= 0) ::send(fd, &report, sizeof report, MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace

void tell_launcher_deadline(int rank, std::chrono::milliseconds deadline) noexcept {
  LaunchReport report;
  report.kind = LaunchReport::Kind::kDeadline;
  report.rank = rank;
  report.deadline_ms = deadline.count();
  send(report);
}

void tell_launcher_failure(int rank, const WaitFailure& failure) noexcept {
  LaunchReport report;
  report.kind = LaunchReport::Kind::kFailure;
  report.rank = rank;
  report.culprit = failure.peer_rank;
  report.epoch = failure.epoch;
  std::strncpy(report.phase, failure.phase, sizeof report.phase - 1);
  send(report);
}

LaunchReports::LaunchReports() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends) != 0) {
    throw_errno("cannot make a socket for the ranks' reports");
  }
  own_end_ = UniqueFd(ends[0]);
  rank_end_ = UniqueFd(ends[1]);
  const int on = 1;
  if (::setsockopt(own_end_.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof on) != 0) {
    throw_errno("cannot ask for the senders of the ranks' reports");
  }
}

std::string LaunchReports::variable() const {
  return fmt::format("{}:{}", rank_end_.get(), inode_of(rank_end_.get()));
}

std::optional<LaunchReports::Received> LaunchReports::next() {
  for (;;) {
    Received received;
    LaunchReport& report = received.report;
    iovec place{&report, sizeof report};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(ucred))];
    msghdr message{};
    message.msg_iov = &place;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t got = ::recvmsg(own_end_.get(), &message, MSG_DONTWAIT | MSG_TRUNC);
    if (got < 0) return std::nullopt;
    if (got != sizeof report || report.magic != LaunchReport::kMagic) continue;
    const cmsghdr* const header = CMSG_FIRSTHDR(&message);
    if (header != nullptr && header->cmsg_level == SOL_SOCKET &&
        header->cmsg_type == SCM_CREDENTIALS) {
      ucred sender{};
      std::memcpy(&sender, CMSG_DATA(header), sizeof sender);
      received.process = sender.pid;
    }
    report.phase[sizeof report.phase - 1] = 0;
    // The phase is shown on a terminal, so other characters are replaced.
    std::replace_if(
        report.phase, report.phase + sizeof report.phase,
        [](char c) { return c != 0 && (c < ' ' || c > '~'); }, '?');
    return received;
  }
}

}  // namespace switchyard
