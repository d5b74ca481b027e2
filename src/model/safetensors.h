// The safetensors format: 8 bytes of little-endian header length N, N bytes of JSON, tensor data.
// Reading maps the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/mapped_file.h"
#include "switchyard/tensor.h"

namespace switchyard {

struct TensorInfo {
  std::string name;
  std::string dtype;                // as the file spells it: "BF16", "F8_E4M3", ...
  std::vector<std::int64_t> shape;  // [] is a scalar
  std::uint64_t begin = 0;          // bytes from the start of the data section
  std::uint64_t end = 0;

  std::uint64_t bytes() const { return end - begin; }
};

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // in file order
  std::map<std::string, std::string> metadata;
  std::uint64_t data_begin = 0;  // bytes from the start of the file
};

// The library's type for a dtype name, if it has one.
std::optional<DType> dtype_from_name(std::string_view name);
// "F32", "BF16", ...
const char* safetensors_name(DType dtype);
// Bytes of a tensor's data. None if the dtype is unknown, or the product overflows 64 bits or ends
// inside a byte.
std::optional<std::uint64_t> tensor_bytes(std::string_view dtype,
                                          const std::vector<std::int64_t>& shape);

// Parses a header. `prefix` is the start of a file of `file_size` bytes: at least the header if
// there is one. Throws Error{kInvalidFile} naming `source`, the tensor and the byte range at fault.
// Tensors must tile the data section without holes or overlaps, and shape * dtype must equal their
// byte range. An unknown dtype is accepted here and refused when the tensor is used.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> prefix,
                                           std::uint64_t file_size, const std::string& source);

// weight_map of model.safetensors.index.json: tensor name -> file name.
std::map<std::string, std::string> parse_safetensors_index(std::string_view json_text,
                                                           const std::string& source);

// A file mapped read-only and shared. Immutable, so safe to use from many threads.
class SafetensorsFile {
 public:
  // Maps a file and parses its header. Throws Error{kSystem, kInvalidFile}.
  static std::shared_ptr<const SafetensorsFile> open(const std::filesystem::path& path);
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::filesystem::path& path() const { return mapping_->path(); }
  const SafetensorsHeader& header() const { return header_; }
  const TensorInfo* find(std::string_view name) const;  // nullptr if there is none
  const std::byte* data(const TensorInfo& tensor) const {
    return mapping_->data() + header_.data_begin + tensor.begin;
  }
  // The mapping, which knows whether the file was cut since it was opened. Ask it after reading
  // bytes.
  const MappedFile& mapping() const { return *mapping_; }
  // Asks the kernel to start reading, for tensors that every forward pass needs.
  void will_need(const TensorInfo& tensor) const;

 private:
  SafetensorsFile() = default;

  std::shared_ptr<const MappedFile> mapping_;
  SafetensorsHeader header_;
  std::unordered_map<std::string_view, const TensorInfo*> by_name_;
};

// The up to three `names` that look most like `wanted`, as "; the closest names are: a, b", or "".
std::string closest_names(std::string_view wanted, const std::vector<std::string_view>& names);

}  // namespace switchyard
