// The exchange of the C interface: tensors, absent ones, struct sizes and refusals. What it does
// is tested in C++ and Python.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "c_api/calls.h"
#include "switchyard/c.h"

namespace switchyard::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// One rank with three experts, H 2, top-2, and two tokens.
class Exchange : public ::testing::Test {
 protected:
  Exchange() {
    EXPECT_EQ(sy_world_single(nullptr, &world_), SY_OK);
    spec_.hidden = 2;
    spec_.num_experts = 3;
    spec_.top_k = 2;
    spec_.max_tokens = 4;
    spec_.dispatch = spec_.combine = SY_F32;
    input_.x = tensor(x_, SY_F32, {2, 2});
    input_.ids = tensor(ids_, SY_I64, {2, 2});
    input_.weights = tensor(weights_, SY_F32, {2, 2});
    output_.rows = tensor(rows_, SY_F32, {4, 2});
    output_.ends = tensor(ends_, SY_I32, {3});
    output_.counts = tensor(counts_, SY_I32, {3});
    output_.num_rows = tensor(num_rows_, SY_I32, {1});
    output_.origins = tensor(origins_, SY_I32, {4, 3});
    output_.weights = tensor(row_weights_, SY_F32, {4});
    results_.rows = tensor(rows_, SY_F32, {4, 2});
    sums_.out = tensor(out_, SY_F32, {2, 2});
  }
  ~Exchange() override {
    for (int twice = 0; twice < 2; ++twice) {
      EXPECT_EQ(sy_exchange_destroy(&exchange_), SY_OK);
      EXPECT_EQ(sy_exchange_handle_destroy(&handle_), SY_OK);
    }
    EXPECT_EQ(sy_world_destroy(&world_), SY_OK);
  }
  void create() {
    ASSERT_EQ(sy_exchange_create(world_, &spec_, &options_, &exchange_), SY_OK)
        << last_error().message;
    ASSERT_EQ(sy_exchange_handle_create(exchange_, &handle_), SY_OK) << last_error().message;
  }
  sy_status dispatch() { return sy_exchange_dispatch(exchange_, &input_, &output_, handle_); }
  sy_status dispatch_in_two_calls() {
    const sy_status sent = sy_exchange_dispatch_send(exchange_, &input_, handle_);
    return sent != SY_OK ? sent : sy_exchange_dispatch_recv(exchange_, &output_, handle_);
  }
  sy_status combine() { return sy_exchange_combine(exchange_, &results_, &sums_, handle_); }

  std::vector<float> x_{1, 2, 3, 4}, weights_{10, 20, 30, 40}, rows_ = std::vector<float>(8, -1.0f);
  std::vector<std::int64_t> ids_{2, 0, 0, -1};
  std::vector<std::int32_t> ends_ = std::vector<std::int32_t>(3, -1), counts_ = ends_,
                            num_rows_ = {-1}, origins_ = std::vector<std::int32_t>(12, -1);
  std::vector<float> row_weights_ = std::vector<float>(4, -1.0f),
                     out_ = std::vector<float>(4, -1.0f);
  sy_exchange_spec spec_ = SY_EXCHANGE_SPEC_INIT;
  sy_exchange_options options_ = SY_EXCHANGE_OPTIONS_INIT;
  sy_dispatch_input input_ = SY_DISPATCH_INPUT_INIT;
  sy_dispatch_output output_ = SY_DISPATCH_OUTPUT_INIT;
  sy_combine_input results_ = SY_COMBINE_INPUT_INIT;
  sy_combine_output sums_ = SY_COMBINE_OUTPUT_INIT;
  sy_world* world_ = nullptr;
  sy_exchange* exchange_ = nullptr;
  sy_exchange_handle* handle_ = nullptr;
};

