#include "fabric/launch.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <string_view>

#include "base/posix.h"
#include "base/printable.h"
#include "fabric/guardian.h"
#include "fabric/launch_report.h"
#include "fabric/namespaces.h"
#include "fabric/place.h"
#include "fabric/port.h"
#include "switchyard/error.h"

extern char** environ;

namespace switchyard {
namespace {

constexpr int kExitDeadline = 124;   // as timeout(1)
constexpr int kExitCannotRun = 127;  // as the shell
// SIGCHLD announces a rank's end. This interval is for the case that another thread took the
// signal.
constexpr std::chrono::milliseconds kReapInterval{100};
// A rank that is killed closes its connections before it can be waited for, so ranks that fail in
// consequence may be seen first. A signal seen within this time of another rank's exit code is
// taken for the cause.
constexpr std::chrono::milliseconds kSettleTime{100};
// Longer lines are labelled in pieces.
constexpr std::size_t kMaxLineBytes = std::size_t{64} << 10;

constexpr int kHandledSignals[] = {SIGINT, SIGTERM, SIGHUP, SIGCHLD};

void print_error(const std::string& message) {
  // fprintf() throws nothing if stderr is full or closed. The exit code must stay that of the
  // ranks.
  std::fprintf(stderr, "switchyard launch: %s\n", printable(message, 4096).c_str());
}

// While it lives, the handled signals can be polled for.
class SignalInbox {
 public:
  SignalInbox() {
    sigset_t handled;
    sigemptyset(&handled);
    for (const int number : kHandledSignals) sigaddset(&handled, number);
    ::pthread_sigmask(SIG_BLOCK, &handled, &previous_mask_);
    // An ignored SIGCHLD, which exec inherits, would let the kernel reap the ranks unseen.
    struct sigaction standard {};
    standard.sa_handler = SIG_DFL;
    ::sigaction(SIGCHLD, &standard, &previous_action_);
    fd_ = UniqueFd(::signalfd(-1, &handled, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!fd_) {
      restore();
      throw_errno("cannot make a signalfd");
    }
  }
  SignalInbox(const SignalInbox&) = delete;
  SignalInbox& operator=(const SignalInbox&) = delete;
  ~SignalInbox() { restore(); }

  int fd() const { return fd_.get(); }
  const sigset_t& previous_mask() const { return previous_mask_; }

  // Returns the next signal, or 0.
  int next() {
    signalfd_siginfo info{};
    return ::read(fd_.get(), &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo)
                                                                : 0;
  }

 private:
  void restore() {
    ::sigaction(SIGCHLD, &previous_action_, nullptr);
    ::pthread_sigmask(SIG_SETMASK, &previous_mask_, nullptr);
  }

  sigset_t previous_mask_{};
  struct sigaction previous_action_ {};
  UniqueFd fd_;
};

struct Pipe {
  UniqueFd read_end;
  UniqueFd write_end;
};

Pipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw_errno("cannot make a pipe");
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

// Copies whole lines from a rank to one of our own outputs.
class LabelledOutput {
 public:
  LabelledOutput(int rank, UniqueFd from, FILE* to)
      : label_(fmt::format("[rank {}] ", rank)), from_(std::move(from)), to_(to) {
    ::fcntl(from_.get(), F_SETFL, O_NONBLOCK);
  }

  int fd() const { return from_.get(); }

  // Copies what can be read now.
  void drain() {
    std::array<char, 4096> buffer;
    while (from_) {
      const ssize_t got = ::read(from_.get(), buffer.data(), buffer.size());
      if (got > 0) {
        pending_.append(buffer.data(), static_cast<std::size_t>(got));
        print_whole_lines();
      } else if (got == 0 || (errno != EINTR && errno != EAGAIN)) {
        from_.reset();
      } else if (errno == EAGAIN) {
        break;
      }
    }
  }

  // Also copies a last line that has no line break.
  void finish() {
    drain();
    if (!pending_.empty()) print_line(pending_);
    pending_.clear();
  }

 private:
  void print_whole_lines() {
    std::string_view left = pending_;
    for (;;) {
      const std::size_t end = left.find('\n');
      if (end == std::string_view::npos && left.size() < kMaxLineBytes) break;
      const std::size_t length = std::min(end, kMaxLineBytes);
      print_line(left.substr(0, length));
      left.remove_prefix(length == end ? length + 1 : length);
    }
    pending_.erase(0, pending_.size() - left.size());
  }

