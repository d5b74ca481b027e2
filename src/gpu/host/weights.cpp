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

// Copies a small matrix to the host, from whatever memory it is in.
std::vector<std::byte> on_host(const MatrixView& m) {
  if (m.rows == 0 || m.cols == 0) return {};
  const std::int64_t last = (m.rows - 1) * m.row_stride + (m.cols - 1) * m.col_stride;
  std::vector<std::byte> copy((static_cast<std::size_t>(last) + 1) * size_of(m.dtype));
  SWITCHYARD_CUDA(cudaMemcpy(copy.data(), m.data, copy.size(), cudaMemcpyDefault));
  return copy;
}

DeviceBuffer to_device(const void* data, std::size_t bytes) {
  DeviceBuffer buffer(bytes);
  if (bytes != 0) buffer.upload(data, bytes);
  return buffer;
}
DeviceBuffer zeros(std::size_t bytes) {
  DeviceBuffer buffer(bytes);
  SWITCHYARD_CUDA(cudaMemset(buffer.data(), 0, bytes));
  return buffer;
}

using Matrices = const MatrixView FfnWeights::*;

// Returns the one array that all experts' matrices `halves` make, if the copy engine can read it as
// one.
std::optional<WeightArray> in_place(const Numerics& numerics, std::span<const FfnWeights> experts,
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
                    numerics.weight_bytes(),
                    m.row_stride * numerics.weight_bytes()};
  // With a single half or expert, any distance to the next will do.
  array.half_stride = halves.size() > 1 ? distance(m, at(0, 1)) : array.row_stride;
  array.expert_stride = experts.size() > 1 ? distance(m, at(1, 0)) : array.row_stride;
  const auto usable = [](std::int64_t stride) { return stride > 0 && stride % 16 == 0; };
  // Rows of one matrix are columns of the other.
  if (array.rows % numerics.alignment() != 0 || array.columns % numerics.alignment() != 0 ||
      reinterpret_cast<std::uintptr_t>(m.data) % 16 != 0 || !usable(array.row_stride) ||
      !usable(array.half_stride) || !usable(array.expert_stride)) {
    return std::nullopt;
  }
  for (std::size_t e = 0; e < experts.size(); ++e) {
    for (std::size_t half = 0; half < halves.size(); ++half) {
      const MatrixView& other = at(e, half);
      const std::int64_t expected = static_cast<std::int64_t>(e) * array.expert_stride +
                                    static_cast<std::int64_t>(half) * array.half_stride;
      if (other.dtype != numerics.weight.storage || other.col_stride != 1 ||
          other.row_stride != m.row_stride || distance(m, other) != expected ||
          residence_of(other.data) != Residence::kHere) {
        return std::nullopt;
      }
    }
  }
  return array;
}

// Makes one array of `rows` x `columns` of the experts' matrices in `own`, which `layout` is to
// fill.
WeightArray make_array(const Numerics& numerics, std::span<const FfnWeights> experts,
                       std::span<const Matrices> halves, int rows, int columns, DeviceBuffer& own,
                       WeightLayout& layout) {
  WeightArray array{nullptr,
                    static_cast<std::int64_t>(experts.size()),
                    static_cast<int>(halves.size()),
                    rows,
                    columns,
                    numerics.weight_bytes()};
  array.row_stride = std::int64_t{columns} * numerics.weight_bytes();
  array.half_stride = rows * array.row_stride;
  array.expert_stride = array.halves * array.half_stride;
  const std::size_t bytes = experts.size() * static_cast<std::size_t>(array.expert_stride);
  const MatrixView& m = experts[0].*halves[0];
  // Rows and columns that were added must be zero.
  own = m.rows == rows && m.cols == columns ? DeviceBuffer(bytes) : zeros(bytes);
  array.data = own.data();
  for (std::size_t e = 0; e < experts.size(); ++e) {
    for (std::size_t half = 0; half < halves.size(); ++half) {
      layout.copy(experts[e].*halves[half],
                  own.data() + e * static_cast<std::size_t>(array.expert_stride) +
                      half * static_cast<std::size_t>(array.half_stride),
                  numerics.weight.storage, columns);
    }
  }
  return array;
}

