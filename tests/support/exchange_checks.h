// A typed suite of tests that exchanges of both backends pass, over a HostPlayer or a Player.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ostream>
#include <vector>

#include "support/exchanges.h"

namespace switchyard::testing {

template <typename Player>
ExchangeSpec small_exchange(int num_experts = 12, int top_k = 3, int max_tokens = 20) {
  return {.hidden = Player::kHidden,
          .num_experts = num_experts,
          .top_k = top_k,
          .max_tokens = max_tokens};
}

// One dispatch and combine of every rank, judged. Returns the combined outputs.
template <typename Player>
std::vector<Matrix> check_round_trip(const ExchangeBatch& batch, DType dtype = DType::kF32,
                                     const ExchangeOptions& options = {}) {
  std::vector<Matrix> sums(static_cast<std::size_t>(batch.ranks), Matrix(0, 1, dtype));
  test::run_threads(Player::worlds(batch.ranks), [&](World& world) {
    Player player(world, batch.spec, 1, options);
    sums[static_cast<std::size_t>(world.rank())] = player.round(batch, dtype);
    EXPECT_EQ(player.handle.tokens(), batch.count(world.rank()));
    EXPECT_EQ(player.exchange().stats().rows_received, player.got().num_rows);
  });
  return sums;
}

struct ExchangeShape {
  int ranks, num_experts, top_k;
  RowLayout layout;
};
inline std::ostream& operator<<(std::ostream& out, const ExchangeShape& s) {
  return out << s.ranks << " ranks, " << s.num_experts << " experts, top-" << s.top_k << ", layout "
             << static_cast<int>(s.layout.kind) << " of " << s.layout.size;
}

inline std::vector<ExchangeShape> exchange_shapes() {
  return {{1, 12, 3, RowLayout::packed()},   {1, 12, 3, RowLayout::padded(0)},
          {2, 12, 3, RowLayout::packed()},   {2, 13, 8, RowLayout::blocked(16)},
          {3, 12, 1, RowLayout::blocked(7)}, {3, 7, 7, RowLayout::padded(0)},
          {4, 12, 3, RowLayout::packed()},   {4, 64, 6, RowLayout::padded(100)},
          {4, 3, 2, RowLayout::blocked(64)},  // a rank without experts
          {8, 32, 8, RowLayout::packed()},   {8, 5, 3, RowLayout::padded(0)},
          {8, 20, 32, RowLayout::blocked(1)}};
}

// Batches of a shape, with every way to weigh and sum. The last has `most` tokens on a rank at
// most.
template <typename Player>
void check_shape(const ExchangeShape& shape, int most, const ExchangeOptions& options = {}) {
  for (std::uint64_t seed = 1; seed <= 6 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    ExchangeSpec spec =
        small_exchange<Player>(shape.num_experts, shape.top_k, seed == 6 ? most : 20);
    spec.layout = shape.layout;
    if (spec.max_tokens > 20 && spec.layout.kind == RowLayout::Kind::kPadded) spec.layout.size = 0;
    if (seed % 3 == 1) spec.weights = CombineWeights::kBySender;
    if (seed % 3 == 2) spec.weights = CombineWeights::kNone;
    spec.pre_sum = seed % 3 != 0 && seed > 3;
    spec.combine = seed % 2 == 0 ? DType::kBF16 : DType::kF32;
    spec.large_ids_are_none = seed % 2 == 0;
    check_round_trip<Player>(ExchangeBatch(spec, shape.ranks, DType::kBF16, seed), DType::kF32,
                             options);
  }
}

template <typename Player>
class ExchangeOf : public Player::Fixture {};
TYPED_TEST_SUITE_P(ExchangeOf);

TYPED_TEST_P(ExchangeOf, AllTypesOfTokens) {
  const auto check = [](DType input, DType wire, DType result, DType out) {
    SCOPED_TRACE(::testing::Message() << to_string(input) << " as " << to_string(wire) << ", "
                                      << to_string(result) << " to " << to_string(out));
    ExchangeSpec spec = small_exchange<TypeParam>();
    spec.dispatch = wire;
    spec.combine = result;
    check_round_trip<TypeParam>(ExchangeBatch(spec, 3, input, 5), out);
    spec.hidden = 1040;  // more than one step of a warp
    spec.weights = CombineWeights::kBySender;
    spec.pre_sum = true;
    check_round_trip<TypeParam>(ExchangeBatch(spec, 3, input, 6), out);
  };
  constexpr DType kFp8 = DType::kF8E4M3;
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    check(dtype, dtype, dtype, dtype);
    check(dtype, kFp8, DType::kBF16, dtype);
  }
  check(kFp8, kFp8, DType::kF16, DType::kBF16);
}

