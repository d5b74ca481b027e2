// `switchyard report`: from what bench writes to a page, and every way not to get one.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include "cli/command.h"
#include "results/rows_of_tests.h"

namespace switchyard::cli {
namespace {

// Files that a test makes, and what is left of them.
class ReportCommand : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (directory_ / name).string(); }
  std::string file(const std::string& name, const std::string& text) const {
    test::write_file(directory_ / name, text);
    return path(name);
  }
  std::string measured_rows() const {
    const std::string rows = path("rows.json");
    const Completed done = run_well(join(
        {"bench", "--backend", "cpu", "--tokens", "1,4", "--repeat", "2", "--json", rows}, kTiny));
    return rows;
  }
  // The command fails with `code` and says all of `parts`; no page appears.
  void expect_refused(const Arguments& arguments, const std::string& code,
                      const std::vector<std::string>& parts) const {
    const std::string page = path("page.html");
    expect_error(join(join({"report"}, arguments), {"-o", page}), 2, code, parts);
    for (const std::string& name : names_in(path(""))) EXPECT_THAT(name, Not(HasSubstr("page")));
  }

 private:
  TemporaryDirectory directory_;
};

constexpr const char* kTrace =
    R"([{"ph": "X", "name": "gate", "pid": 0, "tid": 0, "ts": 1, "dur": 2}])";

TEST_F(ReportCommand, DrawsTheAllToAllProblemBesideLayers) {
  const std::string rows = path("all_to_all.json"), page = path("made.html");
  run_well({"bench", "all_to_all", "--backend", "cpu", "--quick", "--repeat", "1", "--rung",
            "flag_per_rank,fused", "--json", rows});
  const Completed done = run_well({"report", rows, "-o", page});
  EXPECT_THAT(done.out, HasSubstr("6 points of the all-to-all problem"));
  EXPECT_THAT(read_file(page), HasSubstr("\"ladders\":[{\"file\":\"all_to_all.json\""));
}

TEST_F(ReportCommand, DrawsWhatEverySuiteWrites) {
  const std::string late = path("late.json"), page = path("made.html");
  run_well(join({"bench", "late", "--backend", "cpu", "--late", "1", "--tokens", "2", "--repeat",
                 "1", "--model", "olmoe", "--json", late},
                {}));
  const std::string script =
      file("script.json", R"([{"suite": "sonic_moe", "machine": "m", "median_us": 3}])");
  const Completed done = run_well({"report", late, script, measured_rows(), "-o", page});
  EXPECT_THAT(done.out, HasSubstr("2 points of 1 file"));
  EXPECT_THAT(done.out, HasSubstr("1 row of script.json"));
  EXPECT_THAT(read_file(page), HasSubstr("\"tables\":[{\"file\":\"late.json\""));
}

TEST_F(ReportCommand, DrawsATraceAlone) {
  const std::string page = path("made.html");
  const Completed done = run_well({"report", "--trace", file("trace.json", kTrace), "-o", page});
  EXPECT_THAT(done.out, HasSubstr("1 slice of 1 rank"));
  EXPECT_THAT(read_file(page), HasSubstr("<code>trace.json</code>"));
}

TEST_F(ReportCommand, MakesAPageOfAProfile) {
  run_well({"tune", "--backend",      "cpu",   "--models",       "olmoe",  "--experts",
            "16",   "--hidden",       "64",    "--intermediate", "64",     "--tokens",
            "1,4",  "--balancedness", "0.8,1", "--test-tokens",  "2",      "--test-balancedness",
            "1",    "--repeat",       "1",     "--out",          path("t")});
  const std::string page = path("made.html");
  const Completed done = run_well({"report", "--profile", path("t.profile.json"), "-o", page});
  EXPECT_THAT(done.out, HasSubstr("5 points of a profile of grouped_bf16"));
  EXPECT_THAT(read_file(page), HasSubstr("\"tunings\":[{\"file\":\"t.profile.json\""));
  expect_refused({}, "invalid_argument", {"nothing to show", "--profile"});
  expect_refused({"--profile", path("absent.json")}, "invalid_file", {"absent.json"});
}

