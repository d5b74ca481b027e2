// The type that a layer computes in, from its weights and its options.
#include "layer/compute.h"

#include <gtest/gtest.h>

#include <span>

#include "model/errors.h"
#include "models/generate.h"
#include "switchyard/layer.h"

namespace switchyard {
namespace {

constexpr DType kFp8 = DType::kF8E4M3;

LayerSpec spec(int shared_intermediate = 0) {
  return {.hidden = 256,
          .intermediate = 192,
          .num_experts = 2,
          .top_k = 1,
          .shared_intermediate = shared_intermediate};
}

MoeWeights weights(DType dtype, int shared_intermediate = 0) {
  return generate_weights(spec(shared_intermediate), dtype, 1, {.num_threads = 1});
}

MatrixView scaled(std::int64_t scale_rows, std::int64_t scale_cols) {
  static const float scale = 1;
  MatrixView view{&scale, kFp8, 192, 256, 256};
  view.scale = &scale;
  view.scale_rows = scale_rows;
  view.scale_cols = scale_cols;
  view.scale_stride = 1;
  return view;
}

TEST(Compute, FormsOfScales) {
  struct Case {
    std::int64_t rows, cols;
    bool block, row;
  };
  for (const Case& c :
       {Case{128, 128, true, false}, Case{256, 128, true, false}, Case{192, 256, true, false},
        Case{192, 128, true, false}, Case{128, 1000, true, false}, Case{1000, 1000, true, false},
        Case{1, 256, false, true}, Case{64, 256, false, true}, Case{7, 300, false, true},
        Case{1, 128, false, false}, Case{128, 64, false, false}, Case{64, 64, false, false},
        Case{128, 192, false, false}}) {
    EXPECT_EQ(is_block_form(scaled(c.rows, c.cols)), c.block) << c.rows << " x " << c.cols;
    EXPECT_EQ(is_row_form(scaled(c.rows, c.cols)), c.row) << c.rows << " x " << c.cols;
  }
  MatrixView wide = scaled(128, 128);
  wide.dtype = DType::kBF16;
  EXPECT_FALSE(is_block_form(wide) || is_row_form(wide));
}

TEST(Compute, ByTheWeightsUnlessAskedFor) {
  EXPECT_EQ(resolve_compute(weights(kFp8), {}), kFp8);
  EXPECT_EQ(resolve_compute(weights(kFp8, 100), {}), kFp8);
  EXPECT_EQ(resolve_compute(weights(DType::kBF16), {}), DType::kBF16);
  EXPECT_EQ(resolve_compute(weights(DType::kF16), {}), DType::kF32);
  EXPECT_EQ(resolve_compute(weights(DType::kF32), {}), DType::kF32);
  for (const DType dtype : {kFp8, DType::kBF16, DType::kF16, DType::kF32}) {
    EXPECT_EQ(resolve_compute(weights(dtype), DType::kBF16), DType::kBF16);
    EXPECT_EQ(resolve_compute(weights(dtype), DType::kF32), DType::kF32);
  }
  EXPECT_EQ(resolve_compute(weights(kFp8), kFp8), kFp8);
  EXPECT_ERROR(resolve_compute(weights(kFp8), DType::kF16), kInvalidArgument, "compute type f16");
}

// A grouped GEMM on a GPU has fp16, and no fp32.
TEST(Compute, OfAGroupedGemm) {
  const auto chosen = [](DType weight, Backend backend, std::optional<DType> asked) {
    static const float scale = 1;
    MatrixView matrix{&scale, weight, 192, 256, 256};
    if (weight == kFp8) matrix = scaled(128, 128);
    return resolve_compute(std::span(&matrix, 1), asked, backend);
  };
  constexpr Backend kCpu = Backend::kCpu, kCuda = Backend::kCuda;
  for (const Backend backend : {kCpu, kCuda}) {
    EXPECT_EQ(chosen(kFp8, backend, {}), kFp8);
    EXPECT_EQ(chosen(DType::kBF16, backend, {}), DType::kBF16);
    for (const DType weight : {kFp8, DType::kBF16, DType::kF16, DType::kF32}) {
      EXPECT_EQ(chosen(weight, backend, DType::kBF16), DType::kBF16);
      EXPECT_EQ(chosen(weight, backend, DType::kF32), DType::kF32);
    }
    EXPECT_ERROR(chosen(DType::kF16, backend, kFp8), kInvalidArgument, "matrices[0] is f16");
    EXPECT_ERROR(chosen(DType::kF16, backend, DType::kU8), kInvalidArgument, "compute type u8");
  }
  EXPECT_EQ(chosen(DType::kF16, kCpu, {}), DType::kF32);
  EXPECT_EQ(chosen(DType::kF32, kCpu, {}), DType::kF32);
  EXPECT_EQ(chosen(DType::kF16, kCuda, {}), DType::kF16);
  EXPECT_EQ(chosen(DType::kF32, kCuda, {}), DType::kBF16);
  for (const DType weight : {kFp8, DType::kBF16, DType::kF16, DType::kF32}) {
    EXPECT_EQ(chosen(weight, kCuda, DType::kF16), DType::kF16);
    EXPECT_ERROR(chosen(weight, kCpu, DType::kF16), kUnsupported, "compute type f16",
                 "backend is cpu", "use f32", "backend cuda");
  }
}

TEST(Compute, EveryMatrixCounts) {
  MoeWeights odd = weights(kFp8, 100);
  odd.experts[1].down.scale_cols = 64;
  EXPECT_EQ(resolve_compute(odd, {}), DType::kBF16);
  EXPECT_ERROR(resolve_compute(odd, kFp8), kUnsupported, "experts[1].down", "128 x 64",
               "[256, 192]", "compute in bf16");

  MoeWeights mixed = weights(kFp8, 100);
  const MoeWeights wide = weights(DType::kBF16, 100);
  mixed.shared = wide.shared;
  EXPECT_EQ(resolve_compute(mixed, {}), DType::kBF16);
  EXPECT_ERROR(resolve_compute(mixed, kFp8), kInvalidArgument, "shared.gate is bf16",
               "compute in bf16");
  EXPECT_ERROR(resolve_compute(weights(DType::kF32), kFp8), kInvalidArgument,
               "experts[0].gate is f32");
}

TEST(Compute, TheLayerTells) {
  const auto compute_of = [](const MoeWeights& w, std::optional<DType> asked) {
    return MoeLayer(World::single(), spec(), w,
                    {.max_tokens = 4, .cpu = {.num_threads = 1}, .compute = asked})
        .compute();
  };
  EXPECT_EQ(compute_of(weights(kFp8), {}), kFp8);
  EXPECT_EQ(compute_of(weights(kFp8), DType::kF32), DType::kF32);
  EXPECT_ERROR(compute_of(weights(DType::kBF16), kFp8), kInvalidArgument, "is bf16");
}

}  // namespace
}  // namespace switchyard
