#include "gpu/host/weights.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "base/convert.h"
#include "base/quantize.h"
#include "gpu/host/cuda_error.h"
#include "layer/compute.h"
#include "routing/route.h"
#include "switchyard/error.h"

namespace switchyard::gpu {
namespace {

// Any element of a matrix in host memory.
float element(const MatrixView& m, std::int64_t r, std::int64_t c) {
  const std::byte* const at = static_cast<const std::byte*>(m.row(r)) +
                              static_cast<std::size_t>(c * m.col_stride) * size_of(m.dtype);
  std::uint16_t code = 0;
  switch (m.dtype) {
    case DType::kF32: {
      float value = 0;
      std::memcpy(&value, at, sizeof value);
      return value;
    }
    case DType::kBF16:
      std::memcpy(&code, at, sizeof code);
      return bf16_to_f32(code);
    case DType::kF16:
      std::memcpy(&code, at, sizeof code);
      return f16_to_f32(code);
    case DType::kF8E4M3: {
      const float value = f8e4m3_to_f32(static_cast<std::uint8_t>(*at));
      if (m.scale == nullptr) return value;
      return value * m.scale[r / m.scale_rows * m.scale_stride + c / m.scale_cols];
    }
    default:
      throw Error(ErrorCode::kDTypeMismatch,
                  fmt::format("weights are {}; the GPU engine takes bf16, f16, f32 and f8_e4m3",
                              to_string(m.dtype)));
  }
}

// What is small, or of another type, passes through the host, whatever memory it is in.
std::vector<std::byte> on_host(const void* data, std::size_t bytes) {
  std::vector<std::byte> copy(bytes);
  SWITCHYARD_CUDA(cudaMemcpy(copy.data(), data, bytes, cudaMemcpyDefault));
  return copy;
}
std::vector<std::byte> on_host(const MatrixView& m) {
  if (m.rows == 0 || m.cols == 0) return {};
  const std::int64_t last = (m.rows - 1) * m.row_stride + (m.cols - 1) * m.col_stride;
  return on_host(m.data, (static_cast<std::size_t>(last) + 1) * size_of(m.dtype));
}

std::vector<std::byte> scales_on_host(const MatrixView& m) {
  if (m.scale == nullptr) return {};
  const std::int64_t last =
      (m.rows - 1) / m.scale_rows * m.scale_stride + (m.cols - 1) / m.scale_cols;
  return on_host(m.scale, static_cast<std::size_t>(last + 1) * sizeof(float));
}

// Copies a matrix into rows of `pitch` bytes on the device, as bf16 or, `element_bytes` being 1, as
// the FP8 codes that it has.
void upload_matrix(const MatrixView& m, std::byte* to, int element_bytes, std::size_t pitch) {
  const bool fp8 = element_bytes == 1;
  const auto width = static_cast<std::size_t>(m.cols * element_bytes);
  const void* from = m.data;
  auto from_pitch = static_cast<std::size_t>(m.row_stride * element_bytes);
  std::vector<std::byte> rows;
  if (m.dtype != (fp8 ? DType::kF8E4M3 : DType::kBF16) || m.col_stride != 1 ||
      m.row_stride < m.cols) {
    if (residence_of(m.data) != Residence::kHost) {
      if (m.row_stride < 0 || m.col_stride < 0) {
        throw Error(
            ErrorCode::kUnsupported,
            fmt::format("weights in device memory have strides of {} and {}; the GPU engine takes "
                        "none below 0 there: pass a copy in the order of its addresses",
                        m.row_stride, m.col_stride));
      }
      const std::vector<std::byte> values = on_host(m), scales = scales_on_host(m);
      MatrixView readable = m;
      readable.data = values.data();
      if (m.scale != nullptr) readable.scale = reinterpret_cast<const float*>(scales.data());
      upload_matrix(readable, to, element_bytes, pitch);
      return;
    }
    rows.resize(static_cast<std::size_t>(m.rows) * width);
    std::byte* next = rows.data();
    for (std::int64_t r = 0; r < m.rows; ++r) {
      for (std::int64_t c = 0; c < m.cols; ++c, next += element_bytes) {
        if (fp8) {
          *next = static_cast<const std::byte*>(m.row(r))[c * m.col_stride];
        } else {
          const std::uint16_t code = f32_to_bf16(element(m, r, c));
          std::memcpy(next, &code, sizeof code);
        }
      }
    }
    from = rows.data();
    from_pitch = width;
  }
  SWITCHYARD_CUDA(cudaMemcpy2D(to, pitch, from, from_pitch, width, static_cast<std::size_t>(m.rows),
                               cudaMemcpyDefault));
}

std::vector<float> to_floats(const VectorView& v) {
  if (v.empty()) return {};
  MatrixView row = {v.data, v.dtype, 1, v.size, v.size, v.stride};
  const std::vector<std::byte> copy = on_host(row);
  row.data = copy.data();
  std::vector<float> out;
  for (std::int64_t i = 0; i < v.size; ++i) out.push_back(element(row, 0, i));
  return out;
}

DeviceBuffer to_device(const void* data, std::size_t bytes) {
  DeviceBuffer buffer(bytes);
  if (bytes != 0) buffer.upload(data, bytes);
  return buffer;
}
DeviceBuffer to_device(const std::vector<float>& values) {
  return to_device(values.data(), values.size() * sizeof(float));
}

DeviceBuffer zeros(std::size_t bytes) {
  DeviceBuffer buffer(bytes);
  SWITCHYARD_CUDA(cudaMemset(buffer.data(), 0, bytes));
  return buffer;
}

using Matrices = const MatrixView FfnWeights::*;

// The array that all experts' matrices `halves` are, if they are one that the copy engine can read.
std::optional<WeightArray> in_place(const PolicyFacts& policy, std::span<const FfnWeights> experts,
                                    std::span<const Matrices> halves) {
  const auto at = [&](std::size_t e, std::size_t half) -> const MatrixView& {
    return experts[e].*halves[half];
  };
  const auto distance = [](const MatrixView& from, const MatrixView& to) {
    return static_cast<const std::byte*>(to.data) - static_cast<const std::byte*>(from.data);
  };
  const MatrixView& m = at(0, 0);
  WeightArray array{static_cast<const std::byte*>(m.data),
                    static_cast<std::int64_t>(experts.size()),
                    static_cast<int>(halves.size()),
                    static_cast<int>(m.rows),
                    static_cast<int>(m.cols),
                    policy.numerics.weight_bytes(),
                    m.row_stride * policy.numerics.weight_bytes()};
  // Of what there is only one, any distance to the next will do.
  array.half_stride = halves.size() > 1 ? distance(m, at(0, 1)) : array.row_stride;
  array.expert_stride = experts.size() > 1 ? distance(m, at(1, 0)) : array.row_stride;
  const auto usable = [](std::int64_t stride) { return stride > 0 && stride % 16 == 0; };
  // Rows of one matrix are columns of the other.
  if (array.rows % policy.alignment() != 0 || array.columns % policy.alignment() != 0 ||
      reinterpret_cast<std::uintptr_t>(m.data) % 16 != 0 || !usable(array.row_stride) ||
      !usable(array.half_stride) || !usable(array.expert_stride)) {
    return std::nullopt;
  }
  for (std::size_t e = 0; e < experts.size(); ++e) {
    for (std::size_t half = 0; half < halves.size(); ++half) {
      const MatrixView& other = at(e, half);
      const std::int64_t expected = static_cast<std::int64_t>(e) * array.expert_stride +
                                    static_cast<std::int64_t>(half) * array.half_stride;
      if (other.dtype != policy.numerics.weight || other.col_stride != 1 ||
          other.row_stride != m.row_stride || distance(m, other) != expected ||
          residence_of(other.data) != Residence::kHere) {
        return std::nullopt;
      }
    }
  }
  return array;
}

// The experts' matrices as one array of `rows` x `columns`: where they are, or else copied to
// `own`.
WeightArray place(const PolicyFacts& policy, std::span<const FfnWeights> experts,
                  std::span<const Matrices> halves, int rows, int columns, DeviceBuffer& own) {
  if (const auto array = in_place(policy, experts, halves)) return *array;
  WeightArray array{nullptr,
                    static_cast<std::int64_t>(experts.size()),
                    static_cast<int>(halves.size()),
                    rows,
                    columns,
                    policy.numerics.weight_bytes()};
  array.row_stride = std::int64_t{columns} * policy.numerics.weight_bytes();
  array.half_stride = rows * array.row_stride;
  array.expert_stride = array.halves * array.half_stride;
  const std::size_t bytes = experts.size() * static_cast<std::size_t>(array.expert_stride);
  const MatrixView& m = experts[0].*halves[0];
  // Rows and columns that were added must be zero.
  own = m.rows == rows && m.cols == columns ? DeviceBuffer(bytes) : zeros(bytes);
  array.data = own.data();
  for (std::size_t e = 0; e < experts.size(); ++e) {
    for (std::size_t half = 0; half < halves.size(); ++half) {
      upload_matrix(experts[e].*halves[half],
                    own.data() + e * static_cast<std::size_t>(array.expert_stride) +
                        half * static_cast<std::size_t>(array.half_stride),
                    policy.numerics.weight_bytes(), static_cast<std::size_t>(array.row_stride));
    }
  }
  return array;
}

// A matrix's scales in host memory.
class Scales {
 public:
  explicit Scales(const MatrixView& m) : m_(m), rows_(is_row_form(m)) {
    const std::vector<std::byte> bytes = scales_on_host(m);
    values_.resize(bytes.size() / sizeof(float));
    std::ranges::copy(bytes, reinterpret_cast<std::byte*>(values_.data()));
  }
  // Of the products with columns from `column` on, 128 at most. Rows past the last, which are
  // multiplied with the others of their tile, share the last one's.
  float of_block(std::int64_t row, std::int64_t column) const {
    return rows_ ? 1.0f : at(std::min(row, m_.rows - 1), column);
  }
  // Of what all columns' products sum up to.
  float of_row(std::int64_t row) const { return rows_ && row < m_.rows ? at(row, 0) : 1.0f; }

