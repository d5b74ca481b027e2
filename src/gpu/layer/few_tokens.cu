// Passes of few tokens with the routing given: see docs/decisions/0044 and 0048. One token's pass
// is mostly a wait for memory, and a starting kernel pays for every instruction that it reaches for
// the first time. So this one has few instructions. There are no tasks: what a warp computes
// follows from its number.
//
//   first GEMM    two warps, or four over ranks in bf16 and FP8, multiply 16 rows of an expert's
//                 weights, 8 of gate and the same 8 of up, with all tokens of the pass, activate
//                 the sums and store h
//   second GEMM   a block multiplies 16 rows of all experts' weights with h. Its warps share the
//                 experts' columns, and add up their sums, weighed, in shared memory
//
// A warp's weights come as one stream through a ring in shared memory, in which each lane copies
// what it multiplies. The stream does not end between the GEMMs: while blocks wait for each other's
// h, the second GEMM's first weights arrive.
//
// Over ranks, every rank sends all others its tokens and their slots, and computes with its experts
// what all tokens need of them. What it sums for a token of another rank goes there, and that rank
// adds up the sums in the order of ranks. Each rank has the same number of rows, and what it does
// not use of them has no slots.
#include "gpu/layer/few_tokens.h"
#include "gpu/pipeline/peer.cuh"
#include "gpu/ptx/early_launch.cuh"
#include "gpu/ptx/mma.cuh"
#include "gpu/route/choose.cuh"
#include "gpu/tile/activation.cuh"
#include "gpu/tile/fragments.cuh"
#include "gpu/tile/quantize.cuh"

namespace switchyard::gpu {
namespace {

constexpr std::uint8_t kNoRow = 0xff;

struct FewStorage {
  LifeState life;
  std::uint32_t num_experts;           // that any token chose
  std::int32_t expert[kMostFewSlots];  // their places
  // The slot of each row, by the place in `expert`.
  alignas(8) std::uint8_t row_of[kMostFewSlots][kMostFewRows];
  std::int32_t ids[kMostFewSlots];  // places of experts
  float weights[kMostFewSlots];
  std::uint8_t place_in_list[kMostFewSlots];
  std::uint32_t ranks_of[kMostFewRows];  // a bit for each rank that has an expert of the row
};

// A warp's place in its stream of stages.
struct Cursor {
  std::uint32_t gemm, job;            // the job: a tile of an expert, then a tile of all experts
  std::uint32_t tile, expert, stage;  // of the job
  std::uint32_t left = 0;             // stages of the job
};

template <FewNumbers kNumbers, bool kGated, bool kRanks>
struct Few {
  static constexpr bool kScaled = kNumbers == FewNumbers::kFp8, kFourBit = few_four_bit(kNumbers);
  // The type of four-bit weights; of others it is not used.
  static constexpr DType kStored = kNumbers == FewNumbers::kInt4 ? DType::kU4 : DType::kF4E2M1;
  using Box = FewBox<kStored>;

  const FewParams& p;
  FewStorage& block;
  std::uint32_t operand, ring, sums;  // addresses in shared memory; the ring is the warp's
  const std::uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

  static constexpr std::uint32_t kStageBytes = few_stage_bytes(kNumbers),
                                 kFewStages = few_stages(kRanks);
  static constexpr std::uint32_t kOperandBytes = 2 * few_stage_columns(kNumbers);
  // The warps that share a tile of the first GEMM.
  static constexpr std::uint32_t kSharers = kRanks && !kFourBit ? 4 : 2;

  __device__ Lifetime life() const { return {p, block.life}; }

  // Called by one thread.
  __device__ void begin_life() const {
    const std::uint64_t epoch = *p.epoch_word;
    const bool aborted = protocol::aborted(p.heaps);
    block.life.epoch = epoch;
    block.life.words = p.pass_words[epoch & 1];
    block.life.going = Going::kOn;
    block.life.aborted = aborted;
    if (aborted) p.failures->given_up = 1;
  }
  // Lane k's slot of the token, checked as in the other kernels' given_token(). (Sharing it with
  // them changes the code that the compiler makes of all of them.)
  __device__ GateOutcome given_slot(std::uint32_t token) const {
    GateOutcome outcome;
    const auto num_routed = static_cast<std::int32_t>(p.num_routed);
    if (lane < p.top_k.count) {
      const std::size_t slot = std::size_t{token} * p.top_k.count + lane;
      outcome.id = given_id(p, slot);
      outcome.weight = given_weight(p, slot);
      if (p.large_ids_are_none && outcome.id >= num_routed) outcome.id = -1;
    }
    const bool outside = outcome.id < -1 || outcome.id >= num_routed;
    const RepeatedSlot repeated(outcome.id, outcome.weight);
    if (outside || repeated.bad) {
      outcome.bad_id =
          BadId{outside ? BadId::Kind::kExpert : BadId::Kind::kDuplicate, token, outcome.id}.pack();
    }
    if (outside || repeated.bad || repeated.idle) outcome.id = -1;
    return outcome;
  }
  __device__ void store_y(std::uint32_t token, std::uint32_t column, float sum) const {
    static_cast<std::uint16_t*>(p.y)[token * p.y_stride + column] =
        static_cast<std::uint16_t>(pack_bf16(sum * p.scale, 0));
  }

  // --- Over ranks.

