// Reads tensors of a checkpoint as views: in place where the file aligns them, with the scales of
// FP8 and four-bit matrices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/quantization.h"
#include "model/tensor_index.h"
#include "switchyard/tensor.h"

namespace switchyard {

// The memory behind MoeWeights::owner: the mapped files, and the few small tensors that had to be
// copied (scales of FP8 that are not fp32, zero points, tensors that the file leaves misaligned).
struct LayerOwner {
  std::vector<std::shared_ptr<const SafetensorsFile>> files;
  std::vector<std::unique_ptr<float[]>> scales;
  std::vector<std::unique_ptr<std::byte[]>> copies;
};

// "[8, 16]"
std::string shape_text(const std::vector<std::int64_t>& shape);

// Views live as long as owner(). All functions throw Error{kMissingTensor, kShapeMismatch,
// kDTypeMismatch, kUnsupported} naming the file and the tensor, and kInvalidFile for a file that
// was cut since it was opened.
class TensorReader {
 public:
  TensorReader(const TensorIndex& index, const Quantization& quantization)
      : index_(index), quantization_(quantization), owner_(std::make_shared<LayerOwner>()) {
    owner_->files = index.files();
  }

  std::shared_ptr<const void> owner() const { return owner_; }
  Located require(const std::string& name) const;
  void prefetch(const std::string& name) const;
  // A file that was cut meanwhile may have left zeros in what was copied from it.
  void require_whole_files() const;

  // [rows, cols] and [size] of a floating type.
  MatrixView matrix(const std::string& name, std::int64_t rows, std::int64_t cols);
  VectorView vector(const std::string& name, std::int64_t size);
  // The weight of a linear module: "<module>.weight", or its four-bit form.
  MatrixView module(const std::string& module, std::int64_t rows, std::int64_t cols);
  bool has_module(const std::string& module) const;
  void prefetch_module(const std::string& module) const;
  // The type of a module's or a packed tensor's weight; nothing if it is not there.
  std::optional<DType> type_of_module(const std::string& module) const;
  std::optional<DType> type_of_packed(const std::string& name) const;

  // Matrix `index` of `count` in gpt-oss's four-bit form: "<name>_blocks", [count, rows, cols / 32,
  // 16], with "<name>_scales", [count, rows, cols / 32].
  MatrixView blocks(const std::string& name, std::int64_t count, std::int64_t index,
                    std::int64_t rows, std::int64_t cols);
  bool has_blocks(const std::string& name) const { return index_.has(name + "_blocks"); }
  // Attaches the scales of `matrices` consecutive FP8 matrices stored as one tensor, to the view of
  // number `index`. A view whose col_stride is not 1 is stored transposed, as are its scales.
  void attach_scale(MatrixView& view, const std::string& name, std::int64_t matrices,
                    std::int64_t index);
  // Half 0 (gate) or 1 (up) of the rows of a packed gate_up matrix.
  MatrixView half(const MatrixView& both, int which, bool interleaved);

  [[noreturn]] void bad_shape(const Located& tensor, const std::string& expected) const;
  // `tensor` as a weight or bias dtype.
  DType float_dtype(const Located& tensor) const;
  // The tensor's data, aligned for its dtype: mapped if the file aligns it, else copied.
  const std::byte* aligned_data(const Located& tensor, std::size_t alignment);
  std::string method_text() const;  // " (quantization fp8)", or nothing

 private:
  // The layout of a matrix's scales: rows x cols of them, each of a block of the matrix.
  struct ScaleGrid {
    std::int64_t rows, cols, block_rows, block_cols;
  };

  static bool is_aligned(const Located& tensor, std::size_t alignment);
  const float* scale_values(const Located& tensor, std::size_t count);
  static bool is_bytes(const Located& tensor);
  Located find_scale(const std::string& name) const;
  ScaleGrid scale_grid(const Located& tensor, const std::vector<std::int64_t>& shape,
                       std::int64_t rows, std::int64_t cols, bool transposed) const;
  const float* transposed_scales(const Located& tensor, const float* scales, std::int64_t matrices,
                                 const ScaleGrid& grid);
  void take_scales(MatrixView& view, const MatrixView& both, std::int64_t first, std::int64_t step);
  // What config.json says of four-bit weights. Throws Error{kUnsupported} where it says nothing
  // that can be read.
  const FourBitFormat& four_bit_format(const std::string& name) const;
  // The same for layouts that have nothing but MXFP4.
  const FourBitFormat& mxfp4_format(const std::string& name) const;
  void require_shape(const Located& tensor, const std::vector<std::int64_t>& shape) const;
  void require_type(const Located& tensor, std::initializer_list<std::string_view> types) const;
  MatrixView four_bit_view(std::int64_t rows, std::int64_t cols, const FourBitFormat& format) const;
  MatrixView native_mxfp4(const std::string& module, std::int64_t rows, std::int64_t cols);
  MatrixView compressed(const std::string& module, std::int64_t rows, std::int64_t cols);
  // Checks the shape that a checkpoint states, if it does.
  void require_stored_shape(const std::string& name, std::int64_t rows, std::int64_t cols) const;
  // The codes of zero points that are packed along rows, a byte each.
  const std::uint8_t* zero_points(const std::string& name, std::int64_t rows, std::int64_t groups);

  const TensorIndex& index_;
  const Quantization& quantization_;
  const std::shared_ptr<LayerOwner> owner_;
  std::unordered_map<const TensorInfo*, const float*> converted_, transposed_;  // scales
  mutable std::set<const SafetensorsFile*> checked_;  // that have not become shorter
};

}  // namespace switchyard
