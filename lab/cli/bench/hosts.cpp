// `switchyard bench hosts`: what crosses hosts, as a rank of a world that a launcher has started.
#include "bench/hosts.h"

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "base/plural.h"
#include "cli/bench/common.h"
#include "cli/lists.h"
#include "gpu/device.h"
#include "run/devices.h"

namespace switchyard::cli {
namespace {

using results::HostsRow;

struct HostsCommand : CommonOptions {
  using CommonOptions::CommonOptions;
  bench::HostsBenchOptions sizes;
  std::vector<std::int64_t> tokens;
};

constexpr const char* kHelp = R"(Examples:
  switchyard launch --hosts node1,node2 -n 4 -- switchyard bench hosts --json hosts.json

This program is a rank of a world over hosts, which a launcher starts: docs/hosts.md. It times a
flag to another host and back, a stream of all ranks to the next host, Exchange with OLMoE's routing
or that of --hidden, --experts and --top-k, and on GPUs layers in bf16 and FP8. 'model us' is a
flag's way and the bytes of the busiest host at the stream's rate. All results are checked; rank 0
prints.)";

std::string heading() {
  return fmt::format("{:>14} {:>7} {:>11} {:>23} {:>10} {:>7} {:>11} {:>6}", "stage", "tokens",
                     "time us", "p10 .. p90 us", "MB a host", "MB/s", "model us", "wrong");
}

void print(const HostsRow& row) {
  fmt::print("{:>14} {:>7} {:>11.1f} {:>10.1f} .. {:>9.1f} {:>10.3f} {:>7.0f} {:>11} {:>6.0f}\n",
             row.stage, row.tokens_per_rank ? std::to_string(*row.tokens_per_rank) : "-",
             row.median_us, row.p10_us, row.p90_us, row.link_bytes * 1e-6,
             row.link_bytes / row.median_us,
             row.model_us ? fmt::format("{:.1f}", *row.model_us) : "-", row.wrong);
}

int run(const HostsCommand& o) {
  bench::HostsBenchOptions options = o.sizes;
  // Not by whether there is a GPU: what is measured by default is the way between hosts.
  options.backend = o.backend_of_ranks("hosts");
  require_top_k(options.top_k, options.experts);
  const std::filesystem::path json = o.rows_file<HostsRow>();
  if (!o.tokens.empty()) {
    options.tokens = o.tokens;
  } else if (o.quick) {
    options.tokens = {8, 512};
  }
  options.repeat = o.repeat_or(10);
  static_cast<bench::RunNote&>(options) = o;
  World world = World::from_environment();
  if (options.backend == Backend::kCuda) {
    options.device = run::local_rank(std::getenv, world.rank()) % std::max(1, gpu::device_count());
    gpu::set_device(options.device);
  }
  const std::vector<HostsRow> rows = bench::measure_hosts(world, options);
  if (world.rank() != 0) return kExitOk;
  print_head(fmt::format("{}; {} on {}\nExchange{}: H {}, top-{} of {}, bf16", rows.front().machine,
                         plural(world.size(), "rank"), world.fabric_name(),
                         options.backend == Backend::kCuda
                             ? fmt::format(" and layer of I {}", options.intermediate)
                             : "",
                         options.hidden, options.top_k, plural(options.experts, "expert")),
             "", heading());
  bool wrong = false;
  for (const HostsRow& row : rows) {
    print(row);
    wrong = wrong || row.wrong > 0;
  }
  if (!json.empty()) results::merge_rows(json, rows);
  return wrong ? kExitVerification : kExitOk;
}

}  // namespace

void add_hosts(Command& bench, const std::string& typed) {
  Command& command =
      bench.add_command("hosts", "What crosses hosts: flags, bytes, Exchange, layers");
  const auto o = std::make_shared<HostsCommand>(typed);
  command.heading("Points");
  add_wholes(command, "--tokens", o->tokens, 1 << 20, "Tokens of each rank (default the suite's)");
  add_routing_options(command, o->sizes.hidden, o->sizes.experts, o->sizes.top_k);
  command.add_whole("--intermediate", o->sizes.intermediate, 1, 1 << 20, "Of the layers (cuda)");
  add_common_options(command, *o, "Only 8 and 512 tokens, 10 repetitions each");
  command.footer(kHelp);
  command.runs([o] { return run(*o); });
}

}  // namespace switchyard::cli