// From a run to its recording, a page of it, and a profile of its histograms.
TEST_F(ReportCommand, MakesAPageOfARecordedRouting) {
  const Arguments model{"--experts", "16", "--top-k",        "4",
                        "--hidden",  "64", "--intermediate", "64"};
  const std::string recorded = path("routing.json");
  run_well(join({"run", "--backend", "cpu", "--model", "olmoe", "--tokens", "40", "--balancedness",
                 "0.7", "--repeat", "3", "--ranks", "2", "--quiet", "--record", recorded},
                model));
  const std::string page = path("made.html");
  const Completed done = run_well({"report", "--routing", recorded, "-o", page});
  EXPECT_THAT(done.out, HasSubstr("olmoe: 4 steps; beta "));
  EXPECT_THAT(read_file(page), HasSubstr("\"routings\":[{\"file\":\"routing.json\""));
  expect_refused({"--routing", file("other.json", "{}")}, "invalid_file", {"other.json"});

  const Arguments tune =
      join({"tune", "--backend", "cpu", "--models", "olmoe", "--repeat", "1", "--tokens", "2,8",
            "--balancedness", "0.8,1", "--histograms", recorded, "--out", path("t")},
           model);
  const Completed tuned = run_well(tune);
  // Four passes with one routing are one histogram, which is fitted on and judged by.
  EXPECT_THAT(tuned.out, HasSubstr("5 points"));
  EXPECT_THAT(tuned.out, HasSubstr("40 tokens"));
  expect_told(join({"tune", "--backend", "cpu", "--models", "ramp-phi", "--histograms", recorded,
                    "--out", path("u")},
                   {}),
              2, "16 experts with top-2");
}

TEST_F(ReportCommand, MakesAPageOfWhatBenchWrites) {
  const std::string rows = measured_rows();
  const std::string page = path("page.html");
  const Completed done =
      run_well({"report", rows, "-o", page, "--trace", file("trace.json", kTrace)});
  EXPECT_EQ(done.err, "");
  EXPECT_THAT(done.out, HasSubstr("2 points of 1 file; 1 slice of 1 rank"));
  const std::string text = read_file(page);
  EXPECT_THAT(text, StartsWith("<!doctype html>"));
  EXPECT_THAT(text, HasSubstr("<code>rows.json</code>"));
  EXPECT_THAT(text, Not(HasSubstr(path(""))));  // where this machine has its files
  EXPECT_THAT(text, HasSubstr("\"expert_load\":["));
  EXPECT_THAT(names_in(path("")), UnorderedElementsAre("rows.json", "trace.json", "page.html"));
  // Again, over the old one, the same.
  run_well({"report", rows, "-o", page, "--trace", path("trace.json")});
  EXPECT_EQ(read_file(page), text);
}

TEST_F(ReportCommand, RefusesFilesThatAreNotRows) {
  const std::string trace = file("trace.json", kTrace);
  expect_refused({path("none.json")}, "invalid_file", {"none.json", "check its name"});
  expect_refused({path("")}, "invalid_file", {"is a directory", "name another"});
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  expect_refused({path("fifo")}, "invalid_file", {"fifo: is a pipe", "as a file first"});
  expect_refused({file("text.json", "olmoe")}, "invalid_file", {"text.json", "not JSON", "bench"});
  expect_refused({file("empty.json", "[]")}, "invalid_file", {"empty.json", "empty", "bench"});
  expect_refused({file("row.json", R"([{"suite": "a"}])")}, "invalid_file",
                 {"row.json row 1", "'machine'", "bench"});
  expect_refused({trace}, "invalid_file", {"trace.json", "--trace"});
  expect_refused({file("profile.json", R"({"file": "switchyard profile"})")}, "invalid_file",
                 {"profile.json", "a tuner's profile", "--profile"});
  expect_refused({file("published.json", R"([{"rival": "a", "source": "b", "time_us": {}}])")},
                 "invalid_file", {"published.json", "others publish", "--published"});
  const std::string rows = measured_rows();
  expect_refused({rows, rows}, "invalid_file", {"rows.json row 1", "same point", "only one"});
  expect_refused({rows, "--trace", rows}, "invalid_file",
                 {"rows.json event 1", "'ph'", "switchyard trace"});
  expect_refused({rows, "--trace", path("none.json")}, "invalid_file", {"none.json"});
}

