// Exchange on the CPU: what arrives, where, and what comes back.
#include "switchyard/exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "model/errors.h"
#include "support/exchange_checks.h"
#include "support/ranks.h"
#include "trace/clock.h"

namespace switchyard::testing {
namespace {

using ::testing::HasSubstr;

constexpr DType kFp8 = DType::kF8E4M3;

ExchangeSpec small_spec(int num_experts = 12, int top_k = 3, int max_tokens = 20) {
  return small_exchange<HostPlayer>(num_experts, top_k, max_tokens);
}

INSTANTIATE_TYPED_TEST_SUITE_P(OnCpu, ExchangeOf, HostPlayer);

class ExchangeShapes : public ::testing::TestWithParam<ExchangeShape> {};
TEST_P(ExchangeShapes, RowsArriveAndResultsComeBack) {
  for (const int threads : {1, 2})
    check_shape<HostPlayer>(GetParam(), 20, {.num_threads = threads});
}
INSTANTIATE_TEST_SUITE_P(Sizes, ExchangeShapes, ::testing::ValuesIn(exchange_shapes()));

TEST(Exchange, ScaleAccumulateStridesAndNoWeights) {
  ExchangeSpec spec = small_spec();
  const ExchangeBatch batch(spec, 2, DType::kBF16, 2, {7, 20});
  test::run_threads(HostPlayer::worlds(2), [&](World& world) {
    HostPlayer player(world, spec);
    player.load(batch);
    DispatchInput input = player.input();
    input.weights = {};
    player.made.dispatch(input, player.output(), player.handle);
    const ExchangeArrays& got = player.got();
    wrong_rows(batch, world.rank(), spec.layout, got, false);
    // Rows further apart, in a wider matrix.
    Matrix wide(got.capacity, 200, DType::kBF16);
    DispatchOutput output = player.output();
    output.rows = wide.row(0);
    output.row_stride = 200;
    player.made.dispatch(input, output, player.handle);
    for (std::int64_t r = 0; r < got.num_rows; ++r) {
      EXPECT_EQ(std::memcmp(wide.row(r), got.rows.view().row(r), 136 * 2), 0);
    }
    const Matrix y = results_of(batch, got);
    const Matrix before = Matrix::random(batch.count(world.rank()), spec.hidden, DType::kF32, 3);
    Matrix out = before;
    CombineOutput sums = output_of(out);
    sums.scale = -0.75f;
    sums.accumulate = true;
    player.made.combine({y.view()}, sums, player.handle);
    wrong_sums(batch, world.rank(), out, -0.75f, &before, false);
  });
}

TEST(Exchange, IdsAndWeightsOfOtherTypes) {
  const ExchangeSpec spec = small_spec();
  ExchangeBatch batch(spec, 2, DType::kBF16, 2, {9, 20});
  std::vector<std::vector<std::int32_t>> ids(2);
  std::vector<std::vector<std::uint16_t>> weights(2);
  for (std::size_t r = 0; r < 2; ++r) {
    ids[r].assign(batch.ids[r].begin(), batch.ids[r].end());
    for (float& weight : batch.weights[r]) {
      weights[r].push_back(f32_to_bf16(weight));
      weight = bf16_to_f32(weights[r].back());
    }
  }
  test::run_threads(HostPlayer::worlds(2), [&](World& world) {
    const auto r = static_cast<std::size_t>(world.rank());
    HostPlayer player(world, spec);
    player.load(batch);
    DispatchInput input = player.input();
    input.ids = ids[r];
    input.weights = {weights[r].data(), DType::kBF16, weights[r].size()};
    player.made.dispatch(input, player.output(), player.handle);
    wrong_rows(batch, world.rank(), spec.layout, player.got());
  });
}

// The rows that came, for a caller that allocates exactly; too little room is told, and the call
// can be made again.
TEST(Exchange, ExactAllocation) {
  for (const RowLayout& layout :
       {RowLayout::packed(), RowLayout::blocked(8), RowLayout::padded(0)}) {
    ExchangeSpec spec = small_spec();
    spec.layout = layout;
    const ExchangeBatch batch(spec, 3, DType::kBF16, 8, {20, 13, 20});
    test::run_threads(HostPlayer::worlds(3), [&](World& world) {
      HostPlayer player(world, spec);
      for (int i = 0; i < 3; ++i) {
        player.made.dispatch_send(input_of(batch, world.rank()), player.handle);
        const std::int64_t rows = player.rows_that_came();
        EXPECT_LE(rows, player.made.rows_needed());
        ExchangeArrays got = player.room(rows);
        DispatchOutput small = got.output();
        small.capacity = 1;
        EXPECT_ERROR(player.made.dispatch_recv(small, player.handle), kCapacityExceeded,
                     "room for 1");
        player.made.dispatch_recv(got.output(), player.handle);
        wrong_rows(batch, world.rank(), player.spec().layout, got);
        EXPECT_EQ(player.rows_that_came(), rows);
      }
    });
  }
}

// Sends wait for nobody: rank 0 works between send and receive, and its work ends before the
// other rank has sent anything.
TEST(Exchange, WorkBetweenSendAndReceive) {
  const ExchangeSpec spec = small_spec();
  const ExchangeBatch batch(spec, 2, DType::kBF16, 1, {20, 20});
  std::vector<World> worlds = HostPlayer::worlds(2);
  std::atomic<bool> worked{false};
  test::run_threads(worlds, [&](World& world) {
    HostPlayer player(world, spec, 1, {.num_threads = 1, .trace = true});
    player.load(batch);
    world.barrier();
    if (world.rank() == 1) {
      ASSERT_TRUE(test::eventually([&] { return worked.load(); }));
    }
    player.made.dispatch_send(player.input(), player.handle);
    const std::int64_t sent_ns = trace::now_ns();
    if (world.rank() == 0) worked = true;
    player.made.dispatch_recv(player.output(), player.handle);
    wrong_rows(batch, world.rank(), spec.layout, player.got());
    // All that was sent was sent before the work, and nothing was put in its place before.
    const PassTrace trace = player.made.trace();
    EXPECT_EQ(trace.rank, world.rank());
    EXPECT_EQ(trace.num_ranks, 2);
    int sends = 0, packs = 0;
    for (const TraceEvent& event : trace.events) {
      if (event.kind == TraceKind::kSend) {
        EXPECT_LE(event.end_ns, sent_ns);
        ++sends;
      }
      if (event.kind == TraceKind::kPack) {
        EXPECT_GE(event.begin_ns, sent_ns);
        packs += event.rows;
      }
    }
    EXPECT_EQ(sends, 2);
    EXPECT_EQ(packs, player.got().num_rows);
  });
}

// ------------------------------------------------------------------------------------ refusals

class BadExchange : public ::testing::Test {
 protected:
  void refuse_spec(ErrorCode code, const std::string& part,
                   const std::function<void(ExchangeSpec&)>& change) {
    ExchangeSpec spec = small_spec();
    change(spec);
    EXPECT_THAT(test::error_of(code, [&] { Exchange(World::single(), spec); }), HasSubstr(part));
  }
  // On rank 0 of two, of which the other never comes: nothing may wait for it.
  void refuse_call(ErrorCode code, const std::string& part,
                   const std::function<void(DispatchInput&)>& change) {
    ExchangeSpec spec = small_spec();
    spec.dispatch = wire;
    const ExchangeBatch batch(spec, 2, wire, 1, {20, 20});
    test::run_threads(HostPlayer::worlds(2), [&](World& world) {
      Exchange exchange(world, spec);
      if (world.rank() == 1) return;
      ExchangeHandle handle = exchange.make_handle();
      DispatchInput input = input_of(batch, 0);
      change(input);
      EXPECT_THAT(test::error_of(code, [&] { exchange.dispatch_send(input, handle); }),
                  HasSubstr(part));
      EXPECT_EQ(exchange.stats().dispatches, 0u);
      // It can be made anew.
      exchange.dispatch_send(input_of(batch, 0), handle);
    });
  }
  DType wire = DType::kBF16;
};

TEST_F(BadExchange, Spec) {
  const auto bad = ErrorCode::kInvalidArgument;
  refuse_spec(bad, "hidden is 0", [](ExchangeSpec& s) { s.hidden = 0; });
  refuse_spec(bad, "num_experts is 5000", [](ExchangeSpec& s) { s.num_experts = 5000; });
  refuse_spec(bad, "top_k is 33", [](ExchangeSpec& s) { s.top_k = 33; });
  refuse_spec(bad, "max_tokens is 0", [](ExchangeSpec& s) { s.max_tokens = 0; });
  refuse_spec(bad, "dispatch is i32", [](ExchangeSpec& s) { s.dispatch = DType::kI32; });
  refuse_spec(bad, "combine is f8_e4m3", [](ExchangeSpec& s) { s.combine = kFp8; });
  refuse_spec(bad, "pre_sum is set", [](ExchangeSpec& s) { s.pre_sum = true; });
  refuse_spec(bad, "blocked with size 0",
              [](ExchangeSpec& s) { s.layout = RowLayout::blocked(0); });
  refuse_spec(bad, "an i32 numbers up to", [](ExchangeSpec& s) {
    s.max_tokens = 1 << 26;
    s.top_k = 32;
    s.num_experts = 64;
  });
  refuse_spec(bad, "no place for expert 1", [](ExchangeSpec& s) { s.placement.expert_at = {0}; });
}

TEST_F(BadExchange, Options) {
  const auto refuse = [](const std::string& part, const std::function<void(ExchangeOptions&)>& f) {
    ExchangeOptions options;
    f(options);
    EXPECT_THAT(test::error_of(ErrorCode::kInvalidArgument,
                               [&] { Exchange(World::single(), small_spec(), options); }),
                HasSubstr(part));
  };
  refuse("num_threads is -1", [](ExchangeOptions& o) { o.num_threads = -1; });
  refuse("device is 0", [](ExchangeOptions& o) { o.device = 0; });
  refuse("max_sms is 4", [](ExchangeOptions& o) { o.max_sms = 4; });
  refuse("backend is 9", [](ExchangeOptions& o) { o.backend = static_cast<Backend>(9); });
}

TEST_F(BadExchange, RanksThatDisagree) {
  const auto differ = [](const std::string& part, const std::function<void(ExchangeSpec&)>& f) {
    test::run_threads(HostPlayer::worlds(2), [&](World& world) {
      ExchangeSpec spec = small_spec();
      spec.weights = CombineWeights::kNone;
      if (world.rank() == 1) f(spec);
      EXPECT_THAT(test::error_of(ErrorCode::kSpecMismatch, [&] { Exchange(world, spec); }),
                  HasSubstr(part));
    });
  };
  differ("hidden: ", [](ExchangeSpec& s) { s.hidden = 8; });
  differ("dispatch: ", [](ExchangeSpec& s) { s.dispatch = kFp8; });
  differ("layout: ", [](ExchangeSpec& s) { s.layout = RowLayout::blocked(2); });
  differ("weights: ", [](ExchangeSpec& s) { s.weights = CombineWeights::kBySender; });
  differ("pre_sum: ", [](ExchangeSpec& s) { s.pre_sum = true; });
  differ("large_ids_are_none: ", [](ExchangeSpec& s) { s.large_ids_are_none = true; });
  differ("placement: ", [](ExchangeSpec& s) {
    for (int e = 0; e < 12; ++e) s.placement.expert_at.push_back(e);
  });
}

TEST_F(BadExchange, MoreTokensThanDeclared) {
  const Matrix many(21, 136, DType::kBF16);
  const std::vector<std::int32_t> ids(63, -1);
  refuse_call(ErrorCode::kCapacityExceeded, "21 tokens on rank 0", [&](DispatchInput& in) {
    in.tokens = many.view();
    in.ids = ids;
    in.weights = {};
  });
}

TEST_F(BadExchange, Inputs) {
  const auto bad = ErrorCode::kInvalidArgument;
  const Matrix narrow(20, 64, DType::kBF16), f16(20, 136, DType::kF16);
  std::vector<std::int32_t> twice(60, -1);
  twice[4] = twice[5] = 7;
  refuse_call(ErrorCode::kShapeMismatch, "hidden size is 136",
              [&](DispatchInput& in) { in.tokens = narrow.view(); });
  refuse_call(ErrorCode::kDTypeMismatch, "tokens are f16, and travel as bf16",
              [&](DispatchInput& in) { in.tokens = f16.view(); });
  const std::vector<float> scales(20, 2.0f);
  refuse_call(ErrorCode::kDTypeMismatch, "tokens are bf16, which have no scales",
              [&](DispatchInput& in) {
                in.tokens.scale = scales.data();
                in.tokens.scale_rows = 1;
                in.tokens.scale_cols = 128;
                in.tokens.scale_stride = 1;
              });
  refuse_call(bad, "col_stride", [](DispatchInput& in) { in.tokens.col_stride = 2; });
  refuse_call(bad, "non-null", [](DispatchInput& in) { in.tokens.data = nullptr; });
  refuse_call(ErrorCode::kShapeMismatch, "ids have 59 elements",
              [&](DispatchInput& in) { in.ids = in.ids.first(59); });
  refuse_call(ErrorCode::kShapeMismatch, "ids have 0 elements",
              [&](DispatchInput& in) { in.ids = {}; });
  refuse_call(ErrorCode::kDTypeMismatch, "ids are f32",
              [](DispatchInput& in) { in.ids = in.weights; });
  refuse_call(ErrorCode::kShapeMismatch, "weights have 2 elements",
              [](DispatchInput& in) { in.weights = in.weights.first(2); });
  refuse_call(bad, "token 1 names expert 7 twice", [&](DispatchInput& in) { in.ids = twice; });
  refuse_call(bad, "a stream is given", [&](DispatchInput& in) { in.stream = &in; });
  refuse_call(bad, "no dispatch was received", [](DispatchInput& in) {
    in.reuse = true;
    in.ids = in.weights = {};
  });
  refuse_call(bad, "reuse is set, and ids", [](DispatchInput& in) { in.reuse = true; });
  wire = kFp8;
  refuse_call(bad, "the scale is null", [](DispatchInput& in) { in.tokens.scale = nullptr; });
  refuse_call(bad, "scale per 128 x 128", [](DispatchInput& in) { in.tokens.scale_rows = 128; });
  refuse_call(ErrorCode::kDTypeMismatch, "f8_e4m3 with scales of f8_e8m0",
              [](DispatchInput& in) { in.tokens.scale_dtype = DType::kF8E8M0; });
}

// The test `Refusals` has the outputs.
TEST_F(BadExchange, Turns) {
  const ExchangeSpec spec = small_spec();
  const ExchangeBatch batch(spec, 1, DType::kBF16, 1, {20});
  const World world = World::single();
  Exchange exchange(world, spec), other(world, spec);
  ExchangeHandle handle = exchange.make_handle(), second = exchange.make_handle(), empty;
  ExchangeArrays got(spec, exchange.own_places(), exchange.rows_needed());
  Matrix out(20, 136, DType::kF32);
  const auto bad = [](const std::string& part, const std::function<void()>& call,
                      ErrorCode code = ErrorCode::kInvalidArgument) {
    EXPECT_THAT(test::error_of(code, call), HasSubstr(part));
  };
  const DispatchInput input = input_of(batch, 0);
  bad("the handle is empty", [&] { exchange.dispatch_send(input, empty); });
  bad("of another exchange", [&] { other.dispatch_send(input, handle); });
  bad("no dispatch is on its way", [&] { exchange.dispatch_recv(got.output(), handle); });
  bad("no dispatch was received", [&] { exchange.combine_send({got.rows.view()}, handle); });
  bad("no combine is on its way", [&] { exchange.combine_recv(output_of(out), handle); });
  bad("no dispatch was received", [&] { exchange.rows_needed(handle); });

  exchange.dispatch_send(input, handle);
  bad("dispatch_send() before dispatch_recv()", [&] { exchange.dispatch_send(input, second); });
  bad("with another handle", [&] { exchange.dispatch_recv(got.output(), second); });
  exchange.dispatch_recv(got.output(), handle);
  wrong_rows(batch, 0, spec.layout, got);

  const Matrix y = results_of(batch, got), f32(4, 136, DType::kF32);
  bad(
      "rows are f32", [&] { exchange.combine_send({f32.view()}, handle); },
      ErrorCode::kDTypeMismatch);
  bad(
      "a result for each", [&] { exchange.combine_send({y.rows_from(0, 3)}, handle); },
      ErrorCode::kShapeMismatch);
  exchange.combine_send({y.view()}, handle);
  bad("combine_send() before combine_recv()", [&] { exchange.combine_send({y.view()}, handle); });
  bad("a combine with the handle is on its way", [&] { exchange.dispatch_send(input, handle); });
  exchange.dispatch(input, got.output(), second);  // another one may come between
  exchange.combine_recv(output_of(out), handle);
  wrong_sums(batch, 0, out);
  bad("records no trace", [&] { exchange.trace(); });

  {
    ExchangeHandle lost = exchange.make_handle();
    exchange.dispatch_send(input, lost);
  }
  bad("was destroyed", [&] { exchange.dispatch_send(input, handle); });
}

TEST_F(BadExchange, PaddedExpertWithoutRoom) {
  ExchangeSpec spec = small_spec(2, 1);
  spec.layout = RowLayout::padded(3);
  ExchangeBatch batch(spec, 1, DType::kBF16, 1, {4});
  batch.ids[0] = {1, 1, 1, 1};
  Exchange exchange(World::single(), spec);
  ExchangeHandle handle = exchange.make_handle();
  ExchangeArrays got(spec, exchange.own_places(), exchange.rows_needed());
  EXPECT_EQ(exchange.rows_needed(), 6);
  exchange.dispatch_send(input_of(batch, 0), handle);
  EXPECT_ERROR(exchange.dispatch_recv(got.output(), handle), kCapacityExceeded,
               "expert 1 got 4 rows");
}

}  // namespace
}  // namespace switchyard::testing
