#include "models/random_tensor.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/convert.h"
#include "base/mix64.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

// FP8 codes are drawn for a deviation of 112, so that 4 deviations just reach E4M3's 448; the scale
// brings the value back.
constexpr float kFp8Deviation = 112.0f;
// The same for four bits, whose largest values are 6 and 7.
constexpr float kF4Deviation = 2.0f;
constexpr float kU4Deviation = 2.5f;

// Standard deviation of the sum of four uniform bytes: sqrt(4 (256^2 - 1) / 12), in units of 2^-14.
constexpr float kInverseDeviation = 1.0f / (147.8006f * 16384.0f);

// Roughly N(0, 1): a 32-bit hash of the counter, its four bytes summed (Irwin-Hall), low bits added
// so that values are not confined to 1021 levels. Every step before the last product is exact in
// fp32, so the value does not depend on how the compiler contracts or vectorises.
struct NormalHash {
  std::uint32_t first_key, second_key;

  float operator()(std::uint32_t index) const {
    std::uint32_t x = (index + first_key) * 0x9e3779b1u;
    x ^= x >> 16;
    x = (x ^ second_key) * 0x85ebca77u;
    x ^= x >> 13;
    x *= 0xc2b2ae3du;
    x ^= x >> 16;
    const std::uint32_t pairs = (x & 0x00ff00ffu) + ((x >> 8) & 0x00ff00ffu);
    const std::uint32_t sum = (pairs & 0xffffu) + (pairs >> 16);
    const std::int32_t fixed =
        static_cast<std::int32_t>((sum << 14) | ((x >> 4) & 0x3fffu)) - (510 * 16384 + 8192);
    return static_cast<float>(fixed) * kInverseDeviation;
  }
};

struct StoreF32 {
  using Element = float;
  static Element store(float value) { return value; }
};
struct StoreBF16 {
  using Element = std::uint16_t;
  static Element store(float value) { return f32_to_bf16(value); }
};
struct StoreF16 {
  using Element = std::uint16_t;
  static Element store(float value) { return f32_to_f16(value); }
};
struct StoreF8E4M3 {
  using Element = std::uint8_t;
  static Element store(float value) { return f32_to_f8e4m3(value); }
};

struct StoreF4E2M1 {
  static std::uint8_t store(float value) { return f32_to_f4e2m1(value); }
};
struct StoreU4 {
  static std::uint8_t store(float value) {
    return static_cast<std::uint8_t>(std::clamp(static_cast<int>(value + 8.5f), 0, 15));
  }
};

template <class Store>
[[gnu::always_inline]] inline void fill_loop(NormalHash hash, float deviation, std::uint32_t count,
                                             typename Store::Element* __restrict out) {
  for (std::uint32_t i = 0; i < count; ++i) out[i] = Store::store(hash(i) * deviation);
}

#if defined(__x86_64__)
// The library is built for baseline x86-64, which has no 32-bit vector multiply. AVX2 without FMA:
// a fused product would make values depend on the machine.
template <class Store>
[[gnu::target("avx2")]] void fill_avx2(NormalHash hash, float deviation, std::uint32_t count,
                                       typename Store::Element* out) {
  fill_loop<Store>(hash, deviation, count, out);
}
#endif

template <class Store>
void fill_elements(NormalHash hash, float deviation, std::uint32_t count, std::byte* out) {
  auto* elements = reinterpret_cast<typename Store::Element*>(out);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return fill_avx2<Store>(hash, deviation, count, elements);
#endif
  fill_loop<Store>(hash, deviation, count, elements);
}

template <class Store>
void fill_pairs(NormalHash hash, float deviation, std::uint32_t count, std::byte* out) {
  for (std::uint32_t i = 0; i < count; i += 2) {
    const int low = Store::store(hash(i) * deviation), high = Store::store(hash(i + 1) * deviation);
    out[i / 2] = static_cast<std::byte>(low | high << 4);
  }
}

DType vector_dtype(DType matrices) {
  return matrices == DType::kF8E4M3 || is_four_bit(matrices) ? DType::kBF16 : matrices;
}

DType shared_dtype(DType routed) {
  if (!is_four_bit(routed)) return routed;
  return routed == DType::kF4E2M1 ? DType::kF8E4M3 : DType::kBF16;
}

