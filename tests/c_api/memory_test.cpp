// Memory of the caller's in the C interface: changed in place, shared between arguments, and sizes
// that make no sense.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cfloat>
#include <climits>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "c_api/calls.h"
#include "switchyard/c.h"

namespace switchyard::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::uint8_t kOne = 0x38;  // in f8_e4m3

// One expert of [2, 4] and down [4, 2]: y = s * (sum of x + bias) for each of two columns, summed.
class InPlace : public ::testing::Test {
 protected:
  InPlace() {
    EXPECT_EQ(sy_world_single(nullptr, &world_), SY_OK);
    spec_.hidden = 4;
    spec_.intermediate = 2;
    spec_.num_experts = spec_.top_k = 1;
    spec_.expert_bias = 1;
    spec_.activation.kind = SY_IDENTITY;
    spec_.activation.gated = 0;
    weights_.up.bias = tensor(up_bias_, SY_F32, {1, 2});
    weights_.down.bias = tensor(down_bias_, SY_F32, {1, 4});
    options_.compute = SY_F32;
    options_.num_threads = 1;
    // [N, K] codes, with a scale for each row.
    gemm_spec_.weights.bias = tensor(up_bias_, SY_F32, {1, 2});
  }
  ~InPlace() override {
    EXPECT_EQ(sy_layer_destroy(&layer_), SY_OK);
    EXPECT_EQ(sy_grouped_gemm_destroy(&gemm_), SY_OK);
    EXPECT_EQ(sy_world_destroy(&world_), SY_OK);
  }
  void use_floats() {
    weights_.up.weight = tensor(floats_, SY_F32, {1, 2, 4});
    weights_.down.weight = tensor(floats_, SY_F32, {1, 4, 2});
    gemm_spec_.weights.weight = weights_.up.weight;
  }
  void use_codes(const sy_tensor& scale) {
    weights_.up.weight = tensor(codes_, SY_F8_E4M3, {1, 2, 4});
    weights_.up.scale = scale;
    weights_.up.scale_rows = 1;
    weights_.up.scale_cols = 4;
    weights_.down.weight = tensor(codes_, SY_F8_E4M3, {1, 4, 2});
    weights_.down.scale = tensor(down_scale_, SY_F32, {1, 1, 1});
    weights_.down.scale_rows = 4;
    weights_.down.scale_cols = 2;
    gemm_spec_.weights.weight = weights_.up.weight;
    gemm_spec_.weights.scale = scale;
    gemm_spec_.weights.scale_rows = 1;
    gemm_spec_.weights.scale_cols = 4;
  }
  void create(int copies) {
    sy_grouped_gemm_options options = SY_GROUPED_GEMM_OPTIONS_INIT;
    options.compute = SY_F32;
    ASSERT_EQ(sy_layer_create(world_, &spec_, &weights_, &options_, &layer_), SY_OK)
        << last_error().message;
    ASSERT_EQ(sy_grouped_gemm_create(&gemm_spec_, &options, &gemm_), SY_OK) << last_error().message;
    sy_layer_info info = SY_LAYER_INFO_INIT;
    ASSERT_EQ(sy_layer_get_info(layer_, &info), SY_OK);
    EXPECT_EQ(info.copies, copies);
    // As of a caller that knows no such field.
    info.copies = 77;
    info.struct_size = offsetof(sy_layer_info, copies);
    ASSERT_EQ(sy_layer_get_info(layer_, &info), SY_OK);
    EXPECT_EQ(info.copies, 77);
    sy_grouped_gemm_info of_gemm = SY_GROUPED_GEMM_INFO_INIT;
    ASSERT_EQ(sy_grouped_gemm_get_info(gemm_, &of_gemm), SY_OK);
    EXPECT_EQ(of_gemm.copies, copies);
  }
  float layer() {
    sy_forward call = SY_FORWARD_INIT;
    call.x = tensor(x_, SY_F32, {1, 4});
    call.topk_ids = tensor(ids_, SY_I32, {1, 1});
    call.topk_weights = tensor(one_, SY_F32, {1, 1});
    call.out = tensor(y_, SY_F32, {1, 4});
    EXPECT_EQ(sy_layer_forward(layer_, &call), SY_OK) << last_error().message;
    return y_[0];
  }
  float gemm() {
    sy_grouped_gemm_call call = SY_GROUPED_GEMM_CALL_INIT;
    call.x = tensor(x_, SY_F32, {1, 4});
    call.ends = tensor(ends_, SY_I32, {1});
    call.out = tensor(product_, SY_F32, {1, 2});
    EXPECT_EQ(sy_grouped_gemm_run(gemm_, &call), SY_OK) << last_error().message;
    return product_[0] + product_[1];
  }
  void refresh() {
    EXPECT_EQ(sy_layer_refresh(layer_, nullptr), SY_OK) << last_error().message;
    EXPECT_EQ(sy_grouped_gemm_refresh(gemm_, nullptr), SY_OK) << last_error().message;
  }

