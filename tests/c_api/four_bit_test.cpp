// Four-bit weights of the C interface: where their scales and zero points are read, and refusals.
// Tests in C++ and Python compare what layers compute with them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "c_api/calls.h"
#include "switchyard/c.h"

namespace switchyard::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kHidden = 64, kIntermediate = 32, kNumExperts = 2;

// All weights of a matrix are 1 times their scales: two experts, plain FFNs without an activation.
class FourBits : public ::testing::Test {
 protected:
  FourBits() {
    EXPECT_EQ(sy_world_single(nullptr, &world_), SY_OK);
    spec_.hidden = kHidden;
    spec_.intermediate = kIntermediate;
    spec_.num_experts = kNumExperts;
    spec_.top_k = 1;
    spec_.activation.gated = 0;
    spec_.activation.kind = SY_IDENTITY;
    options_.max_tokens = 8;
    options_.compute = SY_F32;
    mxfp4();
  }
  ~FourBits() override {
    EXPECT_EQ(sy_layer_destroy(&layer_), SY_OK);
    EXPECT_EQ(sy_world_destroy(&world_), SY_OK);
  }

  // Scales are 1, 2 of expert 1's up.
  void mxfp4() {
    up_.assign(up_.size(), 0x22);
    down_.assign(down_.size(), 0x22);
    up_codes_.assign(kNumExperts * kIntermediate * 2, 127);
    std::fill(up_codes_.begin() + kIntermediate * 2, up_codes_.end(), 128);
    down_codes_.assign(kNumExperts * kHidden, 127);
    give(SY_F4_E2M1, tensor(up_codes_, SY_F8_E8M0, {kNumExperts, kIntermediate, 2}),
         tensor(down_codes_, SY_F8_E8M0, {kNumExperts, kHidden, 1}));
  }
  // The same numbers.
  void int4() {
    up_.assign(up_.size(), 0x99);
    down_.assign(down_.size(), 0x99);
    up_scale_.assign(kNumExperts * kIntermediate * 2, 1.0f);
    std::fill(up_scale_.begin() + kIntermediate * 2, up_scale_.end(), 2.0f);
    down_scale_.assign(kNumExperts * kHidden, 1.0f);
    give(SY_U4, tensor(up_scale_, SY_F32, {kNumExperts, kIntermediate, 2}),
         tensor(down_scale_, SY_F32, {kNumExperts, kHidden, 1}));
  }
  void give(sy_dtype dtype, const sy_tensor& up_scale, const sy_tensor& down_scale) {
    weights_.up = {tensor(up_, dtype, {kNumExperts, kIntermediate, kHidden}), up_scale, {}, 1, 32};
    weights_.down = {
        tensor(down_, dtype, {kNumExperts, kHidden, kIntermediate}), down_scale, {}, 1, 32};
  }

  sy_status create() { return sy_layer_create(world_, &spec_, &weights_, &options_, &layer_); }
  // A token of ones for each expert; element 0 of what comes out.
  std::pair<float, float> forward() {
    std::vector<float> x(kNumExperts * kHidden, 1.0f), weights(kNumExperts, 1.0f);
    std::vector<float> y(x.size());
    std::vector<std::int32_t> ids{0, 1};
    sy_forward call = SY_FORWARD_INIT;
    call.x = tensor(x, SY_F32, {kNumExperts, kHidden});
    call.out = tensor(y, SY_F32, {kNumExperts, kHidden});
    call.topk_ids = tensor(ids, SY_I32, {kNumExperts, 1});
    call.topk_weights = tensor(weights, SY_F32, {kNumExperts, 1});
    EXPECT_EQ(sy_layer_forward(layer_, &call), SY_OK) << last_error().message;
    return {y[0], y[kHidden]};
  }
  // Good weights of which one thing is changed.
  void refused(sy_status status, const char* text, const std::function<void()>& spoil) {
    const sy_layer_weights good = weights_;
    spoil();
    EXPECT_EQ(create(), status) << text << ": " << last_error().message;
    EXPECT_THAT(last_error().message, HasSubstr(text));
    EXPECT_EQ(sy_layer_destroy(&layer_), SY_OK);
    weights_ = good;
  }

