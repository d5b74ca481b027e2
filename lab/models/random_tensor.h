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
  static constexpr std::int64_t kScaleBlock = 128;

  TensorRole role = TensorRole::kRouter;
  int expert = 0;  // among the routed experts
  DType dtype = DType::kF32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  float deviation = 0;  // of the values; unused by the hash table
  int num_experts = 0;  // hash table only
  std::uint64_t key = 0;

  std::int64_t size() const { return rows * cols; }
  std::uint64_t data_bytes() const { return static_cast<std::uint64_t>(size()) * size_of(dtype); }
  std::int64_t scale_rows() const { return (rows + kScaleBlock - 1) / kScaleBlock; }
  std::int64_t scale_cols() const { return (cols + kScaleBlock - 1) / kScaleBlock; }
  std::int64_t num_scales() const {
    return dtype == DType::kF8E4M3 ? scale_rows() * scale_cols() : 0;
  }
};

// The unit of parallel work, in elements.
inline constexpr std::int64_t kFillBlock = std::int64_t{1} << 18;

// Writes elements [block * kFillBlock, min(size, (block + 1) * kFillBlock)) of the tensor to `out`.
void fill_block(const RandomTensor& tensor, std::int64_t block, std::byte* out);
// Writes the whole tensor.
void fill(const RandomTensor& tensor, std::byte* out);
void fill_scales(const RandomTensor& tensor, float* out);

// Every tensor of a layer in the order router, biases, hash table, experts, shared expert.
std::vector<RandomTensor> layer_tensors(const LayerSpec& spec, DType dtype, std::uint64_t seed,
                                        std::int64_t vocabulary);

}  // namespace switchyard
