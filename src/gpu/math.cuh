// The math warpgroups: they drain the ring, finish tiles and combine.
#pragma once

#include "gpu/combine.cuh"
#include "gpu/epilogue.cuh"
#include "gpu/loading.cuh"

namespace switchyard::gpu {

// --- Math: two warpgroups, each with half of the tile's weight rows.

// What a math warpgroup has stored but its first thread not yet told others. Telling means to wait
// until all stores have reached the L2 cache, so it is put off until the next tile's products are
// under way, but never beyond a wait: what is waited for may depend on it.
template <typename P>
class Signals {
 public:
  __device__ explicit Signals(BlockStorage<P>& block) : block_(block) {}

  // The warpgroup stores, and has stored once all of it is past barrier_id, its part of what `word`
  // counts.
  __device__ void put_off(std::uint32_t* word, std::uint32_t barrier_id) {
    send();
    named_barrier<kWarpgroup>(barrier_id);
    if (fresh_thread_index<kWarpgroup>() == 0) mine() = word;
    any_ = true;
  }
  __device__ void send() {
    if (!any_) return;
    any_ = false;
    if (fresh_thread_index<kWarpgroup>() == 0) add_release_gpu(mine(), 1);
  }

 private:
  __device__ std::uint32_t*& mine() const {
    return block_.unsignalled[fresh_thread_index<kThreads>() / kWarpgroup - 1];
  }

  BlockStorage<P>& block_;
  bool any_ = false;
};

// Its waits are not asked how they ended, here and in the epilogue: wgmma must not be in code that
// some threads may have left. A tile that was given up is finished with wrong numbers.
//
// The warpgroup's rows of the stage are kHalves instructions, one below the other.
template <int kHalves, int N, typename P>
__device__ __forceinline__ void multiply_tile(const Pass<P>& pass, const TaskDescriptor& task,
                                              std::uint32_t k_blocks, RingPlace& place,
                                              std::uint32_t group, Signals<P>& signals,
                                              float (&acc)[kHalves][N / 2]) {
  constexpr int kStepBytes = P::kInstructionK * P::kElementBytes;
  constexpr std::uint32_t kHalfBytes = kInstructionRows * kStageRowBytes;
  // Of the K loop: by then the last tile's stores have arrived. (Knowing it, the compiler would
  // make copies of the loop's body.)
  std::uint32_t blocks_before_signals;
  asm volatile("mov.u32 %0, 2;" : "=r"(blocks_before_signals));
  // By reference where registers are short: read anew behind every wait.
  const std::conditional_t<P::kScaled, const Ring&, const Ring> ring = pass.state().ring;
  const std::uint32_t lane = fresh_thread_index<32>();
  // Of a pair, a lane tells each block that a stage is free.
  const bool speaks = lane <= pass.call.paired;
  const std::uint32_t empty =
      speaks && pass.call.paired != 0 ? address_in_pair(ring.empty, lane) : ring.empty;
  const auto await_stage = [&] {
    if (!test_wait(ring.full_barrier(place.stage), place.parity)) {
      signals.send();
      wait_ring(pass.waiter(), ring.full_barrier(place.stage), place.parity);
    }
    // The tokens' copies are ordinary writes; the matrix unit reads through the async proxy.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  };
  const auto issue = [&](int half, float(&sums)[N / 2], bool accumulate) {
    const std::uint64_t a =
        swizzled_descriptor(ring.weights(place.stage) + (group * kHalves + half) * kHalfBytes);
    const std::uint64_t b = swizzled_descriptor(ring.tokens(place.stage));
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kStageRowBytes / kStepBytes; ++k) {
      // The address is the descriptor's lowest field, in units of 16 bytes.
      multiply<P, N>(a + k * kStepBytes / 16, b + k * kStepBytes / 16, sums, accumulate || k != 0);
    }
    cute::warpgroup_commit_batch();
  };
  // The compiler does not know that a wait is for accumulators: without a fence for each it may
  // compute with them before.
  const auto await_products = [](float(&sums)[N / 2]) {
    cute::warpgroup_wait<0>();
#pragma unroll
    for (float& sum : sums) cute::warpgroup_fence_operand(sum);
  };
  if constexpr (P::kScaled) {
    // Products of one stage, which are scaled and summed here while the other warpgroup's are under
    // way.
    float part[N / 2];
#pragma unroll
    for (auto& half : acc) {
#pragma unroll
      for (float& sum : half) sum = 0;
    }
    // A large task has a box for each warpgroup, a small one a box for both.
    const std::uint32_t box_scales = 8 * (kHalves == 1 ? task.block % 2 : group);
#pragma unroll 1
    for (std::uint32_t kb = 0; kb < k_blocks; ++kb) {
      await_stage();
      if (kb == blocks_before_signals) signals.send();
      const float2 weights = load_shared_floats(ring.weight_scales(place.stage) + box_scales);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        issue(half, part, false);
        const std::uint32_t scales = ring.token_scales(place.stage) + 8 * fresh_thread_index<4>();
        // Of this thread's first and second weight row.
        const float first = kHalves == 1 || half == 0 ? weights.x : weights.y;
        const float second = kHalves == 1 ? weights.y : first;
        await_products(part);
#pragma unroll
        for (int n = 0; n < N / 8; ++n) {
          const float2 tokens = load_shared_floats(scales + 32 * n);
          acc[half][4 * n] += part[4 * n] * (tokens.x * first);
          acc[half][4 * n + 1] += part[4 * n + 1] * (tokens.y * first);
          acc[half][4 * n + 2] += part[4 * n + 2] * (tokens.x * second);
          acc[half][4 * n + 3] += part[4 * n + 3] * (tokens.y * second);
        }
      }
      __syncwarp();
      if (speaks) arrive_in_pair(empty + 8 * place.stage);
      place.advance(ring.stages);
    }
  } else {
    static_assert(kHalves == 1);
    await_stage();
    issue(0, acc[0], false);
#pragma unroll 1
    for (std::uint32_t kb = 1; kb < k_blocks; ++kb) {
      const std::uint32_t previous = place.stage;
      place.advance(ring.stages);
      await_stage();
      issue(0, acc[0], true);
      if (kb == blocks_before_signals) signals.send();
      // All but the newest products are done, and with them the stage before.
      cute::warpgroup_wait<1>();
      if (speaks) arrive_in_pair(empty + 8 * previous);
    }
    await_products(acc[0]);
    if (speaks) arrive_in_pair(empty + 8 * place.stage);
    place.advance(ring.stages);
  }
}

