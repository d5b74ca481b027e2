// The host's parameters for the kernels of GroupedGemm. Trivially copyable; pointers are device
// pointers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/grouped/choice.h"
#include "gpu/grouped/limits.h"
#include "gpu/pipeline/params.h"
#include "gpu/tile/config.h"
#include "gpu/tile/params.h"
#include "protocol/partition.h"
#include "switchyard/grouped_gemm.h"

namespace switchyard::gpu {

inline constexpr std::uint32_t kMostGroupedExperts = 1024;
inline constexpr std::uint32_t kMostTileRows = 256;

// With an activation the weights are those of a first GEMM (ExpertParams::routed), else of a second
// one: `hidden` is then the columns of the product.
struct GroupedParams : ExpertParams, WaitParams, ModelShape, ActivationParams {
  GroupedCut cut;            // of calls without candidates
  bool may_halve;            // tiles may be halved
  ChoiceRule rule;           // of calls with candidates
  std::uint32_t columns;     // of the output
  std::uint32_t in_columns;  // of the input
  std::uint32_t k_blocks;    // stages of a token
  std::uint32_t row_blocks;  // tasks of one block that the weight rows of one tile make
  // The same for pairs of blocks: with an odd number, a pair's second block has a task past the
  // last one, in which it stores nothing but counts.
  std::uint32_t paired_row_blocks;
  // The products' columns: gate i is at gate_at + i * product_step, up i likewise.
  std::uint32_t gate_at, up_at, product_step;
};

// Where each expert's rows are.
struct GroupedRows {
  const void* ends;  // [E] i32 or, if wide_ends, i64
  bool wide_ends;
  RowLayout in, out;
};

struct GroupedCall : GroupedRows {
  TokenMaps x_maps;  // over all rows of the input
  // [rows, scale_stride], of FP8 rows; or [rows] in packed order, where a row has one scale, with
  // room for kMostTileRows more.
  const float* x_scales;
  std::int64_t scale_stride;
  std::uint32_t gathers;         // 1: blocks copy the rows that index_in names
  const std::int32_t* index_in;  // [rows of the layout `in`] the rows of x
  const void* x;                 // of calls that gather, in place of x_maps
  std::int64_t x_row_bytes;
  std::uint32_t x_rows;
  const std::int32_t* index;  // [rows] the place of each row in the output; or null
  const float* weights;       // [rows], by which the output is multiplied; or null
  void* y;
  DType type;             // of the output and of the products
  std::int64_t y_stride;  // in elements
  void* products;         // or null
  std::int64_t products_stride;
  void* nowhere;  // a row for those that have no place
  // With splits: [splits, split_rows, columns] sums, twice the columns if gated; and for every
  // task's two math warpgroups the number of parts that are stored, which the last one clears.
  float* sums;
  std::int64_t split_rows;
  std::uint32_t* stored;
  std::uint32_t paired;  // 1: blocks are launched in pairs
  // Configurations in device memory. The call's rows choose one: choose.cuh. 0: there is no choice.
  const Candidate* candidates;
  std::uint32_t num_candidates;
  std::int32_t* chosen;  // [1] out: the choice's entry in the table, -1 without any; or null
};

// kActivates: false if the output is the product itself.
struct GroupedEntry {
  void (*kernel)(GroupedParams, GroupedCall);
  std::uint32_t shared_bytes;
  Numerics numerics;
  TileConfig tile;
};
// Each is defined in an object file of its own.
template <typename C, bool kGated, bool kActivates>
GroupedEntry grouped_entry();
struct BF16Grouped;
struct F16Grouped;
struct FP8Grouped;
struct MXFP4Grouped;
struct INT4Grouped;
struct MXFP4FP8Grouped;

// Rows that have to be gathered, converted or quantised before they can be multiplied: into packed
// order, in bf16 or fp16, or in E4M3 with scales.
struct PrepareCall : GroupedRows {
  const void* x;
  DType type;             // kBF16, kF16 or kF32; kF8E4M3 only to gather
  std::int64_t x_stride;  // in elements
  std::int64_t x_rows;    // an index that names none of them, such as -1, gives zeros
  const float* x_scales;  // of FP8 rows
  std::int64_t scale_stride;
  const std::int32_t* index;  // [rows of the layout]; or null
  int num_experts, columns;
  void* to;  // [rows, columns] of to_type: kBF16, kF16 or kF8E4M3
  DType to_type;
  float* to_scales;  // [rows, groups of 128 columns] or, if by_row, [rows], of kF8E4M3
  bool by_row;       // all columns of a row share a scale
};
// Enqueues the call. `rows`: the most rows that it may have.
cudaError_t prepare_rows(const PrepareCall& call, std::int64_t rows, int num_sms,
                         cudaStream_t stream);

}  // namespace switchyard::gpu
