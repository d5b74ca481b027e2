// `switchyard bench layers`: how long layers take, beside the floor and a rival.
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "base/join.h"
#include "base/names.h"
#include "base/printable.h"
#include "bench/session.h"
#include "cli/bench/common.h"
#include "cli/bench/layer_text.h"
#include "cli/format.h"
#include "cli/lists.h"
#include "cli/no_gpu.h"
#include "cli/source.h"
#include "common/host_memory.h"
#include "common/numbers.h"
#include "gpu/device.h"
#include "models/generate.h"
#include "protocol/control.h"
#include "switchyard/error.h"
#include "switchyard/layer.h"

namespace switchyard::cli {
namespace {

using bench::BenchLayer;
using bench::BenchPlan;
using bench::BenchTypes;
using bench::MeasureOptions;

struct LayersCommand : CommonOptions {
  using CommonOptions::CommonOptions;
  std::string suite;
  std::vector<std::string> models;
  ConfigOverrides overrides;
  std::vector<std::int64_t> tokens;
  std::vector<double> betas;
  std::optional<DType> dtype, compute;

  std::optional<int> ranks;
  MeasureOptions measure;
  bool gated = false;
  bool only_graph = false;
  bool no_graph = false;
  std::string machine_facts;
  std::string routing;

  std::string against;
  bench::TorchOptions torch;
  bool keep_rival = false;
  const Command* line = nullptr;  // tells what was given
};

constexpr const char* kHelp = R"(Examples:
  switchyard bench layers --suite one_gpu_bf16 --against torch --json one_gpu_bf16.json
  switchyard bench layers --suite one_gpu_bf16 --model olmoe,qwen3-30b --tokens 1,8 --verify
  switchyard bench layers --model mixtral-8x7b --tokens 64,256 --balancedness 1,0.7 --dtype fp8
  switchyard bench layers --suite astero --dtype fp8 --json astero.json
  switchyard bench layers --suite thesis --ranks 2 --json thesis.json
  switchyard bench layers --suite four_bit --dtype mxfp4 --compute fp8 --json four_bit.json
  switchyard bench layers --suite ep_fp8 --model v3-routed --tokens 8,512 --ranks 2 --json ep.json

Each point is one layer with random weights, gate included. On a GPU its device's clock counts, for
8 or more passes in a row, on copies of the layer in turn, so that no weight is read from the cache,
as in a model of many layers; with --cold, for one pass at a time behind a flush of the L2 cache,
which takes the kernel's own code out of it, too. 'time us' is that of a replayed CUDA graph, 'no
graph' that of plain calls. FP8 weights have a scale per 128 x 128, MXFP4 and INT4 one per 32
columns of a row; activations are bf16, which a layer that computes in FP8 quantises itself.
Balancedness is the entropy of the experts' histogram over its maximum; the gate itself computes it,
from activations and a router made for it. With --suite, --model, --tokens, --balancedness, --dtype
and --compute choose among the suite's points.

F is the floor, the least time of one launch on this GPU: max(launch + touched weight bytes / read
rate, FLOPs / rate of the arithmetic). This build knows these roofs of the NVIDIA H100 and H200. For
another GPU, measure them and give them in a file with --machine-facts; without it, rows have no
floor:
  {"gpu": "NVIDIA H20",
   "roofs": {"launch_us": {"value": 7, "source": "how it was measured"},
             "read_gb_per_s": {"value": 2900, "source": "..."},
             "bf16_tflop_per_s": {...}, "fp8_tflop_per_s": {...},
             "ranks_launch_us": {...}, "nvlink_gb_per_s": {...}}}
The last two are for --ranks; the arithmetic that is not measured may be left out, too.

--suite thesis has the layers of the FlashDMoE thesis, one rank for each GPU or --ranks, with the
gate in the time and every point compared with fp64.

With --ranks, each rank has tokens of its own and its share of the experts, and the slowest rank's
time counts. F is that of the most loaded GPU, with a launch that includes a signal to another rank
and back, and not below its time to send. There is none where ranks share a GPU.)";

// Appends the names to `text`. Breaks lines so that the help has at most 100 columns, of which the
// options' names take a part.
std::string list_help(std::string text, const std::vector<std::string>& names, const char* last) {
  constexpr std::size_t kColumns = 68;
  std::size_t line_begin = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::string word = (i + 1 == names.size() ? last + (' ' + names[i]) : names[i] + ',');
    const bool fits = text.size() - line_begin + 1 + word.size() <= kColumns;
    if (!fits) line_begin = text.size() + 1;
    text += (fits ? ' ' : '\n') + word;
  }
  return text;
}

