#include "bench/load.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <numeric>

#include "bench/suite.h"
#include "models/generate.h"
#include "switchyard/error.h"

namespace switchyard::bench {
namespace {

using ::testing::ElementsAre;

TEST(BenchLoad, LoadIsThatOfTheMostLoadedRank) {
  // Ranks of three have 2, 3 and 3 of eight experts.
  const BenchLayer layer =
      bench_layer("mixtral-8x7b", ConfigOverrides{.hidden = 64, .intermediate = 32});
  const MoeWeights weights = generate_weights(layer.spec, DType::kBF16, 1);
  constexpr double kRowFlops = 2.0 * 3 * 64 * 32;
  constexpr std::uint64_t kExpertBytes = 2 * 3 * 64 * 32;
  const std::vector<std::int64_t> counts = {9, 0, 1, 1, 1, 5, 0, 0};
  const Load all = heaviest_load(layer.spec, weights, counts, 17, 1);
  EXPECT_EQ(all.flops, 17 * kRowFlops);
  EXPECT_EQ(all.touched_bytes, 5 * kExpertBytes);
  EXPECT_EQ(all.nvlink_bytes, 0u);
  // The first has the most rows, the second the most experts that were hit.
  const Load shared_out = heaviest_load(layer.spec, weights, counts, 6, 3);
  EXPECT_EQ(shared_out.flops, 9 * kRowFlops);
  EXPECT_EQ(shared_out.touched_bytes, 3 * kExpertBytes);

  // Every rank has the shared expert and its own tokens there.
  LayerSpec with_shared = layer.spec;
  with_shared.shared_intermediate = 64;
  const MoeWeights more = generate_weights(with_shared, DType::kBF16, 1);
  const Load load = heaviest_load(with_shared, more, counts, 6, 3);
  EXPECT_EQ(load.flops, (9 + 2 * 6) * kRowFlops);
  EXPECT_EQ(load.touched_bytes, (3 + 2) * kExpertBytes);
}

TEST(BenchLoad, FourBitsCountWithTheirScales) {
  const BenchLayer layer =
      bench_layer("mixtral-8x7b", ConfigOverrides{.hidden = 64, .intermediate = 32});
  constexpr std::uint64_t kElements = 3 * 64 * 32, kGroups = kElements / 32;
  const std::vector<std::int64_t> counts = {9, 0, 1, 1, 1, 5, 0, 0};
  for (const auto& [dtype, scale_bytes] :
       {std::pair(DType::kF4E2M1, 1), std::pair(DType::kU4, 2)}) {
    const MoeWeights weights = generate_weights(layer.spec, dtype, 1);
    const std::uint64_t expert = kElements / 2 + kGroups * static_cast<std::uint64_t>(scale_bytes);
    const Load load = heaviest_load(layer.spec, weights, counts, 17, 1);
    EXPECT_EQ(load.touched_bytes, 5 * expert);
    EXPECT_EQ(load.flops, 17 * 2.0 * kElements);
    // So does a floor that is bound by reading.
    const machine::GpuFacts facts{.gpu = "a GPU",
                                  .launch_seconds = {1e-6, "here"},
                                  .read_bytes_per_second = {1e6, "here"},
                                  .bf16_flops_per_second = machine::Roof{1e18, "here"}};
    const auto floor = machine::floor_us(facts, load, DType::kBF16, 1);
    ASSERT_TRUE(floor.has_value());
    EXPECT_NEAR(*floor, 1 + static_cast<double>(5 * expert), 1e-6);
  }
}

TEST(BenchLoad, Percentiles) {
  EXPECT_EQ(percentile({3}, 0.9), 3);
  EXPECT_EQ(percentile({5, 1, 4, 2, 3}, 0.5), 3);
  EXPECT_EQ(percentile({5, 1, 4, 2, 3}, 0.9), 5);
  EXPECT_EQ(percentile({5, 1, 4, 2, 3}, 0), 1);
  EXPECT_THROW(percentile({}, 0.5), Error);
}

TEST(BenchLoad, LoadQuantilesAreOfTheMean) {
  EXPECT_THAT(load_quantiles({6, 0, 2}), ElementsAre(0, 0.75, 2.25));
  EXPECT_THAT(load_quantiles({5}), ElementsAre(1));
  EXPECT_TRUE(load_quantiles({0, 0}).empty());
  std::vector<std::int64_t> counts(256);
  std::iota(counts.rbegin(), counts.rend(), 0);
  const std::vector<double> quantiles = load_quantiles(counts);
  ASSERT_EQ(quantiles.size(), 64u);
  EXPECT_TRUE(std::is_sorted(quantiles.begin(), quantiles.end()));
  EXPECT_EQ(quantiles.front(), 0);
  EXPECT_EQ(quantiles.back(), 255 / 127.5);
}

}  // namespace
}  // namespace switchyard::bench
