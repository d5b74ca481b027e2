// The stages of a call, once for both backends: what a worker does, which is a warp of a kernel or
// a thread of a CPU rank. `Worker` has what differs: copies, sums, counters, flags (kernels.cu,
// cpu_rank.cpp). Its place is block `block` of `blocks`, and in it warp `warp` of `warps`; a warp
// has `lanes()` lanes, which call everything together unless it says otherwise.
//
// Every stage ends before the next one of the same rank begins, so counters that one stage counts
// can be read, and put back to 0, by the next.
#pragma once

#include "all_to_all/call.h"

#if defined(__CUDACC__)
#define SWITCHYARD_STAGE __device__ __forceinline__
#else
#define SWITCHYARD_STAGE inline
#endif

namespace switchyard::all_to_all {

SWITCHYARD_STAGE std::uint64_t count_flag(const Call& call, std::uint32_t count) {
  return static_cast<std::uint64_t>(call.tag) << 32 | count;
}

// Calls row(group, i) for this worker's share of the rows 0 ... count_of(group) - 1 of `groups`
// groups, until it returns false, and returns that.
//
// In groups: blocks are dealt to the groups in turn, so a block has one group's rows, and more of
// them if the group has more; with fewer blocks than groups a block has some whole groups.
// Flattened: the rows of all groups are one list, of which all workers take equal parts.
template <typename Worker, typename CountOf, typename Row>
SWITCHYARD_STAGE bool deal_rows(const Worker& w, bool flattened, int groups,
                                const CountOf& count_of, const Row& row) {
  const bool shared = w.blocks >= groups;  // groups by blocks
  auto stride = static_cast<std::uint32_t>(w.blocks * w.warps);
  auto i = static_cast<std::uint32_t>(w.block * w.warps + w.warp);
  for (int group = flattened ? 0 : w.block % groups; group < groups;
       group += flattened ? 1 : w.blocks) {
    if (!flattened) {
      const int sharers = shared ? (w.blocks - group + groups - 1) / groups : 1;
      stride = static_cast<std::uint32_t>(sharers * w.warps);
      i = static_cast<std::uint32_t>((shared ? w.block / groups : 0) * w.warps + w.warp);
    }
    const std::uint32_t count = count_of(group);
    for (; i < count; i += stride) {
      if (!row(group, i)) return false;
    }
    i -= count;  // of the list: the worker's first row of the next group
  }
  return true;
}

// Where rows to `rank` go: into its memory, or, in the rung `host`, into this rank's staging.
struct RowPlace {
  std::uint16_t* row;
  Origin* origin;
};

SWITCHYARD_STAGE RowPlace row_place(const Call& call, std::int32_t rank, std::uint32_t position) {
  const Memory& m = call.memory;
  const auto hidden = static_cast<std::size_t>(call.sizes.hidden);
  if (call.host) {
    const std::size_t at = call.of_row(0, rank, position);
    return {m.staging + at * hidden, m.staging_origins + at};
  }
  const std::size_t at = call.of_row(call.window, call.map.rank, position);
  return {translate(call.map, m.rows + at * hidden, rank),
          translate(call.map, m.origins + at, rank)};
}

// Counts the rows to every rank and says so to all of them, before any row is sent.
template <typename Worker>
SWITCHYARD_STAGE void send_counts(Worker& w, const Call& call) {
  for (int rank = w.warp; rank < call.map.size; rank += w.warps) {
    std::uint32_t count = 0;
    for (std::int32_t slot = w.lane(); slot < call.num_slots(); slot += w.lanes()) {
      count += call.ids[slot] / call.sizes.experts_per_rank == rank ? 1 : 0;
    }
    count = w.sum(count);
    std::uint64_t* const flag = call.memory.counts + call.of_rank(call.window, call.map.rank);
    w.signal(translate(call.map, flag, rank), count_flag(call, count));
  }
}

template <typename Worker>
SWITCHYARD_STAGE void dispatch_send(Worker& w, const Call& call) {
  const Memory& m = call.memory;
  const Sizes& s = call.sizes;
  if (call.flag_per_token && w.block == 0) send_counts(w, call);
  const std::int32_t stride = w.blocks * w.warps;
  for (std::int32_t slot = w.block * w.warps + w.warp; slot < call.num_slots(); slot += stride) {
    const std::int32_t rank = call.ids[slot] / s.experts_per_rank;
    const std::uint32_t position = w.next_of(m.sent + rank);
    const RowPlace to = row_place(call, rank, position);
    w.put(to.row,
          call.x + static_cast<std::size_t>(slot / s.top_k) * static_cast<std::size_t>(s.hidden),
          s.row_bytes());
    if (w.lane() == 0) {
      *to.origin = {call.map.rank, slot, static_cast<std::int32_t>(position),
                    call.ids[slot] % s.experts_per_rank};
      if (call.host) {
        m.sent_to[slot] = static_cast<std::uint32_t>(call.of_row(0, rank, position));
      }
    }
    if (call.flag_per_token) {
      std::uint32_t* const flag = m.row_flags + call.of_row(call.window, call.map.rank, position);
      w.signal(translate(call.map, flag, rank), call.tag);
    }
    ++w.rows;
  }
  if (call.flag_per_token || !w.last_of_grid(m.ticket)) return;
  // All blocks have put their rows: one flag stands for all rows to a rank.
  for (int rank = w.warp; rank < call.map.size; rank += w.warps) {
    const std::uint64_t flag = count_flag(call, w.load(m.sent + rank));
    if (call.host) {
      if (w.lane() == 0) m.staging_counts[rank] = flag;
    } else {
      std::uint64_t* const to = m.counts + call.of_rank(call.window, call.map.rank);
      w.signal(translate(call.map, to, rank), flag);
    }
  }
}

// Waits for a row if it has a flag, gives it a place among its expert's rows, and copies it there.
template <typename Worker>
SWITCHYARD_STAGE bool receive_row(Worker& w, const Call& call, int rank, std::uint32_t position) {
  const Memory& m = call.memory;
  const std::size_t at = call.of_row(call.window, rank, position);
  if (call.flag_per_token &&
      !w.wait(
          1, [&](int) { return m.row_flags + at; }, call.tag, [&](int) { return rank; })) {
    return false;
  }
  const Origin origin = m.origins[at];
  const auto hidden = static_cast<std::size_t>(call.sizes.hidden);
  const std::size_t place = static_cast<std::size_t>(origin.expert) * call.expert_room() +
                            w.next_of(m.expert_counts + origin.expert);
  w.put(m.expert_rows + place * hidden, m.rows + at * hidden, call.sizes.row_bytes());
  if (w.lane() == 0) {
    m.expert_origins[place] = origin;
    m.placed[call.of_row(0, rank, position)] = static_cast<std::uint32_t>(place);
  }
  ++w.rows;
  return true;
}

template <typename Worker>
SWITCHYARD_STAGE bool dispatch_receive(Worker& w, const Call& call) {
  const Memory& m = call.memory;
  // With numbered flags there is no memset: this rank's counters go back to 0 here, behind the
  // stage that used them.
  if (call.epochs && w.block == 0) w.clear(m.sent, call.map.size);
  const std::uint64_t* const counts = m.counts + call.of_rank(call.window, 0);
  // Flattened, every worker needs the counts of all ranks. Else a block waits for those ranks whose
  // rows it receives: w.block % ranks, and every w.blocks-th after it.
  const int first = call.flattened ? 0 : w.block % call.map.size;
  const int step = call.flattened ? 1 : w.blocks;
  const int awaited = call.host ? 0 : (call.map.size - first + step - 1) / step;
  const auto rank_of = [&](int i) { return first + i * step; };
  if (!w.wait(
          awaited, [&](int i) { return counts + rank_of(i); }, count_flag(call, 0), rank_of)) {
    return false;
  }
  const auto all = w.gather(counts, call.map.size);
  return deal_rows(
      w, call.flattened, call.map.size, [&](int rank) { return all.of(rank); },
      [&](int rank, std::uint32_t i) { return receive_row(w, call, rank, i); });
}

// The stand-in for the experts, as a stage of its own.
template <typename Worker>
SWITCHYARD_STAGE void multiply_by_experts(Worker& w, const Call& call) {
  const Memory& m = call.memory;
  const auto row = [&](int expert, std::uint32_t i) {
    std::uint16_t* const at =
        m.expert_rows + (static_cast<std::size_t>(expert) * call.expert_room() + i) *
                            static_cast<std::size_t>(call.sizes.hidden);
    w.multiply(at, at, call.sizes.hidden, call.factors[expert]);
    ++w.rows;
    return true;
  };
  deal_rows(
      w, call.flattened, call.sizes.experts_per_rank,
      [&](int expert) { return m.expert_counts[expert]; }, row);
}

template <typename Worker>
SWITCHYARD_STAGE void send_result(Worker& w, const Call& call, std::size_t place) {
  const Memory& m = call.memory;
  const auto hidden = static_cast<std::size_t>(call.sizes.hidden);
  const Origin origin = m.expert_origins[place];
  const std::size_t slot = call.of_slot(call.window, origin.slot);
  std::uint16_t* const to =
      call.host
          ? m.staging +
                call.of_row(0, origin.rank, static_cast<std::size_t>(origin.position)) * hidden
          : translate(call.map, m.results + slot * hidden, origin.rank);
  const std::uint16_t* const from = m.expert_rows + place * hidden;
  if (call.fused) {
    w.multiply(to, from, call.sizes.hidden, call.factors[origin.expert]);
  } else {
    w.put(to, from, call.sizes.row_bytes());
  }
  if (call.flag_per_token) {
    w.signal(translate(call.map, m.result_flags + slot, origin.rank), call.tag);
  }
  ++w.rows;
}

template <typename Worker>
SWITCHYARD_STAGE void combine_send(Worker& w, const Call& call) {
  const Memory& m = call.memory;
  // Groups are experts; flattened, there is no need to go through all experts, and rows are taken
  // in the order in which they came.
  const auto all = w.gather(m.counts + call.of_rank(call.window, 0), call.map.size);
  deal_rows(
      w, call.flattened, call.flattened ? call.map.size : call.sizes.experts_per_rank,
      [&](int group) { return call.flattened ? all.of(group) : m.expert_counts[group]; },
      [&](int group, std::uint32_t i) {
        send_result(w, call,
                    call.flattened ? m.placed[call.of_row(0, group, i)]
                                   : static_cast<std::size_t>(group) * call.expert_room() + i);
        return true;
      });
  if (call.host || call.flag_per_token || !w.last_of_grid(m.ticket)) return;
  for (int rank = w.warp; rank < call.map.size; rank += w.warps) {
    std::uint64_t* const flag = m.rank_flags + call.of_rank(call.window, call.map.rank);
    w.signal(translate(call.map, flag, rank), std::uint64_t{call.tag});
  }
}

template <typename Worker>
SWITCHYARD_STAGE bool combine_receive(Worker& w, const Call& call) {
  const Memory& m = call.memory;
  const Sizes& s = call.sizes;
  const auto hidden = static_cast<std::size_t>(s.hidden);
  if (call.epochs && w.block == 0) w.clear(m.expert_counts, s.experts_per_rank);
  if (!call.host && !call.flag_per_token) {
    const std::uint64_t* const flags = m.rank_flags + call.of_rank(call.window, 0);
    if (!w.wait(
            call.map.size, [&](int rank) { return flags + rank; }, std::uint64_t{call.tag},
            [](int rank) { return rank; })) {
      return false;
    }
  }
  const std::int32_t stride = w.blocks * w.warps;
  for (std::int32_t t = w.block * w.warps + w.warp; t < call.num_tokens; t += stride) {
    const std::int32_t first = t * s.top_k;  // slot
    if (call.flag_per_token) {
      const std::uint32_t* const flags = m.result_flags + call.of_slot(call.window, first);
      if (!w.wait(
              s.top_k, [&](int k) { return flags + k; }, call.tag,
              [&](int k) { return call.ids[first + k] / s.experts_per_rank; })) {
        return false;
      }
    }
    const std::uint16_t* const results = m.results + call.of_slot(call.window, first) * hidden;
    // Window 1 of `rows` begins behind `slots` rows of every rank.
    const std::uint16_t* const copied = m.rows + call.of_row(1, 0, 0) * hidden;
    w.weighted_sum(call.y + static_cast<std::size_t>(t) * hidden, s.hidden, s.top_k,
                   call.weights + first, [&](int k) {
                     return call.host ? copied + m.sent_to[first + k] * hidden
                                      : results + static_cast<std::size_t>(k) * hidden;
                   });
    ++w.rows;
  }
  return true;
}

}  // namespace switchyard::all_to_all
