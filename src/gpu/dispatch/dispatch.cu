// Dispatch: tokens into the pools of the ranks of their experts, and from the pool into rows.
//
//   prepare         places and weights of slots (then permute() numbers the slots by place)
//   send_tokens     counts, entries and tokens to all ranks, each token once; the last block raises
//                   the flags
//   await_dispatch  one block waits for the flags of all ranks, and plans where rows go
//   place_rows      copies them there; it waits for nobody
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "gpu/dispatch/launch.h"
#include "gpu/dispatch/site.cuh"
#include "gpu/ptx/convert.cuh"
#include "gpu/tile/quantize.cuh"

namespace switchyard::gpu {
namespace {

using protocol::SlotEntry;

// ------------------------------------------------------------------------------------ prepare

constexpr std::uint32_t kPrepareThreads = 256;

__device__ __forceinline__ std::int64_t id_of(const PrepareCall& call, std::uint32_t slot) {
  return call.wide_ids ? static_cast<const std::int64_t*>(call.ids)[slot]
                       : static_cast<const std::int32_t*>(call.ids)[slot];
}

__device__ __forceinline__ void prepare_slot(const ExchangeSite& site, const PrepareCall& call,
                                             std::uint32_t slot) {
  const std::int64_t id = id_of(call, slot);
  std::int32_t place = -1;
  if (id >= 0 && id < call.num_experts) {
    bool twice = false;
    for (std::uint32_t other = slot - slot % call.top_k; other < slot; ++other) {
      twice |= id_of(call, other) == id;
    }
    if (twice) {
      tell(site.failures->twice, ExchangeFailures::kFound | std::uint64_t{slot / call.top_k} << 32 |
                                     static_cast<std::uint64_t>(id));
    } else {
      place = call.place_of == nullptr ? static_cast<std::int32_t>(id) : call.place_of[id];
    }
  }
  call.places[slot] = place;
  float weight = 1;
  if (call.weights != nullptr) {
    weight = call.bf16_weights
                 ? __bfloat162float(static_cast<const __nv_bfloat16*>(call.weights)[slot])
                 : static_cast<const float*>(call.weights)[slot];
  }
  call.to[slot] = weight;
}

__global__ void __launch_bounds__(kPrepareThreads)
    prepare(const __grid_constant__ ExchangeSite site, const __grid_constant__ PrepareCall call) {
  if (!is_alive(site)) return;
  for (std::uint32_t slot = blockIdx.x * kPrepareThreads + threadIdx.x; slot < call.slots;
       slot += gridDim.x * kPrepareThreads) {
    prepare_slot(site, call, slot);
  }
}

// --------------------------------------------------------------------------------------- send

constexpr std::uint32_t kQuantStep = 32 * kLaneColumns;  // columns of a warp at a time

// Sixteen of a token's columns as bf16; zeros beyond its end.
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

// One for each rank that gets the token: the lane of its first slot there knows where to.
struct Targets {
  std::uint32_t lanes;
  std::byte* to;

  template <typename Store>
  __device__ __forceinline__ void for_each(Store&& store) const {
#pragma unroll 1
    for (std::uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      store(reinterpret_cast<std::byte*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(to),
                                                     __ffs(static_cast<int>(rest)) - 1)));
    }
  }
};

template <Wire kWire>
__device__ __forceinline__ void send_steps(const ExchangeSite& site, const DispatchSend& call,
                                           const std::byte* token, const Targets& targets,
                                           std::uint32_t begin, std::uint32_t end) {
#pragma unroll 1
  for (std::uint32_t step = begin; step < end; ++step) {
    if constexpr (kWire == Wire::kCopy) {
      Vectors v;
      load_step(v, token, step, call.wire_bytes);
      targets.for_each([&](std::byte* to) { store_step(to, v, step, call.wire_bytes); });
    } else {
      const std::uint32_t lane = threadIdx.x % 32;
      const std::uint32_t column = step * kQuantStep + lane * kLaneColumns;
      uint4 v[2];
      load_columns<kWire>(v, token, column, site.hidden);
      float scale;
      const uint4 codes = quantize_together(v[0], v[1], scale);
      targets.for_each([&](std::byte* to) {
        if (column >= site.hidden) return;
        store_vector(to + column, codes);
        if (lane % kGroupLanes != 0) return;
        reinterpret_cast<float*>(to + site.heap.scale_offset())[column / kQuantGroup] = scale;
      });
    }
  }
}

