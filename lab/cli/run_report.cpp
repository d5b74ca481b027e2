#include "cli/run_report.h"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>

#include "base/names.h"
#include "base/printable.h"
#include "cli/format.h"
#include "cli/lines.h"
#include "cpu/tile_gemm.h"
#include "layer/compute.h"
#include "machine/host_rates.h"
#include "switchyard/routing.h"

namespace switchyard::cli {
namespace {

constexpr double kGemmSeconds = 0.3;
constexpr int kMostGemmTrials = 5;
constexpr double kReadSeconds = 0.1;
constexpr int kBarsPerLine = 64;

// Numbers that both forms of the report show.
struct Derived {
  double median = 0, fastest = 0, slowest = 0;
  double flops = 0;  // of one pass
  double flops_per_second = 0;
  double gemm_fraction = 0;
  double weight_bytes = 0;  // touched by one pass
  double weight_bytes_per_second = 0;
  double read_fraction = 0;
  bool weights_dominate = false;
  std::int64_t slots = 0, fewest = 0, most = 0, unpicked = 0;
  double mean = 0, beta = 0;
  double sent_bytes = 0;
  double token_buffer_bytes = 0;
};

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

double ratio(double a, double b) { return b > 0 ? a / b : 0; }

// Returns the bytes of the touched weights in bf16. The GPU engine holds weights in bf16 whatever
// type they are stored in, unless it computes in FP8.
double bf16_weight_bytes(const LayerSpec& spec, const std::vector<std::int64_t>& counts) {
  const auto active =
      counts.size() - static_cast<std::size_t>(std::count(counts.begin(), counts.end(), 0));
  const double rows = static_cast<double>(active) * spec.intermediate + spec.shared_intermediate;
  return rows * spec.hidden * (spec.activation.gated ? 3 : 2) *
         static_cast<double>(size_of(DType::kBF16));
}

void derive_speed(const Report& report, Derived& d) {
  const RunResult& r = report.result;
  const LayerSpec& spec = report.source.spec;
  d.median = median_of(r.pass_seconds);
  d.fastest = *std::min_element(r.pass_seconds.begin(), r.pass_seconds.end());
  d.slowest = *std::max_element(r.pass_seconds.begin(), r.pass_seconds.end());
  d.flops = machine::useful_flops(machine::layer_products(
      spec, r.tokens_per_expert, run::all_share_sizes(report.batch.tokens(), r.ranks)));
  d.flops_per_second = ratio(d.flops, d.median);
  d.gemm_fraction = ratio(d.flops_per_second, report.rates.gemm_flops);
  d.weight_bytes =
      r.backend == Backend::kCuda && report.options.compute != DType::kF8E4M3 &&
              !is_four_bit(report.source.dtype)
          ? bf16_weight_bytes(spec, r.tokens_per_expert)
          : static_cast<double>(touched_weight_bytes(report.source.weights, r.tokens_per_expert));
  d.weight_bytes_per_second = ratio(d.weight_bytes, d.median);
  d.read_fraction = ratio(d.weight_bytes_per_second, report.rates.read_bytes);
  // The rate of reading is shown if, at the machine's rates, reading takes more than half as long
  // as multiplying.
  d.weights_dominate =
      2 * ratio(d.weight_bytes, report.rates.read_bytes) > ratio(d.flops, report.rates.gemm_flops);
}

void derive_experts(const std::vector<std::int64_t>& counts, Derived& d) {
  d.slots = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  d.fewest = *std::min_element(counts.begin(), counts.end());
  d.most = *std::max_element(counts.begin(), counts.end());
  d.unpicked = std::count(counts.begin(), counts.end(), 0);
  d.mean = static_cast<double>(d.slots) / static_cast<double>(counts.size());
  d.beta = balancedness(counts);
}

Derived derive(const Report& report) {
  const RunResult& r = report.result;
  Derived d;
  derive_speed(report, d);
  derive_experts(r.tokens_per_expert, d);
  d.sent_bytes = static_cast<double>(r.dispatch_bytes + r.combine_bytes + r.signal_bytes);
  d.token_buffer_bytes = static_cast<double>(report.batch.tokens()) * report.source.spec.hidden *
                         static_cast<double>(size_of(value_type(report.options.compute)));
  return d;
}

bool on_gpu(const Report& report) { return report.result.backend == Backend::kCuda; }

std::string world_text(const RunResult& r) {
  if (r.backend == Backend::kCuda && r.ranks == 1) return r.device;
  const std::string ranks =
      fmt::format("{} ({})", plural(r.ranks, "rank"), r.processes ? "processes" : "threads");
  return r.backend == Backend::kCuda
             ? fmt::format("{} on {}", ranks, r.device)
             : fmt::format("{}, {} in all", ranks, plural(r.threads, "compute thread"));
}

}  // namespace

std::string nan_text(const RunResult& result) {
  return fmt::format(
      "{} with NaN logits ({} in all) lost experts; check the activations and the router",
      plural(result.nan_tokens, "token"), plural(result.nan_logits, "logit"));
}

void add_setting(const Source& source, const Batch& batch, const RankOptions& options,
                 const RunResult& result, Lines& lines, const Palette& palette) {
  lines.add_whole(palette.bold(source.name));
  lines.add("layer", describe(source.spec));
  lines.add("weights",
            fmt::format("{}; {}, {} for {}", printable(source.origin), to_string(source.dtype),
                        format_bytes(static_cast<double>(source.bytes)),
                        plural(source.spec.num_experts, "expert")));
  lines.add("batch", fmt::format("{}, activations {}, routing: {}", plural(batch.tokens(), "token"),
                                 printable(batch.origin), batch.routing));
  lines.add("world",
            fmt::format("{}, computing in {}", world_text(result), to_string(options.compute)));
}

namespace {

void add_speed(const Report& report, const Derived& d, Lines& lines, const Palette& palette) {
  std::string phases = report.result.ranks > 1 ? "one launch per rank, L2 cache flushed before"
                                               : "one launch, L2 cache flushed before each";
  if (!on_gpu(report)) {
    phases = fmt::format("gate {}, plan complete at {}", format_seconds(report.result.gate_seconds),
                         format_seconds(report.result.plan_seconds));
  }
  lines.add_painted(
      "time", fmt::format("{}  median of {} ({} .. {}); {}", palette.bold(format_seconds(d.median)),
                          report.result.pass_seconds.size(), format_seconds(d.fastest),
                          format_seconds(d.slowest), phases));
  lines.add("",
            fmt::format("{} per second",
                        format_quantity(ratio(static_cast<double>(report.batch.tokens()), d.median),
                                        "tokens")));
  if (on_gpu(report)) {
    lines.add_painted("compute", palette.bold(format_quantity(d.flops_per_second, "FLOP/s")));
    lines.add_painted("streaming",
                      fmt::format("{}  of the {} of touched weights",
                                  palette.bold(format_quantity(d.weight_bytes_per_second, "B/s")),
                                  format_bytes(d.weight_bytes)));
    return;
  }
  // More than all of it is no share: other processes had the processor while the rate was measured.
  const bool above = d.gemm_fraction > 1;
  lines.add_painted("compute",
                    fmt::format("{}  {} the {} that {} small GEMMs {} ({})",
                                palette.bold(format_quantity(d.flops_per_second, "FLOP/s")),
                                above ? "above" : format_percent(d.gemm_fraction) + " of",
                                format_quantity(report.rates.gemm_flops, "FLOP/s"),
                                to_string(report.rates.gemm_dtype),
                                above ? "reached beside other processes" : "reach here",
                                cpu::gemm_instruction_set()));
  if (!d.weights_dominate) return;
  lines.add_painted(
      "streaming",
      fmt::format("{}  {} of the {} at which the {} of touched weights are read here",
                  palette.bold(format_quantity(d.weight_bytes_per_second, "B/s")),
                  format_percent(d.read_fraction), format_quantity(report.rates.read_bytes, "B/s"),
                  format_bytes(d.weight_bytes)));
}

void add_experts(const Report& report, const Derived& d, Lines& lines, const Palette& palette) {
  const auto& counts = report.result.tokens_per_expert;
  lines.add("experts", fmt::format("tokens per expert: min {}, mean {:.1f}, max {}; {} unpicked; "
                                   "balancedness {:.3f}",
                                   format_count(d.fewest), d.mean, format_count(d.most),
                                   d.unpicked == 0 ? "none" : format_count(d.unpicked), d.beta));
  const std::vector<std::string> bars = bar_chart(counts, kBarsPerLine);
  for (std::size_t i = 0; i < bars.size(); ++i) {
    const std::size_t first = i * kBarsPerLine;
    const std::size_t last = std::min(first + kBarsPerLine, counts.size()) - 1;
    lines.add_painted("", palette.dim(fmt::format("{:>3} ", first)) + palette.cyan(bars[i]) +
                              palette.dim(fmt::format(" {}", last)));
  }
}

void add_memory(const Report& report, const Derived& d, Lines& lines) {
  const RunResult& r = report.result;
  const auto bytes = [](std::uint64_t value) { return format_bytes(static_cast<double>(value)); };
  if (r.ranks > 1) {
    std::string text = fmt::format("{} between ranks (dispatch {}, combine {}, signals {})",
                                   format_bytes(d.sent_bytes), bytes(r.dispatch_bytes),
                                   bytes(r.combine_bytes), bytes(r.signal_bytes));
    if (const auto padded = static_cast<double>(r.padded_all_to_all_bytes); padded > 0) {
      text += fmt::format(", {} of the {} of a padded all-to-all",
                          format_percent(ratio(d.sent_bytes, padded)), format_bytes(padded));
    }
    lines.add("crossing", text);
  } else if (!on_gpu(report)) {
    lines.add("crossing", "nothing: one rank");
  }
  if (on_gpu(report)) {
    const std::string heap =
        r.ranks > 1 ? fmt::format(" and {} of heap", bytes(r.heap_bytes_reserved)) : "";
    lines.add("memory", fmt::format("{} of workspace{} on the GPU{}; {} peak resident on the host",
                                    bytes(r.workspace_bytes), heap, r.ranks > 1 ? "s" : "",
                                    bytes(r.peak_resident_bytes)));
    return;
  }
  lines.add("heap", fmt::format("{} used, {:.1f} x the tokens' {}; {} of address space reserved",
                                bytes(r.heap_bytes_used),
                                ratio(static_cast<double>(r.heap_bytes_used), d.token_buffer_bytes),
                                format_bytes(d.token_buffer_bytes), bytes(r.heap_bytes_reserved)));
  lines.add(
      "memory",
      fmt::format("{} peak resident{}, of which workspace {}", bytes(r.peak_resident_bytes),
                  r.processes && r.ranks > 1 ? " (sum of the processes, shared pages in each)" : "",
                  bytes(r.workspace_bytes)));
}

void add_losses(const Report& report, const Derived& d, Lines& lines, const Palette& palette) {
  const RunResult& r = report.result;
  const std::int64_t all = r.dropped_slots + d.slots;
  lines.add("drops", report.source.spec.capacity_factor > 0
                         ? fmt::format("{} of {}, beyond an expert's capacity",
                                       format_count(r.dropped_slots), plural(all, "slot"))
                         : "none: experts take every token");
  if (r.nan_tokens > 0) {
    const std::vector<std::string> parts = wrap(nan_text(r), kReportColumns - kLabelColumns);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      lines.add_painted(i == 0 ? "NaN" : "", palette.red(parts[i]));
    }
  }
}

void add_verification(const Verification& v, std::int64_t tokens, Lines& lines,
                      const Palette& palette) {
  const auto verdict = [&palette](bool ok) {
    return ok ? palette.green("ok") : palette.red("FAILED");
  };
  const std::string bound =
      v.yardstick ? fmt::format("bound {:.2e}, twice that of a straightforward {} program", v.bound,
                                short_name(v.compute))
                  : fmt::format("bound {:.0e}", v.bound);
  lines.add_painted("error",
                    fmt::format("{:.2e} of fp64  {}  ({})", v.error, verdict(v.error_ok()), bound));
  lines.add_painted(
      "routing",
      fmt::format("{} of {} differ{} from fp64  {}  ({} too near a tie to decide)",
                  format_count(v.misrouted_tokens), plural(tokens, "token"), tokens == 1 ? "s" : "",
                  verdict(v.misrouted_tokens == 0), format_count(v.undecided_tokens)));
}

Json layer_json(const Report& report) {
  const LayerSpec& spec = report.source.spec;
  return {{"name", report.source.name},
          {"description", describe(spec)},
          {"hidden", spec.hidden},
          {"intermediate", spec.intermediate},
          {"experts", spec.num_experts},
          {"top_k", spec.top_k},
          {"shared_intermediate", spec.shared_intermediate},
          {"capacity_factor", spec.capacity_factor}};
}

Json speed_json(const Report& report, const Derived& d) {
  const RunResult& r = report.result;
  Json json = {
      {"time",
       {{"median_seconds", d.median},
        {"min_seconds", d.fastest},
        {"max_seconds", d.slowest},
        {"pass_seconds", r.pass_seconds},
        {"tokens_per_second", ratio(static_cast<double>(report.batch.tokens()), d.median)}}},
      {"compute", {{"flops", d.flops}, {"flops_per_second", d.flops_per_second}}},
      {"streaming",
       {{"touched_weight_bytes", d.weight_bytes},
        {"bytes_per_second", d.weight_bytes_per_second}}}};
  if (on_gpu(report)) return json;
  json["time"].update({{"gate_seconds", r.gate_seconds}, {"plan_seconds", r.plan_seconds}});
  json["compute"].update({{"gemm_flops_per_second", report.rates.gemm_flops},
                          {"gemm_fraction", d.gemm_fraction},
                          {"gemm_dtype", to_string(report.rates.gemm_dtype)},
                          {"instruction_set", cpu::gemm_instruction_set()}});
  json["streaming"].update(
      {{"read_bytes_per_second", report.rates.read_bytes}, {"read_fraction", d.read_fraction}});
  return json;
}

Json memory_json(const Report& report, const Derived& d) {
  const RunResult& r = report.result;
  return {
      {"crossing",
       {{"dispatch_bytes", r.dispatch_bytes},
        {"combine_bytes", r.combine_bytes},
        {"signal_bytes", r.signal_bytes},
        {"total_bytes", r.dispatch_bytes + r.combine_bytes + r.signal_bytes},
        {"padded_all_to_all_bytes", r.padded_all_to_all_bytes}}},
      {"heap",
       {{"used_bytes", r.heap_bytes_used},
        {"reserved_bytes", r.heap_bytes_reserved},
        {"token_buffer_bytes", d.token_buffer_bytes}}},
      {"memory",
       {{"peak_resident_bytes", r.peak_resident_bytes}, {"workspace_bytes", r.workspace_bytes}}}};
}

Json verification_json(const Verification& v) {
  Json json = {{"ok", v.ok()},
               {"error", v.error},
               {"bound", v.bound},
               {"misrouted_tokens", v.misrouted_tokens},
               {"undecided_tokens", v.undecided_tokens},
               {"margin", v.margin}};
  if (v.yardstick) json[fmt::format("{}_yardstick", short_name(v.compute))] = *v.yardstick;
  return json;
}

}  // namespace

