// Dispatch: sends tokens into the pools of their experts' ranks, and copies them from a pool into
// rows.
//
//   send_tokens     some blocks sort the slots by expert, and send counts and entries to all ranks;
//                   others send tokens, each once to a rank, and need no order for that. The last
//                   block raises the flags
//   await_dispatch  one block waits for the flags of all ranks, and plans where rows go
//   place_rows      copies them there, without waiting
//
// If the receive follows the send at once, and the rank has its device to itself, further blocks of
// send_tokens plan and place tokens while they arrive. These blocks have little patience:
// await_dispatch waits for late ranks, and place_rows continues where they stopped.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "gpu/dispatch/launch.h"
#include "gpu/dispatch/sort.cuh"
#include "gpu/ptx/convert.cuh"
#include "gpu/tile/quantize.cuh"

namespace switchyard::gpu {
namespace {

using protocol::SlotEntry;

// --------------------------------------------------------------------------------------- send

constexpr std::uint32_t kQuantStep = 32 * kLaneColumns;  // columns of a warp at a time

// Loads sixteen of a token's columns as bf16; zeros beyond its end.
template <Wire kWire>
__device__ __forceinline__ void load_columns(uint4 (&v)[2], const std::byte* token,
                                             std::uint32_t column, std::uint32_t columns) {
  v[0] = v[1] = uint4{0, 0, 0, 0};
  if (column >= columns) return;
  if constexpr (kWire == Wire::kFromF32) {
    const auto* const from = reinterpret_cast<const float4*>(token) + column / 4;
    const float4 a = from[0], b = from[1], c = from[2], d = from[3];
    v[0] = {pack_bf16(a.x, a.y), pack_bf16(a.z, a.w), pack_bf16(b.x, b.y), pack_bf16(b.z, b.w)};
    v[1] = {pack_bf16(c.x, c.y), pack_bf16(c.z, c.w), pack_bf16(d.x, d.y), pack_bf16(d.z, d.w)};
  } else {
    const auto* const from = reinterpret_cast<const uint4*>(token) + column / 8;
    v[0] = from[0];
    v[1] = from[1];
    if constexpr (kWire == Wire::kFromF16) {
      const auto rounded = [](std::uint32_t pair) {
        const auto value = [](std::uint32_t bits) {
          return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
        };
        return pack_bf16(value(pair & 0xffff), value(pair >> 16));
      };
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        v[i] = {rounded(v[i].x), rounded(v[i].y), rounded(v[i].z), rounded(v[i].w)};
      }
    }
  }
}

// The ranks that get a token, and its place in their pools. A rank's lane is that of the token's
// first slot there.
struct Targets {
  const protocol::Heaps& heaps;
  protocol::Region<std::byte> row;
  std::uint32_t lanes;
  int rank;