// What the model has for each of its weight rows, this thread's two: `op` of each accumulator and
// its row's number. What few models have is in passes of their own: the usual epilogue then has
// half as many instructions, to be executed, and to be fetched.
template <int N, typename Op>
__device__ __forceinline__ void apply_rows(const float* first, const float* second,
                                           bool first_exists, bool second_exists,
                                           float (&acc)[N / 2], Op&& op) {
  const float rows[2] = {first_exists ? __ldg(first) : 0.0f, second_exists ? __ldg(second) : 0.0f};
#pragma unroll
  for (int i = 0; i < N / 2; ++i) acc[i] = op(acc[i], rows[i / 2 % 2]);
}

// Copies the tile's list to where the epilogue finds it at once, while the products are under way.
template <typename P>
__device__ __forceinline__ void fetch_entries(const Pass<P>& pass, const TaskDescriptor& task,
                                              std::uint32_t group) {
  for (std::uint32_t row = fresh_thread_index<kWarpgroup>(); row < task.rows; row += kWarpgroup) {
    std::uint32_t* const to = &pass.block.entries[group][row];
    if (task.list == nullptr) {
      *to = RowEntry::pack(task.first_row + row, pass.layer.top_k);
    } else if (P::kAlone) {
      *to = task.list[row];
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)),
                   "l"(task.list + row)
                   : "memory");
    }
  }
}
// A thread has the entries that it fetched itself; what it makes of them it shares behind a
// barrier.
__device__ __forceinline__ void await_entries() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// For the second GEMM, the rows' entries become the places of their cells, in vectors of 16 bytes.
template <typename P>
__device__ __forceinline__ void place_cells(const Pass<P>& pass, const TaskDescriptor& task,
                                            std::uint32_t group) {
  const auto cells = static_cast<std::uint32_t>(pass.layer.cells_per_token);
  const std::uint32_t vectors = static_cast<std::uint32_t>(pass.layer.hidden) / 8;
  for (std::uint32_t row = fresh_thread_index<kWarpgroup>(); row < task.rows; row += kWarpgroup) {
    std::uint32_t& entry = pass.block.entries[group][row];
    entry = ((RowEntry::cell(entry, cells) << pass.state().log2_splits) + task.split) * vectors;
  }
  named_barrier<kWarpgroup>(1 + group);
}

