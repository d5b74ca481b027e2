// `switchyard trace`: what every role of every rank did in one pass, and when.
#include <fmt/core.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <sstream>

#include "base/printable.h"
#include "base/quantize.h"
#include "base/whole_file.h"
#include "cli/commands.h"
#include "cli/format.h"
#include "cli/layer_run.h"
#include "cli/run_report.h"
#include "cli/trace_report.h"
#include "report/page.h"
#include "trace/chrome_trace.h"

namespace switchyard::cli {
namespace {

struct TraceOptions : LayerRunOptions {
  std::string out = "trace.json";
  std::string html;
  bool json = false;
};

constexpr const char* kExamples = R"(Examples:
  switchyard trace --model olmoe --tokens 1024 --ranks 4 --html trace.html
  switchyard trace --model deepseek-v3 --experts 32 --tokens 64 --balancedness 0.7 -o v3.json
  switchyard trace --model qwen3-30b --tokens 4096 --ranks 2 --backend cuda
  switchyard trace --model olmoe --tokens 512 --ranks 2 --late 20000    # what is done meanwhile

The file opens in https://ui.perfetto.dev, and in chrome://tracing.

Exit codes: 0 done; 2 unusable arguments or files; 3 a rank did not do its part.)";

void add_trace_options(Command& command, TraceOptions& o) {
  command.heading("Execution");
  command.add_whole("--passes", o.ranks.repeat, 1, 1'000'000,
                    "Passes after a warm-up, the last of which is told (default 5)");
  command.add_whole("--late", o.ranks.late, 0, 10'000'000,
                    "Microseconds by which the last rank begins each pass later than the others");
  command.heading("Report");
  command.add_text("-o,--output,--out", o.out, "FILE",
                   "Where to write the trace (default trace.json)");
  command.add_text("--html", o.html, "FILE",
                   "Also make a page of the timeline, which opens without a network");
  command.add_flag("--json", o.json, "Summary as JSON");
}

// Returns the bytes of a token on its way to another rank.
std::uint64_t row_bytes(const LayerSpec& spec, DType compute) {
  const auto hidden = static_cast<std::uint64_t>(spec.hidden);
  if (compute != DType::kF8E4M3) return hidden * size_of(compute);
  return hidden + (hidden + kQuantGroup - 1) / kQuantGroup * sizeof(float);
}

void write_trace(const TraceOptions& options, const std::filesystem::path& path,
                 const LayerRun& run, const char* unit) {
  trace::ChromeTraceOptions chrome{.title = run.source.name, .unit = unit};
  if (run.result->ranks > 1) chrome.row_bytes = row_bytes(run.source.spec, options.ranks.compute);
  std::ostringstream text;
  trace::write_chrome_trace(text, run.result->traces, chrome);
  write_whole(path, text.view());
}

// Makes the page that 'switchyard report --trace' makes.
void write_page(const TraceOptions& options, const std::filesystem::path& trace,
                const std::filesystem::path& page) {
  report::PageInput input;
  input.timeline = report::read_timeline(trace);
  input.trace_file = std::filesystem::path(options.out).filename().string();
  input.files.push_back(input.trace_file);
  write_whole(page, report::make_page(input));
}

void print_text(const TraceOptions& options, const LayerRun& run, const trace::Summary& summary,
                const char* unit) {
  const Palette palette = Palette::for_output(STDOUT_FILENO);
  Lines lines(palette);
  add_setting(run.source, run.batch, options.ranks, *run.result, lines, palette);
  lines.add_blank();
  for (const std::string& line : to_text(summary, unit, palette)) lines.add_whole(line);
  lines.add_blank();
  lines.add("file", fmt::format("{}, for ui.perfetto.dev", printable(options.out)));
  if (!options.html.empty()) lines.add("page", printable(options.html));
  for (const std::string& line : lines.take()) fmt::print("{}\n", line);
}

int run(TraceOptions& options) {
  const std::filesystem::path out = place_for("--output", options.out, options);
  const std::filesystem::path page = place_for("--html", options.html, options);
  options.ranks.trace = true;
  const LayerRun run = run_layer(options, true);
  if (!run.result) return kExitOk;
  const char* const unit = run.result->backend == Backend::kCuda ? "SM" : "thread";
  write_trace(options, out, run, unit);
  if (!page.empty()) write_page(options, out, page);
  const trace::Summary summary = trace::summarize(run.result->traces);
  if (options.json) {
    Json json = to_json(summary, unit);
    json["file"] = options.out;
    if (!options.html.empty()) json["page"] = options.html;
    fmt::print("{}\n", json.dump({.indent = 2, .ascii = true}));
  } else {
    print_text(options, run, summary, unit);
  }
  return kExitOk;
}

}  // namespace

void add_trace(CommandLine& line) {
  add_layer_command(line, "trace", "Run one MoE layer and write a timeline of a pass",
                    add_trace_options, kExamples, run);
}

}  // namespace switchyard::cli
