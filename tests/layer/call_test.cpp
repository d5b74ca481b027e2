#include "layer/call.h"

#include <gtest/gtest.h>

#include "model/errors.h"
#include "switchyard/routing.h"

namespace switchyard {
namespace {

LayerSpec spec() { return {.hidden = 8, .intermediate = 8, .num_experts = 4, .top_k = 2}; }

// Addresses that nobody can read, as device memory is to the host. Each number has its own page.
template <typename T>
T* unreadable(std::uintptr_t page = 1) {
  return reinterpret_cast<T*>(page * 0x1000);
}

struct Call {
  ForwardInput input;
  ForwardOutput output;

  Call() {
    input.activations = {unreadable<void>(), DType::kBF16, 3, 8, 8};
    input.topk_ids = {unreadable<std::int32_t>(2), 6};
    input.topk_weights = {unreadable<float>(3), 6};
    output.data = unreadable<void>(4);
    output.topk_ids = {unreadable<std::int32_t>(5), 6};
    output.topk_weights = {unreadable<float>(6), 6};
  }
  void check(const LayerSpec& s, const MoeWeights& weights = {},
             DType compute = DType::kBF16) const {
    check_call(s, weights, 4, 0, input, output, compute);
  }
};

TEST(Call, IsCheckedWithoutReadingThroughItsAddresses) {
  Call().check(spec());

  Call hashed;
  hashed.input.topk_ids = {};
  hashed.input.topk_weights = {};
  hashed.input.token_ids = {unreadable<std::int32_t>(7), 3};
  LayerSpec by_table = spec();
  by_table.routing.method = RoutingMethod::kHash;
  MoeWeights weights;
  weights.router = {unreadable<void>(), DType::kBF16, 4, 8, 8};
  hashed.check(by_table, weights);
  hashed.input.token_ids = {unreadable<std::int32_t>(7), 2};
  EXPECT_ERROR(hashed.check(by_table, weights), kShapeMismatch, "token_ids has 2");
}

TEST(Call, OutputRowsMayNotOverlap) {
  for (const std::int64_t stride : {1, 7, -7}) {
    Call call;
    call.output.row_stride = stride;
    EXPECT_ERROR(call.check(spec()), kInvalidArgument, "elements apart, but have 8");
  }
  for (const std::int64_t stride : {0, 8, 9, -8}) {
    Call call;
    call.output.row_stride = stride;
    call.check(spec());
  }
}

TEST(Call, SizesAreChecked) {
  Call call;
  call.input.topk_ids = call.input.topk_ids.first(5);
  EXPECT_ERROR(call.check(spec()), kShapeMismatch, "topk_ids has 5", "need 6");
  call = Call();
  call.output.topk_weights = call.output.topk_weights.first(2);
  EXPECT_ERROR(call.check(spec()), kShapeMismatch, "output topk_weights has 2");
  call = Call();
  call.input.activations.rows = 5;
  EXPECT_ERROR(call.check(spec()), kCapacityExceeded, "5 tokens", "at most 4");
  call = Call();
  call.input.topk_ids = {};
  call.input.topk_weights = {};
  EXPECT_ERROR(call.check(spec()), kInvalidArgument, "no router weights");
}

TEST(Call, QuantisedActivationsNeedAnFp8LayerAndNoGate) {
  const auto refused = [](const Call& call, const LayerSpec& s, const char* what,
                          const char* remedy, DType compute = DType::kF8E4M3) {
    MoeWeights weights;
    weights.router = {unreadable<void>(), DType::kBF16, 4, 8, 8};
    EXPECT_ERROR(call.check(s, weights, compute), kInvalidArgument, what, remedy);
  };
  Call good;
  MatrixView& x = good.input.activations;
  x = {unreadable<void>(), DType::kF8E4M3, 3, 8, 8, 1, unreadable<float>(), 1, 128, 1};
  good.check(spec(), {}, DType::kF8E4M3);
  refused(good, spec(), "computes in bf16", "make a layer that computes in f8_e4m3", DType::kBF16);
  refused(good, spec(), "computes in f32", "make a layer that computes in f8_e4m3", DType::kF32);

  LayerSpec gated = spec();
  gated.shared_intermediate = 8;
  gated.shared_sigmoid_gate = true;
  refused(good, gated, "the shared expert's gate", "bf16");
  Call routed = good;
  routed.input.topk_ids = {};
  routed.input.topk_weights = {};
  refused(routed, spec(), "the gate", "pass topk_ids");

  const auto with = [&good](auto&& change) {
    Call call = good;
    change(call.input.activations);
    return call;
  };
  refused(with([](MatrixView& v) { v.scale = nullptr; }), spec(), "scale is null", "[3, 1] scales");
  refused(with([](MatrixView& v) { v.scale_rows = 128; }), spec(), "128 x 128", "scale_rows 1");
  refused(with([](MatrixView& v) { v.scale_cols = 8; }), spec(), "1 x 8", "scale_cols 128");
  refused(with([](MatrixView& v) { v.scale_stride = 0; }), spec(), "stride 0", "at least 1");

  // A rank without tokens has nothing to route and nothing to scale.
  Call none = good;
  none.input = {};
  none.input.activations.dtype = DType::kF8E4M3;
  none.output.topk_ids = {};
  none.output.topk_weights = {};
  none.check(spec(), {}, DType::kF8E4M3);
  Call narrow_output = good;
  narrow_output.output.dtype = DType::kF8E4M3;
  EXPECT_ERROR(narrow_output.check(spec(), {}, DType::kF8E4M3), kDTypeMismatch,
               "output is f8_e4m3");
}

TEST(Call, IdsAreCheckedWhereTheHostCanReadThem) {
  std::vector<std::int32_t> ids = {0, 1, kNoExpert, kNoExpert, 3, 2};
  const ForwardInput input{.topk_ids = ids};
  check_ids(spec(), {}, input);
  ids[4] = 4;
  EXPECT_ERROR(check_ids(spec(), {}, input), kInvalidArgument, "topk_ids[2][0] is 4");
  ids[4] = 2;
  EXPECT_ERROR(check_ids(spec(), {}, input), kInvalidArgument, "token 2 names expert 2 twice");

  LayerSpec by_table = spec();
  by_table.routing.method = RoutingMethod::kHash;
  MoeWeights weights;
  weights.hash_table.rows = 10;
  const std::vector<std::int32_t> tokens = {0, 9, 10};
  EXPECT_ERROR(check_ids(by_table, weights, {.token_ids = tokens}), kInvalidArgument, "token id 10",
               "vocabulary of 10");
}

}  // namespace
}  // namespace switchyard
