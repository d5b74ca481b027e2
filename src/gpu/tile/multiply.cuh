// The K loops of tiles: the math warpgroups multiply the stages of the ring.
#pragma once

#include "gpu/pipeline/ring.cuh"
#include "gpu/ptx/cluster.cuh"
#include "gpu/ptx/mma.cuh"
#include "gpu/ptx/wgmma.cuh"
#include "gpu/tile/config.h"
#include "gpu/tile/fragments.cuh"
#include "gpu/tile/task.h"

namespace switchyard::gpu {

template <typename C>
using TilePipeline = Pipeline<StageLayout<C>>;

// How the math warpgroups share a tile.
enum class Share {
  kWeightRows,  // weights take the instruction's rows; each warpgroup has a part of them
  kTokens,      // tokens take the instruction's rows; each warpgroup has half of the tokens
  kBox          // as kTokens, but each warpgroup has one of the task's two boxes of weights
};

// Multiplies stages of the ring, one after the other, into D[64, N].
template <int N, Share kShare, typename C>
class Multiplier {
 public:
  __device__ Multiplier(const TilePipeline<C>& pipeline, RingPlace& place, std::uint32_t group)
      : pipeline_(pipeline),
        ring_(pipeline.ring()),
        place_(place),
        group_(__reduce_max_sync(~0u, group)) {
    // In a pair, one lane per block signals that a stage is free.
    const std::uint32_t lane = reread_thread_index<32>();
    if (lane > pipeline.paired || !pipeline.goes_on()) return;
    empty_ = pipeline.paired != 0 ? address_in_pair(ring_.empty, lane) : ring_.empty;
  }

