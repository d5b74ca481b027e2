#include "protocol/call.h"

#include <gtest/gtest.h>

#include "model/errors.h"
#include "switchyard/routing.h"

namespace switchyard::protocol {
namespace {

LayerSpec spec() {
  LayerSpec s;
  s.hidden = 8;
  s.intermediate = 8;
  s.num_experts = 4;
  s.top_k = 2;
  return s;
}

// An address that nobody can read, as device memory is to the host.
template <typename T>
T* unreadable() {
  return reinterpret_cast<T*>(std::uintptr_t{0x1000});
}

struct Call {
  ForwardInput input;
  ForwardOutput output;

  Call() {
    input.activations = {unreadable<void>(), DType::kBF16, 3, 8, 8};
    input.topk_ids = {unreadable<std::int32_t>(), 6};
    input.topk_weights = {unreadable<float>(), 6};
    output.data = unreadable<void>();
    output.topk_ids = {unreadable<std::int32_t>(), 6};
    output.topk_weights = {unreadable<float>(), 6};
  }
  void check(const LayerSpec& s, const MoeWeights& weights = {}) const {
    check_call(s, weights, 4, 0, input, output);
  }
};

TEST(Call, IsCheckedWithoutReadingThroughItsAddresses) {
  Call().check(spec());

  Call hashed;
  hashed.input.topk_ids = {};
  hashed.input.topk_weights = {};
  hashed.input.token_ids = {unreadable<std::int32_t>(), 3};
  LayerSpec by_table = spec();
  by_table.routing.method = RoutingMethod::kHash;
  MoeWeights weights;
  weights.router = {unreadable<void>(), DType::kBF16, 4, 8, 8};
  hashed.check(by_table, weights);
  hashed.input.token_ids = {unreadable<std::int32_t>(), 2};
  EXPECT_ERROR(hashed.check(by_table, weights), ErrorCode::kShapeMismatch, "token_ids has 2");
}

TEST(Call, SizesAreChecked) {
  Call call;
  call.input.topk_ids = call.input.topk_ids.first(5);
  EXPECT_ERROR(call.check(spec()), ErrorCode::kShapeMismatch, "topk_ids has 5", "need 6");
  call = Call();
  call.output.topk_weights = call.output.topk_weights.first(2);
  EXPECT_ERROR(call.check(spec()), ErrorCode::kShapeMismatch, "output topk_weights has 2");
  call = Call();
  call.input.activations.rows = 5;
  EXPECT_ERROR(call.check(spec()), ErrorCode::kCapacityExceeded, "5 tokens", "at most 4");
  call = Call();
  call.input.topk_ids = {};
  call.input.topk_weights = {};
  EXPECT_ERROR(call.check(spec()), ErrorCode::kInvalidArgument, "no router weights");
}

TEST(Call, IdsAreCheckedWhereTheHostCanReadThem) {
  std::vector<std::int32_t> ids = {0, 1, kNoExpert, kNoExpert, 3, 2};
  ForwardInput input;
  input.topk_ids = ids;
  check_ids(spec(), {}, input);
  ids[4] = 4;
  EXPECT_ERROR(check_ids(spec(), {}, input), ErrorCode::kInvalidArgument, "topk_ids[2][0] is 4");
  ids[4] = 2;
  EXPECT_ERROR(check_ids(spec(), {}, input), ErrorCode::kInvalidArgument,
               "token 2 names expert 2 twice");

  LayerSpec by_table = spec();
  by_table.routing.method = RoutingMethod::kHash;
  MoeWeights weights;
  weights.hash_table.rows = 10;
  const std::vector<std::int32_t> tokens = {0, 9, 10};
  ForwardInput hashed;
  hashed.token_ids = tokens;
  EXPECT_ERROR(check_ids(by_table, weights, hashed), ErrorCode::kInvalidArgument, "token id 10",
               "vocabulary of 10");
}

}  // namespace
}  // namespace switchyard::protocol
