// `switchyard tune`: times configurations over routings, fits the cost model, and judges its
// choices.
#include "bench/tune.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "base/plural.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "cli/commands.h"
#include "cli/format.h"
#include "cli/lists.h"
#include "cli/no_gpu.h"
#include "cli/output_file.h"
#include "cli/progress.h"
#include "cli/source.h"
#include "cli/tune_report.h"
#include "gpu/device.h"
#include "switchyard/error.h"
#include "switchyard/recording.h"
#include "switchyard/tuner.h"

namespace switchyard::cli {
namespace {

struct TuneCommandOptions {
  std::string kernel = "grouped";
  std::vector<std::string> models;
  ConfigOverrides overrides;
  std::vector<std::int64_t> tokens, test_tokens;
  std::vector<double> betas, test_betas;
  bool no_test = false;
  std::string histograms;
  int most_histograms = 24;
  std::string generator = "distinct";
  std::optional<DType> dtype;
  std::uint64_t seed = 0;

  std::optional<Backend> backend;
  std::optional<double> budget;
  bool resume = false, quick = false;
  std::optional<double> prune;
  int repeat = 0;
  std::string out = "tuned";

  std::string evaluate;
  std::string form = tuner::to_string(tuner::FitOptions{}.form);
  bool absolute = false;
  std::optional<double> block_start_us, tile_us, split_us;
  bool measured_constants = false;
  std::string json, regions, commit = "unknown", command;
};

constexpr const char* kExamples = R"(Examples:
  switchyard tune --kernel grouped --dtype fp8 --out grouped --budget 600
  switchyard tune --kernel grouped --dtype fp8 --out grouped --resume --json ramp.json
  switchyard tune --kernel layer --models olmoe,qwen3-30b --tokens 8,64,512 --out layer
  switchyard tune --kernel grouped --generator repeated --out repeated
  switchyard tune --kernel grouped --models olmoe --histograms routing.json --out served
  switchyard tune --evaluate grouped.profile.json --json ramp.json \
                  --regions ramp_regions.json

It times every configuration of a kernel at two grids of tokens and balancedness: one to fit on, and
one to judge by. A point of the second that is not in the first is held out. --out NAME makes
  NAME.profile.json        every time, whole after each point
  NAME.fit.json            the cost model's coefficients
  NAME.MODEL.table.json    the configurations that the fit chooses for a model, four floats each;
                           none for layers, which run by their rules
After --budget seconds it stops, and with --resume goes on where it stopped. A file of another
machine, or of an older version of the kernel, is refused. --quick and --prune save most of the
time; what is called exhaustive is then the best of the configurations that were not pruned.

The kernel grouped is GroupedGemm with SwiGLU, on gate and up of the experts; layer is a whole layer
whose routing is given. On a GPU grouped has more than 134 configurations and layer 53; on the CPU
both have one for each number of threads. Histograms are a router's (distinct: each token's experts
differ, so that beta is ln K / ln E or more) or RaMP's (repeated), which no layer can run.

--evaluate reads a profile and times nothing. It prints the regret of the cost model's choices in
sample, held out and for models that were left out, of each of its forms, the gain over static
choice and over the kernel's own rule, and RaMP's regions: predicted against found. With --out it
writes the fit and the tables anew.

Exit codes: 0 done, or the budget ended; 2 unusable arguments, files or machine.)";

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void add_what(Command& command, TuneCommandOptions& o) {
  command.heading("What is timed");
  command.add_text("--kernel", o.kernel, "NAME", "grouped or layer (default grouped)");
  add_names(command, "--models", o.models,
            "Models of 'switchyard bench', or RaMP's: ramp-olmoe, ramp-qwen3,\nramp-dsv3-ep8, "
            "ramp-dsv3-tp8, ramp-mixtral, ramp-phi, ramp-jamba and\nramp-dbrx (default: these)");
  add_override_options(command, o.overrides);
  command.add_dtype("--dtype", o.dtype, TypeOf::kArithmetic,
                    "Weights and arithmetic in bf16, fp8 or, on the CPU, f32\n(default bf16)");
  add_wholes(command, "--tokens", o.tokens, 1 << 16, "Tokens to fit on (default 8,32,128,256,512)");
  add_fractions(command, "--balancedness", o.betas,
                "Balancedness to fit on (default 0.35,0.5,0.65,0.9,1)");
  add_wholes(command, "--test-tokens", o.test_tokens, 1 << 16,
             "Tokens to judge by (default 16,32,64,128,256,1024)");
  add_fractions(command, "--test-balancedness", o.test_betas,
                "Balancedness to judge by (default 0.2,0.5,0.8,1)");
  command.add_flag("--no-test", o.no_test, "Time only what the fit needs");
  command.add_text(
      "--histograms", o.histograms, "FILE",
      "Recordings of layers' routings, which take the place of the grid to\njudge by; "
      "three of four are fitted on, too. Every model must be that\nof a recorded layer");
  command.add_whole("--most-histograms", o.most_histograms, 1, 1 << 16,
                    "Of them, for each model (default 24)");
  command.add_text("--generator", o.generator, "NAME",
                   "Of histograms: distinct or repeated (default distinct)");
  command.add_whole("--seed", o.seed, 0, std::numeric_limits<std::int64_t>::max(),
                    "Of weights and histograms (default 0)");
}