// Boxes of the experts' four-bit matrices in `own`, and the powers of their rows in `powers` if
// codes are to become E5M2. `layout` is to fill both. The array that is returned has their shape,
// and no addresses of rows.
WeightArray make_box_array(const Numerics& numerics, std::span<const FfnWeights> experts,
                           std::span<const Matrices> halves, const char* const* names, int rows,
                           int columns, DeviceBuffer& own, std::span<DeviceBuffer* const> powers,
                           WeightLayout& layout) {
  WeightArray array{nullptr,
                    static_cast<std::int64_t>(experts.size()),
                    static_cast<int>(halves.size()),
                    rows,
                    columns,
                    0};
  BoxCopy copy;
  copy.halves = array.halves;
  copy.boxes = static_cast<std::uint32_t>(protocol::ceil_div(array.halves * rows, kTileRows));
  copy.k_blocks = static_cast<std::uint32_t>(protocol::ceil_div(columns, kBoxColumnsOfFourBits));
  copy.rows = static_cast<std::uint32_t>(rows);
  const std::size_t box = box_bytes(numerics.weight.storage);
  const std::size_t of_expert = std::size_t{copy.boxes} * copy.k_blocks * box;
  // A stage of several boxes may reach past the last one. Its columns there are multiplied by
  // zeros, and their scales must be the offsets of tables: see box_step().
  const std::size_t all = experts.size() * of_expert;
  own = DeviceBuffer(all + box);
  SWITCHYARD_CUDA(cudaMemset(own.data() + all, 0, box));
  if (numerics.makes_codes()) {
    for (std::size_t half = 0; half < halves.size(); ++half) {
      *powers[half] = DeviceBuffer(experts.size() * static_cast<std::size_t>(rows) * sizeof(float));
    }
  }
  for (std::size_t e = 0; e < experts.size(); ++e) {
    std::vector<std::string> of_halves;
    for (std::size_t half = 0; half < halves.size(); ++half) {
      copy.from[half] = experts[e].*halves[half];
      of_halves.push_back(fmt::format("expert {}'s {}", e, names[half]));
      if (numerics.makes_codes()) {
        copy.powers[half] =
            reinterpret_cast<float*>(powers[half]->data()) + e * static_cast<std::size_t>(rows);
      }
    }
    copy.to = own.data() + e * of_expert;
    layout.copy_boxes(copy, std::move(of_halves));
  }
  return array;
}

// [E, pairs of boxes, K/128, 2, 2]: see FfnParams::gemm1_scales.
DeviceBuffer block_scales(std::span<const FfnWeights> experts, std::span<const Matrices> halves,
                          const WeightArray& array, WeightLayout& layout) {
  const int boxes = protocol::round_up(protocol::ceil_div(array.halves * array.rows, kTileRows), 2);
  const int groups = protocol::ceil_div(array.columns, kQuantGroup);
  const std::size_t of_expert =
      2 * static_cast<std::size_t>(boxes) * static_cast<std::size_t>(groups);
  DeviceBuffer buffer(experts.size() * of_expert * sizeof(float));
  for (std::size_t e = 0; e < experts.size(); ++e) {
    for (std::size_t half = 0; half < halves.size(); ++half) {
      ScaleCopy copy;
      copy.of = experts[e].*halves[half];
      copy.to = reinterpret_cast<float*>(buffer.data()) + e * of_expert;
      copy.form = ScaleCopy::Form::kBlocks;
      copy.by_row = is_row_form(copy.of);
      copy.halves = array.halves;
      copy.part = static_cast<int>(half);
      copy.boxes = boxes;
      copy.groups = groups;
      layout.copy_scales(copy);
    }
  }
  return buffer;
}

