#include "switchyard/weights.h"

#include <fmt/core.h>

#include <algorithm>

#include "model/check_tensor.h"
#include "protocol/partition.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

// Checks that a view is there exactly where the spec has it: a bias that is silently ignored
// computes a wrong result.
void check_optional(const std::string& name, const VectorView& view, bool wanted,
                    std::int64_t size) {
  if (wanted) return check_vector(name, view, size);
  if (!view.empty())
    throw Error(
        ErrorCode::kShapeMismatch,
        fmt::format("{} has {} values, but the spec has no such bias; drop it or correct the "
                    "spec",
                    name, view.size));
}

void check_hash_table(const MatrixView& table, int top_k) {
  if (table.empty())
    throw Error(ErrorCode::kMissingTensor,
                fmt::format("hash_table is empty, but the layer is hash-routed; provide a "
                            "[vocabulary, {}] table of expert ids",
                            top_k));
  if (table.cols != top_k || table.rows < 1)
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("hash_table is [{}, {}], but the layer needs [vocabulary, {}]; use "
                            "the weights that belong to this spec",
                            table.rows, table.cols, top_k));
  if (table.dtype != DType::kI32 && table.dtype != DType::kI64)
    throw Error(
        ErrorCode::kDTypeMismatch,
        fmt::format("hash_table is {}; it must be i32 or i64, convert it", to_string(table.dtype)));
}

void check_ffn(const std::string& name, const FfnWeights& ffn, bool gated, bool has_bias,
               std::int64_t hidden, std::int64_t intermediate) {
  if (gated) {
    check_matrix(name + ".gate", ffn.gate, intermediate, hidden);
  } else if (!ffn.gate.empty()) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("{}.gate is [{}, {}], but the spec's FFN is plain; drop it or set "
                            "activation.gated",
                            name, ffn.gate.rows, ffn.gate.cols));
  }
  check_matrix(name + ".up", ffn.up, intermediate, hidden);
  check_matrix(name + ".down", ffn.down, hidden, intermediate);
  check_optional(name + ".gate_bias", ffn.gate_bias, has_bias && gated, intermediate);
  check_optional(name + ".up_bias", ffn.up_bias, has_bias, intermediate);
  check_optional(name + ".down_bias", ffn.down_bias, has_bias, hidden);
}

std::uint64_t matrix_bytes(const MatrixView& view) {
  if (view.empty()) return 0;
  auto bytes = static_cast<std::uint64_t>(bytes_of(view.dtype, view.rows * view.cols));
  if (view.scale) {
    const std::int64_t scale_rows = (view.rows + view.scale_rows - 1) / view.scale_rows;
    const std::int64_t scale_cols = (view.cols + view.scale_cols - 1) / view.scale_cols;
    const std::size_t each = size_of(view.scale_dtype) + (view.zero == nullptr ? 0 : 1);
    bytes += static_cast<std::uint64_t>(scale_rows * scale_cols) * each;
  }
  return bytes;
}

std::uint64_t vector_bytes(const VectorView& view) {
  return view.empty() ? 0 : static_cast<std::uint64_t>(view.size) * size_of(view.dtype);
}

std::uint64_t ffn_bytes(const FfnWeights& ffn) {
  return matrix_bytes(ffn.gate) + matrix_bytes(ffn.up) + matrix_bytes(ffn.down) +
         vector_bytes(ffn.gate_bias) + vector_bytes(ffn.up_bias) + vector_bytes(ffn.down_bias);
}

bool is_empty(const FfnWeights& ffn) {
  return ffn.gate.empty() && ffn.up.empty() && ffn.down.empty() && ffn.gate_bias.empty() &&
         ffn.up_bias.empty() && ffn.down_bias.empty();
}

}  // namespace

ExpertRange own_experts(int num_experts, int rank, int num_ranks) {
  if (num_experts < 1 || num_ranks < 1 || rank < 0 || rank >= num_ranks)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} experts, rank {} of {}; there must be at least one of each, and "
                            "ranks are numbered from 0",
                            num_experts, rank, num_ranks));
  const protocol::ExpertPartition experts{num_experts, num_ranks};
  return {experts.begin(rank), experts.end(rank)};
}

void validate(const ExpertPlacement& placement, int num_experts) {
  if (placement.expert_at.empty()) return;
  std::vector<bool> placed(static_cast<std::size_t>(num_experts));
  for (std::size_t p = 0; p < placement.expert_at.size(); ++p) {
    const std::int32_t e = placement.expert_at[p];
    if (e < 0 || e >= num_experts)
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("the placement has expert {} at place {}; experts are 0 to {}", e, p,
                              num_experts - 1));
    placed[static_cast<std::size_t>(e)] = true;
  }
  const auto missing = std::find(placed.begin(), placed.end(), false);
  if (missing != placed.end())
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the placement has no place for expert {}; give every expert one",
                            missing - placed.begin()));
}

std::vector<std::int32_t> places_for(const ExpertPlacement& placement, int num_experts, int rank,
                                     int num_ranks) {
  validate(placement, num_experts);
  const int num_places = placement.num_places(num_experts);
  const ExpertRange own = own_experts(num_places, rank, num_ranks);
  std::vector<std::vector<std::int32_t>> places(static_cast<std::size_t>(num_experts));
  for (int p = 0; p < num_places; ++p) {
    const int e =
        placement.expert_at.empty() ? p : placement.expert_at[static_cast<std::size_t>(p)];
    places[static_cast<std::size_t>(e)].push_back(p);
  }
  std::vector<std::int32_t> chosen;
  for (const std::vector<std::int32_t>& of_expert : places) {
    const auto mine = std::find_if(of_expert.begin(), of_expert.end(),
                                   [&](std::int32_t p) { return p >= own.begin && p < own.end; });
    chosen.push_back(mine != of_expert.end()
                         ? *mine
                         : of_expert[static_cast<std::size_t>(rank) % of_expert.size()]);
  }
  return chosen;
}

