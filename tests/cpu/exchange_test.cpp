// Exchange on the CPU: what arrives, where, and what comes back.
#include "switchyard/exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/exchanges.h"
#include "support/ranks.h"
#include "trace/clock.h"

namespace switchyard::testing {
namespace {

using ::testing::HasSubstr;

constexpr DType kFp8 = DType::kF8E4M3;

ExchangeSpec small_spec(int num_experts = 12, int top_k = 3, int max_tokens = 20) {
  ExchangeSpec spec;
  spec.hidden = 136;  // one group of scales, and a shorter one
  spec.num_experts = num_experts;
  spec.top_k = top_k;
  spec.max_tokens = max_tokens;
  return spec;
}

// One dispatch and combine of every rank, judged. Returns the combined outputs.
std::vector<Matrix> check_round_trip(const ExchangeBatch& batch, DType out_dtype = DType::kF32,
                                     int threads = 1) {
  std::vector<Matrix> outputs;
  for (int r = 0; r < batch.ranks; ++r) {
    outputs.emplace_back(batch.count(r), batch.spec.hidden, out_dtype);
  }
  std::vector<World> worlds = World::threads(batch.ranks, test::with_deadline(test::kGenerous));
  test::run_threads(worlds, [&](World& world) {
    ExchangeOptions options;
    options.num_threads = threads;
    Exchange exchange(world, batch.spec, options);
    ExchangeHandle handle = exchange.make_handle();
    ExchangeArrays got(exchange.spec(), exchange.own_places(), exchange.rows_needed());
    exchange.dispatch(input_of(batch, world.rank()), got.output(), handle);
    wrong_rows(batch, world.rank(), exchange.spec().layout, got);
    EXPECT_EQ(handle.tokens(), batch.count(world.rank()));
    EXPECT_EQ(exchange.stats().rows_received, got.num_rows);
    const Matrix y = results_of(batch, got);
    Matrix& out = outputs[static_cast<std::size_t>(world.rank())];
    exchange.combine({y.view()}, output_of(out), handle);
    wrong_sums(batch, world.rank(), out);
  });
  return outputs;
}

struct Shape {
  int ranks, num_experts, top_k, threads;
  RowLayout layout;
};
std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << s.ranks << " ranks of " << s.threads << ", " << s.num_experts << " experts, top-"
             << s.top_k << ", layout " << static_cast<int>(s.layout.kind) << " of "
             << s.layout.size;
}

class ExchangeShapes : public ::testing::TestWithParam<Shape> {};

TEST_P(ExchangeShapes, RowsArriveAndResultsComeBack) {
  const Shape& shape = GetParam();
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE(seed);
    ExchangeSpec spec = small_spec(shape.num_experts, shape.top_k);
    spec.layout = shape.layout;
    if (seed % 3 == 1) spec.weights = CombineWeights::kBySender;
    if (seed % 3 == 2) spec.weights = CombineWeights::kNone;
    spec.pre_sum = seed % 3 != 0 && seed > 3;
    spec.combine = seed % 2 == 0 ? DType::kBF16 : DType::kF32;
    spec.large_ids_are_none = seed % 2 == 0;
    check_round_trip(ExchangeBatch(spec, shape.ranks, DType::kBF16, seed), DType::kF32,
                     shape.threads);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, ExchangeShapes,
    ::testing::Values(
        Shape{1, 12, 3, 2, RowLayout::packed()}, Shape{1, 12, 3, 1, RowLayout::padded(0)},
        Shape{2, 12, 3, 2, RowLayout::packed()}, Shape{2, 13, 8, 1, RowLayout::blocked(16)},
        Shape{3, 12, 1, 1, RowLayout::blocked(7)}, Shape{3, 7, 7, 2, RowLayout::padded(0)},
        Shape{4, 12, 3, 1, RowLayout::packed()}, Shape{4, 64, 6, 1, RowLayout::padded(100)},
        Shape{4, 3, 2, 1, RowLayout::blocked(64)},  // a rank without experts
        Shape{8, 32, 8, 1, RowLayout::packed()}, Shape{8, 5, 3, 1, RowLayout::padded(0)},
        Shape{8, 20, 32, 1, RowLayout::blocked(1)}));

TEST(Exchange, AllTypesOfTokens) {
  const auto check = [](DType input, DType wire, DType result, DType out) {
    SCOPED_TRACE(::testing::Message() << to_string(input) << " as " << to_string(wire) << ", "
                                      << to_string(result) << " to " << to_string(out));
    ExchangeSpec spec = small_spec();
    spec.dispatch = wire;
    spec.combine = result;
    check_round_trip(ExchangeBatch(spec, 3, input, 5), out);
    spec.weights = CombineWeights::kBySender;
    spec.pre_sum = true;
    check_round_trip(ExchangeBatch(spec, 3, input, 6), out, 2);
  };
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    check(dtype, dtype, dtype, dtype);
    check(dtype, kFp8, DType::kBF16, dtype);
  }
  check(kFp8, kFp8, DType::kF16, DType::kBF16);
}

