// The text that people see of rows, and where rows go.
#include <gmock/gmock.h>

#include "cli/bench/layer_text.h"
#include "cli/output_file.h"
#include "model/temporary_directory.h"
#include "results/example_row.h"

namespace switchyard::cli {
namespace {

using test::read_file;
using test::TemporaryDirectory;
using ::testing::HasSubstr;

TEST(BenchReport, TextFitsAndSumsUp) {
  std::vector<Row> rows = {results::example_row(8, 9), results::example_row(8192, 31)};
  rows[0].rival = results::Rival{"torch 1", 9.5, 9, 10};
  rows[1].rival = results::Rival{"torch 1", 100, 99, 101};
  EXPECT_LE(row_heading().size(), 100u);
  for (const Row& row : rows) {
    EXPECT_LE(row_text(row).size(), 100u);
    EXPECT_EQ(row_text(row).size(), row_heading().size());
  }
  const std::vector<std::string> summary = summary_text(rows);
  // (10 / 8 * 32 / 8) ^ (1 / 2)
  EXPECT_THAT(summary[0], HasSubstr("geometric mean 2.236 over 2 points"));
  EXPECT_THAT(summary[1], HasSubstr("worst: 4.000 (olmoe, 64 experts, 8,192 tokens"));
  EXPECT_THAT(summary[2], HasSubstr("slower than the rival: 1 of 2 points"));
  EXPECT_THAT(summary[3], HasSubstr("8 tokens, beta"));
  for (Row& row : rows) row.ranks = 64;
  EXPECT_LE(row_text(rows[1]).size(), 100u);
  EXPECT_THAT(row_text(rows[1]), HasSubstr(" 64   8192 "));
  EXPECT_THAT(summary_text(rows)[1], HasSubstr("8,192 tokens on each of 64 ranks, beta"));
}

TEST(BenchReport, RowsGoWhereALinkLeads) {
  const TemporaryDirectory directory;
  std::filesystem::create_symlink("rows.json", directory / "link");
  for (const int tokens : {8, 32}) {
    results::merge_rows(output_file("--json", directory / "link"),
                        std::vector{results::example_row(tokens, 10)}, false);
  }
  EXPECT_TRUE(std::filesystem::is_symlink(directory / "link"));
  EXPECT_EQ(results::parse_rows<results::Row>(read_file(directory / "rows.json"), "").size(), 2u);
}

}  // namespace
}  // namespace switchyard::cli
