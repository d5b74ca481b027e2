// Layers whose weights are mapped from a checkpoint that becomes shorter: passes say so, where they
// would otherwise end the process or make something of zeros.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstdint>
#include <filesystem>

#include "model/errors.h"
#include "model/temporary_directory.h"
#include "models/generate.h"
#include "models/model_table.h"
#include "support/accuracy.h"
#include "support/layers.h"
#include "support/ranks.h"
#include "switchyard/checkpoint.h"
#include "switchyard/weights.h"

namespace switchyard::testing {
namespace {

constexpr int kTokens = 24;

class CutCheckpoint : public ::testing::Test {
 protected:
  void write(const char* model = "olmoe", DType dtype = DType::kBF16) {
    std::filesystem::remove_all(path_);
    write_checkpoint(find_model(model), path_,
                     {.dtype = dtype,
                      .overrides = {.num_moe_layers = 1,
                                    .num_experts = 8,
                                    .top_k = 2,
                                    .hidden = 128,
                                    .intermediate = 128,
                                    .vocab_size = 100}});
    bytes_ = std::filesystem::file_size(shard());
    const Checkpoint checkpoint = Checkpoint::open(path_);
    spec_ = checkpoint.layer_spec(checkpoint.moe_layers().front());
    weights_ = checkpoint.load_layer(checkpoint.moe_layers().front());
  }
  void cut(std::uintmax_t bytes) const { std::filesystem::resize_file(shard(), bytes); }
  std::filesystem::path shard() const { return path_ / "model.safetensors"; }

  const test::TemporaryDirectory directory_;
  const std::filesystem::path path_ = directory_ / "m";
  std::uintmax_t bytes_ = 0;
  LayerSpec spec_;
  MoeWeights weights_;
  Batch batch_{random_batch(spec_of(128, 128, 8, 2), kTokens, DType::kBF16, 1)};
};

// To nothing, in the middle, by one byte, and to less than a page.
TEST_F(CutCheckpoint, APassSaysSo) {
  for (const double part : {0.0, 0.5, 0.9999, 1e-4}) {
    for (const int threads : {1, 4}) {
      SCOPED_TRACE(part);
      write();
      MoeLayer layer(World::single(), spec_, weights_, {.cpu = {.num_threads = threads}});
      const Shares shares = Shares::even(kTokens, 1);
      BatchResult result = empty_result(spec_, batch_, 1, DType::kBF16);
      forward_share(layer, batch_, shares, 0, result);
      cut(static_cast<std::uintmax_t>(part * static_cast<double>(bytes_)));
      EXPECT_ERROR(forward_share(layer, batch_, shares, 0, result), kInvalidFile, shard().c_str(),
                   "became shorter while it was in use");
      // As after any error in a pass.
      EXPECT_THROW(forward_share(layer, batch_, shares, 0, result), Error);
    }
  }
}

TEST_F(CutCheckpoint, LoadingAndMakingALayerSaySo) {
  write("olmoe", DType::kF8E4M3);
  const Checkpoint checkpoint = Checkpoint::open(path_);
  cut(bytes_ / 2);
  EXPECT_ERROR(checkpoint.load_layer(0), kInvalidFile, shard().c_str());
  EXPECT_ERROR(MoeLayer(World::single(), spec_, weights_, {}), kInvalidFile, shard().c_str(),
               "became shorter");
  write();
  MoeLayer layer(World::single(), spec_, weights_, {});
  cut(100);
  EXPECT_ERROR(layer.refresh(nullptr), kInvalidFile, shard().c_str());
  EXPECT_ERROR(layer.rebind(weights_), kInvalidFile, shard().c_str());
}

// The rank whose weights are gone tells the others, and nobody takes rows made of zeros.
TEST_F(CutCheckpoint, NoRankGetsRowsThatAreMadeOfZeros) {
  write();
  constexpr int kRanks = 3;
  const Shares shares = Shares::even(kTokens, kRanks);
  BatchResult result = empty_result(spec_, batch_, kRanks, DType::kBF16);
  std::atomic<int> named{0}, told{0};
  std::barrier together(kRanks, [&]() noexcept { cut(0); });
  run_all_ranks(World::threads(kRanks), [&](const World& world) {
    MoeLayer layer(world, spec_, weights_, {.cpu = {.num_threads = 2}});
    forward_share(layer, batch_, shares, world.rank(), result);
    together.arrive_and_wait();
    try {
      forward_share(layer, batch_, shares, world.rank(), result);
      ADD_FAILURE() << "rank " << world.rank() << " has a result";
    } catch (const Error& error) {
      ++(error.code() == ErrorCode::kInvalidFile ? named : told);
    }
  });
  EXPECT_GE(named, 1);
  EXPECT_EQ(named + told, kRanks);
}

// Files that another layer maps are none of a layer's business.
TEST_F(CutCheckpoint, OtherLayersGoOn) {
  write();
  const MoeWeights kept = generate_weights(spec_, DType::kBF16, 3, {.num_threads = 1});
  MoeLayer layer(World::single(), spec_, weights_, {});
  MoeLayer other(World::single(), spec_, kept, {});
  cut(0);
  const Shares shares = Shares::even(kTokens, 1);
  BatchResult result = empty_result(spec_, batch_, 1, DType::kBF16);
  EXPECT_ERROR(forward_share(layer, batch_, shares, 0, result), kInvalidFile, "became shorter");
  forward_share(other, batch_, shares, 0, result);
}

}  // namespace
}  // namespace switchyard::testing
