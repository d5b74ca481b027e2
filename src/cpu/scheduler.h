// Subscriber and Scheduler of one rank: they find which packets have arrived, and which task is
// next.
//
// Any free processor plays both roles, under one lock: a task takes tens of microseconds to
// milliseconds, choosing one takes about one. (A thread of its own for each role would compete with
// the processors for cores; see docs/decisions/0004.)
#pragma once

#include <atomic>
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

  // Returns the first missing thing of a tile's rows; empty once every row is here.
  std::optional<protocol::Missing> missing_rows(const Tile& tile) const;
  // Does the same for the cells of a chunk of tokens.
  std::optional<protocol::Missing> missing_cells(std::uint32_t combine_chunk) const;

 private:
  const LayerState& layer_;
  const Pass& pass_;
};

class Scheduler {
 public:
  Scheduler(const LayerState& layer, Pass& pass)
      : subscriber_(layer, pass), layer_(layer), pass_(pass) {}

  // Lists the tasks of pass.work. Call it before any processor calls next().
  void start();

  // The first task in the common order whose inputs are complete and that nobody has taken, so that
  // no processor idles while any task can run. Empty if there is none at present.
  std::optional<protocol::Task> next();

  // The processor that took the task from next() has completed it.
  void complete(const protocol::Task& task);
  bool all_complete() const;

  // The reason why next() has no task.
  protocol::Missing missing();

 private:
  bool ready(const protocol::Task& task);

  Subscriber subscriber_;
  const LayerState& layer_;
  Pass& pass_;
  std::mutex mutex_;
  std::vector<protocol::Task> tasks_;
  std::vector<bool> taken_;
  std::vector<bool> tile_arrived_;
  std::vector<std::int32_t> free_slots_;
  std::size_t first_open_ = 0;  // every earlier task is taken
  std::uint64_t num_taken_ = 0;
  std::atomic<std::uint64_t> num_complete_{0};
};

}  // namespace switchyard::cpu
