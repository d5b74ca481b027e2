#include "cpu/scheduler.h"

namespace switchyard::cpu {

using protocol::Missing;
using protocol::Phase;
using protocol::Task;
using protocol::TaskKind;

std::optional<Missing> Subscriber::missing_rows(const Tile& tile) const {
  std::optional<Missing> missing;
  const std::uint32_t flag = protocol::flag_of(pass_.epoch);
  const auto of_owner = static_cast<std::uint32_t>(tile.expert - layer_.first_expert());
  for_each_source(layer_, pass_, tile, [&](int source, std::uint32_t distance) {
    if (missing || distance == 0) return;
    // Acquire: pairs with the source's release in Processor::dispatch; the rows are read after it.
    const std::uint32_t seen =
        protocol::load_acquire(layer_.heap.arrived(layer_.heaps.mine(), of_owner, distance));
    if (seen != flag) {
      missing = {Phase::kDispatch, source, tile.flag, flag, seen};
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
    if (slot.owner == layer_.heaps.rank) {
      const std::uint32_t tile =
          pass_.work.num_shared_tiles + slot.tile - pass_.placement.my_first_tile();
      if (protocol::load_acquire(&pass_.tiles[tile].finished) == 0) {
        return Missing{Phase::kExperts, slot.owner, tile, 1, 0};
      }
      continue;
    }
    const std::uint32_t flag = protocol::flag_of(pass_.epoch);
    const std::uint32_t seen =
        protocol::load_acquire(layer_.heap.finished(layer_.heaps.mine(), slot.tile));
    if (seen != flag) return Missing{Phase::kCombine, slot.owner, slot.tile, flag, seen};
  }
  if (pass_.work.num_shared_tiles > 0) {
    for (std::int64_t token = begin; token < end; ++token) {
      const auto tile = static_cast<std::size_t>(token) / pass_.shared_tiles.height;
      const std::uint32_t finished = protocol::load_acquire(&pass_.tiles[tile].finished);
      if (finished == 0) return Missing{Phase::kExperts, layer_.heaps.rank, tile, 1, 0};
    }
  }
  return std::nullopt;
}

void Scheduler::start() {
  tasks_.clear();
  protocol::for_each_task(pass_.work, [this](const Task& task) { tasks_.push_back(task); });
  taken_.assign(tasks_.size(), false);
  tile_arrived_.assign(pass_.tiles.size(), false);
  free_slots_.clear();
  for (std::int32_t slot = pass_.num_intermediate_slots; slot-- > 0;) free_slots_.push_back(slot);
  first_open_ = 0;
  num_taken_ = 0;
  num_complete_ = 0;
}

bool Scheduler::ready(const Task& task) {
  switch (task.kind) {
    case TaskKind::kDispatch:
      return true;
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
    case TaskKind::kCombine:
      return !subscriber_.missing_cells(task.index);
    case TaskKind::kNone:
      break;
  }
  return false;
}

std::optional<Task> Scheduler::next() {
  const std::lock_guard lock(mutex_);
  while (first_open_ < tasks_.size() && taken_[first_open_]) ++first_open_;
  for (std::size_t i = first_open_; i < tasks_.size(); ++i) {
    if (taken_[i]) continue;
    const Task& task = tasks_[i];
    if (ready(task)) {
      taken_[i] = true;
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
    while (i + 1 < tasks_.size() && tasks_[i + 1].kind == task.kind &&
           tasks_[i + 1].index == task.index) {
      ++i;
    }
  }
  return std::nullopt;
}

void Scheduler::complete(const Task& task) {
  if (task.kind == TaskKind::kGemm2) {
    const std::lock_guard lock(mutex_);
    Tile& tile = pass_.tiles[task.index];
    // Two processors may find the count complete; the first takes the slot back.
    if (tile.intermediate_slot >= 0 &&
        protocol::load_acquire(&tile.gemm2_done) == pass_.work.gemm2_blocks(task.index)) {
      free_slots_.push_back(tile.intermediate_slot);
      tile.intermediate_slot = -1;
    }
  }
  protocol::note_progress(layer_.heaps);
  num_complete_.fetch_add(1, std::memory_order_acq_rel);
}

bool Scheduler::all_complete() const {
  return num_complete_.load(std::memory_order_acquire) == tasks_.size();
}

Missing Scheduler::missing() {
  const std::lock_guard lock(mutex_);
  // Work in hand comes first: while another thread of this rank works, the rank is not waiting for
  // anybody, and if that thread hangs, the fault is here.
  const Missing own_work{Phase::kExperts, layer_.heaps.rank, first_open_, tasks_.size(),
                         num_complete_};
  if (num_taken_ != num_complete_) return own_work;
  for (std::size_t i = first_open_; i < tasks_.size(); ++i) {
    if (taken_[i]) continue;
    const Task& task = tasks_[i];
    if (task.kind == TaskKind::kGemm1 && !pass_.work.is_shared(task.index)) {
      if (const auto rows = subscriber_.missing_rows(pass_.tiles[task.index])) return *rows;
    } else if (task.kind == TaskKind::kCombine) {
      if (const auto cells = subscriber_.missing_cells(task.index)) return *cells;
    }
  }
  return own_work;
}

}  // namespace switchyard::cpu
