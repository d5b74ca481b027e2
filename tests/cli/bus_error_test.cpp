// A process that ends for want of memory says so before.
#include "cli/bus_error.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include "base/mapped_file.h"
#include "base/unique_fd.h"
#include "model/temporary_directory.h"

namespace switchyard::cli {
namespace {

constexpr std::size_t kPage = 4096;

// Two pages of a file, the second of which is cut off.
class CutFile {
 public:
  explicit CutFile(const std::string& path) {
    test::write_file(path, std::string(2 * kPage, 'x'));
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    void* const mapping = ::mmap(nullptr, 2 * kPage, PROT_READ, MAP_SHARED, fd.get(), 0);
    if (mapping == MAP_FAILED || ::truncate(path.c_str(), 100) != 0) ADD_FAILURE();
    bytes_ = static_cast<const volatile char*>(mapping);
  }
  // Ends the process, however it is caught.
  void touch() const { static_cast<void>(bytes_[kPage + 1]); }

 private:
  const volatile char* bytes_;
};

TEST(BusError, SaysWhyAndEndsWithTheExitCode) {
  const test::TemporaryDirectory directory;
  const auto touch = [&] {
    const BusErrorGuard guard(7);
    CutFile((directory / "x").string()).touch();
  };
  EXPECT_EXIT(
      touch(), ::testing::ExitedWithCode(7),
      ::testing::AllOf(::testing::StartsWith("switchyard: error (capacity_exceeded): memory"),
                       ::testing::EndsWith("limit\n")));
}

// The library has a handler of its own for files that it maps, which passes on what is not theirs.
TEST(BusError, SaysSoAlsoWhereFilesAreMapped) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a process that has mapped nothing yet
  const test::TemporaryDirectory directory;
  const auto touch = [&] {
    const BusErrorGuard guard(7);
    test::write_file(directory / "mapped", "not empty");
    const auto mapped = MappedFile::map(directory / "mapped");
    CutFile((directory / "x").string()).touch();
  };
  EXPECT_EXIT(touch(), ::testing::ExitedWithCode(7), "error \\(capacity_exceeded\\)");
}

TEST(BusError, ThreadsTogetherSayItOnce) {
  const test::TemporaryDirectory directory;
  const auto touch = [&] {
    const BusErrorGuard guard(2);
    const CutFile file((directory / "x").string());
    std::vector<std::jthread> threads;
    for (int i = 0; i < 8; ++i) threads.emplace_back([&file] { file.touch(); });
  };
  EXPECT_EXIT(touch(), ::testing::ExitedWithCode(2),
              ::testing::Not(::testing::ContainsRegex("error(.|\n)*error")));
}

TEST(BusError, OneThatIsSentEndsTheProcessAsEver) {
  const auto send = [] {
    const BusErrorGuard guard(2);
    ::raise(SIGBUS);
  };
  EXPECT_EXIT(send(), ::testing::KilledBySignal(SIGBUS), "");
}

TEST(BusError, AGuardThatIsGoneLeavesTheHandlerThatWas) {
  const auto touch = [] {
    { const BusErrorGuard guard(2); }
    ::raise(SIGBUS);
  };
  struct sigaction before {};
  ::sigaction(SIGBUS, nullptr, &before);
  EXPECT_EXIT(touch(), ::testing::KilledBySignal(SIGBUS), "");
  struct sigaction after {};
  ::sigaction(SIGBUS, nullptr, &after);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
}

}  // namespace
}  // namespace switchyard::cli