void add_how(Command& command, TuneCommandOptions& o) {
  command.heading("Measurement");
  command.add_backend("--backend", o.backend, "cpu or cuda (default: cuda where there is a GPU)");
  command.add_real("--budget", o.budget, 0, 1e9, "Seconds after which no timing begins");
  command.add_flag("--resume", o.resume, "Go on with the profile of an earlier run");
  command.add_flag("--quick", o.quick,
                   "On a GPU: 12 to 28 timed passes in place of 50, and 4 of what is far\nfrom the "
                   "best");
  command.add_real(
      "--prune", o.prune, 0, 100,
      "Do not time on what is slower than the best by more than this share\nat the six "
      "corners of the grid to fit on, such as 0.25");
  command.add_whole("--repeat", o.repeat, 1, 1'000'000,
                    "Timed repetitions (default: of 50 passes or more on a GPU, 3\nto 200 in "
                    "each of three rounds elsewhere)");
  command.add_text("-o,--out", o.out, "NAME", "What the files' names begin with (default tuned)");
}

void add_judgement(Command& command, TuneCommandOptions& o) {
  command.heading("Fit and judgement");
  command.add_text("--evaluate", o.evaluate, "PROFILE", "Judge a profile; time nothing");
  command.add_text("--form", o.form, "NAME",
                   "Of the cost model: tasks, waves, rounded_waves, full,\nrounded_full or experts "
                   "(the default)");
  command.add_flag("--absolute", o.absolute,
                   "Fit to the least squares of errors, as RaMP, not of errors over\ntimes");
  command.add_flag(
      "--measured-constants", o.measured_constants,
      "Take the constants that follow, for the regions, from the profile's\ntimes of at "
      "most one wave, where they are not given");
  command.add_real("--block-start-us", o.block_start_us, 1e-3, 1e6,
                   "Measured start of a lone block, for the regions (default 24)");
  command.add_real("--tile-us", o.tile_us, 1e-6, 1e6,
                   "Measured time of a block's product of 256 x 128 (default 0.13)");
  command.add_real("--split-us", o.split_us, 1e-6, 1e6,
                   "Measured cost of splitting K (default 4.68)");
  command.add_text("--json", o.json, "FILE",
                   "Add a row for each point to this file, as results/ramp.json has\nthem");
  command.add_text("--regions", o.regions, "FILE", "Add a row for each prediction to this file");
  command.add_text("--commit", o.commit, "TEXT", "Commit to note in the rows");
}

std::vector<int> as_ints(const std::vector<std::int64_t>& values) {
  return {values.begin(), values.end()};
}

tuner::Plan plan_of(const TuneCommandOptions& o, const std::vector<bench::TuneModel>& models) {
  tuner::Plan plan;
  for (const bench::TuneModel& model : models) plan.models.push_back(model.model);
  if (!o.tokens.empty()) plan.tokens = as_ints(o.tokens);
  if (!o.betas.empty()) plan.betas = o.betas;
  if (!o.test_tokens.empty()) plan.test_tokens = as_ints(o.test_tokens);
  if (!o.test_betas.empty()) plan.test_betas = o.test_betas;
  if (o.no_test) {
    if (!o.test_tokens.empty() || !o.test_betas.empty()) {
      refuse("--no-test leaves out the points of --test-tokens and --test-balancedness; give one");
    }
    plan.test_tokens.clear();
    plan.test_betas.clear();
  }
  if (!o.histograms.empty()) {
    if (o.no_test) refuse("--no-test leaves out what --histograms is judged by; give one");
    if (o.test_tokens.empty()) plan.test_tokens.clear();
    if (o.test_betas.empty()) plan.test_betas.clear();
    tuner::add_recorded(plan, read_recordings(o.histograms),
                        static_cast<std::size_t>(o.most_histograms));
  }
  plan.generator = tuner::generator_named(o.generator);
  plan.seed = o.seed;
  return plan;
}

