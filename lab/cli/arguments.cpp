#include "cli/arguments.h"

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <span>

#include "base/join.h"
#include "base/names.h"
#include "base/printable.h"
#include "common/nearest.h"
#include "common/numbers.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

constexpr double kMostSeconds = 1e6;

constexpr DType kArithmetic[] = {DType::kBF16, DType::kF32, DType::kF8E4M3};
constexpr DType kOperands[] = {DType::kBF16, DType::kF32, DType::kF16, DType::kF8E4M3};
constexpr DType kWeights[] = {DType::kBF16,   DType::kF32,    DType::kF16,
                              DType::kF8E4M3, DType::kF4E2M1, DType::kU4};

std::span<const DType> types_for(TypeOf use) {
  switch (use) {
    case TypeOf::kArithmetic: return kArithmetic;
    case TypeOf::kOperands: return kOperands;
    case TypeOf::kWeights: return kWeights;
  }
  return kWeights;
}

[[noreturn]] void refuse(const std::string& name, const std::string& text,
                         const std::string& remedy) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} is '{}'; {}", name, printable(text), remedy));
}

// Refuses empty values. Such a value is mostly an unset variable of a script, and must not count as
// an option that was left out.
void refuse_empty_values(CLI::App& app) {
  for (CLI::Option* const option : app.get_options()) {
    if (option->get_items_expected_max() == 0) continue;  // a flag
    const auto refuse_empty = [option](const std::string& text) -> std::string {
      if (text.empty()) refuse(option->get_name(), text, "give it a value, or leave it out");
      return "";
    };
    option->check(refuse_empty);
  }
}

// Refuses an unknown command by its name, and a line without one. The parser would only say that a
// subcommand is required. `of` is the command that has the others, or empty.
void require_known(std::span<const std::string> arguments,
                   const std::vector<std::unique_ptr<Command>>& commands, const std::string& of) {
  const std::string before = of.empty() ? "" : of + ' ';
  std::vector<std::string> names;
  for (const std::unique_ptr<Command>& command : commands) {
    names.push_back(command->name().substr(before.size()));
  }
  const std::string list = fmt::format(
      "the commands{} are {}", of.empty() ? "" : fmt::format(" of {}", of), join(names, ", "));
  if (arguments.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("no command is given; {}; see 'switchyard {}--help'", list, before));
  }
  const std::string& first = arguments.front();
  if (first == "--help" || first == "-h" || (of.empty() && first == "--version")) return;
  const auto known = std::find(names.begin(), names.end(), first);
  if (known != names.end()) {
    const Command& command = *commands[static_cast<std::size_t>(known - names.begin())];
    if (!command.commands().empty()) {
      require_known(arguments.subspan(1), command.commands(), command.name());
    }
    return;
  }
  if (first.starts_with("-")) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("'{}' stands where a command is expected; {}", printable(first), list));
  }
  const std::string near = likely_name(first, names);
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("unknown command '{}{}'{}; {}", before, printable(first),
                          near.empty() ? "" : fmt::format(", perhaps '{}'", near), list));
}

// Calls `visit` for all commands, those of a command behind it.
template <typename Visit>
void for_each_command(const std::vector<std::unique_ptr<Command>>& commands, const Visit& visit) {
  for (const std::unique_ptr<Command>& command : commands) {
    visit(*command);
    for_each_command(command->commands(), visit);
  }
}

std::vector<std::string> names_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* const option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  }
  return names;
}

bool looks_like_option(const std::string& text) {
  return text.size() > 1 && text[0] == '-' && !parse_real(text);
}

// A value that was given to a flag, as in --verify=no.
std::optional<std::string> valued_flag(const std::vector<std::string>& arguments,
                                       const CLI::App& command) {
  for (const std::string& argument : arguments) {
    const std::string name = argument.substr(0, argument.find('='));
    if (name.size() == argument.size()) continue;
    for (const CLI::Option* const option : command.get_options())
      if (option->get_items_expected_max() == 0 && option->check_name(name))
        return fmt::format("'{}' gives a value to {}, which takes none; leave out '{}'",
                           printable(argument), name, printable(argument.substr(name.size())));
  }
  return std::nullopt;
}

