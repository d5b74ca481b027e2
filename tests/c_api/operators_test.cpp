// The operators of the C interface: tensors, absent ones, struct sizes and refusals. What they
// compute is tested in C++.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "c_api/calls.h"
#include "switchyard/c.h"

namespace switchyard::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Two experts of [2, 3]: expert e's rows are (e + 1) x the sum of x, and ten times that.
class GroupedGemm : public ::testing::Test {
 protected:
  GroupedGemm() {
    spec_.weights.weight = tensor(weights_, SY_F32, {2, 2, 3});
    options_.num_threads = 2;
    call_.x = tensor(x_, SY_F32, {3, 3});
    call_.ends = tensor(ends_, SY_I32, {2});
    call_.out = tensor(out_, SY_F32, {3, 2});
  }
  ~GroupedGemm() override {
    EXPECT_EQ(sy_grouped_gemm_destroy(&gemm_), SY_OK);
    EXPECT_EQ(sy_grouped_gemm_destroy(&gemm_), SY_OK);
  }
  sy_status create() { return sy_grouped_gemm_create(&spec_, &options_, &gemm_); }
  sy_status run() { return sy_grouped_gemm_run(gemm_, &call_); }
  // A good operator and a call of which one thing is changed.
  void expect_refused(const std::function<void()>& spoil, sy_status status, const char* text) {
    ASSERT_TRUE(gemm_ != nullptr || create() == SY_OK) << last_error().message;
    const sy_grouped_gemm_call good = call_;
    spoil();
    EXPECT_EQ(run(), status) << last_error().message;
    EXPECT_THAT(last_error().message, HasSubstr(text));
    call_ = good;
    EXPECT_THAT(out_, ::testing::Each(-1.0f));
  }

  std::vector<float> weights_{1, 1, 1, 10, 10, 10, 2, 2, 2, 20, 20, 20};
  std::vector<float> x_{1, 0, 0, 1, 1, 0, 1, 1, 1};
  std::vector<float> out_ = std::vector<float>(6, -1.0f);
  std::vector<std::int32_t> ends_{1, 3};
  sy_grouped_gemm_spec spec_ = SY_GROUPED_GEMM_SPEC_INIT;
  sy_grouped_gemm_options options_ = SY_GROUPED_GEMM_OPTIONS_INIT;
  sy_grouped_gemm_call call_ = SY_GROUPED_GEMM_CALL_INIT;
  sy_grouped_gemm* gemm_ = nullptr;
};

TEST_F(GroupedGemm, OfPackedRows) {
  ASSERT_EQ(create(), SY_OK) << last_error().message;
  ASSERT_EQ(run(), SY_OK) << last_error().message;
  EXPECT_THAT(out_, ElementsAre(1, 10, 4, 40, 6, 60));
  std::vector<std::int64_t> wide{2, 3};
  call_.ends = tensor(wide, SY_I64, {2});
  ASSERT_EQ(run(), SY_OK) << last_error().message;
  EXPECT_THAT(out_, ElementsAre(1, 10, 2, 20, 6, 60));
}

TEST_F(GroupedGemm, TellsWhatItIs) {
  spec_.has_epilogue = 1;
  options_.max_rows = 77;
  ASSERT_EQ(create(), SY_OK) << last_error().message;
  sy_grouped_gemm_info info = SY_GROUPED_GEMM_INFO_INIT;
  ASSERT_EQ(sy_grouped_gemm_get_info(gemm_, &info), SY_OK);
  EXPECT_EQ(info.backend, SY_CPU);
  EXPECT_EQ(info.compute, SY_F32);
  EXPECT_EQ(info.num_threads, 2);
  EXPECT_EQ(info.num_experts, 2);
  EXPECT_EQ(info.n, 2);
  EXPECT_EQ(info.k, 3);
  EXPECT_EQ(info.output_columns, 1);
  EXPECT_EQ(info.max_rows, 77);
  info.struct_size = 4;
  EXPECT_EQ(sy_grouped_gemm_get_info(gemm_, &info), SY_INVALID_ARGUMENT);
}