// [E, rows] of one matrix of all experts; empty where no half has a scale for every row.
DeviceBuffer row_scales(std::span<const FfnWeights> experts, std::span<const Matrices> halves,
                        Matrices which, int rows, WeightLayout& layout) {
  const auto by_row = [&](const FfnWeights& expert) {
    return std::ranges::any_of(halves, [&](Matrices m) { return is_row_form(expert.*m); });
  };
  if (std::ranges::none_of(experts, by_row)) return {};
  DeviceBuffer buffer(experts.size() * static_cast<std::size_t>(rows) * sizeof(float));
  for (std::size_t e = 0; e < experts.size(); ++e) {
    ScaleCopy copy;
    copy.of = experts[e].*which;
    copy.to = reinterpret_cast<float*>(buffer.data()) + e * static_cast<std::size_t>(rows);
    copy.form = ScaleCopy::Form::kRows;
    copy.by_row = is_row_form(copy.of);
    copy.rows = rows;
    layout.copy_scales(copy);
  }
  return buffer;
}

// [E, width] of one bias of all experts; empty where they have none.
DeviceBuffer biases(std::span<const FfnWeights> experts, const VectorView FfnWeights::*which,
                    std::size_t width, WeightLayout& layout) {
  if (experts.empty() || (experts[0].*which).empty()) return {};
  DeviceBuffer buffer = zeros(experts.size() * width * sizeof(float));
  for (std::size_t e = 0; e < experts.size(); ++e) {
    layout.copy(experts[e].*which, reinterpret_cast<float*>(buffer.data()) + e * width);
  }
  return buffer;
}

DeviceBuffer floats(const VectorView& values, WeightLayout& layout) {
  DeviceBuffer buffer(static_cast<std::size_t>(values.empty() ? 0 : values.size) * sizeof(float));
  layout.copy(values, reinterpret_cast<float*>(buffer.data()));
  return buffer;
}

// The number of bf16 numbers that hold a number of the type.
int planes_of(DType dtype) { return dtype == DType::kBF16 ? 1 : dtype == DType::kF16 ? 2 : 3; }

}  // namespace

DeviceFfn::DeviceFfn(const Numerics& numerics, std::span<const FfnWeights> experts, int hidden,
                     int intermediate, bool gated) {
  if (experts.empty()) return;
  const Matrices gate_first[] = {&FfnWeights::gate, &FfnWeights::up}, down = &FfnWeights::down;
  const std::span<const Matrices> first = std::span(gate_first).last(gated ? 2 : 1);
  const std::span<const Matrices> second{&down, 1};
  const int width = protocol::round_up(intermediate, numerics.alignment());
  four_bit_ = numerics.four_bit();
  if (four_bit_) {
    static constexpr const char* kFirst[] = {"gate", "up"};
    static constexpr const char* kSecond[] = {"down"};
    DeviceBuffer* const first_powers[] = {&gate_row_scales_, &up_row_scales_};
    DeviceBuffer* const second_powers[] = {&down_row_scales_};
    if (!experts[0].up.empty()) {
      gemm1_ = make_box_array(numerics, experts, first, kFirst + (gated ? 0 : 1), width, hidden,
                              own1_, std::span(first_powers).subspan(gated ? 0 : 1), layout_);
    }
    if (!experts[0].down.empty()) {
      gemm2_ = make_box_array(numerics, experts, second, kSecond, hidden, width, own2_,
                              second_powers, layout_);
    }
    finish(experts, hidden, width);
    return;
  }
  // Halves with up first are copied: exchanging them in the epilogue takes registers that the
  // kernels do not have (8 to 840 bytes of spills), and a tensor map cannot step backwards.
  if (experts[0].up.empty()) {
    // This is an operator's second GEMM alone.
  } else if (const auto of_first = in_place(numerics, experts, first)) {
    gemm1_ = *of_first;
  } else {
    gemm1_ = make_array(numerics, experts, first, width, hidden, own1_, layout_);
  }
  if (experts[0].down.empty()) {
    // This is an operator's first GEMM alone.
  } else if (const auto of_second = in_place(numerics, experts, second)) {
    gemm2_ = *of_second;
  } else {
    gemm2_ = make_array(numerics, experts, second, hidden, width, own2_, layout_);
  }
  if (numerics.scaled()) {
    if (gemm1_.num_experts != 0) {
      gemm1_scales_ = block_scales(experts, first, gemm1_, layout_);
      if (gated) gate_row_scales_ = row_scales(experts, first, &FfnWeights::gate, width, layout_);
      up_row_scales_ = row_scales(experts, first, &FfnWeights::up, width, layout_);
    }
    if (gemm2_.num_experts != 0) {
      gemm2_scales_ = block_scales(experts, second, gemm2_, layout_);
      down_row_scales_ = row_scales(experts, second, &FfnWeights::down, hidden, layout_);
    }
  }
  finish(experts, hidden, width);
}

