#include "failures/run_trial.h"

#include <fmt/core.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <thread>

#include "base/posix.h"
#include "base/unique_fd.h"
#include "fabric/launch.h"
#include "failures/play.h"
#include "switchyard/error.h"

namespace switchyard::failures {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// A rank that has failed says so with this exit code. A launcher takes 0 for a rank that is done.
constexpr int kFailedRank = 4;

// For what must come, however busy the machine is.
constexpr milliseconds kLongest{60'000};

UniqueFd make_file(const char* name) {
  UniqueFd file(::memfd_create(name, 0));  // ranks that exec keep it
  if (!file) throw_errno("cannot make a file in memory");
  return file;
}

std::string contents(const UniqueFd& file) {
  std::string text(static_cast<std::size_t>(::lseek(file.get(), 0, SEEK_END)), '\0');
  const ssize_t got = ::pread(file.get(), text.data(), text.size(), 0);
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  std::ranges::replace(text, '\n', ' ');
  return text;
}

class SharedBoard {
 public:
  explicit SharedBoard(int fd)
      : memory_(::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) {
    if (memory_ == MAP_FAILED) throw_errno("cannot map the board of a trial");
  }
  ~SharedBoard() { ::munmap(memory_, sizeof(Board)); }
  SharedBoard(const SharedBoard&) = delete;
  SharedBoard& operator=(const SharedBoard&) = delete;
  Board& operator*() const { return *static_cast<Board*>(memory_); }
  Board* operator->() const { return static_cast<Board*>(memory_); }

 private:
  void* memory_;
};

// Runs `body` in a child, which ends with this process.
pid_t fork_child(const std::function<int()>& body) {
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) throw_errno("cannot fork");
  if (pid > 0) return pid;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  int code = 1;
  try {
    code = body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "failure_trials: %s\n", error.what());
  }
  ::_exit(code);
}

// The longest that a look of this process at its ranks came late in this trial.
std::int64_t longest_stall = 0;

bool eventually(const std::function<bool()>& condition, Clock::time_point until) {
  constexpr milliseconds kBetween{2};
  while (!condition()) {
    const auto now = Clock::now();
    if (now > until) return false;
    std::this_thread::sleep_for(kBetween);
    longest_stall =
        std::max(longest_stall, std::chrono::nanoseconds(Clock::now() - now - kBetween).count());
  }
  return true;
}

class Children {
 public:
  ~Children() { kill_all(); }
  void add(pid_t pid) { all_.push_back({pid, false, 0}); }
  bool has_ended(std::size_t i) {
    Child& child = all_[i];
    child.ended = child.ended || ::waitpid(child.pid, &child.status, WNOHANG) == child.pid;
    return child.ended;
  }
  void kill(std::size_t i) {
    Child& child = all_[i];
    if (has_ended(i)) return;
    ::kill(child.pid, SIGKILL);
    ::waitpid(child.pid, &child.status, 0);
    child.ended = true;
  }
  void kill_all() {
    for (std::size_t i = 0; i < all_.size(); ++i) kill(i);
  }
  int status(std::size_t i) const { return all_[i].status; }
  std::size_t size() const { return all_.size(); }

 private:
  struct Child {
    pid_t pid;
    bool ended;
    int status;
  };
  std::vector<Child> all_;
};

// Waits for the trial's moment, and harms the victim unless it does so itself. False if a rank
// failed before.
bool harm_victim(const Trial& trial, Board& board, const std::function<bool()>& any_ended) {
  const auto all = [&](auto&& condition) {
    return std::all_of(board.ranks, board.ranks + trial.ranks, condition);
  };
  const auto is_harmed = [&] { return board.harmed_ns != 0; };
  const auto until = Clock::now() + kLongest;
  // In a scene that ends by itself, all ranks that are in its last round are as far as may be.
  const int round = trial.ends_by_itself() ? trial.rounds : trial.scene == Scene::kStart ? 0 : 2;
  bool failed = false;
  eventually(
      [&] {
        if (is_harmed()) return true;
        failed = any_ended();
        return failed ||
               all([&](const RankBoard& rank) { return rank.pid != 0 && rank.round >= round; });
      },
      until);
  if (trial.how == How::kFromOutside) {
    std::this_thread::sleep_for(trial.moment);
  } else {
    // The step may be one that the victim does not come to.
    const auto patience = std::chrono::seconds(trial.how == How::kAtStep ? 1 : 30);
    eventually([&] { return is_harmed() || (failed = any_ended()); }, Clock::now() + patience);
  }
  if (is_harmed()) return true;
  board.harmed_ns = now_ns();
  const int pid = board.ranks[trial.victim].pid;
  if (pid > 0) ::kill(pid, signal_of(trial.harm));
  return !failed || trial.ends_by_itself();
}

void use_network_of_namespaces() {
  // Providers of real fabrics have nothing to do with namespaces.
  ::setenv("FI_PROVIDER", "tcp", 1);
  ::setenv("SWITCHYARD_SECRET", "a secret for tests only", 1);
  ::unsetenv("SWITCHYARD_SECRET_FILE");
}

Clock::time_point patience_with(const Limits& limits) {
  return Clock::now() + 3 * limits.deadline + 2 * limits.grace + std::chrono::seconds(10);
}