MachineRates measure_rates(const Source& source, const Batch& batch, const RunResult& result,
                           DType compute) {
  MachineRates rates{.gemm_dtype = cpu::gemm_dtype(compute)};
  const auto shares = run::all_share_sizes(batch.tokens(), result.ranks);
  const std::vector<machine::TileProduct> products =
      machine::layer_products(source.spec, result.tokens_per_expert, shares);
  const double reached = ratio(machine::useful_flops(products), median_of(result.pass_seconds));
  // The layer's passes are made of these products. If they were faster, the machine was busy
  // meanwhile.
  for (int i = 0; i < kMostGemmTrials && rates.gemm_flops <= reached; ++i) {
    rates.gemm_flops = std::max(
        rates.gemm_flops,
        machine::measure_gemm_rate(products, rates.gemm_dtype, result.threads, kGemmSeconds));
  }
  rates.read_bytes =
      machine::measure_read_rate(machine::touched_weights(source.weights, result.tokens_per_expert),
                                 result.threads, kReadSeconds);
  return rates;
}

std::vector<std::string> to_text(const Report& report, const Palette& palette) {
  const Derived d = derive(report);
  Lines lines(palette);
  add_setting(report.source, report.batch, report.options, report.result, lines, palette);
  lines.add_blank();
  add_speed(report, d, lines, palette);
  lines.add_blank();
  add_experts(report, d, lines, palette);
  lines.add_blank();
  add_memory(report, d, lines);
  add_losses(report, d, lines, palette);
  if (report.verification) {
    lines.add_blank();
    add_verification(*report.verification, report.batch.tokens(), lines, palette);
  }
  return lines.take();
}