std::vector<std::string> layers_beside_the_table() {
  std::vector<std::string> names{std::string(bench::kDeepseekRank)};
  for (const bench::RoutedAlone& layer : bench::kRoutedAlone) names.emplace_back(layer.name);
  return names;
}

void add_point_options(Command& command, LayersCommand& o) {
  command.heading("Points");
  command.add_text("--suite", o.suite, "NAME",
                   list_help("Measure the points of", bench::bench_suite_names(), "or"));
  add_names(command, "--model", o.models,
            list_help("Layers of these models: those of 'switchyard models',",
                      layers_beside_the_table(), "and"));
  add_override_options(command, o.overrides);
  command.add_dtype("--dtype", o.dtype, TypeOf::kWeights,
                    fmt::format("Expert weights in {}\n(default bf16, or the suite's)",
                                type_names(TypeOf::kWeights)));
  command.add_dtype(
      "--compute", o.compute, TypeOf::kArithmetic,
      fmt::format("Arithmetic in {} (default: by the weights)", type_names(TypeOf::kArithmetic)));
  add_wholes(command, "--tokens", o.tokens, 1 << 20,
             "Tokens per pass and rank (default 1,8,32,128,512,2048,8192)");
  add_fractions(command, "--balancedness", o.betas, "Of the routing (default 1)");
}

void add_measure_options(Command& command, LayersCommand& o) {
  command.heading("Measurement");
  command.add_whole(
      "--ranks", o.ranks, 1, protocol::kMaxRanks,
      "Ranks, dealt to the GPUs in turn (cuda; default 1, or for suites ep_*\none per GPU)");
  command.add_whole("--reserved-sms", o.measure.reserved_sms, 0, 1024,
                    "SMs of the GPU to leave free (cuda; default: those of other ranks on it)");
  command.add_flag("--uncooperative", o.measure.uncooperative,
                   "Launch without asking for all blocks at once: for ncu (cuda)");
  command.add_flag("--traced", o.measure.traced,
                   "Time the kernels that trace, to see what that costs (cuda)");
  add_gpu_timing_options(command, o.only_graph, o.no_graph, o.measure.cold, o.machine_facts);
  command.add_flag("--given-routing", o.measure.given_routing,
                   "Time passes without the gate, on the ids and weights that it chose\n(what "
                   "suites ep_* and four_bit do)");
  command.add_text("--routing-to", o.routing, "FOLDER",
                   "Write the experts of each token, which rivals of suites ep_* read, to\n"
                   "MODEL-TYPE-RANKSxTOKENS.i32 in this folder, if passes leave out the gate");
  command.add_flag("--gated", o.gated,
                   "Time passes with the gate in suites ep_* and four_bit, too");
  command.add_flag("--verify", o.measure.verify, "Compare some tokens of each point with fp64");
}

void add_rival_options(Command& command, LayersCommand& o) {
  command.heading("Rival");
  const Option against =
      command.add_text("--against", o.against, "RIVAL", "Time a rival on the same points: torch");
  // --python and --torch-script are allowed without --against, because they then change nothing.
  command.add_text("--python", o.torch.python, "PROGRAM",
                   "The Python with PyTorch (default python3)");
  command.add_text("--torch-script", o.torch.script, "FILE", "Where bench/torch_chain.py is");
  command
      .add_text("--torch-variants", o.torch.variants, "NAME,...",
                "Of index_add, ordered, compiled, with fp8 compiled_rows (default all)")
      .needs(against);
  const auto set_limit = [&o](const std::string& text) {
    const std::optional<std::int64_t> value = parse_whole(text);
    if (!value || *value < 1 || *value > 86400) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("--torch-limit is '{}'; give seconds from 1 to 86400", printable(text)));
    }
    o.torch.limit = std::chrono::seconds(*value);
  };
  command
      .add_parsed("--torch-limit", set_limit, "SECONDS", "Longest time for PyTorch (default 420)")
      .needs(against);
}

