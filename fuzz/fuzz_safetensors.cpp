// Any bytes are either a header whose tensors lie within the file and whose names can be shown, or
// a typed error with a harmless message. The first byte chooses how the rest is read: as a file, as
// the JSON of a header whose length and data section are made up to fit, or as an index.
//   fuzz_safetensors fuzz/corpus/safetensors -max_len=4096

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/printable.h"
#include "message.h"
#include "model/safetensors.h"
#include "switchyard/error.h"

namespace {

using namespace switchyard;

void parse_file(std::span<const std::byte> bytes, std::uint64_t file_size) {
  const SafetensorsHeader header = parse_safetensors_header(bytes, file_size, "file");
  std::uint64_t position = 0;
  for (const TensorInfo& tensor : header.tensors) {
    if (tensor.begin != position || tensor.end < tensor.begin) std::abort();
    position = tensor.end;
    const std::string name = printable(tensor.name);
    if (!test::is_shown_safely(name) || name.size() > kMostShown) std::abort();
  }
  if (header.data_begin + position != file_size) std::abort();
}

void parse_header_json(std::span<const std::byte> json) {
  std::vector<std::byte> file(8 + json.size());
  const std::uint64_t length = json.size();
  std::memcpy(file.data(), &length, sizeof(length));
  std::memcpy(file.data() + 8, json.data(), json.size());
  // Data sizes that the seeds' tensors fill exactly; the parser never touches the data itself.
  for (const std::uint64_t data_bytes : {0u, 4u, 16u, 64u, 1024u}) {
    try {
      parse_file(file, file.size() + data_bytes);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kInvalidFile) std::abort();
      require_harmless(error);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::span<const std::byte> rest(reinterpret_cast<const std::byte*>(data) + 1, size - 1);
  try {
    switch (data[0] % 3) {
      case 0: parse_file(rest, rest.size()); break;
      case 1: parse_header_json(rest); break;
      default:
        parse_safetensors_index({reinterpret_cast<const char*>(rest.data()), rest.size()}, "index");
        break;
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidFile) std::abort();
    require_harmless(error);
  }
  return 0;
}
