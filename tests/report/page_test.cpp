// The page is one file, and nothing in its input can become a part of its program.
#include "report/page.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <regex>

#include "base/parsed.h"
#include "results/rows_of_tests.h"

namespace switchyard::report {
namespace {

using results::good_row;
using results::good_row_with;
using results::parse_rows;

using ::testing::HasSubstr;
using ::testing::Not;

constexpr Roofs kRoofs = {.read_bytes_per_second = 4.6e12,
                          .bf16_flops_per_second = 750e12,
                          .fp8_flops_per_second = 1300e12};

std::string page_of(const nlohmann::json& list, std::vector<std::string> files = {"a.json"}) {
  const std::vector<Row> rows = parse_rows<Row>(list.dump(), "a.json");
  return make_page({.rows = rows, .files = std::move(files), .roofs = kRoofs});
}

nlohmann::json data_of(const std::string& page) {
  constexpr std::string_view kOpen = "id=\"data\">";
  const std::size_t begin = page.find(kOpen) + kOpen.size();
  return nlohmann::json::parse(page.substr(begin, page.find("</script>", begin) - begin));
}

TEST(ReportPage, EscapesForItsTwoLanguages) {
  EXPECT_EQ(escape_html("<a href=\"x\">'&amp;'</a>"),
            "&lt;a href=&quot;x&quot;&gt;&#39;&amp;amp;&#39;&lt;/a&gt;");
  const Json value = {{"a</script>", "<!--\"\\\u2028β"}};
  const std::string text = script_json(value);
  EXPECT_THAT(text, Not(HasSubstr("<")));
  EXPECT_EQ(nlohmann::ordered_json::parse(text), test::parsed(value));
  EXPECT_NO_THROW(script_json("\xff"));  // a file's name
}

TEST(ReportPage, InputStaysText) {
  const std::string evil = "</script><script>alert(1)</script>{{data}}<img src=x>&";
  nlohmann::json row = good_row();
  for (const char* field : {"suite", "machine", "commit", "command", "model", "dtype", "rival"}) {
    row[field] = evil;
  }
  const std::string page = page_of(nlohmann::json::array({row}), {evil});
  EXPECT_THAT(page, Not(HasSubstr("<script>alert")));
  EXPECT_THAT(page, Not(HasSubstr("<img")));
  EXPECT_THAT(page, HasSubstr("&lt;script&gt;alert(1)&lt;/script&gt;{{data}}"));
  EXPECT_EQ(data_of(page)["suites"][0]["rows"][0]["model"], evil);
}

TEST(ReportPage, HoldsTheRows) {
  const std::string page =
      page_of(nlohmann::json::array({good_row(), good_row_with("tokens_per_rank", 8)}));
  const nlohmann::json data = data_of(page);
  ASSERT_EQ(data["suites"].size(), 1u);
  EXPECT_EQ(data["suites"][0]["name"], "one_gpu_bf16");
  const nlohmann::json& row = data["suites"][0]["rows"][1];
  EXPECT_EQ(row["tokens"], 8);
  EXPECT_EQ(row["median_us"], 120.0);
  EXPECT_EQ(row["rival"]["median_us"], 240.0);
  EXPECT_EQ(row["rival"]["p90_us"], nullptr);
  EXPECT_EQ(row["expert_load"], nlohmann::json({0, 0.5, 2.5}));
  EXPECT_EQ(data["roofs"]["flops_per_second"]["fp8"], 1300e12);
  EXPECT_EQ(data["timeline"], nullptr);
  EXPECT_THAT(page, HasSubstr("2 points from <code>a.json</code>"));
  EXPECT_THAT(page, HasSubstr("<td class=\"number\">2.00</td>"));   // time over floor
  EXPECT_THAT(page, HasSubstr("<td class=\"number\">2.00×</td>"));  // speed-up
  EXPECT_THAT(page, HasSubstr("<code>switchyard bench --suite one_gpu_bf16</code>"));
  EXPECT_EQ(page,
            page_of(nlohmann::json::array({good_row(), good_row_with("tokens_per_rank", 8)})));
}

TEST(ReportPage, HoldsWhatOthersPublish) {
  const std::vector<Row> rows =
      parse_rows<Row>(nlohmann::json::array({good_row()}).dump(), "a.json");
  PageInput input{.rows = rows, .files = {"a.json"}, .roofs = kRoofs};
  input.published = {{.rival = "another",
                      .source = "a </script> paper",
                      .model = "olmoe",
                      .compute = "",
                      .experts = 64,
                      .ranks = 8,
                      .time_us = {{8, 200.5}, {512, 400}}}};
  const std::string page = make_page(input);
  const nlohmann::json series = data_of(page)["published"][0];
  EXPECT_EQ(series["source"], "a </script> paper");
  EXPECT_EQ(series["compute"], nullptr);
  EXPECT_EQ(series["time_us"], nlohmann::json({{8, 200.5}, {512, 400.0}}));
}

TEST(ReportPage, NeedsNothingElse) {
  const std::string page = page_of(nlohmann::json::array({good_row()}));
  EXPECT_THAT(page, HasSubstr("default-src 'none'"));
  EXPECT_THAT(page, Not(HasSubstr("{{")));
  // The one address is the name of SVG elements.
  const std::regex address("(https?:)?//[a-z][a-z0-9.]+\\.[a-z]+");
  for (auto match = std::sregex_iterator(page.begin(), page.end(), address);
       match != std::sregex_iterator(); ++match) {
    EXPECT_EQ(match->str(), "http://www.w3.org");
  }
  EXPECT_THAT(page, Not(HasSubstr(" src=")));
  EXPECT_THAT(page, Not(HasSubstr("url(")));
  EXPECT_THAT(page, Not(HasSubstr("@import")));
}

TEST(ReportPage, HoldsTheTimeline) {
  const std::vector<Row> rows =
      parse_rows<Row>(nlohmann::json::array({good_row()}).dump(), "a.json");
  PageInput input{.rows = rows, .files = {"a.json"}, .roofs = kRoofs};
  input.trace_file = "t.json";
  input.timeline = parse_timeline(
      R"([{"ph": "X", "name": "a", "pid": 0, "tid": 4, "ts": 3, "dur": 1},
          {"ph": "X", "name": "b", "pid": 0, "tid": 4, "ts": 5, "dur": 2, "args": {"rows": 6}}])",
      "t.json");
  const nlohmann::json timeline = data_of(make_page(input))["timeline"];
  EXPECT_EQ(timeline["file"], "t.json");
  EXPECT_EQ(timeline["names"], nlohmann::json({"a", "b"}));
  EXPECT_EQ(timeline["tracks"][0]["slices"],
            nlohmann::json({0,    1000, 1000, 1, 0, -1, -1, -1, -1, -1,  //
                            2000, 2000, 2000, 1, 1, -1, -1, -1, 6,  -1}));
}

}  // namespace
}  // namespace switchyard::report
