// The choice that is called the best, of given times.
#include "cli/tune_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace switchyard::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// A rule and two configurations with these times, all varying by `variation`.
std::string told(double rule_us, double first_us, double second_us, double variation) {
  tuner::Profile profile;
  for (const char* name : {"rule", "threads=1", "threads=2"}) {
    tuner::Configuration configuration;
    configuration.name = name;
    configuration.is_rule = profile.configurations.empty();
    profile.configurations.push_back(configuration);
  }
  profile.models.push_back({"olmoe", 64, 8, 2048, 2048, false});
  tuner::Point point;
  point.tokens = 1;
  point.times_us = {rule_us, first_us, second_us};
  point.variations = {variation, variation, variation};
  return point_text(profile, point);
}

TEST(TuneReport, NothingSlowerThanTheRuleIsTheBest) {
  for (const double rule : {90.0, 100.0}) {
    const std::string text = told(rule, 200, 100, 0.001);
    EXPECT_THAT(text, HasSubstr("best: the rule"));
    EXPECT_THAT(text, HasSubstr("of the others 100.0 us  threads=2"));
  }
}

TEST(TuneReport, TheBestBeatsTheRuleByMoreThanNoise) {
  EXPECT_THAT(told(100, 200, 95, 0.01), HasSubstr("best 95.0 us  threads=2  rule 100.0 us"));
  // Nor by less than 2 %, however steady both are.
  EXPECT_THAT(told(100, 200, 99, 0),
              HasSubstr("best: the rule 100.0 us, within noise  (of the others 99.0 us"));
  EXPECT_THAT(told(100, 200, 95, 0.1), HasSubstr("best: the rule 100.0 us"));
  // Noise is no excuse for a time that is far better.
  EXPECT_THAT(told(100, 200, 70, 3), HasSubstr("best 70.0 us  threads=2"));
}

TEST(TuneReport, WithoutARuleTheBestIsTheFastest) {
  const std::string text = told(tuner::kUnsupported, 200, 100, 0.01);
  EXPECT_THAT(text, HasSubstr("best 100.0 us  threads=2"));
  EXPECT_THAT(text, Not(HasSubstr("rule")));
  EXPECT_THAT(told(100, tuner::kUnsupported, tuner::kUnsupported, 0),
              HasSubstr("the rule 100.0 us"));
  EXPECT_THAT(text, HasSubstr(" 1 token "));
}

}  // namespace
}  // namespace switchyard::cli
