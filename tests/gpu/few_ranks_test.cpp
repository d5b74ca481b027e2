// Passes of few tokens over ranks that promise each other so: see docs/decisions/0048. Where there
// are fewer GPUs than ranks, ranks share them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "model/errors.h"
#include "support/accuracy.h"
#include "support/device_ranks.h"
#include "support/kernel_types.h"
#include "support/layers.h"
#include "support/numbers.h"
#include "support/ranks.h"
#include "switchyard/workspace.h"

namespace switchyard::testing {
namespace {

AdjustCall promise(int tokens) {
  return [tokens](ForwardInput& input, ForwardOutput&, std::size_t) {
    input.max_tokens_per_rank = tokens;
  };
}
int most_of(const Shares& shares) {
  return static_cast<int>(*std::ranges::max_element(shares.count));
}
std::int64_t total_of(const Shares& shares) {
  return std::accumulate(shares.count.begin(), shares.count.end(), std::int64_t{0});
}
// A pass of few tokens raises no flags: its words carry their own.
bool was_few(const ForwardStats& stats) {
  return stats.dispatch_bytes != 0 && stats.signal_bytes == 0;
}

class GpuFewRanks : public OnGpu<::testing::TestWithParam<DType>> {
 protected:
  static DType type() { return GetParam(); }
  static LayerSpec spec(int hidden, int intermediate, int num_experts, int top_k) {
    return spec_for(type(), hidden, intermediate, num_experts, top_k);
  }
  static BatchResult run(const LayerSpec& spec, const MoeWeights& w, const Batch& batch,
                         const Shares& shares) {
    const int most = std::max(1, most_of(shares));
    return run_on_gpus(spec, w, batch, shares, DType::kBF16, 3, {}, promise(most));
  }
  static void expect_right(const LayerSpec& spec, const MoeWeights& w, const Batch& batch,
                           const Shares& shares) {
    const BatchResult result = run(spec, w, batch, shares);
    if (type() == kFp8) {
      expect_accurate_fp8(spec, w, batch, result, 2);
    } else {
      expect_accurate(spec, w, batch, result);
    }
    for (std::size_t r = 0; r < shares.count.size(); ++r) {
      EXPECT_TRUE(was_few(result.stats[r])) << r;
      EXPECT_EQ(result.stats[r].tokens, static_cast<std::uint64_t>(shares.count[r]));
      EXPECT_TRUE(counts_rows_of(spec, batch, result.stats[r])) << r;
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Types, GpuFewRanks, ::testing::ValuesIn(compiled_types()), name_of_type);

TEST_P(GpuFewRanks, EveryShape) {
  for (const int top_k : {1, 2, 8}) {
    for (const auto& [hidden, intermediate] :
         {std::pair{16, 16}, {200, 24}, {584, 360}, {72, 648}, {2048, 136}, {1032, 128}}) {
      const LayerSpec layer = spec(hidden, intermediate, 12, top_k);
      const MoeWeights w = weights_in(layer, type());
      for (const Shares& shares :
           {Shares::of({1, 1}), Shares::of({4, 3}), Shares::of({0, 2}), Shares::of({2, 0, 1, 2}),
            Shares::even(8, 8), Shares::of({1, 1, 0, 1, 0})}) {
        SCOPED_TRACE(::testing::Message()
                     << "H " << hidden << " I " << intermediate << " top-" << top_k << ", "
                     << shares.count.size() << " ranks, " << total_of(shares) << " tokens");
        expect_right(layer, w, routed(layer, total_of(shares), 0.9), shares);
        if (HasFailure()) return;
      }
    }
  }
}

// In the sanitizer's list.
TEST_P(GpuFewRanks, SanitizeOddShape) {
  LayerSpec odd = spec(208, 48, 5, 2);
  odd.expert_bias = true;
  const MoeWeights w = weights_in(odd, type());
  expect_right(odd, w, routed(odd, 5, 0.9), Shares::of({3, 2}));
}

TEST_P(GpuFewRanks, EveryActivationWithBiases) {
  for (int kind = 0; kind <= static_cast<int>(ActivationKind::kSitu); ++kind) {
    for (const bool gated : {true, false}) {
      if (!gated && kind == static_cast<int>(ActivationKind::kSitu)) continue;
      LayerSpec any = spec(320, 208, 6, 2);
      any.activation.kind = static_cast<ActivationKind>(kind);
      any.activation.gated = gated;
      any.expert_bias = true;
      SCOPED_TRACE(::testing::Message() << "kind " << kind << " gated " << gated);
      expect_right(any, weights_in(any, type()), routed(any, 5, 0.9), Shares::of({3, 2}));
    }
  }
}

// Slots and whole tokens without an expert, all experts on one rank, and no expert at all.
TEST_P(GpuFewRanks, EmptySlotsAndLopsidedRouting) {
  const LayerSpec layer = spec(320, 272, 16, 4);
  const MoeWeights w = weights_in(layer, type());
  const Shares shares = Shares::of({4, 3});
  Batch batch = routed(layer, 7, 1.0);
  for (std::size_t i = 0; i < batch.topk_ids.size(); i += 3) batch.topk_ids[i] = kNoExpert;
  for (std::size_t i = 4; i < 8; ++i) batch.topk_ids[i] = kNoExpert;
  expect_right(layer, w, batch, shares);
  for (const int first : {0, 8}) {
    for (std::size_t i = 0; i < batch.topk_ids.size(); ++i) {
      batch.topk_ids[i] = first + static_cast<std::int32_t>(i + i / 4) % 8;
    }
    expect_right(layer, w, batch, shares);
  }
  std::ranges::fill(batch.topk_ids, kNoExpert);
  for (const float y : run(layer, w, batch, shares).output.floats()) ASSERT_EQ(y, 0);
}

// A NaN stays with its token, and so does an infinity, on whichever rank.
TEST_P(GpuFewRanks, PoisonStays) {
  const LayerSpec layer = spec(320, 272, 8, 4);
  const MoeWeights w = weights_in(layer, type());
  const Shares shares = Shares::of({2, 4});
  Batch batch = routed(layer, 6, 0.9);
  const std::vector<float> clean = run(layer, w, batch, shares).output.floats();
  batch.x.set(1 * layer.hidden + 3, NAN);
  batch.x.set(4 * layer.hidden + 130, INFINITY);
  const std::vector<float> poisoned = run(layer, w, batch, shares).output.floats();
  for (std::size_t i = 0; i < clean.size(); ++i) {
    const std::size_t token = i / static_cast<std::size_t>(layer.hidden);
    if (token == 1 || token == 4) {
      ASSERT_FALSE(std::isfinite(poisoned[i])) << i;
    } else {
      ASSERT_EQ(poisoned[i], clean[i]) << i;
    }
  }
}

// Experts stand in another order, and some twice.
TEST_P(GpuFewRanks, ExpertsStandWhereThePlacementSays) {
  const LayerSpec layer = spec(320, 272, 8, 4);
  const MoeWeights w = weights_in(layer, type());
  ExpertPlacement placement;
  for (int p = 0; p < 12; ++p) placement.expert_at.push_back((5 * p + 2) % 8);
  MoeWeights own = w;
  own.experts.clear();
  for (const std::int32_t e : placement.expert_at) {
    own.experts.push_back(w.experts[static_cast<std::size_t>(e)]);
  }
  const Shares shares = Shares::of({2, 3});
  const Batch batch = routed(layer, 5, 0.9);
  const BatchResult plain = run(layer, w, batch, shares);
  const BatchResult placed =
      run_on_gpus(layer, own, batch, shares, DType::kBF16, 2, {.placement = placement}, promise(3));
  EXPECT_EQ(placed.ids, plain.ids);
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_TRUE(was_few(placed.stats[r]));
    EXPECT_EQ(placed.stats[r].tokens_per_expert, plain.stats[r].tokens_per_expert);
  }
  if (type() == kFp8) {
    expect_accurate_fp8(layer, w, batch, placed, 2);
  } else {
    expect_accurate(layer, w, batch, placed);
  }
}

// Two layers of different shapes take turns in one memory, in passes with a promise and without,
// of random sizes. Ranks start when they come. The same batch has the same bits whenever it comes.
TEST_P(GpuFewRanks, TakeTurnsWithLargePasses) {
  constexpr int kBatches = 24, kMaxTokens = 64;
  const auto forwards = static_cast<int>(test::number_from("SWITCHYARD_SOAK_FORWARDS", 500));
  const std::uint64_t seed = test::soak_seed();
  const DType compute = is_four_bit(type()) ? DType::kBF16 : type();
  for (const int ranks : {2, 4}) {
    const std::vector<LayerSpec> specs = {spec(512, 256, 24, 4), spec(256, 512, 12, 8)};
    const std::vector<MoeWeights> weights = {make_weights(specs[0], type(), 3),
                                             make_weights(specs[1], type(), 4)};
    std::mt19937 random(static_cast<std::mt19937::result_type>(seed));
    std::vector<Batch> batches;
    std::vector<Shares> shares;
    for (int i = 0; i < kBatches; ++i) {
      const unsigned most = i % 3 == 0 ? kMaxTokens : 8U / static_cast<unsigned>(ranks);
      std::vector<std::int64_t> counts;
      for (int r = 0; r < ranks; ++r) counts.push_back(random() % (most + 1));
      if (std::ranges::max(counts) == 0) counts.back() = 1;
      shares.push_back(Shares::of(counts));
      batches.push_back(routed(specs[static_cast<std::size_t>(i % 2)], total_of(shares.back()),
                               0.3 + 0.1 * (i % 7)));
    }
    run_all_ranks(World::threads(ranks), [&](const World& world) {
      const LayerOptions of_rank = options_of_rank(world.rank(), ranks, {});
      gpu::set_device(of_rank.cuda.device);
      const Workspace workspace(world, specs,
                                {.backend = Backend::kCuda,
                                 .max_tokens = kMaxTokens,
                                 .compute = compute,
                                 .device = of_rank.cuda.device,
                                 .reserved_sms = of_rank.cuda.reserved_sms});
      std::vector<std::unique_ptr<DeviceRank>> layers;
      for (std::size_t l = 0; l < 2; ++l) {
        layers.push_back(std::make_unique<DeviceRank>(
            world, specs[l], weights[l], kMaxTokens,
            LayerOptions{.workspace = &workspace, .compute = compute}));
      }
      std::vector<DeviceBatch> device;
      for (std::size_t i = 0; i < kBatches; ++i) {
        device.push_back(layers[i % 2]->share(batches[i], shares[i]));
      }
      std::vector<std::optional<std::size_t>> checksums(kBatches);
      std::mt19937 order(static_cast<std::mt19937::result_type>(seed + 6));  // on all ranks alike
      const gpu::Stream& stream = layers[0]->stream();
      int few = 0;
      layers[0]->world().barrier();
      for (int i = 0; i < forwards; ++i) {
        const std::size_t which = order() % kBatches;
        MoeLayer& layer = layers[which % 2]->layer();
        device[which].poison(stream);
        device[which].enqueue(layer, stream, promise(most_of(shares[which])));
        stream.synchronize();
        const std::size_t checksum = device[which].checksum();
        if (!checksums[which]) checksums[which] = checksum;
        if (i < 100) {
          // It waits for the device, which others' next passes may share.
          layers[0]->world().barrier();
          few += was_few(layer.stats());
          layers[0]->world().barrier();
        }
        if (checksum != *checksums[which]) {
          ADD_FAILURE() << "rank " << world.rank() << ", forward " << i << ", batch " << which;
          break;
        }
      }
      EXPECT_GT(few, 10);
      layers[0]->world().barrier();
    });
  }
}

TEST_P(GpuFewRanks, InAGraph) {
  const LayerSpec layer = spec(512, 256, 16, 4);
  const MoeWeights w = weights_in(layer, type());
  const Shares shares = Shares::of({3, 4});
  const Batch batch = routed(layer, 7, 0.9);
  const BatchResult expected = run(layer, w, batch, shares);
  run_all_ranks(World::threads(2), [&](const World& world) {
    DeviceRank rank(world, layer, w, 200);
    DeviceBatch share = rank.share(batch, shares);
    gpu::Graph graph = gpu::Graph::capture(
        rank.stream(), [&] { share.enqueue(rank.layer(), rank.stream(), promise(4)); });
    EXPECT_EQ(graph.num_kernel_nodes(), 1);
    rank.world().barrier();
    for (int replay = 0; replay < 100; ++replay) {
      share.poison(rank.stream());
      // One after the other, with nothing between: a rank may be a pass ahead of another.
      for (int i = 0; i < 20; ++i) graph.launch(rank.stream());
      rank.stream().synchronize();
      ASSERT_TRUE(has_rows_of(share.fetch(), expected, shares, world.rank())) << replay;
    }
    EXPECT_EQ(rank.layer().stats().epoch, 2000u);
    rank.world().barrier();
  });
}

TEST_P(GpuFewRanks, ARankThatSkipsACallIsNamed) {
  const LayerSpec layer = spec(320, 272, 16, 4);
  const MoeWeights w = weights_in(layer, type());
  const Batch batch = routed(layer, 6, 0.9);
  for (const int absent : {0, 2}) {
    SCOPED_TRACE(::testing::Message() << "rank " << absent << " is absent");
    expect_absent_is_named(layer, w, batch, Shares::even(6, 3), absent,
                           {.deadline = std::chrono::milliseconds(200)}, promise(2), "slots");
  }
}

using FewRanksTest = OnGpu<::testing::Test>;

// A rank that promises nothing waits for counts, and sends no slots.
TEST_F(FewRanksTest, OtherPromisesAreTold) {
  const LayerSpec spec = spec_of(320, 272, 16, 4);
  const MoeWeights w = make_weights(spec, DType::kBF16);
  const Batch batch = routed(spec, 6, 0.9);
  run_all_ranks(World::threads(2), [&](const World& world) {
    const bool promises = world.rank() == 0;
    DeviceRank rank(world, spec, w, 8,
                    {.deadline = std::chrono::milliseconds(promises ? 200 : 5000)});
    DeviceBatch share = rank.share(batch, Shares::even(6, 2));
    share.enqueue(rank.layer(), rank.stream(), promises ? promise(3) : AdjustCall());
    rank.stream().synchronize();
    const test::Blame blame = test::blame_of(
        1, [&] { rank.layer().stats(); }, "slots");
    EXPECT_THAT(blame.words, ::testing::HasSubstr("the same max_tokens_per_rank"));
    rank.world().barrier();
  });
}

TEST_F(FewRanksTest, PromisesAreHeld) {
  const LayerSpec spec = spec_of(320, 272, 16, 4);
  const MoeWeights w = make_weights(spec, DType::kBF16);
  const Batch batch = routed(spec, 6, 0.9);
  for (const int promised : {-1, 2, 9}) {
    expect_call_refused(spec, w, batch, promise(promised), ErrorCode::kInvalidArgument,
                        "max_tokens_per_rank");
  }
  // More than the kernel takes, what it does not compute, and what the caller has forbidden.
  const auto few = [&](const LayerOptions& options, const AdjustCall& adjust) {
    return was_few(
        run_on_gpus(spec, w, batch, Shares::even(6, 2), DType::kBF16, 1, options, adjust).stats[0]);
  };
  EXPECT_TRUE(few({}, promise(3)));
  EXPECT_FALSE(few({}, {}));
  EXPECT_FALSE(few({.cuda = {.schedule = {.small_tokens = 0}}}, promise(3)));
  EXPECT_FALSE(few({.diagnostics = {.recorded_steps = 4}}, promise(3)));
  LayerSpec shared = spec;
  shared.shared_intermediate = 48;
  EXPECT_FALSE(was_few(run_on_gpus(shared, make_weights(shared, DType::kBF16), batch,
                                   Shares::even(6, 2), DType::kBF16, 1, {}, promise(3))
                           .stats[0]));
  // A call that it does not compute is refused: a rank does not know what others ask for.
  const AdjustCall accumulates = [](ForwardInput& input, ForwardOutput& output, std::size_t) {
    input.max_tokens_per_rank = 3;
    output.accumulate = true;
  };
  expect_call_refused(spec, w, batch, accumulates, ErrorCode::kUnsupported,
                      "max_tokens_per_rank is 3");
}

}  // namespace
}  // namespace switchyard::testing