  __device__ std::uint32_t rank() const { return static_cast<std::uint32_t>(p.heaps.rank); }
  __device__ std::byte* mine() const { return p.heaps.mine(); }
  __device__ std::uint32_t first_own_row() const { return kRanks ? rank() * p.rows_per_rank : 0; }
  __device__ bool is_here(std::int32_t place) const {
    return place >= 0 && static_cast<std::uint32_t>(place) - p.first_expert < p.local_experts;
  }
  // Calls visit(peer) for all other ranks, the next one first, or for a block's share of them.
  template <typename Visit>
  __device__ __forceinline__ void visit_others(std::uint32_t first, std::uint32_t step,
                                               Visit&& visit) const {
#pragma unroll 1
    for (std::uint32_t distance = 1 + first;
         distance < static_cast<std::uint32_t>(life().num_ranks()); distance += step) {
      visit(Peer(p.heaps, life().rank_at(distance)));
    }
  }
  __device__ static std::uint64_t word_of(std::uint32_t flag, std::uint32_t data) {
    return std::uint64_t{flag} << 32 | data;
  }
  // Sends this rank's tokens to all others. Half of the warps do, those that read no routing.
  __device__ __forceinline__ void send_rows(std::uint64_t epoch) const {
    constexpr std::uint32_t kFirst = kFewWarps / 2;
    if (warp < kFirst) return;
    const std::uint32_t flag = protocol::flag_of(epoch + 1), vectors = p.operands[0].columns / 4;
    std::uint32_t at = ((warp - kFirst) * gridDim.x + blockIdx.x) * 32 + lane;
#pragma unroll 1
    for (std::uint32_t token = 0; token < p.tokens;) {
      if (at >= vectors) {
        at -= vectors;
        ++token;
        continue;
      }
      const uint2 four = __ldcg(reinterpret_cast<const uint2*>(
          static_cast<const std::uint16_t*>(p.x) + token * p.x_stride + 4 * at));
      const WordPair words{word_of(flag, four.x), word_of(flag, four.y)};
      visit_others(0, 1, [&](const Peer& peer) {
        peer.put_words(p.heap.few_row(epoch, first_own_row() + token) + 2 * at, words);
      });
      at += gridDim.x * (kFewWarps - kFirst) * 32;
    }
  }
  // Waits for a word of another rank. The flag is in its upper half. Returns false if the pass was
  // given up.
  __device__ __forceinline__ bool await_word(const std::uint64_t* word, protocol::Phase phase,
                                             std::uint32_t peer) const {
    const std::uint32_t flag = life().flag();
    std::uint64_t seen = 0;
    return life().waiter().wait_for(
        [&] {
          seen = protocol::load_relaxed(word);
          return static_cast<std::uint32_t>(seen >> 32) == flag;
        },
        [&] {
          return protocol::Missing{phase, static_cast<int>(peer), 0, flag, seen >> 32};
        });
  }
  // Takes the slots of the other ranks' rows, one warp for each row. They stand for the other rank:
  // all of them come, even if it has no token. Returns false if the pass was given up.
  __device__ __forceinline__ bool receive_slots() const {
    if (warp >= p.rows) return true;
    const std::uint32_t source = warp / p.rows_per_rank;
    if (source == rank()) return true;
    const bool has_slot = lane < p.top_k.count;
    const std::uint32_t slot = warp * p.top_k.count + (has_slot ? lane : 0);
    const std::uint64_t* const words = (p.heap.few_slots(life().epoch()) + 2 * slot).in(mine());
    const std::uint32_t flag = life().flag();
    WordPair pair{};
    bool goes_on = true;
#pragma unroll 1
    while (goes_on) {
      pair = load_words(words);
      const bool first = pair.first >> 32 == flag, second = pair.second >> 32 == flag;
      if (first && second) break;
      goes_on = await_word(first ? words + 1 : words, protocol::Phase::kSlots, source);
    }
    if (!__all_sync(~0u, goes_on)) return false;
    note_slot(warp, slot, static_cast<std::int32_t>(pair.first),
              __uint_as_float(static_cast<std::uint32_t>(pair.second)));
    return true;
  }
  // Notes lane k's slot of a row, and which ranks the row needs. Called by a warp.
  __device__ __forceinline__ void note_slot(std::uint32_t row, std::uint32_t slot,
                                            std::int32_t place, float weight) const {
    const bool has_slot = lane < p.top_k.count;
    if (has_slot) {
      block.ids[slot] = place;
      block.weights[slot] = weight;
    }
    if constexpr (kRanks) {
      const std::uint32_t ranks =
          __reduce_or_sync(~0u, has_slot && place >= 0 ? 1u << p.heaps.experts.owner(place) : 0u);
      if (lane == 0) block.ranks_of[row] = ranks;
    }
  }
  // Brings the other ranks' rows that have an expert here into the operand, in the pieces of
  // request_operand(). Returns false if the pass was given up.
  __device__ __forceinline__ bool receive_rows() const {
    const FewOperand& o = p.operands[0];
    const std::uint32_t flag = life().flag();
#pragma unroll 1
    for (std::uint32_t i = first_piece(); i < o.rows * o.pieces.count; i += kFewThreads) {
      const std::uint32_t row = o.pieces.quotient(i), source = row / p.rows_per_rank;
      if (source == rank() || (block.ranks_of[row] >> rank() & 1) == 0) continue;
      const std::uint32_t column = 16 * (i - row * o.pieces.count);
      const std::uint32_t to = operand + row * o.row_bytes + column * 2;
      const std::uint64_t* const words =
          (p.heap.few_row(life().epoch(), row) + column / 2).in(mine());
      std::uint32_t data[8] = {};
      std::uint32_t missing = 8;
#pragma unroll 1
      while (true) {
        missing = 8;
#pragma unroll
        for (std::uint32_t j = 4; j-- > 0;) {
          if (column + 4 * j >= o.columns) continue;
          const WordPair pair = load_words(words + 2 * j);
          data[2 * j] = static_cast<std::uint32_t>(pair.first);
          data[2 * j + 1] = static_cast<std::uint32_t>(pair.second);
          if (pair.second >> 32 != flag) missing = 2 * j + 1;
          if (pair.first >> 32 != flag) missing = 2 * j;
        }
        if (missing == 8) break;
        if (!await_word(words + missing, protocol::Phase::kDispatch, source)) return false;
      }
      store_shared_vector(to, uint4{data[0], data[1], data[2], data[3]});
      store_shared_vector(to + 16, uint4{data[4], data[5], data[6], data[7]});
    }
    return true;
  }
  // Sends a rank its token's sum of the experts here, of one column.
  __device__ __forceinline__ void send_sum(std::uint32_t row, std::uint32_t column,
                                           float sum) const {
    const std::uint32_t owner = row / p.rows_per_rank, token = row - owner * p.rows_per_rank;
    Peer(p.heaps, static_cast<int>(owner))
        .put_word(p.heap.few_sums(first_own_row() + token) + column,
                  word_of(life().flag(), __float_as_uint(sum)));
  }
  // Adds up what ranks have sent for this rank's tokens, in the columns of this block's tiles.
  __device__ __forceinline__ void receive_sums() const {
    const std::uint32_t tiles = p.weights[1].tiles.count, hidden = p.weights[1].rows;
    const std::uint32_t own =
        blockIdx.x < tiles ? (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
#pragma unroll 1
    for (std::uint32_t i = threadIdx.x; i < own * kFewRows * p.tokens; i += kFewThreads) {
      const std::uint32_t token = i / (own * kFewRows), rest = i - token * own * kFewRows;
      const std::uint32_t column =
          (blockIdx.x + rest / kFewRows * gridDim.x) * kFewRows + rest % kFewRows;
      if (column >= hidden) continue;
      float sum = 0;
#pragma unroll 1
      for (std::uint32_t ranks = block.ranks_of[first_own_row() + token]; ranks != 0;
           ranks &= ranks - 1) {
        const auto source = static_cast<std::uint32_t>(__ffs(static_cast<int>(ranks))) - 1;
        const std::uint64_t* const word =
            (p.heap.few_sums(source * p.rows_per_rank + token) + column).in(mine());
        if (!await_word(word, protocol::Phase::kCombine, source)) return;
        sum += __uint_as_float(static_cast<std::uint32_t>(protocol::load_relaxed(word)));
      }
      store_y(token, column, sum);
    }
  }
  // Counts the bytes that this rank sends. Called by one thread.
  __device__ void count_traffic() const {
    std::uint32_t sums = 0;
#pragma unroll 1
    for (std::uint32_t row = 0; row < p.rows; ++row) {
      if (row / p.rows_per_rank != rank()) sums += block.ranks_of[row] >> rank() & 1;
    }
    const std::uint32_t hidden = p.operands[0].columns, others = life().num_ranks() - 1;
    std::uint32_t* const counters = block.life.words.counters();
    counters[kDispatchBytes] =
        others * (p.tokens * hidden * 4 + p.rows_per_rank * p.top_k.count * 16);
    counters[kCombineBytes] = sums * hidden * 8;
  }

  // --- The routing.

  // Reads the routing of this rank's rows, one warp for each, and sends it.
  __device__ void read_routing(std::uint64_t epoch) const {
    const std::uint32_t token = warp - first_own_row();
    if (token >= (kRanks ? p.rows_per_rank : p.tokens)) return;
    GateOutcome mine;
    if (token < p.tokens) mine = given_slot(token);
    if (blockIdx.x == 0 && mine.bad_id != 0 && lane < p.top_k.count) {
      atomicAdd(p.pass_words[*p.epoch_word & 1].counters() + kBadSlots, 1u);
      if (!p.skips_bad_ids) p.failures->bad_id = mine.bad_id;
    }
    const bool has_slot = lane < p.top_k.count;
    if (blockIdx.x == 0 && token < p.tokens && has_slot) {
      const std::uint32_t out = token * p.top_k.count + lane;
      if (p.out_ids != nullptr) p.out_ids[out] = mine.id;
      if (p.out_weights != nullptr) p.out_weights[out] = mine.weight;
    }
    if (mine.id >= 0 && p.place_of != nullptr) mine.id = p.place_of[mine.id];
    const std::uint32_t slot = warp * p.top_k.count + lane;
    if constexpr (kRanks) {
      const std::uint32_t flag = protocol::flag_of(epoch + 1);
      const WordPair words{word_of(flag, static_cast<std::uint32_t>(mine.id)),
                           word_of(flag, __float_as_uint(mine.weight))};
      visit_others(blockIdx.x, gridDim.x, [&](const Peer& peer) {
        if (has_slot) peer.put_words(p.heap.few_slots(epoch) + 2 * slot, words);
      });
    }
    note_slot(warp, slot, mine.id, mine.weight);
  }
  // Fills `row_of` with kNoRow. Called by the warp that then lists the experts.
  __device__ void clear_rows() const {
    auto* const words = reinterpret_cast<std::uint32_t*>(block.row_of);
    for (std::uint32_t i = lane; i < sizeof block.row_of / 4; i += 32) words[i] = ~0u;
    __syncwarp();
  }
  // Lists the experts in the order in which slots name them. Called by one warp.
  __device__ void list_experts() const {
    const std::uint32_t slots = p.rows * p.top_k.count;
    std::uint32_t count = 0;
#pragma unroll 1
    for (std::uint32_t first = 0; first < slots; first += 32) {
      const std::uint32_t slot = first + lane;
      std::int32_t id = slot < slots ? block.ids[slot] : -1;
      if (kRanks && !is_here(id)) id = -1;
      std::uint32_t owner = p.rows == 1 || id < 0 ? slot : 0;
#pragma unroll 1
      while (owner < slot && block.ids[owner] != id) ++owner;
      const bool is_first = id >= 0 && owner == slot;
      const std::uint32_t mask = __ballot_sync(~0u, is_first);
      if (is_first) {
        const std::uint32_t at = count + __popc(mask & ((1u << lane) - 1));
        block.expert[at] = kRanks ? id - static_cast<std::int32_t>(p.first_expert) : id;
        block.place_in_list[slot] = static_cast<std::uint8_t>(at);
      }
      count += __popc(mask);
      __syncwarp();
      if (id >= 0) {
        block.row_of[block.place_in_list[owner]][p.top_k.quotient(slot)] =
            static_cast<std::uint8_t>(slot);
      }
    }
    if (lane == 0) block.num_experts = count;
  }

  // The pieces of 16 columns of the operand that a thread brings into shared memory. The first
  // warps come last: they have the routing to read.
  __device__ static std::uint32_t first_piece() {
    return (threadIdx.x + kFewThreads / 2) % kFewThreads;
  }
  // Requests x or h, of ranks' rows this rank's, or those with an expert here. Called by the block.
  __device__ __forceinline__ void request_operand(std::uint32_t gemm) const {
    const FewOperand& o = p.operands[gemm];
    const auto* const from = gemm == 0 ? static_cast<const std::uint16_t*>(p.x) : p.h;
    const std::size_t stride = gemm == 0 ? p.x_stride : o.columns;
#pragma unroll 1
    for (std::uint32_t i = first_piece(); i < o.rows * o.pieces.count; i += kFewThreads) {
      const std::uint32_t row = o.pieces.quotient(i), column = 16 * (i - row * o.pieces.count);
      const std::uint32_t to = operand + row * o.row_bytes + column * 2;
      std::uint32_t of_source = row;
      if constexpr (kRanks) {
        if (gemm == 0) of_source -= first_own_row();
        if (gemm == 0 ? of_source >= p.tokens : !is_here(block.ids[row])) continue;
      }
      const std::uint16_t* const at = from + of_source * stride + column;
      const bool first = column < o.columns, second = column + 8 < o.columns;
      copy_async(to, reinterpret_cast<const std::byte*>(first ? at : from), first);
      copy_async(to + 16, reinterpret_cast<const std::byte*>(second ? at + 8 : from), second);
    }
    end_copy_group();
  }
  // Quantizes the operand in FP8, once it has arrived. A thread has the pieces that it copied
  // itself, and eight threads share a group.
  __device__ __forceinline__ void quantize_operand(std::uint32_t gemm) const {
    const FewOperand& o = p.operands[gemm];
    const std::uint32_t pieces = o.rows * o.pieces.count;
#pragma unroll 1
    for (std::uint32_t i = first_piece(); i / 32 * 32 < pieces; i += kFewThreads) {
      const std::uint32_t row = o.pieces.quotient(i), piece = i - row * o.pieces.count;
      const std::uint32_t at = operand + (i < pieces ? row * o.row_bytes + piece * 32 : 0);
      float scale = 0;
      const uint4 codes =
          quantize_together(load_shared_vector(at), load_shared_vector(at + 16), scale);
      if (i >= pieces) continue;
      const uint2 a = f16_of_codes(codes.x), b = f16_of_codes(codes.y), c = f16_of_codes(codes.z),
                  d = f16_of_codes(codes.w);
      store_shared_vector(at, uint4{a.x, a.y, b.x, b.y});
      store_shared_vector(at + 16, uint4{c.x, c.y, d.x, d.y});
      if (piece % 8 == 0) {
        store_shared_float(operand + o.rows * o.row_bytes + (row * o.stages + piece / 8) * 4,
                           scale);
      }
    }
  }

  __device__ std::uint32_t first_job(std::uint32_t gemm) const {
    return gemm == 0 ? blockIdx.x + gridDim.x * (warp / kSharers) : blockIdx.x;
  }
  __device__ std::uint32_t next_job(std::uint32_t gemm) const {
    return gemm == 0 ? gridDim.x * (kFewWarps / kSharers) : gridDim.x;
  }
  // Begins the cursor's job, of which this warp may have no stages. Returns false if there is no
  // job.
  __device__ __forceinline__ bool begin(Cursor& c) const {
    const Divisor& tiles = p.weights[c.gemm].tiles;
    const std::uint32_t experts = block.num_experts, stages = p.operands[c.gemm].stages;
    if (c.gemm == 0) {
      c.expert = tiles.quotient(c.job);
      if (c.expert >= experts) return false;
      c.tile = c.job - c.expert * tiles.count;
      const std::uint32_t of_tile = warp % kSharers;
      c.stage = stages * of_tile / kSharers;
      c.left = stages * (of_tile + 1) / kSharers - c.stage;
      return true;
    }
    if (c.job >= tiles.count) return false;
    c.tile = c.job;
    const std::uint32_t all = experts * stages, first = all * warp / kFewWarps;
    c.expert = p.h_stages.quotient(first);
    c.stage = first - c.expert * stages;
    c.left = all * (warp + 1) / kFewWarps - first;
    return true;
  }

  // The end of the stream at which weights are requested. Eight lanes copy the 128 bytes of a row,
  // which is what memory delivers at once: with 64 bytes of twice as many rows passes took a fifth
  // longer. A lane has row lane / 8, the fourth row after that, and the same among the second rows.
  struct Source {
    Cursor cursor;
    bool aimed = false;  // the fields below describe the next stage
    const std::byte* from;
    std::int64_t fourth, second;  // bytes from `from` to the fourth row, and to the second rows
    const float* scales;
    std::uint32_t bytes_left;     // bytes of the rows from this lane's on; negative past their end
    const std::byte* box_scales;  // what this lane copies of the scales of its box of the stage's
    std::uint32_t boxes_left;     // of the row
    std::uint32_t stages;
    std::uint32_t to = 0;  // in the ring

    __device__ __forceinline__ void aim(const Few& few) {
      while (cursor.left == 0) {
        if (!few.begin(cursor)) {
          if (++cursor.gemm == 2) return;
          cursor.job = few.first_job(1);
        } else if (cursor.left == 0) {
          cursor.job += few.next_job(cursor.gemm);
        }
      }
      const FewWeights& w = few.p.weights[cursor.gemm];
      const std::int64_t expert = few.block.expert[cursor.expert];
      if constexpr (kFourBit) return aim_at_boxes(few, w, expert);
      const std::uint32_t row = cursor.tile * w.tile_rows, at = cursor.stage * kFewStageRowBytes;
      fourth = 4 * w.row_stride;
      second = row + w.more_rows < w.rows ? w.second : 0;
      from = w.data + expert * w.expert_stride + (row + few.lane / 8) * w.row_stride + at +
             few.lane % 8 * 16;
      bytes_left = w.row_bytes - at - few.lane % 8 * 16;
      stages = few.p.operands[cursor.gemm].stages;
      if constexpr (kScaled) {
        scales = w.scales + expert * w.expert_scales +
                 ((cursor.tile / 16 * stages + cursor.stage) * 4 + cursor.tile / 8 % 2 * 2);
      }
    }
    // A tile's 16 rows are a warp's in a box: eight tiles have the same boxes.
    __device__ __forceinline__ void aim_at_boxes(const Few& few, const FewWeights& w,
                                                 std::int64_t expert) {
      const std::uint32_t first = cursor.stage * kFewBoxes, part = cursor.tile % 8;
      const std::byte* const boxes = w.data + expert * w.expert_stride +
                                     cursor.tile / 8 * w.row_stride +
                                     std::size_t{first} * Box::kBytes;
      from = boxes + part * Box::kCodes + few.lane * Box::kLaneBytes;
      box_scales = boxes + few.lane / Box::kScaleLanes * Box::kBytes + Box::kScalesAt +
                   part * Box::kScales + few.lane % Box::kScaleLanes * 16;
      boxes_left = w.row_bytes - first;
      stages = few.p.operands[cursor.gemm].stages;
    }
    __device__ __forceinline__ void request_boxes(const Few& few) {
      const std::uint32_t at = few.ring + to;
#pragma unroll
      for (std::uint32_t i = 0; i < kFewBoxes; ++i) {
        const bool exists = i < boxes_left;  // past the row's end there are zeros
        copy_async(at + i * Box::kPart + few.lane * Box::kLaneBytes,
                   exists ? from + i * Box::kBytes : from, exists);
      }
      const std::uint32_t box = few.lane / Box::kScaleLanes;
      if (box < kFewBoxes) {
        const bool exists = box < boxes_left;
        copy_async(at + box * Box::kPart + Box::kCodes + few.lane % Box::kScaleLanes * 16,
                   exists ? box_scales : from, exists);
      }
      from += kFewBoxes * Box::kBytes;
      box_scales += kFewBoxes * Box::kBytes;
      boxes_left -= kFewBoxes;
    }
    __device__ __forceinline__ void request_rows(const Few& few) {
      // (Rows are multiples of 16 bytes.)
      const bool exists = static_cast<std::int32_t>(bytes_left) > 0;
      if (!exists) {
        from = few.p.weights[cursor.gemm].data;
        fourth = second = 0;
      }
      const std::uint32_t vector = few.ring + to + few.lane / 8 * kFewStageRowBytes +
                                   few.swizzled(few.lane % 8, few.lane / 8);
      copy_async(vector, from, exists);
      copy_async(vector + 512, from + fourth, exists);
      copy_async(vector + 1024, from + second, exists);
      copy_async(vector + 1536, from + second + fourth, exists);
      if constexpr (kScaled) {
        copy_two_words_async(few.ring + to + kFewRows * kFewStageRowBytes + 8 * few.lane, scales);
        scales += 4;
      }
      from += kFewStageRowBytes;
      bytes_left -= kFewStageRowBytes;
    }
    // Requests the stream's next stage.
    __device__ __forceinline__ void request(const Few& few) {
      if (!aimed) aim(few);
      aimed = true;
      if (cursor.gemm < 2) {
        if constexpr (kFourBit) {
          request_boxes(few);
        } else {
          request_rows(few);
        }
        if (++cursor.stage == stages) {
          cursor.stage = 0;
          ++cursor.expert;
          aimed = false;
        }
        if (--cursor.left == 0) {
          cursor.job += few.next_job(cursor.gemm);
          aimed = false;
        }
      }
      end_copy_group();
      to = to + kStageBytes == kFewStages * kStageBytes ? 0 : to + kStageBytes;
    }
  };
  // Where a row's vector is in a stage: even rows and odd ones exchange halves, so that eight lanes
  // which read four vectors of two rows find them in different banks.
  __device__ static std::uint32_t swizzled(std::uint32_t vector, std::uint32_t row) {
    return (vector ^ row % 2 * 4) * 16;
  }

  // The same for a stage of four-bit weights. A lane's codes of a box are fragments of four
  // instructions (see FragmentPlace), and so the columns of x are those of a fragment.
  __device__ __forceinline__ void multiply_boxes(std::uint32_t from, std::uint32_t row,
                                                 float (&sums)[4]) const {
    std::uint32_t at = ring + from, column = row + lane % 4 * 4;
#pragma unroll 1
    for (std::uint32_t box = 0; box < kFewBoxes; ++box) {
      BoxWords words{load_shared_vector(at + lane * Box::kLaneBytes), {}};
      const std::uint32_t scales = at + Box::kCodes + lane / 4 * Box::kScaleBytes;
      words.scales.x = __float_as_uint(load_shared_float(scales));
      if constexpr (kNumbers == FewNumbers::kInt4) {
        words.scales.y = __float_as_uint(load_shared_float(scales + 4));
      }
      const auto multiply_half = [&]<int kHalf>() {
        Fragments a;
        make_fragments<kHalf, kStored>(words, a);
#pragma unroll
        for (int step = 0; step < kHalfSteps; ++step) {
          const std::uint32_t x = column + (kHalf * kHalfSteps + step) * 32;
          multiply_16x8x16(sums, a[step][0], a[step][1], a[step][2], a[step][3],
                           __float_as_uint(load_shared_float(x)),
                           __float_as_uint(load_shared_float(x + 16)));
        }
      };
      multiply_half.template operator()<0>();
      multiply_half.template operator()<1>();
      at += Box::kPart;
      column += 2 * Box::kColumns;
    }
  }
  // Multiplies a stage that has arrived by a column of each token. `row`: the address of the row of
  // this lane's token. `scales`: the addresses of the scales of the two tokens whose sums it has.
  __device__ __forceinline__ void multiply(std::uint32_t from, std::uint32_t row,
                                           const std::uint32_t (&scales)[2],
                                           float (&sums)[4]) const {
    if constexpr (kFourBit) return multiply_boxes(from, row, sums);
    float part[4] = {};
    float(&acc)[4] = kScaled ? part : sums;
#pragma unroll
    for (std::uint32_t half = 0; half < 2; ++half) {
      const std::uint32_t at =
          ring + from + lane / 4 * kFewStageRowBytes + swizzled(lane % 4 + 4 * half, lane / 4);
      const uint4 first = load_shared_vector(at), second = load_shared_vector(at + 1024);
      if constexpr (kScaled) {
        const std::uint32_t a[4] = {first.x, first.y, first.z, first.w},
                            b[4] = {second.x, second.y, second.z, second.w};
        const std::uint32_t column = row + 128 * half + lane % 4 * 32;
        const uint4 low = load_shared_vector(column), high = load_shared_vector(column + 16);
        const std::uint32_t x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint2 f = f16_of_codes(a[i]), s = f16_of_codes(b[i]);
          multiply_16x8x16_f16(acc, f.x, s.x, f.y, s.y, x[2 * i], x[2 * i + 1]);
        }
      } else {
        const uint4 x = load_shared_vector(row + 64 * half + lane % 4 * 16);
        multiply_16x8x16(acc, first.x, second.x, first.y, second.y, x.x, x.y);
        multiply_16x8x16(acc, first.z, second.z, first.w, second.w, x.z, x.w);
      }
    }
    if constexpr (kScaled) {
      const float2 of_weights =
          load_shared_floats(ring + from + kFewRows * kFewStageRowBytes + 8 * lane);
      const float of_tokens[2] = {load_shared_float(scales[0]), load_shared_float(scales[1])};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[i] += part[i] * ((i < 2 ? of_weights.x : of_weights.y) * of_tokens[i % 2]);
      }
    }
  }

