#include "gpu/host/lay_out.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/convert.h"
#include "gpu/host/cuda_error.h"
#include "gpu/tile/four_bit.h"
#include "protocol/partition.h"
#include "switchyard/error.h"

namespace switchyard::gpu {

void require_multiplied(const MatrixView& m) {
  if (m.dtype == DType::kF32 || m.dtype == DType::kBF16 || m.dtype == DType::kF16 ||
      m.dtype == DType::kF8E4M3 || is_four_bit(m.dtype)) {
    return;
  }
  throw Error(
      ErrorCode::kDTypeMismatch,
      fmt::format("weights are {}; the GPU engine takes bf16, f16, f32, f8_e4m3, f4_e2m1 and "
                  "u4",
                  to_string(m.dtype)));
}

namespace {

// Element by element, no codes of four bits are copied.
void require_elements(const MatrixView& m) {
  require_multiplied(m);
  if (!is_four_bit(m.dtype)) return;
  throw Error(ErrorCode::kUnsupported,
              fmt::format("weights are {} beside others that are not; kernels for GPUs multiply "
                          "experts of one type, convert them",
                          to_string(m.dtype)));
}

}  // namespace

void require_boxes(const MatrixView& m, DType compute) {
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("weights are {}, and {}; use the backend cpu, or convert the weights "
                            "to f8_e4m3 or bf16",
                            to_string(m.dtype), why));
  };
  const bool float4 = m.dtype == DType::kF4E2M1;
  if (compute != DType::kBF16 && !(float4 && compute == DType::kF8E4M3)) {
    refuse(fmt::format("kernels for GPUs multiply them with tokens in bf16{}, not {}",
                       float4 ? " or f8_e4m3" : "", to_string(compute)));
  }
  if (float4) return;
  if (m.scale_dtype != DType::kBF16) {
    refuse(fmt::format("kernels for GPUs take scales of bf16, not {}", to_string(m.scale_dtype)));
  }
  if (m.zero != nullptr) refuse("kernels for GPUs take no zero points");
}