  std::vector<float> floats_ = std::vector<float>(8, 1.0f), x_{1, 1, 1, 1}, y_ = x_, one_{1},
                     product_{0, 0}, up_bias_{0, 0}, down_bias_{0, 0, 0, 0}, down_scale_{1};
  std::vector<std::uint8_t> codes_ = std::vector<std::uint8_t>(8, kOne);
  std::vector<std::int32_t> ids_{0}, ends_{1};
  sy_layer_spec spec_ = SY_LAYER_SPEC_INIT;
  sy_layer_weights weights_ = SY_LAYER_WEIGHTS_INIT;
  sy_layer_options options_ = SY_LAYER_OPTIONS_INIT;
  sy_grouped_gemm_spec gemm_spec_ = SY_GROUPED_GEMM_SPEC_INIT;
  sy_world* world_ = nullptr;
  sy_layer* layer_ = nullptr;
  sy_grouped_gemm* gemm_ = nullptr;
};

TEST_F(InPlace, WeightsAndBiasesAreReadWhereTheyAre) {
  use_floats();
  create(0);
  EXPECT_EQ(layer(), 8);
  EXPECT_EQ(gemm(), 8);
  up_bias_ = {10, 20};
  EXPECT_EQ(layer(), 38);
  EXPECT_EQ(gemm(), 38);
  down_bias_[0] = 100;
  EXPECT_EQ(layer(), 138);
  floats_[0] = 2;
  EXPECT_EQ(gemm(), 39);
  EXPECT_EQ(layer(), 100 + 2 * 15 + 24);
  refresh();
  EXPECT_EQ(layer(), 100 + 2 * 15 + 24);
  EXPECT_EQ(gemm(), 39);
}

TEST_F(InPlace, BiasesOfOtherTypesAndStridesAreReadAnewInEveryCall) {
  std::vector<std::uint16_t> bf16{0x3f80, 0, 0x4000, 0};  // 1, 2
  weights_.up.bias = tensor(bf16, SY_BF16, {1, 2});
  weights_.up.bias.strides[1] = 2;
  gemm_spec_.weights.bias = weights_.up.bias;
  use_floats();
  create(0);
  EXPECT_EQ(layer(), 11);
  EXPECT_EQ(gemm(), 11);
  bf16[2] = 0x4080;  // 4
  EXPECT_EQ(layer(), 13);
  EXPECT_EQ(gemm(), 13);
}

TEST_F(InPlace, ScalesThatAreFloatsAreReadWhereTheyAre) {
  std::vector<float> scale{1, 2};
  use_codes(tensor(scale, SY_F32, {1, 2, 1}));
  create(0);
  EXPECT_EQ(layer(), 12);
  EXPECT_EQ(gemm(), 12);
  scale[0] = 3;
  EXPECT_EQ(layer(), 20);
  EXPECT_EQ(gemm(), 20);
}

TEST_F(InPlace, ScalesThatAreConvertedNeedRefresh) {
  std::vector<std::uint8_t> scale{127, 128};  // 1 and 2
  use_codes(tensor(scale, SY_F8_E8M0, {1, 2, 1}));
  create(1);
  EXPECT_EQ(layer(), 12);
  EXPECT_EQ(gemm(), 12);
  scale[0] = 129;  // 4
  EXPECT_EQ(layer(), 12);
  refresh();
  EXPECT_EQ(layer(), 24);
  EXPECT_EQ(gemm(), 24);
}

TEST_F(InPlace, ARefreshOnTheCpuHasNoStream) {
  use_floats();
  create(0);
  EXPECT_EQ(sy_layer_refresh(layer_, &x_), SY_INVALID_ARGUMENT);
  EXPECT_EQ(sy_grouped_gemm_refresh(gemm_, &x_), SY_INVALID_ARGUMENT);
  EXPECT_EQ(sy_grouped_gemm_refresh(nullptr, nullptr), SY_INVALID_ARGUMENT);
}

// ------------------------------------------------------------------------- shared between
// arguments

// So much memory behind each array that one that is put over it meets no other.
template <typename... T>
void keep_apart(std::vector<T>&... arrays) {
  (arrays.reserve(arrays.size() + 1024), ...);
}

