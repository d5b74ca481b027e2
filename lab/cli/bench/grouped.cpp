// `switchyard bench grouped`: GroupedGemm alone.
#include "bench/grouped.h"

#include <algorithm>
#include <memory>

#include "base/join.h"
#include "base/names.h"
#include "base/plural.h"
#include "cli/bench/common.h"
#include "cli/format.h"
#include "cli/lists.h"
#include "cli/no_gpu.h"
#include "gpu/device.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

using results::GroupedRow;

struct GroupedCommand : CommonOptions {
  using CommonOptions::CommonOptions;
  int experts = 0, n = 0, k = 0;
  std::vector<std::int64_t> rows;
  std::vector<double> betas;
  bool swiglu = false;
  std::optional<DType> dtype;
  bool only_graph = false, no_graph = false, cold = false;
  std::string machine_facts;
  const Command* line = nullptr;
};

constexpr const char* kHelp = R"(Examples:
  switchyard bench grouped --rows 4,64,512 --balancedness 0.9
  switchyard bench grouped --experts 16 --n 4096 --k 2048 --rows 32 --swiglu

Each point is [rows, K] of tokens and a matrix [N, K] of each expert. Rows are equal for all experts
or, with --balancedness, as a random router of that balancedness deals them. Some rows of every
point are compared with fp64 before it is timed. 'roof' is F / time: see 'switchyard bench layers
--help' for F, and for how a GPU is timed.)";

void check(const GroupedCommand& o) {
  const int sizes = (o.experts > 0) + (o.n > 0) + (o.k > 0);
  if (sizes % 3 != 0) {
    refuse(
        fmt::format("--experts, --n and --k are one shape, but only {} of them {} given; give "
                    "all of them, or none for the suite's",
                    sizes, sizes == 1 ? "is" : "are"));
  }
  if (o.swiglu && o.n % 2 != 0) {
    refuse(fmt::format("--n is {}, but half of a gated product is gate; give an even one", o.n));
  }
  if (o.dtype && is_four_bit(*o.dtype) && o.k % kMxGroup != 0) {
    refuse(fmt::format("--k is {}, but --dtype {} has a scale for {} columns; give a multiple", o.k,
                       short_name(*o.dtype), kMxGroup));
  }
  if (o.only_graph && o.no_graph) {
    refuse("--graph and --no-graph leave nothing to time; both are timed without either");
  }
}

// Leaves the points that the options name.
std::vector<bench::GroupedPoint> points_of(const GroupedCommand& o) {
  if (o.n > 0) {
    const std::vector<std::int64_t> rows =
        o.rows.empty() ? std::vector<std::int64_t>{4, 16, 64, 128, 512} : o.rows;
    return bench::with_balancedness(bench::grouped_points_of({o.experts, o.n, o.k, rows, o.swiglu}),
                                    o.betas);
  }
  std::vector<bench::GroupedPoint> points = bench::grouped_suite();
  std::vector<std::int64_t> kept;
  for (const bench::GroupedPoint& point : points) {
    if (std::find(kept.begin(), kept.end(), point.rows) == kept.end()) kept.push_back(point.rows);
  }
  std::sort(kept.begin(), kept.end());
  keep_named(kept, o.rows.empty() && o.quick ? std::vector<std::int64_t>{64, 512} : o.rows,
             "--rows", "grouped");
  std::erase_if(points, [&](const bench::GroupedPoint& point) {
    return std::find(kept.begin(), kept.end(), point.rows) == kept.end() ||
           (o.swiglu && !point.swiglu);
  });
  if (points.empty()) {
    refuse(fmt::format("--swiglu leaves no point of --rows {}; leave one of them out",
                       join(kept, ", ")));
  }
  return bench::with_balancedness(points, o.betas);
}

// The suite is made for GPUs, so it runs on a CPU only if asked to.
Backend choose_backend(const GroupedCommand& o) {
  if (o.backend == Backend::kCpu) return Backend::kCpu;
  if (gpu::device_count() > 0) return Backend::kCuda;
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("bench grouped needs a GPU, and {}; --backend cpu --quick tries it on the "
                  "processor, in seconds",
                  why_no_gpu()));
}

// With --quick on the processor, leaves the smallest point unless the options name points.
void choose_for_cpu(const GroupedCommand& o, std::vector<bench::GroupedPoint>& points) {
  if (!o.quick || o.n > 0 || !o.rows.empty()) return;
  const auto products = [](const bench::GroupedPoint& point) {
    return static_cast<double>(point.rows) * point.experts * point.n * point.k;
  };
  points = {*std::min_element(points.begin(), points.end(), [&](const auto& a, const auto& b) {
    return products(a) < products(b);
  })};
}