// Numbers of rows up to and with each place of a rank: the receiver's counts, and where each place
// begins in the list of entries.
__device__ __forceinline__ void publish_counts(const ExchangeSite& site, const HandleSite& handle,
                                               std::uint32_t num_places, std::uint64_t number) {
  const protocol::ExpertPartition& places = site.heaps.experts;
  for (std::uint32_t p = threadIdx.x; p < num_places; p += kMoverThreads) {
    const int to = places.owner(static_cast<int>(p)), begin = places.begin(to);
    const std::int32_t before = begin == 0 ? 0 : handle.ends[begin - 1];
    protocol::store_relaxed(
        site.heap.counts(site.heaps.base[to], number, site.heaps.rank) + p - begin,
        protocol::numbered(number, static_cast<std::uint64_t>(handle.ends[p] - before)));
  }
}

// Two blocks of an SM: the compiler would aim at three, and spill.
template <Wire kWire>
__global__ void __launch_bounds__(kMoverThreads, 2)
    send_tokens(const __grid_constant__ ExchangeSite site,
                const __grid_constant__ HandleSite handle,
                const __grid_constant__ DispatchSend call) {
  if (!is_alive(site)) return;
  const std::uint64_t number = site.words->dispatch + 1;
  const protocol::ExpertPartition& places = site.heaps.experts;
  const int me = site.heaps.rank;
  const std::uint32_t lane = threadIdx.x % 32;
  if (call.fresh && blockIdx.x == gridDim.x - 1) {
    publish_counts(site, handle, call.num_places, number);
  }
  const Units units(call.count, kWire == Wire::kCopy ? CopySteps::count(call.wire_bytes)
                                                     : protocol::ceil_div(site.hidden, kQuantStep));
  std::uint32_t tokens_sent = 0, entries_sent = 0;
#pragma unroll 1
  for (std::uint32_t unit = units.first(); unit < units.count; unit += units.stride()) {
    const std::uint32_t token = units.row(unit), part = units.part(unit);
    const std::size_t slot = std::size_t{token} * site.top_k + lane;
    const std::int32_t place = lane < site.top_k ? handle.places[slot] : -1;
    const int owner = place < 0 ? -1 : places.owner(place);
    const std::uint32_t same = __match_any_sync(~0u, owner);
    const bool leads = owner >= 0 && lane == static_cast<std::uint32_t>(__ffs(same)) - 1;
    const Targets targets{
        __ballot_sync(~0u, leads),
        leads ? site.heap.pool(site.heaps.base[owner], number, me, token) : nullptr};
    if (targets.lanes == 0) continue;
    if (part == 0) {
      tokens_sent += __popc(__ballot_sync(~0u, leads && owner != me));
      if (call.fresh) {
        entries_sent += __popc(__ballot_sync(~0u, owner >= 0 && owner != me));
        if (owner >= 0) {
          const int begin = places.begin(owner);
          const std::int32_t before = begin == 0 ? 0 : handle.ends[begin - 1];
          const uint4 entry{SlotEntry::pack(token, lane), static_cast<std::uint32_t>(place - begin),
                            __float_as_uint(handle.weights[slot]), same};
          store_vector(site.heap.entries<DeviceEntry>(site.heaps.base[owner], number, me) +
                           (handle.positions[slot] - before),
                       entry);
        }
      }
      if (kWire == Wire::kCopy && call.groups != 0) {
        const float* const scales = call.scales + token * call.scale_stride;
        for (std::uint32_t first = 0; first < call.groups; first += 32) {
          const std::uint32_t g = first + lane;
          const float scale = g < call.groups ? scales[g] : 0;
          targets.for_each([&](std::byte* to) {
            if (g < call.groups) {
              reinterpret_cast<float*>(to + site.heap.scale_offset())[g] = scale;
            }
          });
        }
      }
    }
    send_steps<kWire>(site, call, call.tokens + token * call.token_stride, targets,
                      units.begin(part), units.end(part));
  }
  add_counts(site, tokens_sent, entries_sent);
  if (!ends_last(site)) return;
  const std::uint64_t layout = call.fresh ? number : handle.plan->layout;
  if (static_cast<int>(threadIdx.x) < site.heaps.size()) {
    const int to = static_cast<int>(threadIdx.x);
    protocol::store_release(site.heap.arrived(site.heaps.base[to], number, me),
                            protocol::numbered(number, layout));
  }
  __syncthreads();  // all have read the layout
  if (threadIdx.x != 0) return;
  handle.plan->layout = layout;
  ExchangeWords& words = *site.words;
  words.dispatch = number;
  words.dispatch_of_all = ++words.calls;
  words.tokens = call.count;
  words.tokens_sent = take_count(site, 0);
  words.entries_sent = take_count(site, 1);
  words.fresh = call.fresh ? 1 : 0;
  protocol::note_progress(site.heaps);
}

