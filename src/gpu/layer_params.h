// What the host hands to the layer kernel: where everything is, fixed for the life of the layer,
// and what changes with each call. Trivially copyable; pointers are device pointers.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "gpu/policy.h"
#include "gpu/trace_record.h"
#include "protocol/heap.h"
#include "protocol/partition.h"
#include "routing/route_warp.cuh"
#include "switchyard/layer_spec.h"
#include "switchyard/tensor.h"

namespace switchyard::gpu {

using protocol::Heap;

inline constexpr int kMaxDeviceRanks = 32;  // a distance has RowEntry::kBits bits

// Maps over rows of tokens in tiles: boxes of 64 columns of many or few rows.
struct TokenMaps {
  static constexpr int kManyRows = 64, kFewRows = 16;
  CUtensorMap many, few;
};

// Maps over the same weights: for those that one task reads, 128 bytes of a row at a time, and for
// those that several tiles' tasks read, with the next 128 brought into the L2 cache, too. Read
// once, these are often gone before they are wanted, and come again: a third more from the other
// half of the cache, and some from memory.
struct WeightMaps {
  CUtensorMap once, again;
};

// One kind of expert, routed or shared: E networks of the same shape behind a few maps.
struct FfnParams {
  // Over [E, gate/up, I/8, 8, H] and [E, 1, H/8, 8, I]: a box is 128 rows, for a gated first GEMM 8
  // of gate, 8 of up, and so on, so that both meet in one thread's registers. In FP8's large passes
  // it is 64 rows of gate and the same 64 of up: one instruction takes all of them.
  WeightMaps gemm1_maps, gemm2_maps;
  CUtensorMap small_gemm1_map;  // of small passes
  TokenMaps h_maps;             // over h, as wide as I
  // [E, pairs of boxes, K/128, 2, 2]: the scales of a box's first and second rows, which is gate's
  // and up's for a gated first GEMM; for 128 columns.
  const float* gemm1_scales = nullptr;
  const float* gemm2_scales = nullptr;
  // What products are multiplied by where weights have a scale for every row; else null.
  const float* gate_scale = nullptr;  // [E, I]
  const float* up_scale = nullptr;    // [E, I]
  const float* down_scale = nullptr;  // [E, H]
  const float* gate_bias = nullptr;   // [E, I]; null where the model has none
  const float* up_bias = nullptr;     // [E, I]
  const float* down_bias = nullptr;   // [E, H]
  int intermediate = 0;               // I, rounded up to a multiple of 8 or 16
  std::uint32_t gemm1_rows = 0;       // of weights: I, twice if gated
  std::uint32_t gemm2_rows = 0;       // H
  // Whether the products of the first or second GEMM take more than the activation: scales of rows,
  // biases, clamps, weights on the input. Few models have any, and who has none asks once.
  bool more_of_first = false, more_of_second = false;
};

// Words that blocks count in. There are two, for even and odd passes: a pass counts in one and
// clears the other for its successor, so nobody resets what somebody still reads.
struct PassWords {
  std::uint32_t* words;

