#include "exchange/agreement.h"

#include <fmt/core.h>

#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "layer/agreement.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

struct ExchangeDeclaration {
  std::int32_t hidden, num_experts, top_k, max_tokens;
  DType dispatch, combine;
  RowLayout::Kind layout;
  CombineWeights weights;
  Backend backend;
  std::uint8_t pre_sum, pre_sum_per_host, large_ids_are_none;
  std::int64_t layout_size;
  std::uint64_t placement;
};
static_assert(std::is_trivially_copyable_v<ExchangeDeclaration>, "it travels as its bytes");

std::string_view name_of(RowLayout::Kind kind) {
  switch (kind) {
    case RowLayout::Kind::kPacked:
      return "packed";
    case RowLayout::Kind::kBlocked:
      return "blocked";
    case RowLayout::Kind::kPadded:
      return "padded";
  }
  return "unknown";
}

template <typename T>
auto shown(const T& value) {
  if constexpr (std::is_same_v<T, RowLayout::Kind>) {
    return name_of(value);
  } else if constexpr (std::is_enum_v<T>) {
    return std::string_view(to_string(value));
  } else {
    return value;
  }
}

// The first field in which two declarations differ, as "name: a here, b there"; empty if none.
std::string difference(const ExchangeDeclaration& here, const ExchangeDeclaration& there) {
  std::string found;
  const auto compare = [&found](const char* name, const auto& a, const auto& b) {
    if (!found.empty() || a == b) return;
    found = fmt::format("{}: {} here, {} there", name, shown(a), shown(b));
  };
  compare("backend", here.backend, there.backend);
  compare("hidden", here.hidden, there.hidden);
  compare("num_experts", here.num_experts, there.num_experts);
  compare("top_k", here.top_k, there.top_k);
  compare("max_tokens", here.max_tokens, there.max_tokens);
  compare("dispatch", here.dispatch, there.dispatch);
  compare("combine", here.combine, there.combine);
  compare("layout", here.layout, there.layout);
  compare("layout.size", here.layout_size, there.layout_size);
  compare("weights", here.weights, there.weights);
  compare("pre_sum", int{here.pre_sum}, int{there.pre_sum});
  compare("pre_sum_per_host", int{here.pre_sum_per_host}, int{there.pre_sum_per_host});
  compare("large_ids_are_none", int{here.large_ids_are_none}, int{there.large_ids_are_none});
  if (found.empty() && here.placement != there.placement) {
    found = "placement: another table of experts here than there";
  }
  return found;
}

}  // namespace

void agree(Fabric& fabric, const ExchangeProblem& mine, Backend backend) {
  const ExchangeSpec& spec = mine.spec;
  const ExchangeDeclaration declaration{spec.hidden,
                                        spec.num_experts,
                                        spec.top_k,
                                        spec.max_tokens,
                                        spec.dispatch,
                                        spec.combine,
                                        spec.layout.kind,
                                        spec.weights,
                                        backend,
                                        static_cast<std::uint8_t>(spec.pre_sum ? 1 : 0),
                                        static_cast<std::uint8_t>(spec.pre_sum_per_host ? 1 : 0),
                                        static_cast<std::uint8_t>(spec.large_ids_are_none ? 1 : 0),
                                        spec.layout.size,
                                        summary_of(spec.placement)};
  const std::vector<ExchangeDeclaration> all = gather(fabric, declaration);
  for (std::size_t r = 0; r < all.size(); ++r) {
    const std::string found = difference(declaration, all[r]);
    if (found.empty()) continue;
    throw Error(ErrorCode::kSpecMismatch,
                fmt::format("rank {} and rank {} disagree on {}; give every rank the same exchange",
                            fabric.rank(), r, found));
  }
}

}  // namespace switchyard
