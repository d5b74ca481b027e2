// The report of a run on GPUs: results of the CPU are dressed up as theirs.
#include "cli/run_report.h"

#include <gmock/gmock.h>

#include "base/parsed.h"

namespace switchyard::cli {
namespace {

using run::make_batch;
using run::run_as_threads;

using ::testing::HasSubstr;
using ::testing::Not;

struct Told {
  std::string text;
  nlohmann::ordered_json json;
};

// A small layer's passes on the CPU.
struct Passes {
  Passes(int ranks, DType weights) {
    SourceOptions source_options{.model = "olmoe", .dtype = weights};
    source_options.overrides.num_experts = 16;
    source_options.overrides.hidden = 64;
    source_options.overrides.intermediate = 32;
    source = load_source(source_options, 1, false);
    batch = make_batch({.tokens = 37}, source, DType::kBF16);
    options.ranks = ranks;
    options.threads = 1;
    options.compute = weights;
    options.repeat = 2;
    result = run_as_threads(source, batch, options);
  }
  Source source;
  Batch batch;
  RankOptions options;
  RunResult result;
};

Told told_as_if_on_gpus(int ranks, DType weights) {
  Passes passes(ranks, weights);
  RunResult& result = passes.result;
  result.backend = Backend::kCuda;
  result.device = ranks == 1 ? "GPU 0 (NVIDIA H200, 132 of 132 SMs)"
                             : "GPUs 0 to 7 (NVIDIA H200, 132 of 132 SMs for each rank)";
  result.padded_all_to_all_bytes = 0;  // not known there
  // As wide as they come.
  result.pass_seconds = {123e-6, 0.456};

  const Report report{passes.source, passes.batch, passes.options, result, {}, {}};
  Told told{"", test::parsed(to_json(report))};
  for (const std::string& line : to_text(report, Palette(false))) {
    EXPECT_LE(display_width(line), kReportColumns) << line;
    told.text += line + "\n";
  }
  return told;
}

TEST(Report, OfOneGpu) {
  const Told told = told_as_if_on_gpus(1, DType::kBF16);
  EXPECT_THAT(told.text, HasSubstr("world       GPU 0 (NVIDIA H200, 132 of 132 SMs), computing"));
  EXPECT_THAT(told.text, HasSubstr("one launch, L2 cache flushed before each"));
  EXPECT_THAT(told.text, HasSubstr("of workspace on the GPU;"));
  EXPECT_THAT(told.text, Not(HasSubstr("crossing")));
  EXPECT_EQ(told.json["streaming"]["touched_weight_bytes"], 16 * 3 * 64 * 32 * 2);
}

TEST(Report, OfSeveralGpus) {
  const Told told = told_as_if_on_gpus(3, DType::kBF16);
  for (const char* part : {"3 ranks (threads) on GPUs 0 to 7 (NVIDIA H200", "one launch per rank",
                           "between ranks (dispatch", "of heap on the GPUs"}) {
    EXPECT_THAT(told.text, HasSubstr(part));
  }
  EXPECT_THAT(told.text, Not(HasSubstr("padded all-to-all")));
  EXPECT_EQ(told.json["world"]["ranks"], 3);
  EXPECT_GT(told.json["crossing"]["total_bytes"], 0);
}

// A share above all of it says nothing. The rate is what the products reach alone, so if it is
// below what the layer reached, the machine was busy while it was measured.
TEST(Report, NoShareIsAboveAllOfIt) {
  const Passes passes(1, DType::kBF16);
  for (const double share : {0.5, 1.51}) {
    Report report{passes.source, passes.batch, passes.options, passes.result, {}, {}};
    report.rates.gemm_dtype = DType::kBF16;
    report.rates.read_bytes = 1e12;
    report.rates.gemm_flops = 1;
    report.rates.gemm_flops =
        test::parsed(to_json(report))["compute"]["flops_per_second"].get<double>() / share;
    std::string text;
    for (const std::string& line : to_text(report, Palette(false))) text += line + "\n";
    if (share < 1) {
      EXPECT_THAT(text, HasSubstr("FLOP/s  50 % of the "));
      EXPECT_THAT(text, HasSubstr("small GEMMs reach here"));
    } else {
      EXPECT_THAT(text, Not(HasSubstr("151 %")));
      EXPECT_THAT(text, HasSubstr("small GEMMs reached beside other processes"));
    }
  }
}

// Gate, up and down of an expert, each with one scale.
TEST(Report, Fp8WeightsAreReadAsTheyAre) {
  EXPECT_EQ(told_as_if_on_gpus(2, DType::kF8E4M3).json["streaming"]["touched_weight_bytes"],
            16 * 3 * (64 * 32 + 4));
}

}  // namespace
}  // namespace switchyard::cli