// Distinct expert ids per row: an arithmetic progression whose step is coprime to their number.
void fill_hash_rows(const RandomTensor& tensor, std::int64_t first, std::int64_t count,
                    std::byte* out) {
  const std::uint64_t e = static_cast<std::uint64_t>(tensor.num_experts);
  auto* ids = reinterpret_cast<std::int64_t*>(out);
  for (std::int64_t i = first; i < first + count; ++i) {
    const std::uint64_t row = static_cast<std::uint64_t>(i / tensor.cols);
    const std::uint64_t slot = static_cast<std::uint64_t>(i % tensor.cols);
    const std::uint64_t bits = mix64(tensor.key + row);
    std::uint64_t step = 1 + (bits >> 32) % e;
    while (std::gcd(step, e) != 1) ++step;
    *ids++ = static_cast<std::int64_t>(((bits & 0xffffffffu) + slot * step) % e);
  }
}

class Planner {
 public:
  Planner(const LayerSpec& spec, DType dtype, std::uint64_t seed)
      : spec_(spec), dtype_(dtype), vector_dtype_(vector_dtype(dtype)), seed_(seed) {}

  std::vector<RandomTensor> plan(std::int64_t vocabulary) {
    const std::int64_t h = spec_.hidden;
    const std::int64_t i = spec_.intermediate;
    const std::int64_t e_count = spec_.num_experts;
    add(TensorRole::kRouter, 0, vector_dtype_, e_count, h, inverse_sqrt(h));
    if (spec_.router_bias)
      add(TensorRole::kRouterBias, 0, vector_dtype_, 1, e_count, kBiasDeviation);
    if (spec_.routing.has_correction_bias)
      add(TensorRole::kCorrectionBias, 0, DType::kF32, 1, e_count, kBiasDeviation);
    if (spec_.routing.method == RoutingMethod::kHash) {
      add(TensorRole::kHashTable, 0, DType::kI64, vocabulary, spec_.top_k, 0);
      tensors_.back().num_experts = spec_.num_experts;
    }
    for (int e = 0; e < spec_.num_experts; ++e) {
      if (spec_.activation.gated) add(TensorRole::kGate, e, dtype_, i, h, inverse_sqrt(h));
      add(TensorRole::kUp, e, dtype_, i, h, inverse_sqrt(h));
      add(TensorRole::kDown, e, dtype_, h, i, inverse_sqrt(i));
      if (!spec_.expert_bias) continue;
      if (spec_.activation.gated)
        add(TensorRole::kGateBias, e, vector_dtype_, 1, i, kBiasDeviation);
      add(TensorRole::kUpBias, e, vector_dtype_, 1, i, kBiasDeviation);
      add(TensorRole::kDownBias, e, vector_dtype_, 1, h, kBiasDeviation);
    }
    if (const std::int64_t s = spec_.shared_intermediate; s > 0) {
      const DType dtype = shared_dtype(dtype_);
      if (spec_.activation.gated) add(TensorRole::kSharedGate, 0, dtype, s, h, inverse_sqrt(h));
      add(TensorRole::kSharedUp, 0, dtype, s, h, inverse_sqrt(h));
      add(TensorRole::kSharedDown, 0, dtype, h, s, inverse_sqrt(s));
      if (spec_.shared_sigmoid_gate)
        add(TensorRole::kSharedSigmoidGate, 0, vector_dtype_, 1, h, inverse_sqrt(h));
    }
    return std::move(tensors_);
  }

 private:
  static constexpr float kBiasDeviation = 0.05f;

  static float inverse_sqrt(std::int64_t n) { return 1.0f / std::sqrt(static_cast<float>(n)); }

  void add(TensorRole role, int expert, DType dtype, std::int64_t rows, std::int64_t cols,
           float deviation) {
    RandomTensor tensor;
    tensor.role = role;
    tensor.expert = expert;
    tensor.dtype = dtype;
    tensor.rows = rows;
    tensor.cols = cols;
    tensor.deviation = deviation;
    tensor.key = mix64(mix64(seed_ ^ (static_cast<std::uint64_t>(role) << 32)) +
                       static_cast<std::uint64_t>(expert));
    tensors_.push_back(tensor);
  }

  const LayerSpec& spec_;
  const DType dtype_, vector_dtype_;
  const std::uint64_t seed_;
  std::vector<RandomTensor> tensors_;
};

}  // namespace