Verdict run_directly(const Trial& trial, const Limits& limits, const NetworkNamespaces* hosts) {
  const UniqueFd file = make_file("board");
  if (::ftruncate(file.get(), sizeof(Board)) != 0) throw_errno("cannot make a board");
  const SharedBoard board(file.get());
  static int count = 0;
  std::string rendezvous = fmt::format("failures {}.{}", ::getpid(), count++);
  if (trial.hosts > 1) {
    // Trials that run at the same time are in the same namespaces. Each has a port of its own,
    // below those that connections are given.
    const auto port = 10'000 + trial.seed % 20'000;
    rendezvous = fmt::format("tcp://{}:{}", hosts->ip(0), port);
  }
  Children ranks;
  for (int rank = 0; rank < trial.ranks; ++rank) {
    ranks.add(fork_child([&] {
      if (trial.hosts > 1) {
        use_network_of_namespaces();
        if (::setns(hosts->fd(trial.host_of(rank)), CLONE_NEWNET) != 0) {
          throw_errno("cannot enter a network namespace");
        }
      }
      play_rank(trial, rank, rendezvous, limits.deadline, *board);
      return 0;
    }));
  }
  const auto num_ranks = static_cast<std::size_t>(trial.ranks);
  Ending ending{std::vector<bool>(num_ranks), std::vector<int>(num_ranks)};
  ending.before_harm = !harm_victim(trial, *board, [&] {
    for (std::size_t r = 0; r < num_ranks; ++r) {
      if (ranks.has_ended(r) && board->harmed_ns == 0) return true;
    }
    return false;
  });
  const auto victim = static_cast<std::size_t>(trial.victim);
  const auto until = patience_with(limits);
  for (std::size_t r = 0; r < num_ranks; ++r) {
    if (r == victim) continue;
    ending.killed[r] = !eventually([&] { return ranks.has_ended(r); }, until);
    ranks.kill(r);
    ending.statuses[r] = ranks.status(r);
  }
  ranks.kill_all();
  ending.stall_ns = longest_stall;
  return judge(trial, limits, *board, ending, nullptr);
}

Verdict run_launched(const Trial& trial, const Limits& limits) {
  const UniqueFd file = make_file("board"), errors = make_file("errors");
  if (::ftruncate(file.get(), sizeof(Board)) != 0) throw_errno("cannot make a board");
  const SharedBoard board(file.get());
  Children launcher;
  launcher.add(fork_child([&] {
    LaunchOptions options;
    options.num_ranks = trial.ranks;
    options.namespaces = trial.hosts > 1 ? trial.hosts : 0;
    options.grace = limits.grace;
    options.command = {std::filesystem::read_symlink("/proc/self/exe"), kRankArgument,
                       std::to_string(trial.seed), std::to_string(file.get()),
                       std::to_string(limits.deadline.count())};
    ::dup2(errors.get(), STDERR_FILENO);
    return launch(options);
  }));
  const auto num_ranks = static_cast<std::size_t>(trial.ranks);
  Ending ending{std::vector<bool>(num_ranks), std::vector<int>(num_ranks)};
  ending.before_harm = !harm_victim(trial, *board, [&] {
    for (int r = 0; r < trial.ranks; ++r) {
      if (board->ranks[r].outcome != Outcome::kNone && board->harmed_ns == 0) return true;
    }
    return launcher.has_ended(0) && board->harmed_ns == 0;
  });
  Launched launched;
  // A launcher rightly waits for a rank that is stopped if all others are done.
  const auto nobody_misses_it = [&] {
    for (int r = 0; r < trial.ranks; ++r) {
      const RankBoard& rank = board->ranks[r];
      if (r != trial.victim && (rank.outcome != Outcome::kDone || rank.ended_ns == 0)) return false;
    }
    return trial.harm == Harm::kStop;
  };
  const auto until = patience_with(limits);
  bool ended = false;
  eventually([&] { return (ended = launcher.has_ended(0)) || nobody_misses_it(); }, until);
  if (!ended && nobody_misses_it()) {
    launched.released_ns = now_ns();
    ::kill(board->ranks[trial.victim].pid, SIGKILL);
    ended = eventually([&] { return launcher.has_ended(0); }, until);
  }
  if (!ended) {
    for (std::size_t r = 0; r < num_ranks; ++r) {
      ending.killed[r] = true;
      if (const int pid = board->ranks[r].pid; pid > 0) ::kill(pid, SIGKILL);
    }
    // It removes its network namespaces.
    eventually([&] { return launcher.has_ended(0); }, Clock::now() + std::chrono::seconds(10));
  }
  launched.ended_ns = now_ns();
  launcher.kill_all();
  const int status = launcher.status(0);
  launched.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  launched.errors = contents(errors);
  ending.stall_ns = longest_stall;
  return judge(trial, limits, *board, ending, &launched);
}

}  // namespace

Verdict run_trial(const Trial& trial, const Limits& limits, const NetworkNamespaces* hosts) {
  // On a machine that is far too busy, a deadline may pass as the world starts. A world that never
  // starts is an error.
  constexpr int kMostTries = 3;
  Verdict verdict;
  for (int tries = 0; tries < kMostTries; ++tries) {
    longest_stall = 0;
    verdict = trial.launched ? run_launched(trial, limits) : run_directly(trial, limits, hosts);
    if (!verdict.before_harm) break;
  }
  return verdict;
}

void run_launched_rank(char** arguments) {
  const Trial trial(std::strtoull(arguments[0], nullptr, 10));
  const SharedBoard board(std::atoi(arguments[1]));
  const int rank = std::atoi(std::getenv("RANK"));
  play_rank(trial, rank, "", milliseconds(std::atoi(arguments[2])), *board);
  ::_exit(board->ranks[rank].outcome == Outcome::kDone ? 0 : kFailedRank);
}

}  // namespace switchyard::failures
