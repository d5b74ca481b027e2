#include "models/matrix_file.h"

#include <fmt/core.h>

#include <cstring>
#include <optional>
#include <string_view>

#include "base/join.h"
#include "base/plural.h"
#include "base/printable.h"
#include "models/safetensors_writer.h"
#include "switchyard/error.h"

namespace switchyard {

OwnedMatrix read_matrix(const std::filesystem::path& path, const std::string& name) {
  return read_matrix(SafetensorsFile::open(path), name);
}

OwnedMatrix read_matrix(const std::shared_ptr<const SafetensorsFile>& file,
                        const std::string& name) {
  const std::filesystem::path& path = file->path();
  file->mapping().require_size();
  const std::vector<TensorInfo>& tensors = file->header().tensors;
  const TensorInfo* tensor = nullptr;
  if (!name.empty()) {
    tensor = file->find(name);
  } else if (tensors.size() == 1) {
    tensor = &tensors.front();
  }
  if (!tensor) {
    std::vector<std::string_view> names;
    for (const TensorInfo& candidate : tensors) names.push_back(candidate.name);
    throw Error(ErrorCode::kMissingTensor,
                name.empty()
                    ? fmt::format("{}: has {}; name the one to read{}", printable(path),
                                  plural(tensors.size(), "tensor"), closest_names("", names))
                    : fmt::format("{}: has no tensor '{}'{}", printable(path), printable(name),
                                  closest_names(name, names)));
  }
  if (tensor->shape.empty() || tensor->shape.size() > 2)
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("{}: tensor '{}' has shape [{}]; expected a matrix or a vector",
                            printable(path), printable(tensor->name), join(tensor->shape, ", ")));
  const std::optional<DType> dtype = dtype_from_name(tensor->dtype);
  if (!dtype)
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("{}: tensor '{}' has dtype {}, which cannot be read; convert it to F32, "
                    "BF16 or F16, and ids to I32 or I64",
                    printable(path), printable(tensor->name), printable(tensor->dtype)));
  OwnedMatrix result;
  result.view.dtype = *dtype;
  result.view.rows = tensor->shape.size() == 2 ? tensor->shape[0] : 1;
  result.view.cols = tensor->shape.back();
  result.view.row_stride = result.view.cols;
  const std::byte* data = file->data(*tensor);
  if (reinterpret_cast<std::uintptr_t>(data) % size_of(*dtype) == 0) {
    result.view.data = data;
    result.owner = file;
  } else {
    const std::shared_ptr<std::byte[]> copy(new std::byte[tensor->bytes()]);
    std::memcpy(copy.get(), data, tensor->bytes());
    result.view.data = copy.get();
    result.owner = copy;
  }
  return result;
}

void write_matrices(const std::filesystem::path& path, const std::vector<NamedMatrix>& matrices) {
  std::vector<TensorInfo> tensors;
  for (const NamedMatrix& matrix : matrices) {
    TensorInfo info;
    info.name = matrix.name;
    info.dtype = safetensors_name(matrix.view.dtype);
    info.shape = {matrix.view.rows, matrix.view.cols};
    tensors.push_back(std::move(info));
  }
  SafetensorsWriter writer(path, std::move(tensors));
  std::vector<std::byte> row;
  for (const NamedMatrix& matrix : matrices) {
    const MatrixView& view = matrix.view;
    const std::size_t element = size_of(view.dtype);
    row.resize(static_cast<std::size_t>(view.cols) * element);
    for (std::int64_t r = 0; r < view.rows; ++r) {
      const std::byte* source = static_cast<const std::byte*>(view.row(r));
      if (view.col_stride == 1) {
        writer.append({source, row.size()});
        continue;
      }
      for (std::int64_t c = 0; c < view.cols; ++c)
        std::memcpy(row.data() + static_cast<std::size_t>(c) * element,
                    source + static_cast<std::size_t>(c * view.col_stride) * element, element);
      writer.append(row);
    }
  }
  writer.finish();
}

}  // namespace switchyard