  std::vector<std::uint8_t> up_ =
      std::vector<std::uint8_t>(kNumExperts * kIntermediate * kHidden / 2);
  std::vector<std::uint8_t> down_ = up_;
  std::vector<std::uint8_t> up_codes_, down_codes_;
  std::vector<float> up_scale_, down_scale_;
  sy_world* world_ = nullptr;
  sy_layer* layer_ = nullptr;
  sy_layer_spec spec_ = SY_LAYER_SPEC_INIT;
  sy_layer_weights weights_ = SY_LAYER_WEIGHTS_INIT;
  sy_layer_options options_ = SY_LAYER_OPTIONS_INIT;
};

constexpr float kOut = kHidden * kIntermediate;

TEST_F(FourBits, ScalesAreReadInPlace) {
  for (const bool is_int4 : {false, true}) {
    if (is_int4) int4();
    ASSERT_EQ(create(), SY_OK) << last_error().message;
    EXPECT_EQ(forward(), std::pair(kOut, 2 * kOut));
    sy_layer_info info = SY_LAYER_INFO_INIT;
    ASSERT_EQ(sy_layer_get_info(layer_, &info), SY_OK);
    EXPECT_EQ(info.copies, 0);
    std::fill(up_codes_.begin(), up_codes_.end(), 129);
    std::fill(up_scale_.begin(), up_scale_.end(), 4.0f);
    EXPECT_EQ(forward(), std::pair(4 * kOut, 4 * kOut));
    ASSERT_EQ(sy_layer_destroy(&layer_), SY_OK);
  }
}

TEST_F(FourBits, Int4HasScalesOf16Bits) {
  constexpr std::uint16_t kTwo = 0x4000;  // in both types
  for (const sy_dtype dtype : {SY_BF16, SY_F16}) {
    std::vector<std::uint16_t> up(up_codes_.size(), kTwo), down(down_codes_.size(), kTwo);
    int4();
    give(SY_U4, tensor(up, dtype, {kNumExperts, kIntermediate, 2}),
         tensor(down, dtype, {kNumExperts, kHidden, 1}));
    ASSERT_EQ(create(), SY_OK) << last_error().message;
    EXPECT_EQ(forward(), std::pair(4 * kOut, 4 * kOut));
    ASSERT_EQ(sy_layer_destroy(&layer_), SY_OK);
  }
}

TEST_F(FourBits, StridesBetweenExpertsMayBeNegative) {
  sy_tensor& weight = weights_.up.weight;
  weight.data = up_.data() + up_.size() / 2;
  weight.strides[0] = -weight.strides[0];
  sy_tensor& scale = weights_.up.scale;
  scale.data = up_codes_.data() + up_codes_.size() / 2;
  scale.strides[0] = -scale.strides[0];
  ASSERT_EQ(create(), SY_OK) << last_error().message;
  EXPECT_EQ(forward(), std::pair(2 * kOut, kOut));
}