  void print_line(std::string_view line) {
    const std::string text = fmt::format("{}{}\n", label_, line);
    // If the output is full or closed, the ranks are still looked after. The stream remembers the
    // error.
    std::fwrite(text.data(), 1, text.size(), to_);
    std::fflush(to_);
  }

  std::string label_;
  UniqueFd from_;
  FILE* to_;
  std::string pending_;
};

std::string random_digits() {
  std::array<unsigned char, 16> bytes;
  fill_random(bytes.data(), bytes.size(), "the rendezvous");
  std::string digits;
  for (const unsigned char byte : bytes) digits += fmt::format("{:02x}", byte);
  return digits;
}

// The world that is launched: where its ranks are, and where they meet.
struct Plan {
  int num_hosts = 1;
  int ranks_per_host = 1;
  std::string address = "127.0.0.1";  // of rank 0's host
  int master_port = 0;                // there, for stores such as torch.distributed's
  std::string job;                    // a name that no other launch has
  std::string rendezvous;
  std::string secret;  // empty on one host

  int host_of(int rank) const { return rank / ranks_per_host; }
};

Plan make_plan(const LaunchOptions& options, const NetworkNamespaces* namespaces) {
  Plan plan;
  plan.job = "launch-" + random_digits();
  plan.rendezvous = plan.job;
  plan.ranks_per_host = options.num_ranks;
  plan.master_port = options.master_port;
  if (options.hosts.empty() && namespaces == nullptr) {
    if (plan.master_port == 0) plan.master_port = free_port();
    return plan;
  }
  plan.num_hosts =
      namespaces != nullptr ? namespaces->size() : static_cast<int>(options.hosts.size());
  if (options.num_ranks % plan.num_hosts != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} ranks cannot be dealt evenly to {} hosts; launch a multiple of {}",
                            options.num_ranks, plan.num_hosts, plan.num_hosts));
  }
  plan.ranks_per_host = options.num_ranks / plan.num_hosts;
  if (namespaces != nullptr) {
    plan.address = namespaces->ip(0);
  } else {
    // ssh's "user@host".
    const std::string& first = options.hosts.front();
    plan.address = first.substr(first.find('@') == std::string::npos ? 0 : first.find('@') + 1);
  }
  int port = random_port();
  if (plan.master_port == 0) plan.master_port = random_port();
  while (port == plan.master_port) port = random_port();
  const bool v6 = plan.address.find(':') != std::string::npos;
  plan.rendezvous =
      fmt::format("{}{}{}{}:{}", kTcpScheme, v6 ? "[" : "", plan.address, v6 ? "]" : "", port);
  const char* const given = std::getenv("SWITCHYARD_SECRET");
  plan.secret = given != nullptr && *given != 0 ? given : random_digits();
  return plan;
}

std::string shell_word(std::string_view text) {
  std::string word = "'";
  for (const char c : text) {
    if (c == '\'') {
      word += "'\\''";
    } else {
      word += c;
    }
  }
  return word + "'";
}

using Variables = std::map<std::string, std::string>;

constexpr std::string_view kTorchPrefix = "TORCHELASTIC_";

// The variables that tell a rank its place: all those of torchrun, and where Switchyard's ranks
// meet. A host is a group, and all ranks have one role.
Variables variables_of_rank(const LaunchOptions& options, const Plan& plan, int rank) {
  Variables variables;
  variables["MASTER_ADDR"] = plan.address;
  variables["MASTER_PORT"] = std::to_string(plan.master_port);
  variables["RANK"] = variables["ROLE_RANK"] = std::to_string(rank);
  variables["WORLD_SIZE"] = variables["ROLE_WORLD_SIZE"] = std::to_string(options.num_ranks);
  variables["LOCAL_RANK"] = std::to_string(rank % plan.ranks_per_host);
  variables["LOCAL_WORLD_SIZE"] = std::to_string(plan.ranks_per_host);
  variables["GROUP_RANK"] = std::to_string(plan.host_of(rank));
  variables["GROUP_WORLD_SIZE"] = std::to_string(plan.num_hosts);
  variables["ROLE_NAME"] = "default";
  variables["TORCHELASTIC_RUN_ID"] = plan.job;
  variables["TORCHELASTIC_RESTART_COUNT"] = "0";
  variables["TORCHELASTIC_MAX_RESTARTS"] = "0";
  variables["SWITCHYARD_RENDEZVOUS"] = plan.rendezvous;
  for (const auto& [name, value] : options.environment) variables[name] = value;
  return variables;
}

