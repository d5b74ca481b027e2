// `switchyard launch`: a command as the ranks of a world of processes, on this host or on several.
#include "fabric/launch.h"

#include <fmt/core.h>

#include <memory>

#include "base/printable.h"
#include "cli/commands.h"
#include "machine/host.h"
#include "protocol/control.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

constexpr const char* kExamples = R"(Examples:
  switchyard launch -n 4 -- switchyard run --model olmoe --tokens 1024
  switchyard launch -n 2 --label -- ./my_program --its-own-option
  switchyard launch -n 2 -- python my_torch_program.py                # in place of torchrun
  switchyard launch -n 8 --hosts node1,node2 -- ./my_program          # over ssh: docs/hosts.md
  switchyard launch -n 4 --namespaces 2 -- switchyard run --model olmoe --tokens 256

Ranks find the variables that torchrun sets, so torch.distributed starts as under it.

The exit code is that of the rank that failed first; 124 if --timeout passed; 127 if the command
cannot be run.)";

// Empty parts are kept: launch() refuses them by name.
std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> parts{""};
  for (const char c : text) {
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

}  // namespace

void add_launch(CommandLine& line, std::vector<std::string> after_dashes) {
  Command& command = line.add_command(
      "launch", "Run a command as several processes: launch -n N [--] command arguments");
  const auto options = std::make_shared<LaunchOptions>();
  const auto timeout = std::make_shared<std::chrono::milliseconds>(0);
  command.add_whole("-n,--ranks", options->num_ranks, 1, protocol::kMaxRanks, "How many")
      .required();
  command.add_parsed(
      "--hosts", [options](const std::string& text) { options->hosts = split_at_commas(text); },
      "HOST,...", "Deal the ranks to these machines, over ssh (default: this host)");
  command.add_whole("--namespaces", options->namespaces, 0, 64,
                    "Deal them to so many network namespaces, to try several hosts; as root");
  command.add_whole("--master-port", options->master_port, 1, 65'535,
                    "MASTER_PORT of the ranks, for torch.distributed (default: a free one)");
  command.add_flag("--label", options->label_output,
                   "Start every line with the rank that wrote it");
  command.add_seconds("--timeout", *timeout, "End the ranks after this time (default: never)");
  command.takes_command();
  command.footer(kExamples);
  command.runs([&command, options, timeout, after_dashes = std::move(after_dashes)] {
    options->command = command.taken_command();
    if (!options->command.empty() && options->command.front().starts_with('-')) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("launch has no option '{}'; see 'switchyard launch --help', or write "
                              "'--' before a command that begins so",
                              printable(options->command.front())));
    }
    options->command.insert(options->command.end(), after_dashes.begin(), after_dashes.end());
    // This command by its name: ranks are of the launcher's version, whatever is installed beside
    // it.
    if (options->hosts.empty() && !options->command.empty() &&
        options->command.front() == "switchyard") {
      options->command.front() = machine::own_executable();
    }
    if (timeout->count() > 0) options->deadline = *timeout;
    return launch(*options);
  });
}

}  // namespace switchyard::cli
