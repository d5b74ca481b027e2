#include "exchange/problem.h"

#include <fmt/core.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/limits.h"
#include "base/quantize.h"
#include "model/check_tensor.h"
#include "protocol/control.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

// The limit of layers, low enough that products of sizes fit in 64 bits.
constexpr int kMostColumns = 1 << 23;
constexpr int kMostExperts = 4096;

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void check_spec(const ExchangeSpec& spec) {
  require_within("hidden", spec.hidden, 1, kMostColumns);
  require_within("num_experts", spec.num_experts, 1, kMostExperts);
  require_within("top_k", spec.top_k, 1, protocol::kMaxTopK);
  require_within("max_tokens", spec.max_tokens, 1, kMostTokens);
  if (!is_float(spec.dispatch) && spec.dispatch != DType::kF8E4M3) {
    refuse(fmt::format("dispatch is {}; use bf16, f16, f32 or f8_e4m3", to_string(spec.dispatch)));
  }
  if (!is_float(spec.combine)) {
    refuse(fmt::format("combine is {}; use bf16, f16 or f32", to_string(spec.combine)));
  }
  if (spec.weights > CombineWeights::kNone) {
    refuse(
        fmt::format("weights is {}; use a named CombineWeights", static_cast<int>(spec.weights)));
  }
  for (const auto& [is_set, name] :
       {std::pair(spec.pre_sum, "pre_sum"), {spec.pre_sum_per_host, "pre_sum_per_host"}}) {
    if (!is_set || spec.weights != CombineWeights::kByReceiver) continue;
    refuse(
        fmt::format("{} is set, but the token's rank multiplies the weights, for which it needs "
                    "every row; let the sender multiply them, or nobody "
                    "(CombineWeights::kBySender or kNone; in Python 'sender' or 'none')",
                    name));
  }
  validate(spec.placement, spec.num_experts);
  require_within("the number of places", spec.placement.num_places(spec.num_experts), 1,
                 kMostExperts);
}

}  // namespace

ExchangeProblem::ExchangeProblem(const ExchangeSpec& given, int its_rank, int ranks)
    : spec(given), rank(its_rank), num_ranks(ranks) {
  if (ranks > protocol::kMaxRanks) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("an exchange over {} ranks; this build supports {}", ranks,
                            protocol::kMaxRanks));
  }
  check_spec(spec);
  places = {spec.placement.num_places(spec.num_experts), ranks};
  if (!spec.placement.expert_at.empty()) {
    place_of = places_for(spec.placement, spec.num_experts, rank, ranks);
  }
  if (spec.layout.kind == RowLayout::Kind::kPadded && spec.layout.size == 0) {
    spec.layout.size = std::int64_t{spec.max_tokens} * ranks;
  }
  first_rows(spec.layout, {});  // refuses an invalid layout
  try {
    // The rank with the most experts, so that all ranks accept the spec or none.
    switchyard::rows_needed(spec.layout, places.max_count(),
                            most_rows_of_source(places.max_count()) * ranks);
  } catch (const Error&) {
    refuse(
        fmt::format("a rank could receive more rows of {} tokens of each of {} ranks, in its "
                    "layout, than can be numbered: an i32 numbers up to {}; declare fewer tokens "
                    "(max_tokens), or use a layout with less padding",
                    spec.max_tokens, ranks, kMostRows));
  }
}

int ExchangeProblem::groups() const {
  return quantised() ? protocol::ceil_div(spec.hidden, kQuantGroup) : 0;
}
std::size_t ExchangeProblem::token_bytes() const {
  return static_cast<std::size_t>(spec.hidden) * size_of(spec.dispatch);
}
std::size_t ExchangeProblem::result_bytes() const {
  return static_cast<std::size_t>(spec.hidden) * size_of(spec.combine);
}
std::int64_t ExchangeProblem::most_rows_of_source(int experts) const {
  return std::int64_t{spec.max_tokens} * std::min(spec.top_k, experts);
}
std::int64_t ExchangeProblem::rows_needed() const {
  return switchyard::rows_needed(spec.layout, num_own(),
                                 most_rows_of_source(num_own()) * num_ranks);
}

}  // namespace switchyard
