// Many forwards on one GPU: nothing hangs, each batch's output has the same bits whenever it comes
// again, and is right by the fp64 reference when it comes first.
//
//   SWITCHYARD_SOAK_FORWARDS=100000   how many (default 2000; cases of large layers do fewer)
//   SWITCHYARD_SOAK_SEED=7            other weights and batches
#include <gtest/gtest.h>

#include <optional>
#include <ostream>
#include <random>
#include <vector>

#include "gpu/device.h"
#include "support/device_batch.h"
#include "support/fp8.h"
#include "support/layers.h"
#include "support/numbers.h"

namespace switchyard::testing {
namespace {

struct SoakCase {
  const char* name;
  DType weights;
  int hidden, intermediate, experts, top_k;
  bool shared;
  int max_tokens, batches;
  int forwards;  // SWITCHYARD_SOAK_FORWARDS times this over 2000, where that is set
};
void PrintTo(const SoakCase& soak, std::ostream* out) { *out << soak.name; }
constexpr SoakCase kCases[] = {
    {"Bf16", DType::kBF16, 592, 360, 32, 4, true, 1500, 64, 2000},
    {"Fp8", DType::kF8E4M3, 592, 360, 32, 4, true, 1500, 64, 2000},
    // So many stages that warps meet in the ring in every order.
    {"DeepBf16", DType::kBF16, 2048, 4096, 16, 4, false, 40, 16, 400},
    {"DeepFp8", DType::kF8E4M3, 6144, 10752, 8, 2, false, 40, 16, 400},
    // More tiles of small passes than slots for their h.
    {"ManyFp8", DType::kF8E4M3, 256, 1536, 96, 8, false, 40, 16, 400},
    // Bands, in which pairs of blocks take one tile or two.
    {"BandsFp8", DType::kF8E4M3, 768, 2304, 8, 2, true, 1500, 32, 1000},
};

// The reference and its yardstick take about a second for so many on one core.
constexpr double kMostReferenceOperations = 4e9;
double reference_operations(const LayerSpec& spec, const Batch& batch) {
  return 6.0 * static_cast<double>(batch.x.rows()) * spec.top_k * spec.hidden * spec.intermediate;
}

using GpuSoak = OnGpu<::testing::TestWithParam<SoakCase>>;

TEST_P(GpuSoak, ManyForwardsOfRandomSizes) {
  const SoakCase& c = GetParam();
  const auto forwards = static_cast<int>(test::number_from("SWITCHYARD_SOAK_FORWARDS", 2000) *
                                         static_cast<std::uint64_t>(c.forwards) / 2000);
  const std::uint64_t seed = test::soak_seed();
  LayerSpec spec = spec_of(c.hidden, c.intermediate, c.experts, c.top_k);
  if (c.shared) {
    spec.shared_intermediate = 136;
    spec.shared_sigmoid_gate = true;
  }
  const MoeWeights w = generate_weights(spec, c.weights, seed + 2, {});
  DeviceLayer layer(spec, w, c.max_tokens);
  std::mt19937 random(static_cast<std::mt19937::result_type>(seed));
  std::vector<Batch> batches;
  for (int i = 0; i < c.batches; ++i) {
    const int most = i % 2 != 0 ? 40 : c.max_tokens;
    const int tokens = i == 0 ? 0 : static_cast<int>(random() % static_cast<unsigned>(most)) + 1;
    batches.push_back(random_batch(spec, tokens, DType::kBF16, random()));
    if (i % 3 != 0 || tokens == 0) continue;
    const SyntheticRouting routing =
        synthetic_routing(tokens, spec.num_experts, spec.top_k, 0.5 + 0.1 * (i % 5), random());
    batches.back().topk_ids = routing.ids;
    batches.back().topk_weights = routing.weights;
  }
  std::vector<DeviceBatch> device;
  for (const Batch& batch : batches) device.emplace_back(spec, batch, DType::kBF16);
  std::vector<std::optional<std::size_t>> checksums(device.size());
  int compared = 0;
  for (int i = 0; i < forwards; ++i) {
    const std::size_t which = random() % device.size();
    device[which].poison(layer.stream());
    device[which].enqueue(layer.layer(), layer.stream());
    layer.stream().synchronize();
    const std::size_t checksum = device[which].checksum();
    if (!checksums[which]) {
      checksums[which] = checksum;
      if (reference_operations(spec, batches[which]) < kMostReferenceOperations) {
        double yardstick = 0;
        const double error = output_error(spec, w, batches[which], device[which].fetch(),
                                          &yardstick, c.weights == kFp8);
        ASSERT_LE(error, 2 * yardstick) << "forward " << i << ", batch " << which;
        ++compared;
      }
    }
    ASSERT_EQ(checksum, *checksums[which]) << "forward " << i << ", batch " << which;
  }
  EXPECT_EQ(layer.layer().stats().epoch, static_cast<std::uint64_t>(forwards));
  if (forwards >= c.batches) {
    EXPECT_GT(compared, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Layers, GpuSoak, ::testing::ValuesIn(kCases),
                         [](const auto& soak) { return std::string(soak.param.name); });

}  // namespace
}  // namespace switchyard::testing