// Runs the rank's command on its host. The script's standard input has the secret in its first
// line, and stays open as long as the launcher wants the rank to run.
std::vector<std::string> ssh_command(const LaunchOptions& options, const Plan& plan, int rank) {
  std::string words = "env";
  for (const auto& [name, value] : variables_of_rank(options, plan, rank)) {
    words += fmt::format(" {}", shell_word(fmt::format("{}={}", name, value)));
  }
  for (const std::string& word : options.command) words += fmt::format(" {}", shell_word(word));
  std::string script = fmt::format(
      "exec 3<&0; IFS= read -r SWITCHYARD_SECRET <&3; export SWITCHYARD_SECRET; "
      "unset SWITCHYARD_SECRET_FILE TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE; "
      "cd {} || exit {}; "
      "{} </dev/null 3<&- & child=$!; "
      "{{ cat <&3; kill -TERM $child; }} >/dev/null 2>&1 & watcher=$!; "
      "wait $child; code=$?; kill $watcher 2>/dev/null; exit $code",
      shell_word(std::filesystem::current_path().string()), kExitCannotRun, words);
  return {"ssh", "-o", "BatchMode=yes", options.hosts[static_cast<std::size_t>(plan.host_of(rank))],
          fmt::format("sh -c {}", shell_word(script))};
}

std::vector<std::string> rank_environment(const LaunchOptions& options, const Plan& plan, int rank,
                                          const std::string& launcher) {
  Variables variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    variables[std::string(text.substr(0, equals))] = text.substr(equals + 1);
  }
  // An outer job's agent serves that job's ranks only. With TORCHELASTIC_USE_AGENT_STORE=True rank
  // 0 would wait for a store of it in place of making one.
  std::erase_if(variables, [](const auto& entry) { return entry.first.starts_with(kTorchPrefix); });
  // ssh itself is no rank, and what it needs is the launcher's own.
  if (options.hosts.empty()) {
    variables[kLauncherVariable] = launcher;
    if (plan.num_hosts > 1) {
      variables["SWITCHYARD_SECRET"] = plan.secret;
      variables.erase("SWITCHYARD_SECRET_FILE");
      // Namespaces are joined by virtual Ethernet, which providers of fabrics do not see.
      variables.try_emplace("FI_PROVIDER", "tcp");
      // The host's name is that of 127.0.0.1 in each of them, which torch's libraries would use.
      variables.try_emplace("GLOO_SOCKET_IFNAME", kNamespaceInterface);
      variables.try_emplace("NCCL_SOCKET_IFNAME", kNamespaceInterface);
    }
    for (const auto& [name, value] : variables_of_rank(options, plan, rank)) {
      variables[name] = value;
    }
  }
  std::vector<std::string> entries;
  for (const auto& [name, value] : variables) entries.push_back(fmt::format("{}={}", name, value));
  return entries;
}

std::vector<char*> pointers_to(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& string : strings) pointers.push_back(string.data());
  pointers.push_back(nullptr);
  return pointers;
}

struct ChildSetup {
  char* const* command;
  char* const* environment;
  sigset_t signal_mask;
  pid_t launcher;
  int stdin_fd;
  int stdout_fd;  // -1: the launcher's own
  int stderr_fd;
  int error_pipe;  // receives errno if the command cannot be run
  int report_socket;
  int network_namespace;  // -1: the launcher's own
  int rank;
  const Guardian* guardian;
};

