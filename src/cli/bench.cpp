// `switchyard bench`: how long layers take, beside the floor and a rival.
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/host_memory.h"
#include "base/join.h"
#include "base/names.h"
#include "base/numbers.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "bench/session.h"
#include "cli/bench_all_to_all.h"
#include "cli/bench_exchange.h"
#include "cli/bench_grouped.h"
#include "cli/bench_hosts.h"
#include "cli/bench_late.h"
#include "cli/bench_report.h"
#include "cli/commands.h"
#include "cli/format.h"
#include "cli/lists.h"
#include "cli/no_gpu.h"
#include "cli/output_file.h"
#include "cli/progress.h"
#include "cli/source.h"
#include "cli/tune_report.h"
#include "gpu/device.h"
#include "machine/description.h"
#include "model/generate.h"
#include "protocol/control.h"
#include "switchyard/error.h"
#include "switchyard/layer.h"
#include "switchyard/tuner.h"

namespace switchyard::cli {
namespace {

using bench::BenchLayer;
using bench::BenchPlan;
using bench::MeasureOptions;

struct BenchOptions {
  std::string suite;
  std::vector<std::string> models;
  ConfigOverrides overrides;
  std::vector<std::int64_t> tokens;
  std::vector<double> betas;
  std::optional<DType> dtype, compute;
  std::uint64_t seed = 0;
  bool quick = false;

  // Of the suite grouped.
  int n = 0, k = 0;
  std::vector<std::int64_t> rows;
  bool swiglu = false;
  // Of the suite exchange.
  bool pre_sum = false;
  // These belong to the suite all_to_all.
  std::string rungs, trace;
  bool random_experts = false;
  // The suite late has these.
  std::vector<std::int64_t> late_us;

  std::optional<Backend> backend;
  std::optional<int> ranks;
  MeasureOptions measure;
  bool gated = false;
  bool only_graph = false;
  bool no_graph = false;
  std::string machine_facts;
  std::string table;

  std::string against;
  bench::TorchOptions torch;

