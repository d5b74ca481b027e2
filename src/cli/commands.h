// The subcommands. Each adds itself to the root and says how to run it.
#pragma once

#include <string>
#include <vector>

#include "cli/arguments.h"

namespace switchyard::cli {

Subcommand add_run(CLI::App& root);
Subcommand add_trace(CLI::App& root);
Subcommand add_make_checkpoint(CLI::App& root);
Subcommand add_models(CLI::App& root);
Subcommand add_doctor(CLI::App& root);
Subcommand add_report(CLI::App& root);
// `arguments`: the command line as it was typed, to be noted beside the results.
Subcommand add_bench(CLI::App& root, const std::vector<std::string>& arguments);
// `after_dashes`: the arguments behind a "--", which the parser does not see.
Subcommand add_launch(CLI::App& root, std::vector<std::string> after_dashes);

}  // namespace switchyard::cli
