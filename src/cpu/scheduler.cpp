#include "cpu/scheduler.h"

namespace switchyard::cpu {

using protocol::Missing;
using protocol::Phase;
using protocol::RankSet;
using protocol::Task;
using protocol::TaskKind;

void Subscriber::start() {
  num_counts_.assign(static_cast<std::size_t>(layer_.link->num_ranks()), 0);
}

RankSet Subscriber::look_for_counts() {
  const std::uint64_t flag = protocol::flag_of(pass_.epoch);
  RankSet here = 0;
  for (int s = 0; s < layer_.link->num_ranks(); ++s) {
    const std::uint64_t* const row = layer_.heap.counts(pass_.epoch, s).in(layer_.heaps().mine());
    std::size_t& e = num_counts_[static_cast<std::size_t>(s)];
    if (s == layer_.link->rank()) e = pass_.counts.size();
    // Acquire: pairs with the source's release in publish_counts().
    while (e < pass_.counts.size() && protocol::load_acquire(row + e) >> 32 == flag) ++e;
    if (e == pass_.counts.size()) here |= protocol::set_of(s);
  }
  return here;
}

std::optional<Missing> Subscriber::missing_counts(int source) const {
  const std::size_t e = num_counts_[static_cast<std::size_t>(source)];
  if (e == pass_.counts.size() || source == layer_.link->rank()) return std::nullopt;
  const std::uint64_t* const row =
      layer_.heap.counts(pass_.epoch, source).in(layer_.heaps().mine());
  return Missing{Phase::kCounts, source, e, protocol::flag_of(pass_.epoch),
                 protocol::load_acquire(row + e) >> 32};
}

bool Subscriber::rows_are_here(int expert, int source) const {
  if (source == layer_.link->rank()) return true;
  const auto of_owner = static_cast<std::uint32_t>(expert - layer_.first_expert());
  const auto distance = static_cast<std::uint32_t>(pass_.placement.distance_of(source));
  return protocol::load_acquire(
             layer_.heap.arrived(of_owner, distance).in(layer_.heaps().mine())) ==
         protocol::flag_of(pass_.epoch);
}

std::optional<Missing> Subscriber::missing_rows(const Tile& tile) const {
  std::optional<Missing> missing;
  const std::uint32_t flag = protocol::flag_of(pass_.epoch);
  const auto of_owner = static_cast<std::uint32_t>(tile.expert - layer_.first_expert());
  for_each_source(layer_, pass_, tile, [&](int source, std::uint32_t distance, std::uint32_t) {
    if (missing || distance == 0) return;
    // Acquire: pairs with the source's release in Processor::dispatch; the rows are read after it.
    const std::uint32_t seen =
        protocol::load_acquire(layer_.heap.arrived(of_owner, distance).in(layer_.heaps().mine()));
    if (seen != flag) {
      missing = {Phase::kDispatch, source, static_cast<std::uint64_t>(tile.expert), flag, seen};
    }
  });
  return missing;
}

std::optional<Missing> Subscriber::missing_cells(std::uint32_t combine_chunk) const {
  const std::int64_t begin = static_cast<std::int64_t>(combine_chunk) * kCombineChunk;
  const std::int64_t end = std::min<std::int64_t>(begin + kCombineChunk, pass_.tokens);
  const int top_k = layer_.spec.top_k;
  for (std::int64_t i = begin * top_k; i < end * top_k; ++i) {
    const Slot& slot = pass_.slots[static_cast<std::size_t>(i)];
    if (slot.owner < 0) continue;
    // Acquire: pairs with the owner's release in Processor::gemm2; the cells are read after it.
    if (slot.owner == layer_.link->rank()) {
      if (slot.tile < 0 ||
          protocol::load_acquire(&pass_.tiles[static_cast<std::size_t>(slot.tile)].finished) == 0) {
        return Missing{Phase::kExperts, slot.owner, static_cast<std::uint64_t>(slot.tile), 1, 0};
      }
      continue;
    }
    const auto expert = static_cast<std::uint32_t>(pass_.ids[static_cast<std::size_t>(i)]);
    const std::uint32_t flag = protocol::flag_of(pass_.epoch);
    const std::uint32_t seen =
        protocol::load_acquire(layer_.heap.finished(expert).in(layer_.heaps().mine()));
    if (seen != flag) return Missing{Phase::kCombine, slot.owner, expert, flag, seen};
  }
  if (pass_.work.num_shared_tiles > 0) {
    for (std::int64_t token = begin; token < end; ++token) {
      const auto tile = static_cast<std::size_t>(token) / pass_.shared_tiles.height;
      const std::uint32_t finished = protocol::load_acquire(&pass_.tiles[tile].finished);
      if (finished == 0) return Missing{Phase::kExperts, layer_.link->rank(), tile, 1, 0};
    }
  }
  return std::nullopt;
}

void Scheduler::start(std::chrono::nanoseconds patience, bool splits) {
  patience_ = patience;
  splits_ = splits;
  subscriber_.start();
  tasks_.clear();
  combines_.clear();
  num_listed_ = 0;
  list(pass_.work, 0);
  tile_arrived_.assign(pass_.tiles.size(), false);
  free_slots_.clear();
  for (std::int32_t slot = pass_.num_intermediate_slots; slot-- > 0;) free_slots_.push_back(slot);
  first_open_ = first_combine_ = 0;
  num_taken_ = 0;
  idle_since_.reset();
  num_complete_ = 0;
  all_placed_ = false;
}

// Appends the tasks of a workload whose first tile is `first_tile` of the pass.
void Scheduler::list(const protocol::Workload& work, std::uint32_t first_tile) {
  protocol::for_each_task(work, [&](Task task) {
    if (task.kind == TaskKind::kCombine) {
      combines_.push_back(task);
      return;
    }
    if (task.kind != TaskKind::kDispatch) task.index += first_tile;
    tasks_.push_back(task);
  });
  num_listed_.store(tasks_.size() + combines_.size(), std::memory_order_release);
}

std::uint32_t Scheduler::count(int source, int expert) const {
  const auto e = static_cast<std::size_t>(expert);
  return source == layer_.link->rank() ? pass_.counts[e]
                                       : count_of(layer_, pass_.epoch, source, expert);
}

bool Scheduler::place(bool idle) {
  const std::lock_guard lock(mutex_);
  if (all_placed()) return false;
  const RankSet known = subscriber_.look_for_counts();
  if (known == protocol::all_ranks(layer_.link->num_ranks())) {
    place_the_rest();
    return true;
  }
  if (!splits_ || !idle) return false;
  const auto now = std::chrono::steady_clock::now();
  if (!idle_since_) idle_since_ = now;
  return now - *idle_since_ >= patience_ && place_one_expert(known);
}

void Scheduler::place_the_rest() {
  layer_.step(ProtocolStep::Kind::kPlan, layer_.link->rank(), pass_.epoch);
  const RankSet all = protocol::all_ranks(layer_.link->num_ranks());
  const auto first_tile = static_cast<std::uint32_t>(pass_.tiles.size());
  const protocol::ExpertPartition& experts = layer_.places;
  for (int e = experts.begin(layer_.link->rank()); e < experts.end(layer_.link->rank()); ++e) {
    place_rows(e, all & ~pass_.placement.placed(e));
  }
  list(pass_.routed_work(first_tile), first_tile);
  placed_at_ = std::chrono::steady_clock::now();
  all_placed_.store(true, std::memory_order_release);
}

// Places the rows that are here of the expert that has the most of them.
bool Scheduler::place_one_expert(RankSet known) {
  const protocol::ExpertPartition& experts = layer_.places;
  int most_rows_of = -1;
  std::uint32_t most_rows = 0;
  RankSet sources = 0;
  for (int e = experts.begin(layer_.link->rank()); e < experts.end(layer_.link->rank()); ++e) {
    const RankSet open = known & ~pass_.placement.placed(e);
    RankSet here = 0;
    std::uint32_t rows = 0;
    for (int s = 0; s < layer_.link->num_ranks(); ++s) {
      if ((open & protocol::set_of(s)) == 0) continue;
      const std::uint32_t of_source = count(s, e);
      if (of_source == 0 || !subscriber_.rows_are_here(e, s)) continue;
      here |= protocol::set_of(s);
      rows += of_source;
    }
    if (rows <= most_rows) continue;
    most_rows_of = e;
    most_rows = rows;
    sources = here;
  }
  if (most_rows == 0) return false;
  const auto first_tile = static_cast<std::uint32_t>(pass_.tiles.size());
  place_rows(most_rows_of, sources);
  list(pass_.routed_work(first_tile), first_tile);
  return true;
}

// Cuts the rows into tiles, and tells this rank's own slots which tile they are in.
void Scheduler::place_rows(int expert, RankSet sources) {
  const auto count_of_source = [&](int source) { return count(source, expert); };
  const std::uint32_t rows = pass_.placement.place(expert, sources, count_of_source);
  if (rows == 0) return;
  const std::uint32_t segment = pass_.placement.num_segments() - 1;
  const auto first_tile = static_cast<std::int32_t>(pass_.tiles.size());
  const protocol::TokenTiles tiles(rows, layer_.tile);
  pass_.add_tiles(tiles, layer_.tile, expert, segment);
  tile_arrived_.resize(pass_.tiles.size(), false);

  const auto of_owner = static_cast<std::uint32_t>(expert - layer_.first_expert());
  for (int s = 0; s < layer_.link->num_ranks(); ++s) {
    if ((sources & protocol::set_of(s)) == 0) continue;
    *pass_.unfinished_rows(of_owner, s, layer_.link->num_ranks()) = count(s, expert);
  }
  if ((sources & protocol::set_of(layer_.link->rank())) == 0) return;
  std::uint32_t row = pass_.placement.source_begin(segment, layer_.link->rank());
  for (const std::uint32_t entry : pass_.own_entries[of_owner]) {
    const std::size_t slot =
        protocol::SlotEntry::token(entry) * static_cast<std::size_t>(layer_.spec.top_k) +
        protocol::SlotEntry::k(entry);
    pass_.slots[slot].tile = first_tile + static_cast<std::int32_t>(row++ / tiles.height);
  }
}

bool Scheduler::ready(const Task& task) {
  switch (task.kind) {
    case TaskKind::kDispatch: return true;
    case TaskKind::kGemm1:
      if (pass_.tiles[task.index].intermediate_slot < 0 && free_slots_.empty()) return false;
      if (pass_.work.is_shared(task.index)) return true;
      if (!tile_arrived_[task.index] && !subscriber_.missing_rows(pass_.tiles[task.index])) {
        tile_arrived_[task.index] = true;
      }
      return tile_arrived_[task.index];
    case TaskKind::kGemm2:
      return protocol::load_acquire(&pass_.tiles[task.index].gemm1_done) ==
             pass_.work.gemm1_blocks(task.index);
    case TaskKind::kCombine: return !subscriber_.missing_cells(task.index);
    case TaskKind::kNone: break;
  }
  return false;
}

std::optional<Task> Scheduler::next() {
  const std::lock_guard lock(mutex_);
  std::optional<Task> task = take_first_ready(tasks_, first_open_);
  if (!task) task = take_first_ready(combines_, first_combine_);
  return task;
}

std::optional<Task> Scheduler::take_first_ready(std::vector<Task>& tasks, std::size_t& first_open) {
  while (first_open < tasks.size() && tasks[first_open].kind == TaskKind::kNone) ++first_open;
  for (std::size_t i = first_open; i < tasks.size(); ++i) {
    const Task task = tasks[i];
    if (task.kind == TaskKind::kNone) continue;
    if (ready(task)) {
      tasks[i].kind = TaskKind::kNone;
      ++num_taken_;
      if (task.kind == TaskKind::kGemm1 && pass_.tiles[task.index].intermediate_slot < 0) {
        pass_.tiles[task.index].intermediate_slot = free_slots_.back();
        free_slots_.pop_back();
      }
      return task;
    }
    // Chunks of tokens complete nearly in order: if the first is incomplete, the rest need no look.
    if (task.kind == TaskKind::kCombine) break;
    // All blocks of a tile need the same inputs, so if one cannot run, none can.
    while (i + 1 < tasks.size() && tasks[i + 1].kind == task.kind &&
           tasks[i + 1].index == task.index) {
      ++i;
    }
  }
  return std::nullopt;
}

void Scheduler::complete(const Task& task) {
  if (task.kind == TaskKind::kGemm2) {
    const std::lock_guard lock(mutex_);
    Tile& tile = pass_.tiles[task.index];
    // Two processors may find the tile complete; the first takes the slot back.
    if (tile.intermediate_slot >= 0 && protocol::load_acquire(&tile.returned) != 0) {
      free_slots_.push_back(tile.intermediate_slot);
      tile.intermediate_slot = -1;
    }
  }
  protocol::note_progress(layer_.heaps());
  num_complete_.fetch_add(1, std::memory_order_acq_rel);
}

bool Scheduler::all_complete() const {
  return all_placed() && num_complete_.load(std::memory_order_acquire) ==
                             num_listed_.load(std::memory_order_acquire);
}

Missing Scheduler::missing() {
  const std::lock_guard lock(mutex_);
  // Work in hand comes first: while another thread of this rank works, the rank is not waiting for
  // anybody, and if that thread hangs, the fault is here.
  const Missing own_work{Phase::kExperts, layer_.link->rank(), first_open_, num_listed_,
                         num_complete_};
  if (num_taken_ != num_complete_) return own_work;
  // Counts are the earliest step.
  for (int s = 0; s < layer_.link->num_ranks() && !all_placed(); ++s) {
    if (const auto counts = subscriber_.missing_counts(s)) return *counts;
  }
  for (std::size_t i = first_open_; i < tasks_.size(); ++i) {
    const Task& task = tasks_[i];
    if (task.kind != TaskKind::kGemm1 || pass_.work.is_shared(task.index)) continue;
    if (const auto rows = subscriber_.missing_rows(pass_.tiles[task.index])) return *rows;
  }
  for (std::size_t i = first_combine_; i < combines_.size(); ++i) {
    if (combines_[i].kind == TaskKind::kNone) continue;
    if (const auto cells = subscriber_.missing_cells(combines_[i].index)) return *cells;
  }
  return own_work;
}

}  // namespace switchyard::cpu