  // Calls put(peer) for each of them.
  template <typename Put>
  __device__ __forceinline__ void for_each(Put&& put) const {
#pragma unroll 1
    for (std::uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      put(Peer(heaps, __shfl_sync(~0u, rank, __ffs(static_cast<int>(rest)) - 1)));
    }
  }
};

// Cuts tokens into units: short enough that flags rise soon, long enough to be worth a fence.
template <Wire kWire>
__device__ __forceinline__ Units units_to_send(const ExchangeSite& site, const DispatchSend& call) {
  const std::uint32_t senders = gridDim.x - call.placing_blocks - call.first_sender;
  if constexpr (kWire == Wire::kCopy) {
    return {call.count, CopySteps::count(call.wire_bytes), senders, 2};
  } else {
    return {call.count, protocol::ceil_div(site.hidden, kQuantStep), senders, 4};
  }
}

template <Wire kWire>
__device__ __forceinline__ void send_step(const ExchangeSite& site, const DispatchSend& call,
                                          const std::byte* token, const Targets& targets,
                                          std::uint32_t step) {
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t column = step * kQuantStep + lane * kLaneColumns;
  uint4 v[2];
  load_columns<kWire>(v, token, column, site.hidden);
  float scale;
  const uint4 codes = quantize_together(v[0], v[1], scale);
  targets.for_each([&](const Peer& peer) {
    if (column >= site.hidden) return;
    peer.put_vector(targets.row + column, codes);
    if (lane % kGroupLanes != 0) return;
    peer.put(targets.row.as<float>(site.heap.scale_offset()) + column / kQuantGroup, scale);
  });
}

// Sends the scales of an FP8 token that is copied.
__device__ __forceinline__ void send_scales(const ExchangeSite& site, const DispatchSend& call,
                                            std::uint32_t token, const Targets& targets) {
  const float* const scales = call.scales + token * call.scale_stride;
  for (std::uint32_t g = threadIdx.x % 32; g - threadIdx.x % 32 < call.groups; g += 32) {
    const float scale = g < call.groups ? scales[g] : 0;
    targets.for_each([&](const Peer& peer) {
      if (g < call.groups) peer.put(targets.row.as<float>(site.heap.scale_offset()) + g, scale);
    });
  }
}

// Sends a warp's units of tokens. Returns how many tokens went to other ranks.
template <Wire kWire>
__device__ __forceinline__ std::uint32_t send_units(const ExchangeSite& site,
                                                    const HandleSite& handle,
                                                    const DispatchSend& call,
                                                    const Sending& sending, const Units& units) {
  const protocol::ExpertPartition& places = site.heaps.experts;
  const int me = site.heaps.rank;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t senders = gridDim.x - call.placing_blocks - call.first_sender;
  const std::uint32_t first = threadIdx.x / 32 * senders + blockIdx.x - call.first_sender;
  std::uint32_t tokens_sent = 0;
#pragma unroll 1
  for (std::uint32_t unit = first; unit < units.count; unit += senders * kMoverWarps) {
    const std::uint32_t token = units.row(unit), part = units.part(unit);
    const std::byte* const from = call.tokens + token * call.token_stride;
    std::uint32_t step = units.begin(part);
    const std::uint32_t end = units.end(part);
    Vectors v;  // loaded while the targets are looked up
    if constexpr (kWire == Wire::kCopy) load_step(v, from, step, step < end ? call.wire_bytes : 0);
    const std::size_t slot = std::size_t{token} * site.top_k + lane;
    std::int32_t place = -1;
    if (lane < site.top_k) {
      place = call.new_layout ? place_of(call.slots, id_of(call.slots, given_id(call.slots, slot)))
                              : handle.places[slot];
    }
    const int owner = place < 0 ? -1 : places.owner(place);
    const std::uint32_t same = __match_any_sync(~0u, owner);
    const bool leads = owner >= 0 && lane == static_cast<std::uint32_t>(__ffs(same)) - 1;
    const Targets targets{site.heaps, site.heap.pool(sending.number, me, token),
                          __ballot_sync(~0u, leads), owner};
    if (part == 0) {
      tokens_sent += __popc(__ballot_sync(~0u, leads && owner != me));
      if (kWire == Wire::kCopy && call.groups != 0) send_scales(site, call, token, targets);
    }
    if constexpr (kWire == Wire::kCopy) {
#pragma unroll 1
      while (step < end) {
        targets.for_each(
            [&](const Peer& peer) { put_step(peer, targets.row, v, step, call.wire_bytes); });
        if (++step < end) load_step(v, from, step, call.wire_bytes);
      }
    } else {
#pragma unroll 1
      for (; step < end; ++step) send_step<kWire>(site, call, from, targets, step);
    }
    __syncwarp();
    if (call.by_parts && lane == 0) {
      fence_system();
      count_units(site, call, sending, token / kPartTokens, 1);
    }
  }
  return tokens_sent;
}

// Advances the exchange's words to this dispatch. Called by one thread when all blocks of the send
// have ended.
__device__ __forceinline__ void advance(const ExchangeSite& site, const HandleSite& handle,
                                        const DispatchSend& call, const Sending& sending) {
  handle.plan->layout = sending.layout;
  ExchangeWords& words = *site.words;
  words.dispatch = sending.number;
  words.dispatch_of_all = ++words.calls;
  words.tokens = call.count;
  words.tokens_sent = take_count(site, 0);
  words.entries_sent = take_count(site, 1);
  words.new_layout = call.new_layout ? 1 : 0;
  protocol::note_progress(site.heaps);
}

// ------------------------------------------------------------------------------------ receive

constexpr std::uint32_t kMostOwn = 1024;  // a thread for each of this rank's experts

// Returns the rows that a source has for the experts before e. Its counts have arrived.
__device__ __forceinline__ std::uint32_t listed(const std::uint64_t* counts, std::uint32_t e) {
  return e == 0 ? 0 : static_cast<std::uint32_t>(protocol::load_relaxed(counts + e - 1));
}

__device__ void plan_rows(const ExchangeSite& site, const HandleSite& handle,
                          const DispatchReceive& call, std::uint64_t number) {
  __shared__ std::uint32_t end_of_rows;
  const std::uint32_t e = threadIdx.x, own = call.own_experts;
  const int ranks = site.heaps.size();
  if (threadIdx.x == 0) end_of_rows = 0;
  const auto counts = [&](int r) { return site.heap.counts(number, r).in(site.heaps.mine()); };
  // The counts of the first ranks are all loaded at the same time.
  constexpr int kAtOnce = 8;
  std::uint32_t begins[kAtOnce] = {}, ends[kAtOnce] = {};
#pragma unroll
  for (int r = 0; r < kAtOnce; ++r) {
    if (r >= ranks || e >= own) continue;
    begins[r] = listed(counts(r), e);
    ends[r] = listed(counts(r), e + 1);
  }
  std::uint32_t total = 0;
#pragma unroll
  for (int r = 0; r < kAtOnce; ++r) total += ends[r] - begins[r];
  for (int r = kAtOnce; e < own && r < ranks; ++r) {
    total += listed(counts(r), e + 1) - listed(counts(r), e);
  }
  const auto size = static_cast<std::uint32_t>(call.layout.size);
  const bool padded = call.layout.kind == RowLayout::Kind::kPadded;
  const bool blocked = call.layout.kind == RowLayout::Kind::kBlocked;
  const std::uint32_t kept = padded ? min(total, size) : total;
  const std::uint32_t room = blocked ? protocol::ceil_div(kept, size) * size : kept;
  // One scan makes two sums; neither reaches 2^32.
  const std::uint64_t up_to = sum_up_to_thread(std::uint64_t{room} << 32 | kept);
  const std::uint32_t packed = static_cast<std::uint32_t>(up_to) - kept;
  const std::uint32_t first = padded ? e * size : static_cast<std::uint32_t>(up_to >> 32) - room;
  if (e < own) {
    if (total > kept) {
      record_failure(site.failures->padded,
                     ExchangeFailures::kFound | std::uint64_t{e} << 32 | std::uint64_t{total});
    }
    handle.limit[e] = first + kept;
    handle.own_ends[e] = static_cast<std::int32_t>(packed + kept);
    if (kept != 0) atomicMax(&end_of_rows, first + kept);
    std::uint32_t before = 0;
    const auto store_base = [&](int r, std::uint32_t begin, std::uint32_t end) {
      const std::size_t at = static_cast<std::size_t>(r) * own + e;
      handle.row_base[at] = first + before;
      handle.packed_base[at] = packed + before;
      handle.list_base[at] = begin;
      before += end - begin;
    };
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      if (r < ranks) store_base(r, begins[r], ends[r]);
    }
    for (int r = kAtOnce; r < ranks; ++r) {
      store_base(r, listed(counts(r), e), listed(counts(r), e + 1));
    }
  }
  if (e + 1 == own || (own == 0 && e == 0)) {
    handle.plan->num_rows = own == 0 ? 0 : packed + kept;
    handle.plan->layout_rows = own == 0 ? 0 : padded ? own * size : first + room;
  }
  for (int r = static_cast<int>(threadIdx.x); r < ranks; r += static_cast<int>(blockDim.x)) {
    handle.plan->tokens[r] = static_cast<std::uint32_t>(
        load_words(site.heap.header(number, r).in(site.heaps.mine())).second);
  }
  // Sums the ranks' arrivals in one warp, two ranks per lane.
  if (threadIdx.x < 32) {
    const int low = static_cast<int>(2 * threadIdx.x), high = low + 1;
    const std::uint32_t of_low = low < ranks ? listed(counts(low), own) : 0;
    const std::uint32_t of_high = high < ranks ? listed(counts(high), own) : 0;
    const auto sum = static_cast<std::uint32_t>(sum_up_to_lane(of_low + of_high));
    if (low == 0) handle.plan->first[0] = 0;
    if (low < ranks) handle.plan->first[low + 1] = sum - of_high;
    if (high < ranks) handle.plan->first[high + 1] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) handle.plan->end_of_rows = end_of_rows;
}

