// Routing of one token, for engines that route inside their own loops.
#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/layer_spec.h"
#include "switchyard/tensor.h"

namespace switchyard::routing {

// The most experts that route_token's stack arrays hold.
inline constexpr int kMaxExperts = 1024;
inline constexpr int kMaxTopK = 32;

// Throws Error{kInvalidArgument} unless route_token can serve the spec. It requires E in [1,
// kMaxExperts], K in [1, min(E, kMaxTopK)], and groups of equal size of which at least one and at
// most all are chosen.
void check_routable(const LayerSpec& spec);

// Routes one token as switchyard::route() does: see there for the meaning of each argument. The
// spec must have passed check_routable(). Allocates nothing and may be called by many threads at
// once.
//   logits           [E]
//   correction_bias  [E]; read only if the spec has one
//   hashed_ids       [K]; read only with RoutingMethod::kHash
//   ids, weights     [K], out
// Returns the number of NaN logits. Throws Error{kInvalidArgument} if a hashed id is not in [0, E);
// nothing else throws.
int route_token(const LayerSpec& spec, const float* logits, const float* correction_bias,
                const std::int32_t* hashed_ids, std::int32_t* ids, float* weights);

// Appends a token's experts to `ids`: row `token_id` of `table`, [vocabulary, K] of i32 or i64 in
// host memory. Throws Error{kInvalidArgument} if an expert is named twice or is not an i32. Ids
// that the layer does not have are left to route_token().
void append_hashed_ids(const MatrixView& table, std::int64_t token_id,
                       std::vector<std::int32_t>& ids);

}  // namespace switchyard::routing
