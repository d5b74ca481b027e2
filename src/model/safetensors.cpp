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

std::optional<std::uint64_t> tensor_bytes(std::string_view dtype,
                                          const std::vector<std::int64_t>& shape) {
  const DTypeName* known = find_dtype(dtype);
  return known == nullptr ? std::nullopt : byte_size(shape, known->bits);
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