 private:
  float at(std::int64_t row, std::int64_t column) const {
    return values_[static_cast<std::size_t>(row / m_.scale_rows * m_.scale_stride +
                                            column / m_.scale_cols)];
  }

  const MatrixView& m_;
  bool rows_;
  std::vector<float> values_;
};

// [E, pairs of boxes, K/128, 2, 2]: see FfnParams::gemm1_scales.
DeviceBuffer block_scales(std::span<const FfnWeights> experts, std::span<const Matrices> halves,
                          const WeightArray& array) {
  const int boxes = protocol::round_up(protocol::ceil_div(array.halves * array.rows, kTileRows), 2);
  const int groups = protocol::ceil_div(array.columns, kQuantGroup);
  std::vector<float> all;
  for (const FfnWeights& expert : experts) {
    std::vector<Scales> of_half;
    for (const Matrices half : halves) of_half.emplace_back(expert.*half);
    for (int pair = 0; pair < boxes / 2; ++pair) {
      for (int group = 0; group < groups; ++group) {
        for (int box = 2 * pair; box < 2 * pair + 2; ++box) {
          for (int part = 0; part < 2; ++part) {
            const Scales& scales = of_half[array.halves == 2 ? static_cast<std::size_t>(part) : 0];
            all.push_back(scales.of_block(std::int64_t{box} * kTileRows / array.halves,
                                          std::int64_t{group} * kQuantGroup));
          }
        }
      }
    }
  }
  return to_device(all);
}

// [E, rows] of one matrix of all experts; empty where no half has a scale for every row.
DeviceBuffer row_scales(std::span<const FfnWeights> experts, std::span<const Matrices> halves,
                        Matrices which, int rows) {
  const auto by_row = [&](const FfnWeights& expert) {
    return std::ranges::any_of(halves, [&](Matrices m) { return is_row_form(expert.*m); });
  };
  if (std::ranges::none_of(experts, by_row)) return {};
  std::vector<float> all;
  for (const FfnWeights& expert : experts) {
    const Scales scales(expert.*which);
    for (int row = 0; row < rows; ++row) all.push_back(scales.of_row(row));
  }
  return to_device(all);
}

// [E, width] of one bias of all experts; empty where they have none.
DeviceBuffer biases(std::span<const FfnWeights> experts, const VectorView FfnWeights::*which,
                    std::size_t width) {
  if (experts.empty() || (experts[0].*which).empty()) return {};
  std::vector<float> all(experts.size() * width);
  for (std::size_t e = 0; e < experts.size(); ++e) {
    std::ranges::copy(to_floats(experts[e].*which),
                      all.begin() + static_cast<std::ptrdiff_t>(e * width));
  }
  return to_device(all);
}

}  // namespace

DeviceFfn::DeviceFfn(const PolicyFacts& policy, std::span<const FfnWeights> experts, int hidden,
                     int intermediate, bool gated) {
  if (experts.empty()) return;
  const Matrices both[] = {&FfnWeights::gate, &FfnWeights::up}, down = &FfnWeights::down;
  const std::span<const Matrices> first = std::span(both).last(gated ? 2 : 1), second{&down, 1};
  const int width = protocol::round_up(intermediate, policy.alignment());
  gemm1_ = place(policy, experts, first, width, hidden, own1_);
  gemm2_ = place(policy, experts, second, hidden, width, own2_);
  if (policy.numerics.scaled()) {
    gemm1_scales_ = block_scales(experts, first, gemm1_);
    gemm2_scales_ = block_scales(experts, second, gemm2_);
    if (gated) gate_row_scales_ = row_scales(experts, first, &FfnWeights::gate, width);
    up_row_scales_ = row_scales(experts, first, &FfnWeights::up, width);
    down_row_scales_ = row_scales(experts, second, &FfnWeights::down, hidden);
  }
  const auto i = static_cast<std::size_t>(width), h = static_cast<std::size_t>(hidden);
  gate_bias_ = biases(experts, &FfnWeights::gate_bias, i);
  up_bias_ = biases(experts, &FfnWeights::up_bias, i);
  down_bias_ = biases(experts, &FfnWeights::down_bias, h);
}

bool DeviceFfn::borrows() const {
  return gemm1_.data != own1_.data() || gemm2_.data != own2_.data();
}

FfnParams DeviceFfn::params() const {
  FfnParams params{};
  if (gemm1_.num_experts == 0) return params;
  const bool halves = gemm1_.halves == 2 && gemm1_.element_bytes == 1;
  params.gemm1_maps =
      weight_maps(gemm1_, halves ? BoxOrder::kHalvesInTurn : BoxOrder::kGroupsInTurn);
  params.small_gemm1_map = weight_maps(gemm1_, BoxOrder::kGroupsInTurn).once;
  params.gemm2_maps = weight_maps(gemm2_, BoxOrder::kGroupsInTurn);
  const auto floats = [](const DeviceBuffer& buffer) {
    return reinterpret_cast<const float*>(buffer.data());
  };
  params.gemm1_scales = floats(gemm1_scales_);
  params.gemm2_scales = floats(gemm2_scales_);
  params.gate_scale = floats(gate_row_scales_);
  params.up_scale = floats(up_row_scales_);
  params.down_scale = floats(down_row_scales_);
  params.gate_bias = floats(gate_bias_);
  params.up_bias = floats(up_bias_);
  params.down_bias = floats(down_bias_);
  params.intermediate = gemm1_.rows;
  params.gemm1_rows = static_cast<std::uint32_t>(gemm1_.halves * gemm1_.rows);
  params.gemm2_rows = static_cast<std::uint32_t>(gemm2_.rows);
  return params;
}

DeviceGate::DeviceGate(const LayerSpec& spec, const MoeWeights& weights)
    : has_router_(!weights.router.empty()), shared_sigmoid_(spec.shared_sigmoid_gate) {
  constexpr int kMultiple = 32;  // the kernel's unit: see route/gate.cuh
  columns_ = protocol::round_up(spec.num_experts + (shared_sigmoid_ ? 1 : 0), kMultiple);
  stride_ = protocol::round_up(spec.hidden, kMultiple);
  const auto columns = static_cast<std::size_t>(columns_),
             stride = static_cast<std::size_t>(stride_);
  if (has_router_ || shared_sigmoid_) {
    std::vector<float> values(columns * stride);
    if (has_router_) {
      const MatrixView& router = weights.router;
      const std::vector<std::byte> copy = on_host(router);
      MatrixView view = router;
      view.data = copy.data();
      for (std::int64_t r = 0; r < spec.num_experts; ++r) {
        for (std::int64_t c = 0; c < spec.hidden; ++c) {
          values[static_cast<std::size_t>(r) * stride + static_cast<std::size_t>(c)] =
              element(view, r, c);
        }
      }
    }
    if (shared_sigmoid_) {
      std::ranges::copy(to_floats(weights.shared_gate),
                        values.begin() + static_cast<std::ptrdiff_t>(
                                             static_cast<std::size_t>(spec.num_experts) * stride));
    }
    // Three bf16 numbers hold the 24 bits of an fp32 mantissa; a bf16 router needs only the first.
    std::vector<std::uint16_t> planes;
    bool rest = true;
    for (num_planes_ = 0; rest && num_planes_ < 3; ++num_planes_) {
      rest = false;
      for (float& value : values) {
        const std::uint16_t code = f32_to_bf16(value);
        planes.push_back(code);
        value -= bf16_to_f32(code);
        rest |= value != 0;
      }
    }
    planes_ = to_device(planes.data(), planes.size() * sizeof(std::uint16_t));
  }
  router_bias_ = to_device(to_floats(weights.router_bias));
  correction_bias_ = to_device(to_floats(weights.correction_bias));
  if (!weights.hash_table.empty() && spec.routing.method == RoutingMethod::kHash) {
    MatrixView table = weights.hash_table;
    const std::vector<std::byte> copy = on_host(table);
    table.data = copy.data();
    hash_rows_ = static_cast<int>(table.rows);
    std::vector<std::int32_t> ids;
    for (std::int64_t r = 0; r < table.rows; ++r) routing::append_hashed_ids(table, r, ids);
    hash_table_ = to_device(ids.data(), ids.size() * sizeof(std::int32_t));
  }
}

void DeviceGate::describe(LayerParams& params) const {
  params.router = reinterpret_cast<const std::uint16_t*>(planes_.data());
  params.num_planes = num_planes_;
  params.gate_columns = columns_;
  params.gate_stride = stride_;
  if (num_planes_ != 0) {
    params.router_map =
        rows_map(params.router, sizeof(std::uint16_t), std::int64_t{num_planes_} * columns_,
                 stride_, stride_, kGateBoxRows);
  }
  params.shared_sigmoid = shared_sigmoid_;
  params.router_bias = reinterpret_cast<const float*>(router_bias_.data());
  params.correction_bias = reinterpret_cast<const float*>(correction_bias_.data());
  params.hash_table = reinterpret_cast<const std::int32_t*>(hash_table_.data());
  params.hash_rows = hash_rows_;
}

}  // namespace switchyard::gpu
