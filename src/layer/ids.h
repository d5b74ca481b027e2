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

// True if the slot's weight is 0. Without weights none is.
inline bool weighs_nothing(const SlotView& weights, std::size_t i) {
  if (weights.empty()) return false;
  if (weights.dtype() == DType::kF32) return static_cast<const float*>(weights.data())[i] == 0;
  return (static_cast<const std::uint16_t*>(weights.data())[i] & 0x7fff) == 0;  // bf16
}

// Calls take(index, expert or kNoExpert) for the given ids, one after the other. A bad id is first
// told by bad(index, id, twice), and then taken as none. So is, without a word, an expert that
// weighs nothing and that another slot of the token names, too: routers with experts that stand for
// none give their slots the id 0 and the weight 0.
template <typename Take, typename Bad>
void for_each_id(int num_experts, int its_top_k, const SlotView& given, const SlotView& weights,
                 const IdRules& rules, Take&& take, Bad&& bad) {
  const auto top_k = static_cast<std::size_t>(its_top_k);
  for (std::size_t i = 0; i < given.size(); ++i) {
    const std::int64_t id = id_at(given, i);
    const bool large = id >= num_experts;
    bool exists = id >= 0 && !large;
    if (!exists && id != kNoExpert && !(large && rules.large_are_none)) bad(i, id, false);
    const std::size_t first = i - i % top_k;
    const bool nothing = exists && weighs_nothing(weights, i);
    for (std::size_t j = first; exists && j < (nothing ? first + top_k : i); ++j) {
      if (id_at(given, j) != id) continue;
      // A slot that weighs something comes before those that weigh nothing, else the earlier one.
      if (weighs_nothing(weights, j) != nothing ? !nothing : j >= i) continue;
      if (!nothing) bad(i, id, true);
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
