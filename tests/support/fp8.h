// Layers in FP8 for the tests of both engines, and what their outputs are held to.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/accuracy.h"
#include "support/layers.h"

namespace switchyard::testing {

inline constexpr DType kFp8 = DType::kF8E4M3;

// Rows and columns of weights that share a scale; 0: all.
struct ScaleForm {
  const char* name;
  std::int64_t rows, cols;
};
inline constexpr ScaleForm kScaleForms[] = {
    {"per tensor", 0, 0},  {"128 x 128", 128, 128}, {"256 x 128", 256, 128},
    {"128 x all", 128, 0}, {"per channel", 1, 0},   {"three rows", 3, 0},
};

// Two groups of 128 columns and a shorter one, everywhere.
LayerSpec grouped(LayerSpec spec);

inline LayerSpec plain_spec() { return grouped({.num_experts = 8, .top_k = 2}); }

inline MoeWeights fp8_weights(const LayerSpec& spec, std::uint64_t seed = 11) {
  return make_weights(spec, kFp8, seed, 1);
}

Batch routed_batch(const LayerSpec& spec, std::int64_t tokens, DType dtype);

// Numbers that are not finite, in one token each, make all of these tokens NaN and no other.
// run(spec, weights, batch) -> the layer's result.
template <typename Run>
void expect_poison_stays(int tokens, std::int64_t last, Run&& run) {
  for (int kind = 0; kind <= static_cast<int>(ActivationKind::kIdentity); ++kind) {
    for (const bool gated : {true, false}) {
      LayerSpec spec = plain_spec();
      spec.activation.kind = static_cast<ActivationKind>(kind);
      spec.activation.gated = gated;
      const MoeWeights weights = fp8_weights(spec);
      Batch batch = routed_batch(spec, tokens, DType::kBF16);
      const BatchResult clean = run(spec, weights, batch);
      batch.x.set(5 * spec.hidden + 3, NAN);
      batch.x.set(17 * spec.hidden + 130, INFINITY);
      batch.x.set(last * spec.hidden + 319, -INFINITY);
      const BatchResult result = run(spec, weights, batch);
      for (std::int64_t i = 0; i < tokens * spec.hidden; ++i) {
        const std::int64_t token = i / spec.hidden;
        if (token == 5 || token == 17 || token == last) {
          ASSERT_TRUE(std::isnan(result.output.get(i))) << i << " kind " << kind;
        } else {
          ASSERT_EQ(result.output.get(i), clean.output.get(i)) << i << " kind " << kind;
        }
      }
    }
  }
}

// As good as a straightforward FP8 program, and rounding where it does: almost always, for sums
// that are exact to fp32, and somewhat less often where the matrix unit keeps fewer bits. Returns
// the distance to that program, in yardsticks.
double expect_accurate_fp8(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                           const BatchResult& result, double closeness = 0.5,
                           std::int64_t scale_columns = kQuantGroup);

void for_each_matrix(MoeWeights& weights, const std::function<void(MatrixView&)>& visit);

inline void for_each_four_bit_matrix(MoeWeights& weights,
                                     const std::function<void(MatrixView&)>& visit) {
  for_each_matrix(weights, [&](MatrixView& m) {
    if (is_four_bit(m.dtype)) visit(m);
  });
}

// Other scales for the same codes: one per scale_rows x scale_cols (0: all), each the mean of those
// of the matrix times 2^e with e drawn from [-spread, spread].
class Rescaled {
 public:
  Rescaled(MoeWeights weights, std::int64_t scale_rows, std::int64_t scale_cols, int spread)
      : weights_(std::move(weights)) {
    std::mt19937_64 random(8);
    std::uniform_int_distribution<int> exponent(-spread, spread);
    for_each_matrix(weights_, [&](MatrixView& m) {
      const float typical = m.f32_scale()[0];
      m.scale_rows = scale_rows == 0 ? m.rows : scale_rows;
      m.scale_cols = scale_cols == 0 ? m.cols : scale_cols;
      m.scale_stride = (m.cols + m.scale_cols - 1) / m.scale_cols;
      std::vector<float>& scales = scales_.emplace_back();
      for (std::int64_t i = 0; i < (m.rows + m.scale_rows - 1) / m.scale_rows * m.scale_stride;
           ++i) {
        scales.push_back(std::ldexp(typical, exponent(random)));
      }
      m.scale = scales.data();
    });
  }
  const MoeWeights& get() const { return weights_; }

 private:
  MoeWeights weights_;
  std::deque<std::vector<float>> scales_;
};

}  // namespace switchyard::testing