// ------------------------------------------------------------------------------------ receive

constexpr std::uint32_t kMostOwn = 1024;  // a thread for each of this rank's experts

__device__ __forceinline__ std::uint64_t sum_up_to_lane(std::uint64_t value) {
#pragma unroll
  for (std::uint32_t distance = 1; distance < 32; distance *= 2) {
    const std::uint64_t below = __shfl_up_sync(~0u, value, distance);
    if (threadIdx.x % 32 >= distance) value += below;
  }
  return value;
}
// The sum of the values of this thread and those before it.
__device__ __forceinline__ std::uint64_t sum_up_to_thread(std::uint64_t value) {
  __shared__ std::uint64_t of_warps[32];
  std::uint64_t sum = sum_up_to_lane(value);
  if (threadIdx.x % 32 == 31) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  for (std::uint32_t w = 0; w < threadIdx.x / 32; ++w) sum += of_warps[w];
  return sum;
}

// Rows of a source up to its expert e, from 0 on; they have come.
__device__ __forceinline__ std::uint32_t listed(const std::uint64_t* counts, std::uint32_t e) {
  return e == 0 ? 0 : static_cast<std::uint32_t>(protocol::load_relaxed(counts + e - 1));
}

__device__ void plan_rows(const ExchangeSite& site, const HandleSite& handle,
                          const DispatchReceive& call, std::uint64_t number) {
  __shared__ std::uint32_t end_of_rows;
  const std::uint32_t e = threadIdx.x, own = call.own_experts;
  const int ranks = site.heaps.size();
  if (threadIdx.x == 0) end_of_rows = 0;
  const auto counts = [&](int r) { return site.heap.counts(site.heaps.mine(), number, r); };
  std::uint32_t total = 0;
  if (e < own) {
    for (int r = 0; r < ranks; ++r) total += listed(counts(r), e + 1) - listed(counts(r), e);
  }
  const auto size = static_cast<std::uint32_t>(call.layout.size);
  const bool padded = call.layout.kind == RowLayout::Kind::kPadded;
  const bool blocked = call.layout.kind == RowLayout::Kind::kBlocked;
  const std::uint32_t kept = padded ? min(total, size) : total;
  const std::uint32_t room = blocked ? protocol::ceil_div(kept, size) * size : kept;
  // Two sums at once; neither reaches 2^32.
  const std::uint64_t up_to = sum_up_to_thread(std::uint64_t{room} << 32 | kept);
  const std::uint32_t packed = static_cast<std::uint32_t>(up_to) - kept;
  const std::uint32_t first = padded ? e * size : static_cast<std::uint32_t>(up_to >> 32) - room;
  if (e < own) {
    if (total > kept) {
      tell(site.failures->padded,
           ExchangeFailures::kFound | std::uint64_t{e} << 32 | std::uint64_t{total});
    }
    handle.limit[e] = first + kept;
    handle.own_ends[e] = static_cast<std::int32_t>(packed + kept);
    if (kept != 0) atomicMax(&end_of_rows, first + kept);
    std::uint32_t before = 0;
    for (int r = 0; r < ranks; ++r) {
      const std::uint32_t begin = listed(counts(r), e), end = listed(counts(r), e + 1);
      const std::size_t at = static_cast<std::size_t>(r) * own + e;
      // Numbers modulo 2^32.
      handle.row_base[at] = first + before - begin;
      handle.packed_base[at] = packed + before - begin;
      before += end - begin;
    }
  }
  if (e + 1 == own || (own == 0 && e == 0)) {
    handle.plan->num_rows = own == 0 ? 0 : packed + kept;
    handle.plan->layout_rows = own == 0 ? 0 : padded ? own * size : first + room;
  }
  // Arrivals of ranks: two of each lane of a warp.
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

// By one thread: ranks use the rows of different dispatches, which ends the exchange.
__device__ void refuse_mixture(const ExchangeSite& site, std::uint64_t number, std::uint64_t layout,
                               int source, std::uint64_t word) {
  tell(site.failures->mixture_of, number << 32 | protocol::flag_of(layout));
  tell(site.failures->mixture, ExchangeFailures::kFound | static_cast<std::uint64_t>(source) << 32 |
                                   static_cast<std::uint32_t>(word));
  protocol::abort_world(site.heaps, {site.heaps.rank, site.heaps.rank, protocol::Phase::kDispatch,
                                     site.words->dispatch_of_all,
                                     static_cast<std::uint64_t>(source), protocol::flag_of(layout),
                                     static_cast<std::uint32_t>(word), 0, site.heaps.rank});
  fence_system();
  tell(site.failures->given_up, std::uint32_t{1});
}

__global__ void __launch_bounds__(kMostOwn)
    await_dispatch(const __grid_constant__ ExchangeSite site,
                   const __grid_constant__ HandleSite handle,
                   const __grid_constant__ DispatchReceive call) {
  if (!is_alive(site)) return;
  const std::uint64_t number = site.words->dispatch, layout = handle.plan->layout;
  const int ranks = site.heaps.size();
  const auto flag_of = [&](int r) { return site.heap.arrived(site.heaps.mine(), number, r); };
  const bool came = threadIdx.x >= 32 || await_all(site, protocol::Phase::kDispatch, number,
                                                   site.words->dispatch_of_all, flag_of);
  if (__syncthreads_and(came) == 0) return;
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
  if (call.fresh) plan_rows(site, handle, call, number);
  __syncthreads();
  if (threadIdx.x == 0) protocol::note_progress(site.heaps);
  if (call.capacity < 0) return;
  const PlanWords& plan = *handle.plan;
  if (threadIdx.x == 0) {
    site.words->rows_received = plan.num_rows;
    if (call.num_rows != nullptr) *call.num_rows = static_cast<std::int32_t>(plan.num_rows);
    if (plan.end_of_rows > call.capacity) {
      tell(site.failures->capacity, ExchangeFailures::kFound | std::uint64_t{plan.end_of_rows});
    }
  }
  const std::uint32_t e = threadIdx.x;
  if (e >= call.own_experts) return;
  const std::int32_t end = handle.own_ends[e], begin = e == 0 ? 0 : handle.own_ends[e - 1];
  if (call.ends != nullptr) call.ends[e] = end;
  if (call.counts != nullptr) call.counts[e] = end - begin;
}

__global__ void __launch_bounds__(kMoverThreads)
    place_rows(const __grid_constant__ ExchangeSite site, const __grid_constant__ HandleSite handle,
               const __grid_constant__ DispatchReceive call) {
  __shared__ Sources sources;
  if (!is_alive(site)) return;
  const int ranks = site.heaps.size();
  load_sources(sources, *handle.plan, ranks);
  const std::uint64_t number = site.words->dispatch;
  const std::uint32_t lane = threadIdx.x % 32;
  const Units units(sources.first[ranks], CopySteps::count(call.wire_bytes));
#pragma unroll 1
  for (std::uint32_t unit = units.first(); unit < units.count; unit += units.stride()) {
    const std::uint32_t number_of_all = units.row(unit), part = units.part(unit);
    const int source = source_of(sources, ranks, number_of_all);
    const std::uint32_t i = number_of_all - sources.first[source];
    const std::size_t at = static_cast<std::size_t>(source) * site.list + i;
    uint4 words;  // of the arrival
    if (call.fresh) {
      // Of all lanes the same.
      const uint4 entry = __ldcg(reinterpret_cast<const uint4*>(
          site.heap.entries<DeviceEntry>(site.heaps.mine(), number, source) + i));
      const std::size_t base = static_cast<std::size_t>(source) * call.own_experts + entry.y;
      const std::uint32_t row = handle.row_base[base] + i;
      words = {row < handle.limit[entry.y] ? row : kNoRow, handle.packed_base[base] + i, entry.x,
               entry.z};
      if (part == 0 && lane == 0) {
        *reinterpret_cast<uint4*>(handle.arrivals + at) = words;
        if (handle.siblings != nullptr) {
          handle.siblings[at] = entry.w;
          const std::size_t slots = std::size_t{site.most_tokens} * site.top_k;
          handle.index_of[source * slots + std::size_t{SlotEntry::token(entry.x)} * site.top_k +
                          SlotEntry::k(entry.x)] = i;
        }
      }
    } else {
      words = *reinterpret_cast<const uint4*>(handle.arrivals + at);
    }
    const DeviceArrival arrival{words.x, words.y, words.z, words.w};
    if (arrival.row == kNoRow || arrival.row >= call.capacity) continue;
    const std::uint32_t token = SlotEntry::token(arrival.slot);
    const std::byte* const from = site.heap.pool(site.heaps.mine(), number, source, token);
    if (part == 0) {
      if (lane == 0) {
        if (call.origins != nullptr) {
          call.origins[arrival.row] = {source, static_cast<std::int32_t>(token),
                                       static_cast<std::int32_t>(SlotEntry::k(arrival.slot))};
        }
        if (call.weights != nullptr && arrival.packed < call.capacity) {
          call.weights[arrival.packed] = __uint_as_float(arrival.weight);
        }
      }
      const auto* const scales = reinterpret_cast<const float*>(from + site.heap.scale_offset());
      for (std::uint32_t g = lane; g < call.groups; g += 32) {
        call.scales[arrival.row * call.scale_stride + g] = __ldcg(scales + g);
      }
    }
    std::byte* const to = call.rows + arrival.row * call.row_stride;
#pragma unroll 1
    for (std::uint32_t step = units.begin(part); step < units.end(part); ++step) {
      Vectors v;
      load_step(v, from, step, call.wire_bytes);
      store_step(to, v, step, call.wire_bytes);
    }
  }
}

}  // namespace

