// The report of a run, as text for people and as JSON for programs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "cli/format.h"
#include "cli/lines.h"
#include "cli/source.h"
#include "run/batch.h"
#include "run/ranks.h"
#include "run/verify.h"

namespace switchyard::cli {

using run::Batch;
using run::RankOptions;
using run::RunResult;
using run::Verification;

// The machine's rates that a pass on the CPU is compared with.
struct MachineRates {
  DType gemm_dtype = DType::kBF16;
  double gemm_flops = 0;  // useful FLOP/s of the library on the pass's tiles
  double read_bytes = 0;  // bytes/s at which the touched weights are read
};

MachineRates measure_rates(const Source& source, const Batch& batch, const RunResult& result,
                           DType compute);

struct Report {
  const Source& source;
  const Batch& batch;
  const RankOptions& options;
  const RunResult& result;
  MachineRates rates;
  std::optional<Verification> verification;
};

// Adds the lines about layer, weights, batch and world.
void add_setting(const Source& source, const Batch& batch, const RankOptions& options,
                 const RunResult& result, Lines& lines, const Palette& palette);

// Returns the message for a result whose nan_tokens is not 0.
std::string nan_text(const RunResult& result);

// Returns lines of at most kReportColumns columns, not counting escape codes.
std::vector<std::string> to_text(const Report& report, const Palette& palette);
Json to_json(const Report& report);

}  // namespace switchyard::cli