  // True if the stage is full: lanes may disagree, because each looks by itself. The test costs
  // nothing if it runs a little before the answer is needed.
  __device__ __forceinline__ bool ready() const { return ready(place_); }
  __device__ __forceinline__ bool ready(const RingPlace& place) const {
    return test_wait(ring_.full_barrier(place.stage), place.parity);
  }
  // Waits for the stage. If the pass was given up, the tile is still finished, with wrong numbers:
  // wgmma must not be in code that some threads may have left. This stage and later ones are then
  // not released: their bytes may arrive late or never, and a stage must not get arrivals for its
  // next use before all arrivals for this one.
  __device__ __forceinline__ void await_stage(bool ready) { await_stage(ready, place_); }
  __device__ __forceinline__ void await_stage(bool ready, const RingPlace& place) {
    await_bytes(ready, place);
    // Gathered tokens were written by ordinary copies; the matrix unit reads through the async
    // proxy.
    if (gathered()) fence_async_proxy_shared();
  }
  // The same for a stage that no matrix unit reads.
  __device__ __forceinline__ void await_bytes(bool ready, const RingPlace& place) {
    if (__builtin_expect(!ready, 0)) {
      if (!wait_ring(pipeline_.waiter(), ring_.full_barrier(place.stage), place.parity)) empty_ = 0;
    }
  }
  __device__ bool gathered() const {
    if constexpr (kMayGather<C>) return pipeline_.gathers != 0;
    return kGathers<C>;
  }
  // The addresses of the stage's operands. A reduction tells the compiler that a number is the same
  // in all lanes. It then keeps the descriptors in uniform registers, where the instructions need
  // them.
  struct Operands {
    std::uint32_t weights, tokens;
  };
  __device__ __forceinline__ Operands operands() const {
    constexpr std::uint32_t kWeightStep = kShare == Share::kWeightRows ? kOperandBytes
                                          : kShare == Share::kBox      ? kBoxBytes<C>
                                                                       : 0;
    constexpr std::uint32_t kTokenStep = kShare == Share::kTokens ? kOperandBytes : 0;
    return {
        __reduce_max_sync(~0u, matrix_address(ring_.weights(place_.stage) + group_ * kWeightStep)),
        __reduce_max_sync(~0u, matrix_address(ring_.tokens(place_.stage) + group_ * kTokenStep))};
  }
  // Issues the products with the first or second of the warpgroup's boxes.
  __device__ __forceinline__ void issue(const Operands& operands, int box, float (&sums)[N / 2],
                                        bool accumulate) const {
    constexpr int kStepBytes = kInstructionBytes;
    constexpr bool kTokenRows = kShare != Share::kWeightRows;
    const std::uint32_t weights = operands.weights + box * (kBoxBytes<C> >> 4);
    const std::uint32_t a = kTokenRows ? operands.tokens : weights;
    const std::uint32_t b = kTokenRows ? weights : operands.tokens;
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kStageRowBytes / kStepBytes; ++k) {
      multiply<C::kNumerics.token.compute, N>(swizzled_descriptor(a + k * kStepBytes / 16),
                                              swizzled_descriptor(b + k * kStepBytes / 16), sums,
                                              accumulate || k != 0);
    }
    cute::warpgroup_commit_batch();
  }
  // The address of the stage's tokens, for issue().
  __device__ __forceinline__ std::uint32_t token_operand() const {
    return __reduce_max_sync(~0u, matrix_address(ring_.tokens(place_.stage)));
  }
  // Issues the products of half a stage's weights, which are in registers, with its tokens.
  __device__ __forceinline__ void issue(const Fragments& weights, std::uint32_t tokens, int half,
                                        float (&sums)[N / 2], bool accumulate) const {
    cute::warpgroup_arrive();
    multiply_half(weights, tokens, half, sums, accumulate);
    cute::warpgroup_commit_batch();
  }
  // Adds those of a whole stage.
  __device__ __forceinline__ void issue(const Fragments (&weights)[kHalves], std::uint32_t tokens,
                                        float (&sums)[N / 2]) const {
    cute::warpgroup_arrive();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      multiply_half(weights[half], tokens, half, sums, true);
    }
    cute::warpgroup_commit_batch();
  }
  __device__ __forceinline__ void await_products(float (&sums)[N / 2]) const {
    await_all_products(sums);
  }
  __device__ __forceinline__ void advance() const { place_.advance(ring_.stages); }
  // Frees the stage. All reads from it must have completed.
  __device__ __forceinline__ void release(std::uint32_t stage) const {
    if (empty_ != 0) arrive_in_pair(empty_ + 8 * stage);
  }
  // Frees a stage from which scales were loaded. The barrier's address depends on the scales, so
  // that the arrival cannot overtake their loads.
  __device__ __forceinline__ void release_read(std::uint32_t stage,
                                               const float (&scales)[2][2]) const {
    const std::uint32_t bits = __float_as_uint(scales[0][0]) | __float_as_uint(scales[0][1]) |
                               __float_as_uint(scales[1][0]) | __float_as_uint(scales[1][1]);
    release_read(stage, bits);
  }
  // The same where a word of each load, in `bits`, stands for them.
  __device__ __forceinline__ void release_read(std::uint32_t stage, std::uint32_t bits) const {
    if (empty_ != 0) arrive_in_pair(empty_ + 8 * stage + (bits & zero_));
  }
  // Notes the stage that release_held() frees.
  __device__ __forceinline__ void hold(std::uint32_t stage) {
    held_ = empty_ != 0 ? empty_ + 8 * stage : 0;
  }
  __device__ __forceinline__ void release_held() const {
    if (held_ != 0) arrive_in_pair(held_);
  }
  // Frees a stage later, where there are too many scales for release_read(). The arrival is put off
  // until the next stage's products are issued, which overwrite the products of these scales, or
  // until the tile ends.
  __device__ __forceinline__ void put_off_release(std::uint32_t stage) {
    release_held();
    hold(stage);
  }
  __device__ __forceinline__ void release_last() const {
    asm volatile("fence.acq_rel.cta;" ::: "memory");
    release_held();
  }
  __device__ const Ring<StageLayout<C>>& ring() const { return ring_; }

 private:
  static constexpr std::uint32_t kOperandBytes = kInstructionRows * kStageRowBytes;

  __device__ __forceinline__ static void multiply_half(const Fragments& weights,
                                                       std::uint32_t tokens, int half,
                                                       float (&sums)[N / 2], bool accumulate) {
#pragma unroll
    for (int i = 0; i < kHalfSteps; ++i) {
      const int step = half * kHalfSteps + i;
      multiply<C::kNumerics.token.compute, N>(
          weights[i], swizzled_descriptor(tokens + step * kInstructionBytes / 16), sums,
          accumulate || step != 0);
    }
  }

  const TilePipeline<C>& pipeline_;
  const Ring<StageLayout<C>> ring_;
  RingPlace& place_;
  std::uint32_t group_;
  // The address of the stages' barriers in the threads that release them; 0 in others.
  std::uint32_t empty_ = 0;
  std::uint32_t held_ = 0;  // the barrier of the stage that is to be released
  // Zero, but the compiler does not know that.
  const std::uint32_t zero_ = pipeline_.paired >> 1;
};

// Counts down the stages of a K loop. The loop pauses after its first stage, when the tile's tokens
// have arrived, and after its last. Both pauses share one test and one place in the code.
class StageCount {
 public:
  __device__ explicit StageCount(std::uint32_t k_blocks)
      : left_(k_blocks), pause_(k_blocks - opaque<1>()) {}
  __device__ std::uint32_t left() const { return left_; }
  __device__ void next() { --left_; }
  __device__ bool pauses() const { return left_ == pause_; }
  // Calls started() at the first pause. True when no stage is left.
  template <typename Started>
  __device__ __forceinline__ bool ends(Started&& started) const {
    if (at_start_) started();
    return left_ == 0;
  }
  __device__ void go_on() {
    at_start_ = false;
    pause_ = 0;
  }

