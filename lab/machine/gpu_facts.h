// The limits of a model of GPU, and the floor that they set for the time of a pass.
//
// The limits are measured once per model and kept in a file with the source of each. The command
// contains the files of lab/machine/facts/; `switchyard bench --machine-facts` reads another. A
// model without facts has no floor: another model's would be wrong in both directions.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/tensor.h"

namespace switchyard::machine {

// The work of one GPU in a pass. Weights count as stored, scales included.
struct Load {
  std::uint64_t touched_bytes = 0;  // of expert weights
  double flops = 0;
  std::uint64_t nvlink_bytes = 0;  // sent to other ranks
};

// A rate or a time that no kernel does better than, and how it was measured.
struct Roof {
  double value = 0;
  std::string source;
};

struct GpuFacts {
  std::string gpu;             // as CUDA names it: "NVIDIA H200"
  Roof launch_seconds;         // an empty kernel
  Roof read_bytes_per_second;  // of device memory
  // Facts that only some passes need.
  std::optional<Roof> ranks_launch_seconds;     // a launch, and a signal to another rank and back
  std::optional<Roof> nvlink_bytes_per_second;  // out of one GPU while all GPUs send
  std::optional<Roof> bf16_flops_per_second, fp8_flops_per_second;
};

// One object:
//   {"gpu": "NVIDIA H200",
//    "roofs": {"launch_us": {"value": 7, "source": "..."}, "read_gb_per_s": {...},
//              "ranks_launch_us": {...}, "nvlink_gb_per_s": {...},
//              "bf16_tflop_per_s": {...}, "fp8_tflop_per_s": {...}}}
// The last four may be left out. Prefixes are decimal. Throws Error{kInvalidFile} naming `source`
// and the field for everything else: what is absent, unknown, not a number above 0, or without a
// source.
GpuFacts parse_gpu_facts(std::string_view text, const std::string& source);

// parse_gpu_facts() of a file. Also throws what read_named() throws.
GpuFacts read_gpu_facts(const std::filesystem::path& path);

// The facts that this build has for the model with exactly this name. A longer name may mean
// another memory or another power limit.
std::optional<GpuFacts> known_gpu_facts(std::string_view gpu);

// The facts that the floor of a pass needs and `facts` lacks, by their names in files.
std::vector<std::string> missing_roofs(const GpuFacts& facts, DType compute, int ranks);

// The least time of one launch:
//   F = max(launch + touched weight bytes / read rate, FLOPs / rate of the arithmetic),
// and with several ranks, a GPU each,
//   F = max(launch of ranks + touched weight bytes / read rate, FLOPs / rate of the arithmetic,
//           NVLink bytes / NVLink rate).
// Where the gate is timed, it counts in the time, not in the floor. Empty if a roof is missing.
std::optional<double> floor_us(const GpuFacts& facts, const Load& load, DType compute, int ranks);

}  // namespace switchyard::machine