TEST_F(Exchange, ThereAndBack) {
  create();
  ASSERT_EQ(dispatch(), SY_OK) << last_error().message;
  EXPECT_THAT(rows_, ElementsAre(1, 2, 3, 4, 1, 2, -1, -1));
  EXPECT_THAT(ends_, ElementsAre(2, 2, 3));
  EXPECT_THAT(counts_, ElementsAre(2, 0, 1));
  EXPECT_THAT(num_rows_, ElementsAre(3));
  EXPECT_THAT(origins_, ElementsAre(0, 0, 1, 0, 1, 0, 0, 0, 0, -1, -1, -1));
  EXPECT_THAT(row_weights_, ElementsAre(20, 30, 10, -1));
  ASSERT_EQ(combine(), SY_OK) << last_error().message;
  EXPECT_THAT(out_, ElementsAre(30, 60, 90, 120));
  sums_.scale = 0.5f;
  sums_.accumulate = 1;
  ASSERT_EQ(combine(), SY_OK) << last_error().message;
  EXPECT_THAT(out_, ElementsAre(45, 90, 135, 180));

  std::int64_t rows = -1;
  ASSERT_EQ(sy_exchange_rows_needed(exchange_, handle_, nullptr, &rows), SY_OK);
  EXPECT_EQ(rows, 3);
  sy_exchange_stats stats = SY_EXCHANGE_STATS_INIT;
  ASSERT_EQ(sy_exchange_get_stats(exchange_, &stats), SY_OK);
  EXPECT_EQ(stats.dispatches, 1u);
  EXPECT_EQ(stats.combines, 2u);
  EXPECT_EQ(stats.tokens, 2);
  EXPECT_EQ(stats.rows_received, 3);
  EXPECT_EQ(stats.dispatch_bytes, 0u);
  EXPECT_GT(stats.heap_bytes_reserved, 0u);
  EXPECT_EQ(sy_exchange_check(exchange_), SY_OK);

  // The handle again, and nothing but the rows.
  input_.reuse = 1;
  input_.ids = input_.weights = {};
  x_ = {5, 6, 7, 8};
  const sy_tensor into = output_.rows;
  output_ = SY_DISPATCH_OUTPUT_INIT;
  output_.rows = into;
  ASSERT_EQ(dispatch_in_two_calls(), SY_OK) << last_error().message;
  EXPECT_THAT(rows_, ElementsAre(5, 6, 7, 8, 5, 6, -1, -1));
}

TEST_F(Exchange, TellsWhatItIs) {
  spec_.layout = {SY_ROWS_PADDED, 0, 0};
  options_.num_threads = 2;
  create();
  sy_exchange_info info = SY_EXCHANGE_INFO_INIT;
  ASSERT_EQ(sy_exchange_get_info(exchange_, &info), SY_OK);
  EXPECT_EQ(info.backend, SY_CPU);
  EXPECT_EQ(info.num_threads, 2);
  EXPECT_EQ(info.own_begin, 0);
  EXPECT_EQ(info.own_end, 3);
  EXPECT_EQ(info.layout.kind, SY_ROWS_PADDED);
  EXPECT_EQ(info.layout.size, 4);
  EXPECT_EQ(info.rows_needed, 12);
  info.struct_size = 4;
  EXPECT_EQ(sy_exchange_get_info(exchange_, &info), SY_INVALID_ARGUMENT);
}

TEST_F(Exchange, Traces) {
  create();
  std::uint64_t size = 0;
  EXPECT_EQ(sy_exchange_trace(exchange_, nullptr, &size), SY_INVALID_ARGUMENT);
  EXPECT_EQ(sy_exchange_destroy(&exchange_), SY_OK);
  EXPECT_EQ(sy_exchange_handle_destroy(&handle_), SY_OK);
  options_.trace = 1;
  create();
  ASSERT_EQ(dispatch(), SY_OK) << last_error().message;
  ASSERT_EQ(sy_exchange_trace(exchange_, nullptr, &size), SY_OK) << last_error().message;
  std::vector<char> text(size, 'x');
  ASSERT_EQ(sy_exchange_trace(exchange_, text.data(), &size), SY_OK);
  EXPECT_THAT(std::string(text.data()), HasSubstr("exchange of 3 experts"));
}