void DeviceFfn::finish(std::span<const FfnWeights> experts, int hidden, int width) {
  const auto i = static_cast<std::size_t>(width), h = static_cast<std::size_t>(hidden);
  gate_bias_ = biases(experts, &FfnWeights::gate_bias, i, layout_);
  up_bias_ = biases(experts, &FfnWeights::up_bias, i, layout_);
  down_bias_ = biases(experts, &FfnWeights::down_bias, h, layout_);
  layout_.finish();
  layout_.run(nullptr);
  layout_.require_good_scales();
}

bool DeviceFfn::borrows() const {
  return !four_bit_ && (gemm1_.data != own1_.data() || gemm2_.data != own2_.data());
}

FfnParams DeviceFfn::params() const {
  FfnParams params{};
  params.gemm1_boxes = four_bit_ ? own1_.data() : nullptr;
  params.gemm2_boxes = four_bit_ ? own2_.data() : nullptr;
  if (gemm1_.num_experts != 0 && !four_bit_) {
    const bool halves = gemm1_.halves == 2 && gemm1_.element_bytes == 1;
    params.gemm1_maps =
        weight_maps(gemm1_, halves ? BoxOrder::kHalvesInTurn : BoxOrder::kGroupsInTurn);
    params.small_gemm1_map = weight_maps(gemm1_, BoxOrder::kGroupsInTurn).once;
  }
  if (gemm2_.num_experts != 0 && !four_bit_)
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
  params.intermediate = gemm1_.num_experts != 0 ? gemm1_.rows : gemm2_.columns;
  params.gemm1_rows = static_cast<std::uint32_t>(gemm1_.halves * gemm1_.rows);
  params.gemm2_rows = static_cast<std::uint32_t>(gemm2_.rows);
  return params;
}

int gate_columns(const LayerSpec& spec) {
  return protocol::round_up(spec.num_experts + (spec.shared_sigmoid_gate ? 1 : 0), kGateMultiple);
}

DeviceGate::DeviceGate(const LayerSpec& spec, const MoeWeights& weights)
    : has_router_(!weights.router.empty()), shared_sigmoid_(spec.shared_sigmoid_gate) {
  columns_ = gate_columns(spec);
  stride_ = protocol::round_up(spec.hidden, kGateMultiple);
  const auto columns = static_cast<std::size_t>(columns_),
             stride = static_cast<std::size_t>(stride_);
  // The router is a sum of bf16 planes; see RouterParams::router.
  if (has_router_) num_planes_ = planes_of(weights.router.dtype);
  if (shared_sigmoid_) num_planes_ = std::max(num_planes_, planes_of(weights.shared_gate.dtype));
  planes_ = zeros(static_cast<std::size_t>(num_planes_) * columns * stride * sizeof(std::uint16_t));
  for (int plane = 0; plane < num_planes_; ++plane) {
    auto* const to = reinterpret_cast<std::uint16_t*>(planes_.data()) +
                     static_cast<std::size_t>(plane) * columns * stride;
    if (has_router_) {
      layout_.copy_plane(weights.router, to, stride_, plane);
    }
    if (shared_sigmoid_) {
      const VectorView& v = weights.shared_gate;
      layout_.copy_plane({v.data, v.dtype, 1, v.size, v.size, v.stride},
                         to + static_cast<std::size_t>(spec.num_experts) * stride, stride_, plane);
    }
  }
  router_bias_ = floats(weights.router_bias, layout_);
  correction_bias_ = floats(weights.correction_bias, layout_);
  layout_.finish();
  layout_.run(nullptr);
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
