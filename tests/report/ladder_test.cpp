// The all-to-all problem on the page: what the script is given, and what cannot be drawn.
#include "report/ladder.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "base/parsed.h"
#include "model/errors.h"
#include "report/page.h"
#include "results/example_all_to_all_row.h"

namespace switchyard::report {
namespace {

using results::example_all_to_all_row;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(LadderPage, HasEveryRungsStagesAndRanks) {
  const Ladder ladder{
      {example_all_to_all_row("flag_per_rank", 160), example_all_to_all_row("fused", 120)},
      "all_to_all.json"};
  const nlohmann::json json = test::parsed(ladder_json(ladder));
  EXPECT_EQ(json["stages"].size(), results::kNumStages);
  ASSERT_EQ(json["rows"].size(), 2u);
  const nlohmann::json& row = json["rows"][1];
  EXPECT_EQ(row["rung"], "fused");
  EXPECT_EQ(row["rank_us"], nlohmann::json({120, 90}));
  EXPECT_EQ(row["stage_us"][1], nlohmann::json({30, 15}));
  EXPECT_TRUE(row["stage_us"][2].empty());  // no experts of their own
  EXPECT_EQ(json["rows"][0]["stage_us"][2].size(), 2u);
  EXPECT_EQ(row["floor_us"], 47.25);
  EXPECT_EQ(row["gpus"], 2);
}

TEST(LadderPage, IsAPartOfThePageAndItsTextStaysText) {
  Ladder ladder{{example_all_to_all_row("fused", 120)}, "all_to_all.json"};
  ladder.rows[0].machine = "</script><script>alert(1)</script>";
  const std::string page = make_page({.files = {ladder.file}, .ladders = {ladder}});
  EXPECT_THAT(page, HasSubstr("1 points from <code>all_to_all.json</code>"));
  EXPECT_THAT(page, HasSubstr("\"ladders\":[{\"file\":\"all_to_all.json\""));
  EXPECT_THAT(page, HasSubstr("function ladderSection"));
  EXPECT_THAT(page, Not(HasSubstr("<script>alert")));
}

TEST(LadderPage, RefusesRowsThatCannotBeDrawn) {
  Ladder ladder{{example_all_to_all_row("fused", 120)}, "all_to_all.json"};
  ladder.rows[0].stage_us[0].clear();
  EXPECT_ERROR(ladder_json(ladder), kInvalidFile, "all_to_all.json", "fused", "measure it again");
}

}  // namespace
}  // namespace switchyard::report