TEST_F(FourBits, ZeroPoints) {
  int4();
  std::vector<std::uint8_t> zero(kNumExperts * kIntermediate * 2, 8);
  std::fill(zero.begin() + kIntermediate * 2, zero.end(), 6);
  std::vector<std::uint8_t> down_zero(kNumExperts * kHidden, 7);
  weights_.up_zero = tensor(zero, SY_U8, {kNumExperts, kIntermediate, 2});
  weights_.down_zero = tensor(down_zero, SY_U8, {kNumExperts, kHidden, 1});
  ASSERT_EQ(create(), SY_OK) << last_error().message;
  EXPECT_EQ(forward(), std::pair(2 * kOut, 12 * kOut));
  ASSERT_EQ(sy_layer_destroy(&layer_), SY_OK);

  refused(SY_SHAPE_MISMATCH, "up_zero is [2, 32, 1], but the scales are [2, 32, 2]",
          [&] { weights_.up_zero.shape[2] = 1; });
  refused(SY_SHAPE_MISMATCH, "up_zero has 2 dimensions", [&] { weights_.up_zero.ndim = 2; });
  refused(SY_DTYPE_MISMATCH, "up_zero has dtype 5; zero points are u8",
          [&] { weights_.up_zero.dtype = SY_I32; });
  refused(SY_UNSUPPORTED, "up_zero has columns 2 elements apart",
          [&] { weights_.up_zero.strides[2] = 2; });
  refused(SY_UNSUPPORTED, "up_zero has rows 4 elements apart, and the scales 2",
          [&] { weights_.up_zero.strides[1] = 4; });
  refused(SY_MISSING_TENSOR, "up_zero is given without scales",
          [&] { weights_.up.scale.ndim = 0; });
  refused(SY_INVALID_ARGUMENT, "down_zero is given, but only weights of u4",
          [&] { weights_.down.weight.dtype = SY_F4_E2M1; });
  refused(SY_DTYPE_MISMATCH, "all routed experts of a layer must share one form",
          [&] { weights_.down_zero.ndim = 0; });
  refused(SY_INVALID_ARGUMENT, "gate_zero is given, but the activation is plain",
          [&] { weights_.gate_zero = weights_.up_zero; });
  spec_.activation.gated = 1;
  refused(SY_MISSING_TENSOR, "gate_zero is given without gate.weight",
          [&] { weights_.gate_zero = weights_.up_zero; });
  spec_.activation.gated = 0;
  zero[7] = 16;
  refused(SY_INVALID_ARGUMENT, "experts[0].up's zero point of row 3, columns 32 to 63 is 16",
          [] {});
}

TEST_F(FourBits, WeightsOfAnEarlierVersionHaveNoZeroPoints) {
  int4();
  weights_.up_zero.ndim = 77;  // beyond what the caller says it has
  weights_.struct_size = offsetof(sy_layer_weights, gate_zero);
  ASSERT_EQ(create(), SY_OK) << last_error().message;
  EXPECT_EQ(forward(), std::pair(kOut, 2 * kOut));
  ASSERT_EQ(sy_layer_destroy(&layer_), SY_OK);
  refused(SY_INVALID_ARGUMENT, "sy_layer_weights.struct_size is",
          [&] { weights_.struct_size -= 1; });
}

TEST_F(FourBits, ZeroPointsOfAGroupedGemm) {
  int4();
  std::vector<std::uint8_t> zero(kNumExperts * kIntermediate * 2, 8);
  std::fill(zero.begin() + kIntermediate * 2, zero.end(), 6);
  sy_grouped_gemm_spec spec = SY_GROUPED_GEMM_SPEC_INIT;
  spec.weights = weights_.up;
  spec.zero = tensor(zero, SY_U8, {kNumExperts, kIntermediate, 2});
  sy_grouped_gemm_options options = SY_GROUPED_GEMM_OPTIONS_INIT;
  options.compute = SY_F32;
  sy_grouped_gemm* gemm = nullptr;
  const auto outputs = [&] {
    EXPECT_EQ(sy_grouped_gemm_create(&spec, &options, &gemm), SY_OK) << last_error().message;
    std::vector<float> x(kNumExperts * kHidden, 1.0f), out(kNumExperts * kIntermediate);
    std::vector<std::int32_t> ends{1, 2};
    sy_grouped_gemm_call call = SY_GROUPED_GEMM_CALL_INIT;
    call.x = tensor(x, SY_F32, {kNumExperts, kHidden});
    call.ends = tensor(ends, SY_I32, {kNumExperts});
    call.out = tensor(out, SY_F32, {kNumExperts, kIntermediate});
    EXPECT_EQ(sy_grouped_gemm_run(gemm, &call), SY_OK) << last_error().message;
    EXPECT_EQ(sy_grouped_gemm_destroy(&gemm), SY_OK);
    return std::pair(out.front(), out.back());
  };
  // Codes are 9, and scales 1 and 2.
  EXPECT_EQ(outputs(), std::pair(1.0f * kHidden, 6.0f * kHidden));
  const auto is_refused = [&](sy_status status, const char* text) {
    EXPECT_EQ(sy_grouped_gemm_create(&spec, &options, &gemm), status);
    EXPECT_THAT(last_error().message, HasSubstr(text));
  };
  zero[7] = 16;
  is_refused(SY_INVALID_ARGUMENT, "matrices[0]'s zero point of row 3, columns 32 to 63 is 16");
  zero[7] = 8;
  spec.zero.shape[2] = 1;
  is_refused(SY_SHAPE_MISMATCH, "zero is [2, 32, 1], but the scales are [2, 32, 2]");
  spec.zero.ndim = 77;  // beyond what the caller says it has
  spec.struct_size = offsetof(sy_grouped_gemm_spec, zero);
  EXPECT_EQ(outputs(), std::pair(1.0f * kHidden, 2.0f * kHidden));
}