TEST(Exchange, NobodyHasTokens) {
  check_round_trip(ExchangeBatch(small_spec(), 4, DType::kBF16, 1, {0, 0, 0, 0}));
}
TEST(Exchange, OneRankHasTheMost) {
  check_round_trip(ExchangeBatch(small_spec(), 4, DType::kBF16, 1, {0, 20, 0, 1}));
}

// All tokens of all ranks for the experts of one rank: as full as it can be.
TEST(Exchange, OneRankReceivesAllThereCanBe) {
  for (const RowLayout& layout :
       {RowLayout::packed(), RowLayout::blocked(8), RowLayout::padded(0)}) {
    ExchangeSpec spec = small_spec(8, 2);
    spec.layout = layout;
    ExchangeBatch batch(spec, 4, DType::kBF16, 3, {20, 20, 20, 20});
    for (auto& ids : batch.ids) {
      for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i % 2 + 2);
    }
    check_round_trip(batch);
  }
}

// The sum is that of the cells in the order of k, wherever they come from.
TEST(Exchange, SameBitsOnAnyNumberOfRanks) {
  ExchangeSpec spec = small_spec(24, 5, 40);
  const ExchangeBatch one(spec, 1, DType::kBF16, 9, {40});
  const std::vector<Matrix> alone = check_round_trip(one, DType::kBF16);
  for (const int ranks : {2, 3, 8}) {
    ExchangeBatch batch = one;
    batch.ranks = ranks;
    for (int r = 1; r < ranks; ++r) {
      batch.tokens.emplace_back(0, spec.hidden, DType::kBF16);
      batch.ids.emplace_back();
      batch.weights.emplace_back();
    }
    EXPECT_TRUE(check_round_trip(batch, DType::kBF16)[0] == alone[0]) << ranks;
  }
}

TEST(Exchange, ExpertsInOtherPlaces) {
  ExchangeSpec spec = small_spec(6, 3);
  spec.placement.expert_at = {5, 4, 3, 2, 1, 0, 0, 3};  // two experts twice
  for (const int ranks : {1, 2, 4}) check_round_trip(ExchangeBatch(spec, ranks, DType::kBF16, 4));
}

