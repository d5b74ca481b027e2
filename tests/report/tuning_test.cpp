// The choice of configurations on the page: what the script is given, and what cannot be shown.
#include "report/tuning.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "base/parsed.h"
#include "model/temporary_directory.h"
#include "report/page.h"
#include "tuner/known_kernel.h"

namespace switchyard::report {
namespace {

using test::TemporaryDirectory;
using ::testing::HasSubstr;
using ::testing::Not;
using tuner::test::kLarge;
using tuner::test::KnownKernel;
using tuner::test::kSmall;

class TuningPage : public ::testing::Test {
 protected:
  Tuning tuning_of(const tuner::Profile& profile) {
    tuner::write_profile(directory_ / "known.profile.json", profile);
    return read_tuning(directory_ / "known.profile.json", "known.profile.json");
  }
  KnownKernel known_{0.02};
  TemporaryDirectory directory_;
};

TEST_F(TuningPage, HasEveryTimeAndItsPrediction) {
  known_.kernel.configurations[5].is_rule = true;
  tuner::Profile profile = tuner::test::measured(known_, {kSmall, kLarge});
  profile.points[2].times_us[3] = tuner::kUnsupported;
  const nlohmann::json json = test::parsed(tuning_json(tuning_of(profile)));
  EXPECT_EQ(json["kernel"], "known");
  EXPECT_EQ(json["rule"], 5);
  EXPECT_EQ(json["configurations"].size(), 6u);
  EXPECT_EQ(json["models"][1]["name"], "large");
  EXPECT_EQ(json["models"][1]["rho"], 8192.0 * 4096 / (256 * 128));
  ASSERT_EQ(json["points"].size(), 86u);
  EXPECT_EQ(json["points"][2]["times"][3], nullptr);
  int judged = 0;
  for (std::size_t p = 0; p < 86; ++p) {
    const nlohmann::json& point = json["points"][p];
    EXPECT_EQ(point["times"].size(), 6u);
    EXPECT_EQ(point["predicted"].size(), 6u);
    EXPECT_NEAR(point["times"][0].get<double>(), profile.points[p].times_us[0],
                1e-5 * profile.points[p].times_us[0]);
    if (point["outcome"].is_null()) continue;
    ++judged;
    EXPECT_GE(point["outcome"]["chosen_us"], point["outcome"]["exhaustive_us"]);
    EXPECT_NE(point["outcome"]["chosen"], 5);
  }
  EXPECT_EQ(judged, 48);
}

TEST_F(TuningPage, IsAPartOfThePageAndItsTextStaysText) {
  KnownKernel evil;
  evil.kernel.name = "</script><script>alert(1)</script>";
  evil.kernel.configurations[0].name = "<img src=x>";
  const Tuning tuning = tuning_of(tuner::test::measured(evil, {kSmall}));
  const std::string page = make_page({.files = {"known.profile.json"}, .tunings = {tuning}});
  EXPECT_THAT(page, HasSubstr("43 points from <code>known.profile.json</code>"));
  EXPECT_THAT(page, HasSubstr("function tuningSection"));
  EXPECT_THAT(page, HasSubstr("aria-labelledby=\"summary\" hidden"));
  EXPECT_THAT(page, Not(HasSubstr("<script>alert")));
  EXPECT_THAT(page, Not(HasSubstr("<img")));
}

TEST_F(TuningPage, NeedsAModelThatIsTimedCompletely) {
  const tuner::Profile empty =
      tuner::new_profile(known_.kernel, tuner::test::kDevice, tuner::test::plan_of({kSmall}));
  try {
    tuning_of(empty);
    FAIL() << "there is nothing to show";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("--resume"));
  }
}

}  // namespace
}  // namespace switchyard::report
