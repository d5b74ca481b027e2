// Writes files of the safetensors format (model/safetensors.h). It streams, so that a tensor never
// has to fit in memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/whole_file.h"
#include "model/safetensors.h"

namespace switchyard {

// Writes a file under a temporary name beside `path`; finish() renames it. A writer destroyed
// before that leaves nothing behind.
class SafetensorsWriter {
 public:
  // `tensors`: name, dtype and shape of each, in the order in which data will be appended (begin
  // and end are filled in). The data section starts at a multiple of 64 bytes. Throws
  // Error{kSystem, kInvalidArgument}.
  SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorInfo> tensors,
                    const std::map<std::string, std::string>& metadata = {});

  // Writes the next bytes of the data section; pieces need not end where tensors do.
  void append(std::span<const std::byte> piece);
  // Renames the finished file. Throws Error{kInvalidArgument} if the appended bytes are not exactly
  // those announced.
  void finish();

 private:
  WholeFile file_;
  std::uint64_t announced_ = 0;
  std::uint64_t appended_ = 0;
};

// The text of model.safetensors.index.json.
std::string safetensors_index_json(const std::map<std::string, std::string>& weight_map,
                                   std::uint64_t total_bytes);

}  // namespace switchyard