  // Returns where a warp leaves its sums for others.
  __device__ std::uint32_t sums_of(std::uint32_t buffer, std::uint32_t of_warp) const {
    return sums + (buffer * kFewWarps + of_warp) * 512;
  }
  __device__ void leave_sums(std::uint32_t buffer, const float (&mine)[4]) const {
    store_shared_vector(sums_of(buffer, warp) + lane * 16,
                        uint4{__float_as_uint(mine[0]), __float_as_uint(mine[1]),
                              __float_as_uint(mine[2]), __float_as_uint(mine[3])});
  }
  // Adds the sums of the warps that share a tile and stores h. Sums i and i + 2 of a lane are of
  // row lane / 4, and of the row `second` behind it, for token 2 (lane % 4) + i.
  __device__ __forceinline__ void store_hidden(const Cursor& c, std::uint32_t buffer,
                                               float (&mine)[4]) const {
    if (warp % kSharers != 0) leave_sums(buffer, mine);
    named_barrier<32 * kSharers>(1 + warp / kSharers);
    if (warp % kSharers != 0) return;
#pragma unroll
    for (std::uint32_t w = 1; w < kSharers; ++w) {
      const uint4 other = load_shared_vector(sums_of(buffer, warp + w) + lane * 16);
      mine[0] += __uint_as_float(other.x);
      mine[1] += __uint_as_float(other.y);
      mine[2] += __uint_as_float(other.z);
      mine[3] += __uint_as_float(other.w);
    }
    const FewWeights& w = p.weights[0];
    const std::uint32_t columns = p.operands[1].columns, row0 = c.tile * w.tile_rows + lane / 4;
    const std::size_t of_expert = static_cast<std::size_t>(block.expert[c.expert]) * columns;
#pragma unroll
    for (int i = 0; i < (kGated ? 2 : 4); ++i) {
      const std::uint32_t token = lane % 4 * 2 + i % 2, row = row0 + (i < 2 ? 0 : 8);
      const std::uint32_t slot = block.row_of[c.expert][token];
      if (slot == kNoRow || row >= columns) continue;
      float v = mine[i], up = kGated ? mine[i + 2] : 0;
      const std::size_t at = of_expert + row;
      if (p.more_of_first) {
        float& linear = kGated ? up : v;
        if (kGated && p.gate_scale != nullptr) v *= __ldg(p.gate_scale + at);
        if (p.up_scale != nullptr) linear *= __ldg(p.up_scale + at);
        if (kGated && p.gate_bias != nullptr) v += __ldg(p.gate_bias + at);
        if (p.up_biases != nullptr) linear += __ldg(p.up_biases + at);
        if (kGated && p.clamps) {
          if (p.form.bend == 0) {
            v = at_most(v, p.limit);
            up = at_least(at_most(up, p.limit), -p.limit);
          } else {
            up = bend_up(p.form, p.limit, up);
          }
          up += p.up_bias;
        }
      }
      v = p.form.is_tanh     ? activate_tanh(p.form, v)
          : p.form.bend != 0 ? activate_bend(p.form, v)
                             : activate_ramp(p.form, v);
      if (kGated) v *= up;
      p.h[slot * std::size_t{columns} + row] = static_cast<std::uint16_t>(pack_bf16(v, 0));
    }
  }
  // Adds a part of an expert's output to the tokens' sums; the part from stage 0 on has the bias.
  __device__ __forceinline__ void weigh(const Cursor& c, bool biased, float (&part)[4],
                                        float (&sums)[4]) const {
    const std::uint32_t hidden = p.weights[1].rows, row0 = c.tile * kFewRows + lane / 4;
    const std::size_t of_expert = static_cast<std::size_t>(block.expert[c.expert]) * hidden;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t slot = block.row_of[c.expert][lane % 4 * 2 + i % 2];
      const std::uint32_t row = row0 + (i < 2 ? 0 : 8);
      if (slot == kNoRow || row >= hidden) continue;
      if (p.more_of_second) {
        if (p.down_scale != nullptr) part[i] *= __ldg(p.down_scale + of_expert + row);
        if (biased && p.down_bias != nullptr) part[i] += __ldg(p.down_bias + of_expert + row);
      }
      sums[i] += block.weights[slot] * part[i];
    }
  }
  // Adds up the warps' sums of a tile, in their order.
  __device__ __forceinline__ void store_output(std::uint32_t tile, std::uint32_t buffer,
                                               const float (&mine)[4]) const {
    leave_sums(buffer, mine);
    __syncthreads();
    const std::uint32_t owner = threadIdx.x / 4, i = threadIdx.x % 4;
    const std::uint32_t token = owner % 4 * 2 + i % 2,
                        row = tile * kFewRows + owner / 4 + (i < 2 ? 0 : 8);
    if (owner >= 32 || token >= p.rows || row >= p.weights[1].rows) return;
    if (kRanks && (block.ranks_of[token] >> rank() & 1) == 0) return;
    float sum = 0;
#pragma unroll
    for (std::uint32_t w = 0; w < kFewWarps; ++w) {
      sum += load_shared_float(sums_of(buffer, w) + threadIdx.x * 4);
    }
    if constexpr (kRanks) return send_sum(token, row, sum);
    store_y(token, row, sum);
  }