// Ends the exchange, because ranks use the rows of different dispatches. Called by one thread.
__device__ void refuse_mixture(const ExchangeSite& site, std::uint64_t number, std::uint64_t layout,
                               int source, std::uint64_t word) {
  record_failure(site.failures->mixture_of, number << 32 | protocol::flag_of(layout));
  record_failure(site.failures->mixture, ExchangeFailures::kFound |
                                             static_cast<std::uint64_t>(source) << 32 |
                                             static_cast<std::uint32_t>(word));
  protocol::abort_world(site.heaps, {site.heaps.rank, site.heaps.rank, protocol::Phase::kDispatch,
                                     site.words->dispatch_of_all,
                                     static_cast<std::uint64_t>(source), protocol::flag_of(layout),
                                     static_cast<std::uint32_t>(word), 0, site.heaps.rank});
  fence_system();
  record_failure(site.failures->given_up, std::uint32_t{1});
}

__global__ void __launch_bounds__(kMostOwn)
    await_dispatch(const __grid_constant__ ExchangeSite site,
                   const __grid_constant__ HandleSite handle,
                   const __grid_constant__ DispatchReceive call) {
  await_kernel_before();
  const std::uint64_t number = site.words->dispatch, layout = handle.plan->layout;
  const bool planned = !call.new_layout || handle.plan->planned == number;
  const BlockTrace trace(site, ExchangeStage::kAwaitDispatch, TraceKind::kCounts, number);
  if (!is_alive(site)) return;
  const int ranks = site.heaps.size();
  const auto flag_of = [&](int r) { return site.heap.arrived(number, r).in(site.heaps.mine()); };
  const bool arrived = threadIdx.x >= 32 || await_all(site, protocol::Phase::kDispatch, number,
                                                      site.words->dispatch_of_all, flag_of);
  if (__syncthreads_and(arrived) == 0) return;
  if (threadIdx.x == 0) trace.begin();
  invite_next_kernel();
  const int r = static_cast<int>(threadIdx.x);
  const std::uint64_t word = r < ranks ? protocol::load_relaxed(flag_of(r)) : 0;
  const bool mixed = r < ranks && static_cast<std::uint32_t>(word) != protocol::flag_of(layout);
  if (__syncthreads_or(mixed) != 0) {
    if (threadIdx.x != 0) return;
    for (int source = 0; source < ranks; ++source) {
      const std::uint64_t theirs = protocol::load_relaxed(flag_of(source));
      if (static_cast<std::uint32_t>(theirs) == protocol::flag_of(layout)) continue;
      return refuse_mixture(site, number, layout, source, theirs);
    }
    return;
  }
  if (!planned) {
    plan_rows(site, handle, call, number);
    if (threadIdx.x == 0) handle.plan->planned = number;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    trace.end();
    protocol::note_progress(site.heaps);
  }
  if (call.capacity < 0) return;
  const PlanWords& plan = *handle.plan;
  if (threadIdx.x == 0) {
    site.words->rows_received = plan.num_rows;
    if (call.num_rows != nullptr) *call.num_rows = static_cast<std::int32_t>(plan.num_rows);
    if (plan.end_of_rows > call.capacity) {
      record_failure(site.failures->capacity,
                     ExchangeFailures::kFound | std::uint64_t{plan.end_of_rows});
    }
  }
  const std::uint32_t e = threadIdx.x;
  if (e >= call.own_experts) return;
  const std::int32_t end = handle.own_ends[e], begin = e == 0 ? 0 : handle.own_ends[e - 1];
  if (call.ends != nullptr) call.ends[e] = end;
  if (call.counts != nullptr) call.counts[e] = end - begin;
}

