// What `switchyard bench` measures: layers, token counts and balancedness, by suite.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "switchyard/layer_spec.h"
#include "switchyard/tensor.h"

namespace switchyard::cli {

struct BenchLayer {
  std::string model;
  LayerSpec spec;
};

// Every layer with every number of tokens and every balancedness.
struct BenchPlan {
  std::string suite;
  DType dtype = DType::kBF16;  // of the expert weights
  DType compute = DType::kBF16;
  std::vector<BenchLayer> layers;
  std::vector<std::int64_t> tokens;
  std::vector<double> betas;
};

// DeepSeek-V3's experts as one of eight ranks has them: 32 of 256, and top-8 of these 32, so that
// T tokens bring the rows that T tokens on each of the eight ranks would.
inline constexpr std::string_view kDeepseekRank = "deepseek-v3-ep8";

// A layer of the model table, or kDeepseekRank. Throws Error{kInvalidArgument} for unknown names
// and for layers whose experts do not come from the activations (hash routing).
BenchLayer bench_layer(std::string_view model, const ConfigOverrides& overrides = {});

const std::vector<std::string>& bench_suite_names();

// Throws Error{kInvalidArgument} naming the suites that there are.
BenchPlan bench_suite(std::string_view name);

}  // namespace switchyard::cli
