// The products of many experts with their rows of tokens, as one operator, and what stands around
// them in a layer that is not fused: topk(), permute() and unpermute(). MoeLayer (layer.h) does all
// of it in one kernel.
//
// For every expert e and every row r that is e's:
//   out[r] = row weight * activation(W[e] x[r] + bias[e])
// with W[e] of [N, K]. An expert may have any number of rows, also none.
//
//   Permutation order = permute(ids, top_k, num_experts);
//   gate_up.run({x, order.layout, order.ends, order.tokens}, {h.data()});  // SwiGLU
//   down.run({h_view, order.layout, order.ends}, {y.data()});
//   unpermute(y_view, order.positions, weights, top_k, {out.data()});
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "switchyard/layer.h"
#include "switchyard/layer_spec.h"
#include "switchyard/schedule.h"
#include "switchyard/tensor.h"

namespace switchyard {

namespace tuner {
struct Table;
}

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

// The order of gate's and up's rows in a gated W[e], and of values in its bias: I = N / 2 of each.
enum class GateOrder : std::uint8_t {
  kGateUp,      // gate 0 .. I - 1, then up 0 .. I - 1
  kUpGate,      // up first
  kInterleaved  // gate 0, up 0, gate 1, up 1, ...
};

struct GroupedGemmSpec {
  int num_experts = 0;  // 1 to 1024
  int n = 0;            // rows of a weight: the columns of the product
  int k = 0;            // its columns: those of a token
  // None: the output is the product itself. Gated: the output has n / 2 columns, and n is even.
  std::optional<Activation> epilogue{};
  GateOrder order = GateOrder::kGateUp;  // gated only

