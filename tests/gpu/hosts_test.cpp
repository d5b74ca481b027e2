// Exchanges of GPUs over hosts: ranks of one process with a chaotic network between them, and, as
// ranks of `switchyard launch`, processes in network namespaces. Ranks share GPUs if they must.
#include "support/hosts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <vector>

#include "support/device_exchange.h"
#include "support/numbers.h"
#include "support/on_gpu.h"

namespace switchyard::testing {
namespace {

using GpuHosts = OnGpu<::testing::Test>;

ExchangeSpec spec_with(RowLayout layout, DType dispatch = DType::kBF16) {
  ExchangeSpec spec;
  spec.hidden = 144;
  spec.num_experts = 11;
  spec.top_k = 3;
  spec.max_tokens = 24;
  spec.dispatch = dispatch;
  spec.layout = layout;
  return spec;
}

void require_nothing_thrown(const std::vector<std::exception_ptr>& thrown) {
  for (const std::exception_ptr& failure : thrown) {
    if (failure) std::rethrow_exception(failure);
  }
}

class GpuHostsShapes : public OnGpu<::testing::TestWithParam<std::tuple<RowLayout, DType, DType>>> {
};

TEST_P(GpuHostsShapes, RowsArriveAndResultsComeBack) {
  const auto [layout, wire, input] = GetParam();
  ExchangeSpec spec = spec_with(layout, wire);
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    spec.pre_sum_per_host = seed > 2;
    spec.weights = seed > 2 ? CombineWeights::kBySender : CombineWeights::kByReceiver;
    const ExchangeBatch batch(spec, 3, input, seed);
    require_nothing_thrown(test::run_over_chaos({{2, 1}}, [&](const World& world) {
      Player player(world, spec);
      for (int i = 0; i < 3; ++i) player.round(batch, DType::kF32);
      EXPECT_EQ(player.handle.tokens(), batch.count(world.rank()));
    }));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, GpuHostsShapes,
    ::testing::Values(std::tuple(RowLayout::packed(), DType::kBF16, DType::kBF16),
                      std::tuple(RowLayout::packed(), DType::kF32, DType::kF32),
                      std::tuple(RowLayout::packed(), DType::kF8E4M3, DType::kF32),
                      std::tuple(RowLayout::blocked(16), DType::kBF16, DType::kBF16),
                      std::tuple(RowLayout::padded(0), DType::kBF16, DType::kBF16),
                      std::tuple(RowLayout::padded(72), DType::kF8E4M3, DType::kF8E4M3)));

// Every replay sends the tokens and ids that the memory holds then.
TEST_F(GpuHosts, GraphsAreReplayedWithOtherRouting) {
  const ExchangeSpec spec = spec_with(RowLayout::packed());
  std::vector<ExchangeBatch> batches;
  for (std::uint64_t seed = 40; seed < 44; ++seed) {
    batches.emplace_back(spec, 2, DType::kBF16, seed, std::vector<int>{24, 7});
  }
  require_nothing_thrown(test::run_over_chaos({{1, 1}}, [&](World world) {
    Player player(world, spec);
    player.arrays().load(batches[0], world.rank());
    gpu::Graph dispatch = gpu::Graph::capture(*player.stream, [&] { player.enqueue_dispatch(); });
    gpu::Graph both = gpu::Graph::capture(*player.stream, [&] {
      player.enqueue_dispatch();
      player.enqueue_combine(DType::kF32);
    });
    dispatch.launch(*player.stream);
    both.launch(*player.stream);
    player.stream->synchronize();
    world.barrier();
    for (const ExchangeBatch& batch : batches) {
      player.arrays().load(batch, world.rank());
      player.arrays().poison(player.spec(), player.own());
      dispatch.launch(*player.stream);
      const ExchangeArrays got = player.got();
      wrong_rows(batch, world.rank(), spec.layout, got);
      player.upload_results(batch, got);
      for (int i = 0; i < 5; ++i) both.launch(*player.stream);
      wrong_sums(batch, world.rank(), player.sums(batch, DType::kF32));
    }
  }));
}

// The stream goes on, and the error names who did not come.
TEST_F(GpuHosts, ARankThatDoesNotComeIsNamed) {
  const ExchangeSpec spec = spec_with(RowLayout::packed());
  const ExchangeBatch batch(spec, 2, DType::kBF16, 1);
  std::atomic<bool> is_over{false};
  test::run_over_chaos({{1, 1}}, [&](World world) {
    ExchangeOptions options;
    options.deadline = std::chrono::milliseconds(1500);
    Player player(world, spec, 1, options);
    if (world.rank() == 1) {
      EXPECT_TRUE(test::eventually([&] { return is_over.load(); }));
      return;
    }
    player.arrays().load(batch, 0);
    player.enqueue_dispatch();
    player.stream->synchronize();
    try {
      player.exchange().check();
      ADD_FAILURE() << "no error";
    } catch (const TimeoutError& error) {
      EXPECT_EQ(error.failure().peer_rank, 1) << error.what();
    }
    is_over = true;
  });
}

// As a rank of a world over hosts, with the GPUs that this process sees.
class GpuHostsLaunched : public OnGpu<::testing::Test> {
 protected:
  void SetUp() override {
    OnGpu::SetUp();
    if (std::getenv("SWITCHYARD_TEST_LAUNCHED") == nullptr) {
      GTEST_SKIP() << "for ranks of `switchyard launch`: ctest starts them";
    }
  }
};

TEST_F(GpuHostsLaunched, ExchangesOfEverySize) {
  World world = World::from_environment(test::with_deadline(test::kGenerous));
  ExchangeSpec spec = spec_with(RowLayout::packed());
  spec.max_tokens = 8192;
  std::vector<ExchangeBatch> batches;
  std::mt19937 random(11);  // the same on all ranks
  for (const int most : {1, 2, 7, 30, 100, 300, 1000, 8192}) {
    std::vector<int> counts;
    for (int r = 0; r < world.size(); ++r) {
      counts.push_back(r == 0 ? most : std::uniform_int_distribution<int>(0, most)(random));
    }
    batches.emplace_back(spec, world.size(), DType::kBF16, random(), counts);
  }
  Player player(world, spec);
  const std::uint64_t calls = test::number_from("SWITCHYARD_HOSTS_CALLS", 100);
  // Small batches more often than large ones.
  std::discrete_distribution<std::size_t> choose{64, 64, 64, 32, 16, 8, 4, 1};
  for (std::uint64_t i = 0; i < calls && !HasFailure(); ++i) {
    SCOPED_TRACE(i);
    player.round(batches[i < batches.size() ? batches.size() - 1 - i : choose(random)],
                 DType::kF32);
  }
  EXPECT_EQ(player.exchange().stats().combines, calls);
}

}  // namespace
}  // namespace switchyard::testing
