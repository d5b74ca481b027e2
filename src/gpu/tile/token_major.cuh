// The places of the sums of token-major tiles, which multiply_token_major() makes, and their way
// through a warp's own part of shared memory into rows of tokens.
#pragma once

#include "gpu/tile/activation.cuh"
#include "gpu/tile/multiply.cuh"
#include "gpu/tile/quantize.cuh"
#include "gpu/tile/store.cuh"
#include "gpu/tile/task.h"

namespace switchyard::gpu {

// The interface is that of WeightMajorPlaces. With kGated each box has 64 columns of gate and the
// same of up.
template <int kTaskBoxes, bool kGated, typename C>
class TokenMajorPlaces {
 public:
  using Sums = TokenMajorSums<kTaskBoxes>;
  static constexpr int kOfBox = kBoxColumns / 2, kCount = kTaskBoxes * kOfBox;
  static constexpr std::uint32_t kColumns = kGated ? kBoxColumns / 2 : kBoxColumns;  // of a box

  __device__ TokenMajorPlaces(const TileTask& task, std::uint32_t group)
      : group_(group),
        column0_((task.block * 2 + token_major_box<kTaskBoxes>(0, group)) * kColumns) {}

  __device__ static float& at(Sums& acc, int i) { return acc[i / kOfBox][i % kOfBox]; }
  __device__ static constexpr bool of_up(int i) { return kGated && i % kOfBox >= kOfBox / 2; }

  template <typename Each>
  __device__ __forceinline__ void for_each(Each&& each) const {
    const std::uint32_t lane = reread_thread_index<32>();
    const std::uint32_t token = token_major_row<kTaskBoxes>() + lane / 4;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const std::uint32_t column =
          column0_ + i / kOfBox * kColumns + i % kOfBox / 4 * 8 % kColumns + 2 * (lane % 4) + i % 2;
      each(i, token + (i / 2 % 2 != 0 ? 8 : 0), column, of_up(i));
    }
  }
  template <typename Op>
  __device__ __forceinline__ void apply(const float* gate, const float* up, std::uint32_t columns,
                                        Sums& acc, Op&& op) const {
    constexpr int kOctets = kColumns / 8;
#pragma unroll
    for (int box = 0; box < kTaskBoxes; ++box) {
      const std::uint32_t column = column0_ + box * kColumns + 2 * reread_thread_index<4>();
      const auto apply_octets = [&](const float* vector, float* sums) {
#pragma unroll
        for (int n = 0; n < kOctets; ++n) {
          const std::uint32_t first = column + 8 * n;
          const float2 numbers = first < columns
                                     ? __ldg(reinterpret_cast<const float2*>(vector + first))
                                     : float2{0, 0};
#pragma unroll
          for (int i = 0; i < 4; ++i)
            sums[4 * n + i] = op(sums[4 * n + i], i % 2 == 0 ? numbers.x : numbers.y);
        }
      };
      apply_octets(kGated ? gate : up, acc[box]);
      if constexpr (kGated) apply_octets(up, acc[box] + kOfBox / 2);
    }
  }
  template <typename WeightOf>
  __device__ __forceinline__ void weigh(Sums& acc, WeightOf&& weight_of) const {
    const std::uint32_t token = token_major_row<kTaskBoxes>() + reread_thread_index<32>() / 4;
    const float weights[] = {weight_of(token), weight_of(token + 8)};
#pragma unroll
    for (int i = 0; i < kCount; ++i) at(acc, i) *= weights[i / 2 % 2];
  }
  __device__ __forceinline__ void activate(const ActivationForm& form, Sums& acc) const {
#pragma unroll
    for (auto& box : acc) activate_sums<kGated ? kOfBox / 2 : kOfBox, kOfBox, kGated>(form, box);
  }
  // (The sums are overwritten.)
  template <typename Pack, typename RowOf>
  __device__ __forceinline__ void store(const Epilogue<C>& epilogue, std::uint32_t rows,
                                        std::uint32_t columns, Sums& acc, Pack&& pack,
                                        RowOf&& row_of) const {
    const std::uint32_t row0 = token_major_row<kTaskBoxes>();
    const WarpStaging staging(epilogue, group_);
    // Stores 64 columns at a time. The second box's sums take the place of the first's, which costs
    // less than fetching the same code again.
    std::uint32_t column = column0_;
#pragma unroll 1
    for (std::uint32_t left = opaque<kTaskBoxes>();;) {
#pragma unroll
      for (int part = 0; part < (kGated ? 2 : 4); ++part) {
        const std::uint32_t row = row0 + part % 2 * kWarpStagedTokens;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const auto octet = [&](int n) {
            return pack(acc[0] + 4 * (part / 2 * 8 + 4 * j + n) + part % 2 * 2);
          };
          const std::uint32_t lane = reread_thread_index<32>();
          store_matrices<false>(staging.place(lane % 8, 4 * j + lane / 8), octet(0), octet(1),
                                octet(2), octet(3));
        }
        staging.drain(
            [&](std::uint32_t token, std::uint32_t vector) {
              return row + token < rows && column + 8 * vector < columns;
            },
            [&](std::uint32_t token, std::uint32_t vector) {
              return row_of(row + token) + column + 8 * vector;
            });
        if (part % 2 == 1) column += 64;
      }
      if (--left == 0) break;
#pragma unroll
      for (int i = 0; i < kOfBox; ++i) acc[0][i] = acc[kTaskBoxes - 1][i];
    }
  }

 private:
  std::uint32_t group_, column0_;
};

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
  const std::uint32_t t = reread_thread_index<4>();
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
    const std::uint32_t row = row0 + reread_thread_index<32>() / 4;
    if (t < 2) shared[group][row + 8 * t] = t == 0 ? most[0] : most[1];
    named_barrier<kMathGroups * kWarpgroup>(kBothGroups);
#pragma unroll
    for (int r = 0; r < 2; ++r) most[r] = at_least(most[r], shared[group ^ 1][row + 8 * r]);
    // After this barrier the next tile's maxima may be written.
    named_barrier<kMathGroups * kWarpgroup>(kBothGroups);
  }
  const std::uint32_t staged = reread_thread_index<32>() / 4;
  const std::size_t to = std::size_t{slot} * kMaxHeight<C> * layer.h_stride + column0;
  // The second token's values take the place of the first's, which halves the code.
#pragma unroll 1
  for (std::uint32_t left = opaque<2>(), row = row0;;) {
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
      const std::uint32_t from = reread_thread_index<32>() / 4 * 4 + t % 2 * 2;
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
template <int kTaskBoxes, bool kSilu, bool kGated, typename C>
__device__ __forceinline__ void store_hidden(const Epilogue<C>& epilogue, const TileTask& task,
                                             std::uint32_t group, const HiddenSlots<C>& to_slots,
                                             TokenMajorSums<kTaskBoxes>& acc) {
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

}  // namespace switchyard::gpu