// Leaves those of the suite's types whose `part`, weights or arithmetic, was asked for.
void keep_type(const char* option, const std::optional<DType>& given, DType BenchTypes::*part,
               BenchPlan& plan) {
  if (!given) return;
  std::vector<std::string> names;
  for (const BenchTypes& types : plan.types) {
    const std::string name = short_name(types.*part);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  std::erase_if(plan.types, [&](const BenchTypes& types) { return types.*part != *given; });
  if (!plan.types.empty()) return;
  refuse(fmt::format("{} is {}, but the suite {} is measured in {}; leave it out, or give --model",
                     option, short_name(*given), plan.suite, join(names, ", ")));
}

// Leaves the types that a layer has.
void leave_used_types(BenchPlan& plan) {
  std::erase_if(plan.types, [&plan](const BenchTypes& types) {
    return std::none_of(plan.layers.begin(), plan.layers.end(),
                        [&](const BenchLayer& layer) { return layer.has(types.weights); });
  });
  plan.dtype = plan.types.front().weights;
  plan.compute = plan.types.front().compute;
}

// Leaves the layers that have a type of the plan.
void leave_typed_layers(BenchPlan& plan) {
  std::erase_if(plan.layers, [&plan](const BenchLayer& layer) {
    return std::none_of(plan.types.begin(), plan.types.end(),
                        [&](const BenchTypes& types) { return layer.has(types.weights); });
  });
}

BenchPlan suite_plan(const LayersCommand& o) {
  if (const std::vector<std::string> given = told_overrides(o.overrides); !given.empty()) {
    refuse(fmt::format("{} would change a --model, but a suite is what it is; leave it out",
                       join(given, ", ")));
  }
  BenchPlan plan = bench::bench_suite(o.suite);
  keep_type("--dtype", o.dtype, &BenchTypes::weights, plan);
  keep_type("--compute", o.compute, &BenchTypes::compute, plan);
  leave_typed_layers(plan);
  std::vector<std::string> models;
  for (const BenchLayer& layer : plan.layers) {
    if (std::find(models.begin(), models.end(), layer.model) == models.end()) {
      models.push_back(layer.model);
    }
  }
  keep_named(models, o.models, "--model", o.suite);
  std::erase_if(plan.layers, [&](const BenchLayer& layer) {
    return std::find(models.begin(), models.end(), layer.model) == models.end();
  });
  leave_used_types(plan);
  keep_named(plan.tokens, o.tokens, "--tokens", o.suite);
  keep_named(plan.betas, o.betas, "--balancedness", o.suite);
  return plan;
}

void choose_types(const LayersCommand& o, BenchPlan& plan) {
  plan.dtype = o.dtype.value_or(DType::kBF16);
  plan.compute = o.compute.value_or(bench::default_compute(plan.dtype));
  const bool multiplies_fp8 = plan.dtype == DType::kF8E4M3 || plan.dtype == DType::kF4E2M1;
  if (plan.compute == DType::kF8E4M3 && !multiplies_fp8) {
    refuse(
        fmt::format("--compute fp8 needs expert weights in fp8 or mxfp4, but they are {}; give "
                    "--dtype fp8, or --compute bf16",
                    short_name(plan.dtype)));
  }
}

BenchPlan model_plan(const LayersCommand& o) {
  if (o.models.empty()) {
    refuse(fmt::format("there is nothing to measure; give --suite ({}) or --model",
                       join(bench::bench_suite_names(), ", ")));
  }
  BenchPlan plan{.suite = "custom"};
  choose_types(o, plan);
  plan.types = {{plan.dtype, plan.compute}};
  for (const std::string& model : o.models)
    plan.layers.push_back(naming_overrides(model, o.overrides,
                                           [&] { return bench::bench_layer(model, o.overrides); }));
  plan.tokens =
      o.tokens.empty() ? std::vector<std::int64_t>{1, 8, 32, 128, 512, 2048, 8192} : o.tokens;
  plan.betas = o.betas.empty() ? std::vector<double>{1} : o.betas;
  return plan;
}

BenchPlan make_plan(const LayersCommand& o) {
  BenchPlan plan = o.suite.empty() ? model_plan(o) : suite_plan(o);
  if (!o.quick) return plan;
  if (o.tokens.empty()) {
    std::erase_if(plan.tokens, [](std::int64_t t) { return t != 8 && t != 512; });
    if (plan.tokens.empty()) plan.tokens = bench::bench_suite(plan.suite).tokens;
    plan.tokens.resize(std::min<std::size_t>(plan.tokens.size(), 2));
  }
  return plan;
}

// The layer with the fewest bytes of weights of this type.
BenchLayer smallest_layer(const BenchPlan& plan, DType dtype) {
  std::vector<BenchLayer> layers = plan.layers;
  std::erase_if(layers, [dtype](const BenchLayer& layer) { return !layer.has(dtype); });
  return *std::min_element(layers.begin(), layers.end(),
                           [dtype](const BenchLayer& a, const BenchLayer& b) {
                             return generated_bytes(a.spec, dtype) < generated_bytes(b.spec, dtype);
                           });
}

// How to try a suite over ranks where there are no GPUs for them: its smallest layer on one rank,
// with fewer experts.
std::string try_on_cpu(const BenchPlan& plan) {
  return fmt::format(
      "to try its layer on the processor, as one rank: switchyard bench layers --backend cpu "
      "--model {} "
      "--experts 16 --dtype {} --given-routing --tokens 8 --quick",
      smallest_layer(plan, plan.dtype).model, short_name(plan.dtype));
}

// Returns the number of ranks that was asked for. The default is one per GPU for a suite over
// ranks, and 1 otherwise.
int choose_ranks(const LayersCommand& o, const BenchPlan& plan) {
  if (plan.over_ranks) {
    if (o.backend == Backend::kCpu) {
      refuse(
          fmt::format("the suite {} is measured over ranks on GPUs, but --backend is cpu; leave "
                      "it out, or, {}",
                      plan.suite, try_on_cpu(plan)));
    }
    const int ranks = o.ranks.value_or(gpu::device_count());
    if (ranks >= 2) return ranks;
    if (o.ranks) {
      refuse(fmt::format("--ranks is {}, but the suite {} is measured over 2 or more", ranks,
                         plan.suite));
    }
    throw Error(ErrorCode::kUnsupported,
                fmt::format("--suite {} needs 2 or more GPUs, a rank to each, and CUDA can use {} "
                            "('switchyard doctor' tells more); {}",
                            plan.suite, ranks,
                            ranks == 1 ? "with --ranks, ranks may share one" : try_on_cpu(plan)));
  }
  const bool on_gpus = plan.checked_with_gate && o.backend != Backend::kCpu;
  const int ranks = o.ranks.value_or(on_gpus ? std::max(gpu::device_count(), 1) : 1);
  if (ranks == 1) return ranks;
  if (!o.suite.empty() && !plan.checked_with_gate) {
    refuse(
        fmt::format("--ranks is {}, but the suite {} is measured on one rank; leave it out, or "
                    "give --model without --suite",
                    ranks, plan.suite));
  }
  if (o.backend == Backend::kCpu) {
    refuse(
        fmt::format("--ranks is {}, but the processor is measured as one rank; leave it out, or "
                    "use --backend cuda",
                    ranks));
  }
  if (!o.against.empty()) {
    refuse(fmt::format("--ranks is {}, but the rival runs on one GPU; leave out --against", ranks));
  }
  return ranks;
}

// Suites are made for GPUs and would take hours on a CPU. So a suite runs there only if --backend
// cpu is given.
Backend choose_backend(const LayersCommand& o, int ranks) {
  const bool there = gpu::device_count() > 0;
  const bool asked = o.backend == Backend::kCuda || !o.suite.empty() || ranks > 1;
  if (o.backend == Backend::kCpu || (!there && !asked)) return Backend::kCpu;
  if (there) return Backend::kCuda;
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{} needs a GPU, and {}{}",
                          ranks > 1   ? fmt::format("--ranks {}", ranks)
                          : o.backend ? "--backend cuda"
                                      : "--suite " + o.suite,
                          why_no_gpu(),
                          ranks > 1         ? "; without --ranks, --backend cpu measures the "
                                              "processor as one rank"
                          : o.suite.empty() ? "; --backend cpu measures the processor"
                                            : "; --backend cpu --quick tries the suite on the "
                                              "processor, in seconds"));
}

