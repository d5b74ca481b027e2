// Runs a layer over the ranks of a world and gathers the results on rank 0.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "run/batch.h"
#include "run/source.h"
#include "switchyard/layer.h"
#include "switchyard/world.h"

namespace switchyard::run {

struct RankOptions {
  Backend backend = Backend::kCpu;
  // kCuda: SMs to leave free. If empty, a rank leaves the other ranks on its GPU their share.
  std::optional<int> reserved_sms;
  int ranks = 1;
  int threads = 0;  // per rank; 0: the machine's threads, divided by the ranks
  DType compute = DType::kBF16;
  int repeat = 5;  // timed passes; at least one untimed pass comes before
  std::chrono::milliseconds deadline{30'000};
  bool pre_sum_per_host = false;  // LayerOptions::pre_sum_per_host
  // How much later than the others the last rank begins each pass; empty: as the others.
  std::optional<std::chrono::microseconds> late;
  bool trace = false;         // fill RunResult::traces
  int recorded_steps = 0;     // above 0: fill RunResult::recording
  std::string recorded_name;  // see Diagnostics::name
};

// The results of all ranks. Bytes and counts are sums over the ranks of the last pass.
struct RunResult {
  Backend backend = Backend::kCpu;
  std::string device;  // kCuda: see describe_devices()
  int ranks = 1;
  const char* fabric = "";
  bool processes = false;  // each rank is a process
  int threads = 0;         // over all ranks; kCuda: none
  // kCpu: from the first rank's start to the last one's end. kCuda: the slowest device's time.
  std::vector<double> pass_seconds;
  double gate_seconds = 0;  // the slowest rank's; not known with kCuda
  double plan_seconds = 0;
  std::vector<std::int64_t> tokens_per_expert;
  std::int64_t dropped_slots = 0;
  std::int64_t nan_logits = 0;
  std::int64_t nan_tokens = 0;
  std::uint64_t dispatch_bytes = 0;
  std::uint64_t combine_bytes = 0;
  std::uint64_t signal_bytes = 0;
  std::uint64_t padded_all_to_all_bytes = 0;
  std::uint64_t heap_bytes_used = 0;
  std::uint64_t heap_bytes_reserved = 0;
  std::uint64_t workspace_bytes = 0;
  std::uint64_t peak_resident_bytes = 0;  // the sum over processes
  // The outputs of all tokens, in their order.
  std::vector<std::byte> output;  // [T, H]
  DType output_dtype = DType::kBF16;
  std::vector<std::int32_t> topk_ids;  // [T, K]
  std::vector<float> topk_weights;     // [T, K]
  std::vector<PassTrace> traces;       // of the last pass, by rank; empty if not asked for
  std::optional<Recording> recording;  // of rank 0; empty if not asked for

  MatrixView output_view(int hidden) const {
    const auto row_bytes = static_cast<std::size_t>(hidden) * size_of(output_dtype);
    return {output.data(), output_dtype, static_cast<std::int64_t>(output.size() / row_bytes),
            hidden, hidden};
  }
};

// Calls `rank` with every number below `num_ranks`, each in a thread of its own. If any throws, it
// rethrows what the rank at fault threw. An error of a rank that gave up waiting, or was told to
// stop, only reports another rank's failure.
void on_every_rank(int num_ranks, const std::function<void(int)>& rank);

// Runs options.ranks ranks as threads of this process. Throws what the rank at fault threw.
RunResult run_as_threads(const Source& source, const Batch& batch, const RankOptions& options);

// Runs this process as one rank of the world that its launcher's environment describes. Only rank 0
// returns a result.
std::optional<RunResult> run_as_process(const Source& source, const Batch& batch,
                                        const RankOptions& options);

}  // namespace switchyard::run