// Every output over every other array, at its start and in its midst.
void check_every_pair(const std::vector<std::pair<const char*, sy_tensor*>>& outputs,
                      const std::vector<std::pair<const char*, sy_tensor*>>& inputs,
                      const std::function<sy_status()>& call) {
  ASSERT_EQ(call(), SY_OK) << last_error().message;
  std::vector<std::pair<const char*, sy_tensor*>> all = outputs;
  all.insert(all.end(), inputs.begin(), inputs.end());
  for (const auto& [name, out] : outputs) {
    void* const own = out->data;
    for (const auto& [other_name, other] : all) {
      if (other == out) continue;
      for (const std::size_t offset : {0, 4}) {
        out->data = static_cast<std::byte*>(other->data) + offset;
        EXPECT_EQ(call(), SY_INVALID_ARGUMENT) << name << " over " << other_name;
        EXPECT_THAT(last_error().message, ::testing::AllOf(HasSubstr(name), HasSubstr(other_name),
                                                           HasSubstr("overlaps")));
      }
    }
    out->data = own;
  }
  ASSERT_EQ(call(), SY_OK) << last_error().message;
}

TEST(SharedMemory, OfPermute) {
  std::vector<std::int64_t> ids{1, 0, 1, 7, 1, 2};
  std::vector<std::int32_t> ends(3), positions(6), tokens(9), dropped(2);
  keep_apart(ids, ends, positions, tokens, dropped);
  sy_permute_call call = SY_PERMUTE_CALL_INIT;
  call.num_experts = 3;
  call.layout = {SY_ROWS_BLOCKED, 0, 2};
  call.ids = tensor(ids, SY_I64, {3, 2});
  call.ends = tensor(ends, SY_I32, {3});
  call.positions = tensor(positions, SY_I32, {3, 2});
  call.tokens = tensor(tokens, SY_I32, {9});
  check_every_pair({{"ends", &call.ends}, {"positions", &call.positions}, {"tokens", &call.tokens}},
                   {{"ids", &call.ids}}, [&] { return sy_permute_run(&call); });
  call.dropped = tensor(dropped, SY_I32, {1});
  call.dropped.data = &tokens[3];
  expect_failed(sy_permute_run(&call), SY_INVALID_ARGUMENT, "dropped overlaps tokens");
}

TEST(SharedMemory, OfUnpermuteAndTopK) {
  std::vector<float> rows(10, 1.0f), out(4), weights(4, 1.0f);
  std::vector<std::int32_t> positions{4, -1, 0, 1};
  keep_apart(rows, out, weights, positions);
  sy_unpermute_call sum = SY_UNPERMUTE_CALL_INIT;
  sum.rows = tensor(rows, SY_F32, {5, 2});
  sum.positions = tensor(positions, SY_I32, {2, 2});
  sum.weights = tensor(weights, SY_F32, {2, 2});
  sum.out = tensor(out, SY_F32, {2, 2});
  check_every_pair({{"out", &sum.out}},
                   {{"rows", &sum.rows}, {"positions", &sum.positions}, {"weights", &sum.weights}},
                   [&] { return sy_unpermute_run(&sum); });

  std::vector<float> logits{1, 3, 2, 2, 0, 2}, factors(4);
  std::vector<std::int32_t> chosen(4);
  keep_apart(logits, factors, chosen);
  const sy_routing routing = SY_ROUTING_INIT;
  sy_topk_call choice = SY_TOPK_CALL_INIT;
  choice.top_k = 2;
  choice.routing = &routing;
  choice.logits = tensor(logits, SY_F32, {2, 3});
  choice.ids = tensor(chosen, SY_I32, {2, 2});
  choice.weights = tensor(factors, SY_F32, {2, 2});
  check_every_pair({{"ids", &choice.ids}, {"weights", &choice.weights}},
                   {{"logits", &choice.logits}}, [&] { return sy_topk_run(&choice); });
}

// ------------------------------------------------------------------------------------------ sizes

TEST(Sizes, OfDeadlines) {
  sy_world* world = nullptr;
  ASSERT_EQ(sy_world_single(nullptr, &world), SY_OK);
  const auto refused = [](sy_status status, double value) {
    EXPECT_EQ(status, SY_INVALID_ARGUMENT) << value;
    EXPECT_THAT(last_error().message, HasSubstr("deadline is")) << value;
  };
  for (const double value : {-1.0, -1e-9, -HUGE_VAL, HUGE_VAL, double{NAN}, DBL_MAX, 1e300}) {
    sy_world_options options = SY_WORLD_OPTIONS_INIT;
    options.deadline_seconds = value;
    sy_world* other = nullptr;
    refused(sy_world_single(&options, &other), value);
    refused(sy_world_processes(0, 2, &options, &other), value);
    sy_heap_options of_heap = SY_HEAP_OPTIONS_INIT;
    of_heap.bytes = 64;
    of_heap.deadline_seconds = value;
    sy_heap* heap = nullptr;
    refused(sy_heap_create(world, &of_heap, &heap), value);
    sy_exchange_spec spec = SY_EXCHANGE_SPEC_INIT;
    spec.hidden = 8;
    spec.num_experts = spec.top_k = spec.max_tokens = 1;
    sy_exchange_options of_exchange = SY_EXCHANGE_OPTIONS_INIT;
    of_exchange.deadline_seconds = value;
    sy_exchange* exchange = nullptr;
    refused(sy_exchange_create(world, &spec, &of_exchange, &exchange), value);
  }
  EXPECT_EQ(sy_world_destroy(&world), SY_OK);
}