TEST_F(GroupedGemm, WithEverythingAtOnce) {
  // [K, N] in memory; gated; biased; through indexes and layouts, weighted.
  weights_ = {1, 10, 1, 10, 1, 10, 2, 20, 2, 20, 2, 20};
  spec_.weights.weight.strides[1] = 1;
  spec_.weights.weight.strides[2] = 2;
  std::vector<float> bias{0, 1, 0, 2};
  spec_.weights.bias = tensor(bias, SY_F32, {2, 2});
  spec_.has_epilogue = 1;
  spec_.epilogue.kind = SY_IDENTITY;
  spec_.order = SY_UP_GATE;
  ASSERT_EQ(create(), SY_OK) << last_error().message;
  std::vector<std::int32_t> index{2, -5, -5, -5, 0, 1};
  std::vector<float> weights{1, 2, 3};
  out_.assign(5, -1.0f);
  std::vector<float> products(10, -1.0f);
  call_.x_layout = {SY_ROWS_BLOCKED, 0, 4};
  call_.index = tensor(index, SY_I32, {6});
  call_.out_layout = {SY_ROWS_PADDED, 0, 2};
  call_.out = tensor(out_, SY_F32, {5, 1});
  call_.row_weights = tensor(weights, SY_F32, {3});
  call_.products = tensor(products, SY_F32, {5, 2});
  ASSERT_EQ(run(), SY_OK) << last_error().message;
  EXPECT_THAT(out_, ElementsAre(3 * 31, -1, 2 * 2 * 22, 3 * 4 * 42, -1));
  EXPECT_THAT(products, ElementsAre(3, 31, -1, -1, 2, 22, 4, 42, -1, -1));

  call_.products.ndim = 0;
  call_.out_layout = {};
  std::vector<std::int32_t> places{3, -1, 0};
  call_.out_index = tensor(places, SY_I32, {3});
  out_.assign(5, -1.0f);
  ASSERT_EQ(run(), SY_OK) << last_error().message;
  EXPECT_THAT(out_, ElementsAre(3 * 4 * 42, -1, -1, 3 * 31, -1));
}

TEST_F(GroupedGemm, OfQuantisedRows) {
  std::vector<std::uint8_t> codes(12, 0x38);  // 1.0
  std::vector<float> scale{1, 2};
  spec_.weights.weight = tensor(codes, SY_F8_E4M3, {2, 2, 3});
  spec_.weights.scale = tensor(scale, SY_F32, {2, 1, 1});
  spec_.weights.scale_rows = 2;
  spec_.weights.scale_cols = 3;
  ASSERT_EQ(create(), SY_OK) << last_error().message;
  std::vector<std::uint8_t> x(9, 0x38);
  std::vector<float> x_scale{1, 10, 100};
  call_.x = tensor(x, SY_F8_E4M3, {3, 3});
  expect_refused([] {}, SY_INVALID_ARGUMENT, "scale is null");
  call_.x_scale = tensor(x_scale, SY_F32, {3, 1});
  ASSERT_EQ(run(), SY_OK) << last_error().message;
  EXPECT_THAT(out_, ElementsAre(3, 3, 60, 60, 600, 600));
}

