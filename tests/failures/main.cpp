// Trials over everything: a rank of a world is killed, stopped, interrupted, or ends, in order or
// not, while the world passes, exchanges, meets, waits for flags, closes or starts. Every other
// rank must end with a TimeoutError that names this rank and accuses no other, and in time. A seed
// repeats a trial, as far as timing allows; a bad trial prints its own.
//
//   failure_trials --trials 2000 --jobs 9 --json results/failure_trials.json --commit COMMIT
//   failure_trials --seed 17 --trials 1 --verbose
//
// The second plays a trial again, and prints what each rank said.
#include <fmt/core.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/posix.h"
#include "failures/failure_row.h"
#include "failures/run_trial.h"
#include "machine/description.h"
#include "switchyard/error.h"

namespace switchyard::failures {
namespace {

struct Options {
  std::uint64_t seed = 1, trials = 40, jobs = 0;  // jobs 0: see kHelp
  Limits limits;
  std::string json, only, commit = "unknown", command;
  bool hosts = true, verbose = false;
  int gpus = 0;
};

constexpr const char* kHelp =
    "failure_trials [--seed N] [--trials N] [--jobs N] [--only TEXT] [--one-host] [--gpus N] "
    "[--verbose]\n"
    "               [--deadline-ms N] [--slack-ms N] [--at-once-ms N] [--json FILE --commit TEXT]\n"
    "  --gpus       so many: a rank has one of them for its layers, and there is nothing but "
    "layers and collectives\n"
    "  --jobs       trials at a time (default 8; with --gpus 1, as a driver starts one process "
    "after another)\n"
    "  --only       trials whose kind has this in it: 'stop in mix', 'several hosts', 'launched'\n"
    "  --slack-ms   what a rank may take beyond the deadline to notice a stopped one\n"
    "  --at-once-ms what a rank may take to notice one whose process has ended\n";

[[noreturn]] void refuse(const std::string& why) {
  std::fprintf(stderr, "failure_trials: %s\n%s", why.c_str(), kHelp);
  std::exit(2);
}

Options read_options(int argc, char** argv) {
  Options options;
  for (int i = 0; i < argc; ++i) options.command += fmt::format("{}{}", i == 0 ? "" : " ", argv[i]);
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--one-host") {
      options.hosts = false;
      continue;
    }
    if (name == "--verbose") {
      options.verbose = true;
      continue;
    }
    if (i + 1 == argc) refuse(fmt::format("'{}' is no option, or has no value", name));
    const std::string_view value = argv[++i];
    const auto number = [&](std::uint64_t least, std::uint64_t most) {
      std::uint64_t result = 0;
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
      if (error != std::errc() || end != value.data() + value.size() || result < least ||
          result > most) {
        refuse(fmt::format("{} is '{}'; give a number from {} to {}", name, value, least, most));
      }
      return result;
    };
    const auto milliseconds = [&] { return std::chrono::milliseconds(number(1, 600'000)); };
    if (name == "--seed") {
      options.seed = number(0, std::uint64_t{1} << 52);
    } else if (name == "--trials") {
      options.trials = number(1, 1'000'000);
    } else if (name == "--gpus") {
      options.gpus = static_cast<int>(number(2, kMostRanks));
      options.hosts = false;
    } else if (name == "--jobs") {
      options.jobs = number(1, 256);
    } else if (name == "--deadline-ms") {
      options.limits.deadline = milliseconds();
    } else if (name == "--slack-ms") {
      options.limits.slack = milliseconds();
    } else if (name == "--at-once-ms") {
      options.limits.at_once = milliseconds();
    } else if (name == "--json") {
      options.json = value;
    } else if (name == "--commit") {
      options.commit = value;
    } else if (name == "--only") {
      options.only = value;
    } else {
      refuse(fmt::format("there is no option '{}'", name));
    }
  }
  if (options.jobs == 0) options.jobs = options.gpus > 0 ? 1 : 8;
  return options;
}

// A trial's result, in memory that a worker shares with its parent.
struct Result {
  std::atomic<bool> is_there;
  bool wrong, innocents, late, hangs, launcher, nobody_failed;
  int num_delays;
  std::int64_t delays[kMostRanks], launcher_delay;
  char report[16'000];
  char causes[6'000];  // a line for each

  void set(const Verdict& verdict) {
    wrong = verdict.wrong;
    innocents = verdict.innocents;
    late = verdict.late;
    hangs = verdict.hangs;
    launcher = verdict.launcher;
    nobody_failed = verdict.nobody_failed;
    num_delays = static_cast<int>(verdict.delays.size());
    std::ranges::copy(verdict.delays, delays);
    launcher_delay = verdict.launcher_delay;
    std::snprintf(report, sizeof report, "%s", verdict.report.c_str());
    std::string lines;
    for (const std::string& cause : verdict.causes) lines += cause + '\n';
    std::snprintf(causes, sizeof causes, "%s", lines.c_str());
    is_there = true;
  }
  bool is_bad() const { return wrong || innocents || late || hangs || launcher; }
  std::string words() const {
    std::string text;
    for (const auto& [is, word] : {std::pair(wrong, "wrong"),
                                   {innocents, "innocents"},
                                   {late, "late"},
                                   {hangs, "hangs"},
                                   {launcher, "launcher"}}) {
      if (is) text += fmt::format("{}{}", text.empty() ? "" : ", ", word);
    }
    return text;
  }
};

template <typename T>
T* share(std::size_t count) {
  void* const memory = ::mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw_errno("cannot map memory for results");
  return static_cast<T*>(memory);
}

volatile sig_atomic_t interrupted = 0;

std::optional<double> microseconds(std::vector<std::int64_t>& sorted, bool longest) {
  if (sorted.empty()) return std::nullopt;
  return std::max(1.0,
                  static_cast<double>(longest ? sorted.back() : sorted[sorted.size() / 2]) * 1e-3);
}

// The results of all trials, by kind.
class Tally {
 public:
  explicit Tally(const Options& options) : options_(options) {}

  void add(const Trial& trial, const Result& result) {
    Kind& kind = kinds_[trial.kind()];
    FailureRow& row = kind.row;
    ++row.trials;
    row.wrong += result.wrong;
    row.innocents += result.innocents;
    row.late += result.late;
    row.hangs += result.hangs;
    row.launcher += result.launcher;
    row.nobody_failed += result.nobody_failed;
    kind.delays.insert(kind.delays.end(), result.delays, result.delays + result.num_delays);
    if (trial.harm != Harm::kStop) {
      ends_.insert(ends_.end(), result.delays, result.delays + result.num_delays);
    }
    if (result.launcher_delay != 0) kind.launcher_delays.push_back(result.launcher_delay);
    if (result.is_bad() || options_.verbose) {
      std::printf("seed %llu: %s: %s\n%s", static_cast<unsigned long long>(trial.seed),
                  result.is_bad() ? result.words().c_str() : "well", trial.words().c_str(),
                  result.report);
      std::fflush(stdout);
    }
    bad_ += result.is_bad();
    std::string_view lines = result.causes;
    while (!lines.empty()) {
      const std::size_t end = lines.find('\n');
      if (end == std::string_view::npos) break;
      causes_[std::string(lines.substr(0, end))].push_back(trial.seed);
      lines.remove_prefix(end + 1);
    }
  }

  std::vector<FailureRow> rows() {
    std::vector<FailureRow> rows;
    for (auto& [name, kind] : kinds_) {
      FailureRow& row = rows.emplace_back(kind.row);
      row.kind = name;
      row.machine =
          machine::describe_machine(options_.gpus > 0 ? Backend::kCuda : Backend::kCpu, 1);
      row.commit = options_.commit;
      row.command = options_.command;
      row.first_seed = static_cast<double>(options_.seed);
      row.deadline_ms = options_.limits.deadline.count();
      row.slack_ms = options_.limits.slack.count();
      row.at_once_ms = options_.limits.at_once.count();
      std::ranges::sort(kind.delays);
      std::ranges::sort(kind.launcher_delays);
      row.named_us = microseconds(kind.delays, false);
      row.named_longest_us = microseconds(kind.delays, true);
      row.launcher_us = microseconds(kind.launcher_delays, false);
      row.launcher_longest_us = microseconds(kind.launcher_delays, true);
    }
    return rows;
  }

  void print(const std::vector<FailureRow>& rows) {
    std::printf("\n%-46s %7s %6s %6s %6s %6s %6s %7s %9s %9s\n", "kind", "trials", "wrong",
                "innoc.", "late", "hangs", "launch", "nobody", "median ms", "longest");
    for (const FailureRow& row : rows) {
      std::printf("%-46s %7lld %6.0f %6.0f %6.0f %6.0f %6.0f %7.0f %9.1f %9.1f\n", row.kind.c_str(),
                  static_cast<long long>(row.trials), row.wrong, row.innocents, row.late, row.hangs,
                  row.launcher, row.nobody_failed, row.named_us.value_or(0) * 1e-3,
                  row.named_longest_us.value_or(0) * 1e-3);
    }
    std::vector<std::pair<std::string, std::vector<std::uint64_t>>> causes(causes_.begin(),
                                                                           causes_.end());
    std::ranges::stable_sort(
        causes, [](const auto& a, const auto& b) { return a.second.size() > b.second.size(); });
    if (!causes.empty())
      std::printf("\nwhat was bad, in how many trials, and some of their seeds\n");
    for (const auto& [cause, seeds] : causes) {
      std::printf("%5zu  %s\n       seeds", seeds.size(), cause.c_str());
      for (std::size_t i = 0; i < std::min<std::size_t>(seeds.size(), 6); ++i) {
        std::printf(" %llu", static_cast<unsigned long long>(seeds[i]));
      }
      std::printf("\n");
    }
    std::ranges::sort(ends_);
    std::printf(
        "\ndeadline %lld ms, slack %lld ms, at once %lld ms. Ranks named one that had ended %.1f "
        "ms (median) "
        "after its end.\n%zu bad trials.\n",
        static_cast<long long>(options_.limits.deadline.count()),
        static_cast<long long>(options_.limits.slack.count()),
        static_cast<long long>(options_.limits.at_once.count()),
        microseconds(ends_, false).value_or(0) * 1e-3, bad_);
  }

  std::size_t bad() const { return bad_; }

 private:
  struct Kind {
    FailureRow row;
    std::vector<std::int64_t> delays, launcher_delays;
  };
  const Options& options_;
  std::map<std::string, Kind> kinds_;
  std::map<std::string, std::vector<std::uint64_t>> causes_;
  std::vector<std::int64_t> ends_;
  std::size_t bad_ = 0;
};

std::vector<std::uint64_t> seeds_of(const Options& options) {
  std::vector<std::uint64_t> seeds;
  // No kind is so rare.
  const std::uint64_t last = options.seed + 2'000 * options.trials;
  for (std::uint64_t seed = options.seed; seeds.size() < options.trials && seed < last; ++seed) {
    const Trial trial(seed, options.gpus);
    if (trial.hosts > 1 && !options.hosts) continue;
    if (trial.kind().find(options.only) != std::string::npos) seeds.push_back(seed);
  }
  if (seeds.empty()) refuse(fmt::format("no kind of trial has '{}' in its name", options.only));
  return seeds;
}

int run(Options options) {
  if (!options.json.empty()) results::require_mergeable<FailureRow>(options.json);
  std::optional<NetworkNamespaces> hosts;
#ifdef SWITCHYARD_HAS_NETWORK
  if (options.hosts) {
    try {
      hosts.emplace(kMostHosts);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
      std::printf("no trials over several hosts: %s\n", error.what());
    }
  }
#endif
  options.hosts = hosts.has_value();
  const std::vector<std::uint64_t> seeds = seeds_of(options);
  auto* const results = share<Result>(seeds.size());
  auto* const next = share<std::atomic<std::size_t>>(1);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) ::signal(number, [](int) { interrupted = 1; });
  std::vector<pid_t> workers;
  const pid_t parent = ::getpid();
  std::fflush(nullptr);
  for (std::uint64_t w = 0; w < std::min<std::uint64_t>(options.jobs, seeds.size()); ++w) {
    const pid_t pid = ::fork();
    if (pid < 0) throw_errno("cannot fork a worker");
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(1);
      for (const int number : {SIGINT, SIGTERM, SIGHUP}) ::signal(number, SIG_DFL);
      try {
        for (std::size_t i; (i = next->fetch_add(1)) < seeds.size();) {
          results[i].set(
              run_trial(Trial(seeds[i], options.gpus), options.limits, hosts ? &*hosts : nullptr));
        }
      } catch (const std::exception& error) {
        std::fprintf(stderr, "failure_trials: %s\n", error.what());
        ::_exit(1);
      }
      ::_exit(0);
    }
    workers.push_back(pid);
  }
  Tally tally(options);
  std::vector<bool> is_told(seeds.size());
  bool works = true;
  const auto tell = [&] {
    for (std::size_t i = 0; i < seeds.size(); ++i) {
      if (is_told[i] || !results[i].is_there) continue;
      is_told[i] = true;
      tally.add(Trial(seeds[i], options.gpus), results[i]);
    }
  };
  while (!workers.empty() && interrupted == 0) {
    std::erase_if(workers, [&](pid_t pid) {
      int status = 0;
      if (::waitpid(pid, &status, WNOHANG) != pid) return false;
      works = works && status == 0;
      return true;
    });
    tell();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  for (const pid_t pid : workers) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  tell();
  const std::vector<FailureRow> rows = tally.rows();
  tally.print(rows);
  if (!options.json.empty()) results::merge_rows(options.json, rows);
  return works && interrupted == 0 && tally.bad() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace switchyard::failures

int main(int argc, char** argv) {
  using namespace switchyard;
  if (argc == 5 && std::strcmp(argv[1], failures::kRankArgument) == 0) {
    failures::run_launched_rank(argv + 2);
  }
  try {
    return failures::run(failures::read_options(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "failure_trials: %s\n", error.what());
    return 2;
  }
}