  // The words that the pass before this one used, and its number; see clear_next_words().
  __device__ void prepare_next_pass() const {
    std::uint32_t* const words = p.pass_words[~block.life.epoch & 1].words;
#pragma unroll 1
    for (std::uint32_t i = blockIdx.x * kFewThreads + threadIdx.x; i < p.num_pass_words;
         i += gridDim.x * kFewThreads) {
      words[i] = 0;
    }
    if (threadIdx.x == kFewThreads - 1 && atomicInc(p.readers, gridDim.x - 1) == gridDim.x - 1) {
      *p.epoch_word = block.life.epoch + 1;
    }
  }
  __device__ void store_stats() const {
    const std::uint32_t slots = p.rows * p.top_k.count;
#pragma unroll 1
    for (std::uint32_t e = threadIdx.x; e < p.num_experts; e += kFewThreads) {
      std::uint32_t rows = 0;
#pragma unroll 1
      for (std::uint32_t s = 0; s < slots; ++s) {
        rows += block.ids[s] == static_cast<std::int32_t>(e) ? 1 : 0;
      }
      p.stats[e] = rows;
    }
    if (threadIdx.x != 0) return;
    p.stats[p.num_experts] = p.tokens;
    if constexpr (kRanks) count_traffic();
  }
  // Meets all blocks, each of which has stored its part of h. Returns false if the pass was given
  // up.
  __device__ bool await_hidden() const {
    std::uint32_t* const word = life().barrier(kListsReady);
    grid_arrive(word);
    const auto all_stored = [&] {
      return life().waiter().wait(protocol::Phase::kExperts, blockIdx.x,
                                  [&] { return load_acquire_gpu(word) >= gridDim.x; });
    };
    return __syncthreads_and(threadIdx.x != 0 || all_stored());
  }