// Where weights apply to the input: the rows' entries become their weights, and these multiply what
// is linear in the input.
template <int kHalves, int N, typename P>
__device__ __forceinline__ void weigh_input(const Pass<P>& pass, const TaskDescriptor& task,
                                            std::uint32_t group, float (&acc)[kHalves][N / 2]) {
  std::uint32_t* const entries = pass.block.entries[group];
  const auto cells = static_cast<std::uint32_t>(pass.layer.cells_per_token);
  for (std::uint32_t row = fresh_thread_index<kWarpgroup>(); row < task.rows; row += kWarpgroup) {
    const float weight = pass.state().tables.weights[RowEntry::cell(entries[row], cells)];
    entries[row] = __float_as_uint(weight);
  }
  named_barrier<kWarpgroup>(1 + group);
  const std::uint32_t first = 2 * fresh_thread_index<4>();
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    // Of rows past the end, something; they are not stored.
    const uint2 weights = *reinterpret_cast<const uint2*>(entries + 8 * n + first);
#pragma unroll
    for (int i = 0; i < 4 * kHalves; ++i) {
      acc[i / 4][4 * n + i % 4] *= __uint_as_float(i % 2 ? weights.y : weights.x);
    }
  }
}

// Products of a first GEMM, before the activation. The thread's gate and up are its first and
// second weight row, or, kHalves being 2, its first and second half.
template <int kHalves, int N, bool kGated, typename P>
__device__ __forceinline__ void finish_products(const Pass<P>& pass, const TaskDescriptor& task,
                                                std::uint32_t group, std::uint32_t row,
                                                float (&acc)[kHalves][N / 2]) {
  const LayerParams& layer = pass.layer;
  const FfnParams& ffn = pass.ffn(task.shared != 0);
  if (layer.weight_on_input && task.shared == 0) weigh_input<kHalves, N>(pass, task, group, acc);
  const auto intermediate = static_cast<std::uint32_t>(ffn.intermediate);
  const std::size_t row0 = static_cast<std::size_t>(task.expert) * intermediate;
  const auto for_rows = [&](const float* gate, const float* up, auto op) {
    if (up == nullptr) return;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      constexpr bool kInterleaved = kGated && kHalves == 1;
      const std::uint32_t first = row + (kGated ? 0 : half * kInstructionRows);
      const std::uint32_t second = kInterleaved ? first : first + 8;
      const float* const of_half = kGated && half == 0 ? gate : up;
      apply_rows<N>(of_half + row0 + first, (kInterleaved ? up : of_half) + row0 + second,
                    first < intermediate, second < intermediate, acc[half], op);
    }
  };
  if constexpr (P::kScaled) {
    for_rows(ffn.gate_scale, ffn.up_scale, [](float v, float scale) { return v * scale; });
  }
  for_rows(ffn.gate_bias, ffn.up_bias, [](float v, float bias) { return v + bias; });
  // The parameterised SwiGLU: gate at most `limit`, up within it and moved by up_bias.
  if (kGated && layer.clamps) {
#pragma unroll
    for (int i = 0; i < kHalves * N / 2; ++i) {
      float& v = acc[i / (N / 2)][i % (N / 2)];
      const bool up = kHalves == 1 ? i / 2 % 2 == 1 : i >= N / 2;
      v = at_most(v, layer.limit);
      if (up) v = at_least(v, -layer.limit) + layer.up_bias;
    }
  }
}

