// Subscriber and Scheduler of one rank: they find which packets have arrived, and which task is
// next.
//
// Any free processor plays both roles, under one lock: a task takes tens of microseconds to
// milliseconds, choosing one takes about one. (A thread of its own for each role would compete with
// the processors for cores; see docs/decisions/0004.)
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <vector>

#include "cpu/pass.h"
#include "protocol/wait.h"

namespace switchyard::cpu {

// Looks at the words that peers write.
class Subscriber {
 public:
  Subscriber(const LayerState& layer, const Pass& pass) : layer_(layer), pass_(pass) {}

  // Forgets which counts have come.
  void start();
  // Looks for counts that have come since. Returns the ranks whose counts are here.
  protocol::RankSet look_for_counts();
  // Returns the first missing count of a rank; empty once its counts are here.
  std::optional<protocol::Missing> missing_counts(int source) const;

  // True once a source's rows for one of this rank's experts are here, whose number is known.
  bool rows_are_here(int expert, int source) const;
  // Returns the first missing thing of a tile's rows; empty once every row is here.
  std::optional<protocol::Missing> missing_rows(const Tile& tile) const;
  // Does the same for the cells of a chunk of tokens.
  std::optional<protocol::Missing> missing_cells(std::uint32_t combine_chunk) const;

 private:
  const LayerState& layer_;
  const Pass& pass_;
  std::vector<std::size_t> num_counts_;  // [rank]: counts seen, from the first on
};

// How a rank goes on while others are late.
//
// Sending and the shared expert need no other rank's counts, and start at once. Routed rows are
// placed when everybody's counts are here, so that an expert's weights are read once. If some are
// late and a thread has nothing else to do for a while (`patience`), it places the rows of one
// expert that are here. It takes the expert with the most of them, and then the next. The rest of
// that expert's rows are placed when they come, and its weights are read again for them. So a late
// rank costs the others a second reading of what they could do in the meantime, and nothing of what
// they had not begun.
class Scheduler {
 public:
  Scheduler(const LayerState& layer, Pass& pass)
      : subscriber_(layer, pass), layer_(layer), pass_(pass) {}

  // Starts a pass with the tasks that need no other rank. Call it before any processor calls
  // next(). Rows are only placed ahead of counts if `splits` is true.
  void start(std::chrono::nanoseconds patience, bool splits);

  // The first task in the common order whose inputs are complete and that nobody has taken, so that
  // no processor idles while any task can run. Empty if there is none at present.
  std::optional<protocol::Task> next();

  // Call it when next() has no task. It places rows: all of them once everybody's counts are here,
  // or those of one expert if `idle`, which says that a core has nothing else to do, and if
  // patience is at an end. Returns true if it placed any.
  bool place(bool idle);

  // The processor that took the task from next() has completed it.
  void complete(const protocol::Task& task);
  bool all_complete() const;
  bool all_placed() const { return all_placed_.load(std::memory_order_acquire); }
  // When everybody's counts were here and all rows placed.
  std::chrono::steady_clock::time_point placed_at() const { return placed_at_; }

  // The reason why next() has no task.
  protocol::Missing missing();

 private:
  bool ready(const protocol::Task& task);
  std::optional<protocol::Task> take_first_ready(std::vector<protocol::Task>& tasks,
                                                 std::size_t& first_open);
  void list(const protocol::Workload& work, std::uint32_t first_tile);
  void place_the_rest();
  bool place_one_expert(protocol::RankSet known);
  void place_rows(int expert, protocol::RankSet sources);
  std::uint32_t count(int source, int expert) const;

  Subscriber subscriber_;
  const LayerState& layer_;
  Pass& pass_;
  std::chrono::nanoseconds patience_{0};
  bool splits_ = false;
  std::mutex mutex_;
  // Taken tasks have the kind kNone.
  std::vector<protocol::Task> tasks_;     // of sending and of tiles
  std::vector<protocol::Task> combines_;  // behind all of those
  std::vector<bool> tile_arrived_;
  std::vector<std::int32_t> free_slots_;
  std::size_t first_open_ = 0, first_combine_ = 0;  // every earlier task is taken
  std::uint64_t num_taken_ = 0;
  std::optional<std::chrono::steady_clock::time_point> idle_since_;
  std::chrono::steady_clock::time_point placed_at_;
  std::atomic<std::uint64_t> num_listed_{0}, num_complete_{0};
  std::atomic<bool> all_placed_{false};
};

}  // namespace switchyard::cpu
