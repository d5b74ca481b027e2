// Runs the built `switchyard` as a user would.
#pragma once

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/temporary_directory.h"
#include "models/matrix_file.h"

namespace switchyard::cli {

using test::read_file;
using test::TemporaryDirectory;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;
using Arguments = std::vector<std::string>;

struct Completed {
  int exit_code = -1;
  std::string out;
  std::string err;
};

// The environment without what launchers set: the tests may themselves run under one.
inline std::vector<std::string> clean_environment() {
  std::vector<std::string> kept;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    bool launcher = false;
    for (const char* prefix : {"RANK=", "WORLD_SIZE=", "LOCAL_", "OMPI_", "PMI", "SLURM_", "MPI_",
                               "TORCHELASTIC_", "SWITCHYARD_", "NO_COLOR="}) {
      launcher = launcher || text.starts_with(prefix);
    }
    if (!launcher) kept.emplace_back(text);
  }
  return kept;
}

// The command with its arguments and environment, as a child process runs it.
class Invocation {
 public:
  Invocation(const Arguments& arguments, const std::vector<std::string>& environment)
      : words_{SWITCHYARD_COMMAND}, variables_(clean_environment()) {
    words_.insert(words_.end(), arguments.begin(), arguments.end());
    variables_.insert(variables_.end(), environment.begin(), environment.end());
    argv_ = pointers(words_);
    envp_ = pointers(variables_);
  }
  Invocation(const Invocation&) = delete;
  Invocation& operator=(const Invocation&) = delete;

  // Called in the child: allocates nothing.
  [[noreturn]] void become() const {
    ::execve(argv_[0], argv_.data(), envp_.data());
    ::_exit(126);
  }

 private:
  static std::vector<char*> pointers(std::vector<std::string>& strings) {
    std::vector<char*> result;
    for (std::string& s : strings) result.push_back(s.data());
    result.push_back(nullptr);
    return result;
  }

  std::vector<std::string> words_, variables_;
  std::vector<char*> argv_, envp_;
};

// Its exit code, or 128 and the signal. Outputs go to these files; null: closed.
inline int run_switchyard_into(const char* out, const char* err, const Arguments& arguments,
                               const std::vector<std::string>& environment = {}) {
  const Invocation invocation(arguments, environment);
  const pid_t child = ::fork();
  if (child == 0) {
    constexpr int kFlags = O_WRONLY | O_CREAT | O_CLOEXEC;
    const int out_fd = out != nullptr ? ::open(out, kFlags, 0600) : -1;
    const int err_fd = err != nullptr ? ::open(err, kFlags, 0600) : -1;
    out != nullptr ? ::dup2(out_fd, STDOUT_FILENO) : ::close(STDOUT_FILENO);
    err != nullptr ? ::dup2(err_fd, STDERR_FILENO) : ::close(STDERR_FILENO);
    invocation.become();
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

inline Completed run_switchyard(const Arguments& arguments,
                                const std::vector<std::string>& environment = {}) {
  const TemporaryDirectory directory;
  const std::string out = (directory / "out").string();
  const std::string err = (directory / "err").string();
  const int exit_code = run_switchyard_into(out.c_str(), err.c_str(), arguments, environment);
  return {exit_code, read_file(out), read_file(err)};
}

// Runs it, and expects that it succeeds.
inline Completed run_well(const Arguments& arguments,
                          const std::vector<std::string>& environment = {}) {
  Completed done = run_switchyard(arguments, environment);
  EXPECT_EQ(done.exit_code, 0) << ::testing::PrintToString(arguments) << ": " << done.err;
  return done;
}

// Runs it, and expects that it ends with this exit code and says `part` on stderr.
inline void expect_told(const Arguments& arguments, int exit_code, const std::string& part) {
  const Completed done = run_switchyard(arguments);
  EXPECT_EQ(done.exit_code, exit_code);
  EXPECT_NE(done.err.find(part), std::string::npos) << done.err;
}

// Runs it, and expects an error of this code that says all of `parts` in place of any output.
inline void expect_error(const Arguments& arguments, int exit_code, const std::string& code,
                         const std::vector<std::string>& parts,
                         const std::vector<std::string>& environment = {}) {
  SCOPED_TRACE(::testing::PrintToString(arguments));
  const Completed done = run_switchyard(arguments, environment);
  EXPECT_EQ(done.exit_code, exit_code);
  EXPECT_EQ(done.out, "");
  EXPECT_TRUE(done.err.starts_with("switchyard: error (" + code + "): ")) << done.err;
  for (const std::string& part : parts) {
    EXPECT_NE(done.err.find(part), std::string::npos) << part << "\n" << done.err;
  }
}

// As expect_error(), for arguments that make no sense.
inline void expect_misuse(const Arguments& arguments, const std::vector<std::string>& parts,
                          const std::vector<std::string>& environment = {}) {
  expect_error(arguments, 2, "invalid_argument", parts, environment);
}

inline std::vector<std::string> names_in(const std::filesystem::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    names.push_back(entry.path().filename().string());
  }
  return names;
}

inline Arguments join(Arguments a, const Arguments& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// A layer that takes milliseconds.
inline const Arguments kTiny = {"--model",  "olmoe", "--experts",      "16",
                                "--hidden", "64",    "--intermediate", "32"};

// One tensor of a safetensors file, as bytes.
inline std::string tensor_bytes(const std::filesystem::path& path, const std::string& name) {
  const OwnedMatrix m = read_matrix(path, name);
  return {static_cast<const char*>(m.view.data),
          static_cast<std::size_t>(m.view.rows * m.view.cols) * size_of(m.view.dtype)};
}

}  // namespace switchyard::cli