// h as bf16.
template <int N, ActivationKind kKind, bool kGated, typename P>
__device__ __forceinline__ void finish_gemm1(const Pass<P>& pass, const TaskDescriptor& task,
                                             std::uint32_t group, float (&acc)[1][N / 2]) {
  const LayerParams& layer = pass.layer;
  const std::uint32_t thread = fresh_thread_index<kWarpgroup>();
  const std::uint32_t warp = thread / 32, lane = thread % 32;
  const auto intermediate = static_cast<std::uint32_t>(pass.ffn(task.shared != 0).intermediate);
  constexpr std::uint32_t kColumns = kGated ? 32 : 64;  // of h, from this warpgroup
  const std::uint32_t column0 = (task.block * kMathGroups + group) * kColumns;
  finish_products<1, N, kGated>(pass, task, group, column0 + warp * (kColumns / 4) + lane / 4, acc);
  const float slope = -1.44269504f * layer.alpha;
  const auto pair = [&](int, int n) {
    const float *first = acc[0] + 4 * n, *second = first + 2;
    const auto value = [slope](float v) { return activate<kKind>(v, slope); };
    if constexpr (kGated) {
      return uint2{pack_bf16(value(first[0]) * second[0], value(first[1]) * second[1]), 0};
    } else {
      return uint2{pack_bf16(value(first[0]), value(first[1])),
                   pack_bf16(value(second[0]), value(second[1]))};
    }
  };
  const std::uint32_t stride = layer.h_stride / 8;
  const std::uint32_t to = task.tile % layer.h_slots * kMaxHeight<P> * stride + column0 / 8;
  store_tile<N, 1, kGated>(shared_address(pass.block.staging[group]), 1 + group, task.rows,
                           column0 < intermediate ? intermediate - column0 : 0, pair,
                           reinterpret_cast<std::uint16_t*>(layer.h),
                           [&](std::uint32_t token) { return to + token * stride; });
}

// h as codes and scales. A task has whole groups of columns: one, of which each math warpgroup has
// half, if gate and up have met, else one for each warpgroup.
template <int N, ActivationKind kKind, bool kGated, typename P>
__device__ __forceinline__ void finish_gemm1(const Pass<P>& pass, const TaskDescriptor& task,
                                             std::uint32_t group, float (&acc)[2][N / 2]) {
  constexpr int kParts = kGated ? 1 : 2;  // of 64 columns, from this warpgroup
  constexpr std::uint32_t kTogether = kGated ? kMathGroups : 1;  // warpgroups of a group of columns
  constexpr std::uint32_t kBothGroups = 3;                       // a named barrier
  const LayerParams& layer = pass.layer;
  QuantizedTile<P>& tile = pass.block.quantized;
  // The largest magnitudes that a warpgroup's four warps found among their columns, for tokens 2 i
  // and 2 i + 1 as two bf16 numbers. Nobody is staging yet.
  const auto amax = [&](std::uint32_t of_group) {
    return reinterpret_cast<std::uint32_t*>(pass.block.staging[of_group]);
  };
  const std::uint32_t thread = fresh_thread_index<kWarpgroup>();
  const std::uint32_t warp = thread / 32, lane = thread % 32;
  const auto intermediate = static_cast<std::uint32_t>(pass.ffn(task.shared != 0).intermediate);
  const std::uint32_t column0 = (task.block * kMathGroups + group) * kParts * kInstructionRows;
  finish_products<2, N, kGated>(pass, task, group, column0 + warp * 16 + lane / 4, acc);
  const float slope = -1.44269504f * layer.alpha;
  const auto value = [slope](float v) { return activate<kKind>(v, slope); };
  // Rounded to bf16: values[part][2 n] and [2 n + 1] of the thread's first and second row.
  std::uint32_t values[kParts][N / 4];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const float a = value(acc[part][2 * i]), b = value(acc[part][2 * i + 1]);
      if constexpr (kGated) {
        values[part][i] = pack_bf16(a * acc[1][2 * i], b * acc[1][2 * i + 1]);
      } else {
        values[part][i] = pack_bf16(a, b);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    std::uint32_t most = larger_magnitudes(values[0][2 * n], values[0][2 * n + 1]);
    if constexpr (!kGated) {
      most = larger_magnitudes(most, larger_magnitudes(values[1][2 * n], values[1][2 * n + 1]));
    }
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      most = larger_magnitudes(most, __shfl_xor_sync(~0u, most, lanes));
    }
    if (lane < 4) amax(group)[warp * kMaxHeight<P> / 2 + 4 * n + lane] = most;
  }
  const auto meet = [&] {
    if constexpr (kGated) {
      named_barrier<kMathGroups * kWarpgroup>(kBothGroups);
    } else {
      named_barrier<kWarpgroup>(1 + group);
    }
  };
  meet();
  if (N == kWarpgroup || thread < N) {
    std::uint32_t most = 0;
#pragma unroll
    for (std::uint32_t w = 0; w < 4 * kTogether; ++w) {
      const std::uint32_t* const of_warp = amax(kGated ? w / 4 : group) + w % 4 * kMaxHeight<P> / 2;
      most = larger_magnitudes(most, of_warp[thread / 2]);
    }
    const GroupScale scale = group_scale(thread % 2 == 0 ? low_half(most) : high_half(most));
    tile.inverse[group][thread] = scale.inverse;
    if (thread < task.rows && column0 < intermediate && (!kGated || group == 0)) {
      const std::size_t slot = task.tile % layer.h_slots;
      layer.h_scales[(slot * layer.h_groups + column0 / kQuantGroup) * kMaxHeight<P> + thread] =
          scale.scale;
    }
  }
  // Only then may the next tile's magnitudes be written.
  meet();
  const std::uint32_t stride = layer.h_stride / kLaneColumns;
  const std::uint32_t to =
      task.tile % layer.h_slots * kMaxHeight<P> * stride + column0 / kLaneColumns;
  store_codes<N, kParts>(shared_address(pass.block.staging[group]), 1 + group, task.rows,
                         column0 < intermediate ? intermediate - column0 : 0, values,
                         tile.inverse[group], layer.h,
                         [&](std::uint32_t token) { return to + token * stride; });
}

