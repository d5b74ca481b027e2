// Expert parallelism on GPUs: several ranks, each with a kernel of its own, against the fp64
// reference. Where there are fewer GPUs than ranks, ranks share them.
#include "support/ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <optional>
#include <ostream>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "gpu/host/symmetric_memory.h"
#include "support/accuracy.h"
#include "support/device_ranks.h"
#include "support/fp8.h"
#include "support/layers.h"
#include "support/numbers.h"
#include "switchyard/workspace.h"

namespace switchyard::testing {
namespace {

using RanksTest = OnGpu<::testing::Test>;

// For a pass of one rank that is to have the bits of several: the kernel for few tokens adds in
// another order.
const LayerOptions kOrderOfManyTokens{.cuda = {.schedule = {.small_tokens = 0}}};

void expect_accurate(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                     const BatchResult& result, bool fp8) {
  if (fp8) {
    expect_accurate_fp8(spec, weights, batch, result, 1.0);
  } else {
    expect_accurate(spec, weights, batch, result);
  }
}

using EveryModelOnRanks = OnGpu<::testing::TestWithParam<ModelEntry>>;

TEST_P(EveryModelOnRanks, IsAsGoodAsAStraightforwardProgram) {
  const LayerSpec spec = small_spec(GetParam());
  const MoeWeights w = make_weights(spec, DType::kBF16);
  // One rank has nothing of its own, another much more than the others.
  for (const Shares& shares : {Shares::of({3, 0, 1}), Shares::of({40, 300, 5, 0})}) {
    const std::int64_t tokens =
        std::accumulate(shares.count.begin(), shares.count.end(), std::int64_t{0});
    SCOPED_TRACE(::testing::Message() << shares.count.size() << " ranks, " << tokens << " tokens");
    const Batch batch = random_batch(spec, tokens, DType::kBF16, 5);
    const BatchResult result = run_on_gpus(spec, w, batch, shares, DType::kBF16);
    expect_same_routing(spec, w, batch, result);
    expect_accurate(spec, w, batch, result, false);
    if (HasFatalFailure() || HasNonfatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(ModelTable, EveryModelOnRanks, ::testing::ValuesIn(model_table()),
                         name_of_model);

LayerSpec ragged_spec(int experts, int top_k, bool fp8) {
  return spec_of(fp8 ? 592 : 584, 360, experts, top_k);
}

TEST_F(RanksTest, EverySkew) {
  for (const bool fp8 : {false, true}) {
    for (const int top_k : {1, 8}) {
      const LayerSpec spec = ragged_spec(27, top_k, fp8);
      const MoeWeights w = make_weights(spec, fp8 ? kFp8 : DType::kBF16);
      for (const int ranks : {2, 4, 8}) {
        for (const double beta : {1.0, 0.5, 0.1}) {
          for (const int tokens : {8, 1500}) {
            SCOPED_TRACE(::testing::Message()
                         << (fp8 ? "fp8" : "bf16") << " top-" << top_k << " on " << ranks
                         << " ranks, beta " << beta << ", " << tokens << " tokens");
            const Batch batch = routed(spec, tokens, beta);
            expect_accurate(spec, w, batch,
                            run_on_gpus(spec, w, batch, Shares::even(tokens, ranks), DType::kBF16),
                            fp8);
          }
        }
      }
    }
  }
}

// Also of ranks without an expert, or without a token. With routing given: the gates' sums depend
// on how many tokens a rank has.
TEST_F(RanksTest, TheSameBitsHoweverManyRanks) {
  for (const bool fp8 : {false, true}) {
    for (const int experts : {6, 64}) {
      LayerSpec spec = ragged_spec(experts, 4, fp8);
      spec.shared_intermediate = 200;
      const MoeWeights w = make_weights(spec, fp8 ? kFp8 : DType::kBF16);
      const Batch batch = routed(spec, 900, 0.9);
      const BatchResult one = run_on_gpus(spec, w, batch, Shares::even(900, 1), DType::kBF16);
      expect_accurate(spec, w, batch, one, fp8);
      for (const Shares& shares : {Shares::even(900, 2), Shares::even(900, 5), Shares::even(900, 8),
                                   Shares::of({0, 900}), Shares::of({700, 0, 0, 200})}) {
        SCOPED_TRACE(::testing::Message() << (fp8 ? "fp8, " : "bf16, ") << experts << " experts on "
                                          << shares.count.size() << " ranks");
        const BatchResult many = run_on_gpus(spec, w, batch, shares, DType::kBF16);
        EXPECT_EQ(many.ids, one.ids);
        EXPECT_TRUE(many.output == one.output);
      }
    }
  }
}

// Counts are read by 128 threads, two experts at a time.
TEST_F(RanksTest, MoreExpertsThanAreCountedAtOnce) {
  const LayerSpec spec = spec_of(256, 128, 301, 4);
  const MoeWeights w = make_weights(spec, DType::kBF16);
  for (const int tokens : {5, 900}) {
    SCOPED_TRACE(::testing::Message() << tokens << " tokens");
    const Batch batch = routed(spec, tokens, 0.9);
    const BatchResult one =
        run_on_gpus(spec, w, batch, Shares::even(tokens, 1), DType::kBF16, 2, kOrderOfManyTokens);
    expect_accurate(spec, w, batch, one, false);
    for (const int ranks : {3, 8}) {
      const BatchResult many =
          run_on_gpus(spec, w, batch, Shares::even(tokens, ranks), DType::kBF16);
      EXPECT_TRUE(many.output == one.output) << ranks << " ranks";
    }
  }
}

// Tables of more than 512 experts are in the end of the ring. Two ranks have up to 512 experts
// each, and eight more levels of sending than slots.
TEST_F(RanksTest, ManyExperts) {
  for (const bool fp8 : {false, true}) {
    for (const int experts : {513, 1024}) {
      LayerSpec spec = spec_of(192, 72, experts, 8);
      spec.shared_intermediate = experts == 513 ? 48 : 0;
      const MoeWeights w = make_weights(spec, fp8 ? kFp8 : DType::kBF16);
      for (const int tokens : {5, 900}) {
        for (const double beta : {1.0, 0.2}) {
          const Batch batch = routed(spec, tokens, beta);
          // One rank's small pass is another kernel, which may split the second GEMM.
          LayerOptions options;
          options.cuda.schedule.small_tokens = 0;
          const BatchResult one =
              run_on_gpus(spec, w, batch, Shares::even(tokens, 1), DType::kBF16, 2, options);
          expect_accurate(spec, w, batch, one, fp8);
          for (const int ranks : {2, 3, 8}) {
            SCOPED_TRACE(::testing::Message()
                         << (fp8 ? "fp8, " : "bf16, ") << experts << " experts on " << ranks
                         << " ranks, " << tokens << " tokens, beta " << beta);
            const BatchResult many =
                run_on_gpus(spec, w, batch, Shares::even(tokens, ranks), DType::kBF16);
            EXPECT_EQ(many.ids, one.ids);
            EXPECT_TRUE(many.output == one.output);
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

// The gate chooses among 1,024, too, of ranks with different numbers of tokens.
TEST_F(RanksTest, ManyExpertsAreChosen) {
  LayerSpec spec = spec_of(192, 72, 1024, 10);
  spec.routing.score = ScoreFunction::kSigmoid;
  spec.routing.has_correction_bias = true;
  spec.routing.num_groups = 8;
  spec.routing.top_k_groups = 4;
  spec.routing.renormalize = true;
  for (const bool fp8 : {false, true}) {
    const MoeWeights w = make_weights(spec, fp8 ? kFp8 : DType::kBF16);
    for (const Shares& shares :
         {Shares::of({3, 1}), Shares::of({40, 300, 5, 0}), Shares::even(1200, 8)}) {
      const std::int64_t tokens =
          std::accumulate(shares.count.begin(), shares.count.end(), std::int64_t{0});
      SCOPED_TRACE(::testing::Message() << (fp8 ? "fp8, " : "bf16, ") << shares.count.size()
                                        << " ranks, " << tokens << " tokens");
      const Batch batch = random_batch(spec, tokens, DType::kBF16, 5);
      const BatchResult result = run_on_gpus(spec, w, batch, shares, DType::kBF16);
      expect_same_routing(spec, w, batch, result);
      expect_accurate(spec, w, batch, result, fp8);
      if (HasFailure()) return;
    }
  }
}

// Rows that are packed together end where others' wait for rows that this rank sends after them:
// each rank has a busy expert and then seven with one row of either.
TEST_F(RanksTest, RowsOfManyLevelsPackedTogether) {
  constexpr int kTokens = 9652;
  LayerSpec spec = spec_of(256, 256, 16, 1);
  const MoeWeights w = make_weights(spec, DType::kBF16);
  Batch batch = random_batch(spec, 2 * kTokens, DType::kBF16, 7);
  for (const int other : {0, 8}) {
    batch.topk_ids.insert(batch.topk_ids.end(), 4824, other);
    batch.topk_ids.insert(batch.topk_ids.end(), 4814, 8 - other);
    for (int e = 0; e < 16; ++e) {
      if (e % 8 != 0) batch.topk_ids.push_back(e);
    }
  }
  batch.topk_weights.assign(batch.topk_ids.size(), 1.0f);
  const LayerOptions options{.deadline = std::chrono::seconds(3)};
  const BatchResult one = run_on_gpus(spec, w, batch, Shares::of({2 * kTokens}), DType::kBF16, 1);
  const BatchResult two =
      run_on_gpus(spec, w, batch, Shares::even(2 * kTokens, 2), DType::kBF16, 2, options);
  EXPECT_TRUE(two.output == one.output);
}

TEST_F(RanksTest, WeightsOnInputBiasesAndClamps) {
  for (const bool fp8 : {false, true}) {
    for (const bool gated : {true, false}) {
      LayerSpec spec = ragged_spec(16, 4, fp8);
      spec.weight_on_input = true;
      spec.expert_bias = true;
      spec.activation.gated = gated;
      spec.activation.limit = gated ? 0.5f : INFINITY;
      spec.activation.up_bias = gated ? 1.0f : 0.0f;
      const MoeWeights w = make_weights(spec, fp8 ? kFp8 : DType::kBF16);
      const Batch batch = routed(spec, 700, 0.8);
      expect_accurate(spec, w, batch,
                      run_on_gpus(spec, w, batch, Shares::of({400, 99, 201}), DType::kBF16), fp8);
    }
  }
}

TEST_F(RanksTest, EmptySlotsAndTokensWithoutExperts) {
  const LayerSpec spec = ragged_spec(16, 4, false);
  const MoeWeights w = make_weights(spec, DType::kBF16);
  Batch batch = routed(spec, 400, 1.0);
  for (std::size_t i = 0; i < batch.topk_ids.size(); i += 3) batch.topk_ids[i] = kNoExpert;
  for (std::size_t i = 0; i < 600; ++i) batch.topk_ids[i] = kNoExpert;  // all of one rank's
  expect_accurate(spec, w, batch,
                  run_on_gpus(spec, w, batch, Shares::of({150, 150, 100}), DType::kBF16), false);
}

// Tiles in bands, in pairs of blocks, many per expert.
TEST_F(RanksTest, DeepExperts) {
  for (const bool fp8 : {false, true}) {
    const LayerSpec spec = spec_of(80, 4112, 3, 1);
    const MoeWeights w = make_weights(spec, fp8 ? kFp8 : DType::kBF16);
    const Batch batch = routed(spec, 2900, 0.8);
    expect_accurate(spec, w, batch,
                    run_on_gpus(spec, w, batch, Shares::even(2900, 2), DType::kBF16), fp8);
  }
}

// The kernels count what the routing asks for: no padding, a token once per rank.
TEST_F(RanksTest, TrafficIsTheClosedForm) {
  constexpr int kRanks = 4;
  for (const bool fp8 : {false, true}) {
    const LayerSpec spec = ragged_spec(30, 6, fp8);
    const MoeWeights w = make_weights(spec, fp8 ? kFp8 : DType::kBF16);
    const Shares shares = Shares::of({100, 700, 0, 33});
    const Batch batch = routed(spec, 833, 0.7);
    const BatchResult result = run_on_gpus(spec, w, batch, shares, DType::kBF16);
    const auto owner = [&](std::int32_t e) {
      int rank = 0;
      while (e >= spec.num_experts * (rank + 1) / kRanks) ++rank;
      return rank;
    };
    std::vector<std::uint64_t> tokens(kRanks), entries(kRanks), returned(kRanks);
    std::vector<std::int64_t> rows(static_cast<std::size_t>(spec.num_experts));
    for (std::size_t r = 0; r < kRanks; ++r) {
      for (std::int64_t t = shares.first[r]; t < shares.first[r] + shares.count[r]; ++t) {
        std::set<int> ranks;
        for (std::int64_t i = t * spec.top_k; i < (t + 1) * spec.top_k; ++i) {
          const std::int32_t e = result.ids[static_cast<std::size_t>(i)];
          ++rows[static_cast<std::size_t>(e)];
          if (owner(e) == static_cast<int>(r)) continue;
          ranks.insert(owner(e));
          ++entries[r];
          ++returned[static_cast<std::size_t>(owner(e))];
        }
        tokens[r] += ranks.size();
      }
    }
    const std::uint64_t token_bytes = fp8 ? 592 + 32 : 584 * 2;
    for (std::size_t r = 0; r < kRanks; ++r) {
      EXPECT_EQ(result.stats[r].dispatch_bytes, tokens[r] * token_bytes + entries[r] * 4) << r;
      EXPECT_EQ(result.stats[r].combine_bytes,
                returned[r] * static_cast<std::uint64_t>(spec.hidden) * 2)
          << r;
      EXPECT_EQ(result.stats[r].tokens_per_expert, rows) << r;
      EXPECT_GE(result.stats[r].heap_bytes_reserved, (kRanks - 1) * 700 * token_bytes);
    }
  }
}

TEST_F(RanksTest, OneKernelPerRankInAGraph) {
  const LayerSpec spec = ragged_spec(16, 4, false);
  const MoeWeights w = make_weights(spec, DType::kBF16);
  const Shares shares = Shares::of({200, 120});
  const Batch batch = random_batch(spec, 320, DType::kBF16, 4);
  const BatchResult expected = run_on_gpus(spec, w, batch, shares, DType::kBF16);
  run_all_ranks(World::threads(2), [&](const World& world) {
    DeviceRank rank(world, spec, w, 200);
    DeviceBatch share = rank.share(batch, shares);
    gpu::Graph graph =
        gpu::Graph::capture(rank.stream(), [&] { share.enqueue(rank.layer(), rank.stream()); });
    EXPECT_EQ(graph.num_nodes(), 1);
    EXPECT_EQ(graph.num_kernel_nodes(), 1);
    share.poison(rank.stream());
    rank.world().barrier();
    // One after the other, with nothing between: a rank may be a pass ahead of another.
    for (int i = 0; i < 20; ++i) graph.launch(rank.stream());
    rank.stream().synchronize();
    rank.world().barrier();
    EXPECT_TRUE(has_rows_of(share.fetch(), expected, shares, world.rank()));
    EXPECT_EQ(rank.layer().stats().epoch, 20u);
    rank.world().barrier();
  });
}

// Ranks that share a GPU begin on idle streams at the same moment, with passes behind their first.
// Were two streams given one hardware queue, a rank's first pass would stand behind a second that
// waits for it.
TEST_F(RanksTest, AThousandStartsOnASharedGpu) {
  constexpr int kPasses = 4;
  const int starts = static_cast<int>(test::number_from("SWITCHYARD_STARTS", 1000)) / 3;
  const LayerSpec spec = ragged_spec(16, 2, false);
  const MoeWeights w = make_weights(spec, DType::kBF16);
  for (const int ranks : {2, 4, 8}) {
    // With routing given: a gate's sums depend on how many tokens a rank has.
    const Batch batch = routed(spec, 4 * ranks, 0.9);
    const Shares shares = Shares::even(4 * ranks, ranks);
    const BatchResult expected = run_on_gpus(spec, w, batch, Shares::even(4 * ranks, 1),
                                             DType::kBF16, 2, kOrderOfManyTokens);
    run_all_ranks(World::threads(ranks), [&](const World& world) {
      DeviceRank rank(world, spec, w, 4, {.deadline = std::chrono::seconds(5)});
      DeviceBatch share = rank.share(batch, shares);
      share.poison(rank.stream());
      rank.stream().synchronize();
      for (int start = 0; start < starts; ++start) {
        rank.world().barrier();
        for (int i = 0; i < kPasses; ++i) share.enqueue(rank.layer(), rank.stream());
        rank.stream().synchronize();
      }
      rank.layer().check();
      EXPECT_TRUE(has_rows_of(share.fetch(), expected, shares, world.rank()));
      EXPECT_EQ(rank.layer().stats().epoch, static_cast<std::uint64_t>(starts * kPasses));
      rank.world().barrier();
    });
  }
}

// A rank that does not call is named, on all ranks that do; the process lives.
TEST_F(RanksTest, ARankThatSkipsACallIsNamed) {
  const LayerSpec spec = ragged_spec(16, 4, false);
  const MoeWeights w = make_weights(spec, DType::kBF16);
  const Batch batch = random_batch(spec, 300, DType::kBF16, 4);
  const Shares shares = Shares::even(300, 3);
  const LayerOptions options{.deadline = std::chrono::milliseconds(200)};
  for (const int absent : {0, 2}) {
    SCOPED_TRACE(::testing::Message() << "rank " << absent << " is absent");
    expect_absent_is_named(spec, w, batch, shares, absent, options);
  }
  expect_accurate(spec, w, batch, run_on_gpus(spec, w, batch, shares, DType::kBF16), false);
}

TEST_F(RanksTest, RanksThatDisagreeAreTold) {
  const LayerSpec spec = ragged_spec(16, 4, false);
  const MoeWeights w = make_weights(spec, DType::kBF16);
  expect_thrown(run_ranks(World::threads(2),
                          [&](const World& world) {
                            DeviceRank(world, spec, w, world.rank() == 0 ? 64 : 65);
                          }),
                ErrorCode::kSpecMismatch, "max_tokens");
}

WorkspaceOptions workspace_options(const World& world) {
  const LayerOptions of_rank = options_of_rank(world.rank(), world.size(), {});
  gpu::set_device(of_rank.cuda.device);
  WorkspaceOptions options;
  options.backend = Backend::kCuda;
  options.max_tokens = 150;
  options.device = of_rank.cuda.device;
  options.reserved_sms = of_rank.cuda.reserved_sms;
  return options;
}

TEST_F(RanksTest, LayersOfAModelShareTheirMemory) {
  const LayerSpec spec = ragged_spec(16, 4, false);
  const MoeWeights w[] = {make_weights(spec, DType::kBF16, 3), make_weights(spec, DType::kBF16, 4)};
  const Batch batch = random_batch(spec, 300, DType::kBF16, 4);
  const Shares shares = Shares::even(300, 2);
  const BatchResult expected[] = {run_on_gpus(spec, w[0], batch, shares, DType::kBF16),
                                  run_on_gpus(spec, w[1], batch, shares, DType::kBF16)};
  run_all_ranks(World::threads(2), [&](const World& world) {
    const auto r = static_cast<std::size_t>(world.rank());
    const Workspace workspace(world, spec, workspace_options(world));
    DeviceRank first(world, spec, w[0], 150, {.workspace = &workspace});
    DeviceRank second(world, spec, w[1], 150, {.workspace = &workspace});
    DeviceBatch share(spec, share_of_batch(batch, shares, world.rank(), spec.top_k), DType::kBF16);
    for (int i = 0; i < 6; ++i) {
      // Behind each other, on two streams.
      (i % 2 == 0 ? first : second).forward(share);
      const BatchResult result = share.fetch();
      EXPECT_EQ(std::memcmp(result.output.view().data,
                            expected[i % 2].output.rows_from(shares.first[r], shares.count[r]).data,
                            static_cast<std::size_t>(shares.count[r] * spec.hidden) * 2),
                0)
          << i;
    }
    first.world().barrier();
  });
  for (const std::exception_ptr& failure : run_ranks(World::threads(2), [&](const World& world) {
         const Workspace workspace(world, spec, workspace_options(world));
         LayerOptions options;
         if (world.rank() == 1) options.workspace = &workspace;
         DeviceRank layer(world, spec, w[1], 150, options);
       })) {
    ASSERT_TRUE(failure);
    try {
      std::rethrow_exception(failure);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kSpecMismatch) << error.what();
    }
  }
}

TEST_F(RanksTest, RanksThatDoNotFitOnTheirGpuAreTold) {
  const LayerSpec spec = ragged_spec(16, 4, false);
  const MoeWeights w = make_weights(spec, DType::kBF16);
  expect_thrown(run_ranks(World::threads(2),
                          [&](const World& world) {
                            gpu::set_device(0);
                            const LayerOptions options{.backend = Backend::kCuda,
                                                       .cuda = {.device = 0, .reserved_sms = 10}};
                            MoeLayer(world, spec, w, options);
                          }),
                ErrorCode::kInvalidArgument, "ranks 0 and 1 share the GPU");
}

TEST_F(RanksTest, MemoryIsSharedEitherWay) {
  constexpr std::size_t kBytes = 3 << 20;
  for (const gpu::Sharing sharing : {gpu::Sharing::kFileDescriptors, gpu::Sharing::kIpc}) {
    run_all_ranks(World::threads(3), [&](const World& world) {
      gpu::set_device(world.rank() % gpu::device_count());
      World mine = world;
      const gpu::SymmetricMemory memory(world.fabric(), kBytes, sharing);
      ASSERT_GE(memory.bytes(), kBytes);
      // Each rank writes its part of everybody's memory.
      std::vector<std::uint32_t> words(1000, 0x5eed + static_cast<std::uint32_t>(world.rank()));
      for (int r = 0; r < 3; ++r) {
        gpu::copy_memory(memory.base(r) + static_cast<std::size_t>(world.rank()) * (1 << 20),
                         words.data(), words.size() * 4);
      }
      gpu::synchronize_device();
      mine.barrier();
      for (int r = 0; r < 3; ++r) {
        std::vector<std::uint32_t> read(1000);
        gpu::copy_memory(read.data(),
                         memory.base(world.rank()) + static_cast<std::size_t>(r) * (1 << 20),
                         read.size() * 4);
        EXPECT_EQ(read, std::vector<std::uint32_t>(1000, 0x5eed + static_cast<std::uint32_t>(r)));
      }
      mine.barrier();
    });
  }
}

struct RanksSoakCase {
  const char* name;
  DType weights;
  int ranks;
};
void PrintTo(const RanksSoakCase& soak, std::ostream* out) { *out << soak.name; }

using RanksSoak = OnGpu<::testing::TestWithParam<RanksSoakCase>>;

// Random numbers of tokens, none included, and random skew; ranks start when they come. A batch's
// output has the same bits whenever it comes again.
TEST_P(RanksSoak, ManyForwardsOfRandomSizes) {
  constexpr int kBatches = 24, kMaxTokens = 600;
  const auto forwards = static_cast<int>(test::number_from("SWITCHYARD_SOAK_FORWARDS", 500));
  const std::uint64_t seed = test::soak_seed();
  const int ranks = GetParam().ranks;
  LayerSpec spec = ragged_spec(32, 4, true);
  spec.shared_intermediate = 136;
  const MoeWeights w = make_weights(spec, GetParam().weights, seed + 2);
  std::mt19937 random(static_cast<std::mt19937::result_type>(seed));
  std::vector<Batch> batches;
  std::vector<Shares> shares;
  for (int i = 0; i < kBatches; ++i) {
    std::vector<std::int64_t> counts;
    for (int r = 0; r < ranks; ++r) {
      const int most = i % 2 != 0 ? 12 : kMaxTokens;
      counts.push_back(random() % 4 == 0
                           ? 0
                           : static_cast<std::int64_t>(random() % static_cast<unsigned>(most)) + 1);
    }
    shares.push_back(Shares::of(counts));
    const std::int64_t tokens = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
    batches.push_back(i % 3 != 0 || tokens == 0 ? random_batch(spec, tokens, DType::kBF16, random())
                                                : routed(spec, tokens, 0.3 + 0.1 * (i % 7)));
  }
  run_all_ranks(World::threads(ranks), [&](const World& world) {
    DeviceRank rank(world, spec, w, kMaxTokens);
    std::vector<DeviceBatch> device;
    for (int i = 0; i < kBatches; ++i) {
      device.push_back(
          rank.share(batches[static_cast<std::size_t>(i)], shares[static_cast<std::size_t>(i)]));
    }
    std::vector<std::optional<std::size_t>> checksums(kBatches);
    std::mt19937 order(static_cast<std::mt19937::result_type>(seed + 6));  // the same on all ranks
    rank.world().barrier();
    for (int i = 0; i < forwards; ++i) {
      const std::size_t which = order() % kBatches;
      device[which].poison(rank.stream());
      device[which].enqueue(rank.layer(), rank.stream());
      rank.stream().synchronize();
      const std::size_t checksum = device[which].checksum();
      if (!checksums[which]) checksums[which] = checksum;
      if (checksum != *checksums[which]) {
        ADD_FAILURE() << "rank " << world.rank() << ", forward " << i << ", batch " << which;
        break;
      }
    }
    rank.world().barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Layers, RanksSoak,
                         ::testing::Values(RanksSoakCase{"Bf16On2", DType::kBF16, 2},
                                           RanksSoakCase{"Fp8On2", kFp8, 2},
                                           RanksSoakCase{"Bf16On4", DType::kBF16, 4},
                                           RanksSoakCase{"Fp8On8", kFp8, 8}),
                         [](const auto& soak) { return std::string(soak.param.name); });

// Rank 1 does not come to the third pass. Rank 0's kernel runs until rank 1 aborts the world, or
// for as long as `destroys` lets it.
void leave_rank_0_waiting(LayerOptions options, bool destroys) {
  const LayerSpec spec = ragged_spec(16, 4, false);
  const MoeWeights w = make_weights(spec, DType::kBF16);
  const Batch batch = random_batch(spec, 80, DType::kBF16, 5);
  const Shares shares = Shares::of({40, 40});
  run_all_ranks(World::threads(2), [&](const World& world) {
    std::optional<DeviceRank> rank(std::in_place, world, spec, w, 40, options);
    DeviceBatch mine = rank->share(batch, shares);
    rank->forward(mine);
    rank->forward(mine);
    if (world.rank() == 1) {
      if (destroys) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      world.abort();
    } else {
      mine.enqueue(rank->layer(), rank->stream());
      const auto start = std::chrono::steady_clock::now();
      if (destroys) {
        rank->destroy_layer();
        EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
        return;
      }
      rank->stream().synchronize();
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
    }
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(test::blame_of(
                    1, [&] { rank->layer().check(); }, "abort")
                    .code,
                ErrorCode::kAborted);
    }
  });
}

TEST_F(RanksTest, AbortEndsKernelsThatWait) {
  leave_rank_0_waiting({.deadline = std::chrono::seconds(60)}, false);
}

TEST_F(RanksTest, DestructionWaitsForTheDeadlineAtMost) {
  leave_rank_0_waiting({.deadline = std::chrono::seconds(2)}, true);
}

// Experts in a random order, and some of them twice; then in another.
TEST_F(RanksTest, ExpertsStandWhereThePlacementSays) {
  const LayerSpec spec = ragged_spec(16, 4, false);
  const MoeWeights w = make_weights(spec, DType::kBF16);
  std::mt19937 random(3);
  const auto draw = [&] {
    ExpertPlacement placement;
    for (int p = 0; p < 22; ++p) placement.expert_at.push_back(p % 16);
    std::ranges::shuffle(placement.expert_at, random);
    return placement;
  };
  const ExpertPlacement placements[] = {draw(), draw()};
  for (const Shares& shares :
       {Shares::of({5}), Shares::of({300}), Shares::of({3, 1}), Shares::of({40, 300, 5, 0})}) {
    const int ranks = static_cast<int>(shares.count.size());
    SCOPED_TRACE(::testing::Message() << ranks << " ranks");
    const std::int64_t tokens =
        std::accumulate(shares.count.begin(), shares.count.end(), std::int64_t{0});
    const Batch batch = random_batch(spec, tokens, DType::kBF16, 5);
    const BatchResult plain = run_on_gpus(spec, w, batch, shares, DType::kBF16);
    std::vector<BatchResult> results(2, empty_result(spec, batch, ranks, DType::kBF16));
    run_all_ranks(World::threads(ranks), [&](const World& world) {
      const auto places_of = [&](const ExpertPlacement& placement) {
        MoeWeights own = w;
        own.experts.clear();
        for (const std::int32_t e : placement.expert_at) {
          own.experts.push_back(w.experts[static_cast<std::size_t>(e)]);
        }
        return own;
      };
      const LayerOptions options{.placement = placements[0]};
      DeviceRank rank(world, spec, places_of(placements[0]), 300, options);
      rank.run(batch, shares, results[0]);
      rank.layer().rebind(places_of(placements[1]), placements[1]);
      rank.run(batch, shares, results[1]);
    });
    for (const BatchResult& result : results) {
      EXPECT_EQ(result.ids, plain.ids);
      // Products of the GPU do not depend on the tile that a row is in.
      EXPECT_TRUE(result.output == plain.output);
      for (std::size_t r = 0; r < result.stats.size(); ++r) {
        EXPECT_EQ(result.stats[r].tokens_per_expert, plain.stats[r].tokens_per_expert);
      }
    }
  }
}

}  // namespace
}  // namespace switchyard::testing
