// The epilogue of token-major tiles: what multiply_token_major() holds goes through a warp's own
// part of shared memory into rows of tokens.
#pragma once

#include "gpu/tile/activation.cuh"
#include "gpu/tile/multiply.cuh"
#include "gpu/tile/quantize.cuh"
#include "gpu/tile/store.cuh"
#include "gpu/tile/task.h"

namespace switchyard::gpu {

// Combines each sum with a number that the model has for its weight row, a column here: acc =
// op(acc, number).
template <typename Op>
__device__ __forceinline__ void apply_columns(const float* vector, std::uint32_t column0,
                                              std::uint32_t columns, float* acc, int num_octets,
                                              Op&& op) {
#pragma unroll
  for (int n = 0; n < num_octets; ++n) {
    const std::uint32_t column = column0 + 8 * n;
    const float2 numbers =
        column < columns ? __ldg(reinterpret_cast<const float2*>(vector + column)) : float2{0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      acc[4 * n + i] = op(acc[4 * n + i], i % 2 == 0 ? numbers.x : numbers.y);
  }
}

// Finishes the products of a first GEMM, up to the activation.
template <int kTaskBoxes, bool kGated, typename C, typename FetchWeights>
__device__ __forceinline__ void finish_products(const Epilogue<C>& epilogue, const TileTask& task,
                                                std::uint32_t group, FetchWeights&& fetch_weights,
                                                TokenMajorSums<kTaskBoxes>& acc) {
  const ActivationParams& layer = epilogue.activation;
  const FfnParams& ffn = epilogue.experts.ffn(task.shared != 0);
  if (!ffn.more_of_first) return;
  if (layer.weight_on_input && task.shared == 0) {
    fetch_weights(group);
    float weights[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Rows past the end have some weight or other; they are not stored.
      weights[r] = epilogue.weight(
          group, token_major_row<kTaskBoxes>() + fresh_thread_index<32>() / 4 + 8 * r);
    }
#pragma unroll
    for (int i = 0; i < kTaskBoxes * kBoxColumns / 2; ++i) {
      acc[i / (kBoxColumns / 2)][i % (kBoxColumns / 2)] *= weights[i / 2 % 2];
    }
  }
  const auto intermediate = static_cast<std::uint32_t>(ffn.intermediate);
  const std::size_t row0 = static_cast<std::size_t>(task.expert) * intermediate;
  const auto for_columns = [&](const float* gate, const float* up, auto op) {
    if (up == nullptr) return;
#pragma unroll
    for (int box = 0; box < kTaskBoxes; ++box) {
      constexpr std::uint32_t kBoxHidden = kGated ? kInstructionRows : kTileRows;  // columns of h
      const std::uint32_t column =
          (task.block * 2 + token_major_box<kTaskBoxes>(box, group)) * kBoxHidden +
          2 * fresh_thread_index<4>();
      if constexpr (kGated) {
        apply_columns(gate + row0, column, intermediate, acc[box], 8, op);
        apply_columns(up + row0, column, intermediate, acc[box] + 32, 8, op);
      } else {
        apply_columns(up + row0, column, intermediate, acc[box], 16, op);
      }
    }
  };
  for_columns(ffn.gate_scale, ffn.up_scale, [](float v, float scale) { return v * scale; });
  for_columns(ffn.gate_bias, ffn.up_bias, [](float v, float bias) { return v + bias; });
  if (kGated && layer.clamps) {
#pragma unroll
    for (auto& box : acc) {
#pragma unroll
      for (int i = 0; i < kBoxColumns / 2; ++i) {
        box[i] = at_most(box[i], layer.limit);
        if (i >= kBoxColumns / 4) box[i] = at_least(box[i], -layer.limit) + layer.up_bias;
      }
    }
  }
}

// Quantizes a group of 128 columns of h, or the warpgroup's half of it, from bf16 to codes and
// scales. values[n][r]: columns 8 n + 2 t and the next of the lane's first and second token, from
// column0; overwritten.
template <int kTaskBoxes, int kOctets, typename C>
__device__ __forceinline__ void store_codes(const Epilogue<C>& epilogue, const TileTask& task,
                                            const HiddenParams& layer, std::uint32_t group,
                                            std::uint32_t column0,
                                            std::uint32_t (&values)[kOctets][2]) {
  constexpr bool kHalf = kOctets * 8 != kQuantGroup;
  constexpr std::uint32_t kVectors = kOctets / 2;  // of a token's codes
  const auto intermediate =
      static_cast<std::uint32_t>(epilogue.experts.ffn(task.shared != 0).intermediate);
  const std::uint32_t row0 = token_major_row<kTaskBoxes>(), slot = task.tile % layer.h_slots;
  const std::uint32_t t = fresh_thread_index<4>();
  const WarpStaging staging(epilogue, group);
  float most[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // Two chains, neither of which waits for the other.
    std::uint32_t pairs[2] = {values[0][r], values[1][r]};
#pragma unroll
    for (int n = 2; n < kOctets; ++n) {
      pairs[n % 2] = larger_magnitudes(pairs[n % 2], values[n][r]);
    }
    std::uint32_t pair = larger_magnitudes(pairs[0], pairs[1]);
    pair = larger_magnitudes(pair, __shfl_xor_sync(~0u, pair, 1));
    pair = larger_magnitudes(pair, __shfl_xor_sync(~0u, pair, 2));
    most[r] = largest_magnitude(pair);
  }
  if constexpr (kHalf) {
    // The other warpgroup has the other half.
    auto* const shared = epilogue.most;
    const std::uint32_t row = row0 + fresh_thread_index<32>() / 4;
    if (t < 2) shared[group][row + 8 * t] = t == 0 ? most[0] : most[1];
    named_barrier<kMathGroups * kWarpgroup>(kBothGroups);
#pragma unroll
    for (int r = 0; r < 2; ++r) most[r] = at_least(most[r], shared[group ^ 1][row + 8 * r]);
    // After this barrier the next tile's maxima may be written.
    named_barrier<kMathGroups * kWarpgroup>(kBothGroups);
  }
  const std::uint32_t staged = fresh_thread_index<32>() / 4;
  const std::size_t to = std::size_t{slot} * kMaxHeight<C> * layer.h_stride + column0;
  // The second token's values take the place of the first's, which halves the code.
#pragma unroll 1
  for (std::uint32_t left = untold<2>(), row = row0;;) {
    const GroupScale scale = group_scale(most[0]);
    if (t == 0 && row + staged < task.rows && column0 < intermediate && (!kHalf || group == 0)) {
      layer.h_scales[(std::size_t{slot} * layer.h_groups + column0 / kQuantGroup) * kMaxHeight<C> +
                     row + staged] = scale.scale;
    }
#pragma unroll
    for (int p = 0; p < static_cast<int>(kVectors); ++p) {
      // Columns 2 t and 2 t + 1, and the same plus 8, of 16. Four lanes exchange them: four
      // neighbouring columns for each.
      const std::uint32_t codes = quantize(values[2 * p][0], values[2 * p + 1][0], scale.inverse);
      const std::uint32_t from = fresh_thread_index<32>() / 4 * 4 + t % 2 * 2;
      const std::uint32_t low = __shfl_sync(~0u, codes, from);
      const std::uint32_t high = __shfl_sync(~0u, codes, from + 1);
      store_shared_word(staging.place(staged, p) + 4 * t,
                        __byte_perm(low, high, t < 2 ? 0x5410 : 0x7632));
    }
    staging.drain(
        [&](std::uint32_t token, std::uint32_t vector) {
          return vector < kVectors && row + token < task.rows &&
                 column0 + 16 * vector < intermediate;
        },
        [&](std::uint32_t token, std::uint32_t vector) {
          return layer.h + to + std::size_t{row + token} * layer.h_stride + 16 * vector;
        });
    if (--left == 0) break;
    row += kWarpStagedTokens;
    most[0] = most[1];
#pragma unroll
    for (auto& of_both : values) of_both[0] = of_both[1];
  }
}

// Stores a first GEMM's tile: h, as codes and scales.
template <int kTaskBoxes, bool kSilu, bool kGated, typename C, typename FetchWeights>
__device__ __forceinline__ void finish_hidden(const Epilogue<C>& epilogue, const TileTask& task,
                                              std::uint32_t group, const HiddenSlots<C>& to_slots,
                                              FetchWeights&& fetch_weights,
                                              TokenMajorSums<kTaskBoxes>& acc) {
  finish_products<kTaskBoxes, kGated>(epilogue, task, group, fetch_weights, acc);
  const HiddenValues<kSilu, kGated, kBoxColumns / 4> value(epilogue.activation.form);
#pragma unroll
  for (auto& box : acc) value.template prepare<kBoxColumns / 2>(box);
  if constexpr (kGated) {
    // Each box has 64 columns.
    std::uint32_t values[8 * kTaskBoxes][2];
#pragma unroll
    for (int n = 0; n < 8 * kTaskBoxes; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* const gate = acc[n / 8] + 4 * (n % 8) + 2 * r;
        values[n][r] = pack_bf16(value(gate), value(gate + 1));
      }
    }
    store_codes<kTaskBoxes>(epilogue, task, to_slots.layer, group,
                            task.block * kQuantGroup + (kTaskBoxes == 1 ? group * 64 : 0), values);
  } else {
#pragma unroll
    for (int i = 0; i < kTaskBoxes; ++i) {
      std::uint32_t values[16][2];
#pragma unroll
      for (int n = 0; n < 16; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float* const up = acc[i] + 4 * n + 2 * r;
          values[n][r] = pack_bf16(value(up), value(up + 1));
        }
      }
      store_codes<kTaskBoxes>(
          epilogue, task, to_slots.layer, group,
          (task.block * 2 + token_major_box<kTaskBoxes>(i, group)) * kQuantGroup, values);
    }
  }
}