  __device__ __forceinline__ void run() const {
    Source source{};
    source.cursor.job = first_job(0);
    // The kernel before may still run. Until it has ended, this one touches nothing but its
    // parameters and its own shared memory: x, ids, weights and words are still being written.
    if (warp == 0) clear_rows();
    await_kernel_before();
    const std::uint64_t epoch = kRanks ? *p.epoch_word : 0;
    std::uint32_t from = 0, buffer = 0;
    bool arrived = true;  // what other ranks send

    // Both GEMMs have one copy of the code.
#pragma unroll 1
    for (std::uint32_t gemm = 0; gemm < 2; ++gemm) {
      buffer = 0;  // (warps that share tiles had different numbers of jobs)
      if (gemm == 1) {
        if (!await_hidden()) break;
        // The next kernel's blocks may come. With other ranks to wait for, they would take the room
        // of a rank that shares the device.
        if constexpr (!kRanks) invite_next_kernel();
      }
      request_operand(gemm);
      if (gemm == 0) {
        // x was requested before the first weights: what is requested after them arrives after
        // them, too. (With one token, the warp that lists the experts has read the routing.)
        if (threadIdx.x == kFewThreads - 1) begin_life();
        read_routing(epoch);
        if constexpr (kRanks) {
          send_rows(epoch);
          __syncthreads();
          if (block.life.aborted) break;
          arrived = receive_slots();
          if (__syncthreads_or(!arrived)) break;
        } else {
          if (p.rows != 1) __syncthreads();
        }
        if (warp == 0) list_experts();
        __syncthreads();
        if constexpr (kRanks) {
          arrived = receive_rows();
        } else {
          if (block.life.aborted) break;
        }
#pragma unroll 1
        for (std::uint32_t i = 0; i < kFewStages; ++i) source.request(*this);
        await_copy_groups<kFewStages>();
      } else {
        await_copies();
      }
      if constexpr (kScaled) quantize_operand(gemm);
      if constexpr (kRanks) {
        if (__syncthreads_or(!arrived)) break;
      } else {
        __syncthreads();
      }
      if (gemm == 0) prepare_next_pass();
      const FewOperand& o = p.operands[gemm];
      Cursor c;
      c.gemm = gemm;
#pragma unroll 1
      for (c.job = first_job(gemm); begin(c); c.job += next_job(gemm)) {
        float sums[4] = {};
        do {
          const auto row_of = [&](std::uint32_t token) {
            if (gemm == 0) return min(token, p.rows - 1);
            const std::uint32_t slot = block.row_of[c.expert][token];
            return slot == kNoRow ? 0 : slot;  // (nobody reads its sums)
          };
          const bool biased = c.stage == 0;
          const std::uint32_t count = min(c.left, o.stages - c.stage);
          std::uint32_t row = operand + row_of(lane / 4) * o.row_bytes + c.stage * kOperandBytes;
          std::uint32_t scales[2] = {};
          if constexpr (kScaled) {
            const std::uint32_t at = operand + o.rows * o.row_bytes + c.stage * 4;
            scales[0] = at + row_of(lane % 4 * 2) * o.stages * 4;
            scales[1] = at + row_of(lane % 4 * 2 + 1) * o.stages * 4;
          }
          c.left -= count;
          float part[4] = {};
#pragma unroll 1
          for (std::uint32_t i = 0; i < count; ++i) {
            await_copy_groups<kFewStages - 1>();
            __syncwarp();  // for the copies of other lanes, too
            multiply(from, row, scales, part);
            row += kOperandBytes;
            scales[0] += 4;
            scales[1] += 4;
            from = from + kStageBytes == kFewStages * kStageBytes ? 0 : from + kStageBytes;
            __syncwarp();
            source.request(*this);
          }
          if (gemm == 0) {
            store_hidden(c, buffer, part);
          } else if (count != 0) {
            weigh(c, biased, part, sums);
          }
          ++c.expert;
          c.stage = 0;
        } while (c.left != 0);
        if (gemm == 1) store_output(c.tile, buffer, sums);
        buffer ^= 1;
      }
      // (Where there are fewer tiles than blocks, the last block has least to do.)
      if (gemm == 1 && blockIdx.x == gridDim.x - 1) store_stats();
      if (kRanks && gemm == 1) receive_sums();
    }
    await_copies();
  }
};

