// Any bytes are either a ModelConfig whose specs are valid or a typed error with a harmless
// message.
//   fuzz_config fuzz/corpus/config -max_len=4096

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "message.h"
#include "model/config.h"
#include "switchyard/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace switchyard;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const ModelConfig config = parse_config(text, "config.json");
    if (config.moe_layers().empty()) std::abort();
    for (const int layer : config.moe_layers())
      validate(*config.layers.at(static_cast<std::size_t>(layer)));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidConfig) std::abort();
    require_harmless(error);
    return 0;
  }
  try {
    // Whatever parses can be scaled down or is refused as an argument.
    rewrite_config(text,
                   {.num_moe_layers = 1,
                    .num_experts = 8,
                    .top_k = 2,
                    .hidden = 16,
                    .intermediate = 8,
                    .vocab_size = 32},
                   DType::kF8E4M3);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) std::abort();
    require_harmless(error);
  }
  return 0;
}
