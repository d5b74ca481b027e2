// The operators around the products of a layer that is not fused: topk() and permute() before them,
// unpermute() behind them, and the layouts of rows between. GroupedGemm (grouped_gemm.h) is the
// products; route() (routing.h) is topk() on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/layer.h"
#include "switchyard/layer_spec.h"
#include "switchyard/tensor.h"

namespace switchyard {

// Where the rows of each expert are, in an array of rows that are sorted by expert. "Packed order"
// is the order of these rows without any gaps, whatever the layout.
struct RowLayout {
  enum class Kind : std::uint8_t {
    kPacked,   // an expert's rows follow those of the expert before
    kBlocked,  // each expert's rows begin at the next multiple of `size` rows
    kPadded    // expert e's rows begin at row e * size, and are at most `size`
  };
  Kind kind = Kind::kPacked;
  std::int64_t size = 0;  // kBlocked: 1 or more; kPadded: an expert's room in rows, 1 or more

  static RowLayout packed() { return {}; }
  static RowLayout blocked(std::int64_t block) { return {Kind::kBlocked, block}; }
  static RowLayout padded(std::int64_t room) { return {Kind::kPadded, room}; }
  bool operator==(const RowLayout&) const = default;
};
// The rows that an array must have in that layout, for experts with any numbers of rows that sum up
// to `rows`: an upper bound that depends on no expert's own number. Throws
// Error{kInvalidArgument} for a layout without a size, numbers below zero, and more rows than an
// i32 can number, which no operator takes.
std::int64_t rows_needed(const RowLayout& layout, int num_experts, std::int64_t rows);
// The first row of each expert, [E + 1], the last being the end: the rows of the layout for experts
// with these rows. `ends` as in GroupedInput. Throws Error{kInvalidArgument} for ends that
// decrease, or for a padded expert with more rows than its room.
std::vector<std::int64_t> first_rows(const RowLayout& layout, std::span<const std::int64_t> ends);

// The order of slots (token, k) by expert: first all of expert 0, token by token, and so on.
struct Permutation {
  RowLayout layout{};
  std::vector<std::int32_t> ends{};    // [E]: as in GroupedInput
  std::vector<std::int32_t> tokens{};  // [rows of the layout]: the row's token; -1: a gap
  // [T, K]: the slot's row in the layout; -1: it has no expert.
  std::vector<std::int32_t> positions{};
};
// Runs on the host. Ids are [T, K], i32 or i64; negative ones, and those of num_experts or more,
// are none. (On a GPU no two of its arrays may overlap.) Throws Error{kInvalidArgument,
// kShapeMismatch, kDTypeMismatch} for arguments that make no sense, for a padded expert without
// room for its rows, or for more rows than an i32 can number.
Permutation permute(SlotView ids, int top_k, int num_experts, const RowLayout& layout = {});

// out[t] = scale * sum over k of weights[t, k] * rows[positions[t, k]], summed in fp32 in the order
// of k; slots without a row (position -1) are left out. On the host.
//   rows       [any, H], bf16, f16 or f32, rows contiguous
//   positions  [T, K] i32
//   weights    [T, K] f32 or bf16, or empty for 1
//   out        [T, H] of any of these types; row_stride 0: H. `accumulate` adds to it. Its topk_ids
//              and topk_weights stay empty. It may not overlap rows, positions or weights.
// Throws Error{kInvalidArgument, kShapeMismatch, kDTypeMismatch} before anything is written.
void unpermute(const MatrixView& rows, SlotView positions, SlotView weights, int top_k,
               const ForwardOutput& out);

// --- The same on a GPU. Every address is the device's. Calls enqueue their kernels and return:
// they neither wait nor allocate, and the host reads nothing, so a graph can capture them. With
// other contents of the same arrays its replays give other results. All throw Error{kUnsupported}
// in a build without CUDA and for a GPU that the kernels were not compiled for.

struct DeviceStream {
  void* stream = nullptr;  // a cudaStream_t of the device
  int device = -1;         // the one that has the memory; -1: this thread's current one
};

// Where permute() puts its results. The arrays are as in Permutation.
struct DevicePermutation {
  RowLayout layout{};
  std::int32_t* ends = nullptr;       // [E], out
  std::int32_t* positions = nullptr;  // [T, K], out
  // [rows], out: -1 in gaps and behind the layout's last row. `rows` is at least
  // rows_needed(layout, E, T * K). Null: not wanted.
  std::int32_t* tokens = nullptr;
  std::int64_t rows = 0;
  // [1], out: the slots that were dropped; or null. A padded expert keeps the first slots that it
  // has room for, in the order of tokens. The others get position -1, and `ends` does not count
  // them. Other layouts drop nothing.
  std::int32_t* dropped = nullptr;
  // Scratch memory at a multiple of 4, of permute_workspace_bytes(T * K, E) or more. Calls that may
  // run at the same time need one each.
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
};
// Throws Error{kInvalidArgument} for negative slots, for more than an i32 can number, and for
// numbers of experts that permute() does not take.
std::size_t permute_workspace_bytes(std::int64_t slots, int num_experts);
// The order that permute() has on the host. Ids are [T, K] as there. Throws
// Error{kInvalidArgument, kShapeMismatch, kDTypeMismatch} for what does not fit together, but see
// DevicePermutation::dropped.
void permute(SlotView ids, int top_k, int num_experts, const DevicePermutation& out,
             const DeviceStream& where);

// unpermute() with the types, shapes and errors that it has on the host. Positions below 0, or of
// rows.rows and more, have no row. Sums by fused multiply-add in the order of k, from 0, which are
// then multiplied by the scale. (On the host the compiler decides where it fuses.)
void unpermute(const MatrixView& rows, SlotView positions, SlotView weights, int top_k,
               const ForwardOutput& out, const DeviceStream& where);

// Chooses K experts for each of T tokens, with the ids and weights of route() (routing.h), to the
// bit those of a layer's gate for the same logits.
//   routing          any but RoutingMethod::kHash, which needs a table: Error{kUnsupported}
//   logits           [T, E] f32, bf16 or f16, rows contiguous, E up to 1024; K up to 32
//   correction_bias  [E] f32, or empty if `routing` has none
//   ids, weights     [T, K], out; they may not overlap each other, nor what is read
// Throws Error{kInvalidArgument, kShapeMismatch, kDTypeMismatch}.
void topk(const RoutingSpec& routing, int top_k, const MatrixView& logits,
          std::span<const float> correction_bias, std::span<std::int32_t> ids,
          std::span<float> weights, const DeviceStream& where);

}  // namespace switchyard