// Says that an option is repeated, where the parser says "At Most 1 required but received 2". Other
// errors keep the parser's words.
std::string describe(const CLI::ParseError& error, const CLI::App* command) {
  if (command != nullptr && dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) {
    for (const CLI::Option* const option : command->get_options()) {
      if (option->get_items_expected_max() != 1 || option->count() <= 1) continue;
      return fmt::format("{} is given {} times; give it once", option->get_name(), option->count());
    }
  }
  return printable(error.what());
}

}  // namespace

Option& Option::required() {
  option_->required();
  return *this;
}

Option& Option::needs(const Option& other) {
  option_->needs(other.option_);
  return *this;
}

Command& Command::add_command(const std::string& name, const std::string& description) {
  app_.require_subcommand(1);
  CLI::App& app = *app_.add_subcommand(name, description);
  return *commands_.emplace_back(std::make_unique<Command>(app, name_ + ' ' + name));
}

Option Command::option(const std::string& name) const { return Option(*app_.get_option(name)); }

void Command::footer(const std::string& text) { app_.footer(text); }

void Command::takes_command() { app_.prefix_command(); }

Option Command::add(CLI::Option& option) const {
  if (!heading_.empty()) option.group(heading_);
  return Option(option);
}

Option Command::add_flag(const std::string& name, bool& target, const std::string& help) {
  return add(*app_.add_flag(name, target, help)->disable_flag_override());
}

Option Command::add_text(const std::string& name, std::string& target, const std::string& type,
                         const std::string& help) {
  return add(*app_.add_option(name, target, help)->type_name(type));
}

Option Command::add_texts(const std::string& name, std::vector<std::string>& target,
                          const std::string& type, const std::string& help) {
  return add(*app_.add_option(name, target, help)->type_name(type));
}

Option Command::add_parsed(const std::string& name,
                           const std::function<void(const std::string&)>& set,
                           const std::string& type, const std::string& help) {
  return add(*app_.add_option_function<std::string>(name, set, help)->type_name(type));
}

Option Command::add_whole_number(const std::string& name,
                                 const std::function<void(std::int64_t)>& set,
                                 std::int64_t smallest, std::int64_t largest,
                                 const std::string& help) {
  const auto parse = [name, set, smallest, largest](const std::string& text) {
    const std::optional<std::int64_t> value = parse_whole(text);
    if (!value || *value < smallest || *value > largest) {
      refuse(name, text, fmt::format("give a whole number from {} to {}", smallest, largest));
    }
    set(*value);
  };
  return add_parsed(name, parse, "N", help);
}

Option Command::add_real(const std::string& name, std::optional<double>& target, double smallest,
                         double largest, const std::string& help) {
  const auto set = [name, &target, smallest, largest](const std::string& text) {
    const std::optional<double> value = parse_real(text);
    if (!value || *value < smallest || *value > largest) {
      refuse(name, text, fmt::format("give a number from {} to {}", smallest, largest));
    }
    target = *value;
  };
  return add_parsed(name, set, "X", help);
}

Option Command::add_seconds(const std::string& name, std::chrono::milliseconds& target,
                            const std::string& help) {
  const auto set = [name, &target](const std::string& text) {
    const std::optional<double> value = parse_real(text);
    if (!value || *value < 0.001 || *value > kMostSeconds) {
      refuse(name, text, fmt::format("give seconds from 0.001 to {:.0f}", kMostSeconds));
    }
    target = std::chrono::milliseconds(std::llround(*value * 1000));
  };
  return add_parsed(name, set, "SECONDS", help);
}

Option Command::add_bytes(const std::string& name, std::uint64_t& target, const std::string& help) {
  const auto set = [name, &target](const std::string& text) {
    const std::optional<std::uint64_t> value = parse_bytes(text);
    if (!value || *value == 0) {
      refuse(name, text, "give a number of bytes such as 500MB, 2GB or 1GiB");
    }
    target = *value;
  };
  return add_parsed(name, set, "BYTES", help);
}

Option Command::add_dtype(const std::string& name, std::optional<DType>& target, TypeOf use,
                          const std::string& help) {
  const auto set = [name, &target, use](const std::string& text) {
    for (const DType known : types_for(use)) {
      const bool exact = is_four_bit(known) && text == to_string(known);
      if (text != short_name(known) && !exact) continue;
      target = known;
      return;
    }
    refuse(name, text, "use " + type_names(use));
  };
  return add_parsed(name, set, "TYPE", help);
}