  // Layout: the next task, grid barriers, NaN logits, then arrays.
  static constexpr std::uint32_t kBarriers = 3;
  SWITCHYARD_HOST_DEVICE std::uint32_t* next_task() const { return words; }
  // On a line of its own each: all blocks poll it.
  SWITCHYARD_HOST_DEVICE std::uint32_t* barrier(std::uint32_t i) const {
    return words + 32 * (1 + i);
  }
  SWITCHYARD_HOST_DEVICE std::uint32_t* counters() const { return words + 32 * (1 + kBarriers); }
  SWITCHYARD_HOST_DEVICE std::uint32_t* expert_rows() const { return counters() + 32; }
  SWITCHYARD_HOST_DEVICE std::uint32_t* gemm1_done(std::uint32_t num_experts) const {
    return expert_rows() + num_experts;
  }
  SWITCHYARD_HOST_DEVICE std::uint32_t* gemm2_done(std::uint32_t num_experts,
                                                   std::uint32_t max_tiles) const {
    return gemm1_done(num_experts) + max_tiles;
  }
  SWITCHYARD_HOST_DEVICE std::uint32_t* packed(std::uint32_t num_experts,
                                               std::uint32_t max_tiles) const {
    return gemm1_done(num_experts) + 2 * max_tiles;
  }
  // Of each expert of another rank, the rows of which it has been sent all there is to know.
  SWITCHYARD_HOST_DEVICE std::uint32_t* sent(std::uint32_t num_experts,
                                             std::uint32_t max_tiles) const {
    return gemm1_done(num_experts) + 3 * max_tiles;
  }
  // Of each tile, words with four bits for every group of columns of h.
  static constexpr std::uint32_t kGroupsOfWord = 8;
  SWITCHYARD_HOST_DEVICE std::uint32_t* parts_stored(std::uint32_t num_experts,
                                                     std::uint32_t max_tiles) const {
    return sent(num_experts, max_tiles) + num_experts;
  }
  SWITCHYARD_HOST_DEVICE static constexpr std::uint32_t count(std::uint32_t num_experts,
                                                              std::uint32_t max_tiles,
                                                              std::uint32_t group_words) {
    return protocol::round_up(
        32 * (2 + kBarriers) + 2 * num_experts + (3 + group_words) * max_tiles, 32u);
  }
};
// What a pass counts for its statistics. All but the first two are of what went to other ranks.
enum PassCounter : std::uint32_t {
  kNanLogits,
  kNanTokens,
  kSentTokens,
  kSentRows,
  kReturnedRows,
  kRaisedFlags,
  kNumPassCounters
};

// An id that no token may have, and what is wrong with it.
struct BadId {
  enum class Kind : std::uint32_t {
    kExpert = 1,  // no expert's
    kTwice,       // that of an expert named before
    kToken,       // not in the hash table
    kTable        // from the hash table, and no expert's
  };
  Kind kind;
  std::uint32_t token;  // its number in the pass
  std::int32_t id;

  // In one word, which is never 0 and is stored at once.
  SWITCHYARD_HOST_DEVICE std::uint64_t pack() const {
    return std::uint64_t{static_cast<std::uint32_t>(id)} << 32 | token << 3 |
           static_cast<std::uint32_t>(kind);
  }
  static BadId unpack(std::uint64_t word) {
    const auto low = static_cast<std::uint32_t>(word);
    return {static_cast<Kind>(low & 7), low >> 3, static_cast<std::int32_t>(word >> 32)};
  }
};

// What became of passes, in the host's memory. Kernels write these words, the host clears them.
struct Failures {
  std::uint64_t bad_id;  // a BadId; 0: none
  std::uint32_t given_up;
};

struct LayerParams {
  FfnParams routed, shared;
  protocol::Heaps heaps;
  Heap heap;
  std::byte* mine;  // this rank's heap
  routing::DeviceRouting routing;
  std::uint64_t deadline_ns;

  int hidden;
  int num_experts;
  int top_k;
  int cells_per_token;  // top_k, + 1 with a shared expert
  int max_tokens;
  // Of this rank: its experts, which are numbered from 0 in weights and tasks.
  int first_expert, local_experts;
  int rank_begin[kMaxDeviceRanks + 1];  // each rank's first expert
  std::uint32_t levels;                 // the most experts that a rank has; 1 for one rank
  bool weight_on_input;
  float alpha, limit, up_bias;  // of the activation
  bool clamps;                  // limit or up_bias have an effect

  // Gate: [num_planes, gate_columns, gate_stride] bf16, whose sum over planes is the router's
  // weight to fp32 precision; with a sigmoid-gated shared expert its gate is column num_experts.
  const std::uint16_t* router;
  int num_planes;
  int gate_columns;  // padded to a multiple of 32
  int gate_stride;   // H padded to a multiple of 32
  // Over all planes' rows, and, with each call, over x in bf16: boxes of kGateBoxRows rows.
  CUtensorMap router_map;
  bool shared_sigmoid;
  const float* router_bias;        // [E] or null
  const float* correction_bias;    // [E] or null
  const std::int32_t* hash_table;  // [hash_rows, K]
  int hash_rows;

