#include "model/safetensors.h"

#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <tuple>

#include "base/file_error.h"
#include "base/foreign_file.h"
#include "base/join.h"
#include "base/json.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

constexpr std::uint64_t kLengthBytes = 8;
// The reference implementation's limit.
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
// A cache line, so that views of the first tensor are aligned for any vector load.
constexpr std::uint64_t kDataAlignment = 64;

struct DTypeName {
  std::string_view name;
  unsigned bits;
  std::optional<DType> dtype;
};
constexpr DTypeName kDTypes[] = {
    {"F32", 32, DType::kF32},       {"F16", 16, DType::kF16},  {"BF16", 16, DType::kBF16},
    {"F8_E4M3", 8, DType::kF8E4M3}, {"I32", 32, DType::kI32},  {"I64", 64, DType::kI64},
    {"U8", 8, DType::kU8},          {"F64", 64, std::nullopt}, {"F8_E5M2", 8, std::nullopt},
    {"F8_E8M0", 8, std::nullopt},   {"I8", 8, std::nullopt},   {"I16", 16, std::nullopt},
    {"U16", 16, std::nullopt},      {"U32", 32, std::nullopt}, {"U64", 64, std::nullopt},
    {"BOOL", 8, std::nullopt},      {"F4", 4, std::nullopt},
};

const DTypeName* find_dtype(std::string_view name) {
  for (const DTypeName& entry : kDTypes)
    if (entry.name == name) return &entry;
  return nullptr;
}

[[noreturn]] void bad_file(const std::string& source, const std::string& problem) {
  throw Error(ErrorCode::kInvalidFile, fmt::format("{}: {}", printable(source), problem));
}

std::optional<std::uint64_t> unsigned_value(const Json& value) {
  if (value.is_unsigned()) return value.unsigned_integer();
  return std::nullopt;
}

// Bytes of a tensor, or nothing if the product overflows 64 bits or ends inside a byte.
std::optional<std::uint64_t> byte_size(const std::vector<std::int64_t>& shape, unsigned bits) {
  // A zero anywhere makes the tensor empty, whatever the other extents multiply to.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  std::uint64_t total = bits;
  for (const std::int64_t extent : shape)
    if (__builtin_mul_overflow(total, static_cast<std::uint64_t>(extent), &total))
      return std::nullopt;
  if (total % 8 != 0) return std::nullopt;
  return total / 8;
}

TensorInfo parse_tensor(const std::string& name, const Json& entry, std::uint64_t data_bytes,
                        const std::string& source) {
  const auto fail = [&](const std::string& problem) {
    bad_file(source, fmt::format("tensor '{}' {}; the header is damaged, download the file again",
                                 printable(name), problem));
  };
  if (!entry.is_object()) fail("is not described by an object");
  for (const char* key : {"dtype", "shape", "data_offsets"})
    if (!entry.contains(key)) fail(fmt::format("has no '{}'", key));

  TensorInfo info;
  info.name = name;
  const Json& dtype = *entry.find("dtype");
  if (!dtype.is_string()) fail(fmt::format("has dtype {}, not a string", excerpt(dtype)));
  info.dtype = dtype.text();

  const Json& shape = *entry.find("shape");
  if (!shape.is_array()) fail(fmt::format("has shape {}, not an array", excerpt(shape)));
  for (const Json& extent : shape.elements()) {
    const std::optional<std::uint64_t> value = unsigned_value(extent);
    if (!value || *value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
      fail(fmt::format("has extent {} in its shape", excerpt(extent)));
    info.shape.push_back(static_cast<std::int64_t>(*value));
  }

  const Json& offsets = *entry.find("data_offsets");
  if (!offsets.is_array() || offsets.elements().size() != 2)
    fail(fmt::format("has data_offsets {}, not [begin, end]", excerpt(offsets)));
  const std::optional<std::uint64_t> begin = unsigned_value(offsets.elements()[0]);
  const std::optional<std::uint64_t> end = unsigned_value(offsets.elements()[1]);
  if (!begin || !end || *begin > *end)
    fail(fmt::format("has data_offsets {}, not [begin, end]", excerpt(offsets)));
  info.begin = *begin;
  info.end = *end;
  if (info.end > data_bytes)
    bad_file(source,
             fmt::format("tensor '{}' ends at byte {} of the data, but the file has only {} "
                         "bytes of data; it is truncated, download it again",
                         printable(name), info.end, data_bytes));
  if (const DTypeName* known = find_dtype(info.dtype)) {
    const std::optional<std::uint64_t> needed = byte_size(info.shape, known->bits);
    if (!needed || *needed != info.bytes())
      fail(fmt::format("has shape [{}] of {}, which is {} bytes, but data_offsets span {}",
                       join(info.shape, ", "), info.dtype,
                       needed ? fmt::format("{}", *needed) : "an impossible number of",
                       info.bytes()));
  }
  return info;
}

void require_tiling(const std::vector<TensorInfo>& tensors, std::uint64_t data_bytes,
                    const std::string& source) {
  std::uint64_t position = 0;
  std::string_view previous = "the header";
  for (const TensorInfo& tensor : tensors) {
    if (tensor.begin < position)
      bad_file(source,
               fmt::format("tensor '{}' begins at byte {} of the data, inside '{}', which "
                           "ends at {}; the header is damaged, download the file again",
                           printable(tensor.name), tensor.begin, printable(previous), position));
    if (tensor.begin > position)
      bad_file(source, fmt::format("bytes {} to {} of the data, before tensor '{}', belong to no "
                                   "tensor; the header is damaged, download the file again",
                                   position, tensor.begin, printable(tensor.name)));
    position = tensor.end;
    previous = tensor.name;
  }
  if (position != data_bytes)
    bad_file(source, fmt::format("the last tensor ends at byte {} of the data, but the file has {} "
                                 "bytes of data; the header is damaged, download the file again",
                                 position, data_bytes));
}

std::string json_string(const std::string& text) { return Json(text).dump({.ascii = true}); }

}  // namespace