template <int kHalves, int N, typename P>
__device__ __forceinline__ void finish_gemm2(const Pass<P>& pass, const TaskDescriptor& task,
                                             std::uint32_t group, float (&acc)[kHalves][N / 2]) {
  const LayerParams& layer = pass.layer;
  const FfnParams& ffn = pass.ffn(task.shared != 0);
  const std::uint32_t thread = fresh_thread_index<kWarpgroup>();
  const std::uint32_t warp = thread / 32, lane = thread % 32;
  const auto hidden = static_cast<std::uint32_t>(layer.hidden);
  const std::uint32_t column0 = (task.block * kMathGroups + group) * kHalves * kInstructionRows;
  const auto for_rows = [&](const float* vector, auto op) {
    if (vector == nullptr) return;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const std::uint32_t row = column0 + half * kInstructionRows + warp * 16 + lane / 4;
      const float* const at = vector + static_cast<std::size_t>(task.expert) * hidden + row;
      apply_rows<N>(at, at + 8, row < hidden, row + 8 < hidden, acc[half], op);
    }
  };
  if constexpr (P::kScaled) {
    for_rows(ffn.down_scale, [](float v, float scale) { return v * scale; });
  }
  // Of a split GEMM, one part.
  for_rows(task.split != 0 ? nullptr : ffn.down_bias, [](float v, float bias) { return v + bias; });
  const auto pair = [&](int half, int n) {
    const float* const sums = acc[half] + 4 * n;
    return uint2{pack_bf16(sums[0], sums[1]), pack_bf16(sums[2], sums[3])};
  };
  store_tile<N, kHalves, false>(
      shared_address(pass.block.staging[group]), 1 + group, task.rows,
      column0 < hidden ? hidden - column0 : 0, pair, layer.cells,
      [&](std::uint32_t token) { return pass.block.entries[group][token] + column0 / 8; });
}

template <int kHalves, int N, ActivationKind kKind, bool kGated, typename P>
__device__ __forceinline__ void gemm_task(const Pass<P>& pass, const TaskDescriptor& task,
                                          std::uint32_t k_blocks, bool first, RingPlace& place,
                                          const TaskReader<P>& reader, Signals<P>& signals) {
  const std::uint32_t group = fresh_thread_index<kThreads>() / kWarpgroup - 1;
  float acc[kHalves][N / 2];
  const bool needs_entries = !first || pass.layer.weight_on_input;
  if (needs_entries) fetch_entries(pass, task, group);
  multiply_tile<kHalves, N>(pass, task, k_blocks, place, group, signals, acc);
  // From here on the scheduler may look for another task.
  if (fresh_thread_index<32>() == 0) reader.release();
  if (needs_entries) await_entries();
  if (first) {
    finish_gemm1<N, kKind, kGated>(pass, task, group, acc);
  } else {
    place_cells(pass, task, group);
    finish_gemm2<kHalves, N>(pass, task, group, acc);
  }
  signals.put_off(first ? pass.gemm1_done(task.tile) : pass.gemm2_done(task.tile), 1 + group);
  if (P::kAlone) signals.send();
}