Json to_json(const Report& report) {
  const Derived d = derive(report);
  const RunResult& r = report.result;
  Json json;
  json["layer"] = layer_json(report);
  json["weights"] = {{"origin", report.source.origin},
                     {"dtype", to_string(report.source.dtype)},
                     {"bytes", report.source.bytes}};
  json["batch"] = {{"tokens", report.batch.tokens()},
                   {"activations", report.batch.origin},
                   {"routing", report.batch.routing}};
  json["world"] = {{"ranks", r.ranks},     {"backend", to_string(r.backend)},
                   {"fabric", r.fabric},   {"processes", r.processes},
                   {"threads", r.threads}, {"compute", to_string(report.options.compute)}};
  if (on_gpu(report)) json["world"]["device"] = r.device;
  json.update(speed_json(report, d));
  json["experts"] = {{"tokens_per_expert", r.tokens_per_expert},
                     {"min", d.fewest},
                     {"mean", d.mean},
                     {"max", d.most},
                     {"unpicked", d.unpicked},
                     {"balancedness", d.beta}};
  json.update(memory_json(report, d));
  json["dropped_slots"] = r.dropped_slots;
  json["nan_logits"] = r.nan_logits;
  json["nan_tokens"] = r.nan_tokens;
  if (report.verification) json["verification"] = verification_json(*report.verification);
  return json;
}

}  // namespace switchyard::cli
