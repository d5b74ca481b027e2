// `switchyard launch`: a command as the ranks of a world of processes on this host.
#include "fabric/launch.h"

#include <fmt/format.h>

#include <memory>

#include "base/printable.h"
#include "cli/commands.h"
#include "protocol/control.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

constexpr const char* kExamples = R"(Examples:
  switchyard launch -n 4 -- switchyard run --model olmoe --tokens 1024
  switchyard launch -n 2 --label -- ./my_program --its-own-option

The exit code is that of the rank that failed first; 124 if --timeout passed; 127 if the command
cannot be run.)";

}  // namespace

Subcommand add_launch(CLI::App& root, std::vector<std::string> after_dashes) {
  CLI::App* const app = root.add_subcommand(
      "launch", "Run a command as several processes: launch -n N [--] command arguments");
  const auto options = std::make_shared<LaunchOptions>();
  const auto timeout = std::make_shared<std::chrono::milliseconds>(0);
  add_whole(*app, "-n,--ranks", options->num_ranks, 1, protocol::kMaxRanks, "How many")->required();
  app->add_flag("--label", options->label_output, "Start every line with the rank that wrote it");
  add_seconds(*app, "--timeout", *timeout, "End the ranks after this time (default: never)");
  app->prefix_command();
  app->footer(kExamples);
  return {app, [app, options, timeout, after_dashes = std::move(after_dashes)] {
            options->command = app->remaining();
            if (!options->command.empty() && options->command.front().starts_with('-')) {
              throw Error(ErrorCode::kInvalidArgument,
                          fmt::format("launch has no option '{}'; see 'switchyard launch --help', "
                                      "or write '--' before a command that begins so",
                                      printable(options->command.front())));
            }
            options->command.insert(options->command.end(), after_dashes.begin(),
                                    after_dashes.end());
            if (timeout->count() > 0) options->deadline = *timeout;
            return launch(*options);
          }};
}

}  // namespace switchyard::cli
