#include "layer/ids.h"

#include <fmt/core.h>

namespace switchyard {

std::string bad_id_text(const char* name, std::uint64_t token, std::uint64_t k, std::int64_t id,
                        int num_experts) {
  return fmt::format("{}[{}][{}] is {}; expert ids are 0 to {}, or {} for none{}", name, token, k,
                     id, num_experts - 1, kNoExpert,
                     id < num_experts ? ""
                                      : " (with large_ids_are_none those of num_experts or more, "
                                        "too)");
}

std::string named_twice_text(std::uint64_t token, std::int64_t id) {
  return fmt::format("token {} names expert {} twice; ids must be distinct within a token", token,
                     id);
}

}  // namespace switchyard
