// `switchyard tune` on the processor: what it writes, how it goes on, what it judges, what it
// refuses.
#include <gmock/gmock.h>

#include "cli/command.h"

namespace switchyard::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;
using ::testing::UnorderedElementsAreArray;

const Arguments kSizes = {"--experts", "16",  "--top-k",        "4",
                          "--hidden",  "128", "--intermediate", "128"};
const Arguments kTune = join({"tune", "--backend", "cpu", "--models", "olmoe,ramp-phi", "--tokens",
                              "2,8,32", "--balancedness", "0.7,1", "--test-tokens", "8,16",
                              "--test-balancedness", "0.8,1", "--repeat", "2"},
                             kSizes);

class TuneCommand : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (directory_ / name).string(); }
  Completed tune(const Arguments& more) const {
    return run_switchyard(join(kTune, join({"--out", path("t")}, more)));
  }
  nlohmann::json json(const std::string& name) const {
    return nlohmann::json::parse(read_file(path(name)));
  }
  static void expect_refused(const Completed& done, const std::vector<std::string>& parts) {
    EXPECT_EQ(done.exit_code, 2);
    EXPECT_THAT(done.err, StartsWith("switchyard: error ("));
    for (const std::string& part : parts) EXPECT_THAT(done.err, HasSubstr(part));
  }
  TemporaryDirectory directory_;
};

TEST_F(TuneCommand, ProfilesFitsAndWritesTables) {
  for (const char* kernel : {"grouped", "layer"}) {
    const TemporaryDirectory directory;
    const std::string out = (directory / "t").string(), rows = path(std::string(kernel) + ".json");
    const Completed done = run_switchyard(
        join(kTune, {"--kernel", kernel, "--out", out, "--json", rows, "--commit", "abc"}));
    ASSERT_EQ(done.exit_code, 0) << done.err;
    std::vector<std::string> files{"t.profile.json", "t.fit.json"};
    if (std::string(kernel) == "grouped") {  // layers have no tables
      files.insert(files.end(), {"t.olmoe.table.json", "t.ramp-phi.table.json"});
    }
    EXPECT_THAT(names_in(directory.path()), UnorderedElementsAreArray(files));
    // A line for each point, and the judgement.
    EXPECT_THAT(done.out, AllOf(HasSubstr("making weights of olmoe"), HasSubstr("32 tokens"),
                                HasSubstr("timings, "), HasSubstr("s left]"), HasSubstr("Ablation"),
                                HasSubstr("held out"), HasSubstr("Held-out models"),
                                HasSubstr("Regions: rho from 185")));
    const nlohmann::json written = nlohmann::json::parse(read_file(rows));
    ASSERT_EQ(written.size(), 8u);
    int held_out = 0, unseen = 0;
    for (const nlohmann::json& row : written) {
      EXPECT_EQ(row["suite"], "ramp");
      EXPECT_EQ(row["kernel"], std::string(kernel) + "_bf16");
      EXPECT_EQ(row["experts"], 16);
      EXPECT_EQ(row["generator"], "distinct");
      EXPECT_EQ(row["commit"], "abc");
      EXPECT_GE(row["chosen_us"], row["exhaustive_us"]);
      EXPECT_GE(row["static_us"], row["exhaustive_us"]);
      EXPECT_GT(row["rule_us"], 0);
      EXPECT_THAT(row["command"].get<std::string>(), Not(HasSubstr(out)));
      held_out += row["held_out"].get<bool>();
      unseen += row["unseen"].get<bool>();
    }
    EXPECT_EQ(held_out, 6);  // all but 8 tokens at balancedness 1
    EXPECT_EQ(unseen, 4);
  }
}

TEST_F(TuneCommand, GoesOnWhereItsBudgetEnded) {
  const Completed none = tune({"--budget", "0"});
  ASSERT_EQ(none.exit_code, 0) << none.err;
  EXPECT_THAT(none.out, AllOf(HasSubstr("0 of "), HasSubstr("--resume goes on")));
  EXPECT_THAT(names_in(directory_.path()), UnorderedElementsAre("t.profile.json"));
  expect_refused(tune({}), {"t.profile.json exists", "--resume"});
  expect_refused(run_switchyard({"tune", "--evaluate", path("t.profile.json")}),
                 {"no model all of whose points", "--resume"});
  const Completed rest = tune({"--resume"});
  ASSERT_EQ(rest.exit_code, 0) << rest.err;
  EXPECT_THAT(rest.out, HasSubstr("going on"));
  const std::string profile = read_file(path("t.profile.json"));
  EXPECT_THAT(profile, Not(HasSubstr("null")));
  // Everything is there: nothing is timed again.
  ASSERT_EQ(tune({"--resume"}).exit_code, 0);
  EXPECT_EQ(read_file(path("t.profile.json")), profile);
}