// ----------------------------------------------------------------------------------- placing

// Copies steps of a token, which is read once, to all of its rows. Loads of plans, entries and
// tokens bypass the L1 cache, as these may have been written since this kernel began.
__device__ __forceinline__ void place_token(const ExchangeSite& site, const HandleSite& handle,
                                            const DispatchReceive& call, std::uint64_t number,
                                            int source, std::uint32_t token, bool first_part,
                                            std::uint32_t step, std::uint32_t end) {
  const std::uint32_t lane = threadIdx.x % 32;
  const std::size_t list = static_cast<std::size_t>(source) * site.list;
  const std::size_t entry_at = std::size_t{token} * site.slots + lane;
  DeviceEntry* const kept = handle.entries + list + entry_at;
  uint4 entry{0, 0, 0, 0};
  if (lane < site.slots) {
    const DeviceEntry* const arrived =
        call.new_layout
            ? site.heap.entries<DeviceEntry>(number, source).in(site.heaps.mine()) + entry_at
            : kept;
    entry = __ldcg(reinterpret_cast<const uint4*>(arrived));
  }
  const std::uint32_t count = __popc(__shfl_sync(~0u, entry.w, 0));
  const bool there = lane < count;
  if (call.new_layout && first_part && (there || lane == 0))
    *reinterpret_cast<uint4*>(kept) = entry;
  if (count == 0) return;
  const std::byte* const from = site.heap.pool(number, source, token).in(site.heaps.mine());
  std::uint32_t row = kNoRow;
  if (there) {
    const std::uint32_t expert = entry.y & 0xffff, k = entry.y >> 16;
    const std::size_t at = static_cast<std::size_t>(source) * call.own_experts + expert;
    row = __ldcg(handle.row_base + at) + entry.x;
    if (row >= __ldcg(handle.limit + expert)) row = kNoRow;
    if (first_part) {
      const std::uint32_t packed = __ldcg(handle.packed_base + at) + entry.x;
      if (call.new_layout) {
        const std::uint32_t i = __ldcg(handle.list_base + at) + entry.x;
        *reinterpret_cast<uint4*>(handle.arrivals + list + i) =
            uint4{row, packed, SlotEntry::pack(token, k), entry.z};
        if (handle.siblings != nullptr) {
          handle.siblings[list + i] = entry.w;
          const std::size_t slots = std::size_t{site.most_tokens} * site.top_k;
          handle.index_of[source * slots + std::size_t{token} * site.top_k + k] = i;
        }
      }
      if (row != kNoRow && row < call.capacity) {
        if (call.origins != nullptr) {
          call.origins[row] = {source, static_cast<std::int32_t>(token),
                               static_cast<std::int32_t>(k)};
        }
        if (call.weights != nullptr && packed < call.capacity) {
          call.weights[packed] = __uint_as_float(entry.z);
        }
      }
    }
  }
  const std::uint32_t rows = __ballot_sync(~0u, row != kNoRow && row < call.capacity);
  const auto for_each_row = [&](auto&& store) {
#pragma unroll 1
    for (std::uint32_t rest = rows; rest != 0; rest &= rest - 1) {
      store(__shfl_sync(~0u, row, __ffs(static_cast<int>(rest)) - 1));
    }
  };
  if (first_part && call.groups != 0) {
    const auto* const scales = reinterpret_cast<const float*>(from + site.heap.scale_offset());
    for (std::uint32_t g = lane; g - lane < call.groups; g += 32) {
      const float scale = g < call.groups ? __ldcg(scales + g) : 0;
      for_each_row([&](std::uint32_t to) {
        if (g < call.groups) call.scales[to * call.scale_stride + g] = scale;
      });
    }
  }
#pragma unroll 1
  for (; step < end; ++step) {
    Vectors v;
    load_step(v, from, step, call.wire_bytes);
    for_each_row([&](std::uint32_t to) {
      store_step(call.rows + to * call.row_stride, v, step, call.wire_bytes);
    });
  }
}