template <FewNumbers kNumbers, bool kGated, bool kRanks>
__global__ void __launch_bounds__(kFewThreads, 1) few_tokens(const __grid_constant__ FewParams p) {
  extern __shared__ __align__(128) std::byte shared_memory[];
  __shared__ FewStorage block;
  constexpr std::uint32_t kRingBytes = few_stages(kRanks) * few_stage_bytes(kNumbers);
  const std::uint32_t operand = shared_address(shared_memory), ring = operand + p.operand_bytes;
  const Few<kNumbers, kGated, kRanks> few{p, block, operand, ring + threadIdx.x / 32 * kRingBytes,
                                          ring + kFewWarps * kRingBytes};
  few.run();
}

template <bool kGated, bool kRanks>
FewKernel few_kernel_of(FewNumbers numbers) {
  switch (numbers) {
    case FewNumbers::kFp8: return few_tokens<FewNumbers::kFp8, kGated, kRanks>;
    case FewNumbers::kMxfp4: return few_tokens<FewNumbers::kMxfp4, kGated, kRanks>;
    case FewNumbers::kInt4: return few_tokens<FewNumbers::kInt4, kGated, kRanks>;
    case FewNumbers::kBf16: break;
  }
  return few_tokens<FewNumbers::kBf16, kGated, kRanks>;
}

}  // namespace

FewKernel few_kernel(FewNumbers numbers, bool gated, bool ranks) {
  if (ranks)
    return gated ? few_kernel_of<true, true>(numbers) : few_kernel_of<false, true>(numbers);
  return gated ? few_kernel_of<true, false>(numbers) : few_kernel_of<false, false>(numbers);
}

}  // namespace switchyard::gpu
