// Combine: sends results into the cells of their tokens' ranks, and adds up the cells.
//
//   send_results   sends all rows, or the sums of each token's rows, to the tokens' ranks; the last
//                  block raises the flags
//   await_combine  one block waits for the flags of all ranks
//   sum_tokens     adds each token's cells, without waiting
#include "gpu/dispatch/launch.h"
#include "gpu/dispatch/site.cuh"
#include "gpu/operators/elements.cuh"

namespace switchyard::gpu {
namespace {

using protocol::SlotEntry;

// How results travel: rows as they are, rows times their weights, or sums of rows.
enum class Return : std::uint8_t { kRow, kWeighted, kSum };

__device__ __forceinline__ DeviceArrival arrival_at(const DeviceArrival* from) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  return {words.x, words.y, words.z, words.w};
}

// Sends a sum of `count` rows; lane j has the number of row j. A warp takes 256 columns at a time,
// eight per lane. Rows that there was no room for, or that combine was not given, count as zeros.
template <DType kType>
__device__ __forceinline__ void send_sum(const ExchangeSite& site, const CombineSend& call,
                                         std::byte* to, std::uint32_t row, float weight,
                                         std::uint32_t count, std::uint32_t begin,
                                         std::uint32_t end) {
  constexpr std::uint32_t kAtOnce = kType == DType::kF32 ? 2 : 4;
#pragma unroll 1
  for (std::uint32_t step = begin; step < end; ++step) {
    const Columns<true> columns(step, site.hidden);
    float sum[8] = {};
#pragma unroll 1
    for (std::uint32_t first = 0; first < count; first += kAtOnce) {
      Eight<kType> values[kAtOnce];
#pragma unroll
      for (std::uint32_t i = 0; i < kAtOnce; ++i) {
        const std::uint32_t from = __shfl_sync(~0u, row, (first + i) % 32);
        if (first + i < count && from < call.num_rows) {
          values[i].load(call.rows + from * call.row_stride, columns);
        }
      }
#pragma unroll
      for (std::uint32_t i = 0; i < kAtOnce; ++i) {
        const float factor = __shfl_sync(~0u, weight, (first + i) % 32);
        if (first + i >= count) continue;
#pragma unroll
        for (int c = 0; c < 8; ++c) sum[c] = __fmaf_rn(factor, values[i].get(c), sum[c]);
      }
    }
    Eight<kType> out;
#pragma unroll
    for (int c = 0; c < 8; ++c) out.put(c, sum[c]);
    out.store(to, columns);
  }
}

template <Return kReturn, DType kType>
__global__ void __launch_bounds__(kMoverThreads)
    send_results(const __grid_constant__ ExchangeSite site,
                 const __grid_constant__ HandleSite handle,
                 const __grid_constant__ CombineSend call) {
  __shared__ Sources sources;
  await_kernel_before();
  invite_next_kernel();
  const std::uint64_t number = site.words->combine + 1;
  const BlockTrace trace(site, ExchangeStage::kSendResults, TraceKind::kSend, site.words->dispatch,
                         number);
  if (!is_alive(site)) return;
  const int me = site.heaps.rank, ranks = site.heaps.size();
  const std::uint32_t lane = threadIdx.x % 32;
  load_sources(sources, *handle.plan, ranks);
  const std::uint32_t bytes = site.hidden * size_of(kType);
  const Units units(sources.first[ranks], kReturn == Return::kRow
                                              ? CopySteps::count(bytes)
                                              : protocol::ceil_div(site.hidden, kElementColumns));
  std::uint32_t returned = 0;
#pragma unroll 1
  for (std::uint32_t unit = units.first(); unit < units.count; unit += units.stride()) {
    const std::uint32_t number_of_all = units.row(unit), part = units.part(unit);
    const int to = source_of(sources, ranks, number_of_all);
    const std::uint32_t i = number_of_all - sources.first[to];
    const std::size_t list = static_cast<std::size_t>(to) * site.list;
    const DeviceArrival arrival = arrival_at(handle.arrivals + list + i);
    const std::uint32_t token = SlotEntry::token(arrival.slot), k = SlotEntry::k(arrival.slot);
    const Peer peer(site.heaps, to);
    const protocol::Region<std::byte> cell = site.heap.cell(number, token, k);
    if constexpr (kReturn == Return::kRow) {
      const bool there = arrival.row < call.num_rows;
      const std::byte* const from = call.rows + (there ? arrival.row * call.row_stride : 0);
#pragma unroll 1
      for (std::uint32_t step = units.begin(part); step < units.end(part); ++step) {
        Vectors v;
        load_step(v, from, step, there ? bytes : 0);
        put_step(peer, cell, v, step, bytes);
      }
    } else if constexpr (kReturn == Return::kWeighted) {
      send_sum<kType>(site, call, peer.mapped(cell), arrival.row, __uint_as_float(arrival.weight),
                      1, units.begin(part), units.end(part));
    } else {
      // The token's first row here sends the sum; lane j has its row j.
      const std::uint32_t siblings = handle.siblings[list + i];
      if ((siblings & ((1u << k) - 1)) != 0) continue;
      const std::uint32_t count = __popc(siblings);
      DeviceArrival mine{kNoRow, 0, 0, 0};
      if (lane < count) {
        const std::size_t slots = static_cast<std::size_t>(to) * site.most_tokens * site.top_k;
        const std::uint32_t own_k = __fns(siblings, 0, static_cast<int>(lane) + 1);
        const std::uint32_t j = handle.index_of[slots + std::size_t{token} * site.top_k + own_k];
        mine = arrival_at(handle.arrivals + list + j);
      }
      const float weight = call.weighs ? __uint_as_float(mine.weight) : 1.0f;
      send_sum<kType>(site, call, peer.mapped(cell), mine.row, weight, count, units.begin(part),
                      units.end(part));
    }
    if (part == 0 && to != me) ++returned;
  }
  add_counts(site, returned, 0);
  const bool last = ends_last(site.words->ended_blocks, gridDim.x);
  if (threadIdx.x == 0) trace.end();
  if (!last) return;
  if (static_cast<int>(threadIdx.x) < ranks) {
    const int to = static_cast<int>(threadIdx.x);
    Peer(site.heaps, to).signal(site.heap.returned(number, me), protocol::numbered(number, 0));
  }
  if (threadIdx.x != 0) return;
  ExchangeWords& words = *site.words;
  words.combine = number;
  words.combine_of_all = ++words.calls;
  words.rows_returned = take_count(site, 0);
  if (handle.plan->end_of_rows > call.num_rows) {
    record_failure(site.failures->results,
                   ExchangeFailures::kFound | std::uint64_t{handle.plan->end_of_rows});
  }
  protocol::note_progress(site.heaps);
}

__global__ void __launch_bounds__(32) await_combine(const __grid_constant__ ExchangeSite site) {
  await_kernel_before();
  const std::uint64_t number = site.words->combine;
  const BlockTrace trace(site, ExchangeStage::kAwaitCombine, TraceKind::kCombine,
                         site.words->dispatch, number);
  if (!is_alive(site)) return;
  const bool arrived =
      await_all(site, protocol::Phase::kCombine, number, site.words->combine_of_all,
                [&](int r) { return site.heap.returned(number, r).in(site.heaps.mine()); });
  if (arrived && threadIdx.x == 0) {
    trace.begin();
    trace.end();
  }
  invite_next_kernel();
  if (arrived && threadIdx.x == 0) protocol::note_progress(site.heaps);
}

template <DType kIn>
__global__ void __launch_bounds__(kMoverThreads)
    sum_tokens(const __grid_constant__ ExchangeSite site, const __grid_constant__ HandleSite handle,
               const __grid_constant__ CombineReceive call) {
  constexpr std::uint32_t kAtOnce = kIn == DType::kF32 ? 4 : 8;
  await_kernel_before();
  invite_next_kernel();
  const std::uint64_t number = site.words->combine;
  const BlockTrace trace(site, ExchangeStage::kSumTokens, TraceKind::kCombine, site.words->dispatch,
                         number);
  if (!is_alive(site)) return;
  const std::uint32_t lane = threadIdx.x % 32;
  const Units units(call.tokens, protocol::ceil_div(site.hidden, kElementColumns));
#pragma unroll 1
  for (std::uint32_t unit = units.first(); unit < units.count; unit += units.stride()) {
    const std::uint32_t token = units.row(unit), part = units.part(unit);
    const std::size_t slot = std::size_t{token} * site.top_k + lane;
    const std::int32_t place = lane < site.top_k ? handle.places[slot] : -1;
    bool there = place >= 0;
    if (call.pre_sum) {
      const int owner = there ? site.heaps.experts.owner(place) : -1;
      const std::uint32_t same = __match_any_sync(~0u, owner);
      there = there && lane == static_cast<std::uint32_t>(__ffs(same)) - 1;
    }
    const float weight = there && call.weighs ? handle.weights[slot] : 1.0f;
    const std::uint32_t present = __ballot_sync(~0u, there);
#pragma unroll 1
    for (std::uint32_t step = units.begin(part); step < units.end(part); ++step) {
      const Columns<true> columns(step, site.hidden);
      float sum[8] = {};
#pragma unroll 1
      for (std::uint32_t rest = present; rest != 0;) {
        Eight<kIn> cells[kAtOnce];
        std::uint32_t some = rest;
#pragma unroll
        for (std::uint32_t i = 0; i < kAtOnce; ++i) {
          if (some != 0) {
            const auto k = static_cast<std::uint32_t>(__ffs(static_cast<int>(some))) - 1;
            cells[i].load(site.heap.cell(number, token, k).in(site.heaps.mine()), columns);
          }
          some &= some - 1;
        }
#pragma unroll
        for (std::uint32_t i = 0; i < kAtOnce; ++i) {
          const float factor =
              __shfl_sync(~0u, weight, rest == 0 ? 0 : __ffs(static_cast<int>(rest)) - 1);
          if (rest != 0) {
#pragma unroll
            for (int c = 0; c < 8; ++c) sum[c] = __fmaf_rn(factor, cells[i].get(c), sum[c]);
          }
          rest &= rest - 1;
        }
      }
      store_sum(call, token, columns, sum);
    }
  }
  trace.warp_ends();
}

template <Return kReturn, DType kType>
cudaError_t launch(const ExchangeSite& site, const HandleSite& handle, const CombineSend& call,
                   unsigned blocks, cudaStream_t stream) {
  const std::uint32_t steps = kReturn == Return::kRow
                                  ? CopySteps::count(site.hidden * size_of(kType))
                                  : protocol::ceil_div(site.hidden, kElementColumns);
  const unsigned count = blocks_for(static_cast<std::uint64_t>(call.num_rows) * steps, blocks);
  return launch_early(send_results<kReturn, kType>, count, kMoverThreads, stream, site, handle,
                      call);
}

template <DType kType>
cudaError_t launch_return(const ExchangeSite& site, const HandleSite& handle,
                          const CombineSend& call, unsigned blocks, cudaStream_t stream) {
  if (call.pre_sum) return launch<Return::kSum, kType>(site, handle, call, blocks, stream);
  if (call.weighs) return launch<Return::kWeighted, kType>(site, handle, call, blocks, stream);
  return launch<Return::kRow, kType>(site, handle, call, blocks, stream);
}

template <DType kType>
cudaError_t load_of_type() {
  cudaFuncAttributes facts;
  for (const cudaError_t result :
       {cudaFuncGetAttributes(&facts, send_results<Return::kRow, kType>),
        cudaFuncGetAttributes(&facts, send_results<Return::kWeighted, kType>),
        cudaFuncGetAttributes(&facts, send_results<Return::kSum, kType>)}) {
    if (result != cudaSuccess) return result;
  }
  return cudaFuncGetAttributes(&facts, sum_tokens<kType>);
}

}  // namespace