// How long a block that places early waits for a rank, in ns. It is longer than ranks that started
// together are apart; after that, other work should have the SM.
constexpr std::uint64_t kPatience = 100'000;

// Waits until ready() holds; returns false if that takes longer than kPatience.
template <typename Ready>
__device__ __forceinline__ bool wait_a_little(Ready&& ready) {
  if (ready()) return true;
  const std::uint64_t begin = device_now_ns();
  do {
    __nanosleep(200);  // thousands of warps look at the same few words
    if (ready()) return true;
  } while (device_now_ns() - begin < kPatience);
  return false;
}

// Returns whether a part of a source's tokens arrived, the same in all lanes of a warp.
__device__ __forceinline__ bool await_part(const ExchangeSite& site, const Sending& sending,
                                           int source, std::uint32_t token) {
  const std::uint64_t* const flag =
      site.heap.part_arrived(sending.number, source, token).in(site.heaps.mine());
  const std::uint64_t raised = protocol::numbered(sending.number, sending.layout);
  const bool arrived = wait_a_little([&] { return protocol::load_acquire(flag) == raised; });
  return __all_sync(~0u, arrived) != 0;
}

// Places the share of block `index` of `blocks`, without the first `done` units of each warp.
// Tokens of the ranks alternate, as they arrive. Returns how many of the warp's units are then
// done. These are all units, except that with kWait a warp stops at the first part that does not
// arrive.
template <bool kWait>
__device__ __forceinline__ std::uint32_t place_units(const ExchangeSite& site,
                                                     const HandleSite& handle,
                                                     const DispatchReceive& call,
                                                     const Sending& sending, std::uint32_t blocks,
                                                     std::uint32_t index, std::uint32_t done) {
  __shared__ std::uint32_t tokens[protocol::kMaxRanks];
  const int ranks = site.heaps.size();
  std::uint32_t most = 0;
  for (int r = 0; r < ranks; ++r) {
    const std::uint32_t count = __ldcg(handle.plan->tokens + r);
    most = max(most, count);
    if (threadIdx.x == 0) tokens[r] = count;
  }
  __syncthreads();
  const auto sources = static_cast<std::uint32_t>(ranks);
  const Units units(sources * most, CopySteps::count(call.wire_bytes), blocks, 2);
  const std::uint32_t stride = blocks * kMoverWarps;
#pragma unroll 1
  for (std::uint64_t at = threadIdx.x / 32 * blocks + index + std::uint64_t{done} * stride;
       at < units.count; at += stride, ++done) {
    const auto unit = static_cast<std::uint32_t>(at);
    const std::uint32_t row = units.row(unit), part = units.part(unit), token = row / sources;
    const auto source = static_cast<int>((site.heaps.rank + row % sources) % sources);
    if (token >= tokens[source]) continue;
    if (kWait && !await_part(site, sending, source, token)) break;
    place_token(site, handle, call, sending.number, source, token, part == 0, units.begin(part),
                units.end(part));
  }
  return done;
}

