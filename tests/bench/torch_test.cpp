// The job that Python gets, without Python.
#include "bench/torch.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/parsed.h"
#include "bench/skew.h"
#include "model/temporary_directory.h"
#include "models/generate.h"

namespace switchyard::bench {
namespace {

using test::parsed;
using test::read_file;

TEST(BenchTorch, JobDescribesThePoints) {
  const BenchLayer layer =
      bench_layer("mixtral-8x7b", ConfigOverrides{.hidden = 64, .intermediate = 32});
  MoeWeights weights = generate_weights(layer.spec, DType::kBF16, 1);
  SkewedGate gate(layer.spec, weights, 4, DType::kBF16, 1);
  std::string x_path;
  {
    TorchJob job;
    EXPECT_TRUE(job.empty());
    job.add_layer(layer, weights, gate.activations(4, 0), DType::kBF16);
    job.add_point(5, 4, 0.5, 1.5f, 20, {2, 8});
    const auto json = parsed(job.to_json());
    const auto& about = json["layers"][0];
    EXPECT_EQ(about["experts"], 8);
    EXPECT_EQ(about["renormalize"], true);
    EXPECT_EQ(about["activation"], "silu");
    EXPECT_EQ(about["compute"], "bf16");
    EXPECT_EQ(about["score"], "softmax");
    x_path = about["activations"];
    EXPECT_EQ(read_file(x_path).size(), 4u * 64 * 2);
    const std::string router = read_file(about["router"].get<std::string>());
    ASSERT_EQ(router.size(), 8u * 64 * 2);
    EXPECT_EQ(std::memcmp(router.data(), weights.router.data, router.size()), 0);
    EXPECT_EQ(json["points"][0]["tag"], 5);
    EXPECT_EQ(json["points"][0]["skew"], 1.5);
  }
  EXPECT_FALSE(std::filesystem::exists(x_path));
}

// The router and the activations stay bf16 beside FP8 experts.
TEST(BenchTorch, JobOfAnFp8Layer) {
  const BenchLayer layer =
      bench_layer("phi-3.5-moe", ConfigOverrides{.hidden = 64, .intermediate = 32});
  MoeWeights weights = generate_weights(layer.spec, DType::kF8E4M3, 1);
  SkewedGate gate(layer.spec, weights, 4, DType::kBF16, 1);
  TorchJob job;
  job.add_layer(layer, weights, gate.activations(4, 0), DType::kF8E4M3);
  const auto json = parsed(job.to_json());
  const auto& about = json["layers"][0];
  EXPECT_EQ(about["compute"], "fp8");
  EXPECT_EQ(about["score"], "sparse_mixer");
  EXPECT_NEAR(about["jitter"].get<double>(), 0.01, 1e-6);
  EXPECT_EQ(read_file(about["router"].get<std::string>()).size(), 16u * 64 * 2);
}

}  // namespace
}  // namespace switchyard::bench