// A suite on the processor: with --quick what takes seconds, unless the options name points.
void choose_for_cpu(const LayersCommand& o, BenchPlan& plan) {
  if (!o.quick || o.suite.empty()) return;
  if (!o.line->has("--dtype") && !o.line->has("--compute")) plan.types.resize(1);
  if (o.models.empty()) plan.layers = {smallest_layer(plan, plan.types.front().weights)};
  leave_used_types(plan);
  if (o.tokens.empty()) {
    // The suite's, of which --quick for a GPU leaves others.
    const std::vector<std::int64_t> all = bench::bench_suite(o.suite).tokens;
    plan.tokens = {*std::find_if(all.begin(), all.end(), [](std::int64_t t) { return t >= 8; })};
  }
  if (o.betas.empty()) plan.betas.resize(1);
  std::vector<std::string> models;
  for (const BenchLayer& layer : plan.layers) models.push_back(layer.model);
  fmt::print(
      "--quick on the processor: {}, tokens {}, in {}; --model, --tokens, --balancedness and "
      "--dtype choose other points\n",
      join(models, ", "), join(plan.tokens, ", "), short_name(plan.dtype));
}

// Refuses a suite whose weights do not fit before any layer is measured, not hours later.
void require_memory(const BenchPlan& plan) {
  const std::uint64_t available = host_memory().available;
  for (const BenchTypes& types : plan.types) {
    const DType dtype = types.weights;
    for (const BenchLayer& layer : plan.layers) {
      if (!layer.has(dtype)) continue;
      const std::uint64_t needed = generated_bytes(layer.spec, dtype);
      if (needed <= available) continue;
      throw Error(
          ErrorCode::kCapacityExceeded,
          fmt::format("the weights of {} in {} need {}, but {} of memory are available; "
                      "choose another --model{}, or give --model without --suite and fewer "
                      "--experts",
                      layer.model, short_name(dtype), format_bytes(static_cast<double>(needed)),
                      format_bytes(static_cast<double>(available)),
                      dtype == DType::kF8E4M3 || is_four_bit(dtype) ? "" : " or --dtype fp8"));
    }
  }
}

