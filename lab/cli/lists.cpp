#include "cli/lists.h"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <sstream>
#include <string_view>

#include "base/printable.h"
#include "common/numbers.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

// Splits a text at its commas. Throws Error{kInvalidArgument} if a word is empty.
std::vector<std::string> split(const std::string& name, const std::string& text) {
  std::vector<std::string> words;
  std::istringstream stream(text + ',');
  for (std::string word; std::getline(stream, word, ',');) {
    if (word.empty()) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("{} is '{}'; separate the values by single commas", name, printable(text)));
    }
    words.push_back(word);
  }
  return words;
}

}  // namespace

void add_names(Command& command, const std::string& name, std::vector<std::string>& target,
               const std::string& help) {
  const auto set = [name, &target](const std::string& text) { target = split(name, text); };
  command.add_parsed(name, set, "NAME,...", help);
}

void add_wholes(Command& command, const std::string& name, std::vector<std::int64_t>& target,
                std::int64_t largest, const std::string& help) {
  const auto set = [name, &target, largest](const std::string& text) {
    target.clear();
    for (const std::string& word : split(name, text)) {
      const std::optional<std::int64_t> value = parse_whole(word);
      if (!value || *value < 1 || *value > largest) {
        throw Error(ErrorCode::kInvalidArgument,
                    fmt::format("{} is '{}'; give whole numbers from 1 to {}, separated by commas",
                                name, printable(text), largest));
      }
      target.push_back(*value);
    }
  };
  command.add_parsed(name, set, "N,...", help);
}

void add_fractions(Command& command, const std::string& name, std::vector<double>& target,
                   const std::string& help) {
  const auto set = [name, &target](const std::string& text) {
    target.clear();
    for (const std::string& word : split(name, text)) {
      const std::optional<double> value = parse_real(word);
      if (!value || *value < 0 || *value > 1) {
        throw Error(ErrorCode::kInvalidArgument,
                    fmt::format("{} is '{}'; give numbers from 0 to 1, separated by commas", name,
                                printable(text)));
      }
      target.push_back(*value);
    }
  };
  command.add_parsed(name, set, "X,...", help);
}

std::string command_of(const std::vector<std::string>& arguments) {
  constexpr std::string_view kOwn[] = {"--json", "--commit", "--torch-script", "--python",
                                       "-o",     "--out",    "--regions",      "--trace"};
  std::string command = "switchyard";
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view argument = arguments[i];
    const std::string_view name = argument.substr(0, argument.find('='));
    if (std::find(std::begin(kOwn), std::end(kOwn), name) == std::end(kOwn)) {
      command += ' ' + arguments[i];
    } else if (name == argument) {
      ++i;  // the value is the next one
    }
  }
  return command;
}

}  // namespace switchyard::cli