Backend choose_backend(const TuneCommandOptions& o) {
  const bool there = gpu::device_count() > 0;
  if (!there && o.backend == Backend::kCuda) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("--backend cuda needs a GPU, and {}; --backend cpu tunes the processor",
                            why_no_gpu()));
  }
  return o.backend.value_or(there ? Backend::kCuda : Backend::kCpu);
}

Judging judging_of(const TuneCommandOptions& o, const tuner::Profile& profile) {
  Judging judging;
  judging.fit.form = tuner::form_named(o.form);
  judging.fit.relative = !o.absolute;
  tuner::DeviceConstants& device = judging.constants;
  if (o.measured_constants) {
    const auto measured = tuner::measured_constants(profile);
    if (!measured) {
      refuse(
          "--measured-constants needs points of at most one wave of models of different K, and "
          "times that grow with K; give --block-start-us, --tile-us and --split-us instead");
    }
    device = *measured;
    fmt::print(
        "measured: a lone block starts in {:.2f} us, a product of {} x {} takes {:.4f} us, "
        "splitting K costs {:.2f} us\n",
        device.block_start_us, tuner::kReferenceRows, tuner::kTileColumns, device.tile_us,
        device.split_us);
  }
  device.block_start_us = o.block_start_us.value_or(device.block_start_us);
  device.tile_us = o.tile_us.value_or(device.tile_us);
  device.split_us = o.split_us.value_or(device.split_us);
  device.num_sms = profile.device.num_sms;
  if (profile.device.l2_bytes > 0) device.l2_bytes = profile.device.l2_bytes;
  judging.element_bytes = profile.kernel.ends_with("_bf16")  ? 2
                          : profile.kernel.ends_with("_f32") ? 4
                                                             : 1;
  return judging;
}

// Prints the judgement, and adds its rows to files.
void judge(const TuneCommandOptions& o, const tuner::Profile& profile) {
  const Judging judging = judging_of(o, profile);
  for (const std::string& line : judgement_text(profile, judging)) fmt::print("{}\n", line);
  const RowSource source{o.commit, o.command};
  if (!o.json.empty()) {
    results::merge_rows(output_file("--json", o.json), ramp_rows(profile, judging, source));
  }
  if (!o.regions.empty()) {
    results::merge_rows(output_file("--regions", o.regions), region_rows(profile, judging, source));
  }
}

// Refuses points that cannot be fitted, however long they are measured.
void require_enough_points(const tuner::Profile& profile, const std::string& form) {
  const int fewest = tuner::fewest_points(tuner::form_named(form));
  for (std::size_t m = 0; m < profile.models.size(); ++m) {
    const auto points =
        std::count_if(profile.points.begin(), profile.points.end(),
                      [&](const tuner::Point& point) { return point.model == m && point.fit; });
    if (points >= fewest) continue;
    refuse(fmt::format(
        "--tokens and --balancedness make {} to fit on of the model {}, and --form "
        "{} has {}; give more of either, or another form",
        plural(static_cast<std::size_t>(points), "point"), printable(profile.models[m].name), form,
        plural(static_cast<std::size_t>(fewest), "coefficient")));
  }
}

tuner::Profile models_to_fit(const tuner::Profile& profile, const std::string& file) {
  tuner::Profile complete = tuner::complete_models(profile);
  if (complete.models.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} has no model all of whose points to fit on are timed; go on "
                            "measuring with --resume",
                            printable(file)));
  }
  if (complete.models.size() < profile.models.size()) {
    fmt::print("timed completely: {} of {}; the others are left out\n", complete.models.size(),
               plural(profile.models.size(), "model"));
  }
  return complete;
}

// Prints a line for each point when all of its times are there.
class TunePrinter {
 public:
  explicit TunePrinter(const tuner::Profile& profile) : profile_(profile) {
    while (next_ < profile_.points.size() && is_timed(profile_.points[next_])) ++next_;
  }

