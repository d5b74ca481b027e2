// The operands and outputs of tiles, as the host hands them to kernels. Pointers are device
// pointers.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"

namespace switchyard::gpu {

struct ModelShape {
  int hidden;
  // The number of places of experts. Everything after the routing takes places for experts; see
  // RouterParams::place_of.
  int num_experts;
  int top_k;
  int cells_per_token;  // top_k, + 1 with a shared expert
  int max_tokens;
};

// The rows of two boxes that the tokens of a tile are loaded by.
struct TokenBoxes {
  std::uint32_t many, few;
};
inline constexpr TokenBoxes kUsualTokenBoxes{64, 16};
// Low passes have smaller boxes: with weights of four bits, tokens are a third of what is loaded.
inline constexpr TokenBoxes kLowTokenBoxes{16, 8};

// Maps over rows of tokens in tiles: boxes of 64 columns of many or few rows.
struct TokenMaps {
  CUtensorMap many, few;
};

// Maps over the same weights. `once` is for weights that one task reads, 128 bytes of a row at a
// time. `again` is for weights that the tasks of several tiles read: it brings the next 128 bytes
// into the L2 cache, too. Where weights are read once, those bytes are often gone before they are
// wanted and come again: a third more from the other half of the cache, and some from memory.
struct WeightMaps {
  CUtensorMap once, again;
};

// One kind of expert, routed or shared: E networks of the same shape behind a few maps.
struct FfnParams {
  // Over [E, gate/up, I/8, 8, H] and [E, 1, H/8, 8, I]: a box is 128 rows, for a gated first GEMM 8
  // of gate, 8 of up, and so on, so that both meet in one thread's registers. For token-major tiles
  // it is 64 rows of gate and the same 64 of up: one instruction takes all of them.
  WeightMaps gemm1_maps, gemm2_maps;
  CUtensorMap small_gemm1_map;  // of small passes
  TokenMaps h_maps;             // over h, as wide as I
  // [E, boxes of rows, K/64] boxes of four-bit weights (tile/four_bit.h), which have no maps. The
  // rows of a gated first GEMM's box are 8 of gate, 8 of up, and so on.
  const std::byte* gemm1_boxes = nullptr;
  const std::byte* gemm2_boxes = nullptr;
  // [E, pairs of boxes, K/128, 2, 2]: the scales of a box's first and second rows, which is gate's
  // and up's for a gated first GEMM; for 128 columns.
  const float* gemm1_scales = nullptr;
  const float* gemm2_scales = nullptr;
  // Scales of rows, which multiply products; null where weights have none.
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
  // biases, clamps, weights on the input. Few models have any; the others test this once.
  bool more_of_first = false, more_of_second = false;
};
struct ExpertParams {
  FfnParams routed, shared;
  SWITCHYARD_HOST_DEVICE const FfnParams& ffn(bool of_shared) const {
    return of_shared ? shared : routed;
  }
};

// Activations, computed in one of two ways that coefficients tell apart. So one kernel computes all
// of them. See tile/activation.cuh.
struct ActivationForm {
  bool is_tanh;
  // v (1 + tanh(v p(v^2))) / 2 with p(s) = first + s (second + s third), of s up to `most`.
  float first, second, third, most;
  // Or bend tanh(v first) sigmoid(v), where first is 1 / bend, and up becomes limit tanh(u second);
  // 0: not that.
  float bend;
  // Or max(v, least), squared or not.
  float least;
  bool squares;
};
struct ActivationParams {
  bool weight_on_input;  // routing weights multiply the experts' input, not their output
  ActivationForm form;
  float limit, up_bias;
  bool clamps;  // limit or up_bias have an effect
};

// h, which first GEMMs store and second ones load, in slots that each have room for the highest
// tile. The elements are those of the policy's tokens.
struct HiddenParams {
  // [h_slots, tokens, h_stride]. Small passes in FP8 have it in bf16, too, behind the codes: see
  // HiddenSlots::first_row().
  std::byte* h;
  float* h_scales;  // [h_slots, h_groups, tokens]
  std::uint32_t h_slots;
  std::uint32_t h_stride;  // elements
  std::uint32_t h_groups;
  std::uint32_t group_words;  // of a tile, see PassWords::parts_stored; 0 if no pass is small
};

}  // namespace switchyard::gpu
