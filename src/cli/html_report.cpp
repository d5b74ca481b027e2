// `switchyard report`: one HTML page of what `switchyard bench` and `switchyard trace` wrote.
#include <memory>
#include <vector>

#include "base/printable.h"
#include "base/whole_file.h"
#include "cli/bench_rows.h"
#include "cli/commands.h"
#include "cli/output_file.h"
#include "report/page.h"

namespace switchyard::cli {
namespace {

constexpr const char* kExamples = R"(Examples:
  switchyard report results/one_gpu_bf16.json results/one_gpu_fp8.json
  switchyard report ep.json -o ep.html --published results/published.json --trace trace.json

The page holds its data, style and program: it opens without a network, also from a mail, and
prints. It shows time against the floor and the rival over tokens, with --published what others
publish of the same layers, the roofline, a heat map of time over floor, the load of the experts
where rows tell it, and with --trace the timeline of a pass. The numbers of every chart are in a
table below it.

Exit codes: 0 done; 2 unusable files or arguments.)";

struct HtmlReportOptions {
  std::vector<std::string> files;
  std::string output = "report.html";
  std::string published, trace;
};

int run(const HtmlReportOptions& o) {
  std::vector<std::string> inputs = o.files;
  inputs.insert(inputs.end(), {o.published, o.trace});
  const std::filesystem::path output = output_file("-o", o.output, inputs);
  const std::vector<std::filesystem::path> paths(o.files.begin(), o.files.end());
  const std::vector<report::Row> rows = report::read_rows(paths);
  report::PageInput input{.rows = rows,
                          .roofs = {.read_bytes_per_second = H200::kReadBytesPerSecond,
                                    .bf16_flops_per_second = H200::kBf16FlopsPerSecond,
                                    .fp8_flops_per_second = H200::kFp8FlopsPerSecond}};
  // Where a machine has its files is nobody's business.
  for (const std::filesystem::path& path : paths) input.files.push_back(path.filename().string());
  if (!o.published.empty()) {
    input.published = report::parse_published(report::read_file(o.published), o.published);
  }
  std::string traced;
  if (!o.trace.empty()) {
    input.timeline = report::read_timeline(o.trace);
    input.trace_file = std::filesystem::path(o.trace).filename().string();
    traced = fmt::format("; {} slices of {} ranks", format_count(input.timeline->num_slices),
                         input.timeline->ranks.size());
  }
  const std::string page = report::make_page(input);
  write_whole(output, page);
  fmt::print("{}: {}; {} points of {} files{}\n", printable(o.output),
             format_bytes(static_cast<double>(page.size())),
             format_count(static_cast<std::int64_t>(rows.size())), paths.size(), traced);
  return kExitOk;
}

}  // namespace

Subcommand add_report(CLI::App& root) {
  CLI::App* const app = root.add_subcommand("report", "Make an HTML page of benchmark results");
  const auto options = std::make_shared<HtmlReportOptions>();
  app->add_option("files", options->files, "What 'switchyard bench --json' wrote")
      ->type_name("FILE")
      ->required();
  app->add_option("-o,--output,--out", options->output, "The page (default report.html)")
      ->type_name("FILE");
  app->add_option("--published", options->published,
                  "Times that others publish, to stand beside rows of the same layers:\n"
                  "a list like results/published.json")
      ->type_name("FILE");
  app->add_option("--trace", options->trace,
                  "Timeline of one pass: a trace in Chrome's format, as of 'switchyard\ntrace'")
      ->type_name("FILE");
  app->footer(kExamples);
  return {app, [options] { return run(*options); }};
}

}  // namespace switchyard::cli