// Makes the plan from early counts; returns false if one does not arrive.
__device__ __forceinline__ bool plan_early(const ExchangeSite& site, const HandleSite& handle,
                                           const DispatchReceive& call, const Sending& sending) {
  const int ranks = site.heaps.size();
  const auto thread = threadIdx.x;
  bool arrived = true;
  // These words name their dispatch and nothing else is read because of them: no acquire is needed.
  if (static_cast<int>(thread) < ranks) {
    const std::uint64_t* const head =
        site.heap.header(sending.number, static_cast<int>(thread)).in(site.heaps.mine());
    arrived = wait_a_little([&] {
      const WordPair words = load_words(head);
      return words.first == protocol::numbered(sending.number, sending.layout) &&
             protocol::is_of(words.second, sending.number);
    });
  }
  for (int r = 0; arrived && thread < call.own_experts && r < ranks; ++r) {
    const std::uint64_t* const count =
        site.heap.counts(sending.number, r).in(site.heaps.mine()) + thread;
    arrived = wait_a_little(
        [&] { return protocol::is_of(protocol::load_relaxed(count), sending.number); });
  }
  if (__syncthreads_and(arrived) == 0) return false;
  plan_rows(site, handle, call, sending.number);
  __syncthreads();
  if (thread == 0) protocol::store_release(&handle.plan->planned, sending.number);
  return true;
}

// Does the work of the blocks of a send that place rows.
__device__ __forceinline__ void place_early(const ExchangeSite& site, const HandleSite& handle,
                                            const DispatchReceive& call, const Sending& sending,
                                            std::uint32_t blocks, std::uint32_t index) {
  bool planned = !call.new_layout;  // else an earlier dispatch made the plan
  if (call.new_layout && index == 0) {
    planned = plan_early(site, handle, call, sending);
  } else if (call.new_layout) {
    bool arrived = true;
    if (threadIdx.x == 0) {
      arrived = wait_a_little(
          [&] { return protocol::load_acquire(&handle.plan->planned) == sending.number; });
    }
    planned = __syncthreads_and(arrived) != 0;
  }
  const std::uint32_t done =
      planned ? place_units<true>(site, handle, call, sending, blocks, index, 0) : 0;
  if (threadIdx.x % 32 == 0) site.placed[threadIdx.x / 32 * blocks + index] = done;
}

