// A layer's schedules from a table, chosen by the tokens of a pass.
#include "gpu/host/layer_choices.h"

#include <gtest/gtest.h>

#include "model/errors.h"
#include "support/specs.h"
#include "switchyard/layer.h"

namespace switchyard::gpu {
namespace {

LayerSpec spec() {
  LayerSpec its = switchyard::testing::spec_of(2048, 1024, 64, 8);
  its.shared_intermediate = 0;
  return its;
}

tuner::Table::Entry entry(const char* name, int rows, float a, float c,
                          std::vector<std::pair<std::string, std::int64_t>> values) {
  tuner::Configuration configuration;
  configuration.name = name;
  configuration.token_rows = rows;
  configuration.weight_rows = 128;
  configuration.values = std::move(values);
  return {configuration, a, 0, c, 0};
}

// One for few tokens, one for some and one for many: their times cross.
tuner::Table table() {
  tuner::Table its;
  its.kernel = "layer_bf16";
  its.version = kLayerKernelVersion;
  its.device = {"a machine", 132, 0};
  its.model = {"a model", 64, 8, 2048, 2048};
  its.form = tuner::Form::kFull;
  its.entries = {
      entry("small", 32, 5, 0.1f, {{"small_tokens", 32}, {"splits", 2}}),
      entry("single", 256, 40, 0.05f, {{"small_tokens", 0}, {"paired_rows", -1}, {"band", 2}}),
      entry("pairs", 256, 60, 0.02f,
            {{"small_tokens", 0}, {"paired_rows", 0}, {"band", 8}, {"lag", 16}})};
  return its;
}

TEST(LayerChoices, AreThoseOfTheTokens) {
  LayerChoices choices(table(), spec(), DType::kBF16, 132);
  ASSERT_EQ(choices.schedules().size(), 3u);
  EXPECT_EQ(choices.schedules()[0], (Schedule{.small_tokens = 32, .splits = 2}));
  EXPECT_EQ(choices.schedules()[2],
            (Schedule{.small_tokens = 0, .paired_rows = 0, .lag = 16, .band = 8}));
  // 16 blocks of weight rows for each tile.
  EXPECT_EQ(choices.choose(1, 1, true), 0u);
  EXPECT_EQ(choices.choose(1, 1, false), 1u) << "not a pass that can be small";
  for (const int repeat : {1, 2}) {
    SCOPED_TRACE(repeat);
    EXPECT_EQ(choices.choose(4, 1, false), 1u);     // 32 tiles: 40 + 26 against 60 + 10
    EXPECT_EQ(choices.choose(2048, 1, false), 2u);  // 64 tiles: 40 + 51 against 60 + 20
    EXPECT_EQ(choices.choose(512, 4, false), 2u);   // as many tokens
  }
}

// What a table by tokens has no choice for, or what it was not measured on, is the rules'.
TEST(LayerChoices, MayBeTheRules) {
  tuner::Table its = table();
  its.by_tokens = {{8, 32, 0}, {64, 64, 2}};
  LayerChoices choices(its, spec(), DType::kBF16, 132);
  EXPECT_EQ(choices.choose(8, 1, true), 0u);
  EXPECT_EQ(choices.choose(32, 1, true), 0u);
  EXPECT_EQ(choices.choose(32, 1, false), std::nullopt) << "not a pass that can be small";
  EXPECT_EQ(choices.choose(64, 1, false), 2u);
  EXPECT_EQ(choices.choose(32, 2, false), std::nullopt) << "two ranks";
  for (const int tokens : {0, 7, 33, 63, 65, 4096}) {
    EXPECT_EQ(choices.choose(tokens, 1, tokens <= 32), std::nullopt) << tokens;
  }
  its.entries.clear();
  its.by_tokens->clear();
  LayerChoices none(its, spec(), DType::kBF16, 132);
  EXPECT_EQ(none.choose(8, 1, true), std::nullopt);
  its.model.top_k = 4;
  EXPECT_ERROR(LayerChoices(its, spec(), DType::kBF16, 132), ErrorCode::kInvalidArgument, "top-4",
               "top-8");
}

TEST(LayerChoices, OtherTablesAreRefused) {
  const auto make = [](const tuner::Table& its) { LayerChoices(its, spec(), DType::kBF16, 132); };
  tuner::Table its = table();
  its.kernel = "layer_fp8";
  EXPECT_ERROR(make(its), ErrorCode::kInvalidArgument, "layer_fp8", "layer_bf16");
  its = table();
  its.entries.clear();
  EXPECT_ERROR(make(its), ErrorCode::kInvalidArgument, "0 entries");
  its = table();
  its.model.k = 4096;
  EXPECT_ERROR(make(its), ErrorCode::kInvalidArgument, "K '4096'", "2048");
  its = table();
  its.entries[1].configuration.values.emplace_back("tile_rows", 64);
  EXPECT_ERROR(make(its), ErrorCode::kInvalidArgument, "tile_rows");
  its = table();
  its.entries[1].configuration.values.clear();
  EXPECT_ERROR(make(its), ErrorCode::kInvalidArgument, "no small_tokens");
}

TEST(LayerChoices, AreForGpusWithoutASchedule) {
  LayerOptions options;
  options.table = std::make_shared<tuner::Table>(table());
  const auto make = [&] { MoeLayer(World::single(), spec(), {}, options); };
  EXPECT_ERROR(make(), ErrorCode::kInvalidArgument, "table", "backend is cpu");
  options.backend = Backend::kCuda;
  options.schedule.band = 2;
  EXPECT_ERROR(make(), ErrorCode::kInvalidArgument, "both a table and a schedule");
}

}  // namespace
}  // namespace switchyard::gpu