void require_consistent(const LayersCommand& o, const BenchPlan& plan) {
  if (o.only_graph && o.no_graph) {
    refuse("--graph and --no-graph leave nothing to time; both are timed without either");
  }
  if (o.measure.given_routing && o.gated) {
    refuse("--given-routing leaves out the gate, and --gated does not; give one of them");
  }
  if (o.measure.given_routing && plan.checked_with_gate) {
    refuse(fmt::format("--given-routing leaves out the gate, which the suite {} has; leave it out",
                       plan.suite));
  }
  if (o.gated && !plan.given_routing) {
    refuse(
        "--gated is for suites ep_* and four_bit, which otherwise leave out the gate; leave it "
        "out");
  }
  if (o.against.empty()) return;
  if (o.against != "torch") {
    refuse(
        fmt::format("--against is '{}'; the rival that there is is torch", printable(o.against)));
  }
  if (plan.over_ranks) {
    refuse(fmt::format("--against torch runs on one GPU, and the suite {} on several; leave it out",
                       plan.suite));
  }
  if (o.measure.given_routing) {
    refuse("--given-routing leaves out the gate, which the rival has; leave out --against");
  }
  if (plan.dtype != DType::kBF16 && plan.dtype != DType::kF8E4M3) {
    refuse(
        fmt::format("--against torch computes with experts in bf16 or fp8 and a router in bf16, "
                    "but --dtype is {}; use bf16 or fp8",
                    short_name(plan.dtype)));
  }
  bench::find_torch_script(o.torch.script);
  for (const BenchLayer& layer : plan.layers) {
    const std::string refusal = bench::torch_refusal(layer.spec, plan.compute);
    if (refusal.empty()) continue;
    refuse(fmt::format("--against torch cannot compute {}: {}", layer.model, refusal));
  }
}

// Refuses options for CUDA if another backend runs. They would change nothing, but the row's
// command would name them.
void require_backend(const LayersCommand& o) {
  if (o.measure.backend == Backend::kCuda) return;
  require_no_gpu_options(*o.line, o.backend.has_value(),
                         {"--reserved-sms", "--uncooperative", "--traced", "--graph", "--no-graph",
                          "--cold", "--machine-facts"});
}

class Printer : public RowsPrinter<bench::LayerObserver, Row> {
 public:
  using RowsPrinter::RowsPrinter;

  bool rival_begun() const { return rival_begun_; }