  std::string json;
  std::string commit = "unknown";
  bool keep_rival = false;
  std::string command;
  const Command* line = nullptr;  // tells what was given
};

constexpr const char* kExamples = R"(Examples:
  switchyard bench --suite one_gpu_bf16 --against torch --json results/one_gpu_bf16.json
  switchyard bench --suite one_gpu_bf16 --model olmoe,qwen3-30b --tokens 1,8 --verify
  switchyard bench --model mixtral-8x7b --tokens 64,256 --balancedness 1,0.7 --dtype fp8
  switchyard bench --suite astero --dtype fp8 --json results/astero.json
  switchyard bench --suite grouped --rows 4,64,512 --balancedness 0.9
  switchyard bench --suite grouped --experts 16 --n 4096 --k 2048 --rows 32 --swiglu
  switchyard bench --suite exchange --ranks 4 --tokens 128,512 --dtype fp8
  switchyard launch --hosts node1,node2 -n 4 -- switchyard bench --suite hosts --json hosts.json
  switchyard bench --suite all_to_all --ranks 8 --json results/all_to_all.json --trace rungs.json
  switchyard bench --suite thesis --ranks 2 --json results/thesis.json
  switchyard bench --suite late --model olmoe --tokens 8,512 --late 200,2000 --json late.json
  switchyard bench --suite one_gpu_fp8 --table layer_fp8 --json tuned.json
  switchyard bench --suite ep_fp8 --model v3-routed --tokens 8,512,4096 --ranks 2 --json ep.json

Each point is one layer with random weights, gate included. On a GPU its device's clock counts, for
8 or more passes in a row, on copies of the layer in turn, so that no weight is read from the cache,
as in a model of many layers; with --cold, for one pass at a time behind a flush of the L2 cache,
which takes the kernel's own code out of it, too. 'time us' is that of a replayed CUDA graph, 'no
graph' that of plain calls. FP8 weights have a scale per 128 x 128; activations are bf16, which a
layer that computes in FP8 quantises itself. Balancedness is the entropy of the experts' histogram
over its maximum; the gate itself computes it, from activations and a router made for it. With
--suite, --model, --tokens and --balancedness choose among the suite's points.

F is the floor, the least time of one launch on this GPU: max(launch + touched weight bytes / read
rate, FLOPs / rate of the arithmetic). This build knows these roofs of the NVIDIA H200. For another
GPU, measure them and give them in a file with --machine-facts; without it, rows have no floor:
  {"gpu": "NVIDIA H100 80GB HBM3",
   "roofs": {"launch_us": {"value": 7, "source": "how it was measured"},
             "read_gb_per_s": {"value": 2900, "source": "..."},
             "bf16_tflop_per_s": {...}, "fp8_tflop_per_s": {...},
             "ranks_launch_us": {...}, "nvlink_gb_per_s": {...}}}
The last two are for --ranks; the arithmetic that is not measured may be left out, too.

--suite thesis has the layers of the FlashDMoE thesis, one rank for each GPU or --ranks, with the
gate in the time and every point compared with fp64.

--suite grouped times GroupedGemm alone: [rows, K] of tokens and a matrix [N, K] of each expert.
Rows are equal for all experts or, with --balancedness, as a random router of that balancedness
deals them. Some rows of every point are compared with fp64 before it is timed. 'roof' is F / time.

--suite exchange times dispatch and combine alone, over ranks that are threads (default 2), with
DeepSeek-V3's routing or that of --hidden, --experts and --top-k. All results are checked. Ranks are
on the cpu, or, with --backend cuda, on GPUs, which they share if there are fewer; there a time is
that of a call among ten in a graph. Where more than two ranks share a GPU, set
CUDA_DEVICE_MAX_CONNECTIONS=32.

--suite hosts is a rank of a world over hosts, which a launcher starts: docs/hosts.md. It times a
flag to another host and back, a stream of all ranks to the next host, Exchange with OLMoE's routing
or that of --hidden, --experts and --top-k, and on GPUs layers in bf16 and FP8. 'model us' is a
flag's way and the bytes of the busiest host at the stream's rate. All results are checked; rank 0
prints.

--suite all_to_all plays GPU MODE's all-to-all problem rung by rung, over ranks that are threads
(default 2) as those of --suite exchange: the nine test cases are checked, the five benchmark cases
checked and timed. Rungs: host (the host reads the counts and copies), flag_per_rank, and each with
one step more flag_per_token, fused (no kernel for the stand-in experts), epochs (no memset),
flattened (no block has one rank's rows), tuned (numbers of blocks). NAME_alone is that step without
those before it. 'uneven' is the rows of the block that received most over the blocks' mean.

--suite late lets the last of the ranks (default 2), or every rank, come late by --late, and tells
how long the others take from its start on ('after us'). 'own' is the share of their work that is
the late rank's tokens', 'early' that of their tasks that they had done when it came. The policy
'waits' computes nothing routed before all counts are there; 'works' (cpu) is the layer as it is.

With --ranks, each rank has tokens of its own and its share of the experts, and the slowest rank's
time counts. F is that of the most loaded GPU, with a launch that includes a signal to another rank
and back, and not below its time to send. There is none where ranks share a GPU.

Exit codes: 0 done; 1 a result is wrong or a point failed; 2 unusable arguments or machine.)";

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

std::vector<std::string> suite_names() {
  std::vector<std::string> names = bench::bench_suite_names();
  names.emplace_back(bench::kGroupedSuite);
  names.emplace_back(bench::kExchangeSuite);
  names.emplace_back(bench::kHostsSuite);
  names.emplace_back(bench::kAllToAllSuite);
  names.emplace_back(bench::kLateSuite);
  return names;
}

void add_point_options(Command& command, BenchOptions& o) {
  command.heading("Points");
  command.add_text("--suite", o.suite, "NAME",
                   list_help("Measure the points of", suite_names(), "or"));
  add_names(command, "--model", o.models,
            list_help("Layers of these models: those of 'switchyard models',",
                      layers_beside_the_table(), "and"));
  add_override_options(command, o.overrides);
  command.add_dtype("--dtype", o.dtype, true,
                    "Expert weights in bf16, f32, f16 or fp8 (default bf16, or the suite's)");
  command.add_dtype("--compute", o.compute, false,
                    "Arithmetic in bf16, f32 or fp8 (default: by the weights)");
  add_wholes(command, "--tokens", o.tokens, 1 << 20,
             "Tokens per pass and rank (default 1,8,32,128,512,2048,8192)");
  add_fractions(command, "--balancedness", o.betas, "Of the routing (default 1)");
  command.add_whole("--seed", o.seed, 0, std::numeric_limits<std::int64_t>::max(),
                    "Of weights and activations (default 0)");
  command.add_flag("--quick", o.quick,
                   "Only 8 and 512 tokens, 20 passes each. With --backend cpu a try\nof seconds: "
                   "3 passes of the suite's smallest layer with its fewest\ntokens from 8 on");

  command.heading("Points of --suite grouped");
  command.add_whole("--n", o.n, 1, 1 << 23,
                    "With --experts and --k one shape, not the suite's: rows of a matrix");
  command.add_whole("--k", o.k, 1, 1 << 23, "Its columns");
  add_wholes(command, "--rows", o.rows, 1 << 20,
             "Rows of tokens per expert (default the suite's, or 4,16,64,128,512)");
  command.add_flag("--swiglu", o.swiglu, "SwiGLU behind the product, or only such points");

  command.heading("Points of --suite exchange");
  command.add_flag("--pre-sum", o.pre_sum,
                   "A token's results of one rank are summed before they travel");

  command.heading("Points of --suite late");
  add_wholes(command, "--late", o.late_us, 10'000'000,
             "Microseconds by which a rank comes late (default the suite's)");

  command.heading("Points of --suite all_to_all");
  command.add_text("--rung", o.rungs, "NAME,...",
                   "Only these rungs; all (default), or alone: each step without the others");
  command.add_flag("--random-experts", o.random_experts,
                   "Each expert multiplies by a weight of its own, not by 1 + its rank");
  command.add_text("--trace", o.trace, "FILE",
                   "What each block did in a call of each rung, in Chrome's format");
}

void add_measure_options(Command& command, BenchOptions& o) {
  command.heading("Measurement");
  command.add_backend("--backend", o.backend, "cpu or cuda (default: cuda where there is a GPU)");
  command.add_whole(
      "--ranks", o.ranks, 1, protocol::kMaxRanks,
      "Ranks, dealt to the GPUs in turn (cuda; default 1, or for suites ep_*\none per GPU)");
  command.add_whole("--reserved-sms", o.measure.reserved_sms, 0, 1024,
                    "SMs of the GPU to leave free (cuda; default: those of other ranks on it)");
  command.add_flag("--uncooperative", o.measure.uncooperative,
                   "Launch without asking for all blocks at once: for ncu (cuda)");
  command.add_flag("--traced", o.measure.traced,
                   "Time the kernels that trace, to see what that costs (cuda)");
  command.add_whole("--repeat", o.measure.repeat, 1, 1'000'000,
                    "Timed passes (default 50 to 400 on a GPU, 5 to 50 elsewhere)");
  command.add_flag("--graph", o.only_graph, "Time only the replayed CUDA graph");
  command.add_flag("--no-graph", o.no_graph, "Time only plain calls");
  command.add_flag("--cold", o.measure.cold,
                   "Time each pass by itself, behind a flush of the L2 cache (cuda)");
  command.add_flag("--given-routing", o.measure.given_routing,
                   "Time passes without the gate, on the ids and weights that it chose\n(what "
                   "suites ep_* do)");
  command.add_flag("--gated", o.gated, "Time passes with the gate in suites ep_*, too");
  command.add_text("--machine-facts", o.machine_facts, "FILE",
                   "What this GPU can do at most, for the floor (cuda; see below)");
  command.add_text("--table", o.table, "NAME",
                   "Layers' schedules from NAME.MODEL.table.json, as 'switchyard tune --out\n"
                   "NAME' writes them; models without a file run by the rules (cuda)");
  command.add_flag("--verify", o.measure.verify, "Compare some tokens of each point with fp64");
}

void add_rival_options(Command& command, BenchOptions& o) {
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

void add_report_options(Command& command, BenchOptions& o) {
  command.heading("Report");
  const Option json = command.add_text(
      "--json", o.json, "FILE", "Add the rows to this file, replacing those of the same points");
  command.add_text("--commit", o.commit, "TEXT", "Commit to note in the rows");
  command
      .add_flag("--keep-rival", o.keep_rival,
                "Keep the rival's times of rows that are replaced without one")
      .needs(json);
}

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

template <typename T>
void keep(std::vector<T>& all, const std::vector<T>& wanted, const std::string& option,
          const std::string& suite) {
  if (wanted.empty()) return;
  for (const T& value : wanted) {
    if (std::find(all.begin(), all.end(), value) != all.end()) continue;
    refuse(fmt::format("{} has {}, which is not in the suite {}; it has {}", option, value, suite,
                       join(all, ", ")));
  }
  all = wanted;
}

// Leaves those of the suite's types that were asked for, of weights or of arithmetic.
void keep_type(const char* option, const std::optional<DType>& given, BenchPlan& plan) {
  if (!given) return;
  std::vector<std::string> names;
  for (const DType dtype : plan.dtypes) names.emplace_back(short_name(dtype));
  if (std::erase_if(plan.dtypes, [&](DType dtype) { return dtype != *given; }) < names.size()) {
    return;
  }
  refuse(fmt::format("{} is {}, but the suite {} is measured in {}; leave it out, or give --model",
                     option, short_name(*given), plan.suite, join(names, ", ")));
}

BenchPlan suite_plan(const BenchOptions& o) {
  if (const std::vector<std::string> given = told_overrides(o.overrides); !given.empty()) {
    refuse(fmt::format("{} would change a --model, but a suite is what it is; leave it out",
                       join(given, ", ")));
  }
  BenchPlan plan = bench::bench_suite(o.suite);
  keep_type("--dtype", o.dtype, plan);
  keep_type("--compute", o.compute, plan);
  plan.dtype = plan.compute = plan.dtypes.front();
  std::vector<std::string> models;
  for (const BenchLayer& layer : plan.layers) {
    if (std::find(models.begin(), models.end(), layer.model) == models.end()) {
      models.push_back(layer.model);
    }
  }
  keep(models, o.models, "--model", o.suite);
  std::erase_if(plan.layers, [&](const BenchLayer& layer) {
    return std::find(models.begin(), models.end(), layer.model) == models.end();
  });
  keep(plan.tokens, o.tokens, "--tokens", o.suite);
  keep(plan.betas, o.betas, "--balancedness", o.suite);
  return plan;
}

// Returns the type that a layer computes in if LayerOptions::compute is empty.
DType default_compute(DType weights) { return weights == DType::kF16 ? DType::kF32 : weights; }

void choose_types(const BenchOptions& o, BenchPlan& plan) {
  plan.dtype = o.dtype.value_or(DType::kBF16);
  plan.compute = o.compute.value_or(default_compute(plan.dtype));
  if (plan.compute == DType::kF8E4M3 && plan.dtype != DType::kF8E4M3) {
    refuse(
        fmt::format("--compute fp8 needs expert weights in fp8, but they are {}; give --dtype "
                    "fp8, or --compute bf16",
                    short_name(plan.dtype)));
  }
}

BenchPlan model_plan(const BenchOptions& o) {
  if (o.models.empty()) {
    refuse(fmt::format("there is nothing to measure; give --suite ({}) or --model",
                       join(suite_names(), ", ")));
  }
  BenchPlan plan;
  plan.suite = "custom";
  choose_types(o, plan);
  plan.dtypes = {plan.dtype};
  for (const std::string& model : o.models)
    plan.layers.push_back(naming_overrides(model, o.overrides,
                                           [&] { return bench::bench_layer(model, o.overrides); }));
  plan.tokens =
      o.tokens.empty() ? std::vector<std::int64_t>{1, 8, 32, 128, 512, 2048, 8192} : o.tokens;
  plan.betas = o.betas.empty() ? std::vector<double>{1} : o.betas;
  return plan;
}

// Timed passes of --quick.
int quick_repeats(bool on_cpu) { return on_cpu ? 3 : 20; }

BenchPlan make_plan(const BenchOptions& o) {
  BenchPlan plan = o.suite.empty() ? model_plan(o) : suite_plan(o);
  if (!o.quick) return plan;
  if (o.tokens.empty()) {
    std::erase_if(plan.tokens, [](std::int64_t t) { return t != 8 && t != 512; });
    if (plan.tokens.empty()) plan.tokens = bench::bench_suite(plan.suite).tokens;
    plan.tokens.resize(std::min<std::size_t>(plan.tokens.size(), 2));
  }
  return plan;
}

// The layer with the fewest bytes of weights.
std::vector<BenchLayer>::const_iterator smallest_layer(const BenchPlan& plan, DType dtype) {
  return std::min_element(plan.layers.begin(), plan.layers.end(),
                          [dtype](const BenchLayer& a, const BenchLayer& b) {
                            return generated_bytes(a.spec, dtype) < generated_bytes(b.spec, dtype);
                          });
}

// How to try a suite over ranks where there are no GPUs for them: its smallest layer on one rank,
// with fewer experts.
std::string try_on_cpu(const BenchPlan& plan) {
  return fmt::format(
      "to try its layer on the processor, as one rank: switchyard bench --backend cpu --model {} "
      "--experts 16 --dtype {} --given-routing --tokens 8 --quick",
      smallest_layer(plan, plan.dtypes.front())->model, short_name(plan.dtypes.front()));
}

// Returns the number of ranks that was asked for. The default is one per GPU for a suite over
// ranks, and 1 otherwise.
int choose_ranks(const BenchOptions& o, const BenchPlan& plan) {
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
Backend choose_backend(const BenchOptions& o, int ranks) {
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
void choose_for_cpu(const BenchOptions& o, BenchPlan& plan) {
  if (!o.quick || o.suite.empty()) return;
  if (!o.line->has("--dtype") && !o.line->has("--compute")) plan.dtypes.resize(1);
  if (o.models.empty()) plan.layers = {*smallest_layer(plan, plan.dtypes.front())};
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
      join(models, ", "), join(plan.tokens, ", "), short_name(plan.dtypes.front()));
}

// Refuses a suite whose weights do not fit before any layer is measured, not hours later.
void require_memory(const BenchPlan& plan) {
  const std::uint64_t available = host_memory().available;
  for (const DType dtype : plan.dtypes) {
    for (const BenchLayer& layer : plan.layers) {
      const std::uint64_t needed = generated_bytes(layer.spec, dtype);
      if (needed <= available) continue;
      throw Error(
          ErrorCode::kCapacityExceeded,
          fmt::format("the weights of {} in {} need {}, but {} of memory are available; "
                      "choose another --model{}, or give --model without --suite and fewer "
                      "--experts",
                      layer.model, short_name(dtype), format_bytes(static_cast<double>(needed)),
                      format_bytes(static_cast<double>(available)),
                      dtype == DType::kF8E4M3 ? "" : " or --dtype fp8"));
    }
  }
}

// Refuses options for CUDA if another backend runs. They would change nothing, but the row's
// command would name them.
void require_backend(const BenchOptions& o) {
  if (o.measure.backend == Backend::kCuda) return;
  constexpr const char* kOptions[] = {"--reserved-sms", "--uncooperative", "--traced",
                                      "--graph",        "--no-graph",      "--cold",
                                      "--table",        "--machine-facts"};
  for (const char* const name : kOptions) {
    if (!o.line->has(name)) continue;
    refuse(fmt::format("{} is for --backend cuda{}; leave it out", o.line->told(name),
                       o.backend ? "" : ", but this would run on the cpu"));
  }
}

void require_consistent(const BenchOptions& o, const BenchPlan& plan) {
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
    refuse("--gated is for suites ep_*, which otherwise leave out the gate; leave it out");
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
    refuse(fmt::format("--against torch needs a router in bf16, but --dtype is {}; use bf16 or fp8",
                       short_name(plan.dtype)));
  }
  bench::find_torch_script(o.torch.script);
  for (const BenchLayer& layer : plan.layers) {
    const std::string refusal = bench::torch_refusal(layer.spec, plan.compute);
    if (refusal.empty()) continue;
    refuse(fmt::format("--against torch cannot compute {}: {}", layer.model, refusal));
  }
}

std::string table_file(const BenchOptions& o, const BenchLayer& layer) {
  return fmt::format("{}.{}.table.json", o.table, layer.model);
}

// Gives layers the tables that there are. Refuses those of other kernels.
void read_tables(const BenchOptions& o, BenchPlan& plan) {
  if (o.table.empty()) return;
  if (plan.dtypes.size() > 1) {
    refuse(fmt::format("--table is of one type of weights, and the suite {} has {}; give --dtype",
                       plan.suite, plan.dtypes.size()));
  }
  if (o.measure.ranks > 1) {
    refuse(fmt::format("--table is of layers on one rank, but there are {}; leave it out",
                       o.measure.ranks));
  }
  if (o.measure.reserved_sms.value_or(0) > 0) {
    refuse("--table is of layers that have all SMs; leave it out, or --reserved-sms");
  }
  std::vector<std::string> looked_for;
  for (BenchLayer& layer : plan.layers) {
    const std::string file = table_file(o, layer);
    looked_for.push_back(printable(file));
    if (is_absent(file)) continue;
    const tuner::Table any = tuner::read_table(file);
    layer.table = std::make_shared<tuner::Table>(tuner::read_table(
        file, layer_kernel_name(plan.compute), kLayerKernelVersion, any.device.machine, any.model));
  }
  if (std::none_of(plan.layers.begin(), plan.layers.end(),
                   [](const BenchLayer& layer) { return layer.table != nullptr; })) {
    refuse(
        fmt::format("--table is '{}', but there is no {}; give the NAME that 'switchyard tune "
                    "--out NAME' wrote tables of these models by",
                    printable(o.table), join(looked_for, ", ")));
  }
}

// Refuses tables of another machine.
void require_tables_of_this_machine(const BenchOptions& o, const BenchPlan& plan) {
  for (const BenchLayer& layer : plan.layers) {
    if (layer.table == nullptr) continue;
    const tuner::Table& its = *layer.table;
    tuner::read_table(table_file(o, layer), its.kernel, its.version,
                      machine::describe_machine(o.measure.backend, 1), its.model);
  }
}

// Prints a session's progress and writes its rows to a file.
class Printer : public bench::Observer {
 public:
  // `json` is the file for the rows. If it is empty, they are only printed.
  Printer(std::filesystem::path json, bool keep_rival)
      : json_(std::move(json)), keep_rival_(keep_rival) {}

  bool failed_any() const { return failed_; }
  bool rival_begun() const { return rival_begun_; }

  void generating(const std::string& model, std::uint64_t done, std::uint64_t total) override {
    if (!generating_) generating_.emplace(fmt::format("generating {}", model), true);
    generating_->update(done, total);
    if (done == total) generating_.reset();
  }
  void measuring(std::uint64_t done_points, std::uint64_t all_points) override {
    progress_.update(done_points, all_points);
  }
  void measured(const Row& row) override {
    progress_.clear();
    fmt::print("{}\n", row_text(row));
    std::fflush(stdout);
  }
  void keep(const std::vector<Row>& rows) override {
    if (!json_.empty()) results::merge_rows(json_, rows, keep_rival_);
  }
  void failed(const std::string& what, const std::string& problem) override {
    failed_ = true;
    note(what + ": " + problem);
  }
  void note(const std::string& text) override {
    progress_.clear();
    generating_.reset();
    std::fflush(stdout);
    std::fprintf(stderr, "switchyard: %s\n", text.c_str());
  }
  void rival_begins() override {
    rival_begun_ = true;
    fmt::print("\n");
  }

 private:
  std::filesystem::path json_;
  bool keep_rival_;
  std::optional<ProgressBar> generating_;
  ProgressBar progress_{"measuring", true, Counted::kPoints};
  bool failed_ = false;
  bool rival_begun_ = false;
};

// Which layers run by tables, if there are any.
void print_tables(const BenchOptions& o, const BenchPlan& plan) {
  if (o.table.empty()) return;
  for (const BenchLayer& layer : plan.layers) {
    const std::string file = printable(table_file(o, layer));
    fmt::print("{}: {}\n", layer.model,
               layer.table == nullptr ? fmt::format("the rules; there is no {}", file)
                                      : fmt::format("{}: {}", file, table_text(*layer.table)));
  }
}

void print_head(const bench::Session& session, const BenchPlan& plan, bool given_routing) {
  fmt::print("{}; weights in {}, arithmetic in {}{}\n", session.machine(), short_name(plan.dtype),
             short_name(plan.compute), given_routing ? ", gate not timed" : "");
  if (!session.why_no_floor().empty()) {
    for (const std::string& line : wrap(session.why_no_floor(), kReportColumns)) {
      fmt::print("{}\n", line);
    }
  }
  fmt::print("\n{}\n", Palette::for_output(STDOUT_FILENO).bold(row_heading()));
  std::fflush(stdout);
}

void print_end(const std::vector<Row>& rows, bool with_rival) {
  if (with_rival) {
    fmt::print("\n");
    for (const std::string& line : rival_text(rows)) fmt::print("{}\n", line);
    fmt::print("\n");
  }
  for (const std::string& line : summary_text(rows)) fmt::print("{}\n", line);
}

// --suite grouped: GroupedGemm alone. Layers' options would change nothing there.
void require_grouped(const BenchOptions& o) {
  constexpr const char* kOfLayers[] = {
      "--model",         "--top-k", "--hidden",       "--intermediate",  "--tokens",
      "--compute",       "--ranks", "--reserved-sms", "--uncooperative", "--traced",
      "--given-routing", "--gated", "--table",        "--against",       "--keep-rival"};
  for (const char* const name : kOfLayers) {
    if (o.line->has(name)) {
      refuse(fmt::format("{} is for layers, not for --suite grouped; leave it out",
                         o.line->told(name)));
    }
  }
  if (o.measure.verify) {
    refuse("--suite grouped compares every point with fp64 as it is; leave out --verify");
  }
  const int sizes = (o.overrides.num_experts > 0) + (o.n > 0) + (o.k > 0);
  if (sizes % 3 != 0) {
    refuse(
        fmt::format("--experts, --n and --k are one shape, but only {} of them {} given; give "
                    "all of them, or none for the suite's",
                    sizes, sizes == 1 ? "is" : "are"));
  }
  if (o.swiglu && o.n % 2 != 0) {
    refuse(fmt::format("--n is {}, but half of a gated product is gate; give an even one", o.n));
  }
}

// Leaves the points that the options name.
std::vector<bench::GroupedPoint> grouped_points(const BenchOptions& o) {
  if (o.n > 0) {
    const std::vector<std::int64_t> rows =
        o.rows.empty() ? std::vector<std::int64_t>{4, 16, 64, 128, 512} : o.rows;
    return bench::with_balancedness(
        bench::grouped_points_of({o.overrides.num_experts, o.n, o.k, rows, o.swiglu}), o.betas);
  }
  std::vector<bench::GroupedPoint> points = bench::grouped_suite();
  std::vector<std::int64_t> all;
  for (const bench::GroupedPoint& point : points) {
    if (std::find(all.begin(), all.end(), point.rows) == all.end()) all.push_back(point.rows);
  }
  std::sort(all.begin(), all.end());
  std::vector<std::int64_t> kept = all;
  keep(kept, o.rows.empty() && o.quick ? std::vector<std::int64_t>{64, 512} : o.rows, "--rows",
       o.suite);
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

// On the processor the smallest point of the suite, unless the options name points.
void choose_for_cpu(const BenchOptions& o, std::vector<bench::GroupedPoint>& points) {
  if (!o.quick || o.n > 0 || !o.rows.empty()) return;
  const auto products = [](const bench::GroupedPoint& point) {
    return static_cast<double>(point.rows) * point.experts * point.n * point.k;
  };
  points = {*std::min_element(points.begin(), points.end(), [&](const auto& a, const auto& b) {
    return products(a) < products(b);
  })};
}

int run_grouped(BenchOptions options) {
  require_grouped(options);
  std::vector<bench::GroupedPoint> points = grouped_points(options);
  if (options.only_graph && options.no_graph) {
    refuse("--graph and --no-graph leave nothing to time; both are timed without either");
  }
  const std::filesystem::path json =
      options.json.empty() ? std::filesystem::path() : output_file("--json", options.json);
  if (!json.empty()) results::require_mergeable_grouped(json);
  options.measure.backend = choose_backend(options, 1);
  require_backend(options);
  const bool on_cpu = options.measure.backend == Backend::kCpu;
  if (on_cpu) choose_for_cpu(options, points);
  bench::GroupedOptions grouped;
  grouped.backend = options.measure.backend;
  grouped.dtype = options.dtype.value_or(DType::kBF16);
  grouped.repeat =
      options.quick && options.measure.repeat == 0 ? quick_repeats(on_cpu) : options.measure.repeat;
  grouped.graph = !options.no_graph;
  grouped.no_graph = !options.only_graph;
  grouped.cold = options.measure.cold;
  grouped.seed = options.seed;
  grouped.commit = options.commit;
  grouped.command = options.command;
  if (!options.machine_facts.empty()) {
    grouped.facts = machine::read_gpu_facts(options.machine_facts);
  }
  return print_grouped(grouped, points, json);
}

void require_absent(const BenchOptions& o, std::span<const char* const> options) {
  for (const char* const name : options) {
    if (o.line->has(name)) {
      refuse(fmt::format("{} is not for --suite {}; leave it out", o.line->told(name), o.suite));
    }
  }
}

// Refuses options of a suite that is not the one asked for.
void require_suite(const BenchOptions& o, std::string_view suite,
                   std::span<const char* const> options) {
  if (o.suite == suite) return;
  for (const char* const name : options) {
    if (o.line->has(name)) {
      refuse(fmt::format("{} is for --suite {}; leave it out", o.line->told(name), suite));
    }
  }
}

// Options of the suites that time layers or GroupedGemm, which no other suite has.
void require_no_timing_options(const BenchOptions& o) {
  constexpr const char* kOfOthers[] = {"--intermediate",
                                       "--compute",
                                       "--balancedness",
                                       "--n",
                                       "--k",
                                       "--rows",
                                       "--swiglu",
                                       "--reserved-sms",
                                       "--uncooperative",
                                       "--traced",
                                       "--graph",
                                       "--no-graph",
                                       "--cold",
                                       "--given-routing",
                                       "--gated",
                                       "--machine-facts",
                                       "--table",
                                       "--verify",
                                       "--against",
                                       "--keep-rival"};
  require_absent(o, kOfOthers);
}

// --suite exchange: Exchange alone. The suites all_to_all and hosts have no more of these options.
void require_exchange(const BenchOptions& o) {
  constexpr const char* kOfLayers[] = {"--model"};
  require_absent(o, kOfLayers);
  require_no_timing_options(o);
  if (o.backend == Backend::kCuda && gpu::device_count() == 0) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("--suite {} has no GPU here; use --backend cpu, or leave it out", o.suite));
  }
}

// The suite's points, of which the options choose, or those of the options' sizes.
std::vector<bench::ExchangePoint> exchange_points(const BenchOptions& o) {
  std::vector<bench::ExchangePoint> points = bench::exchange_suite();
  std::vector<std::int64_t> tokens = o.tokens;
  if (tokens.empty() && o.quick) tokens = {8, 512};
  if (o.dtype) {
    std::erase_if(points, [](const auto& point) { return point.dtype != DType::kBF16; });
    for (bench::ExchangePoint& point : points) point.dtype = *o.dtype;
    if (*o.dtype != DType::kBF16 && *o.dtype != DType::kF8E4M3) {
      refuse(fmt::format("--dtype is {}; --suite exchange is measured in bf16 and fp8",
                         short_name(*o.dtype)));
    }
  }
  if (!tokens.empty()) {
    std::vector<bench::ExchangePoint> chosen;
    for (const bench::ExchangePoint& point : points) {
      if (point.tokens != points.front().tokens) continue;
      for (const std::int64_t count : tokens) {
        chosen.push_back(point);
        chosen.back().tokens = count;
      }
    }
    points = chosen;
  }
  for (bench::ExchangePoint& point : points) {
    if (o.overrides.hidden > 0) point.hidden = o.overrides.hidden;
    if (o.overrides.num_experts > 0) point.experts = o.overrides.num_experts;
    if (o.overrides.top_k > 0) point.top_k = o.overrides.top_k;
    if (point.top_k > point.experts) {
      refuse(fmt::format("top-{} of {}; use --top-k up to --experts", point.top_k,
                         plural(point.experts, "expert")));
    }
  }
  return points;
}

int run_exchange(const BenchOptions& options) {
  require_exchange(options);
  const std::vector<bench::ExchangePoint> points = exchange_points(options);
  const std::filesystem::path json =
      options.json.empty() ? std::filesystem::path() : output_file("--json", options.json);
  if (!json.empty()) results::require_mergeable_exchange(json);
  bench::ExchangeBenchOptions exchange;
  exchange.backend = options.backend.value_or(Backend::kCpu);
  exchange.ranks = options.ranks.value_or(2);
  exchange.repeat = options.quick && options.measure.repeat == 0 ? 10 : options.measure.repeat;
  exchange.pre_sum = options.pre_sum;
  exchange.seed = options.seed;
  exchange.commit = options.commit;
  exchange.command = options.command;
  return print_exchange(exchange, points, json);
}

// --suite hosts: what crosses hosts, as a rank of a world that a launcher has started.
int run_hosts(const BenchOptions& o) {
  require_exchange(o);
  constexpr const char* kOfOneProcess[] = {"--ranks", "--dtype", "--pre-sum"};
  require_absent(o, kOfOneProcess);
  const std::filesystem::path json =
      o.json.empty() ? std::filesystem::path() : output_file("--json", o.json);
  if (!json.empty()) results::require_mergeable_hosts(json);
  bench::HostsBenchOptions hosts;
  // Not by whether there is a GPU: what is measured by default is the way between hosts.
  hosts.backend = o.backend.value_or(Backend::kCpu);
  if (o.overrides.intermediate > 0) hosts.intermediate = o.overrides.intermediate;
  if (o.overrides.hidden > 0) hosts.hidden = o.overrides.hidden;
  if (o.overrides.num_experts > 0) hosts.experts = o.overrides.num_experts;
  if (o.overrides.top_k > 0) hosts.top_k = o.overrides.top_k;
  if (hosts.top_k > hosts.experts) {
    refuse(fmt::format("top-{} of {}; use --top-k up to --experts", hosts.top_k,
                       plural(hosts.experts, "expert")));
  }
  if (!o.tokens.empty()) {
    hosts.tokens = o.tokens;
  } else if (o.quick) {
    hosts.tokens = {8, 512};
  }
  hosts.repeat = o.quick && o.measure.repeat == 0 ? 10 : o.measure.repeat;
  hosts.seed = o.seed;
  hosts.commit = o.commit;
  hosts.command = o.command;
  return print_hosts(hosts, json);
}

// --suite all_to_all: the all-to-all problem, rung by rung.
int run_all_to_all(const BenchOptions& o) {
  // The cases are the problem's: sizes and types cannot be chosen, either.
  constexpr const char* kOfPoints[] = {"--experts", "--top-k", "--hidden", "--tokens",
                                       "--dtype",   "--seed",  "--pre-sum"};
  require_absent(o, kOfPoints);
  require_exchange(o);
  bench::AllToAllOptions all_to_all;
  all_to_all.rungs = all_to_all::find_rungs(o.rungs.empty() ? "all" : o.rungs);
  const std::vector<std::string> outputs = {o.json};
  const std::filesystem::path json =
      o.json.empty() ? std::filesystem::path() : output_file("--json", o.json);
  const std::filesystem::path trace =
      o.trace.empty() ? std::filesystem::path() : output_file("--trace", o.trace, outputs);
  if (!json.empty()) results::require_mergeable_all_to_all(json);
  all_to_all.backend = o.backend.value_or(Backend::kCpu);
  all_to_all.ranks = o.ranks.value_or(2);
  if (o.random_experts) all_to_all.stand_in = all_to_all::StandIn::kRandom;
  all_to_all.repeat = o.measure.repeat;
  if (o.quick) {
    // The smaller cases.
    all_to_all.tests.resize(3);
    all_to_all.benchmarks.resize(3);
    if (all_to_all.repeat == 0) all_to_all.repeat = 3;
  }
  all_to_all.commit = o.commit;
  all_to_all.command = o.command;
  return print_all_to_all(all_to_all, json, trace);
}

// --suite late: ranks that are late.
int run_late(const BenchOptions& o) {
  // The layers are the models', as they are.
  constexpr const char* kOfPoints[] = {"--experts", "--top-k", "--hidden", "--pre-sum"};
  require_absent(o, kOfPoints);
  require_no_timing_options(o);
  const std::filesystem::path json =
      o.json.empty() ? std::filesystem::path() : output_file("--json", o.json);
  if (!json.empty()) results::require_mergeable_late(json);
  bench::LateOptions late = bench::late_suite(o.backend.value_or(Backend::kCpu));
  if (!o.models.empty()) late.models = o.models;
  if (!o.tokens.empty()) late.tokens = o.tokens;
  if (o.quick && o.tokens.empty()) late.tokens = {8};
  if (o.quick && o.models.empty()) late.models.resize(1);
  if (o.quick && o.late_us.empty()) late.late_us = {late.late_us.front(), late.late_us.back()};
  if (!o.late_us.empty()) late.late_us = o.late_us;
  late.ranks = o.ranks.value_or(2);
  late.dtype = o.dtype.value_or(DType::kBF16);
  late.repeat = o.quick && o.measure.repeat == 0 ? 5 : o.measure.repeat;
  late.seed = o.seed;
  late.commit = o.commit;
  late.command = o.command;
  return print_late(late, json);
}

int run(BenchOptions options) {
  constexpr const char* kOfLate[] = {"--late"};
  constexpr const char* kOfAllToAll[] = {"--rung", "--trace", "--random-experts"};
  constexpr const char* kOfExchange[] = {"--pre-sum"};
  constexpr const char* kOfGrouped[] = {"--rows", "--n", "--k", "--swiglu"};
  require_suite(options, bench::kLateSuite, kOfLate);
  require_suite(options, bench::kAllToAllSuite, kOfAllToAll);
  if (options.suite == bench::kAllToAllSuite) return run_all_to_all(options);
  if (options.suite == bench::kExchangeSuite) return run_exchange(options);
  if (options.suite == bench::kHostsSuite) return run_hosts(options);
  if (options.suite == bench::kLateSuite) return run_late(options);
  require_suite(options, bench::kExchangeSuite, kOfExchange);
  if (options.suite == bench::kGroupedSuite) return run_grouped(std::move(options));
  require_suite(options, bench::kGroupedSuite, kOfGrouped);
  bench::SessionOptions session_options;
  BenchPlan plan = make_plan(options);
  require_consistent(options, plan);
  const std::filesystem::path json =
      options.json.empty() ? std::filesystem::path() : output_file("--json", options.json);
  if (!json.empty()) results::require_mergeable(json);
  options.measure.ranks = choose_ranks(options, plan);
  read_tables(options, plan);
  options.measure.backend = choose_backend(options, options.measure.ranks);
  if (options.quick && options.measure.repeat == 0) {
    options.measure.repeat = quick_repeats(options.measure.backend == Backend::kCpu);
  }
  options.measure.given_routing =
      options.measure.given_routing || (plan.given_routing && !options.gated);
  options.measure.verify = options.measure.verify || plan.checked_with_gate;
  require_backend(options);
  require_tables_of_this_machine(options, plan);
  if (options.measure.backend == Backend::kCpu) {
    choose_for_cpu(options, plan);
    require_memory(plan);
  }
  if (!options.machine_facts.empty()) {
    session_options.facts = machine::read_gpu_facts(options.machine_facts);
  }
  options.measure.graph = !options.no_graph;
  options.measure.no_graph = !options.only_graph;
  session_options.measure = options.measure;
  session_options.seed = options.seed;
  session_options.commit = options.commit;
  session_options.command = options.command;
  if (!options.against.empty()) session_options.torch = options.torch;

  print_tables(options, plan);
  bool failed = false;
  for (const DType dtype : plan.dtypes) {
    session_options.plan = plan;
    session_options.plan.dtype = dtype;
    if (plan.dtypes.size() > 1) session_options.plan.compute = dtype;
    Printer printer(json, options.keep_rival);
    bench::Session session(session_options, printer);
    if (dtype != plan.dtypes.front()) fmt::print("\n");
    print_head(session, session_options.plan, options.measure.given_routing);
    const std::vector<Row> rows = session.run();
    print_end(rows, printer.rival_begun());
    failed = failed || printer.failed_any();
  }
  return failed ? kExitVerification : kExitOk;
}

}  // namespace

void add_bench(CommandLine& line, const std::vector<std::string>& arguments) {
  Command& command =
      line.add_command("bench", "Time layers, beside the hardware's floor and a rival");
  const auto options = std::make_shared<BenchOptions>();
  add_point_options(command, *options);
  add_measure_options(command, *options);
  add_rival_options(command, *options);
  add_report_options(command, *options);
  command.footer(kExamples);
  options->command = command_of(arguments);
  options->line = &command;
  command.runs([options] { return run(*options); });
}

}  // namespace switchyard::cli