TEST_F(GroupedGemm, RefusesWhatItCannotBeMadeOf) {
  const auto refused = [&](sy_status status, const char* text) {
    EXPECT_EQ(create(), status);
    EXPECT_EQ(gemm_, nullptr);
    EXPECT_THAT(last_error().message, HasSubstr(text));
  };
  options_.backend = SY_CUDA;
  spec_.weights.weight.device_type = SY_CUDA;
  refused(SY_INVALID_ARGUMENT, "num_threads is 2, but the backend is cuda");
  spec_.weights.weight.device_type = SY_CPU;
  refused(SY_INVALID_ARGUMENT, "weight is in host memory");
  options_.backend = 9;
  refused(SY_INVALID_ARGUMENT, "backend is 9");
  options_.backend = SY_CPU;
  options_.compute = 77;
  refused(SY_DTYPE_MISMATCH, "dtype 77");
  options_.compute = SY_F16;
  refused(SY_UNSUPPORTED, "compute type f16, but the backend is cpu; use f32");
  options_.compute = SY_DTYPE_NONE;
  spec_.order = 3;
  refused(SY_INVALID_ARGUMENT, "order is 3");
  spec_.order = 0;
  spec_.has_epilogue = 1;
  spec_.epilogue.kind = -1;
  refused(SY_INVALID_ARGUMENT, "activation.kind is -1");
  spec_.has_epilogue = 0;
  spec_.weights.weight.ndim = 2;
  refused(SY_SHAPE_MISMATCH, "weight has 2 dimensions");
  spec_.struct_size = 8;
  refused(SY_INVALID_ARGUMENT, "sy_grouped_gemm_spec.struct_size is 8");
  EXPECT_EQ(sy_grouped_gemm_create(nullptr, nullptr, &gemm_), SY_INVALID_ARGUMENT);
  EXPECT_EQ(sy_grouped_gemm_create(&spec_, nullptr, nullptr), SY_INVALID_ARGUMENT);
}

TEST_F(GroupedGemm, SchedulesAreForGpus) {
  const auto refused = [&](std::int32_t sy_grouped_gemm_options::*field, std::int32_t value,
                           const char* text) {
    const sy_grouped_gemm_options good = options_;
    options_.*field = value;
    EXPECT_EQ(create(), SY_INVALID_ARGUMENT);
    EXPECT_EQ(gemm_, nullptr);
    EXPECT_THAT(last_error().message, HasSubstr(text));
    options_ = good;
  };
  refused(&sy_grouped_gemm_options::tile_rows, 64, "schedule.tile_rows is 64, but the backend");
  refused(&sy_grouped_gemm_options::stages, -3, "schedule.stages is -3");
  refused(&sy_grouped_gemm_options::paired, SY_YES, "schedule.paired is true");
  refused(&sy_grouped_gemm_options::paired, SY_NO, "schedule.paired is false");
  refused(&sy_grouped_gemm_options::paired, 3, "paired is 3; use SY_BY_RULE (0)");
  refused(&sy_grouped_gemm_options::paired, -1, "paired is -1");
  refused(&sy_grouped_gemm_options::band, 2, "schedule.band is 2");
  refused(&sy_grouped_gemm_options::splits, 4, "schedule.splits is 4");
  EXPECT_EQ(create(), SY_OK) << last_error().message;
}

// Callers that were compiled before there were schedules, and after what comes next.
TEST_F(GroupedGemm, OptionsOfOtherVersions) {
  struct Earlier {
    std::uint32_t struct_size = sizeof(Earlier);
    sy_device_type backend = SY_CPU;
    std::int32_t max_rows = 2, num_threads = 1, device = -1, reserved_sms = 0;
    sy_dtype compute = SY_DTYPE_NONE;
    std::uint32_t reserved = 0;
    // Other variables of theirs: would be a splits of 7.
    std::int32_t behind[5] = {7, 7, 7, 7, 7};
  };
  static_assert(offsetof(Earlier, behind) == offsetof(sy_grouped_gemm_options, tile_rows));
  static_assert(sizeof(Earlier) == offsetof(sy_grouped_gemm_options, reserved2));
  const auto create_with = [&](const void* options) {
    return sy_grouped_gemm_create(&spec_, static_cast<const sy_grouped_gemm_options*>(options),
                                  &gemm_);
  };
  Earlier earlier;
  earlier.struct_size = offsetof(Earlier, behind);
  ASSERT_EQ(create_with(&earlier), SY_OK) << last_error().message;
  EXPECT_EQ(run(), SY_CAPACITY_EXCEEDED);  // its max_rows was read
  ASSERT_EQ(sy_grouped_gemm_destroy(&gemm_), SY_OK);
  // With fields up to `stages`.
  earlier.struct_size = offsetof(sy_grouped_gemm_options, paired);
  expect_failed(create_with(&earlier), SY_INVALID_ARGUMENT, "schedule.tile_rows is 7");
  std::fill_n(earlier.behind, 2, 0);
  ASSERT_EQ(create_with(&earlier), SY_OK) << last_error().message;
  ASSERT_EQ(sy_grouped_gemm_destroy(&gemm_), SY_OK);
  earlier.struct_size = offsetof(Earlier, behind) - 4;
  expect_failed(create_with(&earlier), SY_INVALID_ARGUMENT,
                "sy_grouped_gemm_options.struct_size is 28");

  struct Later {
    sy_grouped_gemm_options known = SY_GROUPED_GEMM_OPTIONS_INIT;
    std::int32_t unknown = 0;
  } later;
  later.known.struct_size = sizeof(Later);
  ASSERT_EQ(create_with(&later), SY_OK) << last_error().message;
  ASSERT_EQ(sy_grouped_gemm_destroy(&gemm_), SY_OK);
  later.unknown = 1;
  EXPECT_EQ(create_with(&later), SY_UNSUPPORTED);
}

