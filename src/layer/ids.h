// Expert ids as callers give them: [T, K], i32 or i64.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "switchyard/layer.h"
#include "switchyard/routing.h"
#include "switchyard/tensor.h"

namespace switchyard {

// The rules that ids must keep; see LayerOptions.
struct IdRules {
  BadIds bad = BadIds::kRaise;
  bool large_are_none = false;
};

inline std::int64_t id_at(const SlotView& ids, std::size_t i) {
  return ids.dtype() == DType::kI64 ? static_cast<const std::int64_t*>(ids.data())[i]
                                    : static_cast<const std::int32_t*>(ids.data())[i];
}

// Calls take(index, expert or kNoExpert) for the given ids, one after the other. A bad id is first
// told by bad(index, id, twice), and then taken as none.
template <typename Take, typename Bad>
void for_each_id(int num_experts, int its_top_k, const SlotView& given, const IdRules& rules,
                 Take&& take, Bad&& bad) {
  const auto top_k = static_cast<std::size_t>(its_top_k);
  for (std::size_t i = 0; i < given.size(); ++i) {
    const std::int64_t id = id_at(given, i);
    const bool large = id >= num_experts;
    bool exists = id >= 0 && !large;
    if (!exists && id != kNoExpert && !(large && rules.large_are_none)) bad(i, id, false);
    for (std::size_t j = i - i % top_k; exists && j < i; ++j) {
      if (id_at(given, j) != id) continue;
      bad(i, id, true);
      exists = false;
    }
    take(i, exists ? static_cast<std::int32_t>(id) : kNoExpert);
  }
}

// Says what is wrong with an id of slot k of a token. `name` is the argument's: "topk_ids".
std::string bad_id_text(const char* name, std::uint64_t token, std::uint64_t k, std::int64_t id,
                        int num_experts);
std::string named_twice_text(std::uint64_t token, std::int64_t id);

}  // namespace switchyard
