#include "failures/judge.h"

#include <fmt/core.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <regex>

#include "switchyard/error.h"

namespace switchyard::failures {
namespace {

void add_numbers(const std::string& list, std::set<int>& ranks) {
  static const std::regex number("[0-9]+");
  for (std::sregex_iterator i(list.begin(), list.end(), number), end; i != end; ++i) {
    ranks.insert(std::stoi(i->str()));
  }
}

// A message with the numbers taken out, so that those of the same place are the same.
std::string without_numbers(const std::string& message) {
  static const std::regex place("on [0-9]+\\.[0-9]+\\.[0-9]+\\.[0-9]+");
  static const std::regex several("ranks N(, N)* and N");
  static const std::regex number("[0-9]+(\\.[0-9]+)?");
  static const std::regex hints(
      "(; (process N (has exited|is stopped)[^;]*|rank N [^;]* closed its connection))+");
  std::string text = std::regex_replace(message, place, "on HOST");
  text = std::regex_replace(text, number, "N");
  text = std::regex_replace(text, several, "ranks N and N");
  text = std::regex_replace(text, hints, "; (of processes)");
  if (const auto rendezvous = text.find("rendezvous '"); rendezvous != std::string::npos) {
    const auto end = text.find('\'', rendezvous + 12);
    if (end != std::string::npos) text.erase(rendezvous + 11, end - rendezvous - 10);
  }
  return text.substr(0, 260);
}

}  // namespace

std::set<int> accused_by(const std::string& message, const std::vector<int>& pids) {
  std::set<int> ranks;
  static const std::regex subject(
      R"(\branks? ([0-9]+(?:, [0-9]+)*(?: and [0-9]+)?)(?: \(process [0-9]+\))?(?: of [0-9]+)?)"
      R"((?: on (?!of )[^ ]+)?(?: of [0-9]+)? )"
      R"((?:did not|was lost|closed its connection|was interrupted|was last heard|broke the|)"
      R"(gave up|sent a message|destroyed its World|failed first|called [^ ]+ but did not))");
  for (std::sregex_iterator i(message.begin(), message.end(), subject), end; i != end; ++i) {
    add_numbers((*i)[1].str(), ranks);
  }
  static const std::regex unreached("could not (?:connect to|exchange data with) rank ([0-9]+)");
  for (std::sregex_iterator i(message.begin(), message.end(), unreached), end; i != end; ++i) {
    add_numbers((*i)[1].str(), ranks);
  }
  static const std::regex process("process ([0-9]+) (?:has exited|is stopped)");
  for (std::sregex_iterator i(message.begin(), message.end(), process), end; i != end; ++i) {
    const auto rank = std::ranges::find(pids, std::stoi((*i)[1].str()));
    if (rank != pids.end()) ranks.insert(static_cast<int>(rank - pids.begin()));
  }
  return ranks;
}

int named_by_launcher(const std::string& errors) {
  static const std::regex line("switchyard launch: rank ([0-9]+) ");
  int rank = -1;
  for (std::sregex_iterator i(errors.begin(), errors.end(), line), end; i != end; ++i) {
    rank = std::stoi((*i)[1].str());
  }
  return rank;
}

Verdict judge(const Trial& trial, const Limits& limits, const Board& board, const Ending& ending,
              const Launched* launched) {
  using std::chrono::nanoseconds;
  Verdict verdict;
  verdict.before_harm = ending.before_harm;
  std::vector<int> pids;
  for (int r = 0; r < trial.ranks; ++r) pids.push_back(board.ranks[r].pid);
  const std::int64_t harmed = board.harmed_ns;
  const auto since_harm = [&](std::int64_t then) {
    return static_cast<double>(then - harmed) * 1e-6;
  };
  const auto blame = [&](bool& which, const std::string& cause) {
    which = true;
    verdict.causes.push_back(cause);
  };

  // Nobody can notice at once the end of a rank that was not yet in touch with rank 0, nor can a
  // rank that is not.
  const std::int64_t contact = 100'000'000 + 2 * ending.stall_ns;
  const auto is_in_touch = [&](int r) {
    const RankBoard& rank = board.ranks[r];
    return rank.round > 0 || (rank.began_ns != 0 && rank.began_ns + contact < harmed);
  };
  const bool ends = trial.harm != Harm::kStop && is_in_touch(trial.victim) && is_in_touch(0);
  const auto limit_of = [&](int r) {
    const RankBoard& rank = board.ranks[r];
    auto limit = ends && is_in_touch(r) ? limits.at_once : limits.deadline + limits.slack;
    if (trial.hosts > 1 && rank.round == 0) limit += limits.hosts_start;
    return nanoseconds(limit).count() + ending.stall_ns;
  };
  const std::string where_it_is = fmt::format(
      "{}{}", trial.hosts == 1 ? "one host" : "several hosts", trial.launched ? ", launched" : "");

  for (int r = 0; r < trial.ranks; ++r) {
    const auto i = static_cast<std::size_t>(r);
    const RankBoard& rank = board.ranks[r];
    // A victim, too, may fail with the others before it comes to its harm.
    verdict.before_harm |= rank.failed_ns != 0 && rank.failed_ns < harmed;
    if (r == trial.victim) continue;
    const std::string doing = rank.doing, words = rank.words;
    const Outcome outcome = rank.outcome;
    const std::int64_t since = std::max(harmed, rank.began_ns.load());
    const std::int64_t limit = limit_of(r);
    // A rank that comes when the others have given up finds nobody, and can name only rank 0.
    // So does one that sees the launcher end rank 0 before itself.
    const bool is_ended = launched != nullptr && trial.harm != Harm::kStop &&
                          rank.failed_ns - harmed >= nanoseconds(limits.grace).count();
    const bool comes_too_late =
        trial.scene == Scene::kStart && (!is_in_touch(r) || is_ended) && rank.peer == 0;
    std::string said, bad;
    switch (outcome) {
      case Outcome::kNone:
        verdict.nobody_failed = false;
        if (ending.killed[i]) {
          blame(verdict.hangs, fmt::format("hangs in {}, {}", doing, where_it_is));
          bad = " HANGS";
        } else if (launched != nullptr && trial.scene == Scene::kStart) {
          // A launcher knows before the others do that a rank has ended or what another has found,
          // and ends them.
          said = "ended by the launcher";
        } else {
          blame(verdict.wrong, fmt::format("ended in {} without a word, {}", doing, where_it_is));
          bad = " CRASHED";
          said = launched != nullptr ? "ended by the launcher, or crashed"
                                     : fmt::format("wait status {:#x}", ending.statuses[i]);
        }
        break;
      case Outcome::kDone:
        said = fmt::format("done after {:.0f} ms", since_harm(rank.ended_ns));
        if (rank.ended_ns - since > limit) {
          blame(verdict.late, fmt::format("late in {}, {}", doing, where_it_is));
          bad = " LATE";
        }
        break;
      case Outcome::kOther:
        verdict.nobody_failed = false;
        blame(verdict.wrong, fmt::format("another error in {}: {}", doing, without_numbers(words)));
        bad = " WRONG";
        said = fmt::format("after {:.0f} ms: {}", since_harm(rank.failed_ns), words);
        break;
      case Outcome::kTimeout: {
        verdict.nobody_failed = false;
        const std::string where = fmt::format("in {}, {}", doing, where_it_is);
        said = fmt::format(
            "after {:.0f} ms, {} of its call: {} {} of rank {} by {}: {}",
            since_harm(rank.failed_ns),
            static_cast<std::int64_t>(static_cast<double>(rank.failed_ns - rank.began_ns) * 1e-6),
            to_string(static_cast<ErrorCode>(rank.code)), rank.phase, rank.peer, rank.waiter,
            words);
        if (comes_too_late) {
          said += " (it came too late to know)";
        } else if (rank.peer != trial.victim) {
          blame(verdict.wrong, fmt::format("wrong name {}: {}", where, without_numbers(words)));
          bad += " WRONG";
        } else {
          verdict.delays.push_back(rank.failed_ns - harmed);
        }
        std::set<int> accused = accused_by(words, pids);
        accused.erase(trial.victim);
        if (!accused.empty() && !comes_too_late) {
          verdict.innocents = true;
          // A wrong name is an accusation.
          if (rank.peer == trial.victim) {
            blame(verdict.innocents,
                  fmt::format("innocent accused {}: {}", where, without_numbers(words)));
          }
          bad += " INNOCENT";
        }
        // Over several hosts a rank waits, as it closes, for those of its host that still call, but
        // no longer than its deadline.
        if (rank.ended_ns == 0) {
          said += " (and it had not closed everything)";
        } else if (const auto closing = nanoseconds(rank.ended_ns - rank.failed_ns);
                   closing > limits.deadline + limits.slack) {
          blame(verdict.late, fmt::format("late in closing after a failure, {}", where_it_is));
          said += fmt::format(" (and closed for {:.0f} ms)",
                              static_cast<double>(closing.count()) * 1e-6);
          bad += " LATE";
        }
        if (rank.failed_ns - since > limit) {
          blame(verdict.late, fmt::format("late in {}, {}", doing, where_it_is));
          bad += " LATE";
        }
        break;
      }
    }
    verdict.report += fmt::format("    rank {}{}, in {}: {}\n", r, bad, doing, said);
  }
  if (verdict.before_harm) {
    blame(verdict.wrong, "a rank failed before the harm");
    verdict.report += "    a rank failed before anything was done to the victim\n";
  }

  if (launched != nullptr) {
    if (launched->released_ns == 0) verdict.launcher_delay = launched->ended_ns - harmed;
    const int named = named_by_launcher(launched->errors);
    std::string bad;
    // It names nobody where nobody failed.
    const bool must_name = launched->exit_code != 0 || !verdict.nobody_failed;
    if (must_name && named != trial.victim) {
      blame(verdict.launcher, fmt::format("launcher, {}: {}", named < 0 ? "nobody" : "wrong name",
                                          without_numbers(launched->errors)));
      bad += " WRONG";
    }
    // It ends a rank that is stopped by SIGTERM, which has no effect, and then by SIGKILL.
    std::int64_t ranks_take = 0;
    for (int r = 0; r < trial.ranks; ++r) ranks_take = std::max(ranks_take, limit_of(r));
    const std::int64_t longest =
        ranks_take + nanoseconds(limits.at_once).count() +
        (trial.hosts > 1 ? nanoseconds(limits.hosts_end).count() : 0) +
        (trial.harm == Harm::kStop ? 2 * nanoseconds(limits.grace).count() : 0);
    const std::int64_t last_call = [&] {
      std::int64_t last = std::max(harmed, launched->released_ns);
      for (const RankBoard& rank : board.ranks) last = std::max(last, rank.began_ns.load());
      return last;
    }();
    if (launched->ended_ns - last_call > longest) {
      blame(verdict.late, "late: the launcher's end");
      bad += " LATE";
    }
    verdict.report +=
        fmt::format("    launcher{}: exit code {} after {:.0f} ms: {}\n", bad, launched->exit_code,
                    since_harm(launched->ended_ns), launched->errors);
  }
  if (constexpr std::int64_t kWorthTelling = 100'000'000; ending.stall_ns > kWorthTelling) {
    verdict.report +=
        fmt::format("    the machine stood still for {} ms\n", ending.stall_ns / 1'000'000);
  }
  std::ranges::sort(verdict.causes);
  verdict.causes.erase(std::unique(verdict.causes.begin(), verdict.causes.end()),
                       verdict.causes.end());
  return verdict;
}

}  // namespace switchyard::failures