 private:
  std::uint32_t left_, pause_;
  bool at_start_ = true;
};

// The K loop of a weight-major tile with weights of four bits. The operands of half a stage are
// made while the products of the half before are under way: a register of an operand may be written
// when its products are complete, and only the newest products are not. `maker` loads a stage's
// words and makes operands of them; keep() does so in registers that keep their numbers. The last
// stage is left to the caller.
template <int N, typename C, typename Maker, typename Started>
__device__ __forceinline__ void multiply_by_halves(Multiplier<N, Share::kWeightRows, C>& stage,
                                                   std::uint32_t k_blocks, RingPlace& place,
                                                   const Maker& maker, Started&& started,
                                                   OperandRegisters<true>& held,
                                                   float (&acc)[N / 2]) {
  Fragments &first = held.half[0], &second = held.half[1];
  stage.await_stage(stage.ready());
  started();
  auto words = maker.load(place.stage);
  std::uint32_t tokens = stage.token_operand();
  if constexpr (kTiesOperands<C>) {
    maker.template keep<0>(words, first);
    maker.template keep<1>(words, second);
    stage.issue(first, tokens, 0, acc, false);
  } else {
    maker.template make<0>(words, first);
    stage.issue(first, tokens, 0, acc, false);
    maker.template make<1>(words, second);
  }
  stage.issue(second, tokens, 1, acc, true);
  RingPlace next = place;
  next.advance(stage.ring().stages);
  // The next stage is looked up a stage ahead, so the answer is there when it is needed.
  bool ready = k_blocks == 1 || stage.ready(next);
  SWITCHYARD_ROLLED
  for (std::uint32_t left = k_blocks; --left != 0;) {
    stage.await_stage(ready, next);
    words = maker.load(next.stage);
    const std::uint32_t previous = place.stage;
    place = next;
    next.advance(stage.ring().stages);
    ready = left == 1 || stage.ready(next);
    tokens = stage.token_operand();
    cute::warpgroup_wait<1>();
    maker.template make<0>(words, first);
    stage.issue(first, tokens, 0, acc, true);
    cute::warpgroup_wait<1>();
    stage.release(previous);
    maker.template make<1>(words, second);
    stage.issue(second, tokens, 1, acc, true);
  }
  stage.await_products(acc);
}

// The operands in bf16, of a box in each stage.
template <typename C>
struct Bf16Maker {
  static constexpr DType kType = C::kNumerics.weight.storage;
  const Ring<StageLayout<C>>& ring;
  const BoxPlaces<kType> places;

  __device__ __forceinline__ BoxWords load(std::uint32_t stage) const {
    return places.load(ring.weights(stage));
  }
  template <int kHalf>
  __device__ __forceinline__ void make(const BoxWords& words, Fragments& to) const {
    make_fragments<kHalf, kType>(words, to);
  }
  template <int kHalf>
  __device__ __forceinline__ void keep(const BoxWords& words, Fragments& to) const {
    make_fragments<kHalf, kType>(
        words, to,
        [go = ring.stages]<int kOfPair>(std::uint32_t& product, std::uint32_t a, std::uint32_t b) {
          multiply_bf16_into<kOfPair>(product, a, b, go);
        });
  }
};

// A stage of a low tile in a thread's registers: its words of the box of weights, and its fragments
// of 8 kEights tokens. One load takes the columns of an instruction from sixteen tokens, or those
// of two instructions from eight.
template <int kEights>
struct LowStage {
  static_assert(kEights == 1 || kEights == 2);
  BoxWords words;
  std::uint32_t tokens[2 * kEights][4];

  // Where a thread's first fragment is in a stage's tokens.
  __device__ static std::uint32_t token_place() {
    const std::uint32_t lane = reread_thread_index<32>();
    const std::uint32_t row = lane % 8 + (kEights == 2 ? lane / 16 * 8 : 0);
    const std::uint32_t chunk = kEights == 2 ? lane / 8 % 2 : lane / 8;
    return row * kStageRowBytes + ((chunk ^ lane % 8) << 4);
  }
  // The number that turns it into the place of load `i`.
  static constexpr int kLoads = 2 * kEights;
  static constexpr std::uint32_t turn(int i) {
    return static_cast<std::uint32_t>(i) * (2 * kInstructionBytes / kEights);
  }
  __device__ __forceinline__ void load_tokens(std::uint32_t first) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) load_matrices(first ^ turn(i), tokens[i]);
  }
  // Multiplies, one instruction's columns after the other.
  template <DType kType>
  __device__ __forceinline__ void multiply(float* sums) const {
    multiply_half<0, kType>(sums);
    multiply_half<1, kType>(sums);
  }

 private:
  template <int kHalf, DType kType>
  __device__ __forceinline__ void multiply_half(float* sums) const {
    Fragments a;
    make_fragments<kHalf, kType>(words, a);
#pragma unroll
    for (int i = 0; i < kHalfSteps; ++i) {
      const int step = kHalf * kHalfSteps + i;
#pragma unroll
      for (int eight = 0; eight < kEights; ++eight) {
        const std::uint32_t* const b =
            kEights == 2 ? tokens[step] + 2 * eight : tokens[step / 2] + 2 * (step % 2);
        multiply_16x8x16(reinterpret_cast<float(&)[4]>(sums[4 * eight]), a[i][0], a[i][1], a[i][2],
                         a[i][3], b[0], b[1]);
      }
    }
  }
};