cudaError_t launch_combine_send(const ExchangeSite& site, const HandleSite& handle,
                                const CombineSend& call, DType dtype, unsigned blocks,
                                cudaStream_t stream) {
  switch (dtype) {
    case DType::kF32: return launch_return<DType::kF32>(site, handle, call, blocks, stream);
    case DType::kF16: return launch_return<DType::kF16>(site, handle, call, blocks, stream);
    default: return launch_return<DType::kBF16>(site, handle, call, blocks, stream);
  }
}

cudaError_t launch_await_combine(const ExchangeSite& site, cudaStream_t stream) {
  return launch_early(await_combine, 1, 32, stream, site);
}

cudaError_t launch_sum_tokens(const ExchangeSite& site, const HandleSite& handle,
                              const CombineReceive& call, DType dtype, unsigned blocks,
                              cudaStream_t stream) {
  const std::uint64_t steps =
      std::uint64_t{call.tokens} * protocol::ceil_div(site.hidden, kElementColumns);
  const unsigned count = blocks_for(steps, blocks);
  switch (dtype) {
    case DType::kF32:
      return launch_early(sum_tokens<DType::kF32>, count, kMoverThreads, stream, site, handle,
                          call);
    case DType::kF16:
      return launch_early(sum_tokens<DType::kF16>, count, kMoverThreads, stream, site, handle,
                          call);
    default:
      return launch_early(sum_tokens<DType::kBF16>, count, kMoverThreads, stream, site, handle,
                          call);
  }
}

cudaError_t load_combine_kernels() {
  for (const cudaError_t result :
       {load_of_type<DType::kF32>(), load_of_type<DType::kF16>(), load_of_type<DType::kBF16>()}) {
    if (result != cudaSuccess) return result;
  }
  cudaFuncAttributes facts;
  return cudaFuncGetAttributes(&facts, await_combine);
}

}  // namespace switchyard::gpu
