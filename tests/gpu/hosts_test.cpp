// Exchanges and layers of GPUs over hosts: ranks of one process with a chaotic network between
// them, and, as ranks of `switchyard launch`, processes in network namespaces. Ranks share GPUs if
// they must.
#include "support/hosts.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "exchange/staged_layer.h"
#include "reference/reference.h"
#include "support/accuracy.h"
#include "support/device_exchange.h"
#include "support/device_ranks.h"
#include "support/held_device.h"
#include "support/namespaces.h"
#include "support/numbers.h"
#include "support/on_gpu.h"
#include "support/stops.h"

namespace switchyard::testing {
namespace {

using GpuHosts = OnGpu<::testing::Test>;

ExchangeSpec spec_with(RowLayout layout, DType dispatch = DType::kBF16) {
  return spec_over_hosts(144, layout, dispatch);
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

INSTANTIATE_TEST_SUITE_P(Layouts, GpuHostsShapes, layouts_over_hosts());

// Every replay sends the tokens and ids that the memory holds then.
TEST_F(GpuHosts, GraphsAreReplayedWithOtherRouting) {
  const ExchangeSpec spec = spec_with(RowLayout::packed());
  std::vector<ExchangeBatch> batches;
  for (std::uint64_t seed = 40; seed < 44; ++seed) {
    batches.emplace_back(spec, 2, DType::kBF16, seed, std::vector<int>{24, 7});
  }
  require_nothing_thrown(test::run_over_chaos({{1, 1}}, [&](World world) {
    Player player(world, spec);
    check_graphs(player, batches);
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
    test::blame_of(1, [&] { player.exchange().check(); });
    is_over = true;
  });
}

// ----------------------------------------------------------------------------------- layers

const std::vector<int> kHosts = {1, 1, 1};
constexpr int kRanks = 3;

BatchResult run_over_hosts(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                           const Shares& shares, DType output, LayerOptions options = {}) {
  std::vector<BatchResult> results(2, empty_result(spec, batch, kRanks, output));
  const auto most =
      static_cast<int>(std::max<std::int64_t>(1, *std::ranges::max_element(shares.count)));
  test::ChaosHosts hosts;
  hosts.ranks_of_hosts = kHosts;
  hosts.windows = {};
  require_nothing_thrown(test::run_over_chaos(hosts, [&](const World& world) {
    DeviceRank rank(world, spec, weights, most, options);
    for (BatchResult& result : results) rank.run(batch, shares, result);
  }));
  EXPECT_TRUE(results[0].output == results[1].output) << "repeated";
  EXPECT_EQ(results[0].ids, results[1].ids) << "repeated";
  return std::move(results[0]);
}

class EveryModelOverHosts : public OnGpu<::testing::TestWithParam<ModelEntry>> {};

TEST_P(EveryModelOverHosts, IsAsGoodAsAStraightforwardProgram) {
  const LayerSpec spec = small_spec(GetParam());
  const MoeWeights weights = make_weights(spec, DType::kBF16);
  const Batch batch = random_batch(spec, 90, DType::kBF16, 5);
  const BatchResult result =
      run_over_hosts(spec, weights, batch, Shares::of({50, 0, 40}), DType::kBF16);
  expect_same_routing(spec, weights, batch, result);
  expect_accurate(spec, weights, batch, result);
}
INSTANTIATE_TEST_SUITE_P(ModelTable, EveryModelOverHosts, ::testing::ValuesIn(model_table()),
                         name_of_model);

// The sums of one host are those of any other number of its ranks.
TEST_F(GpuHosts, LayersHaveTheBitsOfAnyNumberOfRanks) {
  LayerSpec spec = spec_of(256, 384, 12, 4);
  spec.shared_intermediate = 256;
  const MoeWeights weights = make_weights(spec, DType::kBF16);
  const Batch batch = routed(spec, 700, 0.8);
  std::vector<Matrix> outputs;
  for (const int ranks : {1, 2}) {
    const Shares shares = Shares::even(700, 2 * ranks);
    BatchResult result = empty_result(spec, batch, 2 * ranks, DType::kBF16);
    test::ChaosHosts hosts;
    hosts.ranks_of_hosts = {ranks, ranks};
    hosts.windows = {};
    require_nothing_thrown(test::run_over_chaos(hosts, [&](const World& world) {
      DeviceRank rank(world, spec, weights, 350);
      for (int pass = 0; pass < 3; ++pass) rank.run(batch, shares, result);
    }));
    expect_accurate(spec, weights, batch, result);
    outputs.push_back(result.output);
  }
  EXPECT_TRUE(outputs[0] == outputs[1]);
}

// The device quantises tokens. Those that the caller has quantised have the same bits.
TEST_F(GpuHosts, Fp8LayersAreAccurate) {
  LayerSpec spec = spec_of(272, 384, 12, 4);
  spec.shared_intermediate = 128;
  const MoeWeights weights = make_weights(spec, DType::kF8E4M3);
  LayerOptions options;
  options.compute = DType::kF8E4M3;
  const Shares shares = Shares::of({100, 0, 200});
  const auto run = [&](const Batch& batch) {
    return run_over_hosts(spec, weights, batch, shares, DType::kBF16, options);
  };
  Batch batch = routed(spec, 300, 0.8);
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    SCOPED_TRACE(to_string(dtype));
    batch.x = Matrix::random(300, spec.hidden, dtype, 17);
    const BatchResult result = run(batch);
    double yardstick = 0;
    const double error = output_error(spec, weights, batch, result, &yardstick, true);
    EXPECT_LE(error, 2 * yardstick);
    if (dtype != DType::kBF16) continue;
    Batch quantised = batch;
    quantised.x = Matrix::quantised(batch.x);
    EXPECT_TRUE(run(quantised).output == result.output);
  }
}

// It stops before it enters its host's layer, where another rank waits for it in the kernel.
class GpuHostsStop : public OnGpu<::testing::TestWithParam<int>> {};

TEST_P(GpuHostsStop, InTheLayerOfItsHostIsNamedByAll) {
  constexpr int kAll = 4;
  const int stops = GetParam();
  const LayerSpec spec = spec_of(256, 128, 16, 4);
  const MoeWeights weights = make_weights(spec, DType::kBF16);
  const Batch batch = routed(spec, 160, 0.8);
  const Shares shares = Shares::even(160, kAll);
  std::atomic<int> told{0}, ended{0};
  test::ChaosHosts hosts;
  hosts.ranks_of_hosts = {2, 2};
  hosts.windows = {};
  require_nothing_thrown(test::run_over_chaos(hosts, [&](World world) {
    const int rank = world.rank();
    LayerOptions options;
    options.max_tokens = 40;
    options.deadline = std::chrono::seconds(2);
    options = options_of_rank(rank, kAll, options);
    gpu::set_device(options.cuda.device);
    const gpu::Stream stream;
    auto owned = std::make_unique<HeldDevice>(gpu::make_staging_device(options.cuda.device));
    HeldDevice& device = *owned;
    const std::unique_ptr<LayerEngine> layer = make_staged_layer(
        world, spec, weights_of_rank(weights, rank, kAll), options, std::move(owned));
    DeviceBatch share(spec, share_of_batch(batch, shares, rank, spec.top_k), DType::kBF16);
    world.barrier();
    const auto pass = [&] {
      share.enqueue(*layer, stream);
      stream.synchronize();
      layer->check();
    };
    pass();
    if (rank == stops) {
      device.before_copy = [&, once = true]() mutable {
        if (!std::exchange(once, false)) return;
        EXPECT_TRUE(test::eventually([&] { return told.load() == kAll - 1; }));
      };
    }
    try {
      pass();
      // It may have had all it needed.
      if (rank == stops) pass();
      ADD_FAILURE() << "no error on rank " << rank;
    } catch (const TimeoutError& error) {
      EXPECT_EQ(error.failure().peer_rank, stops) << "rank " << rank << ": " << error.what();
    }
    ++(rank == stops ? ended : told);
    // Nothing is freed while the stream of another rank stands still.
    EXPECT_TRUE(test::eventually([&] { return told.load() == kAll - 1 && ended.load() == 1; }));
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuHostsStop, ::testing::Values(0, 1, 2, 3));

TEST_F(GpuHosts, LayersReplayInGraphs) {
  const LayerSpec spec = spec_of(256, 128, 12, 3);
  const MoeWeights weights = make_weights(spec, DType::kBF16);
  const Batch first = random_batch(spec, 120, DType::kBF16, 4);
  const Batch second = random_batch(spec, 120, DType::kBF16, 5);
  const Shares shares = Shares::of({40, 40, 40});
  const BatchResult expected = run_over_hosts(spec, weights, second, shares, DType::kBF16);
  test::ChaosHosts hosts;
  hosts.ranks_of_hosts = kHosts;
  require_nothing_thrown(test::run_over_chaos(hosts, [&](World world) {
    DeviceRank rank(world, spec, weights, 40);
    DeviceBatch share = rank.share(first, shares);
    rank.forward(share);
    gpu::Graph graph =
        gpu::Graph::capture(rank.stream(), [&] { share.enqueue(rank.layer(), rank.stream()); });
    share.replace_activations(share_of_batch(second, shares, world.rank(), spec.top_k));
    world.barrier();
    for (int i = 0; i < 3; ++i) {
      share.poison(rank.stream());
      graph.launch(rank.stream());
      rank.stream().synchronize();
      rank.layer().check();
      EXPECT_TRUE(has_rows_of(share.fetch(), expected, shares, world.rank()));
      world.barrier();
    }
    EXPECT_EQ(rank.layer().stats().epoch, 4u);
    world.barrier();
  }));
}

// --------------------------------------------------------------------------------- processes

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

// Each rank has a few batches, whose outputs it computes alone beforehand. Hosts round their sums,
// so outputs over hosts are only near these, but have the same bits in every pass.
TEST_F(GpuHostsLaunched, LayersOfEverySize) {
  World world = World::from_environment(test::with_deadline(test::kGenerous));
  const LayerSpec spec = spec_of(256, 128, 16, 4);
  const MoeWeights weights = make_weights(spec, DType::kBF16);
  constexpr int kMostTokens = 8192;
  constexpr int kSizes[] = {1, 2, 7, 30, 100, 300, 1000, kMostTokens};
  std::vector<DeviceBatch> batches;
  std::vector<std::size_t> expected(std::size(kSizes));
  std::vector<std::vector<float>> values;
  {
    LayerOptions options;
    options.cuda.schedule.small_tokens =
        0;  // other kernels, which add in the order of several ranks
    DeviceLayer alone(spec, weights, kMostTokens, options);
    for (const int size : kSizes) {
      const auto seed = static_cast<std::uint64_t>(size * world.size() + world.rank());
      const SyntheticRouting routing =
          synthetic_routing(size, spec.num_experts, spec.top_k, 0.9, seed);
      batches.emplace_back(spec,
                           Batch{Matrix::random(size, spec.hidden, DType::kBF16, seed),
                                 routing.ids,
                                 routing.weights,
                                 {}},
                           DType::kBF16);
      const AdjustCall none;
      batches.back().poison(alone.stream());
      batches.back().enqueue(alone.layer(), alone.stream(), none);
      alone.stream().synchronize();
      values.push_back(batches.back().fetch().output.floats());
    }
  }
  LayerOptions options;
  options.deadline = test::kGenerous;
  DeviceRank rank(world, spec, weights, kMostTokens, options);
  world.barrier();
  std::mt19937 random(12);  // the same on all ranks
  std::discrete_distribution<std::size_t> choose{64, 64, 64, 32, 16, 8, 4, 1};
  const std::uint64_t passes = test::number_from("SWITCHYARD_HOSTS_CALLS", 100);
  for (std::uint64_t i = 0; i < passes && !HasFailure(); ++i) {
    SCOPED_TRACE(i);
    const std::size_t which = i < std::size(kSizes) ? std::size(kSizes) - 1 - i : choose(random);
    DeviceBatch& batch = batches[which];
    batch.poison(rank.stream());
    batch.enqueue(rank.layer(), rank.stream());
    rank.stream().synchronize();
    if (expected[which] == 0) {
      const std::vector<double> alone(values[which].begin(), values[which].end());
      EXPECT_LE(reference::relative_error(batch.fetch().output.floats(), alone), 0x1p-7);
      expected[which] = batch.checksum();
    }
    ASSERT_EQ(batch.checksum(), expected[which]) << kSizes[which] << " tokens";
  }
  rank.layer().check();
  EXPECT_EQ(rank.layer().stats().epoch, passes);
}

// ----------------------------------------------------------------- processes that are stopped

constexpr const char* kBoard = "SWITCHYARD_TEST_BOARD";  // its descriptor
constexpr std::chrono::milliseconds kDeadlineOfStops{2'000};

// A rank that the next test watches: a program of its own, because CUDA does not go on after
// fork().
using GpuHostsStopped = OnGpu<::testing::Test>;

TEST_F(GpuHostsStopped, PlaysPassesUntilOneFails) {
  if (std::getenv(kBoard) == nullptr) GTEST_SKIP() << "for ranks that GpuHostsStops starts";
  const SharedBoard board(static_cast<int>(test::number_from(kBoard, 0)));
  const World world = World::from_environment(test::with_deadline(test::kGenerous));
  LayerOptions options;
  options.deadline = kDeadlineOfStops;
  const LayerSpec spec = spec_of(256, 128, 16, 4);
  DeviceRank rank(world, spec, make_weights(spec, DType::kBF16), 300, options);
  DeviceBatch batch(spec, routed(spec, 300, 0.8), DType::kBF16);
  pass_until_failure(*board, world.rank(), [&] {
    batch.enqueue(rank.layer(), rank.stream());
    rank.stream().synchronize();
    rank.layer().check();
  });
  // Without the world's goodbye, which waits for the rank that was stopped.
  rank.destroy_layer();
  std::_Exit(0);
}

class GpuHostsStops : public OnGpu<HostsTest>, public ::testing::WithParamInterface<Stop> {
 protected:
  // This child becomes the program that plays a rank.
  [[noreturn]] void play(int rank, int size, int host, int board) const {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    enter(*hosts_, host);
    for (const auto& [name, value] : {std::pair("RANK", std::to_string(rank)),
                                      {"WORLD_SIZE", std::to_string(size)},
                                      {"SWITCHYARD_RENDEZVOUS", rendezvous()},
                                      {kBoard, std::to_string(board)}}) {
      ::setenv(name, value.c_str(), 1);
    }
    for (const char* const name : {"GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX"}) ::unsetenv(name);
    const UniqueFd nowhere(::open("/dev/null", O_WRONLY));
    ::dup2(nowhere.get(), STDOUT_FILENO);
    ::execl("/proc/self/exe", "rank", "--gtest_filter=GpuHostsStopped.*", nullptr);
    ::_exit(127);
  }
};

//   SWITCHYARD_HOSTS_TRIALS=100    of each kind (default 2); a rank takes seconds to start
//   SWITCHYARD_HOSTS_SEED=7        another set of trials
TEST_P(GpuHostsStops, EveryRankNamesTheOneThatStopped) {
  ASSERT_NO_FATAL_FAILURE(make_hosts(2));
  if (IsSkipped()) return;
  const Stop how = GetParam();
  const std::uint64_t trials = test::number_from("SWITCHYARD_HOSTS_TRIALS", 2);
  const std::uint64_t seed = test::number_from("SWITCHYARD_HOSTS_SEED", 1);
  StopTally tally;
  for (std::uint64_t number = seed; number < seed + trials && !tally.is_enough(); ++number) {
    const StopTrial trial(number, 2);
    SCOPED_TRACE(trial.words);
    const UniqueFd memory(::memfd_create("board", 0));
    ASSERT_EQ(::ftruncate(memory.get(), sizeof(Board)), 0);
    const SharedBoard board(memory.get());
    board.blame_nobody();
    std::vector<pid_t> pids;
    for (int rank = 0; rank < trial.size; ++rank) {
      const pid_t pid = ::fork();
      ASSERT_GE(pid, 0);
      if (pid == 0) play(rank, trial.size, rank / trial.ranks_of_host, memory.get());
      pids.push_back(pid);
    }
    tally.play(*board, pids, trial, how);
  }
  tally.judge(how, kDeadlineOfStops);
}

INSTANTIATE_TEST_SUITE_P(Namespaces, GpuHostsStops, ::testing::Values(Stop::kKill, Stop::kStop),
                         [](const auto& how) {
                           return std::string(how.param == Stop::kKill ? "Kill" : "Stop");
                         });

}  // namespace
}  // namespace switchyard::testing