cudaError_t launch_prepare(const ExchangeSite& site, const PrepareCall& call, unsigned blocks,
                           cudaStream_t stream) {
  if (call.slots == 0) return cudaSuccess;
  const unsigned count = std::min(blocks, protocol::ceil_div(call.slots, kPrepareThreads));
  prepare<<<count, kPrepareThreads, 0, stream>>>(site, call);
  return cudaGetLastError();
}

namespace {

template <Wire kWire>
void launch_send(const ExchangeSite& site, const HandleSite& handle, const DispatchSend& call,
                 unsigned blocks, cudaStream_t stream) {
  send_tokens<kWire><<<blocks, kMoverThreads, 0, stream>>>(site, handle, call);
}

}  // namespace

cudaError_t launch_dispatch_send(const ExchangeSite& site, const HandleSite& handle,
                                 const DispatchSend& call, Wire wire, unsigned blocks,
                                 cudaStream_t stream) {
  const std::uint32_t steps = wire == Wire::kCopy ? CopySteps::count(call.wire_bytes)
                                                  : protocol::ceil_div(site.hidden, kQuantStep);
  const unsigned count = blocks_for(std::uint64_t{call.count} * steps, blocks);
  switch (wire) {
    case Wire::kCopy:
      launch_send<Wire::kCopy>(site, handle, call, count, stream);
      break;
    case Wire::kFromBF16:
      launch_send<Wire::kFromBF16>(site, handle, call, count, stream);
      break;
    case Wire::kFromF16:
      launch_send<Wire::kFromF16>(site, handle, call, count, stream);
      break;
    case Wire::kFromF32:
      launch_send<Wire::kFromF32>(site, handle, call, count, stream);
      break;
  }
  return cudaGetLastError();
}

