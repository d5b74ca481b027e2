// The agreement of ranks on what each of them declares, before any of them sends a byte.
#pragma once

#include <fmt/core.h>

#include <initializer_list>
#include <string>

#include "fabric/fabric.h"

namespace switchyard {

// A value that is the same on all ranks, as a text of at most 31 bytes that differs wherever it
// does.
struct Declared {
  template <typename T>
  Declared(const char* its_name, const T& value) : name(its_name), text(fmt::format("{}", value)) {}

  const char* name;
  std::string text;
};

// Collective. Throws Error{kSpecMismatch} naming the first rank and value that differ from this
// rank's, both texts, and `remedy`.
void agree(Fabric& fabric, std::initializer_list<Declared> mine, const char* remedy);

}  // namespace switchyard
