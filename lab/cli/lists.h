// Options whose values are lists, and the command line as results note it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/arguments.h"

namespace switchyard::cli {

// Each option takes values that single commas separate, and replaces what `target` has. A value out
// of its domain is refused, and so is an empty one.
void add_names(Command& command, const std::string& name, std::vector<std::string>& target,
               const std::string& help);
void add_wholes(Command& command, const std::string& name, std::vector<std::int64_t>& target,
                std::int64_t largest, const std::string& help);  // from 1
void add_fractions(Command& command, const std::string& name, std::vector<double>& target,
                   const std::string& help);  // from 0 to 1

// Returns the command as it was typed, without the options that do not change what is measured: the
// paths of this machine, and the commit.
std::string command_of(const std::vector<std::string>& arguments);

}  // namespace switchyard::cli