// A GEMM on a tile of so many units of rows.
template <int kHalves, int kMost, ActivationKind kKind, bool kGated, typename P>
__device__ __forceinline__ void gemm_task_of(std::uint32_t units, const Pass<P>& pass,
                                             const TaskDescriptor& task, std::uint32_t k_blocks,
                                             bool first, RingPlace& place,
                                             const TaskReader<P>& reader, Signals<P>& signals) {
  switch (units) {
#define SWITCHYARD_HEIGHT(height)                                                           \
  case (height) / kUnitRows:                                                                \
    if constexpr ((height) <= kMost) {                                                      \
      gemm_task<kHalves, height, kKind, kGated>(pass, task, k_blocks, first, place, reader, \
                                                signals);                                   \
    }                                                                                       \
    break;
    SWITCHYARD_HEIGHT(16)
    SWITCHYARD_HEIGHT(32)
    case 3:
      SWITCHYARD_HEIGHT(64)
    case 5:
      SWITCHYARD_HEIGHT(96)
    case 7:
      SWITCHYARD_HEIGHT(128)
    case 9:
      SWITCHYARD_HEIGHT(160)
    case 11:
      SWITCHYARD_HEIGHT(192)
    case 13:
      SWITCHYARD_HEIGHT(224)
    case 15:
      SWITCHYARD_HEIGHT(256)
#undef SWITCHYARD_HEIGHT
    default:
      break;
  }
}

template <typename P>
__device__ __forceinline__ void combine_task(const Pass<P>& pass, const TaskDescriptor& task) {
  const LayerParams& layer = pass.layer;
  const std::uint32_t thread = fresh_thread_index<kThreads>();
  const std::uint32_t warp = thread / 32 - kWarpgroup / 32, lane = thread % 32;
  const std::uint32_t log2_chunk = pass.state().log2_combine_chunk;
  // A warp to a token, or, where there are few tokens, all warps to one.
  const std::uint32_t warps_per_token = kMathWarps >> log2_chunk;
  const std::uint32_t token = (task.tile << log2_chunk) + (warp << log2_chunk) / kMathWarps;
  const auto demand_next = [&] {
    if (thread == kWarpgroup) demand(pass);
  };
  if (token >= pass.call.tokens) return demand_next();
  const RoutingTables& tables = pass.state().tables;
  const std::size_t slot = static_cast<std::size_t>(token) * tables.top_k + lane;
  const std::size_t cell = static_cast<std::size_t>(token) * tables.cells_per_token + lane;
  std::uint32_t tile = ~0u;
  float weight = 0;
  if (lane < tables.top_k) {
    const std::int32_t id = tables.ids[slot];
    const std::uint32_t position =
        P::kAlone ? pass.block.own.positions[slot] : __ldcg(layer.positions + slot);
    if (id >= 0) {
      weight = layer.weight_on_input ? 1.0f : tables.weights[cell];
      const protocol::TokenTiles cut(pass.block.expert_rows[id], P::kTileShape);
      tile = pass.block.tile_begin[id] + position / cut.height;
    }
  } else if (lane < tables.cells_per_token) {
    weight = tables.weights[cell];
    tile = token / pass.state().shared_tiles.height;
  }
  const std::uint32_t present = __ballot_sync(~0u, tile != ~0u);
  pass.waiter().wait(protocol::Phase::kCombine, token, [&] {
    return __all_sync(~0u, tile == ~0u || pass.gemm2_complete(tile)) != 0;
  });
  demand_next();
  for (std::uint32_t column = (warp & (warps_per_token - 1)) * kCombinedColumns;
       column < static_cast<std::uint32_t>(layer.hidden);
       column += warps_per_token * kCombinedColumns) {
    combine_columns(layer, pass.call, token, column + 8 * lane, weight, present,
                    pass.state().log2_splits);
  }
}