std::string type_names(TypeOf use) {
  const std::span<const DType> types = types_for(use);
  std::vector<std::string> names;
  for (const DType type : types.first(types.size() - 1)) names.emplace_back(short_name(type));
  return fmt::format("{} or {}", join(names, ", "), short_name(types.back()));
}

Option Command::add_backend(const std::string& name, std::optional<Backend>& target,
                            const std::string& help) {
  const auto set = [name, &target](const std::string& text) {
    for (const Backend known : {Backend::kCpu, Backend::kCuda}) {
      if (text == to_string(known)) target = known;
    }
    if (!target) refuse(name, text, "use cpu or cuda");
  };
  return add_parsed(name, set, "NAME", help);
}

bool Command::has(const std::string& option) const { return app_.count(option) > 0; }

std::string Command::told(const std::string& name) const {
  const CLI::Option& option = *app_.get_option(name);
  if (option.get_items_expected_max() == 0) return name;
  return fmt::format("{} {}", name, printable(join(option.results(), " ")));
}

std::vector<std::string> Command::taken_command() const { return app_.remaining(); }

CommandLine::CommandLine(const ProgramText& text)
    : root_(std::make_unique<CLI::App>(text.description, text.name)) {
  root_->set_version_flag("--version", text.version);
  root_->require_subcommand(1);
  root_->footer(text.footer);
  root_->get_formatter()->column_width(28);
}

CommandLine::~CommandLine() = default;

Command& CommandLine::add_command(const std::string& name, const std::string& description) {
  CLI::App& app = *root_->add_subcommand(name, description);
  return *commands_.emplace_back(std::make_unique<Command>(app, name));
}

// Names one argument that the parser could do nothing with. An option that is not known goes before
// its value, which the parser could not place either.
std::string CommandLine::describe_unexpected(const std::vector<std::string>& arguments,
                                             const Command* command) const {
  if (command == nullptr) return "there are arguments without a command";
  const std::vector<std::string> left = root_->remaining(true);  // of the command, too
  const auto is_left = [&](const std::string& argument) {
    return argument != "--" && std::find(left.begin(), left.end(), argument) != left.end();
  };
  const auto option = std::find_if(arguments.begin(), arguments.end(), [&](const auto& argument) {
    return looks_like_option(argument) && is_left(argument);
  });
  const std::string& command_name = command->name();
  if (option == arguments.end()) {
    const auto value = std::find_if(arguments.begin(), arguments.end(), is_left);
    return fmt::format(
        "'{}' was not expected: {} takes no such argument; a value stands behind "
        "its option",
        printable(value == arguments.end() ? left.front() : *value), command_name);
  }
  const std::string name = option->substr(0, option->find('='));
  std::string text = fmt::format("{} has no option '{}'", command_name, printable(name));
  std::vector<std::string> others;
  for_each_command(commands_, [&](const Command& other) {
    const std::vector<std::string> its = names_of(other.app());
    if (std::find(its.begin(), its.end(), name) != its.end()) others.push_back(other.name());
  });
  if (!others.empty()) {
    text += fmt::format("; it is an option of {}", join(others, ", "));
  } else if (const std::string near = likely_name(name, names_of(command->app())); !near.empty()) {
    text += fmt::format("; perhaps '{}' is meant", near);
  }
  return text;
}

const Command* CommandLine::parsed() const {
  const Command* last = nullptr;
  for_each_command(commands_, [&](const Command& command) {
    if (command.app().parsed()) last = &command;
  });
  return last;
}

const Command* CommandLine::read(std::vector<std::string> arguments) {
  require_known(arguments, commands_, "");
  for_each_command(commands_, [](Command& command) { refuse_empty_values(command.app_); });
  const std::vector<std::string> given = arguments;
  try {
    std::reverse(arguments.begin(), arguments.end());  // the parser takes the last one first
    root_->parse(arguments);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {  // --help, --version
      root_->exit(error);
      return nullptr;
    }
    const Command* const command = parsed();
    std::optional<std::string> text;
    if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) {
      text = describe_unexpected(given, command);
    } else if (command != nullptr) {
      text = valued_flag(given, command->app());
    }
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}; see 'switchyard{} --help'",
                            text ? *text : describe(error, command ? &command->app() : nullptr),
                            command == nullptr ? "" : " " + command->name()));
  }
  return parsed();
}

}  // namespace switchyard::cli
