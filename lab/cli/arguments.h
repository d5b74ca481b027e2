// The command line: subcommands and their options. It is read strictly. A text that is not entirely
// a number in range is refused, and the error names the option, the text and the range.
//
// CLI11 does the parsing. Only arguments.cpp includes that library, because compiling it takes
// seven seconds in every file that does.
#pragma once

#include <chrono>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "switchyard/layer.h"
#include "switchyard/tensor.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace switchyard::cli {

inline constexpr int kExitOk = 0;
inline constexpr int kExitVerification = 1;  // computed, but wrong; or a check did not pass
inline constexpr int kExitInvalid = 2;       // arguments, files or this machine do not allow it
inline constexpr int kExitTimeout = 3;       // a rank did not do its part
inline constexpr int kExitInternal = 4;

// The role that an element type is chosen for.
enum class TypeOf {
  kArithmetic,  // of a layer
  kOperands,    // weights and tokens alike: f16, too
  kWeights,     // those of four bits, too
};
// The types for a role, for messages and helps: "bf16, f32 or fp8".
std::string type_names(TypeOf use);

// An option of a command, which owns it.
class Option {
 public:
  explicit Option(CLI::Option& option) : option_(&option) {}

  Option& required();
  Option& needs(const Option& other);

 private:
  CLI::Option* option_;
};

// A subcommand. The targets of its options must live as long as the command. `name` may hold
// several names of an option, as in "-o,--output". A name without a dash makes a positional
// argument. `type` is what the help calls the option's values.
class Command {
 public:
  Command(CLI::App& app, std::string name) : app_(app), name_(std::move(name)) {}
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  // With those of the commands that it belongs to: "bench grouped".
  const std::string& name() const { return name_; }
  const CLI::App& app() const { return app_; }

  const std::vector<std::unique_ptr<Command>>& commands() const { return commands_; }
  // A command that has others does nothing by itself.
  Command& add_command(const std::string& name, const std::string& description);

  // Sets the help's heading above the options that are added from now on.
  void heading(const std::string& text) { heading_ = text; }
  // Sets the text at the end of the help.
  void footer(const std::string& text);
  // Leaves the first argument that is not an option, and all arguments after it, to another
  // command. taken_command() returns them.
  void takes_command();
  // Sets what run() does once the options are set. `action` returns the exit code.
  void runs(std::function<int()> action) { action_ = std::move(action); }
  int run() const { return action_(); }

  Option add_flag(const std::string& name, bool& target, const std::string& help);
  Option add_text(const std::string& name, std::string& target, const std::string& type,
                  const std::string& help);
  // Takes one or more values.
  Option add_texts(const std::string& name, std::vector<std::string>& target,
                   const std::string& type, const std::string& help);
  // Calls `set` with the text. `set` throws Error to refuse it.
  Option add_parsed(const std::string& name, const std::function<void(const std::string&)>& set,
                    const std::string& type, const std::string& help);

  template <typename Integer>
  Option add_whole(const std::string& name, Integer& target, std::int64_t smallest,
                   std::int64_t largest, const std::string& help) {
    const auto set = [&target](std::int64_t value) { target = static_cast<Integer>(value); };
    return add_whole_number(name, set, smallest, largest, help);
  }
  Option add_real(const std::string& name, std::optional<double>& target, double smallest,
                  double largest, const std::string& help);
  Option add_seconds(const std::string& name, std::chrono::milliseconds& target,
                     const std::string& help);
  Option add_bytes(const std::string& name, std::uint64_t& target, const std::string& help);
  // Takes the names of type_names(), and the library's own of four-bit types.
  Option add_dtype(const std::string& name, std::optional<DType>& target, TypeOf use,
                   const std::string& help);
  // Takes cpu or cuda.
  Option add_backend(const std::string& name, std::optional<Backend>& target,
                     const std::string& help);

  // An option that was added before.
  Option option(const std::string& name) const;

  // These are valid once the command line is read. has() tells whether an option was given.
  bool has(const std::string& option) const;
  // An option and what was given to it, for messages: "--late 5".
  std::string told(const std::string& option) const;
  std::vector<std::string> taken_command() const;

 private:
  Option add_whole_number(const std::string& name, const std::function<void(std::int64_t)>& set,
                          std::int64_t smallest, std::int64_t largest, const std::string& help);
  Option add(CLI::Option& option) const;

  friend class CommandLine;

  CLI::App& app_;
  std::string name_, heading_;
  std::function<int()> action_;
  std::vector<std::unique_ptr<Command>> commands_;
};

struct ProgramText {
  std::string name, description, version, footer;
};

class CommandLine {
 public:
  explicit CommandLine(const ProgramText& text);
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  Command& add_command(const std::string& name, const std::string& description);

  // Sets the options of the command that the arguments name, and returns the command. If they ask
  // for help or the version, it prints that and returns null. Throws Error{kInvalidArgument}.
  const Command* read(std::vector<std::string> arguments);

 private:
  std::string describe_unexpected(const std::vector<std::string>& arguments,
                                  const Command* command) const;
  // The last command that the arguments name, or null.
  const Command* parsed() const;

  std::unique_ptr<CLI::App> root_;
  std::vector<std::unique_ptr<Command>> commands_;
};

}  // namespace switchyard::cli
