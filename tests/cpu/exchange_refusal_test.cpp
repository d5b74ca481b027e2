// Calls of an exchange that are refused leave it as it was: the right call that follows works, on
// all ranks. And which ids are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <climits>

#include "model/errors.h"
#include "support/exchanges.h"
#include "support/ranks.h"

namespace switchyard::testing {
namespace {

using ::testing::HasSubstr;

constexpr DType kFp8 = DType::kF8E4M3;

ExchangeSpec small_spec(DType wire = DType::kBF16) {
  return {.hidden = 136, .num_experts = 12, .top_k = 3, .max_tokens = 20, .dispatch = wire};
}

// A change that makes an output unusable, and what the refusal says.
template <typename Output>
struct Wrong {
  ErrorCode code;
  const char* part;
  std::function<void(Output&)> change;
};
int some_stream = 0;

std::vector<Wrong<DispatchOutput>> wrong_received(bool quantised) {
  const auto bad = ErrorCode::kInvalidArgument;
  std::vector<Wrong<DispatchOutput>> all{
      {bad, "capacity is -1", [](DispatchOutput& o) { o.capacity = -1; }},
      {bad, "rows are null", [](DispatchOutput& o) { o.rows = nullptr; }},
      {bad, "row_stride is 135", [](DispatchOutput& o) { o.row_stride = 135; }},
      {bad, "a stream is given", [](DispatchOutput& o) { o.stream = &some_stream; }},
  };
  if (quantised) {
    all.push_back({bad, "scales are null", [](DispatchOutput& o) { o.scales = nullptr; }});
    all.push_back({bad, "scale_stride is 1", [](DispatchOutput& o) { o.scale_stride = 1; }});
  } else {
    all.push_back({bad, "has scales", [](DispatchOutput& o) { o.scales = o.weights; }});
  }
  return all;
}

std::vector<Wrong<CombineOutput>> wrong_combined() {
  const auto bad = ErrorCode::kInvalidArgument;
  return {
      {ErrorCode::kDTypeMismatch, "is i64", [](CombineOutput& o) { o.dtype = DType::kI64; }},
      {ErrorCode::kDTypeMismatch, "is f8_e4m3", [](CombineOutput& o) { o.dtype = kFp8; }},
      {bad, "is null", [](CombineOutput& o) { o.data = nullptr; }},
      {bad, "row_stride is 7", [](CombineOutput& o) { o.row_stride = 7; }},
      {bad, "scale is nan", [](CombineOutput& o) { o.scale = NAN; }},
      {bad, "scale is inf", [](CombineOutput& o) { o.scale = INFINITY; }},
      {bad, "a stream is given", [](CombineOutput& o) { o.stream = &some_stream; }},
  };
}

template <typename Output, typename Call>
void refuse(const Wrong<Output>& wrong, Output output, const Call& call) {
  wrong.change(output);
  EXPECT_THAT(test::error_of(wrong.code, [&] { call(output); }), HasSubstr(wrong.part));
}

class Refusals : public ::testing::TestWithParam<std::tuple<int, DType, bool>> {};

TEST_P(Refusals, LeaveTheExchangeAsItWas) {
  const auto& [ranks, wire, split] = GetParam();
  const ExchangeBatch batch(small_spec(wire), ranks, DType::kBF16, 3,
                            std::vector<int>(static_cast<std::size_t>(ranks), 20));
  test::run_threads(HostPlayer::worlds(ranks), [&](World& world) {
    const int rank = world.rank();
    Exchange exchange(world, batch.spec);
    ExchangeHandle handle = exchange.make_handle();
    ExchangeArrays got(exchange.spec(), exchange.own_places(), exchange.rows_needed());
    Matrix out(20, batch.spec.hidden, DType::kF32);
    const DispatchInput input = input_of(batch, rank);
    const auto dispatch_wrongly = [&](bool received_only) {
      for (const auto& wrong : wrong_received(wire == kFp8)) {
        refuse(wrong, got.output(), [&](const DispatchOutput& output) {
          received_only ? exchange.dispatch_recv(output, handle)
                        : exchange.dispatch(input, output, handle);
        });
      }
    };
    const auto combine_wrongly = [&](bool received_only, const CombineInput& rows) {
      for (const auto& wrong : wrong_combined()) {
        refuse(wrong, output_of(out), [&](const CombineOutput& output) {
          received_only ? exchange.combine_recv(output, handle)
                        : exchange.combine(rows, output, handle);
        });
      }
    };
    for (int i = 0; i < 3; ++i) {
      // Ranks are refused in turn, while the others go on.
      const bool mine = i == 2 || rank % 2 == i;
      if (mine) dispatch_wrongly(false);
      if (split) {
        exchange.dispatch_send(input, handle);
        if (mine) dispatch_wrongly(true);
        DispatchOutput small = got.output();
        small.capacity = 1;
        if (mine && got.capacity > 1 && exchange.rows_needed(handle) > 1) {
          EXPECT_ERROR(exchange.dispatch_recv(small, handle), kCapacityExceeded, "room for 1");
        }
        exchange.dispatch_recv(got.output(), handle);
      } else {
        exchange.dispatch(input, got.output(), handle);
      }
      wrong_rows(batch, rank, exchange.spec().layout, got);
      const Matrix y = results_of(batch, got);
      if (mine) combine_wrongly(false, {y.view()});
      if (split) {
        exchange.combine_send({y.view()}, handle);
        if (mine) combine_wrongly(true, {});
        exchange.combine_recv(output_of(out), handle);
      } else {
        exchange.combine({y.view()}, output_of(out), handle);
      }
      wrong_sums(batch, rank, out);
      EXPECT_EQ(exchange.stats().dispatches, static_cast<std::uint64_t>(i) + 1);
      EXPECT_EQ(exchange.stats().combines, static_cast<std::uint64_t>(i) + 1);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Exchange, Refusals,
                         ::testing::Combine(::testing::Values(1, 2, 4),
                                            ::testing::Values(DType::kBF16, kFp8),
                                            ::testing::Bool()));

// ------------------------------------------------------------------------------------------ ids

struct Id {
  std::int64_t id;
  bool large_are_none;
  const char* refusal;  // null: it is taken
};
std::ostream& operator<<(std::ostream& out, const Id& id) {
  return out << id.id << (id.large_are_none ? ", large ones are none" : "");
}

class ExchangeIds : public ::testing::TestWithParam<Id> {};

// On rank 0 of two, of which the other never sends: nothing may wait for it.
TEST_P(ExchangeIds, AreHeldAgainstTheExpertsBeforeAnythingIsSent) {
  const Id& given = GetParam();
  ExchangeSpec spec = small_spec();
  spec.large_ids_are_none = given.large_are_none;
  ExchangeBatch batch(spec, 2, DType::kBF16, 1, {20, 20});
  const std::int64_t fits = given.id < INT_MIN || given.id > INT_MAX ? -1 : given.id;
  for (const bool wide : {false, true}) {
    if (!wide && fits != given.id) continue;
    test::run_threads(HostPlayer::worlds(2), [&](World& world) {
      Exchange exchange(world, spec);
      if (world.rank() == 1) return;
      ExchangeHandle handle = exchange.make_handle();
      std::vector<std::int64_t> ids(60, -1);
      ids[31] = given.id;
      ids[32] = 7;
      const std::vector<std::int32_t> narrow(ids.begin(), ids.end());
      DispatchInput input = input_of(batch, 0);
      if (wide) {
        input.ids = ids;
      } else {
        input.ids = narrow;
      }
      if (given.refusal == nullptr) return exchange.dispatch_send(input, handle);
      EXPECT_THAT(test::error_of(ErrorCode::kInvalidArgument,
                                 [&] { exchange.dispatch_send(input, handle); }),
                  HasSubstr(given.refusal));
      EXPECT_EQ(exchange.stats().dispatches, 0u);
      exchange.dispatch_send(input_of(batch, 0), handle);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    Ids, ExchangeIds,
    ::testing::Values(Id{0, false, nullptr}, Id{11, false, nullptr}, Id{-1, false, nullptr},
                      Id{12, false, "ids[10][1] is 12; expert ids are 0 to 11"},
                      Id{INT_MAX, false, "is 2147483647"}, Id{-2, false, "is -2"},
                      Id{INT_MIN, false, "is -2147483648"},
                      Id{std::int64_t{1} << 40, false, "is 1099511627776"},
                      Id{-(std::int64_t{1} << 32), false, "is -4294967296"},
                      Id{7, false, "token 10 names expert 7 twice"},
                      // With the option only large ones are none.
                      Id{12, true, nullptr}, Id{INT_MAX, true, nullptr},
                      Id{std::int64_t{1} << 40, true, nullptr}, Id{-2, true, "is -2"},
                      Id{7, true, "token 10 names expert 7 twice"}));

TEST(ExchangeIds, LargeOnesMayStandForNone) {
  ExchangeSpec spec = small_spec();
  spec.large_ids_are_none = true;
  const ExchangeBatch batch(spec, 2, DType::kBF16, 5, {20, 13});
  const auto is_large = [](std::int64_t id) { return id >= 12; };
  ASSERT_TRUE(std::ranges::any_of(batch.ids[0], is_large));
  test::run_threads(HostPlayer::worlds(2),
                    [&](World& world) { HostPlayer(world, spec).round(batch); });
}

}  // namespace
}  // namespace switchyard::testing