// The K loop of a tile of at most 8 kEights tokens with weights of four bits. Memory must bring the
// weights of so low a tile as fast as it can, and there is no time for warps that wait for each
// other. So each warp multiplies its 16 rows by itself, with the warp's matrix instruction, and
// loads a stage's words and tokens while it multiplies those of the stage before. The loop has no
// branch but its own: it ends where a stage is not there, too.
template <int kEights, int N, typename C, typename Started>
__device__ __forceinline__ void multiply_low(const TilePipeline<C>& pipeline,
                                             std::uint32_t k_blocks, RingPlace& place,
                                             std::uint32_t group, Started&& started,
                                             float (&acc)[N / 2]) {
  constexpr DType kType = C::kNumerics.weight.storage;
  static_assert(kStageColumns<C> == FourBitBox<kType>::kColumns && 8 * kEights <= N);
  using Stage = LowStage<kEights>;
  Multiplier<N, Share::kWeightRows, C> stage(pipeline, place, group);
  const BoxPlaces<kType> places(group);
  const std::uint32_t token_place = Stage::token_place();
  const auto load = [&](Stage& to, const RingPlace& from) {
    to.words = places.load(stage.ring().weights(from.stage));
    to.load_tokens(stage.ring().tokens(from.stage) + token_place);
  };
#pragma unroll
  for (float& sum : acc) sum = 0;
  stage.await_bytes(stage.ready(), place);
  started();
  Stage even, odd;
  load(even, place);
  RingPlace next = place;
  next.advance(stage.ring().stages);
  std::uint32_t left = k_blocks;
  // Lanes that saw different answers would multiply apart from each other, so they vote.
  bool ready = left < 2 || __all_sync(~0u, stage.ready(next)) != 0;
  // Multiplies a stage. Returns true if the next one may follow at once.
  const auto turn = [&](const Stage& now, Stage& then) {
    // The last turn loads bytes of no stage, and makes no products of them.
    load(then, next);
    const std::uint32_t current = place.stage;
    place = next;
    next.advance(stage.ring().stages);
    --left;
    const bool full = left < 2 | stage.ready(next);
    now.template multiply<kType>(acc);
    stage.release(current);
    ready = __all_sync(~0u, full) != 0;
    return left != 0 & ready;
  };
  do {
    if (!ready) stage.await_bytes(false, next);
    SWITCHYARD_ROLLED
    for (;;) {
      if (!turn(even, odd)) {
        even = odd;
        break;
      }
      if (!turn(odd, even)) break;
    }
  } while (left != 0);
}

// A part of a stage of a low tile of 8 kEights tokens. A thread has its words of the box of weights
// in registers, and loads its fragments of the tokens as it multiplies, for two instructions at a
// time: other warps fill that wait.
template <int kEights>
struct StagePart {
  BoxWords words;

  static constexpr int kSixteens = kEights / 2;
  static constexpr bool kHasEight = kEights % 2 != 0;
  using Sixteen = LowStage<2>;
  using Eight = LowStage<1>;
  // Where a thread's fragments are in a part's tokens: of each instruction's columns of sixteen
  // tokens, and of each half's columns of the last eight. A load takes either.
  static constexpr int kOfSixteen = kSixteens == 0 ? 0 : kHalves * kHalfSteps,
                       kPlaces = kOfSixteen + (kHasEight ? kHalves : 0);
  __device__ static std::uint32_t token_place(int i) {
    return i < kOfSixteen ? Sixteen::token_place() ^ Sixteen::turn(i)
                          : kSixteens * 16 * kStageRowBytes +
                                (Eight::token_place() ^ Eight::turn(i - kOfSixteen));
  }
  // `tokens`: those places in the ring's first part, and `more` from there to this part. Returns a
  // word of each of the last loads.
  template <DType kType>
  __device__ __forceinline__ std::uint32_t multiply(const std::uint32_t (&tokens)[kPlaces],
                                                    std::uint32_t more, float* sums) const {
    multiply_half<0, kType>(tokens, more, sums);
    return multiply_half<1, kType>(tokens, more, sums);
  }