TEST(Exchange, ScaleAccumulateStridesAndNoWeights) {
  ExchangeSpec spec = small_spec();
  const ExchangeBatch batch(spec, 2, DType::kBF16, 2, {7, 20});
  std::vector<World> worlds = World::threads(2, test::with_deadline(test::kGenerous));
  test::run_threads(worlds, [&](World& world) {
    Exchange exchange(world, spec);
    ExchangeHandle handle = exchange.make_handle();
    ExchangeArrays got(exchange.spec(), exchange.own_places(), exchange.rows_needed());
    DispatchInput input = input_of(batch, world.rank());
    input.weights = {};
    exchange.dispatch(input, got.output(), handle);
    wrong_rows(batch, world.rank(), spec.layout, got, false);
    // Rows further apart, in a wider matrix.
    Matrix wide(got.capacity, 200, DType::kBF16);
    DispatchOutput output = got.output();
    output.rows = wide.row(0);
    output.row_stride = 200;
    exchange.dispatch(input, output, handle);
    for (std::int64_t r = 0; r < got.num_rows; ++r) {
      EXPECT_EQ(std::memcmp(wide.row(r), got.rows.row(r), 136 * 2), 0);
    }
    const Matrix y = results_of(batch, got);
    const Matrix before = Matrix::random(batch.count(world.rank()), spec.hidden, DType::kF32, 3);
    Matrix out = before;
    CombineOutput sums = output_of(out);
    sums.scale = -0.75f;
    sums.accumulate = true;
    exchange.combine({y.view()}, sums, handle);
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
  std::vector<World> worlds = World::threads(2, test::with_deadline(test::kGenerous));
  test::run_threads(worlds, [&](World& world) {
    const auto r = static_cast<std::size_t>(world.rank());
    Exchange exchange(world, spec);
    ExchangeHandle handle = exchange.make_handle();
    ExchangeArrays got(exchange.spec(), exchange.own_places(), exchange.rows_needed());
    DispatchInput input = input_of(batch, world.rank());
    input.ids = ids[r];
    input.weights = {weights[r].data(), DType::kBF16, weights[r].size()};
    exchange.dispatch(input, got.output(), handle);
    wrong_rows(batch, world.rank(), spec.layout, got);
  });
}

// The layout of a dispatch again, for other tokens; results of two dispatches, in another order.
TEST(Exchange, HandlesAreUsedAgain) {
  for (const bool pre_sum : {false, true}) {
    ExchangeSpec spec = small_spec();
    spec.layout = RowLayout::blocked(4);
    spec.weights = CombineWeights::kBySender;
    spec.pre_sum = pre_sum;
    const ExchangeBatch a(spec, 3, DType::kBF16, 1, {11, 20, 0});
    const ExchangeBatch b(spec, 3, DType::kBF16, 2);
    const ExchangeBatch c(spec, 3, DType::kBF16, 3, {11, 20, 0});  // its tokens, with a's ids
    std::vector<World> worlds = World::threads(3, test::with_deadline(test::kGenerous));
    test::run_threads(worlds, [&](World& world) {
      Exchange exchange(world, spec);
      ExchangeHandle first = exchange.make_handle(), second = exchange.make_handle();
      EXPECT_FALSE(first.dispatched());
      const auto room = [&] {
        return ExchangeArrays(exchange.spec(), exchange.own_places(), exchange.rows_needed());
      };
      ExchangeArrays of_a = room(), of_b = room(), of_c = room();
      exchange.dispatch(input_of(a, world.rank()), of_a.output(), first);
      const std::uint64_t fresh_bytes = exchange.stats().dispatch_bytes;
      exchange.dispatch(input_of(b, world.rank()), of_b.output(), second);
      EXPECT_TRUE(first.dispatched());
      Matrix out_b(b.count(world.rank()), spec.hidden, DType::kF32);
      Matrix out_a(a.count(world.rank()), spec.hidden, DType::kF32);
      const Matrix y_b = results_of(b, of_b), y_a = results_of(a, of_a);
      exchange.combine({y_b.view()}, output_of(out_b), second);
      for (int i = 0; i < 3; ++i) {
        DispatchInput input;
        input.tokens = c.tokens[static_cast<std::size_t>(world.rank())].view();
        input.reuse = true;
        exchange.dispatch(input, of_c.output(), first);
        wrong_rows(a, world.rank(), spec.layout, of_c, true, &c);
        EXPECT_LE(exchange.stats().dispatch_bytes, fresh_bytes);
        EXPECT_EQ(exchange.rows_needed(first),
                  first_row_of(spec.layout, {of_a.counts.begin(), of_a.counts.end()},
                               of_a.counts.size()));
        exchange.combine({y_a.view()}, output_of(out_a), first);
        wrong_sums(a, world.rank(), out_a);
      }
      wrong_rows(a, world.rank(), spec.layout, of_a);
      wrong_rows(b, world.rank(), spec.layout, of_b);
      wrong_sums(b, world.rank(), out_b);
    });
  }
}

TEST(Exchange, RanksThatReuseDifferentHandlesAreTold) {
  const ExchangeSpec spec = small_spec();
  const ExchangeBatch batch(spec, 2, DType::kBF16, 1, {5, 6});
  for (const bool other_is_fresh : {true, false}) {
    std::vector<World> worlds = World::threads(2, test::with_deadline(test::kGenerous));
    test::run_threads(worlds, [&](World& world) {
      Exchange exchange(world, spec);
      ExchangeHandle handles[] = {exchange.make_handle(), exchange.make_handle()};
      ExchangeArrays got(exchange.spec(), exchange.own_places(), exchange.rows_needed());
      for (ExchangeHandle& handle : handles) {
        exchange.dispatch(input_of(batch, world.rank()), got.output(), handle);
      }
      DispatchInput input = input_of(batch, world.rank());
      if (world.rank() == 0 || !other_is_fresh) {
        input.ids = input.weights = {};
        input.reuse = true;
      }
      try {
        exchange.dispatch(input, got.output(), handles[world.rank()]);
        ADD_FAILURE() << "rank " << world.rank() << " noticed nothing";
      } catch (const Error& error) {
        const bool mismatch = error.code() == ErrorCode::kSpecMismatch;
        EXPECT_TRUE(mismatch || error.code() == ErrorCode::kAborted) << error.what();
        if (mismatch) {
          EXPECT_THAT(error.what(), HasSubstr("reuse handles of the same dispatch"));
        }
      }
      EXPECT_THROW(exchange.dispatch(input_of(batch, world.rank()), got.output(), handles[0]),
                   TimeoutError);
    });
  }
}

// The rows that came, for a caller that allocates exactly; too little room is told, and the call
// can be made again.
TEST(Exchange, ExactAllocation) {
  for (const RowLayout& layout :
       {RowLayout::packed(), RowLayout::blocked(8), RowLayout::padded(0)}) {
    ExchangeSpec spec = small_spec();
    spec.layout = layout;
    const ExchangeBatch batch(spec, 3, DType::kBF16, 8, {20, 13, 20});
    std::vector<World> worlds = World::threads(3, test::with_deadline(test::kGenerous));
    test::run_threads(worlds, [&](World& world) {
      Exchange exchange(world, spec);
      ExchangeHandle handle = exchange.make_handle();
      for (int i = 0; i < 3; ++i) {
        exchange.dispatch_send(input_of(batch, world.rank()), handle);
        const std::int64_t rows = exchange.rows_needed(handle);
        EXPECT_LE(rows, exchange.rows_needed());
        ExchangeArrays got(exchange.spec(), exchange.own_places(), rows);
        DispatchOutput small = got.output();
        small.capacity = 1;
        const std::string message = test::error_of(ErrorCode::kCapacityExceeded,
                                                   [&] { exchange.dispatch_recv(small, handle); });
        EXPECT_THAT(message, HasSubstr("room for 1"));
        exchange.dispatch_recv(got.output(), handle);
        wrong_rows(batch, world.rank(), exchange.spec().layout, got);
        EXPECT_EQ(exchange.rows_needed(handle), rows);
      }
    });
  }
}

// A token that has several experts on a rank crosses once; with pre_sum one result comes back.
TEST(Exchange, BytesThatCross) {
  ExchangeSpec spec = small_spec(8, 4);
  spec.weights = CombineWeights::kBySender;
  ExchangeBatch batch(spec, 2, DType::kBF16, 1, {10, 0});
  for (std::size_t i = 0; i < batch.ids[0].size(); ++i) {
    batch.ids[0][i] = static_cast<std::int64_t>(i % 4 + 4);  // all of rank 1
  }
  for (const bool pre_sum : {false, true}) {
    batch.spec.pre_sum = pre_sum;
    std::vector<World> worlds = World::threads(2, test::with_deadline(test::kGenerous));
    test::run_threads(worlds, [&](World& world) {
      Exchange exchange(world, batch.spec);
      ExchangeHandle handle = exchange.make_handle();
      ExchangeArrays got(exchange.spec(), exchange.own_places(), exchange.rows_needed());
      exchange.dispatch(input_of(batch, world.rank()), got.output(), handle);
      const Matrix y = results_of(batch, got);
      Matrix out(batch.count(world.rank()), spec.hidden, DType::kF32);
      exchange.combine({y.view()}, output_of(out), handle);
      wrong_sums(batch, world.rank(), out);
      const ExchangeStats& stats = exchange.stats();
      if (world.rank() == 0) {
        EXPECT_EQ(stats.tokens_sent, 10);
        EXPECT_EQ(stats.dispatch_bytes, 10u * 136 * 2 + 40u * 12);
        EXPECT_EQ(stats.combine_bytes, 0u);
      } else {
        EXPECT_EQ(stats.dispatch_bytes, 0u);
        EXPECT_EQ(stats.rows_received, 40);
        EXPECT_EQ(stats.rows_returned, pre_sum ? 10 : 40);
        EXPECT_EQ(stats.combine_bytes, (pre_sum ? 10u : 40u) * 136 * 2);
      }
    });
  }
}

// Sends wait for nobody: rank 0 works between send and receive, and its work ends before the
// other rank has sent anything.
TEST(Exchange, WorkBetweenSendAndReceive) {
  const ExchangeSpec spec = small_spec();
  const ExchangeBatch batch(spec, 2, DType::kBF16, 1, {20, 20});
  std::vector<World> worlds = World::threads(2, test::with_deadline(test::kGenerous));
  std::atomic<bool> worked{false};
  test::run_threads(worlds, [&](World& world) {
    ExchangeOptions options;
    options.trace = true;
    options.num_threads = 1;
    Exchange exchange(world, spec, options);
    ExchangeHandle handle = exchange.make_handle();
    ExchangeArrays got(exchange.spec(), exchange.own_places(), exchange.rows_needed());
    world.barrier();
    if (world.rank() == 1) {
      ASSERT_TRUE(test::eventually([&] { return worked.load(); }));
    }
    exchange.dispatch_send(input_of(batch, world.rank()), handle);
    const std::int64_t sent_ns = trace::now_ns();
    if (world.rank() == 0) worked = true;
    exchange.dispatch_recv(got.output(), handle);
    wrong_rows(batch, world.rank(), spec.layout, got);
    // All that was sent was sent before the work, and nothing was put in its place before.
    const PassTrace trace = exchange.trace();
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
    EXPECT_EQ(packs, got.num_rows);
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
    std::vector<World> worlds = World::threads(2, test::with_deadline(test::kGenerous));
    test::run_threads(worlds, [&](World& world) {
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
    std::vector<World> worlds = World::threads(2, test::with_deadline(test::kGenerous));
    test::run_threads(worlds, [&](World& world) {
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
  refuse_call(bad, "their scale is null", [](DispatchInput& in) { in.tokens.scale = nullptr; });
  refuse_call(bad, "scale per 128 x 128", [](DispatchInput& in) { in.tokens.scale_rows = 128; });
}

TEST_F(BadExchange, OutputsAndTurns) {
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
  const auto bad_output = [&](const std::string& part,
                              const std::function<void(DispatchOutput&)>& f) {
    DispatchOutput output = got.output();
    f(output);
    bad(part, [&] { exchange.dispatch_recv(output, handle); });
  };
  bad_output("capacity is -1", [](DispatchOutput& o) { o.capacity = -1; });
  bad_output("rows are null", [](DispatchOutput& o) { o.rows = nullptr; });
  bad_output("row_stride is 135", [](DispatchOutput& o) { o.row_stride = 135; });
  bad_output("has scales", [](DispatchOutput& o) { o.scales = o.weights; });
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
  CombineOutput output = output_of(out);
  output.scale = NAN;
  bad("scale is nan", [&] { exchange.combine_recv(output, handle); });
  output = output_of(out);
  output.data = nullptr;
  bad("the output is null", [&] { exchange.combine_recv(output, handle); });
  output = output_of(out);
  output.dtype = DType::kI64;
  bad(
      "the output is i64", [&] { exchange.combine_recv(output, handle); },
      ErrorCode::kDTypeMismatch);
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
  EXPECT_THAT(test::error_of(ErrorCode::kCapacityExceeded,
                             [&] { exchange.dispatch_recv(got.output(), handle); }),
              HasSubstr("expert 1 got 4 rows"));
}

}  // namespace
}  // namespace switchyard::testing