cudaError_t launch_await_dispatch(const ExchangeSite& site, const HandleSite& handle,
                                  const DispatchReceive& call, cudaStream_t stream) {
  const auto ranks = static_cast<std::uint32_t>(site.heaps.size());
  const std::uint32_t threads =
      std::max(64u, protocol::round_up(std::max(call.own_experts, ranks), 32u));
  await_dispatch<<<1, threads, 0, stream>>>(site, handle, call);
  return cudaGetLastError();
}

cudaError_t load_dispatch_kernels() {
  cudaFuncAttributes facts;
  for (const cudaError_t result :
       {cudaFuncGetAttributes(&facts, prepare),
        cudaFuncGetAttributes(&facts, send_tokens<Wire::kCopy>),
        cudaFuncGetAttributes(&facts, send_tokens<Wire::kFromBF16>),
        cudaFuncGetAttributes(&facts, send_tokens<Wire::kFromF16>),
        cudaFuncGetAttributes(&facts, send_tokens<Wire::kFromF32>),
        cudaFuncGetAttributes(&facts, await_dispatch), cudaFuncGetAttributes(&facts, place_rows)}) {
    if (result != cudaSuccess) return result;
  }
  return cudaSuccess;
}

cudaError_t launch_place_rows(const ExchangeSite& site, const HandleSite& handle,
                              const DispatchReceive& call, unsigned blocks, cudaStream_t stream) {
  // The host does not know how many rows come, but how many there is room for.
  const std::uint64_t steps =
      static_cast<std::uint64_t>(call.capacity) * CopySteps::count(call.wire_bytes);
  place_rows<<<blocks_for(steps, blocks), kMoverThreads, 0, stream>>>(site, handle, call);
  return cudaGetLastError();
}

}  // namespace switchyard::gpu
