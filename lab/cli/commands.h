// The subcommands. Each function adds one to the command line.
#pragma once

#include <string>
#include <vector>

#include "cli/arguments.h"

namespace switchyard::cli {

void add_run(CommandLine& line);
void add_trace(CommandLine& line);
void add_make_checkpoint(CommandLine& line);
void add_models(CommandLine& line);
void add_doctor(CommandLine& line);
void add_report(CommandLine& line);
// `arguments` is the command line as it was typed. The results note it.
void add_bench(CommandLine& line, const std::vector<std::string>& arguments);
// Puts the suite, of `bench --suite grouped` say, where its command stands.
std::vector<std::string> with_suite_first(std::vector<std::string> arguments);
void add_tune(CommandLine& line, const std::vector<std::string>& arguments);
// `after_dashes` are the arguments behind a "--", which the parser does not see.
void add_launch(CommandLine& line, std::vector<std::string> after_dashes);

}  // namespace switchyard::cli
