// The kernel for passes of few tokens: its parameters, and the passes that fit it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/quantize.h"
#include "gpu/exchange/params.h"
#include "gpu/pipeline/params.h"
#include "gpu/pipeline/words.h"
#include "gpu/route/params.h"
#include "gpu/tile/config.h"
#include "gpu/tile/params.h"
#include "gpu/tokens/params.h"
#include "switchyard/schedule.h"

namespace switchyard::gpu {

inline constexpr int kFewWarps = 16, kFewThreads = 32 * kFewWarps;
// The columns of the matrix instruction: each row of the pass has one. Rows are tokens, those of
// all ranks.
inline constexpr int kMostFewRows = protocol::kMostFewRows;
inline constexpr int kMostFewSlots = protocol::kMostFewSlots;
// Each warp streams 16 rows of weights through a ring of its own, 2 KB and their scales per stage.
// The warps of a block must have about 40 KB of requests under way to keep up with memory, and with
// one token only five or six of them have work. A pass over ranks has more slots, so more warps
// have work, and it needs the room for the slots.
inline constexpr std::uint32_t kFewRows = 16, kFewStageRowBytes = 128;
constexpr std::uint32_t few_stages(bool ranks) { return ranks ? 3 : 4; }

// How a pass of few tokens multiplies: bf16 or FP8 throughout, or weights of four bits with tokens
// in bf16.
enum class FewNumbers : std::uint8_t { kBf16, kFp8, kMxfp4, kInt4 };
constexpr bool few_four_bit(FewNumbers numbers) {
  return numbers == FewNumbers::kMxfp4 || numbers == FewNumbers::kInt4;
}
constexpr FewNumbers few_numbers(const Numerics& of) {
  if (of.four_bit()) {
    return of.weight.storage == DType::kU4 ? FewNumbers::kInt4 : FewNumbers::kMxfp4;
  }
  return of.scaled() ? FewNumbers::kFp8 : FewNumbers::kBf16;
}

// A stage of four-bit weights: 16 rows of so many boxes (tile/four_bit.h). The codes of a warp's
// lanes follow each other in a box, and so do their scales.
inline constexpr std::uint32_t kFewBoxes = 4;
template <DType kType>
struct FewBox : FourBitBox<kType> {
  using Box = FourBitBox<kType>;
  static constexpr std::uint32_t kCodes = 32 * Box::kLaneBytes,
                                 kScales = kFewRows / 2 * Box::kScaleBytes,
                                 kPart = kCodes + kScales;
  static constexpr std::uint32_t kScaleLanes = kScales / 16;  // that copy the scales, 16 bytes each
};
constexpr std::uint32_t few_stage_bytes(FewNumbers numbers) {
  switch (numbers) {
    case FewNumbers::kMxfp4: return kFewBoxes * FewBox<DType::kF4E2M1>::kPart;
    case FewNumbers::kInt4: return kFewBoxes * FewBox<DType::kU4>::kPart;
    case FewNumbers::kFp8:  // with the scales of both rows of each lane
      return kFewRows * kFewStageRowBytes + 32 * 8;
    case FewNumbers::kBf16: break;
  }
  return kFewRows * kFewStageRowBytes;
}
constexpr std::uint32_t few_stage_columns(FewNumbers numbers) {
  if (few_four_bit(numbers)) return kFewBoxes * FourBitBox<DType::kU4>::kColumns;
  return kFewStageRowBytes / (numbers == FewNumbers::kFp8 ? 1 : 2);
}

// Divides numbers below 2^31 / count.
struct Divisor {
  std::uint32_t count = 1, magic = 0;
  static constexpr Divisor of(std::uint32_t count) { return {count, (1u << 31) / count + 1}; }
  SWITCHYARD_HOST_DEVICE std::uint32_t quotient(std::uint32_t i) const {
    return static_cast<std::uint32_t>(std::uint64_t{i} * magic >> 31);
  }
};

// The rows that weights are multiplied by, in shared memory: bf16, or codes of FP8 in fp16, which
// has all of them. The padding lets eight rows' vectors be read without bank conflicts.
struct FewOperand {
  std::uint32_t rows, columns;
  std::uint32_t stages;  // of few_stage_columns()
  Divisor pieces;        // of 16 columns, of a whole number of stages
  std::uint32_t row_bytes;