  void preparing(const std::string& model) {
    progress_.clear();
    fmt::print("making weights of {}\n", printable(model));
    std::fflush(stdout);
  }
  void tell(const tuner::Progress& p) {
    for (; next_ < profile_.points.size() && is_timed(profile_.points[next_]); ++next_) {
      progress_.clear();
      fmt::print("{}  [{} of {}, {:.0f} s, {:.0f} s left]\n",
                 point_text(profile_, profile_.points[next_]), p.done, plural(p.total, "timing"),
                 p.seconds, p.seconds_left);
      std::fflush(stdout);
    }
    progress_.update(p.done, p.total);
  }
  void end() { progress_.clear(); }

 private:
  static bool is_timed(const tuner::Point& point) {
    return std::find(point.times_us.begin(), point.times_us.end(), tuner::kNotTimed) ==
           point.times_us.end();
  }

  const tuner::Profile& profile_;
  std::size_t next_ = 0;
  ProgressBar progress_{"timing", true, Counted::kPoints};
};

void write_choices(const TuneCommandOptions& o, const tuner::Profile& profile) {
  const tuner::Fit its = tuner::fit(profile, {tuner::form_named(o.form), !o.absolute, false});
  const std::string fit_file = o.out + ".fit.json";
  tuner::write_fit(output_file("--out", fit_file), its);
  fmt::print("\n{}: {}, {}\n", printable(fit_file), plural(its.models.size(), "model"),
             plural(its.configurations.size(), "configuration"));
  // Tables of layers gained 0.5 % over their rules, so that no layer takes one: docs/tuner.md.
  if (profile.kernel.starts_with("layer_")) return;
  for (std::size_t m = 0; m < its.models.size(); ++m) {
    int most_tokens = 1;
    for (const tuner::Point& point : profile.points) {
      if (point.model == m) most_tokens = std::max(most_tokens, point.tokens);
    }
    const tuner::Table table = tuner::make_table(its, m, most_tokens);
    const std::string file = fmt::format("{}.{}.table.json", o.out, its.models[m].name);
    tuner::write_table(output_file("--out", file), table);
    fmt::print("{}: {}\n", printable(file), plural(table.entries.size(), "configuration"));
  }
}

// `with_choices`: writes the fit and the tables, too.
int evaluate(const TuneCommandOptions& o, bool with_choices) {
  const tuner::Profile profile = models_to_fit(tuner::read_profile(o.evaluate), o.evaluate);
  judge(o, profile);
  if (with_choices) write_choices(o, profile);
  return kExitOk;
}

