// Colours and progress bars are for terminals only.
#include <gmock/gmock.h>
#include <pty.h>

#include "cli/command.h"

namespace switchyard::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// All that the command writes to a terminal of its own.
std::string run_on_terminal(const Arguments& arguments,
                            const std::vector<std::string>& environment = {}) {
  const Invocation invocation(arguments, environment);
  int terminal = -1;
  const pid_t child = ::forkpty(&terminal, nullptr, nullptr, nullptr);
  if (child == 0) invocation.become();
  std::string text;
  std::array<char, 4096> buffer;
  // The terminal's other end fails with EIO once the child has closed it.
  for (ssize_t got; (got = ::read(terminal, buffer.data(), buffer.size())) > 0;) {
    text.append(buffer.data(), static_cast<std::size_t>(got));
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ::close(terminal);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << text;
  return text;
}

void expect_plain(const Completed& done) {
  EXPECT_EQ(done.exit_code, 0) << done.err;
  EXPECT_EQ(done.out.find('\x1b'), std::string::npos) << done.out;
  EXPECT_EQ(done.out.find('\r'), std::string::npos);
  EXPECT_EQ(done.err, "");
}

TEST(Terminal, RunHasColourAndABar) {
  const std::string text = run_on_terminal(join({"run", "--tokens", "8"}, kTiny));
  EXPECT_THAT(text, HasSubstr("\x1b[1m"));
  EXPECT_THAT(text, HasSubstr("\rgenerating weights"));
  // The bar is gone when the report begins.
  EXPECT_THAT(text, HasSubstr("\r\x1b[K"));
}

TEST(Terminal, MakeCheckpointHasABar) {
  const TemporaryDirectory directory;
  const std::string text =
      run_on_terminal(join({"make-checkpoint", "--out", (directory / "m").string()}, kTiny));
  EXPECT_THAT(text, HasSubstr("\rwriting"));
}

TEST(Terminal, NoColorAndQuietAreRespected) {
  const std::string plain = run_on_terminal({"models"}, {"NO_COLOR=1"});
  EXPECT_THAT(plain, HasSubstr("olmoe"));
  EXPECT_THAT(plain, Not(HasSubstr("\x1b[")));
  EXPECT_EQ(run_on_terminal(join({"run", "--tokens", "8", "--quiet"}, kTiny)), "");
}

TEST(Pipe, HasNoEscapeCodesAndNoBars) {
  const TemporaryDirectory directory;
  expect_plain(run_switchyard(join({"run", "--tokens", "8", "--verify"}, kTiny)));
  expect_plain(
      run_switchyard(join({"make-checkpoint", "--out", (directory / "m").string()}, kTiny)));
  expect_plain(run_switchyard({"models"}));
  expect_plain(run_switchyard({"doctor"}));
}

}  // namespace
}  // namespace switchyard::cli
