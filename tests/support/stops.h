// Ranks as processes, one of which is killed or stopped in the middle of its passes: whom the
// others name, and when.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "support/namespaces.h"
#include "support/numbers.h"
#include "support/ranks.h"

namespace switchyard::testing {

enum class Stop { kKill, kStop };

// A board that forked processes share, and, with a descriptor, also those that exec another
// program.
class SharedBoard {
 public:
  explicit SharedBoard(int fd = -1) {
    void* const memory = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE,
                                fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
    if (memory != MAP_FAILED) board_ = static_cast<Board*>(memory);
    EXPECT_NE(board_, nullptr);
  }
  // Before any rank runs.
  void blame_nobody() const {
    for (std::atomic<int>& blamed : board_->blamed) blamed = -1;
  }
  ~SharedBoard() {
    if (board_ != nullptr) ::munmap(board_, sizeof(Board));
  }
  SharedBoard(const SharedBoard&) = delete;
  SharedBoard& operator=(const SharedBoard&) = delete;

  Board& operator*() const { return *board_; }
  Board* operator->() const { return board_; }

 private:
  Board* board_ = nullptr;  // (Pages of zeros are one that nothing was written on.)
};

// Plays passes until one fails, and tells the board.
inline void pass_until_failure(Board& board, int rank, const std::function<void()>& pass) {
  try {
    for (std::uint64_t epoch = 1;; ++epoch) {
      board.epochs[rank] = epoch;
      pass();
    }
  } catch (const TimeoutError& error) {
    board.failed_at[rank] = now_ns();
    board.blamed[rank] = error.failure().peer_rank;
    board.found[rank] = number_of(error.failure());
    std::snprintf(board.words[rank], sizeof board.words[rank], "%s", error.what());
  } catch (const std::exception& error) {
    std::snprintf(board.words[rank], sizeof board.words[rank], "%s", error.what());
  }
}

// The random choices of a trial.
struct StopTrial {
  StopTrial(std::uint64_t seed, int num_hosts) {
    test::Numbers numbers(seed);
    ranks_of_host = numbers.between(1, 2);
    size = num_hosts * ranks_of_host;
    victim = numbers.between(0, size - 1);
    moment = std::chrono::microseconds(numbers.between(0, 20'000));
    words = "seed " + std::to_string(seed) + ": rank " + std::to_string(victim) + " of " +
            std::to_string(size);
  }

  int ranks_of_host, size, victim;
  std::chrono::microseconds moment;  // of the stop, see StopTally::play()
  std::string words;
};

// The results of all trials.
struct StopTally {
  std::uint64_t played = 0, hangs = 0, wrong_names = 0, two_verdicts = 0;
  std::vector<std::int64_t> delays;  // ns

  bool is_enough() const { return hangs + wrong_names > 3; }

  // Stops the trial's victim at its moment after all ranks, which play pass_until_failure(), are in
  // their third pass; the others then end with its name.
  void play(Board& board, const std::vector<pid_t>& pids, const StopTrial& trial, Stop how) {
    ++played;
    const int victim = trial.victim, size = trial.size;
    const bool kill = how == Stop::kKill;
    EXPECT_TRUE(test::eventually([&] {
      return std::all_of(board.epochs, board.epochs + size,
                         [](const auto& epoch) { return epoch >= 3; });
    })) << board.words[0];
    std::this_thread::sleep_for(trial.moment);
    const std::int64_t stopped_at = now_ns();
    ::kill(pids[static_cast<std::size_t>(victim)], kill ? SIGKILL : SIGSTOP);
    for (int rank = 0; rank < size; ++rank) {
      if (rank == victim) continue;
      if (expect_name(board, pids, rank, victim) && board.failed_at[rank] != 0) {
        delays.push_back(board.failed_at[rank] - stopped_at);
      }
    }
    if (kill) {
      ::waitpid(pids[static_cast<std::size_t>(victim)], nullptr, 0);
    } else {
      ::kill(pids[static_cast<std::size_t>(victim)], SIGCONT);
      expect_name(board, pids, victim, victim);
    }
    std::set<std::uint64_t> verdicts;
    for (int rank = 0; rank < size; ++rank) {
      if (rank != victim) verdicts.insert(board.found[rank]);
    }
    two_verdicts += verdicts.size() > 1;
  }

  // As properties of the test, which bench/hosts_chaos.py keeps.
  void record(const char* what) {
    for (const auto& [name, number] : {std::pair("trials", played),
                                       {"hangs", hangs},
                                       {"wrong_names", wrong_names},
                                       {"two_verdicts", two_verdicts}}) {
      ::testing::Test::RecordProperty(name, std::to_string(number));
    }
    std::sort(delays.begin(), delays.end());
    std::string all;
    for (const std::int64_t delay : delays) {
      all += std::to_string(static_cast<double>(delay) * 1e-6) + " ";
    }
    ::testing::Test::RecordProperty("delays_ms", all);
    std::printf(
        "%s: %zu ranks ended after a median of %.1f ms, at most %.1f ms; %zu of %zu worlds "
        "with more than one verdict\n",
        what, delays.size(), median_ms(), longest_ms(), static_cast<std::size_t>(two_verdicts),
        static_cast<std::size_t>(played));
  }
  // Records the trials of a test, and judges how long it took until a rank that lives knew.
  void judge(Stop how, std::chrono::milliseconds deadline) {
    record(how == Stop::kKill ? "kill" : "stop");
    ASSERT_FALSE(delays.empty());
    // A verdict that takes too long is not waited for. That is rare, also on a busy machine.
    EXPECT_LE(two_verdicts, 1 + played / 20);
    if (how == Stop::kKill) {
      EXPECT_LT(median_ms(), 200);
    }
    EXPECT_LT(longest_ms(), 3.0 * static_cast<double>(deadline.count()));
  }
  // The median of record()ed delays.
  double median_ms() const {
    return delays.empty() ? 0 : static_cast<double>(delays[delays.size() / 2]) * 1e-6;
  }
  double longest_ms() const {
    return delays.empty() ? 0 : static_cast<double>(delays.back()) * 1e-6;
  }

 private:
  // False if it hangs.
  bool expect_name(const Board& board, const std::vector<pid_t>& pids, int rank, int victim) {
    const pid_t pid = pids[static_cast<std::size_t>(rank)];
    int status = 0;
    if (!test::eventually([&] { return ::waitpid(pid, &status, WNOHANG) == pid; },
                          std::chrono::milliseconds(30'000))) {
      ADD_FAILURE() << "rank " << rank << " hangs";
      ++hangs;
      ::kill(pid, SIGKILL);
      ::waitpid(pid, &status, 0);
      return false;
    }
    wrong_names += board.blamed[rank] != victim;
    EXPECT_EQ(board.blamed[rank], victim) << "rank " << rank << ": " << board.words[rank];
    EXPECT_EQ(status, 0) << "rank " << rank << " crashed";
    return true;
  }
};

}  // namespace switchyard::testing