// Callers that were compiled before a call could tell what was chosen.
TEST_F(GroupedGemm, CallsOfAnEarlierVersion) {
  ASSERT_EQ(create(), SY_OK) << last_error().message;
  std::vector<std::int32_t> behind{7};
  call_.chosen = tensor(behind, SY_I32, {1});  // would be refused on the CPU
  call_.struct_size = offsetof(sy_grouped_gemm_call, chosen);
  EXPECT_EQ(run(), SY_OK) << last_error().message;
  call_.struct_size = sizeof(sy_grouped_gemm_call);
  expect_failed(run(), SY_INVALID_ARGUMENT, "chosen");
  call_.chosen.shape[0] = 2;
  EXPECT_EQ(run(), SY_SHAPE_MISMATCH);
}

TEST_F(GroupedGemm, TheCpuHasNoTable) {
  options_.table_file = "no_such.table.json";
  expect_failed(create(), SY_INVALID_FILE, "no_such.table.json");
}

TEST_F(GroupedGemm, RefusesWhatItCannotRun) {
  EXPECT_EQ(run(), SY_INVALID_ARGUMENT);  // no operator
  expect_refused([&] { call_.x.shape[1] = 2; }, SY_SHAPE_MISMATCH, "x is [3, 2]");
  expect_refused([&] { call_.x.strides[1] = 2; }, SY_INVALID_ARGUMENT, "x's columns are 2");
  expect_refused([&] { call_.x.ndim = 1; }, SY_SHAPE_MISMATCH, "x has 1 dimensions");
  expect_refused([&] { call_.x.shape[0] = 2; }, SY_SHAPE_MISMATCH, "x has 2 rows");
  expect_refused([&] { call_.ends.dtype = SY_F32; }, SY_DTYPE_MISMATCH, "i32 or i64");
  expect_refused([&] { call_.ends.strides[0] = 2; }, SY_INVALID_ARGUMENT, "contiguous");
  expect_refused([&] { call_.ends.ndim = 0; }, SY_SHAPE_MISMATCH, "ends has 0 dimensions");
  expect_refused([&] { call_.out.shape[0] = 2; }, SY_SHAPE_MISMATCH, "the output has 2 rows");
  expect_refused([&] { call_.out.shape[1] = 3; }, SY_SHAPE_MISMATCH, "[rows, 2]");
  expect_refused([&] { call_.out.strides[0] = 0; }, SY_INVALID_ARGUMENT, "stride 0");
  expect_refused([&] { call_.out.dtype = SY_I32; }, SY_DTYPE_MISMATCH, "output is i32");
  expect_refused([&] { call_.out.device_type = SY_CUDA; }, SY_INVALID_ARGUMENT, "CUDA memory");
  expect_refused([&] { call_.x_layout.kind = 4; }, SY_INVALID_ARGUMENT, "layout.kind is 4");
  expect_refused([&] { call_.out_layout.size = 4; }, SY_INVALID_ARGUMENT, "packed");
  expect_refused([&] { call_.index = call_.x; }, SY_SHAPE_MISMATCH, "index has 2 dimensions");
  expect_refused([&] { call_.out_index = tensor(x_, SY_F32, {3}); }, SY_DTYPE_MISMATCH, "i32");
  expect_refused([&] { call_.row_weights = tensor(ends_, SY_I32, {2}); }, SY_DTYPE_MISMATCH, "f32");
  expect_refused([&] { call_.products = call_.out; }, SY_INVALID_ARGUMENT, "no epilogue");
  expect_refused(
      [&] {
        call_.products = call_.out;
        call_.products.dtype = SY_BF16;
      },
      SY_DTYPE_MISMATCH, "one type for both");
  expect_refused(
      [&] {
        call_.x_scale = tensor(ends_, SY_I32, {2, 1});
      },
      SY_DTYPE_MISMATCH, "x_scale is i32");
  expect_refused([&] { call_.struct_size = 3; }, SY_INVALID_ARGUMENT, "struct_size is 3");
  expect_refused([&] { call_.stream = &call_; }, SY_INVALID_ARGUMENT, "stream");
}