TEST_F(FourBits, RefuseOddLayouts) {
  refused(SY_UNSUPPORTED, "up.weight [2, 32, 64] has columns 2 elements apart",
          [&] { weights_.up.weight.strides[2] = 2; });
  refused(SY_UNSUPPORTED, "up.weight [2, 32, 64] has rows 65 elements apart",
          [&] { weights_.up.weight.strides[1] = 65; });
  refused(SY_UNSUPPORTED, "up.weight [2, 32, 64] has experts 2049 elements apart",
          [&] { weights_.up.weight.strides[0] = 2049; });
  refused(SY_UNSUPPORTED, "up.scale has columns 2 elements apart",
          [&] { weights_.up.scale.strides[2] = 2; });
  refused(SY_SHAPE_MISMATCH, "with scales 1 apart from row to row, but a row of 64 columns has 2",
          [&] { weights_.up.scale.strides[1] = 1; });
}

TEST_F(FourBits, RefuseOtherScales) {
  refused(SY_MISSING_TENSOR, "f4_e2m1 (MXFP4), without scales",
          [&] { weights_.up.scale.ndim = 0; });
  refused(SY_DTYPE_MISMATCH, "up.scale has dtype 7; scales are f32 (1) or f8_e8m0 (8), of u4 also",
          [&] { weights_.up.scale.dtype = SY_U8; });
  refused(SY_DTYPE_MISMATCH, "f4_e2m1 (MXFP4), with scales of bf16; they must be f8_e8m0",
          [&] { weights_.up.scale.dtype = SY_BF16; });
  refused(SY_UNSUPPORTED, "with a scale for 2 x 32 elements", [&] {
    weights_.up.scale_rows = 2;
    weights_.up.scale.shape[1] = kIntermediate / 2;
  });
  refused(SY_UNSUPPORTED, "with a scale for 1 x 64 elements; groups are of 32 columns", [&] {
    weights_.up.scale_cols = 64;
    weights_.up.scale.shape[2] = 1;
  });
  refused(SY_SHAPE_MISMATCH, "up.scale is [2, 32, 1], but weights [2, 32, 64]",
          [&] { weights_.up.scale.shape[2] = 1; });
  up_codes_[5] = 255;
  refused(SY_INVALID_ARGUMENT, "experts[0].up's scale of row 2, columns 32 to 63 is NaN", [] {});
  up_codes_[5] = 127;
  int4();
  refused(SY_DTYPE_MISMATCH, "u4 (INT4), with scales of f8_e8m0",
          [&] { weights_.up.scale.dtype = SY_F8_E8M0; });
  up_scale_[0] = std::numeric_limits<float>::quiet_NaN();
  refused(SY_INVALID_ARGUMENT, "experts[0].up's scale of row 0, columns 0 to 31 is NaN", [] {});
  up_scale_[0] = 1;
  options_.compute = SY_F8_E4M3;
  refused(SY_INVALID_ARGUMENT, "compute type f8_e4m3, but experts[0].up is u4", [] {});
}

