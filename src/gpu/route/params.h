// Routing's parameters of the layer and of the call. Pointers are device pointers.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gpu/route/limits.h"
#include "routing/route_warp.cuh"

namespace switchyard::gpu {

// Which blocks route a pass's tokens.
enum class Start {
  kShared,     // each block routes its share; then all blocks wait for each other's lists
  kEveryBlock  // each block routes all tokens for itself, which saves a barrier of all blocks
};
template <typename P>
inline constexpr bool kOwnStart = P::kStart == Start::kEveryBlock;

// How the gate's product gets its operands.
enum class GateLoads {
  kCaches,     // every warp loads what it multiplies
  kCopyEngine  // through the ring, into warpgroup instructions
};

// An id that no token may have, and what is wrong with it.
struct BadId {
  enum class Kind : std::uint32_t {
    kExpert = 1,  // no expert's
    kDuplicate,   // that of an expert named before
    kToken,       // not in the hash table
    kTable        // from the hash table, and no expert's
  };
  Kind kind;
  std::uint32_t token;  // its number in the pass
  std::int32_t id;

  // Packs it into one word, which is never 0 and is stored at once.
  SWITCHYARD_HOST_DEVICE std::uint64_t pack() const {
    return std::uint64_t{static_cast<std::uint32_t>(id)} << 32 | token << 3 |
           static_cast<std::uint32_t>(kind);
  }
  SWITCHYARD_HOST_DEVICE static BadId unpack(std::uint64_t word) {
    const auto low = static_cast<std::uint32_t>(word);
    return {static_cast<Kind>(low & 7), low >> 3, static_cast<std::int32_t>(word >> 32)};
  }
};

struct RouterParams {
  int num_routed;  // experts that are chosen from; see ModelShape::num_experts
  // [num_routed]: the place at which an expert computes this rank's tokens; null: each expert has
  // one place, of its own number.
  const std::int32_t* place_of;
  CUtensorMap router_map;  // over all planes' rows: boxes of kGateBoxRows rows
  routing::DeviceRouting routing;
  // Gate: [num_planes, gate_columns, gate_stride] bf16, whose sum over planes is the router's
  // weight to fp32 precision; with a sigmoid-gated shared expert its gate is column num_experts.
  const std::uint16_t* router;
  int num_planes;
  int gate_columns;  // padded to a multiple of 32
  int gate_stride;   // H padded to a multiple of 32
  bool shared_sigmoid;
  const float* router_bias;        // [E] or null
  const float* correction_bias;    // [E] or null
  const std::int32_t* hash_table;  // [hash_rows, K]
  int hash_rows;
  float* partial_logits;  // [slices, T, gate_columns]
};

// The lists of a pass whose tokens the blocks share out.
struct ListParams {
  std::int32_t* ids;          // [T, K]
  float* weights;             // [T, cells_per_token]
  std::uint32_t* positions;   // [T, K]: of the slot in its expert's list
  std::uint32_t* lists;       // [E, max_tokens]: the SlotEntry of each row of the expert
  std::uint32_t* block_rows;  // [blocks, E]: slots of each block; only in layers with a capacity
};

struct RouteCall {
  // A map over the activations in bf16, in boxes like router_map's, for large passes with a gate.
  CUtensorMap x_map;
  bool gated;  // experts are chosen here, or the shared one is weighed
  // The launch only chooses experts, into ListParams::ids and weights, for a kernel that wants the
  // routing given: the next one in the stream. Large passes only.
  bool only_routes;
  const void* given_ids;      // [T, K] i32 or, if wide_ids, i64; or null
  const void* given_weights;  // [T, K] f32 or, if bf16_weights, bf16
  bool wide_ids, bf16_weights;
  bool large_ids_are_none;     // ids of num_experts or more; else they are bad
  bool skips_bad_ids;          // without telling the host, which may ask for their number
  const void* logits;          // [T, E] f32 or, if bf16_logits, bf16; or null
  std::int64_t logits_stride;  // in elements
  bool bf16_logits;
  const std::int32_t* token_ids;  // [T], hash routing
  std::int32_t* out_ids;          // [T, K] or null
  float* out_weights;
  // An expert's slots from this position on, in the order of tokens, are dropped; kNoCapacity:
  // none.
  std::uint32_t capacity;
};

}  // namespace switchyard::gpu