TEST_F(Exchange, RefusesWhatItCannotBeMadeOf) {
  const auto refused = [&](sy_status status, const char* text, const std::function<void()>& spoil) {
    const sy_exchange_spec good = spec_;
    const sy_exchange_options good_options = options_;
    spoil();
    EXPECT_EQ(sy_exchange_create(world_, &spec_, &options_, &exchange_), status);
    EXPECT_EQ(exchange_, nullptr);
    EXPECT_THAT(last_error().message, HasSubstr(text));
    spec_ = good;
    options_ = good_options;
  };
  refused(SY_INVALID_ARGUMENT, "top_k is 0", [&] { spec_.top_k = 0; });
  refused(SY_INVALID_ARGUMENT, "weights is 7", [&] { spec_.weights = 7; });
  refused(SY_DTYPE_MISMATCH, "dispatch", [&] { spec_.dispatch = 77; });
  refused(SY_INVALID_ARGUMENT, "backend", [&] { options_.backend = 9; });
  refused(SY_INVALID_ARGUMENT, "struct_size", [&] { spec_.struct_size = 8; });
  refused(SY_INVALID_ARGUMENT, "deadline is -1 s", [&] { options_.deadline_seconds = -1; });
  std::vector<std::int32_t> places{0, 1};
  refused(SY_INVALID_ARGUMENT, "no place for expert 2",
          [&] { spec_.placement = tensor(places, SY_I32, {2}); });
  EXPECT_EQ(sy_exchange_create(nullptr, &spec_, nullptr, &exchange_), SY_INVALID_ARGUMENT);
  EXPECT_EQ(sy_exchange_handle_create(nullptr, &handle_), SY_INVALID_ARGUMENT);
}

TEST_F(Exchange, LargeIdsAreErrorsUnlessTheyMayMeanNone) {
  ids_[3] = 3;
  // As of a caller that knows no such field.
  spec_.struct_size = offsetof(sy_exchange_spec, large_ids_are_none);
  create();
  expect_failed(dispatch(), SY_INVALID_ARGUMENT, "ids[1][1] is 3; expert ids are 0 to 2");
  EXPECT_EQ(sy_exchange_destroy(&exchange_), SY_OK);
  EXPECT_EQ(sy_exchange_handle_destroy(&handle_), SY_OK);
  spec_.struct_size = sizeof spec_;
  spec_.large_ids_are_none = 1;
  create();
  ASSERT_EQ(dispatch(), SY_OK) << last_error().message;
  EXPECT_THAT(counts_, ElementsAre(2, 0, 1));
}

TEST_F(Exchange, RefusesCalls) {
  create();
  const auto refused_input = [&](sy_status status, const char* text,
                                 const std::function<void()>& spoil) {
    const sy_dispatch_input good = input_;
    spoil();
    expect_failed(sy_exchange_dispatch_send(exchange_, &input_, handle_), status, text);
    input_ = good;
  };
  std::vector<float> more(12);
  refused_input(SY_SHAPE_MISMATCH, "x is [2, 3]; it must be [rows, 2]", [&] {
    input_.x = tensor(more, SY_F32, {2, 3});
  });
  refused_input(SY_SHAPE_MISMATCH, "ids is [1, 2]; 2 tokens need [2, 2]", [&] {
    input_.ids = tensor(ids_, SY_I64, {1, 2});
  });
  refused_input(SY_DTYPE_MISMATCH, "ids", [&] { input_.ids.dtype = SY_F32; });
  refused_input(SY_INVALID_ARGUMENT, "x", [&] { input_.x.device_type = SY_CUDA; });
  refused_input(SY_INVALID_ARGUMENT, "contiguous", [&] { input_.x.strides[1] = 2; });
  refused_input(SY_CAPACITY_EXCEEDED, "5 tokens", [&] {
    input_.x = tensor(more, SY_F32, {5, 2});
    std::vector<std::int64_t> none(10, -1);
    ids_ = none;
    input_.ids = tensor(ids_, SY_I64, {5, 2});
    input_.weights = {};
  });
  ids_ = {2, 0, 0, -1};
  input_.ids = tensor(ids_, SY_I64, {2, 2});

  ASSERT_EQ(sy_exchange_dispatch_send(exchange_, &input_, handle_), SY_OK) << last_error().message;
  const auto refused_output = [&](sy_status status, const char* text,
                                  const std::function<void()>& spoil) {
    const sy_dispatch_output good = output_;
    spoil();
    expect_failed(sy_exchange_dispatch_recv(exchange_, &output_, handle_), status, text);
    output_ = good;
  };
  refused_output(SY_DTYPE_MISMATCH, "rows are bf16", [&] { output_.rows.dtype = SY_BF16; });
  refused_output(SY_SHAPE_MISMATCH, "ends is [2]; it must have 3",
                 [&] { output_.ends = tensor(ends_, SY_I32, {2}); });
  refused_output(SY_SHAPE_MISMATCH, "origins is [3, 3]", [&] {
    output_.origins = tensor(origins_, SY_I32, {3, 3});
  });
  refused_output(SY_SHAPE_MISMATCH, "at least 4 elements",
                 [&] { output_.weights = tensor(row_weights_, SY_F32, {3}); });
  refused_output(SY_INVALID_ARGUMENT, "stride 0", [&] { output_.rows.strides[0] = 0; });
  refused_output(SY_CAPACITY_EXCEEDED, "room for 2", [&] {
    output_.rows = tensor(rows_, SY_F32, {2, 2});
  });
  ASSERT_EQ(sy_exchange_dispatch_recv(exchange_, &output_, handle_), SY_OK) << last_error().message;
  sums_.out = tensor(out_, SY_F32, {1, 2});
  expect_failed(combine(), SY_SHAPE_MISMATCH, "out is [1, 2]; it must be [2, 2]");
  sums_.out = tensor(out_, SY_F32, {2, 2});
  // Nothing was sent.
  ASSERT_EQ(combine(), SY_OK) << last_error().message;
  EXPECT_THAT(out_, ElementsAre(30, 60, 90, 120));
  EXPECT_EQ(sy_exchange_combine(exchange_, &results_, nullptr, handle_), SY_INVALID_ARGUMENT);
  // In two calls a sum that is refused can be asked for again.
  ASSERT_EQ(sy_exchange_combine_send(exchange_, &results_, handle_), SY_OK);
  sums_.out = tensor(out_, SY_F32, {1, 2});
  EXPECT_EQ(sy_exchange_combine_recv(exchange_, &sums_, handle_), SY_SHAPE_MISMATCH);
  sums_.out = tensor(out_, SY_F32, {2, 2});
  ASSERT_EQ(sy_exchange_combine_recv(exchange_, &sums_, handle_), SY_OK) << last_error().message;
  EXPECT_EQ(sy_exchange_dispatch_send(exchange_, nullptr, handle_), SY_INVALID_ARGUMENT);
  EXPECT_EQ(sy_exchange_dispatch_send(exchange_, &input_, nullptr), SY_INVALID_ARGUMENT);
}