 private:
  template <int kHalf, DType kType>
  __device__ __forceinline__ std::uint32_t multiply_half(const std::uint32_t (&tokens)[kPlaces],
                                                         std::uint32_t more, float* sums) const {
    std::uint32_t sixteens[kSixteens + 1][kHalfSteps][4], eight[4];
#pragma unroll
    for (int s = 0; s < kSixteens; ++s) {
#pragma unroll
      for (int i = 0; i < kHalfSteps; ++i) {
        load_matrices(tokens[kHalf * kHalfSteps + i] + more + s * 16 * kStageRowBytes,
                      sixteens[s][i]);
      }
    }
    if constexpr (kHasEight) load_matrices(tokens[kOfSixteen + kHalf] + more, eight);
    Fragments a;
    make_fragments<kHalf, kType>(words, a);
#pragma unroll
    for (int i = 0; i < kHalfSteps; ++i) {
#pragma unroll
      for (int e = 0; e < kEights; ++e) {
        const std::uint32_t* const b =
            e < 2 * kSixteens ? sixteens[e / 2][i] + 2 * (e % 2) : eight + 2 * i;
        multiply_16x8x16(reinterpret_cast<float(&)[4]>(sums[4 * e]), a[i][0], a[i][1], a[i][2],
                         a[i][3], b[0], b[1]);
      }
    }
    std::uint32_t bits = kHasEight ? eight[0] : 0;
#pragma unroll
    for (int s = 0; s < kSixteens; ++s) bits |= sixteens[s][0][0] | sixteens[s][1][0];
    return bits;
  }
};

// The K loop of such a tile, as multiply_low(), where stages have several parts. Their places are
// constants, so that the loop has little but conversions and products. Where the next stage has not
// arrived, the slow way around the loop waits for it.
template <int kEights, int N, typename C, typename Started>
__device__ __forceinline__ void multiply_parts(const TilePipeline<C>& pipeline,
                                               const TileTask& task, RingPlace& place,
                                               std::uint32_t group, Started&& started,
                                               float (&acc)[N / 2]) {
  constexpr DType kType = C::kNumerics.weight.storage;
  constexpr std::uint32_t kParts = kStageParts<C>, kStageBytes = StageLayout<C>::kStageBytes,
                          kStages = StageLayout<C>::kStages,
                          kTokenPartBytes = StageLayout<C>::kTokenPartBytes;
  static_assert(kParts % 2 == 0 && kPartColumns<C> == FourBitBox<kType>::kColumns &&
                8 * kEights <= N);
  using Part = StagePart<kEights>;
  Multiplier<N, Share::kWeightRows, C> stage(pipeline, place, group);
  const BoxPlaces<kType> places(group);
  std::uint32_t tokens[Part::kPlaces];
#pragma unroll
  for (int i = 0; i < Part::kPlaces; ++i) {
    tokens[i] = stage.ring().tokens(0) + Part::token_place(i);
  }
  const auto load = [&](Part& to, std::uint32_t from, std::uint32_t part) {
    to.words =
        places.load(stage.ring().weights(0) + from * kStageBytes, part * FourBitBox<kType>::kBytes);
  };
  const auto multiply = [&](const Part& of, std::uint32_t from, std::uint32_t part) {
    return of.template multiply<kType>(tokens, from * kStageBytes + part * kTokenPartBytes, acc);
  };
  std::uint32_t read = 0;  // the stage's last loads
  const auto await_full = [&] {
    stage.await_bytes(stage.ready(), place);
    __syncwarp();
  };
#pragma unroll
  for (float& sum : acc) sum = 0;
  await_full();
  started();
  Part even, odd;
  std::uint32_t whole = task.last_parts == kParts ? task.k_blocks : task.k_blocks - 1;
  while (whole != 0) {
    load(even, place.stage, 0);
    SWITCHYARD_ROLLED
    for (bool goes_on = true; goes_on;) {
      RingPlace next = place;
      next.advance(kStages);
      --whole;
      const bool full = stage.ready(next);
#pragma unroll
      for (std::uint32_t i = 0; i < kParts; i += 2) {
        load(odd, place.stage, i + 1);
        multiply(even, place.stage, i);
        // (Of a stage that is not full the bytes are those of another, and are loaded again.)
        if (i + 2 < kParts) {
          load(even, place.stage, i + 2);
        } else {
          load(even, next.stage, 0);
        }
        read = multiply(odd, place.stage, i + 1);
      }
      stage.release_read(place.stage, read);
      place = next;
      // Lanes that saw different answers would multiply apart from each other, so they vote.
      goes_on = __all_sync(~0u, full & (whole != 0)) != 0;
    }
    if (whole != 0) await_full();
  }
  // (Read again, because registers are few.)
  const std::uint32_t parts = task.last_parts;
  if (parts == kParts) return;
  await_full();
#pragma unroll 1
  for (std::uint32_t i = 0; i < parts; ++i) {
    load(even, place.stage, i);
    read = multiply(even, place.stage, i);
  }
  stage.release_read(place.stage, read);
  place.advance(kStages);
}