namespace {

// Returns any element of a matrix in host memory.
float element(const MatrixView& m, std::int64_t r, std::int64_t c) {
  const std::byte* const at =
      static_cast<const std::byte*>(m.data) +
      (r * m.row_stride + c * m.col_stride) * static_cast<std::int64_t>(size_of(m.dtype));
  std::uint16_t code = 0;
  switch (m.dtype) {
    case DType::kF32: {
      float value = 0;
      std::memcpy(&value, at, sizeof value);
      return value;
    }
    case DType::kBF16: std::memcpy(&code, at, sizeof code); return bf16_to_f32(code);
    case DType::kF16: std::memcpy(&code, at, sizeof code); return f16_to_f32(code);
    default: {
      const float value = f8e4m3_to_f32(static_cast<std::uint8_t>(*at));
      if (m.scale == nullptr) return value;
      return value * m.f32_scale()[r / m.scale_rows * m.scale_stride + c / m.scale_cols];
    }
  }
}

// A matrix's extent in memory: from the lowest element to past the highest, in elements from its
// first.
struct Extent {
  std::int64_t low = 0, high = 0;
};
Extent extent_of(const MatrixView& m) {
  if (m.rows == 0 || m.cols == 0) return {};
  const std::int64_t down = (m.rows - 1) * m.row_stride, across = (m.cols - 1) * m.col_stride;
  return {std::min<std::int64_t>(down, 0) + std::min<std::int64_t>(across, 0),
          std::max<std::int64_t>(down, 0) + std::max<std::int64_t>(across, 0) + 1};
}
std::size_t num_scales(const MatrixView& m) {
  return static_cast<std::size_t>((m.rows - 1) / m.scale_rows * m.scale_stride +
                                  (m.cols - 1) / m.scale_cols + 1);
}

std::int64_t tiles_of(const MatrixView& m) {
  constexpr std::int64_t kEdge = 32;
  return protocol::ceil_div(m.rows, kEdge) * protocol::ceil_div(m.cols, kEdge);
}

template <typename T>
DeviceBuffer uploaded(const std::vector<T>& values) {
  DeviceBuffer buffer(values.size() * sizeof(T));
  if (!values.empty()) buffer.upload(values.data(), buffer.bytes());
  return buffer;
}

// Copies a matrix of another device, which no kernel here reads, through memory of this one.
void copy_from_elsewhere(const MatrixCopy& copy) {
  WeightLayout layout;
  const Extent extent = extent_of(copy.from);
  const std::size_t size = size_of(copy.from.dtype);
  DeviceBuffer values(static_cast<std::size_t>(extent.high - extent.low) * size);
  SWITCHYARD_CUDA(cudaMemcpy(
      values.data(),
      static_cast<const std::byte*>(copy.from.data) + extent.low * static_cast<std::int64_t>(size),
      values.bytes(), cudaMemcpyDefault));
  MatrixView here = copy.from;
  here.data = values.data() - extent.low * static_cast<std::int64_t>(size);
  layout.copy(here, copy.to, copy.to_type, copy.to_stride);
  layout.finish();
  layout.run(nullptr);
  SWITCHYARD_CUDA(cudaStreamSynchronize(nullptr));
}

void copy_from_host(const MatrixCopy& copy, cudaStream_t stream) {
  const MatrixView& m = copy.from;
  const bool fp8 = copy.to_type == DType::kF8E4M3;
  const std::size_t element_bytes = size_of(copy.to_type);
  const std::size_t width = static_cast<std::size_t>(m.cols) * element_bytes;
  const void* from = m.data;
  std::size_t pitch = static_cast<std::size_t>(m.row_stride) * element_bytes;
  std::vector<std::byte> rows;
  if (m.dtype != copy.to_type || m.col_stride != 1 || m.row_stride < m.cols) {
    if (residence_of(m.data) != Residence::kHost) return copy_from_elsewhere(copy);
    rows.resize(static_cast<std::size_t>(m.rows) * width);
    std::byte* next = rows.data();
    for (std::int64_t r = 0; r < m.rows; ++r) {
      for (std::int64_t c = 0; c < m.cols; ++c, next += element_bytes) {
        if (fp8) {
          *next = static_cast<const std::byte*>(m.data)[r * m.row_stride + c * m.col_stride];
        } else {
          const float value = element(m, r, c);
          const std::uint16_t code =
              copy.to_type == DType::kF16 ? f32_to_f16(value) : f32_to_bf16(value);
          std::memcpy(next, &code, sizeof code);
        }
      }
    }
    from = rows.data();
    pitch = width;
  }
  SWITCHYARD_CUDA(
      cudaMemcpy2DAsync(copy.to, static_cast<std::size_t>(copy.to_stride) * element_bytes, from,
                        pitch, width, static_cast<std::size_t>(m.rows), cudaMemcpyDefault, stream));
  // The copy must have read `rows` before they are destroyed.
  if (!rows.empty()) SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
}

std::int64_t most_boxes(std::span<const BoxCopy> copies) {
  std::int64_t most = 0;
  for (const BoxCopy& copy : copies) {
    most = std::max(most, std::int64_t{copy.boxes} * copy.k_blocks);
  }
  return most;
}

bool has_powers(const BoxCopy& copy) { return copy.powers[0] != nullptr; }

// Four-bit codes and scales come to memory of this device as they are, and kernels make boxes of
// them there.
void make_boxes_from_host(const BoxCopy& copy, cudaStream_t stream) {
  BoxCopy here = copy;
  std::vector<DeviceBuffer> staged;
  const auto stage = [&](const void* from, std::int64_t bytes) -> const void* {
    staged.emplace_back(static_cast<std::size_t>(bytes));
    SWITCHYARD_CUDA(cudaMemcpyAsync(staged.back().data(), from, static_cast<std::size_t>(bytes),
                                    cudaMemcpyDefault, stream));
    return staged.back().data();
  };
  for (int half = 0; half < copy.halves; ++half) {
    MatrixView& m = here.from[half];
    if (m.rows == 0) continue;
    m.data = stage(m.data, bytes_of(m.dtype, (m.rows - 1) * m.row_stride + m.cols));
    m.scale = stage(m.scale,
                    bytes_of(m.scale_dtype, (m.rows - 1) * m.scale_stride + m.cols / m.scale_cols));
  }
  const DeviceBuffer list = uploaded(std::vector<BoxCopy>{here});
  enqueue_boxes(reinterpret_cast<const BoxCopy*>(list.data()), 1, here.from[0].dtype,
                has_powers(here), most_boxes({&here, 1}), stream);
  SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
}

}  // namespace

const void* WeightLayout::reachable(const void* from, std::size_t bytes) {
  if (residence_of(from) == Residence::kHere) {
    reads_device_ = true;
    return from;
  }
  for (const Staged& staged : staged_) {
    if (staged.from == from && staged.to.bytes() >= bytes) return staged.to.data();
  }
  staged_.push_back({from, DeviceBuffer(bytes)});
  return staged_.back().to.data();
}

void WeightLayout::copy(const MatrixView& from, void* to, DType to_type, std::int64_t to_stride) {
  require_elements(from);
  const MatrixCopy copy{from, to, to_type, to_stride, 0};
  if (residence_of(from.data) == Residence::kHere) return add(copy);
  from_host_.push_back(copy);
}

void WeightLayout::copy_plane(const MatrixView& from, std::uint16_t* to, std::int64_t to_stride,
                              int plane) {
  require_elements(from);
  add({from, to, DType::kBF16, to_stride, plane});
}

void WeightLayout::copy(const VectorView& from, float* to) {
  if (from.empty()) return;
  const MatrixView row{from.data, from.dtype, 1, from.size, from.size, from.stride};
  require_elements(row);
  add({row, to, DType::kF32, from.size, 0});
}