TEST(Operators, PermuteAndUnpermute) {
  std::vector<std::int64_t> ids{1, 0, 1, 7, 1, 2};
  std::vector<std::int32_t> ends(3, -9), positions(6, -9), tokens(20, -9);
  const sy_row_layout blocked{SY_ROWS_BLOCKED, 0, 2};
  std::int64_t needed = 0, rows = 0;
  ASSERT_EQ(sy_rows_needed(&blocked, 3, 6, &needed), SY_OK);
  EXPECT_EQ(needed, 8);
  const sy_tensor i = tensor(ids, SY_I64, {3, 2}), e = tensor(ends, SY_I32, {3}),
                  p = tensor(positions, SY_I32, {3, 2});
  sy_tensor t = tensor(tokens, SY_I32, {9});
  ASSERT_EQ(sy_permute(&i, 3, &blocked, &e, &p, &t, &rows), SY_OK) << last_error().message;
  EXPECT_EQ(rows, 8);
  EXPECT_THAT(ends, ElementsAre(1, 4, 5));
  EXPECT_THAT(positions, ElementsAre(2, 0, 3, -1, 4, 6));
  tokens.resize(10);
  EXPECT_THAT(tokens, ElementsAre(0, -1, 0, 1, 2, -1, 2, -1, -1, -9));
  t.shape[0] = 7;
  expect_failed(sy_permute(&i, 3, &blocked, &e, &p, &t, &rows), SY_SHAPE_MISMATCH,
                "tokens is [7]; it must have at least 8");
  ASSERT_EQ(sy_permute(&i, 3, nullptr, &e, &p, nullptr, nullptr), SY_OK);
  EXPECT_THAT(positions, ElementsAre(1, 0, 2, -1, 3, 4));
  expect_failed(sy_permute(&i, 2, nullptr, &e, &p, nullptr, nullptr), SY_SHAPE_MISMATCH,
                "ends is [3]; it must have 2");
  EXPECT_EQ(sy_permute(nullptr, 2, nullptr, &e, &p, nullptr, nullptr), SY_INVALID_ARGUMENT);

  std::vector<float> values{1, 10, 2, 20, 3, 30, 4, 40, 5, 50}, weights{1, 2, 1, NAN, 3, 1};
  std::vector<float> out(6, 100.0f);
  const sy_tensor v = tensor(values, SY_F32, {5, 2}), w = tensor(weights, SY_F32, {3, 2});
  sy_tensor o = tensor(out, SY_F32, {3, 2});
  ASSERT_EQ(sy_unpermute(&v, &p, &w, 2, 0, &o), SY_OK) << last_error().message;
  EXPECT_THAT(out, ElementsAre(8, 80, 6, 60, 34, 340));
  ASSERT_EQ(sy_unpermute(&v, &p, nullptr, 1, 1, &o), SY_OK) << last_error().message;
  EXPECT_THAT(out, ElementsAre(11, 110, 9, 90, 43, 430));
  o.shape[0] = 2;
  expect_failed(sy_unpermute(&v, &p, nullptr, 1, 0, &o), SY_SHAPE_MISMATCH,
                "out is [2, 2]; it must be [3, 2]");
  EXPECT_EQ(sy_unpermute(&v, &i, nullptr, 1, 0, &o), SY_DTYPE_MISMATCH);
  EXPECT_EQ(sy_unpermute(&v, &p, nullptr, 1, 0, nullptr), SY_INVALID_ARGUMENT);
}