// Multiplies sums by their tokens' scales, which are at `scales` in shared memory.
template <int N>
__device__ __forceinline__ void scale_sums(std::uint32_t scales, float (&acc)[N / 2]) {
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    const float2 of_tokens = load_shared_floats(scales + 32 * n);
    acc[4 * n] *= of_tokens.x;
    acc[4 * n + 1] *= of_tokens.y;
    acc[4 * n + 2] *= of_tokens.x;
    acc[4 * n + 3] *= of_tokens.y;
  }
}

// The operands in E5M2, of two boxes in each part of a stage. `tables`: see make_code_fragments().
template <typename C>
struct CodeMaker {
  static constexpr DType kType = C::kNumerics.weight.storage;
  static_assert(kBoxBytes<C> == 2 * kStageParts<C> * FourBitBox<kType>::kBytes);
  struct Words {
    BoxWords of_half[kHalves];
  };
  const Ring<StageLayout<C>>& ring;
  const BoxPlaces<kType> places;
  std::uint32_t tables;

  __device__ __forceinline__ Words load(std::uint32_t stage, std::uint32_t part = 0) const {
    const std::uint32_t weights = ring.weights(stage), box = FourBitBox<kType>::kBytes;
    return {{places.load(weights, 2 * part * box), places.load(weights, (2 * part + 1) * box)}};
  }
  template <int kHalf>
  __device__ __forceinline__ void make(const Words& words, Fragments& to) const {
    make_code_fragments<kFewRegisters<C>>(words.of_half[kHalf], tables, to);
  }
  template <int kHalf>
  __device__ __forceinline__ void keep(const Words& words, Fragments& to) const {
    make_code_fragments<kFewRegisters<C>>(
        words.of_half[kHalf], tables, to,
        [go = ring.stages](std::uint32_t& made, std::uint32_t bytes, std::uint32_t signs) {
          sign_into(made, bytes, signs, go);
        });
  }
};

// The K loop of a weight-major tile with weights of four bits that become E5M2, two boxes in each
// part of a stage. All columns of a token share a scale, so the matrix unit sums the products of
// all stages. The tokens' scales apply at the end, if the ring has them; the powers of the rows
// wait for the epilogue. The operands of half a stage are made while the products of the half
// before are under way, as in multiply_by_halves(). With few registers there is one set for each
// part of a stage, and the warps of another block work while these wait; then one branch leads from
// stage to stage, because a warp waits some 50 cycles at each.
template <int N, typename C, typename Started>
__device__ __forceinline__ void multiply_as_codes(const TilePipeline<C>& pipeline,
                                                  const TileTask& task, std::uint32_t k_blocks,
                                                  RingPlace& place, std::uint32_t group,
                                                  std::uint32_t tables, Started&& started,
                                                  OperandRegisters<kHoldsOperands<C>>& held,
                                                  float (&acc)[N / 2]) {
  Multiplier<N, Share::kWeightRows, C> stage(pipeline, place, group);
  const CodeMaker<C> maker{stage.ring(), BoxPlaces<C::kNumerics.weight.storage>(group), tables};
  if constexpr (kFewRegisters<C>) {
    static_assert(!kGathers<C> && !kMayGather<C>, "a full stage wants no fence");
    stage.await_stage(stage.ready());
    started();
#pragma unroll
    for (float& sum : acc) sum = 0;
    constexpr std::uint32_t kParts = kStageParts<C>;
    const std::uint32_t last_parts = kParts == 1 ? 1 : task.last_parts;
    std::uint32_t left = last_parts == kParts ? k_blocks : k_blocks - 1;
    Fragments weights[kParts][kHalves];
    // Issues the products of the next stage's part.
    std::uint32_t tokens = 0;
    const auto issue = [&](std::uint32_t part) {
      const auto words = maker.load(place.stage, part);
      // (It takes as long as loads do, and is needed after them.)
      if (part == 0) tokens = stage.token_operand();
      maker.template make<0>(words, weights[part][0]);
      maker.template make<1>(words, weights[part][1]);
      stage.issue(weights[part], tokens + part * (StageLayout<C>::kTokenPartBytes >> 4), acc);
    };
    // (All warps of the warpgroup come to the same products, so the compiler may not copy them.)
    SWITCHYARD_ROLLED
    while (left != 0) {
      SWITCHYARD_ROLLED
      for (bool goes_on = true; goes_on;) {
#pragma unroll
        for (std::uint32_t part = 0; part < kParts; ++part) issue(part);
        stage.hold(place.stage);
        stage.advance();
        --left;
        // Lanes that saw different answers would part, so they vote.
        goes_on = __all_sync(~0u, stage.ready() & (left != 0)) != 0;
        stage.await_products(acc);
        if (goes_on) stage.release_held();
      }
      // (The last stage has the tokens' scales.)
      if (left == 0) break;
      stage.release_held();
      stage.await_stage(false);
    }
    if (last_parts != kParts) {
      if (k_blocks != 1) {
        stage.release_held();
        stage.await_stage(false);
      }
      static_assert(kParts <= 2, "the last stage has one part or all");
      issue(0);
      stage.hold(place.stage);
      stage.advance();
      stage.await_products(acc);
    }
    const std::uint32_t last = (place.stage == 0 ? stage.ring().stages : place.stage) - 1;
    scale_sums<N>(stage.ring().token_scales(last) + 8 * reread_thread_index<4>(), acc);
  } else {
    multiply_by_halves<N>(stage, k_blocks, place, maker, started, held, acc);
    const std::uint32_t last = place.stage;
    stage.hold(last);
    stage.advance();
    if constexpr (kScaled<C>) {
      scale_sums<N>(stage.ring().token_scales(last) + 8 * reread_thread_index<4>(), acc);
    }
  }
  stage.release_last();
}