TEST(Sizes, OfRowsAndRanks) {
  std::int64_t needed = 0;
  const std::int64_t most = INT64_MAX;
  for (const sy_rows_kind kind : {SY_ROWS_BLOCKED, SY_ROWS_PADDED}) {
    for (const std::int64_t size :
         {std::int64_t{-1}, std::int64_t{0}, std::int64_t{1} << 31, most}) {
      const sy_row_layout layout{kind, 0, size};
      EXPECT_EQ(sy_rows_needed(&layout, 8, 64, &needed), SY_INVALID_ARGUMENT) << size;
      EXPECT_THAT(last_error().message, HasSubstr(std::to_string(size)));
    }
    const sy_row_layout large{kind, 0, 1 << 30};
    EXPECT_EQ(sy_rows_needed(&large, 8, 64, &needed), SY_INVALID_ARGUMENT);
  }
  for (const std::int64_t rows : {std::int64_t{-1}, std::int64_t{1} << 31, most}) {
    EXPECT_EQ(sy_rows_needed(nullptr, 8, rows, &needed), SY_INVALID_ARGUMENT) << rows;
  }
  sy_world* world = nullptr;
  for (const std::int32_t size : {-1, 0, 65, 100'000'000, INT_MAX}) {
    EXPECT_EQ(sy_world_threads(size, nullptr, &world), SY_INVALID_ARGUMENT) << size;
    EXPECT_EQ(sy_world_processes(0, size, nullptr, &world), SY_INVALID_ARGUMENT) << size;
    EXPECT_THAT(last_error().message, HasSubstr(std::to_string(size)));
  }
}

// Products of sizes that overflow, and sizes that an int does not hold, are no small numbers.
TEST(Sizes, OfTensors) {
  std::vector<float> values(8);
  std::vector<std::int32_t> numbers(8);
  const std::int64_t huge[] = {std::int64_t{1} << 32, (std::int64_t{1} << 32) + 2,
                               std::int64_t{1} << 62, INT64_MAX, -1};
  for (const std::int64_t size : huge) {
    for (int d = 0; d < 3; ++d) {
      sy_grouped_gemm_spec spec = SY_GROUPED_GEMM_SPEC_INIT;
      spec.weights.weight = tensor(values, SY_F32, {2, 2, 2});
      spec.weights.weight.shape[d] = size;
      sy_grouped_gemm* gemm = nullptr;
      EXPECT_EQ(sy_grouped_gemm_create(&spec, nullptr, &gemm), SY_INVALID_ARGUMENT) << size << d;
    }
    for (int d = 0; d < 2; ++d) {
      sy_tensor ids = tensor(numbers, SY_I32, {2, 2}), ends = tensor(numbers, SY_I32, {1}),
                positions = tensor(numbers, SY_I32, {2, 2});
      ids.shape[d] = size;
      EXPECT_NE(sy_permute(&ids, 1, nullptr, &ends, &positions, nullptr, nullptr), SY_OK);
      sy_tensor rows = tensor(values, SY_F32, {2, 2}), out = tensor(values, SY_F32, {2, 2});
      rows.shape[d] = size;
      EXPECT_NE(sy_unpermute(&rows, &positions, nullptr, 1, 0, &out), SY_OK);
      sy_tensor logits = tensor(values, SY_F32, {2, 2}), weights = tensor(values, SY_F32, {2, 1}),
                chosen = tensor(numbers, SY_I32, {2, 1});
      logits.shape[d] = size;
      const sy_routing routing = SY_ROUTING_INIT;
      EXPECT_NE(sy_topk(&routing, 1, &logits, nullptr, &chosen, &weights, nullptr), SY_OK);
    }
  }
  for (const std::int32_t top_k : {-1, 0, 3, INT_MAX, INT_MIN}) {
    sy_tensor logits = tensor(values, SY_F32, {2, 2}), weights = tensor(values, SY_F32, {2, 1}),
              chosen = tensor(numbers, SY_I32, {2, 1});
    const sy_routing routing = SY_ROUTING_INIT;
    EXPECT_EQ(sy_topk(&routing, top_k, &logits, nullptr, &chosen, &weights, nullptr),
              SY_INVALID_ARGUMENT);
    EXPECT_THAT(last_error().message, HasSubstr("top_k is " + std::to_string(top_k)));
  }
}

}  // namespace
}  // namespace switchyard::testing
