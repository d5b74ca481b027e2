// The products of many experts with their rows of tokens, as one operator. What stands around them
// in a layer that is not fused is in operators.h. MoeLayer (layer.h) does all of it in one kernel.
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
#include <string>
#include <vector>

#include "switchyard/layer.h"
#include "switchyard/layer_spec.h"
#include "switchyard/operators.h"
#include "switchyard/schedule.h"
#include "switchyard/tensor.h"

namespace switchyard {

namespace tuner {
struct Table;
}

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
  // [E] matrices [N, K] in any strides, so also those that are stored as [K, N]; bf16, f16, f32,
  // FP8 with scales of blocks, of rows or of the whole, or MXFP4 or INT4. One type, and scales of
  // one form, for all experts.
  std::vector<MatrixView> matrices{};
  std::vector<VectorView> biases{};     // [E] of [N], bf16, f16 or f32; or empty
  std::shared_ptr<const void> owner{};  // keeps them alive; or null
};

struct GroupedGemmOptions {
  Backend backend = Backend::kCpu;
  int max_rows = 65536;  // most rows of a call, over all experts
  int num_threads = 0;   // kCpu only, the calling thread included; 0: the hardware's
  int device = -1;       // kCuda only, as in CudaOptions
  int reserved_sms = 0;  // kCuda only, as in CudaOptions
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
  // every 128 columns (scale_rows 1, scale_cols 128), taken as layers do. Rows that no expert has
  // are not read and may hold anything, and need not be there behind the last row that one has.
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

}  // namespace switchyard