// The K loop of a weight-major tile. `box`: which of a pair of boxes holds the scales of the task's
// rows. started() is called when the tile's tokens have arrived.
template <int N, typename C, typename Started>
__device__ __forceinline__ void multiply_weight_major(const TilePipeline<C>& pipeline,
                                                      std::uint32_t k_blocks, RingPlace& place,
                                                      std::uint32_t group, std::uint32_t box,
                                                      Started&& started,
                                                      OperandRegisters<kHoldsOperands<C>>& weights,
                                                      float (&acc)[N / 2]) {
  Multiplier<N, Share::kWeightRows, C> stage(pipeline, place, group);
  if constexpr (kFourBit<C>) {
    const Bf16Maker<C> maker{stage.ring(), BoxPlaces<C::kNumerics.weight.storage>(group)};
    multiply_by_halves<N>(stage, k_blocks, place, maker, started, weights, acc);
    stage.release(place.stage);
    stage.advance();
  } else if constexpr (kScaled<C>) {
    // The products of one stage. This warpgroup scales and sums them while the other warpgroup's
    // products are under way.
    float part[N / 2];
    bool ready = stage.ready();
#pragma unroll
    for (float& sum : acc) sum = 0;
    SWITCHYARD_ROLLED
    for (StageCount count(k_blocks);;) {
      const auto operands = stage.operands();
      const std::uint32_t current = place.stage;
      stage.await_stage(ready);
      stage.issue(operands, 0, part, false);
      stage.put_off_release(current);
      const std::uint32_t scales =
          stage.ring().token_scales(current) + 8 * reread_thread_index<4>();
      // The scales of this thread's first and second weight row.
      const float2 weights = load_shared_floats(stage.ring().weight_scales(current) + 8 * box);
      stage.await_products(part);
      stage.advance();
      ready = stage.ready();
#pragma unroll
      for (int n = 0; n < N / 8; ++n) {
        const float2 tokens = load_shared_floats(scales + 32 * n);
        acc[4 * n] += part[4 * n] * (tokens.x * weights.x);
        acc[4 * n + 1] += part[4 * n + 1] * (tokens.y * weights.x);
        acc[4 * n + 2] += part[4 * n + 2] * (tokens.x * weights.y);
        acc[4 * n + 3] += part[4 * n + 3] * (tokens.y * weights.y);
      }
      count.next();
      if (!count.pauses()) continue;
      if (count.ends(started)) break;
      count.go_on();
    }
    stage.release_last();
  } else {
    stage.await_stage(stage.ready());
    stage.issue(stage.operands(), 0, acc, false);
    started();
    SWITCHYARD_ROLLED
    for (std::uint32_t left = k_blocks; --left != 0;) {
      const std::uint32_t previous = place.stage;
      stage.advance();
      const bool ready = stage.ready();
      const auto operands = stage.operands();
      stage.await_stage(ready);
      stage.issue(operands, 0, acc, true);
      // After this wait only the newest products are under way, so the previous stage's are done.
      cute::warpgroup_wait<1>();
      stage.release(previous);
    }
    stage.await_products(acc);
    stage.release(place.stage);
    stage.advance();
  }
}

