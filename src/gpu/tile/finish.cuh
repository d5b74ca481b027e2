// Finishes tiles: scales and biases, the activation, and rounding into rows. A thread's sums are
// those of its Places, which hide how the matrix instruction left them.
#pragma once

#include <type_traits>

#include "gpu/tile/token_major.cuh"
#include "gpu/tile/weight_major.cuh"

namespace switchyard::gpu {

// kVariant is that of gemm_tile(): tokens of a weight-major tile, or boxes of a token-major one.
template <int kVariant, bool kGated, typename C>
using Places = std::conditional_t<kTokenMajor<C>, TokenMajorPlaces<kVariant, kGated, C>,
                                  WeightMajorPlaces<kVariant, kGated, C>>;

// Finishes the products of a first GEMM, up to the activation. fetch_weights(group) notes the
// weights of the tile's tokens; it is called only if the layer weights the input. With kSilu the
// activation is SiLU, perhaps with bounds.
template <int kVariant, bool kSilu, bool kGated, typename C, typename FetchWeights>
__device__ __forceinline__ void finish_products(const Epilogue<C>& epilogue, const TileTask& task,
                                                std::uint32_t group, FetchWeights&& fetch_weights,
                                                typename Places<kVariant, kGated, C>::Sums& acc) {
  using Its = Places<kVariant, kGated, C>;
  const ActivationParams& layer = epilogue.activation;
  const FfnParams& ffn = epilogue.experts.ffn(task.shared != 0);
  if (!ffn.more_of_first) return;
  const Its places(task, group);
  // Products are linear in the input, so they may be multiplied by the weights that apply to it.
  if (layer.weight_on_input && task.shared == 0) {
    fetch_weights(group);
    places.weigh(acc, [&](std::uint32_t token) { return epilogue.weight(group, token); });
  }
  const auto intermediate = static_cast<std::uint32_t>(ffn.intermediate);
  const std::size_t row0 = static_cast<std::size_t>(task.expert) * intermediate;
  const auto apply = [&](const float* gate, const float* up, auto op) {
    if (up != nullptr) places.apply(gate + row0, up + row0, intermediate, acc, op);
  };
  if constexpr (kScaled<C> || kMakesCodes<C>) {
    apply(ffn.gate_scale, ffn.up_scale, [](float v, float scale) { return v * scale; });
  }
  apply(ffn.gate_bias, ffn.up_bias, [](float v, float bias) { return v + bias; });
  if (!kGated || !layer.clamps) return;
  // (A loop for each kind: a branch at every sum would take longer than the bounds do.)
  if (kSilu || layer.form.bend == 0) {
    // The parameterised SwiGLU: gate at most `limit`, up within it and moved by up_bias.
#pragma unroll
    for (int i = 0; i < Its::kCount; ++i) {
      float& v = Its::at(acc, i);
      v = at_most(v, layer.limit);
      if (Its::of_up(i)) v = at_least(v, -layer.limit) + layer.up_bias;
    }
  } else {
#pragma unroll
    for (int i = 0; i < Its::kCount; ++i) {
      if (!Its::of_up(i)) continue;
      float& v = Its::at(acc, i);
      v = bend_up(layer.form, layer.limit, v) + layer.up_bias;
    }
  }
}

// Stores a first GEMM's tile as h, in the elements that the second GEMM takes.
template <int kVariant, bool kSilu, bool kGated, typename C, typename FetchWeights>
__device__ __forceinline__ void finish_hidden(const Epilogue<C>& epilogue, const TileTask& task,
                                              std::uint32_t group, const HiddenSlots<C>& to_slots,
                                              FetchWeights&& fetch_weights,
                                              typename Places<kVariant, kGated, C>::Sums& acc) {
  finish_products<kVariant, kSilu, kGated>(epilogue, task, group, fetch_weights, acc);
  store_hidden<kVariant, kSilu, kGated>(epilogue, task, group, to_slots, acc);
}

// Applies the scales and biases of a second GEMM. `biased`: one part of a split GEMM adds the bias.
template <int kVariant, typename C>
__device__ __forceinline__ void finish_sums(const Epilogue<C>& epilogue, const TileTask& task,
                                            std::uint32_t group, bool biased,
                                            typename Places<kVariant, false, C>::Sums& acc) {
  const FfnParams& ffn = epilogue.experts.ffn(task.shared != 0);
  if (!ffn.more_of_second) return;
  const auto hidden = static_cast<std::uint32_t>(epilogue.shape.hidden);
  const auto apply = [&](const float* vector, auto op) {
    if (vector == nullptr) return;
    Places<kVariant, false, C>(task, group)
        .apply(nullptr, vector + static_cast<std::size_t>(task.expert) * hidden, hidden, acc, op);
  };
  if constexpr (kScaled<C> || kMakesCodes<C>) {
    apply(ffn.down_scale, [](float v, float scale) { return v * scale; });
  }
  apply(biased ? ffn.down_bias : nullptr, [](float v, float bias) { return v + bias; });
}

// Stores a second GEMM's tile in bf16: row_of(token) is where the token's row goes.
template <int kVariant, typename C, typename RowOf>
__device__ __forceinline__ void finish_rows(const Epilogue<C>& epilogue, const TileTask& task,
                                            std::uint32_t group, RowOf&& row_of,
                                            typename Places<kVariant, false, C>::Sums& acc) {
  finish_sums<kVariant>(epilogue, task, group, C::kTile.most_log2_split == 0 || task.split == 0,
                        acc);
  Places<kVariant, false, C>(task, group)
      .store(
          epilogue, task.rows, static_cast<std::uint32_t>(epilogue.shape.hidden), acc,
          [](const float* sums) { return pack_bf16(sums[0], sums[1]); }, row_of);
}

}  // namespace switchyard::gpu
