// What the math warpgroups do with the stages of the ring: the K loops of tasks.
#pragma once

#include "gpu/loading.cuh"

namespace switchyard::gpu {

// What each math warpgroup has of a tile, beside all of the rest: a part of the weight rows, which
// take the rows of the instruction; or tokens take them, and it has half of these, or one of the
// task's two boxes of weights.
enum class Share { kWeightRows, kTokens, kBox };

// One stage of the ring: D[64, N].
template <int N, Share kShare, typename P>
class Multiplier {
 public:
  __device__ Multiplier(const Pass<P>& pass, RingPlace& place, std::uint32_t group)
      : pass_(pass), ring_(pass.ring()), place_(place), group_(__reduce_max_sync(~0u, group)) {
    // Of a pair, a lane tells each block that a stage is free.
    const std::uint32_t lane = fresh_thread_index<32>();
    if (lane > pass.call.paired || !pass.goes_on()) return;
    empty_ = pass.call.paired != 0 ? address_in_pair(ring_.empty, lane) : ring_.empty;
  }

  // Asked a little earlier, the answer does not keep anybody waiting.
  __device__ __forceinline__ bool ready() const {
    return test_wait(ring_.full_barrier(place_.stage), place_.parity);
  }
  // A tile that was given up is finished, with wrong numbers: wgmma must not be in code that some
  // threads may have left. Its stages are not released, nor any after: bytes of them may yet come,
  // or never, and a stage takes no arrivals for its next use before all of this one's.
  __device__ __forceinline__ void await_stage(bool ready) {
    if (__builtin_expect(!ready, 0)) {
      if (!wait_ring(pass_.waiter(), ring_.full_barrier(place_.stage), place_.parity)) empty_ = 0;
    }
    // In small passes the tokens' copies are ordinary writes; the matrix unit reads through the
    // async proxy.
    if (kGathers<P>) fence_async_proxy_shared();
  }
  // Where the stage's rows are. Reduced, a number is the same in all lanes for the compiler, too,
  // which then keeps the descriptors in uniform registers, where the instructions want them.
  struct Operands {
    std::uint32_t weights, tokens;
  };
  __device__ __forceinline__ Operands operands() const {
    constexpr std::uint32_t kOfWeights = kShare == Share::kWeightRows ? kOperandBytes
                                         : kShare == Share::kBox      ? kBoxBytes
                                                                      : 0;
    constexpr std::uint32_t kOfTokens = kShare == Share::kTokens ? kOperandBytes : 0;
    return {
        __reduce_max_sync(~0u, matrix_address(ring_.weights(place_.stage) + group_ * kOfWeights)),
        __reduce_max_sync(~0u, matrix_address(ring_.tokens(place_.stage) + group_ * kOfTokens))};
  }
  // The products with the first or second of the warpgroup's boxes.
  __device__ __forceinline__ void issue(const Operands& operands, int box, float (&sums)[N / 2],
                                        bool accumulate) const {
    constexpr int kStepBytes = kInstructionBytes;
    constexpr bool kTokenRows = kShare != Share::kWeightRows;
    const std::uint32_t weights = operands.weights + box * (kBoxBytes >> 4);
    const std::uint32_t a = kTokenRows ? operands.tokens : weights;
    const std::uint32_t b = kTokenRows ? weights : operands.tokens;
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kStageRowBytes / kStepBytes; ++k) {
      multiply<P::kNumerics.token, N>(swizzled_descriptor(a + k * kStepBytes / 16),
                                      swizzled_descriptor(b + k * kStepBytes / 16), sums,
                                      accumulate || k != 0);
    }
    cute::warpgroup_commit_batch();
  }
  // The compiler does not know that a wait is for accumulators: without a fence for each it may
  // compute with them before.
  __device__ __forceinline__ void await_products(float (&sums)[N / 2]) const {
    cute::warpgroup_wait<0>();
#pragma unroll
    for (float& sum : sums) cute::warpgroup_fence_operand(sum);
  }
  __device__ __forceinline__ void advance() const { place_.advance(ring_.stages); }
  // All that was read of the stage has arrived.
  __device__ __forceinline__ void release(std::uint32_t stage) const {
    if (empty_ != 0) arrive_in_pair(empty_ + 8 * stage);
  }
  // The same where scales were loaded from the stage, which an arrival would overtake on their way
  // to registers: its address depends on them.
  __device__ __forceinline__ void release_read(std::uint32_t stage,
                                               const float (&scales)[2][2]) const {
    const std::uint32_t bits = __float_as_uint(scales[0][0]) | __float_as_uint(scales[0][1]) |
                               __float_as_uint(scales[1][0]) | __float_as_uint(scales[1][1]);
    if (empty_ != 0) arrive_in_pair(empty_ + 8 * stage + (bits & zero_));
  }
  // And where there are too many of them: the arrival is put off until the next stage's products
  // are issued, which overwrite what the scales were multiplied with, or until the tile ends.
  __device__ __forceinline__ void put_off_release(std::uint32_t stage) {
    if (pending_ != 0) arrive_in_pair(pending_);
    pending_ = empty_ != 0 ? empty_ + 8 * stage : 0;
  }
  __device__ __forceinline__ void release_last() {
    asm volatile("fence.acq_rel.cta;" ::: "memory");
    if (pending_ != 0) arrive_in_pair(pending_);
  }
  __device__ const Ring<StageLayout<P>>& ring() const { return ring_; }

