// One tensor of random values as a pure function of a key: element i can be had without the
// elements before it, which is what makes threads, shards and partial layers agree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "switchyard/layer_spec.h"
#include "switchyard/tensor.h"

namespace switchyard {

enum class TensorRole : std::uint8_t {
  kRouter,
  kRouterBias,
  kCorrectionBias,
  kHashTable,
  kGate,
  kUp,
  kDown,
  kGateBias,
  kUpBias,
  kDownBias,
  kSharedGate,
  kSharedUp,
  kSharedDown,
  kSharedSigmoidGate,
};

struct RandomTensor {
  TensorRole role = TensorRole::kRouter;
  int expert = 0;  // among the routed experts
  DType dtype = DType::kF32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  float deviation = 0;  // of the values; unused by the hash table
  int num_experts = 0;  // hash table only
  std::uint64_t key = 0;

  std::int64_t size() const { return rows * cols; }
  std::uint64_t data_bytes() const { return static_cast<std::uint64_t>(bytes_of(dtype, size())); }
  // Scales: f32 for blocks of 128 x 128 of FP8, and for 32 columns of a row f8_e8m0 of f4_e2m1 and
  // bf16 of u4.
  bool is_scaled() const { return dtype == DType::kF8E4M3 || is_four_bit(dtype); }
  DType scale_dtype() const;
  std::int64_t block_rows() const { return is_four_bit(dtype) ? 1 : 128; }
  std::int64_t block_cols() const { return is_four_bit(dtype) ? 32 : 128; }
  std::int64_t scale_rows() const { return (rows + block_rows() - 1) / block_rows(); }
  std::int64_t scale_cols() const { return (cols + block_cols() - 1) / block_cols(); }
  std::int64_t num_scales() const { return is_scaled() ? scale_rows() * scale_cols() : 0; }
  std::uint64_t scale_bytes() const {
    return static_cast<std::uint64_t>(bytes_of(scale_dtype(), num_scales()));
  }
};

// The unit of parallel work, in elements.
inline constexpr std::int64_t kFillBlock = std::int64_t{1} << 18;

// Writes elements [block * kFillBlock, min(size, (block + 1) * kFillBlock)) of the tensor to `out`.
void fill_block(const RandomTensor& tensor, std::int64_t block, std::byte* out);
// Writes the whole tensor.
void fill(const RandomTensor& tensor, std::byte* out);
void fill_scales(const RandomTensor& tensor, std::byte* out);  // of scale_dtype()

// Every tensor of a layer in the order router, biases, hash table, experts, shared expert. With
// four-bit experts the shared one is as published models have it: f8_e4m3 beside f4_e2m1 and bf16
// beside u4. Throws Error{kInvalidArgument} for a dtype that weights cannot have, and for sizes
// that four-bit groups do not divide.
std::vector<RandomTensor> layer_tensors(const LayerSpec& spec, DType dtype, std::uint64_t seed,
                                        std::int64_t vocabulary);

}  // namespace switchyard
