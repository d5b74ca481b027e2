// Layers, batches and worlds for tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/convert.h"
#include "base/quantize.h"
#include "base/threads.h"
#include "model/config.h"
#include "models/generate.h"
#include "models/model_table.h"
#include "support/identifier.h"
#include "support/ranks.h"
#include "support/specs.h"
#include "switchyard/layer.h"
#include "switchyard/routing.h"

namespace switchyard::testing {

// A row-major matrix that owns its elements, in any floating dtype. FP8 ones have a scale for every
// kQuantGroup columns of a row, as activations have.
class Matrix {
 public:
  Matrix(std::int64_t rows, std::int64_t cols, DType dtype)
      : rows_(rows),
        cols_(cols),
        dtype_(dtype),
        bytes_(static_cast<std::size_t>(rows * cols) * size_of(dtype), std::byte{0xff}),
        scales_(static_cast<std::size_t>(dtype == DType::kF8E4M3 ? rows * groups() : 0), NAN) {}

  static Matrix random(std::int64_t rows, std::int64_t cols, DType dtype, std::uint64_t seed);

  // The activations that an FP8 layer makes of bf16 ones.
  static Matrix quantised(const Matrix& x, bool by_row = false);
  // Gives a group of 128 columns this scale in all rows, of a matrix with scales.
  void set_scales_of_group(std::int64_t group, float scale) {
    for (std::int64_t r = 0; r < rows_; ++r) {
      scales_[static_cast<std::size_t>(r * groups() + group)] = scale;
    }
  }

  void set(std::int64_t i, float value) {
    const auto at = static_cast<std::size_t>(i);
    if (dtype_ == DType::kF32) {
      std::memcpy(&bytes_[at * 4], &value, 4);
      return;
    }
    const std::uint16_t code = dtype_ == DType::kBF16 ? f32_to_bf16(value) : f32_to_f16(value);
    std::memcpy(&bytes_[at * 2], &code, 2);
  }
  float get(std::int64_t i) const {
    const auto at = static_cast<std::size_t>(i);
    if (dtype_ == DType::kF32) {
      float value;
      std::memcpy(&value, &bytes_[at * 4], 4);
      return value;
    }
    std::uint16_t code;
    std::memcpy(&code, &bytes_[at * 2], 2);
    return dtype_ == DType::kBF16 ? bf16_to_f32(code) : f16_to_f32(code);
  }

  std::int64_t rows() const { return rows_; }
  DType dtype() const { return dtype_; }
  MatrixView view() const { return rows_from(0, rows_); }
  MatrixView rows_from(std::int64_t first, std::int64_t count) const;
  // A copy of some rows.
  Matrix copy_of_rows(std::int64_t first, std::int64_t count) const;
  void* row(std::int64_t r) {
    return bytes_.data() + static_cast<std::size_t>(r * cols_) * size_of(dtype_);
  }
  std::vector<float> floats() const;
  bool operator==(const Matrix& other) const { return bytes_ == other.bytes_; }

 private:
  std::int64_t groups() const { return (cols_ + kQuantGroup - 1) / kQuantGroup; }

  std::int64_t rows_, cols_;
  DType dtype_;
  std::vector<std::byte> bytes_;
  std::vector<float> scales_;
};

// Runs body(world) on one thread per rank and returns each rank's exception, null where none.
std::vector<std::exception_ptr> run_ranks(const std::vector<World>& worlds,
                                          const std::function<void(const World&)>& body);

// As above; the first failure is thrown here.
inline void run_all_ranks(const std::vector<World>& worlds,
                          const std::function<void(const World&)>& body) {
  for (const std::exception_ptr& failure : run_ranks(worlds, body)) {
    if (failure) std::rethrow_exception(failure);
  }
}

// Every rank must have thrown an Error with this code, whose words have `part`.
void expect_thrown(const std::vector<std::exception_ptr>& failures, ErrorCode code,
                   const std::string& part);

// `total` tokens dealt to ranks in contiguous shares.
struct Shares {
  std::vector<std::int64_t> first, count;