// Applies the scales and biases of a second GEMM.
template <int kTaskBoxes, typename C>
__device__ __forceinline__ void finish_sums(const Epilogue<C>& epilogue, const TileTask& task,
                                            std::uint32_t group, TokenMajorSums<kTaskBoxes>& acc) {
  const FfnParams& ffn = epilogue.experts.ffn(task.shared != 0);
  const auto hidden = static_cast<std::uint32_t>(epilogue.shape.hidden);
  const std::uint32_t column0 =
      (task.block * 2 + token_major_box<kTaskBoxes>(0, group)) * kBoxColumns;
  const auto for_columns = [&](const float* vector, auto op) {
    if (vector == nullptr) return;
#pragma unroll
    for (int box = 0; box < kTaskBoxes; ++box) {
      apply_columns(vector + static_cast<std::size_t>(task.expert) * hidden,
                    column0 + box * kBoxColumns + 2 * fresh_thread_index<4>(), hidden, acc[box], 16,
                    op);
    }
  };
  if (!ffn.more_of_second) return;
  for_columns(ffn.down_scale, [](float v, float scale) { return v * scale; });
  for_columns(ffn.down_bias, [](float v, float bias) { return v + bias; });
}

// Stores a second GEMM's tile in bf16: row_of(token) is where the token's row goes.
template <int kTaskBoxes, typename C, typename Row>
__device__ __forceinline__ void finish_rows(const Epilogue<C>& epilogue, const TileTask& task,
                                            std::uint32_t group, Row&& row_of,
                                            TokenMajorSums<kTaskBoxes>& acc) {
  finish_sums<kTaskBoxes>(epilogue, task, group, acc);
  const auto hidden = static_cast<std::uint32_t>(epilogue.shape.hidden);
  const std::uint32_t column0 =
      (task.block * 2 + token_major_box<kTaskBoxes>(0, group)) * kBoxColumns;
  const std::uint32_t row0 = token_major_row<kTaskBoxes>();
  const WarpStaging staging(epilogue, group);
  // Stores 64 columns at a time. The second box's sums take the place of the first's, which costs
  // less than fetching the same code again.
  std::uint32_t column = column0;
#pragma unroll 1
  for (std::uint32_t left = untold<kTaskBoxes>();;) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const std::uint32_t row = row0 + part % 2 * kWarpStagedTokens;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const auto octet = [&](int n) {
          const float* const sums = acc[0] + 4 * (part / 2 * 8 + 4 * j + n) + part % 2 * 2;
          return pack_bf16(sums[0], sums[1]);
        };
        const std::uint32_t lane = fresh_thread_index<32>();
        store_matrices<false>(staging.place(lane % 8, 4 * j + lane / 8), octet(0), octet(1),
                              octet(2), octet(3));
      }
      staging.drain(
          [&](std::uint32_t token, std::uint32_t vector) {
            return row + token < task.rows && column + 8 * vector < hidden;
          },
          [&](std::uint32_t token, std::uint32_t vector) {
            return row_of(row + token) + column + 8 * vector;
          });
      if (part % 2 == 1) column += 64;
    }
    if (--left == 0) break;
#pragma unroll
    for (int i = 0; i < kBoxColumns / 2; ++i) acc[0][i] = acc[kTaskBoxes - 1][i];
  }
}

}  // namespace switchyard::gpu
