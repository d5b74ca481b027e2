// `switchyard bench`: a subcommand for each suite.
#include <algorithm>
#include <iterator>
#include <string_view>

#include "cli/bench/common.h"
#include "cli/commands.h"
#include "cli/lists.h"

namespace switchyard::cli {
namespace {

constexpr std::string_view kSuites[] = {"layers",     "grouped", "exchange", "hosts",
                                        "all_to_all", "chain",   "late"};

bool is_suite(std::string_view name) {
  return std::find(std::begin(kSuites), std::end(kSuites), name) != std::end(kSuites);
}

}  // namespace

// Rows of older versions have commands such as `bench --suite grouped` and `bench --model olmoe`.
std::vector<std::string> with_suite_first(std::vector<std::string> arguments) {
  if (arguments.empty() || arguments.front() != "bench") return arguments;
  if (arguments.size() > 1) {
    const std::string& next = arguments[1];
    if (is_suite(next) || next == "--help" || next == "-h" || !next.starts_with("-")) {
      return arguments;
    }
  }
  std::string suite = "layers";
  for (auto at = arguments.begin(); at != arguments.end(); ++at) {
    const bool apart = *at == "--suite" && std::next(at) != arguments.end();
    const std::string name = apart                         ? *std::next(at)
                             : at->starts_with("--suite=") ? at->substr(8)
                                                           : "";
    if (!is_suite(name)) continue;
    suite = name;
    arguments.erase(at, at + (apart ? 2 : 1));
    break;
  }
  arguments.insert(arguments.begin() + 1, suite);
  return arguments;
}

void add_bench(CommandLine& line, const std::vector<std::string>& arguments) {
  Command& bench =
      line.add_command("bench", "Time layers and their parts, beside the hardware's floor");
  const std::string typed = command_of(arguments);
  add_layers(bench, typed);
  add_grouped(bench, typed);
  add_exchange(bench, typed);
  add_hosts(bench, typed);
  add_all_to_all(bench, typed);
  add_chain(bench, typed);
  add_late(bench, typed);
  bench.footer(
      R"('switchyard bench SUITE --help' tells more of a suite. Without a suite it is 'bench layers', and
'bench --suite grouped' is 'bench grouped'.

Exit codes: 0 done; 1 a result is wrong or a point failed; 2 unusable arguments or machine.)");
}

}  // namespace switchyard::cli
