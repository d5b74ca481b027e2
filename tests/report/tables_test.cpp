// Rows of any kind on the page: which files have them, and what of a row is shown.
#include "report/tables.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "base/parsed.h"
#include "report/page.h"

namespace switchyard::report {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::optional<Table> table(const char* text) { return table_of(Json::parse(text), "rows.json"); }

TEST(TablesPage, KeepsTextsNumbersAndFlagsOfARow) {
  const std::optional<Table> found = table(
      R"([{"suite": "late", "machine": "a CPU", "late_us": 2.5, "jitter": true, "gone": null, "times_us": [1]}])");
  ASSERT_TRUE(found);
  EXPECT_EQ(test::parsed(found->rows)[0].dump(),
            R"({"suite":"late","machine":"a CPU","late_us":2.5,"jitter":true})");
}

TEST(TablesPage, HasTheClassesOfCheckHfAndTheRowsOfGoogleBenchmark) {
  const std::optional<Table> classes = table(
      R"({"transformers": "5", "command": "c", "classes": [{"name": "A", "status": "agrees"}]})");
  ASSERT_TRUE(classes);
  EXPECT_EQ(test::parsed(classes->rows)[0]["suite"], "check_hf");
  EXPECT_EQ(test::parsed(classes->rows)[0]["transformers"], "5");
  const std::optional<Table> benchmarks = table(
      R"({"context": {}, "benchmarks": [{"name": "b", "real_time": 3}], "switchyard": {"machine": "m"}})");
  ASSERT_TRUE(benchmarks);
  EXPECT_EQ(test::parsed(benchmarks->rows)[0]["machine"], "m");
}

TEST(TablesPage, IsForNothingElse) {
  for (const char* text :
       {"[]", "{}", "3", R"([{"suite": "a"}])", R"([{"median_us": 1}])", R"([3])",
        R"([{"suite": "a", "n": 1}, 2])", R"([{"ph": "X", "suite": "a", "ts": 1}])",
        R"([{"suite": "a", "rung": "fused", "median_us": 1}])",
        R"([{"suite": "a", "intermediate": 1, "nvlink_bytes": 0}])", R"({"traceEvents": []})"}) {
    EXPECT_FALSE(table(text)) << text;
  }
}

TEST(TablesPage, TextStaysText) {
  const std::optional<Table> found =
      table(R"([{"suite": "</script><script>alert(1)</script>", "machine": "m", "n": 1}])");
  ASSERT_TRUE(found);
  const std::string page = make_page({.files = {found->file}, .tables = {*found}});
  EXPECT_THAT(page, Not(HasSubstr("<script>alert(1)")));
  EXPECT_THAT(page, HasSubstr("1 points from"));
}

}  // namespace
}  // namespace switchyard::report
