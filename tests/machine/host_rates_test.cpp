#include "machine/host_rates.h"

#include <gtest/gtest.h>

#include <set>

#include "common/host_memory.h"
#include "cpu/tile_gemm.h"
#include "machine/host.h"
#include "models/generate.h"
#include "support/specs.h"

namespace switchyard::machine {
namespace {

LayerSpec small_spec() { return testing::spec_of(96, 700, 4, 2); }

TEST(TouchedWeights, AreThoseOfThePickedExperts) {
  const LayerSpec spec = small_spec();
  const MoeWeights weights = generate_weights(spec, DType::kBF16, 1, {});
  const std::vector<std::int64_t> counts = {0, 7, 0, 1};
  std::size_t bytes = 0;
  for (const ByteRange range : touched_weights(weights, counts)) bytes += range.size();
  EXPECT_EQ(bytes, touched_weight_bytes(weights, counts));
}

TEST(TouchedWeights, InterleavedMatricesAreReadOnce) {
  // Gate and up rows alternate, as in packed checkpoints.
  std::vector<std::uint16_t> packed(2 * 6 * 8);
  MoeWeights weights;
  weights.experts.resize(1);
  weights.experts[0].gate = {packed.data(), DType::kBF16, 6, 8, 16};
  weights.experts[0].up = {packed.data() + 8, DType::kBF16, 6, 8, 16};
  const auto ranges = touched_weights(weights, std::vector<std::int64_t>{1});
  ASSERT_EQ(ranges.size(), 1u);
  EXPECT_EQ(ranges[0].size(), packed.size() * 2);
}

TEST(MeasuredRates, ArePositiveAndSane) {
  const TileProduct product{64, 16, 64, 16};
  for (const DType dtype : {cpu::gemm_dtype(DType::kBF16), DType::kF32}) {
    const double rate = measure_gemm_rate({product}, dtype, 2, 0.02);
    EXPECT_GT(rate, 1e6);
    EXPECT_LT(rate, 1e16);
  }
  EXPECT_EQ(measure_gemm_rate({}, DType::kF32, 1, 0.01), 0);

  const std::vector<std::byte> memory(std::size_t{1} << 22, std::byte{1});
  const ByteRange range(memory);
  const double bandwidth = measure_read_rate(std::span(&range, 1), 2, 0.02);
  EXPECT_GT(bandwidth, 1e6);
  EXPECT_LT(bandwidth, 1e14);
  EXPECT_EQ(measure_read_rate({}, 1, 0.01), 0);
}

TEST(MeasuredGemmRate, CountsOnlyWantedRows) {
  const double full = measure_gemm_rate({{64, 16, 256, 16}}, DType::kF32, 1, 0.05);
  const double mostly_padding = measure_gemm_rate({{64, 16, 256, 1}}, DType::kF32, 1, 0.05);
  EXPECT_LT(mostly_padding, full / 4);
}

TEST(Machine, KnowsItself) {
  EXPECT_GT(hardware_threads(), 0);
  EXPECT_GT(host_memory().total, std::uint64_t{1} << 20);
  EXPECT_LE(host_memory().available, host_memory().total);
  EXPECT_GT(peak_resident_bytes(), std::uint64_t{1} << 20);
  const std::set<std::string> policies = {"always", "madvise", "never", "unknown"};
  EXPECT_EQ(policies.count(huge_page_policy()), 1u);
  EXPECT_NE(own_executable().find("machine_test"), std::string::npos);
}

}  // namespace
}  // namespace switchyard::machine
