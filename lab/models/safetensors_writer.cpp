#include "models/safetensors_writer.h"

#include <fmt/core.h>

#include <array>
#include <cstring>
#include <optional>

#include "base/join.h"
#include "base/json.h"
#include "base/printable.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

constexpr std::uint64_t kLengthBytes = 8;
// A cache line, so that views of the first tensor are aligned for any vector load.
constexpr std::uint64_t kDataAlignment = 64;

std::string json_string(const std::string& text) { return Json(text).dump({.ascii = true}); }

}  // namespace

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
    const std::optional<std::uint64_t> bytes = tensor_bytes(tensor.dtype, tensor.shape);
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

}  // namespace switchyard
