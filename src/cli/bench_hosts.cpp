#include "cli/bench_hosts.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "base/plural.h"
#include "cli/arguments.h"
#include "cli/format.h"
#include "gpu/device.h"
#include "run/devices.h"

namespace switchyard::cli {

using results::HostsRow;

std::string hosts_heading() {
  return fmt::format("{:>14} {:>7} {:>11} {:>23} {:>10} {:>7} {:>11} {:>6}", "stage", "tokens",
                     "time us", "p10 .. p90 us", "MB a host", "MB/s", "model us", "wrong");
}

std::string hosts_text(const HostsRow& row) {
  return fmt::format(
      "{:>14} {:>7} {:>11.1f} {:>10.1f} .. {:>9.1f} {:>10.3f} {:>7.0f} {:>11} {:>6.0f}", row.stage,
      row.tokens_per_rank ? std::to_string(*row.tokens_per_rank) : "-", row.median_us, row.p10_us,
      row.p90_us, row.link_bytes * 1e-6, row.link_bytes / row.median_us,
      row.model_us ? fmt::format("{:.1f}", *row.model_us) : "-", row.wrong);
}

int print_hosts(bench::HostsBenchOptions options, const std::filesystem::path& json) {
  World world = World::from_environment();
  if (options.backend == Backend::kCuda) {
    options.device = run::local_rank(std::getenv, world.rank()) % std::max(1, gpu::device_count());
    gpu::set_device(options.device);
  }
  const std::vector<HostsRow> rows = bench::measure_hosts(world, options);
  if (world.rank() != 0) return kExitOk;
  fmt::print("{}; {} on {}\n", rows.front().machine, plural(world.size(), "rank"),
             world.fabric_name());
  fmt::print("Exchange{}: H {}, top-{} of {}, bf16\n\n{}\n",
             options.backend == Backend::kCuda
                 ? fmt::format(" and layer of I {}", options.intermediate)
                 : "",
             options.hidden, options.top_k, plural(options.experts, "expert"),
             Palette::for_output(STDOUT_FILENO).bold(hosts_heading()));
  bool wrong = false;
  for (const HostsRow& row : rows) {
    fmt::print("{}\n", hosts_text(row));
    wrong = wrong || row.wrong > 0;
  }
  if (!json.empty()) results::merge_rows(json, rows);
  return wrong ? kExitVerification : kExitOk;
}

}  // namespace switchyard::cli