  static constexpr FewOperand of(std::uint32_t rows, std::uint32_t columns, FewNumbers numbers) {
    const std::uint32_t stage_columns = few_stage_columns(numbers);
    const std::uint32_t stages = protocol::ceil_div(columns, stage_columns);
    const std::uint32_t padding = numbers == FewNumbers::kBf16 ? 64 : 16;
    return {rows, columns, stages, Divisor::of(stages * stage_columns / 16),
            stages * stage_columns * 2 + padding};
  }
  // In FP8 each row's scales follow the rows.
  constexpr std::uint32_t bytes(FewNumbers numbers) const {
    return rows * (row_bytes + (numbers == FewNumbers::kFp8 ? stages * 4 : 0));
  }
};

// The weights of one GEMM, in tiles of 16 rows. Row i of a tile and row i + 8 are `second` bytes
// apart: the rows of gate and up for the same column of h, or two rows of one matrix. Of four-bit
// weights `data` are boxes, row_stride is that of rows of boxes, and row_bytes counts a row's
// boxes.
struct FewWeights {
  const std::byte* data;
  std::int64_t expert_stride, row_stride, second;  // bytes
  std::uint32_t row_bytes;
  std::uint32_t rows;  // of one matrix
  Divisor tiles;
  // The rows of one matrix in a tile, and how many of them are past the eighth: 8 and 0, or 16 and
  // 8. (The last tile may have only eight.)
  std::uint32_t tile_rows, more_rows;
  const float* scales;          // see FfnParams::gemm1_scales
  std::uint32_t expert_scales;  // from one expert's scales to the next's
};

struct FewParams : WaitParams, ActivationParams, RouteCall, InputCall, OutputCall {
  std::uint32_t tokens;  // of this rank
  std::uint32_t rows;    // of all ranks, each of which has as many rows
  Divisor top_k;
  std::uint32_t num_routed, num_experts;
  const std::int32_t* place_of;
  // Over ranks: the rows of each, the places whose experts are here, and where ranks write.
  std::uint32_t rows_per_rank, first_expert, local_experts;
  protocol::Heap heap;
  FewWeights weights[2];   // of the first and the second GEMM
  FewOperand operands[2];  // x and h
  Divisor h_stages;
  std::uint32_t operand_bytes;
  // See FfnParams.
  bool more_of_first, more_of_second;
  const float *gate_scale, *up_scale, *down_scale, *gate_bias, *up_biases, *down_bias;
  std::uint16_t* h;  // [T, K, I]
  // See LayerParams.
  std::uint64_t* epoch_word;
  std::uint32_t* readers;
  PassWords pass_words[2];
  std::uint32_t num_pass_words;
  std::uint32_t* stats;
};

// Shared memory: the operand, the rings, and all warps' sums of two tiles in turn. The kernel's
// other shared memory is less than 2 KB.
constexpr std::uint32_t few_operand_bytes(const FewOperand& x, const FewOperand& h,
                                          FewNumbers numbers) {
  return protocol::round_up(std::max(x.bytes(numbers), h.bytes(numbers)), 128u);
}
constexpr std::uint32_t few_shared_bytes(std::uint32_t operand_bytes, FewNumbers numbers,
                                         bool ranks) {
  return operand_bytes + kFewWarps * (few_stages(ranks) * few_stage_bytes(numbers) + 2 * 32 * 16);
}
inline constexpr std::uint32_t kMostFewSharedBytes = 225 * 1024;

// The most bytes of weights, of all slots, with which a pass is faster here than in the small
// pass's kernel. This one begins some 8 us (bf16) or 10 us (FP8) sooner, and then reads more
// slowly. Measured on an H200: in bf16 it gains up to 201 MB and loses at 226 MB; in FP8 it gains
// up to 189 MB, and from 201 MB on both are alike. Four-bit weights have no such bound: up to 198
// MB they were read here at 2.2 to 2.6 TB/s, and in the small pass's kernel at 1.6 to 1.8.
inline constexpr std::int64_t kMostFewBytes = 202'000'000;
// The same for a rank's share of the slots of a pass over ranks, whose other kernel begins later.
// On two H200 it gains a ninth at 396 MB (V4-Pro in FP8) and 4 % at 302 MB of bf16, and loses 2 and
// 6 % at 603 and 705 MB.
inline constexpr std::int64_t kMostFewBytesOverRanks = 400'000'000;

// Whether the kernel has room for a pass with the routing given, and is the faster one. `rows`: the
// tokens of one rank or, over ranks, of all. Its matrix instruction has columns for eight.
constexpr bool few_tokens_fit(std::int64_t rows, int num_ranks, int top_k, int hidden,
                              int intermediate, FewNumbers numbers, bool gated) {
  if (rows < 1 || rows > kMostFewRows || rows * top_k > kMostFewSlots) return false;
  const bool ranks = num_ranks > 1;
  const std::int64_t expert_bytes =
      std::int64_t{hidden} * intermediate * (gated ? 3 : 2) * (numbers == FewNumbers::kFp8 ? 1 : 2);
  if (!few_four_bit(numbers) &&
      rows * top_k * expert_bytes / num_ranks > (ranks ? kMostFewBytesOverRanks : kMostFewBytes)) {
    return false;
  }
  const auto some = static_cast<std::uint32_t>(rows);
  const FewOperand x = FewOperand::of(some, static_cast<std::uint32_t>(hidden), numbers),
                   h = FewOperand::of(some * static_cast<std::uint32_t>(top_k),
                                      static_cast<std::uint32_t>(intermediate), numbers);
  return few_shared_bytes(few_operand_bytes(x, h, numbers), numbers, ranks) <= kMostFewSharedBytes;
}

using FewKernel = void (*)(FewParams);
FewKernel few_kernel(FewNumbers numbers, bool gated, bool ranks);

}  // namespace switchyard::gpu