// On the host the calls with structs are those without.
TEST(Operators, CallsWithStructs) {
  std::vector<std::int64_t> ids{1, 0, 1, 7, 1, 2};
  std::vector<std::int32_t> ends(3, -9), positions(6, -9), tokens(9, -9), dropped(1, -9);
  sy_permute_call order = SY_PERMUTE_CALL_INIT;
  order.num_experts = 3;
  order.layout = {SY_ROWS_BLOCKED, 0, 2};
  order.ids = tensor(ids, SY_I64, {3, 2});
  order.ends = tensor(ends, SY_I32, {3});
  order.positions = tensor(positions, SY_I32, {3, 2});
  order.tokens = tensor(tokens, SY_I32, {9});
  order.dropped = tensor(dropped, SY_I32, {1});
  ASSERT_EQ(sy_permute_run(&order), SY_OK) << last_error().message;
  EXPECT_THAT(ends, ElementsAre(1, 4, 5));
  EXPECT_THAT(positions, ElementsAre(2, 0, 3, -1, 4, 6));
  EXPECT_THAT(tokens, ElementsAre(0, -1, 0, 1, 2, -1, 2, -1, -1));
  EXPECT_THAT(dropped, ElementsAre(0));
  order.stream = &order;
  expect_failed(sy_permute_run(&order), SY_INVALID_ARGUMENT, "stream");
  order.stream = nullptr;
  order.layout = {SY_ROWS_PADDED, 0, 2};
  expect_failed(sy_permute_run(&order), SY_INVALID_ARGUMENT, "expert 1 has 3 rows");
  std::uint64_t bytes = 0;
  ASSERT_EQ(sy_permute_workspace(100000, 64, &bytes), SY_OK);
  EXPECT_GT(bytes, 64u * 4);
  expect_failed(sy_permute_workspace(-1, 64, &bytes), SY_INVALID_ARGUMENT, "-1 slots");
  // Ids on a device, and the rest not.
  order.ids.device_type = SY_CUDA;
  expect_failed(sy_permute_run(&order), SY_INVALID_ARGUMENT, "ends is in host memory");

  std::vector<float> values{1, 10, 2, 20, 3, 30, 4, 40, 5, 50}, out(4, 100.0f);
  std::vector<std::int32_t> places{4, -1, 0, 1};
  sy_unpermute_call sum = SY_UNPERMUTE_CALL_INIT;
  sum.rows = tensor(values, SY_F32, {5, 2});
  sum.positions = tensor(places, SY_I32, {2, 2});
  sum.out = tensor(out, SY_F32, {2, 2});
  ASSERT_EQ(sy_unpermute_run(&sum), SY_OK) << last_error().message;
  EXPECT_THAT(out, ElementsAre(5, 50, 3, 30));
  sum.rows.device_type = SY_CUDA;
  EXPECT_EQ(sy_unpermute_run(&sum), SY_INVALID_ARGUMENT);

  std::vector<float> logits{1, 3, 2, 2, 0, 2}, weights(2);
  std::vector<std::int32_t> chosen(2);
  const sy_routing routing = SY_ROUTING_INIT;
  sy_topk_call choice = SY_TOPK_CALL_INIT;
  choice.top_k = 1;
  choice.routing = &routing;
  choice.logits = tensor(logits, SY_F32, {2, 3});
  choice.ids = tensor(chosen, SY_I32, {2, 1});
  choice.weights = tensor(weights, SY_F32, {2, 1});
  ASSERT_EQ(sy_topk_run(&choice), SY_OK) << last_error().message;
  EXPECT_THAT(chosen, ElementsAre(1, 0));
  choice.routing = nullptr;
  EXPECT_EQ(sy_topk_run(&choice), SY_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace switchyard::testing