// Between fork and exec only async-signal-safe calls are allowed: another thread of the launcher
// may have held any lock.
[[noreturn]] void become_rank(const ChildSetup& setup) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The launcher may have ended before the call above could take effect.
  if (::getppid() != setup.launcher) ::_exit(kExitCannotRun);
  setup.guardian->guard_me(setup.rank);
  struct sigaction standard {};
  standard.sa_handler = SIG_DFL;
  for (const int number : kHandledSignals) ::sigaction(number, &standard, nullptr);
  ::sigaction(SIGPIPE, &standard, nullptr);
  ::pthread_sigmask(SIG_SETMASK, &setup.signal_mask, nullptr);
  if (setup.network_namespace >= 0 && ::setns(setup.network_namespace, CLONE_NEWNET) != 0) {
    ::_exit(kExitCannotRun);
  }
  ::dup2(setup.stdin_fd, STDIN_FILENO);
  if (setup.stdout_fd >= 0) ::dup2(setup.stdout_fd, STDOUT_FILENO);
  if (setup.stderr_fd >= 0) ::dup2(setup.stderr_fd, STDERR_FILENO);
  ::fcntl(setup.report_socket, F_SETFD, 0);  // stays open
  ::execvpe(setup.command[0], setup.command, setup.environment);
  const int error_number = errno;
  // If even this fails, the launcher sees the exit code.
  [[maybe_unused]] const ssize_t written =
      ::write(setup.error_pipe, &error_number, sizeof error_number);
  ::_exit(kExitCannotRun);
}