TYPED_TEST_P(ExchangeOf, RanksWithoutTokens) {
  const ExchangeSpec spec = small_exchange<TypeParam>();
  check_round_trip<TypeParam>(ExchangeBatch(spec, 4, DType::kBF16, 1, {0, 0, 0, 0}));
  check_round_trip<TypeParam>(ExchangeBatch(spec, 4, DType::kBF16, 1, {0, 20, 0, 1}));
}

// All tokens of all ranks for the experts of one rank: as full as it can be.
TYPED_TEST_P(ExchangeOf, OneRankReceivesAllThereCanBe) {
  for (const RowLayout& layout :
       {RowLayout::packed(), RowLayout::blocked(8), RowLayout::padded(0)}) {
    ExchangeSpec spec = small_exchange<TypeParam>(8, 2);
    spec.layout = layout;
    ExchangeBatch batch(spec, 4, DType::kBF16, 3, {20, 20, 20, 20});
    for (auto& ids : batch.ids) {
      for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i % 2 + 2);
    }
    check_round_trip<TypeParam>(batch);
  }
}

// The sum is that of the cells in the order of k, wherever they come from.
TYPED_TEST_P(ExchangeOf, SameBitsOnAnyNumberOfRanks) {
  const ExchangeSpec spec = small_exchange<TypeParam>(24, 5, 40);
  const ExchangeBatch one(spec, 1, DType::kBF16, 9, {40});
  const std::vector<Matrix> alone = check_round_trip<TypeParam>(one, DType::kBF16);
  for (const int ranks : {2, 3, 8}) {
    ExchangeBatch batch = one;
    batch.ranks = ranks;
    for (int r = 1; r < ranks; ++r) {
      batch.tokens.emplace_back(0, spec.hidden, DType::kBF16);
      batch.ids.emplace_back();
      batch.weights.emplace_back();
    }
    EXPECT_TRUE(check_round_trip<TypeParam>(batch, DType::kBF16)[0] == alone[0]) << ranks;
  }
}

TYPED_TEST_P(ExchangeOf, ExpertsInOtherPlaces) {
  ExchangeSpec spec = small_exchange<TypeParam>(6, 3);
  spec.placement.expert_at = {5, 4, 3, 2, 1, 0, 0, 3};  // two experts twice
  for (const int ranks : {1, 2, 4}) {
    check_round_trip<TypeParam>(ExchangeBatch(spec, ranks, DType::kBF16, 4));
  }
}

// The layout of a dispatch again, for other tokens; results of two dispatches, in another order.
TYPED_TEST_P(ExchangeOf, HandlesAreUsedAgain) {
  for (const bool pre_sum : {false, true}) {
    ExchangeSpec spec = small_exchange<TypeParam>();
    spec.layout = RowLayout::blocked(4);
    spec.weights = CombineWeights::kBySender;
    spec.pre_sum = pre_sum;
    const ExchangeBatch a(spec, 3, DType::kBF16, 1, {11, 20, 0});
    const ExchangeBatch b(spec, 3, DType::kBF16, 2);
    const ExchangeBatch c(spec, 3, DType::kBF16, 3, {11, 20, 0});  // its tokens, with a's ids
    test::run_threads(TypeParam::worlds(3), [&](World& world) {
      TypeParam player(world, spec, 3);
      ExchangeHandle second = player.exchange().make_handle();
      EXPECT_FALSE(player.handle.dispatched());
      world.barrier();
      player.load(a, 0);
      player.enqueue_dispatch(0);
      const ExchangeArrays of_a = player.got(0);
      player.upload_results(a, of_a, 0);
      const std::uint64_t fresh_bytes = player.exchange().stats().dispatch_bytes;
      std::swap(player.handle, second);
      player.round(b, DType::kF32, 1);
      std::swap(player.handle, second);
      EXPECT_TRUE(player.handle.dispatched());
      for (int i = 0; i < 3; ++i) {
        player.load(c, 2);
        DispatchInput input = player.input(2);
        input.ids = input.weights = {};
        input.reuse = true;
        player.exchange().dispatch(input, player.output(2), player.handle);
        wrong_rows(a, world.rank(), spec.layout, player.got(2), true, &c);
        EXPECT_LE(player.exchange().stats().dispatch_bytes, fresh_bytes);
        EXPECT_EQ(player.rows_that_came(),
                  first_row_of(spec.layout, {of_a.counts.begin(), of_a.counts.end()},
                               of_a.counts.size()));
        player.enqueue_combine(DType::kF32, 0);
        wrong_sums(a, world.rank(), player.sums(a, DType::kF32, 0));
      }
      wrong_rows(a, world.rank(), spec.layout, player.got(0));
      wrong_rows(b, world.rank(), spec.layout, player.got(1));
    });
  }
}

