// Exchanges whose arrays are a device's, played on copies over a network that reorders, delays and
// refuses: the rows and sums of exchanges that need no copies.
#include "exchange/staging.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "model/errors.h"
#include "support/exchanges.h"
#include "support/hosts.h"
#include "support/thread_device.h"

namespace switchyard::testing {
namespace {

ExchangeSpec spec_with(RowLayout layout, DType dispatch = DType::kBF16) {
  return spec_over_hosts(48, layout, dispatch);
}

struct Staged {
  ThreadDevice* device;  // the exchange's
  Exchange exchange;
};
Staged make_staged(const World& world, const ExchangeSpec& spec,
                   std::chrono::milliseconds deadline = test::kGenerous) {
  ExchangeOptions options;
  options.backend = Backend::kCuda;
  options.deadline = deadline;
  options.trace = true;
  auto device = std::make_unique<ThreadDevice>();
  ThreadDevice* const known = device.get();
  return {known, ExchangeMaker::make(
                     make_staged_exchange(world, ExchangeProblem(spec, world.rank(), world.size()),
                                          options, std::move(device)))};
}

void require_nothing_thrown(const std::vector<std::exception_ptr>& thrown) {
  for (const std::exception_ptr& failure : thrown) {
    if (failure) std::rethrow_exception(failure);
  }
}

class StagedExchange : public ::testing::TestWithParam<std::tuple<RowLayout, DType, DType>> {};

TEST_P(StagedExchange, BringsEveryRowAndSum) {
  const auto [layout, wire_type, input_type] = GetParam();
  const ExchangeSpec spec = spec_with(layout, wire_type);
  std::vector<ExchangeBatch> batches;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    batches.emplace_back(spec, 3, input_type, seed);
  }
  std::vector<int> wrong(3, -1);
  const auto thrown = test::run_over_chaos({{2, 1}}, [&](const World& world) {
    Staged staged = make_staged(world, spec);
    Exchange& exchange = staged.exchange;
    ExchangeHandle handle = exchange.make_handle();
    int& mine = wrong[static_cast<std::size_t>(world.rank())];
    mine = 0;
    for (const ExchangeBatch& batch : batches) {
      const std::int64_t count = batch.count(world.rank());
      ExchangeArrays got{exchange.spec(), exchange.own_places(), exchange.rows_needed()};
      exchange.dispatch_send(input_of(batch, world.rank()), handle);
      std::int64_t rows = 0;
      for (const auto& [place, origins] : batch.rows_of_places()) {
        const ExpertRange own = exchange.own_places();
        if (place >= own.begin && place < own.end)
          rows += static_cast<std::int64_t>(origins.size());
      }
      const std::int64_t needed = exchange.rows_needed(handle);
      if (layout.kind == RowLayout::Kind::kPacked) {
        EXPECT_EQ(needed, rows);
      } else {
        EXPECT_GE(needed, rows);
      }
      exchange.dispatch_recv(got.output(), handle);
      staged.device->synchronize_all();
      mine += wrong_rows(batch, world.rank(), exchange.spec().layout, got);
      const Matrix results = results_of(batch, got);
      Matrix out = Matrix::random(count, spec.hidden, DType::kF32, 5), before = out;
      CombineOutput output = output_of(out);
      output.accumulate = true;
      output.scale = 0.5f;
      exchange.combine({results.view()}, output, handle);
      staged.device->synchronize_all();
      exchange.check();
      mine += wrong_sums(batch, world.rank(), out, 0.5f, &before);
      EXPECT_EQ(exchange.stats().rows_received, rows);
    }
  });
  require_nothing_thrown(thrown);
  EXPECT_THAT(wrong, ::testing::Each(0));
}

INSTANTIATE_TEST_SUITE_P(Layouts, StagedExchange, layouts_over_hosts());

// A graph is made once and launched three times, with other tokens and ids in the same memory.
TEST(Staging, ReplaysAreCallsOfTheirOwn) {
  const ExchangeSpec spec = spec_with(RowLayout::packed());
  constexpr int kEach = 20;
  std::vector<ExchangeBatch> batches;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    batches.emplace_back(spec, 2, DType::kBF16, seed, std::vector<int>{kEach, kEach});
  }
  std::vector<int> wrong(2, -1);
  const auto thrown = test::run_over_chaos({{1, 1}}, [&](const World& world) {
    const auto r = static_cast<std::size_t>(world.rank());
    Staged staged = make_staged(world, spec);
    Exchange& exchange = staged.exchange;
    ExchangeHandle handle = exchange.make_handle();
    Matrix tokens = batches[0].tokens[r];
    std::vector<std::int64_t> ids = batches[0].ids[r];
    std::vector<float> weights = batches[0].weights[r];
    ExchangeArrays got{exchange.spec(), exchange.own_places(), exchange.rows_needed()};
    Matrix results(exchange.rows_needed(), spec.hidden, spec.combine);
    Matrix out(kEach, spec.hidden, DType::kF32);
    DispatchInput input;
    input.tokens = tokens.view();
    input.ids = ids;
    input.weights = weights;
    staged.device->captures = true;
    exchange.dispatch(input, got.output(), handle);
    exchange.combine({results.view()}, output_of(out), handle);
    wrong[r] = 0;
    for (const ExchangeBatch& batch : batches) {
      std::memcpy(tokens.row(0), batch.tokens[r].view().row(0),
                  static_cast<std::size_t>(kEach * spec.hidden) * size_of(DType::kBF16));
      ids = batch.ids[r];
      weights = batch.weights[r];
      // In place: the graph knows the addresses.
      std::memset(got.rows.row(0), 0xff,
                  static_cast<std::size_t>(got.capacity * spec.hidden) * size_of(spec.dispatch));
      std::fill(got.origins.begin(), got.origins.end(), RowOrigin{-7, -7, -7});
      staged.device->replay();
      staged.device->synchronize_all();
      exchange.check();
      // Results were all zeros, so only what was received can be judged.
      wrong[r] += wrong_rows(batch, world.rank(), spec.layout, got);
      int placed = 0;
      for (const TraceEvent& event : exchange.trace().events) {
        if (event.kind == TraceKind::kPack) placed += event.rows;
      }
      EXPECT_EQ(placed, got.num_rows);
    }
  });
  require_nothing_thrown(thrown);
  EXPECT_THAT(wrong, ::testing::Each(0));
}