 private:
  // Of the instruction's rows.
  static constexpr std::uint32_t kOperandBytes = kInstructionRows * kStageRowBytes;

  const Pass<P>& pass_;
  const Ring<StageLayout<P>> ring_;
  RingPlace& place_;
  std::uint32_t group_;
  // The stages' barriers, in the threads that release them; else 0.
  std::uint32_t empty_ = 0;
  std::uint32_t pending_ = 0;  // the barrier of a stage to be released
  // Of which the compiler does not know that it is zero.
  const std::uint32_t zero_ = pass_.call.paired >> 1;
};

// Counts the stages of a K loop down. The loop pauses after its first stage, when the tile's tokens
// have come, and after its last. Both pauses are one test and one place in the code.
class StageCount {
 public:
  __device__ explicit StageCount(std::uint32_t k_blocks)
      : left_(k_blocks), pause_(k_blocks - untold<1>()) {}
  __device__ std::uint32_t left() const { return left_; }
  __device__ void next() { --left_; }
  __device__ bool pauses() const { return left_ == pause_; }
  // Calls started() at the first pause. True when no stage is left.
  template <typename Started>
  __device__ __forceinline__ bool ends(Started&& started) const {
    if (fresh_) started();
    return left_ == 0;
  }
  __device__ void go_on() {
    fresh_ = false;
    pause_ = 0;
  }

 private:
  std::uint32_t left_, pause_;
  bool fresh_ = true;
};

// The K loop of a task, weights on the instruction's rows. `box`: of a pair of boxes, the one that
// has the scales of the task's rows. started() is called when the tile's tokens have come.
template <int N, typename P, typename Started>
__device__ __forceinline__ void multiply_tile(const Pass<P>& pass, std::uint32_t k_blocks,
                                              RingPlace& place, std::uint32_t group,
                                              std::uint32_t box, Started&& started,
                                              float (&acc)[N / 2]) {
  Multiplier<N, Share::kWeightRows, P> stage(pass, place, group);
  if constexpr (kScaled<P>) {
    // Products of one stage, which are scaled and summed here while the other warpgroup's are under
    // way.
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
      const std::uint32_t scales = stage.ring().token_scales(current) + 8 * fresh_thread_index<4>();
      // Of this thread's first and second weight row.
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
      // All but the newest products are done, and with them the stage before.
      cute::warpgroup_wait<1>();
      stage.release(previous);
    }
    stage.await_products(acc);
    stage.release(place.stage);
    stage.advance();
  }
}

}  // namespace switchyard::gpu
