#include "base/whole_file.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <set>
#include <string>

#include "model/errors.h"
#include "model/temporary_directory.h"
#include "models/generate.h"
#include "models/model_table.h"

namespace switchyard {
namespace {

namespace fs = std::filesystem;
using test::read_file;

// Another user of the directory has put a link where the temporary name could be guessed.
TEST(WholeFile, DoesNotWriteThroughLinksThatOthersHavePut) {
  const test::TemporaryDirectory directory;
  const fs::path path = directory / "out";
  test::write_file(directory / "victim", "precious");
  const fs::path guess = path.string() + ".partial-" + std::to_string(::getpid());
  fs::create_symlink("victim", guess);
  write_whole(path, "new");
  EXPECT_EQ(read_file(path), "new");
  EXPECT_EQ(read_file(directory / "victim"), "precious");
  EXPECT_TRUE(fs::is_symlink(guess));
}

TEST(WholeFile, ReplacesALinkAndNotWhatItLeadsTo) {
  const test::TemporaryDirectory directory;
  test::write_file(directory / "victim", "precious");
  fs::create_symlink("victim", directory / "out");
  write_whole(directory / "out", "new");
  EXPECT_EQ(read_file(directory / "victim"), "precious");
  EXPECT_FALSE(fs::is_symlink(directory / "out"));
}

TEST(WholeFile, TemporaryNamesThatAreTakenAreLeftAlone) {
  const test::TemporaryDirectory directory;
  std::set<fs::path> names;
  const fs::path path = make_beside(directory / "x", "open", [&](const fs::path& name) {
    names.insert(name);
    return names.size() < 3 ? EEXIST : 0;
  });
  EXPECT_EQ(names.size(), 3u);
  EXPECT_TRUE(names.contains(path));
  EXPECT_EQ(path.parent_path(), directory.path());
  EXPECT_ERROR(make_beside(directory / "x", "open", [](const fs::path&) { return EEXIST; }),
               kSystem, "x: open failed", "File exists");
}

TEST(WholeFile, FilesAreForThoseThatTheUmaskAllows) {
  const test::TemporaryDirectory directory;
  const mode_t before = ::umask(027);
  write_whole(directory / "x", "");
  ::umask(before);
  EXPECT_EQ(fs::status(directory / "x").permissions(), static_cast<fs::perms>(0640));
}

TEST(WriteCheckpoint, DoesNotWriteIntoDirectoriesThatOthersHavePut) {
  const test::TemporaryDirectory directory;
  const fs::path target = directory / "m";
  fs::create_directory(directory / "trap");
  fs::create_directory_symlink("trap", target.string() + ".partial-" + std::to_string(::getpid()));
  WriteOptions options;
  options.overrides = {.num_moe_layers = 1, .num_experts = 8, .hidden = 32, .intermediate = 16};
  write_checkpoint(find_model("olmoe"), target, options);
  EXPECT_FALSE(fs::is_symlink(target));
  EXPECT_TRUE(fs::exists(target / "config.json"));
  EXPECT_TRUE(fs::is_empty(directory / "trap"));
}

TEST(WholeFile, WritingThatFailsLeavesTheOldFile) {
  const test::TemporaryDirectory directory;
  const auto path = directory / "page";
  test::write_file(path, "old");
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit small{16, 16};
    ::setrlimit(RLIMIT_FSIZE, &small);
    try {
      write_whole(path, std::string(1000, 'x'));
    } catch (const Error& error) {
      ::_exit(error.code() == ErrorCode::kSystem ? 7 : 1);
    }
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 7);
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(std::distance(fs::directory_iterator(directory.path()), fs::directory_iterator()), 1);
}

}  // namespace
}  // namespace switchyard
