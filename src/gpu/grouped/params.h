// The host's parameters for the kernel of GroupedGemm. Trivially copyable; pointers are device
// pointers.
#pragma once

#include <cstdint>

#include "gpu/pipeline/params.h"
#include "gpu/tile/params.h"
#include "switchyard/grouped_gemm.h"

namespace switchyard::gpu {

inline constexpr std::uint32_t kMostGroupedExperts = 1024;

// With an activation the weights are those of a first GEMM (ExpertParams::routed), else of a second
// one: `hidden` is then the columns of the product.
struct GroupedParams : ExpertParams, WaitParams, ModelShape, ActivationParams {
  std::uint32_t k_blocks;    // stages of a token
  std::uint32_t row_blocks;  // tasks that the weight rows of one tile make
};

struct GroupedCall {
  TokenMaps x_maps;  // over all rows of the input
  const void* ends;  // [E] i32 or, if wide_ends, i64
  bool wide_ends;
  RowLayout in, out;
  const std::int32_t* index;  // [rows] the place of each row in the output; or null
  std::uint16_t* y;
  std::int64_t y_stride;   // in elements
  std::uint16_t* nowhere;  // a row for those that have no place
};

struct GroupedEntry {
  void (*kernel)(GroupedParams, GroupedCall);
  std::uint32_t shared_bytes;
};
// Each is defined in an object file of its own. Without an activation: kIdentity, and kActivates is
// false.
template <ActivationKind kKind, bool kGated, bool kActivates>
GroupedEntry grouped_entry();

}  // namespace switchyard::gpu
