// The epilogue of weight-major tiles: scales and biases, activation and rounding, then through
// shared memory into rows of tokens.
//
// A math warpgroup holds D[64 weight rows, N tokens]. Warp w has rows 16 w to 16 w + 15; its lane
// 4 g + t holds rows g and g + 8 of them, of tokens 8 n + 2 t and the next, in acc[4 n .. 4 n + 3].
#pragma once

#include "gpu/tile/activation.cuh"
#include "gpu/tile/store.cuh"
#include "gpu/tile/task.h"

namespace switchyard::gpu {

// Combines each accumulator with a number that the model has for its weight row: acc = op(acc,
// number). A thread has two weight rows. Features of few models are steps of their own, so the
// usual epilogue has half as many instructions to execute and to fetch.
template <int N, typename Op>
__device__ __forceinline__ void apply_rows(const float* first, const float* second,
                                           bool first_exists, bool second_exists,
                                           float (&acc)[N / 2], Op&& op) {
  const float rows[2] = {first_exists ? __ldg(first) : 0.0f, second_exists ? __ldg(second) : 0.0f};
#pragma unroll
  for (int i = 0; i < N / 2; ++i) acc[i] = op(acc[i], rows[i / 2 % 2]);
}

// Multiplies products, which are linear in the input, by the weights that apply to it.
template <int N, typename C>
__device__ __forceinline__ void weigh_input(const Epilogue<C>& epilogue, std::uint32_t group,
                                            float (&acc)[N / 2]) {
  const std::uint32_t first = 2 * fresh_thread_index<4>();
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    // Rows past the end have some weight or other; they are not stored.
    const float weights[] = {epilogue.weight(group, 8 * n + first),
                             epilogue.weight(group, 8 * n + first + 1)};
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[4 * n + i] *= weights[i % 2];
  }
}

// Finishes the products of a first GEMM, up to the activation. The thread's gate and up are its
// first and second weight row.
template <int N, bool kGated, typename C, typename FetchWeights>
__device__ __forceinline__ void finish_products(const Epilogue<C>& epilogue, const TileTask& task,
                                                std::uint32_t group, std::uint32_t row,
                                                FetchWeights&& fetch_weights, float (&acc)[N / 2]) {
  const ActivationParams& layer = epilogue.activation;
  const FfnParams& ffn = epilogue.experts.ffn(task.shared != 0);
  if (!ffn.more_of_first) return;
  if (layer.weight_on_input && task.shared == 0) {
    fetch_weights(group);
    weigh_input<N>(epilogue, group, acc);
  }
  const auto intermediate = static_cast<std::uint32_t>(ffn.intermediate);
  const std::size_t row0 = static_cast<std::size_t>(task.expert) * intermediate;
  const auto for_rows = [&](const float* gate, const float* up, auto op) {
    if (up == nullptr) return;
    const std::uint32_t second = kGated ? row : row + 8;
    apply_rows<N>((kGated ? gate : up) + row0 + row, up + row0 + second, row < intermediate,
                  second < intermediate, acc, op);
  };
  if constexpr (kScaled<C>) {
    for_rows(ffn.gate_scale, ffn.up_scale, [](float v, float scale) { return v * scale; });
  }
  for_rows(ffn.gate_bias, ffn.up_bias, [](float v, float bias) { return v + bias; });
  // The parameterised SwiGLU: gate at most `limit`, up within it and moved by up_bias.
  if (kGated && layer.clamps) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      float& v = acc[i];
      v = at_most(v, layer.limit);
      if (i / 2 % 2 == 1) v = at_least(v, -layer.limit) + layer.up_bias;
    }
  }
}

