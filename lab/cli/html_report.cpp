// `switchyard report`: one HTML page of what `switchyard bench`, `trace` and `tune` wrote.
#include <fmt/core.h>

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/join.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "base/whole_file.h"
#include "cli/commands.h"
#include "cli/format.h"
#include "cli/output_file.h"
#include "machine/description.h"
#include "machine/gpu_facts.h"
#include "report/page.h"
#include "results/published.h"
#include "results/row.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

constexpr const char* kExamples = R"(Examples:
  switchyard report results/one_gpu_bf16.json results/one_gpu_fp8.json
  switchyard report --profile grouped.profile.json -o tuning.html
  switchyard report --routing routing.json -o routing.html
  switchyard report ep.json -o ep.html --published results/published.json --trace trace.json

The page holds its data, style and program: it opens without a network, also from a mail, and
prints. It shows time against the floor and the rival over tokens, with --published what others
publish of the same layers, the roofline, a heat map of time over floor, the load of the experts
where rows tell it, and with --trace the timeline of a pass. With --profile it shows the choice of a
kernel's configurations: time over tokens and balancedness, regions, regret, and predicted against
measured. With --routing it shows, and prints, the balancedness of each recorded layer over its
steps. Of rows of 'bench all_to_all' it shows each rung's stages, ranks and geometric mean, of other
suites, of 'tune --evaluate' and of scripts their times. The numbers of every chart are in a table
below it. A trace can stand alone.

Exit codes: 0 done; 2 unusable files or arguments.)";

struct HtmlReportOptions {
  std::vector<std::string> files;
  std::string output = "report.html";
  std::string published, trace, machine_facts;
  std::vector<std::string> profiles, routings;
};

// Returns the roofs of the GPU model that the rows' floors belong to. Returns none if no row has a
// floor, if the floors belong to several models, or if the model's roofs are not known.
report::Roofs roofs_of(const std::vector<results::Row>& rows,
                       const std::optional<machine::GpuFacts>& given) {
  std::set<std::string> gpus;
  for (const results::Row& row : rows) {
    if (row.floor_us) gpus.emplace(machine::processor_of(row.machine));
  }
  if (given && gpus != std::set{given->gpu}) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--machine-facts are of '{}', but the rows' floors are of {}; leave "
                            "the option out, or give only rows of that GPU",
                            printable(given->gpu),
                            gpus.empty() ? "no GPU" : printable(join(gpus, " and "))));
  }
  if (gpus.size() != 1) return {};
  const std::optional<machine::GpuFacts> facts =
      given ? given : machine::known_gpu_facts(*gpus.begin());
  if (!facts) return {};
  const auto value = [](const std::optional<machine::Roof>& roof) {
    return roof ? roof->value : 0;
  };
  return {.read_bytes_per_second = facts->read_bytes_per_second.value,
          .bf16_flops_per_second = value(facts->bf16_flops_per_second),
          .fp8_flops_per_second = value(facts->fp8_flops_per_second)};
}

// Returns none for what is no rows, too: whoever reads it for rows of layers says what is wrong.
std::optional<report::Table> read_table(const std::string& file, const std::string& name) {
  const std::string text = read_named(file, results::kMostFileBytes);
  return report::table_of(results::parse(text, file, results::Row::kRemedy), name);
}