std::string heading() {
  return fmt::format("{:>4} {:>6} {:>6} {:>6} {:>5} {:>6} {:>9} {:>19} {:>8} {:>7} {:>5} {:>6}",
                     "exp.", "N", "K", "rows", "beta", "act.", "time us", "p10 .. p90 us",
                     "no graph", "TFLOP/s", "TB/s", "roof");
}

void print(const GroupedRow& row) {
  const double seconds = row.median_us * 1e-6;
  const bool both = !row.times_us_no_graph.empty();
  fmt::print(
      "{:>4} {:>6} {:>6} {:>6} {:>5} {:>6} {:>9.1f} {:>8.1f} .. {:>7.1f} {:>8} {:>7.2f} {:>5.2f} "
      "{:>6}\n",
      row.experts, row.n, row.k, row.rows_per_expert,
      row.beta ? fmt::format("{:.2f}", row.beta_reached.value_or(*row.beta)) : "equal",
      row.activation == "none" ? "-" : row.activation, row.median_us, row.p10_us, row.p90_us,
      both ? fmt::format("{:.1f}", *row.median_us_no_graph) : "-", row.flops / seconds * 1e-12,
      row.touched_bytes / seconds * 1e-12,
      row.floor_us ? format_percent(*row.share_of_roof()) : "-");
}

int run(const GroupedCommand& o) {
  check(o);
  std::vector<bench::GroupedPoint> points = points_of(o);
  const std::filesystem::path json = o.rows_file<GroupedRow>();
  const Backend backend = choose_backend(o);
  const bool on_cpu = backend == Backend::kCpu;
  if (on_cpu) {
    require_no_gpu_options(*o.line, o.backend.has_value(),
                           {"--graph", "--no-graph", "--cold", "--machine-facts"});
    choose_for_cpu(o, points);
  }
  bench::GroupedOptions options;
  options.backend = backend;
  options.dtype = o.dtype.value_or(DType::kBF16);
  options.repeat = o.repeat_or(quick_repeats(on_cpu));
  options.graph = !o.no_graph;
  options.no_graph = !o.only_graph;
  options.cold = o.cold;
  static_cast<bench::RunNote&>(options) = o;
  if (!o.machine_facts.empty()) options.facts = machine::read_gpu_facts(o.machine_facts);
  RowsPrinter<bench::GroupedObserver, GroupedRow> printer(json, print);
  bench::GroupedSession session(options, printer);
  print_head(fmt::format("{}; GroupedGemm alone, {}", session.machine(),
                         is_four_bit(options.dtype)
                             ? fmt::format("weights in {}, rows in bf16", short_name(options.dtype))
                             : fmt::format("weights and rows in {}", short_name(options.dtype))),
             session.why_no_floor(), heading());
  session.run(points);
  return printer.exit_code();
}

}  // namespace

void add_grouped(Command& bench, const std::string& typed) {
  Command& command = bench.add_command("grouped", "GroupedGemm alone, on the shapes of its rivals");
  const auto o = std::make_shared<GroupedCommand>(typed);
  o->line = &command;
  command.heading("Points");
  command.add_whole("--experts", o->experts, 1, 1 << 16,
                    "With --n and --k one shape, not the suite's: matrices");
  command.add_whole("--n", o->n, 1, 1 << 23, "Rows of a matrix");
  command.add_whole("--k", o->k, 1, 1 << 23, "Its columns");
  add_wholes(command, "--rows", o->rows, 1 << 20,
             "Rows of tokens per expert (default the suite's, or 4,16,64,128,512)");
  add_fractions(command, "--balancedness", o->betas, "Of the experts' rows (default: equal)");
  command.add_flag("--swiglu", o->swiglu, "SwiGLU behind the product, or only such points");
  command.add_dtype("--dtype", o->dtype, TypeOf::kWeights,
                    fmt::format("Weights in {}\n(default bf16), and rows in the same, or in bf16 "
                                "if that has four bits",
                                type_names(TypeOf::kWeights)));
  add_common_options(command, *o,
                     "Only 64 and 512 rows, 20 passes each; with --backend cpu one point");
  command.heading("Measurement");
  add_gpu_timing_options(command, o->only_graph, o->no_graph, o->cold, o->machine_facts);
  command.footer(kHelp);
  command.runs([o] { return run(*o); });
}

}  // namespace switchyard::cli
