// The `switchyard` command: parses arguments, runs a subcommand, turns errors into exit codes.
#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <new>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/posix.h"
#include "base/printable.h"
#include "cli/bus_error.h"
#include "cli/commands.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

constexpr const char* kExamples = R"(Examples:
  switchyard run --model olmoe --tokens 1024 --ranks 4 --verify
  switchyard trace --model olmoe --tokens 1024 --ranks 4 -o trace.json
  switchyard make-checkpoint --model olmoe --out /tmp/olmoe
  switchyard launch -n 4 -- switchyard run --checkpoint /tmp/olmoe
  switchyard report results/one_gpu_bf16.json -o report.html
  switchyard doctor

'switchyard COMMAND --help' tells more.)";

// Opens /dev/null in place of a closed stdin, stdout or stderr. Otherwise the next file that is
// opened would take the number of the closed output, and what is printed would go there. Each is
// opened in the wrong direction, so that reading and writing still fail.
void fill_closed_outputs() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) >= 0) continue;
    // open() takes the lowest free number, which is `fd`.
    if (::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) < 0) return;
  }
}

// Holds a message as printable() would show it, but allocates nothing, because memory may have run
// out. An Error's message is printable already. The messages of other exceptions quote arguments
// and names of files as they are.
class ShownMessage {
 public:
  explicit ShownMessage(std::string_view message) {
    while (!message.empty()) {
      const ShownCharacter next = show_character(message);
      if (size_ + next.size >= bytes_.size()) break;
      std::copy_n(next.bytes.begin(), next.size, bytes_.begin() + size_);
      size_ += static_cast<std::ptrdiff_t>(next.size);
      message.remove_prefix(next.consumed);
    }
  }
  const char* c_str() const { return bytes_.data(); }

 private:
  std::array<char, 8192> bytes_{};  // ends with a 0
  std::ptrdiff_t size_ = 0;
};

// Throws nothing: if stderr is full or closed, the exit code still tells of the failure.
int fail(const char* code, const char* message, int exit_code) {
  std::fflush(stdout);
  std::fprintf(stderr, "switchyard: error (%s): %s\n", code, ShownMessage(message).c_str());
  return exit_code;
}

int fail_output(int error_number) {
  return fail(to_string(ErrorCode::kSystem),
              fmt::format("cannot write to stdout: {}; send it to a place with room",
                          error_number == 0 ? "an earlier write failed" : errno_text(error_number))
                  .c_str(),
              kExitInvalid);
}

// Returns `exit_code`, except after a success whose output could not be written.
int finish_output(int exit_code) {
  if (exit_code != kExitOk) return exit_code;
  errno = 0;
  const bool flushed = std::fflush(stdout) == 0;
  return flushed && std::ferror(stdout) == 0 ? kExitOk : fail_output(errno);
}

int exit_code_of(ErrorCode code) {
  return code == ErrorCode::kTimeout || code == ErrorCode::kAborted ? kExitTimeout : kExitInvalid;
}

// Removes "--" and what follows it from the arguments of `launch`, and returns what follows. These
// are the launched command's own arguments. The parser would hand them back to the root.
std::vector<std::string> take_after_dashes(std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments.front() != "launch") return {};
  const auto dashes = std::find(arguments.begin(), arguments.end(), "--");
  if (dashes == arguments.end()) return {};
  std::vector<std::string> after(dashes + 1, arguments.end());
  arguments.erase(dashes, arguments.end());
  return after;
}

int parse_and_run(std::vector<std::string> arguments) {
  CommandLine line({.name = "switchyard",
                    .description = "Runs Mixture-of-Experts layers over ranks.",
                    .version = "switchyard " SWITCHYARD_VERSION,
                    .footer = kExamples});
  std::vector<std::string> after_dashes = take_after_dashes(arguments);
  add_run(line);
  add_trace(line);
  add_bench(line, arguments);
  add_tune(line, arguments);
  add_report(line);
  add_make_checkpoint(line);
  add_models(line);
  add_doctor(line);
  add_launch(line, std::move(after_dashes));
  const Command* const command = line.read(with_suite_first(std::move(arguments)));
  return command == nullptr ? kExitOk : command->run();
}

int run_main(int argc, char** argv) {
  const BusErrorGuard guard(kExitInvalid);
  try {
    return finish_output(
        parse_and_run(std::vector<std::string>(argv + std::min(argc, 1), argv + argc)));
  } catch (const Error& error) {
    return fail(to_string(error.code()), error.what(), exit_code_of(error.code()));
  } catch (const std::bad_alloc&) {
    return fail(to_string(ErrorCode::kCapacityExceeded),
                "memory ran out; use fewer tokens or a smaller layer", kExitInvalid);
  } catch (const std::system_error& error) {
    if (std::ferror(stdout) != 0) return fail_output(error.code().value());
    return fail("internal", error.what(), kExitInternal);
  } catch (const std::exception& error) {
    return fail("internal", error.what(), kExitInternal);
  }
}

}  // namespace
}  // namespace switchyard::cli

int main(int argc, char** argv) {
  switchyard::cli::fill_closed_outputs();
  return switchyard::cli::run_main(argc, argv);
}
