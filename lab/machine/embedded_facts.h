// The files of lab/machine/facts/, as the build put them into the program.
#pragma once

#include <span>
#include <string_view>

namespace switchyard::machine {

struct EmbeddedFacts {
  std::string_view file, text;
};
std::span<const EmbeddedFacts> embedded_facts();

}  // namespace switchyard::machine