TEST_F(TuneCommand, RefusesAProfileOfAnotherRun) {
  ASSERT_EQ(tune({"--budget", "0"}).exit_code, 0);
  expect_refused(tune({"--resume", "--seed", "3"}), {"of the seed '0', and '3' is wanted"});
  expect_refused(tune({"--resume", "--dtype", "f32"}), {"'grouped_bf16', and 'grouped_f32'"});
  expect_refused(tune({"--resume", "--generator", "repeated"}), {"'distinct', and 'repeated'"});
  nlohmann::json profile = json("t.profile.json");
  profile["device"]["machine"] = "Another machine";
  test::write_file(path("t.profile.json"), profile.dump());
  expect_refused(tune({"--resume"}), {"'Another machine'", "measure on this machine"});
  profile = json("t.profile.json");
  profile["kernel_version"] = 0;
  test::write_file(path("t.profile.json"), profile.dump());
  expect_refused(tune({"--resume"}), {"version 0", "older than version 1"});
}

TEST_F(TuneCommand, JudgesAProfileOfAnotherMachine) {
  ASSERT_EQ(tune({}).exit_code, 0);
  nlohmann::json profile = json("t.profile.json");
  profile["device"]["machine"] = "NVIDIA H200, 132 SMs";
  // The second configuration splits K, and is slower by 10 %.
  profile["configurations"][2]["splits"] = 4;
  for (nlohmann::json& point : profile["points"]) {
    point["times_us"] = {20.0, 10.0, 11.0};
  }
  test::write_file(path("p.json"), profile.dump());
  const Completed done =
      run_switchyard({"tune", "--evaluate", path("p.json"), "--form", "tasks", "--absolute",
                      "--json", path("rows.json"), "--regions", path("regions.json")});
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_THAT(done.out, AllOf(HasSubstr("NVIDIA H200, 132 SMs"), HasSubstr("2.000x"),
                              HasSubstr("form tasks (absolute)"), HasSubstr("split_k")));
  for (const nlohmann::json& row : json("rows.json")) {
    EXPECT_EQ(row["chosen_us"], 10.0);
    EXPECT_EQ(row["rule_us"], 20.0);
    EXPECT_EQ(row["machine"], "NVIDIA H200, 132 SMs");
  }
  const nlohmann::json regions = json("regions.json");
  ASSERT_GE(regions.size(), 1u);
  for (const nlohmann::json& row : regions) {
    EXPECT_EQ(row["suite"], "ramp_regions");
    EXPECT_EQ(row["prediction"], "split_k");
    EXPECT_NEAR(row["measured_ratio"], 10.0 / 11.0, 1e-3);
  }
  // The fit and the tables are written without timing anything.
  const Completed written =
      run_switchyard({"tune", "--evaluate", path("p.json"), "--out", path("e")});
  ASSERT_EQ(written.exit_code, 0) << written.err;
  EXPECT_THAT(written.out, HasSubstr("e.olmoe.table.json: 1 configuration"));
  EXPECT_TRUE(std::filesystem::exists(path("e.fit.json")));
  // Rows of the same points replace those of before.
  ASSERT_EQ(
      run_switchyard({"tune", "--evaluate", path("p.json"), "--json", path("rows.json")}).exit_code,
      0);
  EXPECT_EQ(json("rows.json").size(), 8u);
  EXPECT_EQ(json("rows.json")[0]["form"], "experts");
}

TEST_F(TuneCommand, RefusesWhatMakesNoSense) {
  expect_refused(tune({"--kernel", "attention"}), {"'attention'", "grouped or layer"});
  expect_refused(tune({"--form", "cubic"}), {"'cubic'", "experts"});
  expect_refused(tune({"--generator", "zipf"}), {"'zipf'"});
  expect_refused(tune({"--kernel", "layer", "--generator", "repeated"}), {"--generator distinct"});
  expect_refused(tune({"--no-test"}), {"--no-test"});
  for (const char* folder : {".", "..", "here/"}) {
    expect_refused(run_switchyard(join(kTune, {"--out", folder})), {"--out", "is a folder"});
  }
  expect_refused(
      run_switchyard(join({"tune", "--backend", "cpu", "--models", "olmoe", "--tokens", "2,8",
                           "--balancedness", "1", "--no-test", "--out", path("t")},
                          kSizes)),
      {"2 points to fit on of the model olmoe", "experts has 4 coefficients", "--balancedness"});
  expect_refused(run_switchyard({"tune", "--models", "no-such-model", "--out", path("t")}),
                 {"no-such-model"});
  expect_refused(run_switchyard({"tune", "--evaluate", path("absent.json")}), {"absent.json"});
  expect_refused(run_switchyard({"tune", "--evaluate", path("x"), "--budget", "3"}),
                 {"--budget 3 is for timing"});
  test::write_file(path("other.json"), "[{\"suite\": \"grouped\"}]");
  expect_refused(tune({"--json", path("other.json")}), {"other.json"});
  EXPECT_THAT(names_in(directory_.path()), UnorderedElementsAre("other.json"));
}

}  // namespace
}  // namespace switchyard::cli