class Launch {
 public:
  explicit Launch(const LaunchOptions& options) : options_(options), guardian_(options.num_ranks) {
    if (options.namespaces > 0) namespaces_.emplace(options.namespaces);
    plan_ = make_plan(options, namespaces_ ? &*namespaces_ : nullptr);
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
  ~Launch() {
    // Ranks are still alive here only if an error was thrown.
    signal_ranks(SIGKILL);
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[r].ended) continue;
      guardian_.forget(static_cast<int>(r));
      ::waitpid(ranks_[r].pid, nullptr, 0);
    }
  }

  int run() {
    if (!start()) return kExitCannotRun;
    const Clock::time_point start_time = Clock::now();
    if (options_.deadline) deadline_ = start_time + checked_deadline(*options_.deadline);

    for (;;) {
      for (int number = signals_.next(); number != 0; number = signals_.next()) {
        if (number != SIGCHLD) forward(number);
      }
      for (LabelledOutput& output : outputs_) output.drain();
      hear_reports();
      reap();
      if (std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.ended; })) break;
      const Clock::time_point now = Clock::now();
      if (now >= deadline_) {
        print_error(fmt::format("the ranks still run after {} ms; ending them",
                                options_.deadline->count()));
        deadline_ = Clock::time_point::max();
        exit_code_ = exit_code_ == 0 ? kExitDeadline : exit_code_;
        stop_at_ = now;
      }
      if (now >= stop_at_) {
        signal_ranks(SIGTERM);
        stop_at_ = Clock::time_point::max();
        kill_at_ = std::min(kill_at_, now + options_.grace);
      }
      if (now >= kill_at_ || only_stopped_ranks_are_left()) {
        kill_ranks();
        kill_at_ = Clock::time_point::max();
      }
      sleep(std::min({now + kReapInterval, deadline_, stop_at_, kill_at_}));
    }
    for (LabelledOutput& output : outputs_) output.finish();
    hear_reports();
    report_first_failure();
    return exit_code_;
  }

 private:
  // The state in which the launcher saw a rank before it sent a signal to the ranks itself.
  enum class Fate { kRuns, kStopped, kExited, kKilled };

  struct Rank {
    pid_t pid = -1;
    // The process that made the rank's World: `pid`, or a process that it started. 0: none has.
    pid_t world_process = 0;
    bool ended = false;
    Fate fate = Fate::kRuns;
    int status = 0;  // the exit code, or the number of the signal that killed or stopped it
    std::optional<LaunchReport> report;  // its first since it made its last World
  };
  struct Failure {
    std::size_t rank;
    bool signalled;
    int status;  // the signal's number or the exit code
    bool interrupted;
  };

  // Starts the ranks. If the command cannot be run, kills the ranks begun so far and returns false.
  bool start() {
    // A rank in a background process group that reads the terminal would be stopped.
    const UniqueFd null_input(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!null_input) throw_errno("cannot open /dev/null");

    for (int rank = 0; rank < options_.num_ranks; ++rank) {
      std::vector<std::string> command =
          options_.hosts.empty() ? options_.command : ssh_command(options_, plan_, rank);
      const std::vector<char*> command_pointers = pointers_to(command);
      std::vector<std::string> environment =
          rank_environment(options_, plan_, rank, reports_.variable());
      const std::vector<char*> environment_pointers = pointers_to(environment);
      Pipe secret;
      if (!options_.hosts.empty()) {
        secret = make_pipe();
        const std::string line = plan_.secret + "\n";
        if (::write(secret.write_end.get(), line.data(), line.size()) !=
            static_cast<ssize_t>(line.size())) {
          throw_errno("cannot hand the secret to ssh");
        }
      }
      Pipe error_pipe = make_pipe();
      Pipe out;
      Pipe err;
      if (options_.label_output) {
        out = make_pipe();
        err = make_pipe();
      }
      const ChildSetup setup{command_pointers.data(),
                             environment_pointers.data(),
                             signals_.previous_mask(),
                             ::getpid(),
                             secret.read_end ? secret.read_end.get() : null_input.get(),
                             out.write_end.get(),
                             err.write_end.get(),
                             error_pipe.write_end.get(),
                             reports_.rank_end(),
                             namespaces_ ? namespaces_->fd(plan_.host_of(rank)) : -1,
                             rank,
                             &guardian_};
      const pid_t pid = ::fork();
      if (pid < 0) throw_errno(fmt::format("cannot fork rank {}", rank));
      if (pid == 0) become_rank(setup);
      // The child does the same. Whichever is first, the group exists before anyone signals it.
      ::setpgid(pid, pid);
      ranks_.push_back({pid});
      secrets_.push_back(std::move(secret.write_end));
      if (options_.label_output) {
        outputs_.emplace_back(rank, std::move(out.read_end), stdout);
        outputs_.emplace_back(rank, std::move(err.read_end), stderr);
      }
      error_pipe.write_end.reset();
      // End of file means that exec closed the pipe.
      int error_number = 0;
      ssize_t got = 0;
      do {
        got = ::read(error_pipe.read_end.get(), &error_number, sizeof error_number);
      } while (got < 0 && errno == EINTR);
      if (got == static_cast<ssize_t>(sizeof error_number)) {
        print_error(fmt::format("cannot run '{}': {}", command.front(), errno_text(error_number)));
        return false;
      }
    }
    return true;
  }

  // Signals every rank's process group, because a rank may be a shell whose children do the work.
  // The number of a group is not used again before its leader has been waited for.
  void signal_ranks(int number) {
    note_stops();
    // From here on a rank may end because of this signal.
    has_signalled_ = true;
    for (const Rank& rank : ranks_) {
      if (!rank.ended) ::kill(-rank.pid, number);
    }
  }

  // A rank that hangs in the kernel survives even this, so the last line does not wait for it.
  void kill_ranks() {
    note_stops();
    report_first_failure();
    signal_ranks(SIGKILL);
  }

  void forward(int number) {
    if (forwarded_signal_ == 0) {
      signal_ranks(number);
      kill_at_ = std::min(kill_at_, Clock::now() + options_.grace);
    } else {
      kill_ranks();
    }
    forwarded_signal_ = number;
  }

  void reap() {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      Rank& rank = ranks_[r];
      siginfo_t info{};
      if (rank.ended ||
          ::waitid(P_PID, static_cast<id_t>(rank.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
          info.si_pid == 0) {
        continue;
      }
      // A rank reports before it ends, so what it had to say is there, and its process is, too.
      hear_reports();
      const bool failed = info.si_code != CLD_EXITED || info.si_status != 0;
      // Processes that a failed rank leaves behind in its group would run on for ever.
      if (failed || exit_code_ != 0) ::kill(-rank.pid, SIGKILL);
      guardian_.forget(static_cast<int>(r));
      ::waitpid(rank.pid, nullptr, 0);
      rank.ended = true;
      if (!has_signalled_) {
        rank.fate = info.si_code == CLD_EXITED ? Fate::kExited : Fate::kKilled;
        rank.status = info.si_status;
      }
      if (failed) record_failure(r, info);
    }
  }

  void record_failure(std::size_t rank, const siginfo_t& info) {
    const Clock::time_point now = Clock::now();
    const bool signalled = info.si_code != CLD_EXITED;
    if (exit_code_ == 0) {
      settled_at_ = now + kSettleTime;
      stop_at_ =
          std::min(stop_at_, now + options_.grace +
                                 (is_explained() ? std::chrono::milliseconds(0) : patience_));
    } else if (has_signalled_ || now >= settled_at_ || !signalled || !first_failure_ ||
               first_failure_->signalled || ranks_[rank].report) {
      // (A rank that has reported why it fails may end by abort(), which is no cause.)
      return;
    }
    first_failure_ = Failure{rank, signalled, info.si_status, forwarded_signal_ != 0};
    exit_code_ = signalled ? 128 + info.si_status : info.si_status;
  }

  // True if a rank has reported why the world failed. Then all ranks know it or will know it at
  // once, so they get no time for their own deadlines.
  bool is_explained() const { return !blamers_.empty(); }

  void hear_reports() {
    while (const std::optional<LaunchReports::Received> received = reports_.next()) {
      const LaunchReport& report = received->report;
      const auto num_ranks = static_cast<int>(ranks_.size());
      Rank* const rank = sender_of(*received);
      if (rank == nullptr) continue;  // a number that no rank has
      const auto index = static_cast<std::size_t>(rank - ranks_.data());
      if (report.kind == LaunchReport::Kind::kDeadline) {
        // No real deadline is longer than a day. A longer one in a report is garbage.
        constexpr std::int64_t kDay = 24 * 3'600'000;
        patience_ = std::max(patience_, std::chrono::milliseconds(
                                            std::clamp<std::int64_t>(report.deadline_ms, 0, kDay)));
        rank->world_process = received->process;
        // The rank has got over what it reported of an earlier World.
        rank->report.reset();
        std::erase(blamers_, index);
      } else if (!has_signalled_ && !rank->report && report.culprit >= 0 &&
                 report.culprit < num_ranks) {
        // (What ranks report once this launcher ends them is its own doing.)
        rank->report = report;
        blamers_.push_back(index);
      }
    }
  }

  // The process group says whose process it is. The number in the report is that of a rank of some
  // World, which may be one of the ranks of a host.
  Rank* sender_of(const LaunchReports::Received& received) {
    const pid_t group = received.process > 0 ? ::getpgid(received.process) : -1;
    const auto by_group = std::find_if(ranks_.begin(), ranks_.end(), [&](const Rank& rank) {
      return rank.pid == group && !rank.ended;
    });
    if (by_group != ranks_.end()) return &*by_group;
    const auto number = static_cast<std::size_t>(received.report.rank);
    return received.report.rank >= 0 && number < ranks_.size() ? &ranks_[number] : nullptr;
  }

  // The rank that the reports blame. If they disagree, it is the one that something visible has
  // happened to, and then the one that most blame; of equals the one that was blamed first.
  std::optional<std::size_t> culprit() const {
    std::vector<int> votes(ranks_.size());
    std::vector<std::size_t> candidates;  // in the order in which they were first blamed
    for (const std::size_t blamer : blamers_) {
      const auto blamed = static_cast<std::size_t>(ranks_[blamer].report->culprit);
      if (votes[blamed]++ == 0) candidates.push_back(blamed);
    }
    if (candidates.empty()) return std::nullopt;
    if (candidates.size() == 1) return candidates.front();
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (votes[r] == 0) candidates.push_back(r);
    }
    const auto evidence = [&](std::size_t r) {
      // A rank that blames another and then dies does so because of what it found.
      if (ranks_[r].fate == Fate::kKilled && !ranks_[r].report) return 2;
      return ranks_[r].fate == Fate::kStopped ? 1 : 0;
    };
    return *std::max_element(
        candidates.begin(), candidates.end(), [&](std::size_t a, std::size_t b) {
          return std::pair(evidence(a), votes[a]) < std::pair(evidence(b), votes[b]);
        });
  }

  void report_first_failure() {
    if (!first_failure_ || reported_) return;
    reported_ = true;
    const auto [rank, signalled, status, interrupted] = *first_failure_;
    const std::string end =
        signalled ? fmt::format("killed by signal {} ({})", status, ::sigdescr_np(status))
                  : fmt::format("exit code {}", status);
    const std::optional<std::size_t> blamed = interrupted ? std::nullopt : culprit();
    if (blamed && *blamed != rank) {
      print_error(fmt::format("rank {} (process {}) {}{}; rank {} noticed first ({})", *blamed,
                              ranks_[*blamed].pid, fate_of(ranks_[*blamed]), part_of(*blamed), rank,
                              end));
      return;
    }
    print_error(fmt::format("rank {} (process {}) {}: {}", rank, ranks_[rank].pid,
                            interrupted ? "was interrupted" : "failed first", end));
  }

  // The first rank that blames the culprit says in which part it failed.
  std::string part_of(std::size_t culprit) const {
    for (const std::size_t blamer : blamers_) {
      const LaunchReport& report = *ranks_[blamer].report;
      if (report.culprit != static_cast<int>(culprit)) continue;
      const std::string_view phase = report.phase;
      if (phase == "abort") return " and gave up because of an error of its own";
      // Collectives have no epochs.
      if (phase == "bootstrap") return " and did not do its part of a collective";
      return fmt::format(" and did not do its part of {} in epoch {}", phase, report.epoch);
    }
    return "";
  }

  static std::string fate_of(const Rank& rank) {
    switch (rank.fate) {
      case Fate::kExited: return fmt::format("ended with exit code {}", rank.status);
      case Fate::kKilled:
        return fmt::format("was killed by signal {} ({})", rank.status, ::sigdescr_np(rank.status));
      case Fate::kStopped:
        return rank.status == 0 ? "is stopped"
                                : fmt::format("is stopped by signal {}", rank.status);
      case Fate::kRuns: break;
    }
    return "still ran";
  }

  // A shell that runs the rank's program is not stopped together with it. What counts is the
  // process that made the World, while there is one.
  static bool is_stopped(const Rank& rank) {
    const ProcessState state =
        rank.world_process > 0 ? state_of_process(rank.world_process) : ProcessState::kExited;
    return (state == ProcessState::kExited ? state_of_process(rank.pid) : state) ==
           ProcessState::kStopped;
  }

  void note_stops() {
    if (has_signalled_) return;
    for (Rank& rank : ranks_) {
      if (rank.ended || !is_stopped(rank)) continue;
      rank.fate = Fate::kStopped;
      siginfo_t info{};
      if (::waitid(P_PID, static_cast<id_t>(rank.pid), &info, WSTOPPED | WNOHANG | WNOWAIT) == 0 &&
          info.si_pid != 0) {
        rank.status = info.si_status;
      }
    }
  }

  // A stopped rank can neither report nor act on SIGTERM, so once the world has failed and all
  // others have ended there is nothing to wait for.
  bool only_stopped_ranks_are_left() const {
    if (exit_code_ == 0 && forwarded_signal_ == 0) return false;
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [](const Rank& rank) { return rank.ended || is_stopped(rank); });
  }

  void sleep(Clock::time_point until) {
    std::vector<pollfd> fds{{signals_.fd(), POLLIN, 0}, {reports_.fd(), POLLIN, 0}};
    for (const LabelledOutput& output : outputs_) {
      if (output.fd() >= 0) fds.push_back({output.fd(), POLLIN, 0});
    }
    wait_ready(fds, until);
  }

  const LaunchOptions& options_;
  std::optional<NetworkNamespaces> namespaces_;
  Plan plan_;
  // The pipe to each rank's ssh, by rank: open while it is to run; closed on one host.
  std::vector<UniqueFd> secrets_;
  SignalInbox signals_;
  LaunchReports reports_;
  Guardian guardian_;
  std::chrono::milliseconds patience_{0};  // the longest that a rank waits for others
  std::vector<Rank> ranks_;
  std::vector<std::size_t> blamers_;  // ranks with a report, in order of the reports
  std::vector<LabelledOutput> outputs_;
  int exit_code_ = 0;
  std::optional<Failure> first_failure_;
  bool reported_ = false;
  bool has_signalled_ = false;
  int forwarded_signal_ = 0;
  Clock::time_point deadline_ = Clock::time_point::max();
  Clock::time_point settled_at_ = Clock::time_point::max();
  Clock::time_point stop_at_ = Clock::time_point::max();  // SIGTERM
  Clock::time_point kill_at_ = Clock::time_point::max();  // SIGKILL
};

}  // namespace

int launch(const LaunchOptions& options) {
  if (options.num_ranks < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} ranks were asked for; launch at least 1", options.num_ranks));
  }
  if (!options.hosts.empty() && options.namespaces > 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "both hosts and namespaces were given; namespaces stand for hosts, so use one of "
                "them");
  }
  for (const std::string& host : options.hosts) {
    // ssh would take it for an option.
    if (host.empty() || host.front() == '-') {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("'{}' is no name of a host", printable(host)));
    }
  }
  if (options.command.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "no command was given; name the program to launch");
  }
  if (options.master_port < 0 || options.master_port > 65'535) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the master's port is {}; use one from 1 to 65535, or 0 for a free one",
                            options.master_port));
  }
  if (options.grace.count() < 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("the grace period is {} ms; it must not be negative", options.grace.count()));
  }
  return Launch(options).run();
}

}  // namespace switchyard