  void generating(const std::string& model, std::uint64_t done, std::uint64_t total) override {
    if (!generating_) generating_.emplace(fmt::format("generating {}", model), true);
    generating_->update(done, total);
    if (done == total) generating_.reset();
  }
  void note(const std::string& text) override {
    generating_.reset();
    tell(text);
  }
  void failed(const std::string& what, const std::string& problem) override {
    generating_.reset();
    RowsPrinter::failed(what, problem);
  }
  void rival_begins() override {
    rival_begun_ = true;
    fmt::print("\n");
  }

 private:
  std::optional<ProgressBar> generating_;
  bool rival_begun_ = false;
};

void print(const Row& row) { fmt::print("{}\n", row_text(row)); }

void print_end(const std::vector<Row>& rows, bool with_rival) {
  if (with_rival) {
    fmt::print("\n");
    for (const std::string& line : rival_text(rows)) fmt::print("{}\n", line);
    fmt::print("\n");
  }
  for (const std::string& line : summary_text(rows)) fmt::print("{}\n", line);
}

int run(LayersCommand o) {
  BenchPlan plan = make_plan(o);
  require_consistent(o, plan);
  const std::filesystem::path json = o.rows_file<Row>();
  o.measure.ranks = choose_ranks(o, plan);
  o.measure.backend = choose_backend(o, o.measure.ranks);
  o.measure.repeat = o.repeat_or(quick_repeats(o.measure.backend == Backend::kCpu));
  o.measure.given_routing = o.measure.given_routing || (plan.given_routing && !o.gated);
  o.measure.verify = o.measure.verify || plan.checked_with_gate;
  if (!o.routing.empty()) {
    if (!o.measure.given_routing) {
      refuse(
          "--routing-to writes the routing that passes without the gate are given; add "
          "--given-routing");
    }
    if (!std::filesystem::is_directory(o.routing)) {
      refuse(
          fmt::format("--routing-to is '{}', which is no folder; make it", printable(o.routing)));
    }
  }
  require_backend(o);
  if (o.measure.backend == Backend::kCpu) {
    choose_for_cpu(o, plan);
    require_memory(plan);
  }
  o.measure.graph = !o.no_graph;
  o.measure.no_graph = !o.only_graph;
  bench::SessionOptions options;
  if (!o.machine_facts.empty()) options.facts = machine::read_gpu_facts(o.machine_facts);
  options.measure = o.measure;
  options.routing = o.routing;
  static_cast<bench::RunNote&>(options) = o;
  if (!o.against.empty()) options.torch = o.torch;

  int exit_code = kExitOk;
  for (const BenchTypes& types : plan.types) {
    options.plan = plan;
    options.plan.dtype = types.weights;
    options.plan.compute = types.compute;
    std::erase_if(options.plan.layers,
                  [&types](const BenchLayer& layer) { return !layer.has(types.weights); });
    Printer printer(json, print, o.keep_rival);
    bench::Session session(options, printer);
    if (types != plan.types.front()) fmt::print("\n");
    print_head(fmt::format("{}; weights in {}, arithmetic in {}{}", session.machine(),
                           short_name(types.weights), short_name(types.compute),
                           o.measure.given_routing ? ", gate not timed" : ""),
               session.why_no_floor(), row_heading());
    const std::vector<Row> rows = session.run();
    print_end(rows, printer.rival_begun());
    exit_code = std::max(exit_code, printer.exit_code());
  }
  return exit_code;
}

}  // namespace

void add_layers(Command& bench, const std::string& typed) {
  Command& command =
      bench.add_command("layers", "Layers of models, beside the hardware's floor and a rival");
  const auto o = std::make_shared<LayersCommand>(typed);
  o->line = &command;
  add_point_options(command, *o);
  add_common_options(command, *o,
                     "Only 8 and 512 tokens, 20 passes each. With --backend cpu a try\nof seconds: "
                     "3 passes of the "
                     "suite's smallest layer with its fewest\ntokens from 8 on");
  const Option json = command.option("--json");
  command
      .add_flag("--keep-rival", o->keep_rival,
                "Keep the rival's times of rows that are replaced without one")
      .needs(json);
  add_measure_options(command, *o);
  add_rival_options(command, *o);
  command.footer(kHelp);
  command.runs([o] { return run(*o); });
}

}  // namespace switchyard::cli