  int output_columns() const { return epilogue && epilogue->gated ? n / 2 : n; }
};

struct GroupedGemmWeights {
  // [E] matrices [N, K] in any strides, so also those that are stored as [K, N]; bf16, f16, f32, or
  // FP8 with scales of blocks, of rows or of the whole. One type, and scales of one form, for all
  // experts.
  std::vector<MatrixView> matrices{};
  std::vector<VectorView> biases{};     // [E] of [N], bf16, f16 or f32; or empty
  std::shared_ptr<const void> owner{};  // keeps them alive; or null
};

struct GroupedGemmOptions {
  Backend backend = Backend::kCpu;
  int max_rows = 65536;  // most rows of a call, over all experts
  int num_threads = 0;   // kCpu only, the calling thread included; 0: the hardware's
  int device = -1;       // kCuda only, as in LayerOptions
  int reserved_sms = 0;  // kCuda only, as in LayerOptions
  // As LayerOptions::compute; kF8E4M3 quantises x as layers do. But with kCuda it may be kF16, too:
  // the choice for f16 weights. x and weights of other types are rounded to it, and numbers beyond
  // its range become infinite. (With kCpu that is Error{kUnsupported}; kF32 has every number of
  // f16, and is the choice for such weights.)
  std::optional<DType> compute{};
  GroupedSchedule schedule{};  // kCuda only
  // kCuda only. Configurations to choose from by the rows of each expert, inside the launch: a
  // table of tuner.h for this operator's shape, compute type and GPU. It takes the place of all of
  // `schedule` but `paired`, which stay empty. The host chooses what a launch fixes (pairs) by the
  // number of rows; the kernel chooses the rest by `ends`, so replays of a graph with other ends
  // choose anew. Configurations that split K are left out of calls in which the sums of the parts
  // would take more than 64 MiB. Output rows then also depend on the rows of other experts, in bits
  // that splitting K changes. Null: the rules.
  std::shared_ptr<const tuner::Table> table{};
};
// The kernel and version of tables for this operator: "grouped_bf16", "grouped_fp8". kF16 has the
// tables of bf16, whose code it runs with another matrix instruction of the same peak rate. The
// version grows whenever the kernel's times change.
std::string grouped_kernel_name(DType compute);
inline constexpr std::int64_t kGroupedKernelVersion = 1;

// With kCuda every address is the device's, and nothing is read by the host.
struct GroupedInput {
  // [rows of the layout, K], or with `index` [any, K], rows contiguous (col_stride 1): bf16, f16 or
  // f32, which is rounded to the compute type; or, where that is FP8, f8_e4m3 with a scale for
  // every 128 columns (scale_rows 1, scale_cols 128), used as they are. Rows that no expert has are
  // not read and may hold anything, and need not be there behind the last row that one has.
  MatrixView x{};
  RowLayout layout{};
  // [E] i32 or i64: ends[e] is the number of rows of experts 0 to e together, whatever the layout.
  SlotView ends{};
  // Tokens that are not gathered: [rows of the layout] i32, the row of x that each row is. Entries
  // of rows that no expert has are not read. An entry that names no row of x is refused with kCpu,
  // and stands for zeros with kCuda. Empty: x has the rows themselves.
  SlotView index{};
  void* stream = nullptr;  // kCuda only: a cudaStream_t
};

// No output may overlap an input or another output, not even in part: Error{kInvalidArgument}.
// (Rows of one matrix may stand between those of another: two halves of the columns of one array.)
// Where `rows` is -1 the end of `data` is not known, and only its first row is held against the
// others.
struct GroupedOutput {
  void* data = nullptr;         // [rows of `layout`, output columns], contiguous rows
  DType dtype = DType::kBF16;   // kBF16, kF16 or kF32
  std::int64_t row_stride = 0;  // in elements; 0: the output's columns
  std::int64_t rows = -1;       // how many there are at `data`, which `layout` and `index` are
                                // held against; -1: enough
  RowLayout layout{};           // packed where `index` is given
  // [rows, in packed order] i32: instead of `layout` each row's own place in the output; -1: it is
  // not stored. No two rows may have the same.
  SlotView index{};
  // [rows, in packed order] f32: what each row of the output is multiplied by, before it is
  // rounded; or empty.
  SlotView weights{};
  // The products before the activation, for a backward pass: [rows of `layout`, N] of the same
  // type, columns in the order of the weights' rows. Only with an epilogue, and without `index`.
  // Null: not stored.
  void* products = nullptr;
  std::int64_t products_stride = 0;  // in elements; 0: N
  // kCuda only, in device memory: [1], out: the entry of GroupedGemmOptions::table that was chosen;
  // -1: none, by the rules. Null: not wanted.
  std::int32_t* chosen = nullptr;
};

class GroupedGemm {
 public:
  // Weights stay where they are, as in MoeLayer, and must stay valid. With kCpu nothing is copied;
  // with kCuda biases, scales and matrices that have to be laid out anew are: see refresh(). Throws
  // Error{kInvalidArgument, kShapeMismatch, kDTypeMismatch, kMissingTensor} for what does not fit
  // together, {kUnsupported} for what the backend does not have.
  GroupedGemm(const GroupedGemmSpec& spec, const GroupedGemmWeights& weights,
              const GroupedGemmOptions& options = {});
  ~GroupedGemm();
  GroupedGemm(GroupedGemm&&) noexcept;
  GroupedGemm& operator=(GroupedGemm&&) noexcept;

  // With kCpu it returns when the output is complete; with kCuda it enqueues one kernel, and before
  // it another one where rows have to be gathered, converted, quantised or aligned. That one needs
  // memory, which the operator keeps: while a stream is captured, a call with more rows than any
  // before it is kUnsupported. Calls of one object follow one another. Rows of the output that no
  // expert's row goes to stay as they are. The bits of an output row depend on the rows of its
  // expert and on nothing else: not on layouts, indexes or other experts. On one rank GroupedGemm
  // with the layer's activation, GroupedGemm and unpermute() have the bits of MoeLayer's routed
  // experts (kCpu: in bf16 on a processor that multiplies it; otherwise the layer keeps h in f32).
  // Throws Error{kInvalidArgument, kShapeMismatch, kDTypeMismatch} for a call that does not fit,
  // {kCapacityExceeded} for more than max_rows, before anything is written.
  void run(const GroupedInput& input, const GroupedOutput& output);

  // Like MoeLayer::refresh() and copies(): reads anew what was copied of the weights and biases.
  void refresh(void* stream = nullptr);
  bool copies() const;

  const GroupedGemmSpec& spec() const;
  Backend backend() const;
  DType compute() const;
  int num_threads() const;  // kCuda: 0

  struct Engine;

 private:
  std::unique_ptr<Engine> engine_;
};

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