__global__ void __launch_bounds__(kMoverThreads)
    place_rows(const __grid_constant__ ExchangeSite site, const __grid_constant__ HandleSite handle,
               const __grid_constant__ DispatchReceive call) {
  await_kernel_before();
  invite_next_kernel();
  const Sending sending{site.words->dispatch, handle.plan->layout, 0};
  const std::uint32_t done =
      call.placing_blocks == 0 ? 0 : site.placed[threadIdx.x / 32 * gridDim.x + blockIdx.x];
  const BlockTrace trace(site, ExchangeStage::kPlaceRows, TraceKind::kPack, sending.number);
  if (!is_alive(site)) return;
  place_units<false>(site, handle, call, sending, gridDim.x, blockIdx.x, done);
  trace.warp_ends();
}

// ------------------------------------------------------------------------------ the send's kernel

// Bounds registers for two blocks per SM: the compiler would aim at three, and spill.
template <Wire kWire, bool kPlaces>
__global__ void __launch_bounds__(kMoverThreads, 2)
    send_tokens(const __grid_constant__ ExchangeSite site,
                const __grid_constant__ HandleSite handle,
                const __grid_constant__ DispatchSend call,
                const __grid_constant__ DispatchReceive receive) {
  await_kernel_before();
  invite_next_kernel();
  const Units units = units_to_send<kWire>(site, call);
  const std::uint64_t number = site.words->dispatch + 1;
  const Sending sending{number, call.new_layout ? number : handle.plan->layout, units.parts};
  const std::uint32_t others = gridDim.x - call.placing_blocks;
  const BlockTrace trace(site, ExchangeStage::kSendTokens,
                         blockIdx.x >= others         ? TraceKind::kPack
                         : blockIdx.x >= call.sorters ? TraceKind::kSend
                                                      : TraceKind::kRoute,
                         number);
  if (!is_alive(site)) return;
  const int me = site.heaps.rank;
  if (!kPlaces || blockIdx.x < others) {
    if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) < site.heaps.size()) {
      Peer(site.heaps, static_cast<int>(threadIdx.x))
          .put_words(site.heap.header(number, me), {protocol::numbered(number, sending.layout),
                                                    protocol::numbered(number, call.count)});
    }
    std::uint32_t tokens_sent = 0, entries_sent = 0;
    if (blockIdx.x < call.sorters && !sort_slots(site, handle, call, sending, entries_sent)) return;
    if (blockIdx.x >= call.first_sender) {
      tokens_sent = send_units<kWire>(site, handle, call, sending, units);
    }
    add_counts(site, tokens_sent, entries_sent);
    const bool last = ends_last(site.words->ended_blocks, others, [&] {
      for (int r = 0; r < site.heaps.size(); ++r) {
        Peer(site.heaps, r)
            .signal_relaxed(site.heap.arrived(number, me),
                            protocol::numbered(number, sending.layout));
      }
      if (call.by_parts) return;
      for (std::uint32_t part = 0; part * kPartTokens < call.count; ++part) {
        raise_part(site, sending, part);
      }
    });
    if (threadIdx.x == 0) trace.end();
    if constexpr (!kPlaces) {
      if (last && threadIdx.x == 0) advance(site, handle, call, sending);
      return;
    }
  } else {
    place_early(site, handle, receive, sending, call.placing_blocks, blockIdx.x - others);
    trace.warp_ends();
  }
  if (ends_last(site.words->ended_all_blocks, gridDim.x) && threadIdx.x == 0) {
    advance(site, handle, call, sending);
  }
}

}  // namespace

namespace {

constexpr std::uint32_t kSorterTokens = 64;  // the fewest of a sorting block
// So few tokens all arrive at about the same time, and fences for parts would take time.
constexpr std::uint32_t kLeastByParts = 2 * kPartTokens;

template <Wire kWire>
cudaError_t launch_send(const ExchangeSite& site, const HandleSite& handle,
                        const DispatchSend& call, const DispatchReceive& receive, unsigned blocks,
                        cudaStream_t stream) {
  if (call.placing_blocks != 0) {
    return launch_early(send_tokens<kWire, true>, blocks, kMoverThreads, stream, site, handle, call,
                        receive);
  }
  return launch_early(send_tokens<kWire, false>, blocks, kMoverThreads, stream, site, handle, call,
                      receive);
}

}  // namespace