  static Shares even(std::int64_t total, int ranks);
  static Shares of(const std::vector<std::int64_t>& counts);
};

// The results of a batch, all ranks' shares side by side.
struct BatchResult {
  Matrix output;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<ForwardStats> stats;
};

struct Batch {
  Matrix x;
  std::vector<std::int32_t> topk_ids;  // both empty: the gate routes
  std::vector<float> topk_weights;
  std::vector<std::int32_t> token_ids;
};

// A rank's tokens, whose experts its layer chooses, and their output.
struct GatedTokens {
  GatedTokens(std::int64_t tokens, int hidden)
      : x(Matrix::random(tokens, hidden, DType::kF32, 1)), y(tokens, hidden, DType::kF32) {}
  void forward(MoeLayer& layer) {
    ForwardInput input;
    input.activations = x.view();
    ForwardOutput output;
    output.data = y.row(0);
    output.dtype = DType::kF32;
    layer.forward(input, output);
  }
  Matrix x, y;
};

// Changes a call before it is made; `first` is the rank's first token.
using AdjustCall = std::function<void(ForwardInput&, ForwardOutput&, std::size_t first)>;

// One forward of `layer`, a MoeLayer or a LayerEngine, for this rank's share of the batch.
template <typename Layer>
void forward_share(Layer& layer, const Batch& batch, const Shares& shares, int rank,
                   BatchResult& result, const AdjustCall& adjust = {}) {
  const auto r = static_cast<std::size_t>(rank);
  const auto k = static_cast<std::size_t>(layer.spec().top_k);
  const auto first = static_cast<std::size_t>(shares.first[r]);
  const auto count = static_cast<std::size_t>(shares.count[r]);
  ForwardInput input;
  input.activations = batch.x.rows_from(shares.first[r], shares.count[r]);
  if (!batch.topk_ids.empty()) {
    input.topk_ids = std::span(batch.topk_ids).subspan(first * k, count * k);
    input.topk_weights = std::span(batch.topk_weights).subspan(first * k, count * k);
  }
  if (!batch.token_ids.empty()) {
    input.token_ids = std::span(batch.token_ids).subspan(first, count);
  }
  ForwardOutput output;
  output.data = result.output.row(shares.first[r]);
  output.dtype = result.output.dtype();
  output.topk_ids = std::span(result.ids).subspan(first * k, count * k);
  output.topk_weights = std::span(result.weights).subspan(first * k, count * k);
  if (adjust) adjust(input, output, first);
  layer.forward(input, output);
  result.stats[r] = layer.stats();
}
extern template void forward_share(MoeLayer&, const Batch&, const Shares&, int, BatchResult&,
                                   const AdjustCall&);

BatchResult empty_result(const LayerSpec& spec, const Batch& batch, int ranks, DType output_dtype);

// The weights that a rank needs: its own experts'.
MoeWeights weights_of_rank(MoeWeights weights, int rank, int num_ranks);

// The batch through a fresh world of thread ranks.
BatchResult run_batch(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                      const Shares& shares, DType output_dtype, LayerOptions options = {},
                      const AdjustCall& adjust = {});

// How checkpoints have gate and up of all experts in one array.
enum class GateUpLayout { kGateFirst, kUpFirst, kInTurn, kTransposed };
inline constexpr GateUpLayout kGateUpLayouts[] = {GateUpLayout::kGateFirst, GateUpLayout::kUpFirst,
                                                  GateUpLayout::kInTurn, GateUpLayout::kTransposed};

// Routed experts' matrices copied to one array, [E, 2 I, H] and [E, H, I] behind it, or transposed
// [E, H, 2 I] and [E, I, H]. Views into `memory`, whose address may be that of a copy.
struct LaidOutWeights {
  LaidOutWeights(const LayerSpec& spec, const MoeWeights& from, GateUpLayout layout);

  // The same views of a copy of the memory.
  MoeWeights at(const std::byte* copy) const;

  std::vector<std::byte> memory;
  MoeWeights views;
};

// The name that gtest gives the test of a model.
inline std::string name_of_model(const ::testing::TestParamInfo<ModelEntry>& model) {
  return identifier(model.param.name);
}

// The table's model, its geometry scaled down so that a test takes milliseconds: routing,
// activation, biases and shared experts stay those of the model.
LayerSpec small_spec(const ModelEntry& entry);

}  // namespace switchyard::testing