int run(const HtmlReportOptions& o) {
  std::vector<std::string> inputs = o.files;
  inputs.insert(inputs.end(), {o.published, o.trace, o.machine_facts});
  inputs.insert(inputs.end(), o.profiles.begin(), o.profiles.end());
  inputs.insert(inputs.end(), o.routings.begin(), o.routings.end());
  if (o.files.empty() && o.profiles.empty() && o.routings.empty() && o.trace.empty()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "there is nothing to show; give files of rows, --profile, --routing or --trace; see "
        "'switchyard report --help'");
  }
  for (const auto& [name, file] :
       {std::pair{"--published", &o.published}, {"--machine-facts", &o.machine_facts}}) {
    if (o.files.empty() && !file->empty()) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} {} is for rows, and no file of rows is given; give one, or leave "
                              "it out",
                              name, printable(*file)));
    }
  }
  const std::filesystem::path output = output_file("-o", o.output, inputs);
  std::vector<std::filesystem::path> paths;  // of layers' rows
  std::vector<report::Ladder> ladders;
  std::vector<report::Table> tables;
  for (const std::string& file : o.files) {
    const std::string name = std::filesystem::path(file).filename().string();
    if (results::has_all_to_all_rows(file)) {
      ladders.push_back({results::parse_rows<results::AllToAllRow>(
                             read_text(file, results::kMostFileBytes), file),
                         name});
    } else if (std::optional<report::Table> table = read_table(file, name)) {
      tables.push_back(std::move(*table));
    } else {
      paths.emplace_back(file);
    }
  }
  const std::vector<results::Row> rows = results::read_rows(paths);
  std::optional<machine::GpuFacts> facts;
  if (!o.machine_facts.empty()) facts = machine::read_gpu_facts(o.machine_facts);
  report::PageInput input{.rows = rows, .roofs = roofs_of(rows, facts)};
  // The page names files without their directories, because readers need not know this machine's
  // paths.
  for (const std::filesystem::path& path : paths) input.files.push_back(path.filename().string());
  if (!o.published.empty()) {
    input.published = results::read_published(o.published);
  }
  for (const std::string& profile : o.profiles) {
    const std::string name = std::filesystem::path(profile).filename().string();
    input.tunings.push_back(report::read_tuning(profile, name));
    input.files.push_back(name);
  }
  for (const std::string& routing : o.routings) {
    const std::string name = std::filesystem::path(routing).filename().string();
    input.routings.push_back({read_recordings(routing), name});
    input.files.push_back(name);
  }
  std::string traced;
  for (const report::Ladder& ladder : ladders) {
    input.files.push_back(ladder.file);
    traced += fmt::format("; {} of the all-to-all problem", plural(ladder.rows.size(), "point"));
  }
  input.ladders = std::move(ladders);
  for (const report::Table& table : tables) {
    input.files.push_back(table.file);
    traced += fmt::format("; {} of {}", plural(table.size(), "row"), printable(table.file));
  }
  input.tables = std::move(tables);
  if (!o.trace.empty()) {
    input.timeline = report::read_timeline(o.trace);
    input.trace_file = std::filesystem::path(o.trace).filename().string();
    input.files.push_back(input.trace_file);
    traced += fmt::format("; {} of {}", plural(input.timeline->num_slices, "slice"),
                          plural(input.timeline->ranks.size(), "rank"));
  }
  for (const report::Tuning& tuning : input.tunings) {
    traced += fmt::format("; {} of a profile of {}", plural(tuning.profile.points.size(), "point"),
                          printable(tuning.profile.kernel));
  }
  for (const report::Routing& routing : input.routings) {
    traced += fmt::format("; {} of {}", plural(routing.recordings.layers.size(), "layer"),
                          printable(routing.file));
  }
  const std::string page = report::make_page(input);
  write_whole(output, page);
  fmt::print("{}: {}; {} of {}{}\n", printable(o.output),
             format_bytes(static_cast<double>(page.size())), plural(rows.size(), "point"),
             plural(paths.size(), "file"), traced);
  for (const report::Routing& routing : input.routings) {
    for (const Recording& recording : routing.recordings.layers) {
      fmt::print("{}\n", report::routing_text(recording));
    }
  }
  return kExitOk;
}

}  // namespace

void add_report(CommandLine& line) {
  Command& command = line.add_command("report", "Make an HTML page of benchmark results");
  const auto options = std::make_shared<HtmlReportOptions>();
  command.add_texts("files", options->files, "FILE",
                    "What 'switchyard bench --json', 'tune --evaluate --json' and scripts\nwrote");
  command.add_text("-o,--output,--out", options->output, "FILE", "The page (default report.html)");
  command.add_text("--published", options->published, "FILE",
                   "Times that others publish, to stand beside rows of the same layers:\n"
                   "a list like results/published.json");
  command.add_text("--trace", options->trace, "FILE",
                   "Timeline of one pass: a trace in Chrome's format, as of 'switchyard\ntrace'");
  command.add_texts("--profile", options->profiles, "FILE",
                    "Profiles of kernels, as 'switchyard tune' writes them");
  command.add_texts("--routing", options->routings, "FILE",
                    "Recordings of layers' routings, as 'switchyard run --record' writes\nthem");
  command.add_text("--machine-facts", options->machine_facts, "FILE",
                   "The roofs of the rows' GPU, as given to 'switchyard bench'");
  command.footer(kExamples);
  command.runs([options] { return run(*options); });
}

}  // namespace switchyard::cli
