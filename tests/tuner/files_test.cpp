// Files: what is written is read again, and everything else is refused by name.
#include <gmock/gmock.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "model/temporary_directory.h"
#include "tuner/known_kernel.h"

namespace switchyard::tuner {
namespace {

using switchyard::test::TemporaryDirectory;
using namespace test;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(TunerFiles, ProfilesAreReadAsTheyWere) {
  KnownKernel known(0.05);
  known.kernel.configurations[1].is_rule = true;
  Profile profile = measured(known, {kSmall, kLarge});
  profile.points[3].times_us[2] = kUnsupported;
  profile.points[4].times_us[0] = kNotTimed;
  profile.points[4].variations[0] = 0;
  const std::string text = to_json(profile);
  const Profile read = parse_profile(text, "p.json");
  ASSERT_EQ(read.points.size(), profile.points.size());
  EXPECT_EQ(to_json(read), text);
  EXPECT_EQ(read.configurations, profile.configurations);
  EXPECT_EQ(read.models, profile.models);
  EXPECT_EQ(read.device, profile.device);
  for (std::size_t p = 0; p < read.points.size(); ++p) {
    EXPECT_EQ(read.points[p].times_us, profile.points[p].times_us) << "times are kept to the bit";
    EXPECT_EQ(read.points[p].counts, profile.points[p].counts);
  }
}

TEST(TunerFiles, FitsAndTablesPredictTheSame) {
  const KnownKernel known(0.05);
  const Profile profile = measured(known, {kSmall, kLarge});
  for (const Form form : kForms) {
    const Fit its = fit(profile, {form, true, false});
    const Fit read = parse_fit(to_json(its), "f.json");
    ASSERT_EQ(read.coefficients.size(), 2u);
    const Table table = make_table(its, 1);
    const Table read_table = parse_table(to_json(table), "t.json");
    ASSERT_EQ(read_table.entries.size(), table.entries.size());
    for (const Point& point : profile.points) {
      for (std::size_t c = 0; c < 6; ++c) {
        EXPECT_EQ(predict_us(read, point.model, c, point.counts),
                  predict_us(its, point.model, c, point.counts));
      }
      if (point.model == 1) {
        EXPECT_EQ(select(read_table, point.counts), select(table, point.counts));
      }
    }
  }
}

void expect_refused(const std::function<void()>& read, const std::vector<std::string>& parts) {
  try {
    read();
    ADD_FAILURE() << "accepted: " << parts.front();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidFile) << error.what();
    for (const std::string& part : parts) EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

TEST(TunerFiles, ProfilesAreReadStrictly) {
  const KnownKernel known;
  const auto good = nlohmann::ordered_json::parse(to_json(measured(known, {kSmall})));
  using Spoil = std::function<void(nlohmann::ordered_json&)>;
  const auto refused = [&](const Spoil& spoil, const std::string& part) {
    auto bad = good;
    spoil(bad);
    expect_refused([&] { parse_profile(bad.dump(), "bad.json"); }, {part, "bad.json"});
  };
  refused([](auto& j) { j["file"] = "switchyard fit"; }, "switchyard profile");
  refused([](auto& j) { j.erase("file"); }, "switchyard profile");
  refused([](auto& j) { j["file_version"] = 2; }, "version 2");
  refused([](auto& j) { j.erase("kernel"); }, "kernel is absent");
  refused([](auto& j) { j["kernel_version"] = -1; }, "kernel_version");
  refused([](auto& j) { j["device"]["num_sms"] = 0; }, "device.num_sms is 0");
  refused([](auto& j) { j["generator"] = "zipf"; }, "zipf");
  refused([](auto& j) { j["configurations"] = nlohmann::json::array(); },
          "configurations is empty");
  refused([](auto& j) { j["configurations"][1]["name"] = j["configurations"][0]["name"]; },
          "two elements");
  refused([](auto& j) { j["configurations"][1]["token_rows"] = "4"; },
          "configurations[1].token_rows");
  refused([](auto& j) { j["configurations"][1]["values"]["x"] = 0.5; }, "0.5");
  refused([](auto& j) { j["models"][0]["top_k"] = 64; }, "top_k");
  refused([](auto& j) { j["points"][2]["model"] = "other"; }, "points[2].model is 'other'");
  refused([](auto& j) { j["points"][2]["beta"] = 1.5; }, "points[2].beta is 1.5");
  refused([](auto& j) { j["points"][2]["counts"].erase(0); }, "points[2].counts has 31 elements");
  refused([](auto& j) { j["points"][2]["counts"][0] = -1; }, "points[2].counts is -1");
  refused([](auto& j) { j["points"][2]["times_us"][0] = -5; }, "points[2].times_us is -5");
  refused([](auto& j) { j["points"][2]["times_us"].erase(0); }, "points[2].times_us has 5");
  refused([](auto& j) { j["points"][2]["fit"] = 1; }, "points[2].fit is 1");
  refused([](auto& j) { j = nlohmann::json::array(); }, "the file is []");
  expect_refused([] { parse_profile("{", "cut.json"); }, {"cut.json"});
}

TEST(TunerFiles, FitsAreReadStrictly) {
  const KnownKernel known;
  const auto good = nlohmann::ordered_json::parse(to_json(fit(measured(known, {kSmall}))));
  const auto refused = [&](const std::function<void(nlohmann::ordered_json&)>& spoil,
                           const std::string& part) {
    auto bad = good;
    spoil(bad);
    expect_refused([&] { parse_fit(bad.dump(), "bad.json"); }, {part, "bad.json"});
  };
  refused([](auto& j) { j["form"] = "cubic"; }, "cubic");
  refused([](auto& j) { j["models"][0]["coefficients"].erase(0); }, "5 elements");
  refused([](auto& j) { j["models"][0]["coefficients"][0]["a"] = nullptr; }, "coefficients[0].a");
}

TEST(TunerFiles, TablesAreReadStrictly) {
  const KnownKernel known;
  const Table table = make_table(fit(measured(known, {kSmall})), 0);
  const auto good = nlohmann::ordered_json::parse(to_json(table));
  EXPECT_EQ(parse_table(good.dump(), "t.json").entries.size(), table.entries.size());
  const auto refused = [&](const std::function<void(nlohmann::ordered_json&)>& spoil,
                           const std::string& part) {
    auto bad = good;
    spoil(bad);
    expect_refused([&] { parse_table(bad.dump(), "bad.json"); }, {part, "bad.json"});
  };
  refused([](auto& j) { j["entries"] = nlohmann::json::array(); }, "entries is empty");
}

class FitFiles : public ::testing::Test {
 protected:
  FitFiles() { write_fit(file(), fit(measured(known_, {kSmall}))); }
  std::filesystem::path file() const { return directory_ / "fit.json"; }
  KnownKernel known_;

 private:
  TemporaryDirectory directory_;
};

template <typename Read>
void expect_mismatch(Read&& read, const std::string& field, const std::string& found,
                     const std::string& wanted) {
  try {
    read();
    ADD_FAILURE() << "another " << field << " is accepted";
  } catch (const MismatchError& error) {
    EXPECT_EQ(error.field(), field);
    EXPECT_EQ(error.found(), found);
    EXPECT_EQ(error.wanted(), wanted);
    EXPECT_THAT(error.what(), AllOf(HasSubstr(found), HasSubstr(wanted)));
  }
}

TEST_F(FitFiles, AreForOneKernelOnOneMachine) {
  EXPECT_NO_THROW(read_fit(file(), known_.kernel, kDevice));
  Device other = kDevice;
  other.machine = "Imagined 200, 100 SMs";
  expect_mismatch([&] { read_fit(file(), known_.kernel, other); }, "machine", kDevice.machine,
                  other.machine);
  Kernel newer = known_.kernel;
  newer.version = 4;
  expect_mismatch([&] { read_fit(file(), newer, kDevice); }, "version", "3", "4");
  newer.version = 2;
  expect_mismatch([&] { read_fit(file(), newer, kDevice); }, "version", "3", "2");
  Kernel renamed = known_.kernel;
  renamed.name = "unknown";
  expect_mismatch([&] { read_fit(file(), renamed, kDevice); }, "kernel", "known", "unknown");
  Kernel fewer = known_.kernel;
  fewer.configurations.pop_back();
  expect_mismatch([&] { read_fit(file(), fewer, kDevice); }, "number of configurations", "6", "5");
}

TEST_F(FitFiles, AbsentFilesAreNamed) {
  EXPECT_THROW(read_profile(file() / "x"), Error);
  expect_refused([&] { read_fit("/nowhere/fit.json", known_.kernel, kDevice); },
                 {"/nowhere/fit.json"});
  expect_refused([&] { read_profile(file()); }, {"switchyard profile"});
}

}  // namespace
}  // namespace switchyard::tuner
