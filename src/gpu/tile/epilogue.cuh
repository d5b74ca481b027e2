// The data that math warpgroups finish tiles with: the host's parameters of the experts, and
// buffers in the block's shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/pipeline/ring.cuh"
#include "gpu/tile/config.h"
#include "gpu/tile/params.h"

namespace switchyard::gpu {

// The bytes in which a math warpgroup stages its stores: two buffers.
template <typename C>
inline constexpr int kStagingBytes = 2 * C::kStagedTokens* kSwizzleRowBytes;
template <typename C>
struct StagingMemory {
  alignas(1024) std::byte bytes[kMathGroups][kStagingBytes<C>];
};
// Each math warpgroup's notes on the rows of the tile in work: see Epilogue.
template <typename C>
struct RowNotes {
  alignas(16) std::uint64_t rows[kMathGroups][kMaxHeight<C>];
};
// The additional memory of a policy with scales: the ring's scales and, for low token-major tiles,
// the largest magnitude that each math warpgroup found in its columns of h of every token.
template <bool kMakesCodes>
struct ScaleNotes {
  float most[kMathGroups][kInstructionRows];
};
template <>
struct ScaleNotes<true> {
  // See code_table(). The last byte of their address is 0.
  alignas(256) std::uint64_t tables[kCodeTables];
};
template <typename C, bool = kScaled<C>, bool = kMakesCodes<C>>
struct ScaleMemory {};
template <typename C>
struct ScaleMemory<C, false, true> {
  ScaleNotes<true> notes;
};
template <typename C, bool kCodes>
struct ScaleMemory<C, true, kCodes> {
  ScaleNotes<kMakesCodes<C>> notes;
  alignas(16) std::byte
      scales[StageLayout<C>::count(C::kTile.token_rows.least) * StageLayout<C>::kScaleBytes];
};

template <typename C>
struct Epilogue {
  const ModelShape& shape;
  const ExpertParams& experts;
  const ActivationParams& activation;
  std::byte (*staging)[kStagingBytes<C>];
  std::uint64_t (*rows)[kMaxHeight<C>];
  float (*most)[kInstructionRows];
  const std::uint64_t* tables = nullptr;  // where weights become E5M2

  // A row's note holds one of three things in succession: first its slot; then, for the first GEMM
  // of a layer that weights the input, its weight; for the second GEMM the address of its output.
  __device__ std::uint32_t& entry(std::uint32_t group, std::uint32_t row) const {
    return *reinterpret_cast<std::uint32_t*>(&rows[group][row]);
  }
  __device__ float weight(std::uint32_t group, std::uint32_t row) const {
    return __uint_as_float(entry(group, row));
  }
  __device__ std::uint16_t* output(std::uint32_t group, std::uint32_t row) const {
    return reinterpret_cast<std::uint16_t*>(rows[group][row]);
  }
  __device__ void note_output(std::uint32_t group, std::uint32_t row, std::uint16_t* to) const {
    rows[group][row] = reinterpret_cast<std::uint64_t>(to);
  }
};

// The slots that first GEMMs store h in.
template <typename C>
struct HiddenSlots {
  const HiddenParams& layer;

  // The tile's first row in bf16, counted in rows of the tokens' elements. If stored rows are
  // quantized later, the bf16 rows lie behind the place for their codes.
  __device__ std::uint32_t first_row(std::uint32_t tile) const {
    constexpr std::uint32_t kFirst = kQuantizesStoredRows<C> ? kMaxHeight<C> : 0;
    constexpr std::uint32_t kRows = C::kSlotRows * kHiddenStretch<C>;
    static_assert(!kQuantizesStoredRows<C> || 3 * kMaxHeight<C> <= kRows);
    return tile % layer.h_slots * kRows + kFirst;
  }
  __device__ std::uint16_t* rows(std::uint32_t tile) const {
    return reinterpret_cast<std::uint16_t*>(
        layer.h + std::size_t{first_row(tile)} * layer.h_stride * C::kNumerics.token_bytes());
  }
};

}  // namespace switchyard::gpu