TYPED_TEST_P(ExchangeOf, RanksThatReuseDifferentHandlesAreTold) {
  const ExchangeSpec spec = small_exchange<TypeParam>();
  const ExchangeBatch batch(spec, 2, DType::kBF16, 1, {5, 6});
  for (const bool other_is_fresh : {true, false}) {
    test::run_threads(TypeParam::worlds(2), [&](World& world) {
      TypeParam player(world, spec);
      ExchangeHandle other = player.exchange().make_handle();
      world.barrier();
      for (int i = 0; i < 2; ++i) {
        player.round(batch);
        std::swap(player.handle, other);
      }
      if (world.rank() == 1) std::swap(player.handle, other);
      DispatchInput input = player.input();
      if (world.rank() == 0 || !other_is_fresh) {
        input.ids = input.weights = {};
        input.reuse = true;
      }
      try {
        player.exchange().dispatch(input, player.output(), player.handle);
        player.finish();
        ADD_FAILURE() << "rank " << world.rank() << " noticed nothing";
      } catch (const Error& error) {
        const bool mismatch = error.code() == ErrorCode::kSpecMismatch;
        EXPECT_TRUE(mismatch || error.code() == ErrorCode::kAborted) << error.what();
        if (mismatch) {
          EXPECT_THAT(error.what(), ::testing::HasSubstr("reuse handles of the same dispatch"));
        }
      }
      EXPECT_THROW(player.exchange().check(), TimeoutError);
      EXPECT_THROW(player.enqueue_dispatch(), Error);
    });
  }
}

// A token that has several experts on a rank crosses once; with pre_sum one result comes back.
TYPED_TEST_P(ExchangeOf, BytesThatCross) {
  ExchangeSpec spec = small_exchange<TypeParam>(8, 4);
  spec.weights = CombineWeights::kBySender;
  ExchangeBatch batch(spec, 2, DType::kBF16, 1, {10, 0});
  for (std::size_t i = 0; i < batch.ids[0].size(); ++i) {
    batch.ids[0][i] = static_cast<std::int64_t>(i % 4 + 4);  // all of rank 1
  }
  for (const bool pre_sum : {false, true}) {
    batch.spec.pre_sum = pre_sum;
    test::run_threads(TypeParam::worlds(2), [&](World& world) {
      TypeParam player(world, batch.spec);
      player.round(batch);
      constexpr unsigned kRowBytes = TypeParam::kHidden * 2;
      const ExchangeStats& stats = player.exchange().stats();
      if (world.rank() == 0) {
        EXPECT_EQ(stats.tokens_sent, 10);
        EXPECT_EQ(stats.dispatch_bytes, 10u * kRowBytes + 40u * TypeParam::kSlotBytes);
        EXPECT_EQ(stats.combine_bytes, 0u);
      } else {
        EXPECT_EQ(stats.dispatch_bytes, 0u);
        EXPECT_EQ(stats.rows_received, 40);
        EXPECT_EQ(stats.rows_returned, pre_sum ? 10 : 40);
        EXPECT_EQ(stats.combine_bytes, (pre_sum ? 10u : 40u) * kRowBytes);
      }
    });
  }
}

REGISTER_TYPED_TEST_SUITE_P(ExchangeOf, AllTypesOfTokens, RanksWithoutTokens,
                            OneRankReceivesAllThereCanBe, SameBitsOnAnyNumberOfRanks,
                            ExpertsInOtherPlaces, HandlesAreUsedAgain,
                            RanksThatReuseDifferentHandlesAreTold, BytesThatCross);

}  // namespace switchyard::testing