// Stores a first GEMM's tile: h, in bf16.
template <int N, bool kSilu, bool kGated, typename C, typename FetchWeights>
__device__ __forceinline__ void finish_hidden(const Epilogue<C>& epilogue, const TileTask& task,
                                              std::uint32_t group, const HiddenSlots<C>& to_slots,
                                              FetchWeights&& fetch_weights, float (&acc)[N / 2]) {
  const HiddenParams& layer = to_slots.layer;
  const std::uint32_t thread = fresh_thread_index<kWarpgroup>();
  const std::uint32_t warp = thread / 32, lane = thread % 32;
  const auto intermediate =
      static_cast<std::uint32_t>(epilogue.experts.ffn(task.shared != 0).intermediate);
  constexpr std::uint32_t kColumns = kGated ? 32 : 64;  // of h, from this warpgroup
  const std::uint32_t column0 = (task.block * kMathGroups + group) * kColumns;
  finish_products<N, kGated>(epilogue, task, group, column0 + warp * (kColumns / 4) + lane / 4,
                             fetch_weights, acc);
  const HiddenValues<kSilu, kGated, 2> value(epilogue.activation.form);
  value.template prepare<4>(acc);
  const auto pair = [&](int n) {
    const float *first = acc + 4 * n, *second = first + 2;
    return uint2{pack_bf16(value(first), value(first + 1)),
                 kGated ? 0 : pack_bf16(value(second), value(second + 1))};
  };
  const std::uint32_t stride = layer.h_stride / 8;
  const std::uint32_t to =
      to_slots.first_row(task.tile) * (stride * C::kNumerics.token_bytes() / 2) + column0 / 8;
  store_tile<C, N, kGated>(
      shared_address(epilogue.staging[group]), group_barrier(group), task.rows,
      column0 < intermediate ? intermediate - column0 : 0, pair, [&](std::uint32_t token) {
        return reinterpret_cast<std::uint16_t*>(layer.h) + std::size_t{to + token * stride} * 8;
      });
}

// Applies the scales and biases of a second GEMM. `biased`: one part of a split GEMM adds the bias.
template <int N, typename C>
__device__ __forceinline__ void finish_sums(const Epilogue<C>& epilogue, const TileTask& task,
                                            std::uint32_t group, bool biased, float (&acc)[N / 2]) {
  const FfnParams& ffn = epilogue.experts.ffn(task.shared != 0);
  const std::uint32_t thread = fresh_thread_index<kWarpgroup>();
  const std::uint32_t warp = thread / 32, lane = thread % 32;
  const auto hidden = static_cast<std::uint32_t>(epilogue.shape.hidden);
  const std::uint32_t column0 = (task.block * kMathGroups + group) * kInstructionRows;
  const auto for_rows = [&](const float* vector, auto op) {
    if (vector == nullptr) return;
    const std::uint32_t of = column0 + warp * 16 + lane / 4;
    const float* const at = vector + static_cast<std::size_t>(task.expert) * hidden + of;
    apply_rows<N>(at, at + 8, of < hidden, of + 8 < hidden, acc, op);
  };
  if (!ffn.more_of_second) return;
  if constexpr (kScaled<C>) {
    for_rows(ffn.down_scale, [](float v, float scale) { return v * scale; });
  }
  for_rows(biased ? ffn.down_bias : nullptr, [](float v, float bias) { return v + bias; });
}

// Stores a second GEMM's tile in bf16: row(token) is where the token's row goes.
template <int N, typename C, typename Row>
__device__ __forceinline__ void finish_rows(const Epilogue<C>& epilogue, const TileTask& task,
                                            std::uint32_t group, Row&& row, float (&acc)[N / 2]) {
  finish_sums<N>(epilogue, task, group, task.split == 0, acc);
  const auto hidden = static_cast<std::uint32_t>(epilogue.shape.hidden);
  const std::uint32_t column0 = (task.block * kMathGroups + group) * kInstructionRows;
  const auto pair = [&](int n) {
    const float* const sums = acc + 4 * n;
    return uint2{pack_bf16(sums[0], sums[1]), pack_bf16(sums[2], sums[3])};
  };
  store_tile<C, N, false>(shared_address(epilogue.staging[group]), group_barrier(group), task.rows,
                          column0 < hidden ? hidden - column0 : 0, pair,
                          [&](std::uint32_t token) { return row(token) + column0; });
}

}  // namespace switchyard::gpu