  // Workspace.
  std::uint64_t* epoch;    // of the next pass: its number, from 0
  std::uint32_t* readers;  // blocks of this pass that know its epoch
  PassWords pass_words[2];
  float* partial_logits;     // [slices, T, gate_columns]
  std::int32_t* ids;         // [T, K]
  float* weights;            // [T, cells_per_token]
  std::uint32_t* positions;  // [T, K]: of the slot in its expert's list
  std::uint32_t* lists;      // [E, max_tokens]: RowEntry of each row of the expert
  std::uint16_t* converted;  // [T, H] bf16, for activations of other types
  // [T, H] and [T, x_groups]: the activations as FP8, and the scales of their groups of 128
  // columns.
  std::byte* quantized;
  float* quantized_scales;
  // From here on elements are those of the policy. A slot has room for a tile of most tokens.
  TokenMaps x_maps;      // over packed
  std::byte* packed;     // [packed_slots, tokens, H]
  float* packed_scales;  // [packed_slots, x_groups, tokens]
  std::uint32_t packed_slots;
  std::uint32_t x_groups;
  // [h_slots, tokens, h_stride]. Small passes in FP8 have it in bf16, too, behind the codes: see
  // first_row_of_h.
  std::byte* h;
  float* h_scales;       // [h_slots, h_groups, tokens]
  std::uint16_t* cells;  // [T, cells_per_token, H] bf16, in this rank's heap
  std::uint32_t h_slots;
  std::uint32_t h_stride;  // elements
  std::uint32_t h_groups;
  std::uint32_t group_words;  // of a tile, see PassWords::parts_stored; 0 if no pass is small
  std::uint32_t max_tiles;
  std::uint32_t log2_band;   // of tiles taken up together where experts have several
  std::uint32_t banded_lag;  // then; see protocol::Workload
  std::uint32_t lag;         // where no expert has more than one
  std::uint32_t* stats;      // [E] rows per expert of the last pass, of all ranks; and its tokens
  volatile Failures* failures;
};

struct CallParams {
  const void* x;          // [T, H] of x_type
  std::int64_t x_stride;  // in elements
  DType x_type;
  // Not bf16 or, in large passes, rows that overlap: the kernel makes rows of its own.
  bool converts;
  bool gated;             // experts are chosen here, or the shared one is weighed
  CUtensorMap x_map;      // where there is a gate, of large passes
  const float* x_scales;  // of FP8 activations: [T, ceil(H / 128)]
  std::int64_t x_scale_stride;
  std::uint32_t tokens;
  std::uint32_t paired;  // 1: launched in pairs of blocks, which do each task together; 0: not
  void* y;               // [T, H] of y_type
  std::int64_t y_stride;
  DType y_type;
  const std::int32_t* given_ids;  // [T, K] or null
  const float* given_weights;
  const std::int32_t* token_ids;  // [T], hash routing
  std::int32_t* out_ids;          // [T, K] or null
  float* out_weights;
  TraceBuffer trace;  // of traced kernels
};

// Everything about launches that the host must know.
struct KernelShape {
  int threads;
  std::uint32_t shared_bytes;
};

using LayerKernel = void (*)(LayerParams, CallParams);
struct KernelEntry {
  LayerKernel small, large;  // passes
  KernelShape shape;         // of both
  PolicyFacts policy;        // of large passes
};
template <typename P, ActivationKind kKind, bool kGated>
KernelEntry kernel_entry();  // in the object that was compiled for it
// The kernel for an activation and a compute type. Throws Error{kUnsupported} for one that was not
// compiled.
KernelEntry find_kernel(const Activation& activation, DType compute, bool traced);

inline constexpr std::uint32_t kPair = 2;
inline constexpr int kRowGroup = 8;  // rows of gate, then rows of up: see FfnParams
inline constexpr int kMaxGateSlices = 16;
inline constexpr int kGateBoxRows = 64;
// Rows that a pack warp waits for, and packs, together.
inline constexpr std::uint32_t kPackedTogether = 16;
// What the gate is cut up for, whatever the number of blocks: so that the bits do not depend on it.
inline constexpr std::uint32_t kNominalBlocks = 128;
inline constexpr int kMaxDeviceExperts = 512;
// Small passes may split GEMM2 over K into so many parts; see log2_splits in plan.cuh.
inline constexpr int kMaxLog2Splits = 2;

}  // namespace switchyard::gpu