// Rank 1 never comes. What rank 0's thread waits in is ended meanwhile, as by a program that ends.
TEST(HandlesInUse, AreLeftBehind) {
  sy_world_options patient = SY_WORLD_OPTIONS_INIT;
  patient.deadline_seconds = 0.5;
  sy_world* worlds[2] = {};
  ASSERT_EQ(sy_world_threads(2, &patient, worlds), SY_OK);
  sy_exchange_spec spec = SY_EXCHANGE_SPEC_INIT;
  spec.hidden = 2;
  spec.num_experts = 2;
  spec.top_k = 1;
  spec.max_tokens = 1;
  spec.dispatch = spec.combine = SY_F32;
  sy_exchange* exchanges[2] = {};
  std::thread other(
      [&] { EXPECT_EQ(sy_exchange_create(worlds[1], &spec, nullptr, &exchanges[1]), SY_OK); });
  ASSERT_EQ(sy_exchange_create(worlds[0], &spec, nullptr, &exchanges[0]), SY_OK);
  other.join();
  sy_exchange_handle* handle = nullptr;
  ASSERT_EQ(sy_exchange_handle_create(exchanges[0], &handle), SY_OK);
  std::atomic<bool> sent{false};
  std::thread waits([&sent, exchange = exchanges[0], its = handle] {
    std::vector<float> x{1, 2}, rows(4);
    std::vector<std::int32_t> ids{0};
    sy_dispatch_input input = SY_DISPATCH_INPUT_INIT;
    input.x = tensor(x, SY_F32, {1, 2});
    input.ids = tensor(ids, SY_I32, {1, 1});
    sy_dispatch_output output = SY_DISPATCH_OUTPUT_INIT;
    output.rows = tensor(rows, SY_F32, {2, 2});
    EXPECT_EQ(sy_exchange_dispatch_send(exchange, &input, its), SY_OK) << last_error().message;
    sent = true;
    EXPECT_EQ(sy_exchange_dispatch_recv(exchange, &output, its), SY_TIMEOUT);
  });
  while (!sent) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(sy_exchange_handle_destroy(&handle), SY_OK);
  EXPECT_EQ(sy_exchange_destroy(&exchanges[0]), SY_OK);
  EXPECT_EQ(exchanges[0], nullptr);
  waits.join();
  EXPECT_EQ(sy_exchange_destroy(&exchanges[1]), SY_OK);
  for (sy_world*& world : worlds) EXPECT_EQ(sy_world_destroy(&world), SY_OK);
}

}  // namespace
}  // namespace switchyard::testing