int measure(const TuneCommandOptions& o) {
  bench::TuneOptions options;
  options.kernel = bench::tuned_kernel_named(o.kernel);
  options.backend = choose_backend(o);
  options.dtype = o.dtype.value_or(DType::kBF16);
  options.repeat = o.repeat;
  options.quick = o.quick;
  options.seed = o.seed;
  for (const std::string& name : o.models.empty() ? bench::ramp_models() : o.models) {
    options.models.push_back(bench::tune_model(name, o.overrides));
  }
  const tuner::Plan plan = plan_of(o, options.models);
  options.max_tokens = *std::max_element(plan.tokens.begin(), plan.tokens.end());
  for (const int tokens : plan.test_tokens)
    options.max_tokens = std::max(options.max_tokens, tokens);
  for (const tuner::Plan::Recorded& recorded : plan.recorded) {
    const int top_k = plan.models[recorded.model].top_k;
    const std::int64_t rows =
        std::accumulate(recorded.counts.begin(), recorded.counts.end(), std::int64_t{0});
    options.max_tokens = std::max(options.max_tokens, static_cast<int>((rows + top_k - 1) / top_k));
  }
  if (options.kernel == bench::TunedKernel::kLayer &&
      plan.generator == tuner::Generator::kRepeated) {
    throw Error(ErrorCode::kUnsupported,
                "--generator repeated draws a token's experts with repetition, and a layer runs "
                "only distinct ones; use --generator distinct, or --kernel grouped");
  }
  TunePrinter* printer = nullptr;
  options.preparing = [&](const std::string& model) {
    if (printer != nullptr) printer->preparing(model);
  };
  const tuner::Kernel kernel = bench::make_tuned_kernel(options);
  const tuner::Device device = bench::tuned_device(options.backend);
  const std::filesystem::path file = output_file("--out", o.out + ".profile.json");
  if (!o.resume && !is_absent(file)) {
    refuse(fmt::format("{} exists; go on with it by --resume, or choose another --out",
                       printable(file)));
  }
  const bool there = o.resume && !is_absent(file);
  tuner::Profile profile = there ? tuner::resumed_profile(file, kernel, device, plan)
                                 : tuner::new_profile(kernel, device, plan);
  require_enough_points(profile, o.form);
  fmt::print("{} version {} on {}\n{}, {}, {}{}\n", kernel.name, kernel.version,
             printable(device.machine), plural(profile.models.size(), "model"),
             plural(kernel.configurations.size(), "configuration"),
             plural(profile.points.size(), "point"), there ? "; going on" : "");
  std::fflush(stdout);

  TunePrinter lines(profile);
  printer = &lines;
  tuner::MeasureOptions measuring;
  measuring.file = file;
  measuring.budget_seconds = o.budget.value_or(measuring.budget_seconds);
  measuring.prune = o.prune;
  tuner::Progress last;
  measuring.progress = [&](const tuner::Progress& p) {
    last = p;
    lines.tell(p);
  };
  const bool complete = tuner::measure(profile, kernel, measuring);
  lines.end();
  for (std::size_t m = 0; m < profile.models.size(); ++m) {
    const std::size_t pruned = tuner::num_pruned(profile, m);
    if (pruned == 0) continue;
    fmt::print("{}: pruned are {} of {}\n", printable(profile.models[m].name), pruned,
               plural(profile.configurations.size(), "configuration"));
  }
  fmt::print("{}: {} of {}, {:.0f} s\n", printable(o.out + ".profile.json"), last.done,
             plural(last.total, "timing"), last.seconds);
  if (!complete) {
    fmt::print("the budget ended; --resume goes on, for about {:.0f} s\n", last.seconds_left);
    if (tuner::complete_models(profile).models.empty()) return kExitOk;
  }
  const tuner::Profile fitted = models_to_fit(profile, o.out + ".profile.json");
  write_choices(o, fitted);
  if (o.no_test) return kExitOk;
  fmt::print("\n");
  judge(o, fitted);
  return kExitOk;
}

int run(const Command& command, const TuneCommandOptions& o) {
  tuner::form_named(o.form);
  if (const std::string name = std::filesystem::path(o.out).filename();
      name.empty() || name == "." || name == "..") {
    refuse(
        fmt::format("--out {} is a folder; give what the files' names begin with, such as "
                    "tuned",
                    printable(o.out)));
  }
  if (!o.json.empty()) results::require_mergeable<results::RampRow>(output_file("--json", o.json));
  if (!o.regions.empty())
    results::require_mergeable<results::RegionRow>(output_file("--regions", o.regions));
  if (o.histograms.empty() && command.has("--most-histograms")) {
    refuse(fmt::format("{} is of --histograms; give that, too, or leave it out",
                       command.told("--most-histograms")));
  }
  if (o.evaluate.empty()) {
    for (const char* option : {"--json", "--regions"}) {
      if (o.no_test && command.has(option)) {
        refuse(
            fmt::format("{} takes points that are judged by, and --no-test has none; leave one "
                        "of them out",
                        command.told(option)));
      }
    }
    if (o.quick && choose_backend(o) == Backend::kCpu) {
      refuse("--quick is for --backend cuda, and this would run on the cpu; leave it out");
    }
    return measure(o);
  }
  for (const char* option :
       {"--kernel", "--models", "--tokens", "--balancedness", "--generator", "--budget", "--resume",
        "--backend", "--repeat", "--dtype", "--seed", "--test-tokens", "--test-balancedness",
        "--no-test", "--histograms", "--most-histograms", "--quick", "--prune"}) {
    if (command.has(option)) {
      refuse(fmt::format("{} is for timing, and --evaluate times nothing; leave one of them out",
                         command.told(option)));
    }
  }
  return evaluate(o, command.has("--out"));
}

}  // namespace

void add_tune(CommandLine& line, const std::vector<std::string>& arguments) {
  Command& command =
      line.add_command("tune", "Find which configuration of a kernel suits a routing");
  const auto options = std::make_shared<TuneCommandOptions>();
  add_what(command, *options);
  add_how(command, *options);
  add_judgement(command, *options);
  command.footer(kExamples);
  options->command = command_of(arguments);
  command.runs([options, &command] { return run(command, *options); });
}

}  // namespace switchyard::cli