// A later call tells, once, of a fault that a device finds, and the exchange lives.
TEST(Staging, TellsWhatWasFoundOnceAndLives) {
  ExchangeSpec spec = spec_with(RowLayout::padded(2));
  const auto thrown = test::run_over_chaos({{1, 1}}, [&](const World& world) {
    Staged staged = make_staged(world, spec);
    Exchange& exchange = staged.exchange;
    ExchangeHandle handle = exchange.make_handle();
    constexpr std::int64_t kTokens = 4;
    const Matrix tokens = Matrix::random(kTokens, spec.hidden, DType::kBF16, 1);
    ExchangeArrays got{exchange.spec(), exchange.own_places(), exchange.rows_needed()};
    const auto dispatch = [&](const std::vector<std::int32_t>& ids) {
      DispatchInput input;
      input.tokens = tokens.view();
      input.ids = ids;
      exchange.dispatch(input, got.output(), handle);
      staged.device->synchronize_all();
    };
    // Expert 0 gets 8 rows of both ranks, and has room for 2.
    std::vector<std::int32_t> ids(kTokens * 3, kNoExpert);
    for (std::size_t t = 0; t < kTokens; ++t) ids[3 * t] = 0;
    dispatch(ids);
    if (world.rank() == 0) {
      EXPECT_EQ(got.counts[0], 2);
      EXPECT_ERROR(exchange.check(), kCapacityExceeded, "expert 0 got 8 rows");
    }
    exchange.check();
    // Results of the rows that had no room count as zeros.
    Matrix results(exchange.rows_needed(), spec.hidden, spec.combine);
    for (std::int64_t i = 0; i < results.rows() * spec.hidden; ++i) results.set(i, 1.0f);
    Matrix out(kTokens, spec.hidden, DType::kF32);
    exchange.combine({results.view()}, output_of(out), handle);
    staged.device->synchronize_all();
    for (std::int64_t t = 0; t < kTokens; ++t) {
      EXPECT_EQ(out.get(t * spec.hidden), world.rank() == 0 && t < 2 ? 1.0f : 0.0f);
    }
    // Token 1 names expert 7 twice.
    ids.assign(kTokens * 3, kNoExpert);
    ids[3] = ids[5] = 7;
    dispatch(ids);
    EXPECT_ERROR(exchange.check(), kInvalidArgument, "token 1 names expert 7 twice");
    exchange.check();
  });
  require_nothing_thrown(thrown);
}

// A rank that does not come is named by the deadline, the stream goes on, and every later call
// throws again.
TEST(Staging, NamesARankThatDoesNotCome) {
  const ExchangeSpec spec = spec_with(RowLayout::packed());
  std::atomic<int> blamed{-1};
  const auto thrown = test::run_over_chaos({{1, 1}}, [&](const World& world) {
    Staged staged = make_staged(world, spec, std::chrono::milliseconds(500));
    if (world.rank() == 1) {
      test::eventually([&] { return blamed != -1; });
      return;
    }
    const ExchangeBatch batch(spec, 2, DType::kBF16, 1);
    ExchangeHandle handle = staged.exchange.make_handle();
    ExchangeArrays got{staged.exchange.spec(), staged.exchange.own_places(),
                       staged.exchange.rows_needed()};
    staged.exchange.dispatch_send(input_of(batch, 0), handle);
    staged.exchange.dispatch_recv(got.output(), handle);
    EXPECT_TRUE(staged.device->is_idle(test::kGenerous));
    for (int i = 0; i < 2; ++i) test::blame_of(1, [&] { staged.exchange.check(); });
    blamed = 1;
  });
  EXPECT_EQ(thrown[0], nullptr);
}

}  // namespace
}  // namespace switchyard::testing
