// The suite chain as far as it needs no GPU: its models, and what it refuses.
#include "bench/chain.h"

#include <gmock/gmock.h>

#include "bench/suite.h"
#include "gpu/device.h"
#include "model/errors.h"

namespace switchyard::bench {
namespace {

class Ignores : public ChainObserver {
 public:
  void measuring(std::uint64_t, std::uint64_t) override {}
  void measured(const results::ChainRow&) override {}
  void keep(const std::vector<results::ChainRow>&) override {}
  void failed(const std::string&, const std::string&) override {}
};

TEST(ChainSuite, HasLayersOfTheTable) {
  const ChainOptions suite = chain_suite();
  EXPECT_EQ(suite.layers, 48);
  EXPECT_THAT(suite.tokens, ::testing::ElementsAre(1, 4, 8, 64, 512));
  for (const ChainModel& model : suite.models) {
    const BenchLayer layer = bench_layer(model.name, {.num_experts = model.experts});
    if (model.experts != 0) {
      EXPECT_EQ(layer.spec.num_experts, model.experts);
    }
    EXPECT_LE(layer.spec.top_k, layer.spec.num_experts);
  }
}

TEST(ChainSuite, RefusesModelsBeforeItLooksForAGpu) {
  Ignores observer;
  ChainOptions options = chain_suite();
  options.models = {{"no-such-model", DType::kBF16, 0}};
  EXPECT_ERROR(ChainSession(options, observer), kInvalidArgument, "no-such-model");
}

TEST(ChainSuite, NeedsAGpu) {
  if (gpu::device_count() > 0) GTEST_SKIP() << "there is a GPU";
  Ignores observer;
  EXPECT_ERROR(ChainSession(chain_suite(), observer), kUnsupported, "needs a GPU", "doctor");
}

}  // namespace
}  // namespace switchyard::bench