void WeightLayout::add(MatrixCopy copy) {
  MatrixView& from = copy.from;
  if (from.rows == 0 || from.cols == 0) return;
  const Extent extent = extent_of(from);
  const auto size = static_cast<std::int64_t>(size_of(from.dtype));
  const auto* const lowest = static_cast<const std::byte*>(from.data) + extent.low * size;
  if (from.scale != nullptr && copy.to_type != DType::kF8E4M3) {
    from.scale = static_cast<const float*>(reachable(from.scale, num_scales(from) * sizeof(float)));
  }
  const auto bytes = static_cast<std::size_t>((extent.high - extent.low) * size);
  from.data = static_cast<const std::byte*>(reachable(lowest, bytes)) - extent.low * size;
  most_tiles_ = std::max(most_tiles_, tiles_of(from));
  copies_.push_back(copy);
}

void WeightLayout::copy_scales(ScaleCopy scales) {
  scales.of.scale =
      static_cast<const float*>(reachable(scales.of.scale, num_scales(scales.of) * sizeof(float)));
  const std::int64_t count = scales.form == ScaleCopy::Form::kRows
                                 ? scales.rows
                                 : std::int64_t{scales.boxes} * scales.groups;
  most_scales_ = std::max(most_scales_, count);
  scales_.push_back(scales);
}

void WeightLayout::copy_boxes(BoxCopy boxes, std::vector<std::string> names) {
  if (bad_scale_.bytes() == 0) {
    bad_scale_ = DeviceBuffer(sizeof(unsigned long long));
    SWITCHYARD_CUDA(cudaMemset(bad_scale_.data(), 0xff, bad_scale_.bytes()));
  }
  boxes.bad = reinterpret_cast<unsigned long long*>(bad_scale_.data());
  boxes.number = static_cast<std::uint32_t>(box_names_.size());
  box_names_.push_back(std::move(names));
  bool here = true;
  for (int half = 0; half < boxes.halves; ++half) {
    const MatrixView& m = boxes.from[half];
    here = here && residence_of(m.data) == Residence::kHere &&
           residence_of(m.scale) == Residence::kHere;
  }
  if (!here) {
    boxes_from_host_.push_back(boxes);
    return;
  }
  reads_device_ = true;
  boxes_.push_back(boxes);
}

void WeightLayout::require_good_scales() const {
  if (box_names_.empty()) return;
  unsigned long long packed = 0;
  SWITCHYARD_CUDA(cudaMemcpy(&packed, bad_scale_.data(), sizeof packed, cudaMemcpyDeviceToHost));
  if (packed == ~0ull) return;
  const BadScale bad = unpack_bad_scale(packed);
  const std::string place = fmt::format("{}'s scale of row {}, group {} of its columns",
                                        box_names_[bad.number][bad.half], bad.row, bad.group);
  if (bad.code == 255) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} is NaN; it must be a number. A checkpoint that has it is damaged: "
                            "download it again",
                            place));
  }
  const int power = static_cast<int>(bad.code) - 127;
  if (bad.code <= kMostMxScale) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("{} is 2^{}, too small beside the row's largest: E5M2 has both exactly only "
                    "within {} octaves; compute in bf16",
                    place, power, kCodeSteps - 1));
  }
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{} is 2^{}; kernels for GPUs take scales up to 2, use the backend cpu, "
                          "or convert the weights to bf16",
                          place, power));
}

void WeightLayout::finish() {
  boxes_on_device_ = uploaded(boxes_);
  copies_on_device_ = uploaded(copies_);
  scales_on_device_ = uploaded(scales_);
}

void WeightLayout::run(void* stream) const {
  const auto on = static_cast<cudaStream_t>(stream);
  for (const Staged& staged : staged_) {
    SWITCHYARD_CUDA(
        cudaMemcpyAsync(staged.to.data(), staged.from, staged.to.bytes(), cudaMemcpyDefault, on));
  }
  for (const MatrixCopy& copy : from_host_) copy_from_host(copy, on);
  for (const BoxCopy& copy : boxes_from_host_) make_boxes_from_host(copy, on);
  enqueue_boxes(reinterpret_cast<const BoxCopy*>(boxes_on_device_.data()), boxes_.size(),
                boxes_.empty() ? DType::kF4E2M1 : boxes_[0].from[0].dtype,
                !boxes_.empty() && has_powers(boxes_[0]), most_boxes(boxes_), stream);
  enqueue_copies(reinterpret_cast<const MatrixCopy*>(copies_on_device_.data()), copies_.size(),
                 most_tiles_, stream);
  enqueue_scales(reinterpret_cast<const ScaleCopy*>(scales_on_device_.data()), scales_.size(),
                 most_scales_, stream);
}

}  // namespace switchyard::gpu
