// Selection inside the launch, without the launch: what a table becomes, and what is chosen of it.
#include "gpu/host/grouped_choices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <random>
#include <set>
#include <string>

#include "switchyard/error.h"
#include "switchyard/grouped_gemm.h"
#include "switchyard/tuner.h"

namespace switchyard::gpu {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kExperts = 40, kN = 2048, kK = 2048, kSms = 132;

TableFacts facts(bool fp8 = false) {
  TableFacts its{};
  its.cut = {{fp8 ? 128 : 256, fp8 ? 128 : 32, 16}, fp8, fp8 ? kK / 128u : kK / 64u};
  its.compute = fp8 ? DType::kF8E4M3 : DType::kBF16;
  its.num_experts = kExperts;
  its.n = kN;
  its.k = kK;
  its.num_sms = kSms;
  return its;
}

tuner::Table table_of(const std::vector<tuner::Table::Entry>& entries,
                      tuner::Form form = tuner::Form::kRoundedFull) {
  tuner::Table table;
  table.kernel = "grouped_bf16";
  table.version = kGroupedKernelVersion;
  table.device = {"a machine", kSms, 0};
  table.model = {"a model", kExperts, 8, kN, kK};
  table.form = form;
  table.entries = entries;
  return table;
}

tuner::Table::Entry entry(int rows, bool paired, int splits, float a, float b, float c, float d) {
  tuner::Configuration configuration;
  configuration.name = "rows " + std::to_string(rows);
  configuration.token_rows = rows;
  configuration.weight_rows = paired ? 256 : 128;
  configuration.blocks = paired ? 2 : 1;
  configuration.splits = splits;
  configuration.values = {
      {"tile_rows", rows}, {"paired", paired ? 1 : 0}, {"band", 3}, {"splits", splits}};
  return {configuration, a, b, c, d};
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

// Random tables and routings: the kernel's arithmetic chooses the entry that the tuner chooses.
TEST(GroupedChoices, ChooseAsTheTuner) {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> real(0, 1);
  std::set<std::size_t> chosen;
  for (int round = 0; round < 60; ++round) {
    std::vector<tuner::Table::Entry> entries;
    for (const int rows : {16, 32, 48, 64, 80, 96, 128, 160, 192, 256}) {
      for (const int splits : {1, 4}) {
        if (splits > 1 && rows > 64) continue;
        entries.push_back(entry(rows, false, splits, 10 * real(random), 3 * real(random),
                                0.02f * real(random), round % 2 == 0 ? real(random) : 0));
      }
    }
    // A tie: the earlier one is chosen.
    entries.push_back(entries[3]);
    constexpr std::array kForms{tuner::Form::kRoundedFull, tuner::Form::kFull,
                                tuner::Form::kExperts};
    const tuner::Table table = table_of(entries, kForms[static_cast<std::size_t>(round) % 3]);
    const GroupedChoices choices = choices_of(table, facts());
    ASSERT_EQ(choices.single.size(), entries.size());
    for (int i = 0; i < 40; ++i) {
      const std::vector<std::int64_t> counts =
          tuner::draw_counts(tuner::Generator::kRepeated, 1 << (i % 9), kExperts, 8, real(random),
                             static_cast<std::uint64_t>(100 * round + i));
      const std::vector<std::uint32_t> rows(counts.begin(), counts.end());
      const std::size_t wanted = tuner::select(table, counts);
      EXPECT_EQ(choose(choices.single, choices.rule, rows).entry, wanted) << round << ", " << i;
      chosen.insert(wanted);
    }
  }
  EXPECT_GT(chosen.size(), 5u) << "the tables leave no choice";
}

TEST(GroupedChoices, TilesAreCountedExactly) {
  for (const std::uint32_t height : {2u, 3u, 16u, 48u, 80u, 96u, 160u, 192u, 256u}) {
    TileHeights heights{};
    heights.rows[5] = height;
    heights.reciprocals[5] = TileHeights::reciprocal_of(height);
    for (std::uint32_t rows = 0; rows < 5000; ++rows) {
      ASSERT_EQ(heights.tiles(5, rows), (rows + height - 1) / height) << rows << " by " << height;
    }
    for (std::uint32_t rows = 1u << 24; rows > (1u << 24) - 3000; --rows) {
      ASSERT_EQ(heights.tiles(5, rows - height), (rows - 1) / height) << rows << " by " << height;
    }
    EXPECT_EQ(heights.tiles(0, 77), 0u);  // there is none
  }
}

TEST(GroupedChoices, ACandidateHasTheCutOfItsSchedule) {
  const GroupedChoices choices = choices_of(
      table_of({entry(128, false, 1, 1, 0, 0, 0), entry(64, true, 8, 2, 0, 0, 0)}), facts());
  ASSERT_EQ(choices.single.size(), 1u);
  ASSERT_EQ(choices.paired.size(), 1u);
  const GroupedCut single = choices.single[0].cut(), paired = choices.paired[0].cut();
  EXPECT_EQ(single.tile.max_height, 128);
  EXPECT_EQ(single.tile.granule, 32);
  EXPECT_EQ(single.tile.least, 16);
  EXPECT_EQ(single.most_stages, 12u);
  EXPECT_EQ(single.band, 3u);
  EXPECT_EQ(single.log2_splits, 0u);
  EXPECT_EQ(paired.tile.max_height, 64);
  EXPECT_EQ(paired.log2_splits, 3u);
  EXPECT_EQ(choices.paired[0].entry, 1u);
  // ceil(2048 / 256) blocks of rows, 8 splits, 2 blocks for each.
  EXPECT_EQ(choices.paired[0].tasks_of_tile, 8u * 8 * 2);

  TableFacts shallow = facts();
  shallow.cut.k_blocks = 3;
  EXPECT_EQ(choices_of(table_of({entry(64, true, 8, 2, 0, 0, 0)}), shallow).paired[0].log2_splits,
            1)
      << "a part would have no stage";
}

TEST(GroupedChoices, FewerSplitsStandFirst) {
  const GroupedChoices choices =
      choices_of(table_of({entry(16, false, 4, 1, 0, 0, 0), entry(32, false, 1, 2, 0, 0, 0),
                           entry(48, false, 8, 3, 0, 0, 0), entry(64, false, 2, 4, 0, 0, 0)}),
                 facts());
  EXPECT_EQ(GroupedChoices::count(choices.single, 0), 1u);
  EXPECT_EQ(GroupedChoices::count(choices.single, 1), 2u);
  EXPECT_EQ(GroupedChoices::count(choices.single, 3), 4u);
  EXPECT_EQ(choices.single[0].entry, 1u);
  EXPECT_EQ(choices.single[3].entry, 2u);
}

TEST(GroupedChoices, SumsOfPartsAreBounded) {
  // 64 rows x 2048 sums of 4 bytes are 512 KiB.
  EXPECT_EQ(most_log2_splits(64, 2048), 3u);
  EXPECT_EQ(most_log2_splits(1024, 2048), 3u);  // 8 MiB, 64 of all parts
  EXPECT_EQ(most_log2_splits(1025, 2048), 2u);
  EXPECT_EQ(most_log2_splits(8192, 2048), 0u);
  EXPECT_EQ(most_log2_splits(2048, 32768), 0u);
}

TEST(GroupedChoices, TheHostChoosesPairsByTheNumberOfRows) {
  // Single blocks start soon, pairs do twice the rows in the time.
  const GroupedChoices choices = choices_of(
      table_of({entry(16, false, 1, 5, 0, 0.02f, 0), entry(256, true, 1, 20, 0, 0.01f, 0)}),
      facts());
  EXPECT_FALSE(choose_pairs(choices, kExperts, 40, 3));
  EXPECT_TRUE(choose_pairs(choices, kExperts, 40 * 256, 3));
}

TEST(GroupedChoices, OtherTablesAreRefused) {
  const auto refusal = [](const std::function<void(tuner::Table&)>& change) {
    tuner::Table table = table_of({entry(16, false, 1, 5, 0, 0.02f, 0)});
    change(table);
    return message_of([&] { choices_of(table, facts()); });
  };
  EXPECT_EQ(refusal([](tuner::Table&) {}), "nothing was thrown");
  TableFacts f16 = facts();
  f16.compute = DType::kF16;
  EXPECT_EQ(choices_of(table_of({entry(16, false, 1, 5, 0, 0.02f, 0)}), f16).single.size(), 1u)
      << "fp16 has bf16's tables";
  EXPECT_THAT(refusal([](tuner::Table& t) { t.kernel = "grouped_fp8"; }),
              AllOf(HasSubstr("grouped_fp8"), HasSubstr("grouped_bf16")));
  EXPECT_THAT(refusal([](tuner::Table& t) { t.version = 99; }), HasSubstr("version '99'"));
  EXPECT_THAT(refusal([](tuner::Table& t) { t.device.num_sms = 114; }),
              AllOf(HasSubstr("114"), HasSubstr("132")));
  EXPECT_THAT(refusal([](tuner::Table& t) { t.model.n = 512; }), HasSubstr("512"));
  EXPECT_THAT(refusal([](tuner::Table& t) { t.model.num_experts = 41; }), HasSubstr("41"));
  EXPECT_THAT(refusal([](tuner::Table& t) { t.entries.clear(); }), HasSubstr("0 entries"));
  EXPECT_THAT(refusal([](tuner::Table& t) {
                t.entries[0].configuration.values.emplace_back("BLOCK_M", 16);
              }),
              HasSubstr("BLOCK_M"));
  EXPECT_THAT(refusal([](tuner::Table& t) { t.entries[0].configuration.values.clear(); }),
              HasSubstr("paired"));
  EXPECT_THAT(refusal([](tuner::Table& t) { t.entries[0].configuration.values[0].second = 17; }),
              HasSubstr("tile_rows is 17"));
  EXPECT_THAT(refusal([](tuner::Table& t) {
                for (int rows = 17; t.entries.size() <= kMostHeights; ++rows) {
                  t.entries.push_back(entry(16, false, 1, 1, 1, 1, 1));
                  t.entries.back().configuration.token_rows = rows;
                }
              }),
              HasSubstr("more than 16"));
  EXPECT_THAT(refusal([](tuner::Table& t) { t.entries[0].configuration.token_rows = 257; }),
              HasSubstr("257 token rows"));
}

TEST(GroupedChoices, TheCpuHasNoTable) {
  const std::vector<float> values(64);
  GroupedGemmSpec spec;
  spec.num_experts = 1;
  spec.n = spec.k = 8;
  GroupedGemmWeights weights;
  weights.matrices = {{values.data(), DType::kF32, 8, 8, 8}};
  GroupedGemmOptions options;
  options.table = std::make_shared<tuner::Table>(table_of({}));
  EXPECT_THAT(message_of([&] { GroupedGemm(spec, weights, options); }), HasSubstr("table"));
  options.backend = Backend::kCuda;
  options.schedule.band = 2;
  EXPECT_THAT(message_of([&] { GroupedGemm(spec, weights, options); }),
              AllOf(HasSubstr("table"), HasSubstr("schedule")));
}

TEST(HalfTiles, WhereEveryTaskFindsABlock) {
  const protocol::TileShape half = half_as_high({128, 128, 16});
  EXPECT_EQ(half.max_height, 64);
  EXPECT_EQ(half.granule, 64);
  EXPECT_EQ(half.least, 16);
  EXPECT_EQ(half_as_high({256, 32, 16}).granule, 32);
  // DeepSeek-V3's hidden size in slices of 512 rows: two blocks of weight rows, 132 SMs.
  EXPECT_TRUE(takes_half(66, 2, kSms));
  EXPECT_FALSE(takes_half(67, 2, kSms)) << "one task would wait";
  EXPECT_TRUE(takes_half(0, 28, kSms));
  EXPECT_FALSE(takes_half(1, kSms + 1, kSms)) << "a tile is more than a wave";
  // The height that it comes to is the one that a caller may force.
  GroupedSchedule forced;
  forced.tile_rows = 64;
  const GroupedCut cut = cut_of(forced, facts(true).cut);
  EXPECT_EQ(cut.tile.max_height, half.max_height);
  EXPECT_EQ(cut.tile.granule, half.granule);
  EXPECT_EQ(cut.tile.least, half.least);
}

TEST(HeightsOfTiles, AreNeverAboveWhatWasAsked) {
  CutFacts given = facts(false).cut;
  given.tile = {256, 32, 16};
  for (int asked = 16; asked <= 256; asked += 16) {
    GroupedSchedule schedule;
    schedule.tile_rows = asked;
    const GroupedCut cut = cut_of(schedule, given);
    for (std::uint32_t rows = 1; rows < 600; ++rows) {
      ASSERT_LE(protocol::TokenTiles(rows, cut.tile).height, static_cast<std::uint32_t>(asked))
          << rows << " rows";
    }
  }
}

}  // namespace
}  // namespace switchyard::gpu
