// The types of weights that the kernel for few tokens multiplies, for tests of one rank and of
// several.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "protocol/partition.h"
#include "support/fp8.h"
#include "support/layers.h"

namespace switchyard::testing {

inline std::vector<DType> compiled_types() {
  std::vector<DType> types = {DType::kBF16, kFp8};
#ifdef SWITCHYARD_FOUR_BIT_KERNELS
  types.insert(types.end(), {DType::kF4E2M1, DType::kU4});
#endif
  return types;
}
inline std::string name_of_type(const ::testing::TestParamInfo<DType>& type) {
  return type.param == kFp8             ? "Fp8"
         : type.param == DType::kF4E2M1 ? "Mxfp4"
         : type.param == DType::kU4     ? "Int4"
                                        : "Bf16";
}

inline MoeWeights weights_in(const LayerSpec& spec, DType type) {
  return type == kFp8 ? fp8_weights(spec) : make_weights(spec, type, 3);
}
// A spec of about this shape, rounded up to the multiple that the type wants of rows and columns.
inline LayerSpec spec_for(DType type, int hidden, int intermediate, int num_experts, int top_k) {
  const int unit = is_four_bit(type) ? 32 : type == kFp8 ? 16 : 8;
  return spec_of(protocol::round_up(hidden, unit), protocol::round_up(intermediate, unit),
                 num_experts, top_k);
}

// Whether a rank counted the rows of each expert that the whole batch has.
inline bool counts_rows_of(const LayerSpec& spec, const Batch& batch, const ForwardStats& stats) {
  std::vector<std::uint64_t> rows(static_cast<std::size_t>(spec.num_experts));
  for (const std::int32_t id : batch.topk_ids) {
    if (id != kNoExpert) ++rows[static_cast<std::size_t>(id)];
  }
  return std::ranges::equal(rows, stats.tokens_per_expert);
}

}  // namespace switchyard::testing