TEST_F(FourBits, RefuseColumnsThatAreNoWholeGroups) {
  spec_.hidden = 48;
  refused(SY_SHAPE_MISMATCH, "48 columns, which is no multiple of its groups of 32", [&] {
    weights_.up.weight.shape[2] = 48;
    weights_.down.weight.shape[1] = 48;
    weights_.down.scale.shape[1] = 48;
  });
}

TEST_F(FourBits, AreWeightsOnly) {
  ASSERT_EQ(create(), SY_OK) << last_error().message;
  std::vector<float> x(kHidden, 1.0f), y(kHidden), weights(1, 1.0f);
  std::vector<std::int32_t> ids{0};
  for (const sy_dtype dtype : {SY_F4_E2M1, SY_U4}) {
    sy_forward call = SY_FORWARD_INIT;
    call.x = tensor(x, dtype, {1, kHidden});
    call.out = tensor(y, SY_F32, {1, kHidden});
    call.topk_ids = tensor(ids, SY_I32, {1, 1});
    call.topk_weights = tensor(weights, SY_F32, {1, 1});
    EXPECT_NE(sy_layer_forward(layer_, &call), SY_OK);
    call.x.dtype = SY_F32;
    call.out.dtype = dtype;
    EXPECT_NE(sy_layer_forward(layer_, &call), SY_OK);
    call.out.dtype = SY_F32;
    call.topk_weights.dtype = dtype;
    EXPECT_NE(sy_layer_forward(layer_, &call), SY_OK);
  }
  std::vector<std::uint8_t> router(kNumExperts * kHidden, 0x22);
  refused(SY_DTYPE_MISMATCH, "router is f4_e2m1, which only weights of experts may be", [&] {
    weights_.router = tensor(router, SY_F4_E2M1, {kNumExperts, kHidden});
  });
}

TEST(FourBitGroupedGemm, ScalesAreReadInPlace) {
  // Two experts of [2, 64], all 1, times the scales: 1, 2 of expert 1.
  std::vector<std::uint8_t> codes(2 * 2 * 32, 0x99);
  std::vector<float> scale{1, 1, 1, 1, 2, 2, 2, 2}, x(2 * 64, 1.0f), out(4);
  std::vector<std::int32_t> ends{1, 2};
  sy_grouped_gemm_spec spec = SY_GROUPED_GEMM_SPEC_INIT;
  spec.weights.weight = tensor(codes, SY_U4, {2, 2, 64});
  spec.weights.scale = tensor(scale, SY_F32, {2, 2, 2});
  spec.weights.scale_rows = 1;
  spec.weights.scale_cols = 32;
  sy_grouped_gemm_options options = SY_GROUPED_GEMM_OPTIONS_INIT;
  options.num_threads = 1;
  sy_grouped_gemm* gemm = nullptr;
  ASSERT_EQ(sy_grouped_gemm_create(&spec, &options, &gemm), SY_OK) << last_error().message;
  sy_grouped_gemm_call call = SY_GROUPED_GEMM_CALL_INIT;
  call.x = tensor(x, SY_F32, {2, 64});
  call.ends = tensor(ends, SY_I32, {2});
  call.out = tensor(out, SY_F32, {2, 2});
  ASSERT_EQ(sy_grouped_gemm_run(gemm, &call), SY_OK) << last_error().message;
  EXPECT_THAT(out, ::testing::ElementsAre(64, 64, 128, 128));
  ASSERT_EQ(sy_grouped_gemm_destroy(&gemm), SY_OK);
  scale[6] = std::numeric_limits<float>::quiet_NaN();
  expect_failed(sy_grouped_gemm_create(&spec, &options, &gemm), SY_INVALID_ARGUMENT,
                "matrices[1]'s scale of row 1, columns 0 to 31");
}

}  // namespace
}  // namespace switchyard::testing
