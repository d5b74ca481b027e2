// Lays weights out on the device as the kernel reads them, from wherever the caller has them. This
// can be repeated when the caller changes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/host_device.h"
#include "gpu/device.h"
#include "switchyard/tensor.h"

namespace switchyard::gpu {

// Throws Error{kDTypeMismatch} for weights that are neither floats nor of four bits.
void require_multiplied(const MatrixView& matrix);
// Throws Error{kUnsupported} for weights of four bits that kernels do not multiply with tokens in
// `compute`: bf16, or of MXFP4 f8_e4m3; of INT4 only bf16 scales without zero points.
void require_boxes(const MatrixView& matrix, DType compute);

// A copy of one matrix into rows of another type. Pointers are device pointers.
struct MatrixCopy {
  MatrixView from;               // bf16, f16, f32 or f8_e4m3, with any strides
  void* to = nullptr;            // [rows, cols], columns one behind the other
  DType to_type = DType::kBF16;  // kBF16, kF16, kF32, or kF8E4M3 for the codes that `from` has
  std::int64_t to_stride = 0;    // elements
  // With kBF16, the plane to copy: plane n is the value less planes 0 to n - 1, rounded to bf16.
  // Three planes sum up to an fp32.
  int plane = 0;
};

// Scales of one FP8 matrix, in one of two forms. Pointers are device pointers.
struct ScaleCopy {
  MatrixView of;        // its `data` is not read
  float* to = nullptr;  // null only where nothing is to be written
  // kBlocks: to[(box / 2 * groups + group) * 4 + box % 2 * 2 + part] for the part `part`, or both,
  // of boxes of kTileRows / halves rows, and groups of 128 columns: see FfnParams::gemm1_scales. 1
  // where the matrix has a scale for every row. kRows: to[row], for `rows` rows; 1 past the
  // matrix's end and where it has scales of blocks.
  enum class Form : std::uint8_t { kBlocks, kRows } form = Form::kBlocks;
  bool by_row = false;  // the matrix has a scale for every row
  int halves = 1, part = 0;
  int boxes = 0, groups = 0;
  int rows = 0;
};

// Boxes of four-bit weights (tile/four_bit.h): of one matrix, or of gate and up in turn. Pointers
// are device pointers.
struct BoxCopy {
  MatrixView from[2];
  int halves = 1;
  std::byte* to = nullptr;
  std::uint32_t boxes = 0, k_blocks = 0;  // over rows and over columns
  // Where the powers of `rows` rows of each matrix go, if kernels make E4M3 of the codes; see
  // bits_of_row_power(). Null where they make bf16.
  float* powers[2] = {};
  std::uint32_t rows = 0;
  // The first scale that cannot be laid out, as bad_scale() packs it; all ones: there is none.
  unsigned long long* bad = nullptr;
  std::uint32_t number = 0;  // in the list
};

// A list of what is to be laid out. Kernels read sources in the current device's memory in place;
// other sources pass through memory of the device.
class WeightLayout {
 public:
  // Adds an expert's matrix, to kBF16 or kF16, or as the codes that it has. The host converts
  // matrices in its own memory.
  void copy(const MatrixView& from, void* to, DType to_type, std::int64_t to_stride);
  // Adds one of the bf16 planes of a matrix.
  void copy_plane(const MatrixView& from, std::uint16_t* to, std::int64_t to_stride, int plane);
  void copy(const VectorView& from, float* to);
  void copy_scales(ScaleCopy scales);
  // Adds boxes of four-bit weights. `names`: of the matrices, for errors.
  void copy_boxes(BoxCopy boxes, std::vector<std::string> names);
  // Called after the last copy.
  void finish();

  // Enqueues all of it. Sources in host memory are read before it returns.
  void run(void* stream) const;
  // Waits for run(), and throws Error{kInvalidArgument} for a scale of four-bit weights that is NaN
  // and Error{kUnsupported} for one that is too large, or too small beside its row's largest, with
  // its place.
  void require_good_scales() const;
  // Whether run() only enqueues kernels, so that it can be captured in a graph.
  bool capturable() const {
    return staged_.empty() && from_host_.empty() && boxes_from_host_.empty();
  }
  // Whether nothing is laid out.
  bool empty() const {
    return copies_.empty() && from_host_.empty() && scales_.empty() && box_names_.empty();
  }
  // Whether any source is in memory of the device.
  bool reads_device() const { return reads_device_; }

 private:
  struct Staged {
    const void* from;
    DeviceBuffer to;
  };
  void add(MatrixCopy copy);
  // Where kernels find `bytes` bytes at `from`.
  const void* reachable(const void* from, std::size_t bytes);

  std::vector<MatrixCopy> copies_, from_host_;
  std::vector<ScaleCopy> scales_;
  std::vector<BoxCopy> boxes_, boxes_from_host_;
  std::vector<std::vector<std::string>> box_names_;  // by BoxCopy::number
  std::vector<Staged> staged_;
  DeviceBuffer copies_on_device_, scales_on_device_, boxes_on_device_, bad_scale_;
  std::int64_t most_tiles_ = 0, most_scales_ = 0;
  bool reads_device_ = false;
};

// Enqueues kernels for lists in device memory. `most`: the most tiles of 32 x 32 elements, or
// scales, that one of them has.
void enqueue_copies(const MatrixCopy* list, std::size_t count, std::int64_t most, void* stream);
void enqueue_scales(const ScaleCopy* list, std::size_t count, std::int64_t most, void* stream);
// `most`: the most boxes, over rows and columns, that one of them has. All are of one type, and all
// have powers or none.
void enqueue_boxes(const BoxCopy* list, std::size_t count, DType type, bool powers,
                   std::int64_t most, void* stream);

// A scale that cannot be laid out: of list entry `number`, half `half`.
struct BadScale {
  std::uint32_t number, half, row, group, code;
};
SWITCHYARD_HOST_DEVICE constexpr unsigned long long pack(const BadScale& bad) {
  return static_cast<unsigned long long>(bad.number) << 48 |
         static_cast<unsigned long long>(bad.half) << 47 |
         static_cast<unsigned long long>(bad.row) << 24 |
         static_cast<unsigned long long>(bad.group) << 8 | bad.code;
}
constexpr BadScale unpack_bad_scale(unsigned long long packed) {
  return {static_cast<std::uint32_t>(packed >> 48), static_cast<std::uint32_t>(packed >> 47 & 1),
          static_cast<std::uint32_t>(packed >> 24 & 0x7fffff),
          static_cast<std::uint32_t>(packed >> 8 & 0xffff),
          static_cast<std::uint32_t>(packed & 0xff)};
}

}  // namespace switchyard::gpu