DType RandomTensor::scale_dtype() const {
  switch (dtype) {
    case DType::kF4E2M1: return DType::kF8E8M0;
    case DType::kU4: return DType::kBF16;
    default: return DType::kF32;
  }
}

void fill_block(const RandomTensor& tensor, std::int64_t block, std::byte* out) {
  const std::int64_t first = block * kFillBlock;
  const std::int64_t count = std::min(kFillBlock, tensor.size() - first);
  const std::uint64_t key = mix64(tensor.key + static_cast<std::uint64_t>(block));
  const NormalHash hash{static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)};
  const std::uint32_t n = static_cast<std::uint32_t>(count);
  switch (tensor.dtype) {
    case DType::kF32: return fill_elements<StoreF32>(hash, tensor.deviation, n, out);
    case DType::kF16: return fill_elements<StoreF16>(hash, tensor.deviation, n, out);
    case DType::kBF16: return fill_elements<StoreBF16>(hash, tensor.deviation, n, out);
    case DType::kF8E4M3: return fill_elements<StoreF8E4M3>(hash, kFp8Deviation, n, out);
    case DType::kI64: return fill_hash_rows(tensor, first, count, out);
    case DType::kF4E2M1: return fill_pairs<StoreF4E2M1>(hash, kF4Deviation, n, out);
    case DType::kU4: return fill_pairs<StoreU4>(hash, kU4Deviation, n, out);
    case DType::kI32:
    case DType::kU8:
    case DType::kF8E8M0: break;
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("random values of dtype {} were asked for; use f32, f16, bf16, f8_e4m3, "
                          "f4_e2m1 or u4",
                          to_string(tensor.dtype)));
}

void fill(const RandomTensor& tensor, std::byte* out) {
  const std::int64_t num_blocks = (tensor.size() + kFillBlock - 1) / kFillBlock;
  for (std::int64_t block = 0; block < num_blocks; ++block)
    fill_block(tensor, block, out + bytes_of(tensor.dtype, block * kFillBlock));
}

void fill_scales(const RandomTensor& tensor, std::byte* out) {
  const std::uint64_t key = mix64(~tensor.key);
  const auto middle = static_cast<int>(std::lround(std::log2(tensor.deviation / kF4Deviation)));
  for (std::int64_t i = 0; i < tensor.num_scales(); ++i) {
    // Scales vary by +-25 %, or an octave where they are powers of two, so that a scale applied to
    // the wrong block is noticed.
    const std::uint64_t bits = mix64(key + static_cast<std::uint64_t>(i)) >> 40;
    const float factor = 0.75f + 0.5f * static_cast<float>(bits) * 0x1p-24f;
    if (tensor.dtype == DType::kF4E2M1) {
      out[i] = static_cast<std::byte>(127 + middle + static_cast<int>(bits % 3) - 1);
    } else if (tensor.dtype == DType::kU4) {
      const std::uint16_t scale = f32_to_bf16(tensor.deviation / kU4Deviation * factor);
      std::memcpy(out + i * std::int64_t{sizeof scale}, &scale, sizeof scale);
    } else {
      const float scale = tensor.deviation / kFp8Deviation * factor;
      std::memcpy(out + i * std::int64_t{sizeof scale}, &scale, sizeof scale);
    }
  }
}

std::vector<RandomTensor> layer_tensors(const LayerSpec& spec, DType dtype, std::uint64_t seed,
                                        std::int64_t vocabulary) {
  if (dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16 &&
      dtype != DType::kF8E4M3 && !is_four_bit(dtype))
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("weights of dtype {} were asked for; use f32, f16, bf16, f8_e4m3, "
                            "f4_e2m1 or u4",
                            to_string(dtype)));
  if (is_four_bit(dtype) && (spec.hidden % kMxGroup != 0 || spec.intermediate % kMxGroup != 0))
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("weights of dtype {} were asked for, which have a scale for {} columns; "
                    "hidden {} and intermediate {} must be multiples of that",
                    to_string(dtype), kMxGroup, spec.hidden, spec.intermediate));
  if (spec.routing.method == RoutingMethod::kHash && vocabulary < 1)
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("vocabulary is {}; a hash-routed layer needs at least 1 token id", vocabulary));
  return Planner(spec, dtype, seed).plan(vocabulary);
}

}  // namespace switchyard