// The words of the pass after this one, which were those of the pass before. Done while the first
// weights are on their way.
template <typename P>
__device__ __forceinline__ void clear_next_words(const Pass<P>& pass) {
  constexpr std::uint32_t kMathThreads = kMathGroups * kWarpgroup;
  const PassWords next = pass.layer.pass_words[~pass.waiter().epoch & 1];
  const std::uint32_t count = PassWords::count(pass.layer.num_experts, pass.layer.max_tiles);
  for (std::uint32_t i = blockIdx.x * kMathThreads + threadIdx.x - kWarpgroup; i < count;
       i += gridDim.x * kMathThreads) {
    next.words[i] = 0;
  }
  // All blocks know this pass's epoch: the next may have another.
  if (threadIdx.x == kWarpgroup && atomicInc(pass.layer.readers, gridDim.x - 1) == gridDim.x - 1) {
    *pass.layer.epoch = pass.waiter().epoch + 1;
  }
}

template <typename P>
__device__ __forceinline__ void report_stuck_ring(const Pass<P>& pass) {
  if (threadIdx.x != kWarpgroup || *pass.waiter().going != Going::kRingStuck) return;
  const int rank = pass.layer.heaps.rank;
  protocol::abort_world(pass.layer.heaps,
                        {rank, rank, protocol::Phase::kExperts, pass.waiter().epoch, blockIdx.x, 0,
                         0, 2 * pass.waiter().deadline_ns});
  *pass.layer.failed = static_cast<std::uint32_t>(Failure::kGivenUp);
}

// A first GEMM may not store before the tile that had its slot of h is no longer needed.
template <typename P>
__device__ __forceinline__ void await_slot(const Pass<P>& pass, std::uint32_t tile,
                                           Signals<P>& signals) {
  if (tile < pass.layer.h_slots) return;
  const std::uint32_t before = tile - pass.layer.h_slots, group = threadIdx.x / kWarpgroup - 1;
  signals.send();
  if (threadIdx.x % kWarpgroup == 0) {
    pass.waiter().wait(protocol::Phase::kExperts, before,
                       [&] { return pass.gemm2_complete(before); });
  }
  named_barrier<kWarpgroup>(1 + group);
}

template <ActivationKind kKind, bool kGated, typename P>
__device__ __forceinline__ void math_role(const Pass<P>& pass) {
  clear_next_words(pass);
  if constexpr (!P::kAlone) {
    // A row to a warp, as far as they go, and neighbours to different blocks.
    pack_rows<1>(pass, 0, first_rows(pass), (threadIdx.x / 32 - 4) * gridDim.x + blockIdx.x,
                 gridDim.x * kMathWarps);
  }
  TaskReader reader(pass);
  Signals signals(pass.block);
  RingPlace place;
  for (;;) {
    if (!reader.ready()) signals.send();
    const TaskDescriptor task = reader.next();
    __syncwarp();
    // Told to be the same in all lanes, the compiler keeps the warp together; all of it in one
    // word.
    const std::uint32_t head = __shfl_sync(
        ~0u, task.k_blocks << 8 | task.units << 2 | static_cast<std::uint32_t>(task.work), 0);
    const auto work = static_cast<Work>(head & 3);
    const bool gemm = work == Work::kGemm1 || work == Work::kGemm2;
    const std::uint32_t k_blocks = head >> 8;
    const bool first = work == Work::kGemm1;
    if (first) await_slot(pass, task.tile, signals);
    const std::uint32_t units = head >> 2 & 63;
    if (!gemm) {
      signals.send();
      if (threadIdx.x % 32 == 0) reader.release();
      if (work != Work::kCombine) {
        report_stuck_ring(pass);
        return;
      }
      combine_task(pass, task);
    } else {
      gemm_task_of<P::kHalves, P::kTileShape.max_height, kKind, kGated>(
          units, pass, task, k_blocks, first, place, reader, signals);
    }
    if (threadIdx.x == kWarpgroup) protocol::note_progress(*pass.waiter().heaps);
  }
}

}  // namespace switchyard::gpu
