// The suites of `switchyard bench`: their layers, token counts and balancedness.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "switchyard/layer_spec.h"
#include "switchyard/tensor.h"

namespace switchyard::bench {

struct BenchLayer {
  std::string model;
  LayerSpec spec;
};

// A plan: every layer with every number of tokens (of each rank) and every balancedness.
struct BenchPlan {
  std::string suite;
  bool over_ranks = false;     // two or more ranks, a GPU each
  bool given_routing = false;  // the gate is not timed
  DType dtype = DType::kBF16;  // of the expert weights
  DType compute = DType::kBF16;
  std::vector<BenchLayer> layers;
  std::vector<std::int64_t> tokens;
  std::vector<double> betas;
};

// DeepSeek-V3's experts as one of eight ranks has them: 32 of 256, and top-8 of these 32, so that
// T tokens bring the rows that T tokens on each of the eight ranks would.
inline constexpr std::string_view kDeepseekRank = "deepseek-v3-ep8";

// A layer of the model table in the form in which kernels over several ranks are compared: only the
// routed experts, chosen among all of them.
struct RoutedAlone {
  std::string_view name, model;
};
inline constexpr RoutedAlone kRoutedAlone[] = {{"v4-flash-routed", "deepseek-v4-flash"},
                                               {"v4-pro-routed", "deepseek-v4-pro"},
                                               {"v3-routed", "deepseek-v3"},
                                               {"glm-5-routed", "glm-5"}};

// Returns a layer of the model table, kDeepseekRank, or one of kRoutedAlone. Throws
// Error{kInvalidArgument} for unknown names and for layers whose experts do not come from the
// activations (hash routing).
BenchLayer bench_layer(std::string_view model, const ConfigOverrides& overrides = {});

const std::vector<std::string>& bench_suite_names();

// Returns a suite by name. Throws Error{kInvalidArgument} naming the suites that there are.
BenchPlan bench_suite(std::string_view name);

}  // namespace switchyard::bench