std::optional<DType> dtype_from_name(std::string_view name) {
  const DTypeName* entry = find_dtype(name);
  return entry ? entry->dtype : std::nullopt;
}

const char* safetensors_name(DType dtype) {
  for (const DTypeName& entry : kDTypes)
    if (entry.dtype == dtype) return entry.name.data();
  return "unknown";
}

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> prefix,
                                           std::uint64_t file_size, const std::string& source) {
  if (file_size == 0) bad_file(source, "is empty; download it again");
  const std::string what =
      foreign_contents({reinterpret_cast<const char*>(prefix.data()), prefix.size()});
  if (!what.empty()) bad_file(source, what);
  if (file_size < kLengthBytes || prefix.size() < kLengthBytes)
    bad_file(source, fmt::format("is {} bytes long; a safetensors file has at least 8, download it "
                                 "again",
                                 file_size));
  std::uint64_t length = 0;
  std::memcpy(&length, prefix.data(), kLengthBytes);
  if (length > kMaxHeaderBytes)
    bad_file(source, fmt::format("announces a header of {} bytes; the format allows at most {}, so "
                                 "this is not a safetensors file",
                                 length, kMaxHeaderBytes));
  if (length > file_size - kLengthBytes || length > prefix.size() - kLengthBytes)
    bad_file(source, fmt::format("announces a header of {} bytes, but only {} follow; it is "
                                 "truncated, download it again",
                                 length, file_size - kLengthBytes));
  const std::string_view text(reinterpret_cast<const char*>(prefix.data()) + kLengthBytes,
                              static_cast<std::size_t>(length));
  const Json document = parse_json(text, ErrorCode::kInvalidFile, source);
  if (!document.is_object())
    bad_file(source,
             fmt::format("has {} as its header, not an object; it is not a safetensors file",
                         excerpt(document)));

  SafetensorsHeader header;
  header.data_begin = kLengthBytes + length;
  const std::uint64_t data_bytes = file_size - header.data_begin;
  for (const auto& [name, entry] : document.members()) {
    if (name == "__metadata__") {
      if (!entry.is_object()) bad_file(source, "has a __metadata__ that is not an object");
      for (const auto& [key, value] : entry.members()) {
        if (!value.is_string())
          bad_file(source, fmt::format("has {} in __metadata__, where only strings are allowed",
                                       excerpt(value)));
        header.metadata[key] = value.text();
      }
      continue;
    }
    header.tensors.push_back(parse_tensor(name, entry, data_bytes, source));
  }
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) {
              return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
            });
  require_tiling(header.tensors, data_bytes, source);
  return header;
}

std::map<std::string, std::string> parse_safetensors_index(std::string_view json_text,
                                                           const std::string& source) {
  const Json document = parse_json(json_text, ErrorCode::kInvalidFile, source);
  const Json* const entries = document.find("weight_map");
  if (entries == nullptr || !entries->is_object())
    bad_file(source, "has no 'weight_map' object; download the index again");
  std::map<std::string, std::string> weight_map;
  for (const auto& [name, file] : entries->members()) {
    if (!file.is_string() || file.text().empty() ||
        file.text().find_first_of(std::string_view("/\0", 2)) != std::string::npos)
      bad_file(source,
               fmt::format("maps tensor '{}' to {}; expected the name of a file in the same "
                           "directory",
                           printable(name), excerpt(file)));
    weight_map[name] = file.text();
  }
  return weight_map;
}

std::string safetensors_index_json(const std::map<std::string, std::string>& weight_map,
                                   std::uint64_t total_bytes) {
  std::string text =
      fmt::format("{{\n  \"metadata\": {{\"total_size\": {}}},\n  \"weight_map\": {{", total_bytes);
  const char* separator = "\n";
  for (const auto& [name, file] : weight_map) {
    text += fmt::format("{}    {}: {}", separator, json_string(name), json_string(file));
    separator = ",\n";
  }
  return text + "\n  }\n}\n";
}

