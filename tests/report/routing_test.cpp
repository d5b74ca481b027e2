// Recorded routings on the page: the numbers that the script draws, and what is told in words.
#include "report/routing.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "base/parsed.h"
#include "report/page.h"

namespace switchyard::report {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Two experts: balanced, then one alone, then three to one (beta 0.8113).
Recording recording_of(const std::string& name) {
  Recording recording;
  recording.layer = name;
  recording.num_experts = 2;
  recording.top_k = 1;
  recording.n = recording.k = 8;
  recording.overwritten = 5;
  recording.steps = {{5, 6, 4, {2, 2}}, {6, 7, 4, {4, 0}}, {7, 8, 4, {3, 1}}};
  return recording;
}

TEST(RoutingPage, TellsBalancednessOverSteps) {
  EXPECT_EQ(routing_text(recording_of("layers.3")),
            "layers.3: 3 steps, 5 before them overwritten; beta 0.00 to 1.00, mean 0.60");
  Recording none = recording_of("");
  none.steps.clear();
  none.overwritten = 0;
  EXPECT_EQ(routing_text(none), "a layer without a name: no steps");

  const nlohmann::json json =
      test::parsed(routing_json({{"a machine", {recording_of("layers.3"), none}}, "r.json"}));
  EXPECT_EQ(json["machine"], "a machine");
  ASSERT_EQ(json["layers"].size(), 2u);
  const nlohmann::json& steps = json["layers"][0]["steps"];
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_EQ(steps[0]["beta"], 1.0);
  EXPECT_EQ(steps[1]["beta"], 0.0);
  EXPECT_EQ(steps[2]["beta"], 0.8113);
  EXPECT_EQ(steps[2]["step"], 7);
  EXPECT_EQ(steps[2]["rows"], 4);
}

TEST(RoutingPage, DrawsSomeOfManySteps) {
  Recording many = recording_of("layers.3");
  many.steps.clear();
  for (std::uint64_t i = 0; i < 5000; ++i) many.steps.push_back({i, i + 1, 2, {1, 1}});
  const nlohmann::json steps =
      test::parsed(routing_json({{"", {many}}, "r.json"}))["layers"][0]["steps"];
  ASSERT_EQ(steps.size(), 400u);
  EXPECT_EQ(steps[0]["step"], 0);
  EXPECT_EQ(steps[399]["step"], 399 * 5000 / 400);
}

TEST(RoutingPage, IsAPartOfThePageAndItsTextStaysText) {
  const std::string page =
      make_page({.files = {"r.json"},
                 .routings = {{{"m", {recording_of("</script><img src=x>")}}, "r.json"}}});
  EXPECT_THAT(page, HasSubstr("3 points from <code>r.json</code>"));
  EXPECT_THAT(page, HasSubstr("function routingSection"));
  EXPECT_THAT(page, Not(HasSubstr("<img")));
}

}  // namespace
}  // namespace switchyard::report
