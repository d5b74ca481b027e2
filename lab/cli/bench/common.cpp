#include "cli/bench/common.h"

#include <unistd.h>

#include <limits>

#include "base/plural.h"
#include "cli/format.h"
#include "gpu/device.h"
#include "protocol/control.h"
#include "switchyard/error.h"

namespace switchyard::cli {

void refuse(const std::string& message) { throw Error(ErrorCode::kInvalidArgument, message); }

Backend CommonOptions::backend_of_ranks(const char* suite) const {
  if (backend == Backend::kCuda && gpu::device_count() == 0) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("bench {} has no GPU here; use --backend cpu, or leave it out", suite));
  }
  return backend.value_or(Backend::kCpu);
}

int quick_repeats(bool on_cpu) { return on_cpu ? 3 : 20; }

void add_routing_options(Command& command, int& hidden, int& experts, int& top_k) {
  command.add_whole("--hidden", hidden, 1, 1 << 20, "Columns of a token");
  command.add_whole("--experts", experts, 1, 1 << 16, "Experts of all ranks");
  command.add_whole("--top-k", top_k, 1, protocol::kMaxTopK, "Experts of a token");
}

void require_top_k(int top_k, int experts) {
  if (top_k <= experts) return;
  refuse(
      fmt::format("top-{} of {}; use --top-k up to --experts", top_k, plural(experts, "expert")));
}

void add_gpu_timing_options(Command& command, bool& only_graph, bool& no_graph, bool& cold,
                            std::string& machine_facts) {
  command.add_flag("--graph", only_graph, "Time only the replayed CUDA graph (cuda)");
  command.add_flag("--no-graph", no_graph, "Time only plain calls (cuda)");
  command.add_flag("--cold", cold,
                   "Time each pass by itself, behind a flush of the L2 cache (cuda)");
  command.add_text("--machine-facts", machine_facts, "FILE",
                   "What this GPU can do at most, for the floor (cuda)");
}

void require_no_gpu_options(const Command& command, bool backend_given,
                            std::initializer_list<const char*> options) {
  for (const char* const name : options) {
    if (!command.has(name)) continue;
    refuse(fmt::format("{} is for --backend cuda{}; leave it out", command.told(name),
                       backend_given ? "" : ", but this would run on the cpu"));
  }
}

void add_common_options(Command& command, CommonOptions& o, const char* quick_help,
                        bool with_seed) {
  command.heading("Measurement");
  command.add_backend("--backend", o.backend, "cpu or cuda");
  command.add_whole("--repeat", o.repeat, 1, 1'000'000,
                    "Timed repetitions (default: by their time)");
  command.add_flag("--quick", o.quick, quick_help);
  if (with_seed) {
    command.add_whole("--seed", o.seed, 0, std::numeric_limits<std::int64_t>::max(),
                      "Of everything random (default 0)");
  }
  command.heading("Report");
  command.add_text("--json", o.json, "FILE",
                   "Add the rows to this file, replacing those of the same points");
  command.add_text("--commit", o.commit, "TEXT", "Commit to note in the rows");
}

void print_head(const std::string& about, const std::string& why_no_floor,
                const std::string& heading) {
  fmt::print("{}\n", about);
  if (!why_no_floor.empty()) {
    for (const std::string& line : wrap(why_no_floor, kReportColumns)) fmt::print("{}\n", line);
  }
  fmt::print("\n{}\n", Palette::for_output(STDOUT_FILENO).bold(heading));
  std::fflush(stdout);
}

}  // namespace switchyard::cli