// --- Token-major tiles: tokens take the 64 rows of the matrix instruction, weights its columns.
//
// FP8's large tiles are limited by the traffic through shared memory: operands, and scales for the
// sums that every thread makes of the stages' products. With weights on the rows a thread needs the
// scales of a quarter of the tile's tokens; with tokens on the rows, of two.
//
// A math warpgroup holds D[64 tokens, 128 weight rows]. In tall tiles, of more than 64 tokens, it
// holds two, for its half of the tokens and both boxes of the task; in other tiles one, for its
// box. A warp has 16 tokens. Its lane 4 g + t holds tokens g and g + 8, of weight rows 8 n + 2 t
// and the next, in acc[box][4 n .. 4 n + 3]. So a warp has all columns of its tokens, or half of
// them, and finishes them by itself.

inline constexpr int kBoxColumns = kTileRows;  // of an instruction
template <int kTaskBoxes>
using TokenMajorSums = float[kTaskBoxes][kBoxColumns / 2];

// The first of this warp's tokens in the tile.
template <int kTaskBoxes>
__device__ __forceinline__ std::uint32_t token_major_row() {
  const std::uint32_t warp = reread_thread_index<kThreads>() / 32 - kWarpgroup / 32;
  return (kTaskBoxes == 2 ? warp : warp % 4) * 16;
}
// The box of the task that acc[i] belongs to.
template <int kTaskBoxes>
__device__ __forceinline__ std::uint32_t token_major_box(int i, std::uint32_t group) {
  return kTaskBoxes == 2 ? static_cast<std::uint32_t>(i) : group;
}

// The K loop of a token-major tile. `meet`: each box has rows of gate and then as many of up, and
// uses both sets of scales; otherwise each box uses its own set for all rows. started() is called
// when the tile's tokens have arrived.
template <int kTaskBoxes, typename C, typename Started>
__device__ __forceinline__ void multiply_token_major(const TilePipeline<C>& pipeline,
                                                     std::uint32_t k_blocks, RingPlace& place,
                                                     std::uint32_t group, bool meet,
                                                     Started&& started,
                                                     TokenMajorSums<kTaskBoxes>& acc) {
  constexpr int N = kBoxColumns;
  constexpr std::uint32_t kSetBytes = StageLayout<C>::kScaleSetBytes;
  Multiplier<N, kTaskBoxes == 2 ? Share::kTokens : Share::kBox, C> stage(pipeline, place, group);
  const Ring<StageLayout<C>> ring = pipeline.ring();
  float part[N / 2];
#pragma unroll
  for (auto& box : acc) {
#pragma unroll
    for (float& sum : box) sum = 0;
  }
  // Offsets of scale sets: from box to box if each has its own set, and from a box's first 64 rows
  // to its second if they meet.
  const std::uint32_t gate_step = meet ? 0 : kSetBytes, up = meet ? kSetBytes : 0;
  const std::uint32_t scales0 = ring.joined_scales(0, 0) +
                                4 * (token_major_row<kTaskBoxes>() + reread_thread_index<32>() / 4);
  float of[2][2];  // a box's scales, while its products are under way
  const auto load_scales = [&](int box) {
    const std::uint32_t gate = scales0 + place.stage * StageLayout<C>::kScaleBytes +
                               token_major_box<kTaskBoxes>(box, group) * gate_step;
    const std::uint32_t sets[2] = {gate, gate + up};
#pragma unroll
    for (int i = 0; i < 4; ++i) of[i / 2][i % 2] = load_shared_float(sets[i / 2] + i % 2 * 32);
  };
  const auto sum = [&](int box) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[box][i] += part[i] * of[i / (N / 4)][i / 2 % 2];
  };
  // Multiplies the stage at `place`. The products with its last box stay under way.
  const auto begin = [&](const auto& operands) {
    // (A stage that was found full was not waited for.)
    if (kMayGather<C> && stage.gathered()) fence_async_proxy_shared();
    stage.issue(operands, 0, part, false);
    if constexpr (kTaskBoxes == 2) {
      load_scales(0);
      stage.await_products(part);
      sum(0);
      stage.issue(operands, 1, part, false);
    }
  };
  // A warpgroup's chain of products and sums is the critical path, so nothing else is in it. The
  // next stage is looked up while the last products of this one are under way. The loop's branch is
  // there, too, where no instruction waits for it. All warps of the warpgroup reach the same
  // instructions, whether they find a full stage or wait for it.
  stage.await_stage(stage.ready());
  begin(stage.operands());
  SWITCHYARD_ROLLED
  for (StageCount count(k_blocks);;) {
    load_scales(kTaskBoxes - 1);
    const std::uint32_t current = place.stage;
    count.next();
    stage.advance();
    const auto next = stage.operands();
    stage.await_products(part);
    stage.release_read(current, of);
    const bool ready = count.left() == 0 || stage.ready();
    sum(kTaskBoxes - 1);
    if (__builtin_expect(!ready || count.pauses(), 0)) {
      if (count.ends(started)) break;
      count.go_on();
      if (!ready) stage.await_stage(false);
    }
    begin(next);
  }
}

}  // namespace switchyard::gpu