void validate(const LayerSpec& spec, const MoeWeights& weights) {
  validate(spec, weights, {0, spec.num_experts});
}

void validate(const LayerSpec& spec, const MoeWeights& weights, ExpertRange own) {
  validate(spec, weights, own, spec.num_experts);
}

void validate(const LayerSpec& spec, const MoeWeights& weights, ExpertRange own, int num_places) {
  if (weights.router.empty()) {
    // Logits may be given instead of a router. They still need the rest of what routing takes.
    if (!weights.correction_bias.empty() && spec.routing.has_correction_bias)
      check_vector("correction_bias", weights.correction_bias, spec.num_experts);
    if (!weights.hash_table.empty() && spec.routing.method == RoutingMethod::kHash)
      check_hash_table(weights.hash_table, spec.top_k);
  } else {
    check_matrix("router", weights.router, spec.num_experts, spec.hidden);
    if (is_four_bit(weights.router.dtype))
      throw Error(ErrorCode::kDTypeMismatch,
                  fmt::format("router is {}; only experts may be of four bits, convert it to bf16",
                              to_string(weights.router.dtype)));
    check_optional("router_bias", weights.router_bias, spec.router_bias, spec.num_experts);
    check_optional("correction_bias", weights.correction_bias, spec.routing.has_correction_bias,
                   spec.num_experts);
    if (spec.routing.method == RoutingMethod::kHash)
      check_hash_table(weights.hash_table, spec.top_k);
  }
  if (weights.experts.size() != static_cast<std::size_t>(num_places))
    throw Error(
        ErrorCode::kShapeMismatch,
        fmt::format("there are weights for {} experts, but the {} has {}; provide an entry for "
                    "each, which may be empty for the experts of other ranks",
                    weights.experts.size(), num_places == spec.num_experts ? "spec" : "placement",
                    num_places));
  int first = -1;  // expert that is there
  for (int e = 0; e < num_places; ++e) {
    const FfnWeights& expert = weights.experts[static_cast<std::size_t>(e)];
    if ((e < own.begin || e >= own.end) && is_empty(expert)) continue;
    const std::string name = fmt::format("experts[{}]", e);
    check_ffn(name, expert, spec.activation.gated, spec.expert_bias, spec.hidden,
              spec.intermediate);
    if (first < 0) first = e;
    const DType dtype = weights.experts[static_cast<std::size_t>(first)].up.dtype;
    for (const MatrixView* view : {&expert.gate, &expert.up, &expert.down})
      if (!view->empty() && view->dtype != dtype)
        throw Error(
            ErrorCode::kDTypeMismatch,
            fmt::format("{} has a {} matrix where experts[{}].up is {}; all routed experts of a "
                        "layer must share one dtype, convert them",
                        name, to_string(view->dtype), first, to_string(dtype)));
    const MatrixView& one = weights.experts[static_cast<std::size_t>(first)].up;
    for (const MatrixView* view : {&expert.gate, &expert.up, &expert.down})
      if (is_four_bit(dtype) && !view->empty() && four_bit_form(*view) != four_bit_form(one))
        throw Error(ErrorCode::kDTypeMismatch,
                    fmt::format("{} has a matrix of {} where experts[{}].up is {}; all routed "
                                "experts of a layer must share one form, convert them",
                                name, four_bit_form(*view), first, four_bit_form(one)));
  }
  if (spec.shared_intermediate > 0) {
    check_ffn("shared", weights.shared, spec.activation.gated, false, spec.hidden,
              spec.shared_intermediate);
    check_optional("shared_gate", weights.shared_gate, spec.shared_sigmoid_gate, spec.hidden);
  } else if (!weights.shared.up.empty()) {
    throw Error(
        ErrorCode::kShapeMismatch,
        fmt::format("shared.up is [{}, {}], but the spec has no shared expert; drop it or set "
                    "shared_intermediate",
                    weights.shared.up.rows, weights.shared.up.cols));
  }
}

void check_values(const MoeWeights& weights, ExpertRange own) {
  const auto check = [](const std::string& name, const FfnWeights& ffn) {
    for (const auto& [part, view] :
         {std::pair{"gate", &ffn.gate}, {"up", &ffn.up}, {"down", &ffn.down}})
      if (!view->empty()) check_four_bit_values(fmt::format("{}.{}", name, part), *view);
  };
  for (int e = own.begin; e < own.end; ++e)
    check(fmt::format("experts[{}]", e), weights.experts[static_cast<std::size_t>(e)]);
  check("shared", weights.shared);
}

std::uint64_t touched_weight_bytes(const MoeWeights& weights,
                                   const std::vector<std::int64_t>& tokens_per_expert) {
  if (tokens_per_expert.size() != weights.experts.size())
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("tokens_per_expert has {} entries, but there are {} experts; pass one for "
                    "each",
                    tokens_per_expert.size(), weights.experts.size()));
  std::uint64_t bytes = ffn_bytes(weights.shared);
  for (std::size_t e = 0; e < weights.experts.size(); ++e)
    if (tokens_per_expert[e] > 0) bytes += ffn_bytes(weights.experts[e]);
  return bytes;
}

}  // namespace switchyard