std::shared_ptr<const SafetensorsFile> SafetensorsFile::open(const std::filesystem::path& path) {
  std::shared_ptr<SafetensorsFile> file(new SafetensorsFile);
  file->mapping_ = MappedFile::map(path);
  const MappedFile& mapping = *file->mapping_;
  try {
    file->header_ =
        parse_safetensors_header({mapping.data(), mapping.size()}, mapping.size(), path.string());
  } catch (const Error&) {
    mapping.require_whole();  // it says more of a header that was cut just now
    throw;
  }
  for (const TensorInfo& tensor : file->header_.tensors) file->by_name_[tensor.name] = &tensor;
  return file;
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

void SafetensorsFile::will_need(const TensorInfo& tensor) const {
  const std::uintptr_t page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(data(tensor));
  const std::uintptr_t aligned = begin / page * page;
  // This is only a hint: a kernel that refuses it still reads the pages when they are touched.
  ::madvise(reinterpret_cast<void*>(aligned),
            static_cast<std::size_t>(begin + tensor.bytes() - aligned), MADV_WILLNEED);
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     std::vector<TensorInfo> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : file_(path) {
  std::string header = "{";
  const char* separator = "";
  if (!metadata.empty()) {
    header += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      header += fmt::format("{}{}:{}", separator, json_string(key), json_string(value));
      separator = ",";
    }
    header += "}";
  }
  for (TensorInfo& tensor : tensors) {
    const DTypeName* dtype = find_dtype(tensor.dtype);
    const std::optional<std::uint64_t> bytes =
        dtype ? byte_size(tensor.shape, dtype->bits) : std::nullopt;
    if (!bytes)
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("cannot write tensor '{}' of dtype {} and shape [{}]; give it a known "
                      "dtype and a smaller shape",
                      printable(tensor.name), printable(tensor.dtype), join(tensor.shape, ", ")));
    tensor.begin = announced_;
    announced_ += *bytes;
    tensor.end = announced_;
    header += fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                          separator, json_string(tensor.name), tensor.dtype,
                          join(tensor.shape, ","), tensor.begin, tensor.end);
    separator = ",";
  }
  header += "}";
  while ((kLengthBytes + header.size()) % kDataAlignment != 0) header += ' ';

  const std::uint64_t length = header.size();
  std::array<std::byte, kLengthBytes> length_bytes;
  std::memcpy(length_bytes.data(), &length, kLengthBytes);
  file_.write(length_bytes);
  file_.write(std::as_bytes(std::span(header)));
}

void SafetensorsWriter::append(std::span<const std::byte> piece) {
  if (piece.size() > announced_ - appended_)
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: {} bytes appended to a file announced as {}; announce every tensor",
                    printable(file_.path()), appended_ + piece.size(), announced_));
  file_.write(piece);
  appended_ += piece.size();
}

void SafetensorsWriter::finish() {
  if (appended_ != announced_)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: finished after {} of {} announced bytes; append the rest",
                            printable(file_.path()), appended_, announced_));
  file_.finish();
}

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
                    ? fmt::format("{}: has {} tensors; name the one to read{}", printable(path),
                                  tensors.size(), closest_names("", names))
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

std::string closest_names(std::string_view wanted, const std::vector<std::string_view>& names) {
  // Shared prefix plus shared suffix: checkpoint names differ in the middle (a layer, an expert) or
  // in one component, and there can be a hundred thousand of them.
  const auto likeness = [&](std::string_view name) {
    const std::size_t shorter = std::min(name.size(), wanted.size());
    std::size_t prefix = 0;
    while (prefix < shorter && name[prefix] == wanted[prefix]) ++prefix;
    std::size_t suffix = 0;
    while (suffix < shorter - prefix &&
           name[name.size() - 1 - suffix] == wanted[wanted.size() - 1 - suffix])
      ++suffix;
    return prefix + suffix;
  };
  std::vector<std::pair<std::size_t, std::string_view>> ranked;
  for (const std::string_view name : names) ranked.emplace_back(likeness(name), name);
  const std::size_t shown = std::min<std::size_t>(ranked.size(), 3);
  std::partial_sort(ranked.begin(), ranked.begin() + static_cast<std::ptrdiff_t>(shown),
                    ranked.end(), [](const auto& a, const auto& b) {
                      return a.first != b.first ? a.first > b.first : a.second < b.second;
                    });
  if (shown == 0) return "";
  std::string text = "; the closest names are: ";
  for (std::size_t i = 0; i < shown; ++i)
    text += fmt::format("{}{}", i ? ", " : "", printable(ranked[i].second));
  return text;
}

}  // namespace switchyard