TEST_F(ReportCommand, RefusesPlacesThatAreNoFile) {
  const std::string rows = file("rows.json", "[]");
  const auto refused = [&](const Arguments& arguments, const std::string& part) {
    const Completed done = run_switchyard(join({"report"}, arguments));
    EXPECT_EQ(done.exit_code, 2);
    EXPECT_THAT(done.err, StartsWith("switchyard: error (invalid_argument): "));
    EXPECT_THAT(done.err, HasSubstr(part));
  };
  refused({}, "switchyard report --help");
  refused({rows, "-o", path("none/page.html")}, "make it first");
  refused({rows, "-o", path("")}, "is a directory");
  refused({rows, "-o", rows}, "also read");
  refused({path("other.json"), "--trace", rows, "-o", rows}, "also read");
  EXPECT_EQ(read_file(rows), "[]");
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  std::filesystem::create_symlink("fifo", path("link"));
  std::filesystem::create_symlink("circle", path("circle"));
  refused({rows, "-o", path("fifo")}, "is a pipe");
  refused({rows, "-o", path("link")}, "is a pipe");
  refused({rows, "-o", path("circle")}, "ends nowhere");
  EXPECT_TRUE(std::filesystem::is_fifo(path("fifo")));
  EXPECT_TRUE(std::filesystem::is_symlink(path("link")));
}

TEST_F(ReportCommand, WritesWhereALinkLeads) {
  const std::string rows = measured_rows();
  std::filesystem::create_directory(path("pages"));
  std::filesystem::create_symlink("pages/page.html", path("link"));
  for (int i = 0; i < 2; ++i) {  // made, replaced
    run_well({"report", rows, "-o", path("link")});
    EXPECT_TRUE(std::filesystem::is_symlink(path("link")));
    EXPECT_THAT(read_file(path("pages/page.html")), StartsWith("<!doctype html>"));
  }
  EXPECT_THAT(names_in(path("pages")), UnorderedElementsAre("page.html"));
}

TEST_F(ReportCommand, AFailureLeavesTheOldPage) {
  const std::string page = file("page.html", "old");
  EXPECT_EQ(run_switchyard({"report", file("rows.json", "[]"), "-o", page}).exit_code, 2);
  EXPECT_EQ(read_file(page), "old");
}

nlohmann::json row_of_gpu(const std::string& gpu) {
  nlohmann::json row = results::good_row();
  row["machine"] = gpu + ", 132 SMs, CUDA 13.0";
  return row;
}

// The roofs in a page's data.
std::string roofs_in(const std::string& page) {
  const std::size_t begin = page.find("\"roofs\":");
  return begin == std::string::npos ? "" : page.substr(begin, 120);
}

// A roofline of another GPU's roofs would be wrong for every point.
TEST_F(ReportCommand, RoofsAreThoseOfTheRowsGpu) {
  const std::string h200 =
      file("h200.json", nlohmann::json::array({row_of_gpu("NVIDIA H200")}).dump());
  const std::string h100 =
      file("h100.json", nlohmann::json::array({row_of_gpu("NVIDIA H100 PCIe")}).dump());
  const std::string facts = file("facts.json", R"({"gpu": "NVIDIA H100 PCIe", "roofs": {
      "launch_us": {"value": 6, "source": "a test"},
      "read_gb_per_s": {"value": 2900, "source": "a test"}}})");
  const std::string page = path("page.html");
  const auto made = [&](const Arguments& arguments) {
    run_well(join(join({"report"}, arguments), {"-o", page}));
    return roofs_in(read_file(page));
  };
  EXPECT_THAT(made({h200}), HasSubstr("4600000000000.0"));
  EXPECT_THAT(made({h100}), HasSubstr("\"read_bytes_per_second\":0.0"));
  EXPECT_THAT(made({h100, "--machine-facts", facts}), HasSubstr("2900000000000.0"));
  std::filesystem::remove(page);
  expect_refused({h200, "--machine-facts", facts}, "invalid_argument",
                 {"'NVIDIA H100 PCIe'", "NVIDIA H200"});
  expect_refused({h100, "--machine-facts", h200}, "invalid_file", {"h200.json", "not an object"});
}

}  // namespace
}  // namespace switchyard::cli