cudaError_t launch_dispatch_send(const ExchangeSite& site, const HandleSite& handle,
                                 DispatchSend call, const DispatchReceive* receive, Wire wire,
                                 const MoverBlocks& blocks, unsigned* placing_blocks,
                                 cudaStream_t stream) {
  const std::uint32_t steps = wire == Wire::kCopy ? CopySteps::count(call.wire_bytes)
                                                  : protocol::ceil_div(site.hidden, kQuantStep);
  call.sorters = 0;
  if (call.new_layout) {
    const unsigned most = std::clamp(blocks.most / 4, 1u, kMostSorters);
    call.sorters = std::clamp(protocol::ceil_div(call.count, kSorterTokens), 1u, most);
    call.slots.tokens_of_sorter = protocol::ceil_div(call.count, call.sorters);
  }
  // Sorting ends soon, and other blocks then take its SMs, unless there is a strict limit.
  const unsigned room = !blocks.strict               ? blocks.most
                        : blocks.most > call.sorters ? blocks.most - call.sorters
                                                     : 0;
  call.by_parts = call.count > kLeastByParts;
  call.placing_blocks = 0;
  unsigned most_senders = std::max(room, 1u);
  if (receive != nullptr && room >= 4) {
    // The links need few blocks. With fewer blocks, tokens arrive one after another rather than all
    // at the end. But a fence in many SMs at a time costs less than in few.
    const bool few = call.count < 16 * room;
    most_senders = few ? room / 4 : room / 2;
    call.placing_blocks = room - most_senders;
  }
  const unsigned senders = blocks_for(std::uint64_t{call.count} * steps, most_senders);
  call.first_sender = room == 0 ? 0 : call.sorters;
  const unsigned count =
      call.placing_blocks + (room == 0 ? std::max(call.sorters, 1u) : call.sorters + senders);
  *placing_blocks = call.placing_blocks;
  const DispatchReceive nothing{};
  const DispatchReceive& to = receive == nullptr ? nothing : *receive;
  switch (wire) {
    case Wire::kCopy: return launch_send<Wire::kCopy>(site, handle, call, to, count, stream);
    case Wire::kFromBF16:
      return launch_send<Wire::kFromBF16>(site, handle, call, to, count, stream);
    case Wire::kFromF16: return launch_send<Wire::kFromF16>(site, handle, call, to, count, stream);
    case Wire::kFromF32: return launch_send<Wire::kFromF32>(site, handle, call, to, count, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_await_dispatch(const ExchangeSite& site, const HandleSite& handle,
                                  const DispatchReceive& call, cudaStream_t stream) {
  const auto ranks = static_cast<std::uint32_t>(site.heaps.size());
  const std::uint32_t threads =
      std::max(64u, protocol::round_up(std::max(call.own_experts, ranks), 32u));
  return launch_early(await_dispatch, 1, threads, stream, site, handle, call);
}

namespace {

template <Wire kWire>
cudaError_t load_of_wire() {
  cudaFuncAttributes facts;
  const cudaError_t result = cudaFuncGetAttributes(&facts, send_tokens<kWire, false>);
  return result != cudaSuccess ? result : cudaFuncGetAttributes(&facts, send_tokens<kWire, true>);
}

}  // namespace

cudaError_t load_dispatch_kernels() {
  cudaFuncAttributes facts;
  for (const cudaError_t result :
       {load_of_wire<Wire::kCopy>(), load_of_wire<Wire::kFromBF16>(),
        load_of_wire<Wire::kFromF16>(), load_of_wire<Wire::kFromF32>(),
        cudaFuncGetAttributes(&facts, await_dispatch), cudaFuncGetAttributes(&facts, place_rows)}) {
    if (result != cudaSuccess) return result;
  }
  return cudaSuccess;
}

cudaError_t launch_place_rows(const ExchangeSite& site, const HandleSite& handle,
                              const DispatchReceive& call, unsigned blocks, cudaStream_t stream) {
  // The host does not know the number of rows, only how many there is room for.
  const std::uint64_t steps =
      static_cast<std::uint64_t>(call.capacity) * CopySteps::count(call.wire_bytes);
  // One block finishes the share of each placing block of the send.
  const unsigned count = call.placing_blocks != 0 ? call.placing_blocks : blocks_for(steps, blocks);
  return launch_early(place_rows, count, kMoverThreads, stream, site, handle, call);
}

}  // namespace switchyard::gpu
