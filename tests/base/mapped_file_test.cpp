#include "base/mapped_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "model/errors.h"
#include "model/temporary_directory.h"

namespace switchyard {
namespace {

const std::size_t kPage = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));

char byte_at(const MappedFile& file, std::size_t offset) {
  return static_cast<char>(*static_cast<const volatile std::byte*>(file.data() + offset));
}

class MappedFileTest : public ::testing::Test {
 protected:
  std::shared_ptr<const MappedFile> map(std::size_t bytes) {
    test::write_file(path_, std::string(bytes, 'x'));
    return MappedFile::map(path_);
  }
  void cut(std::size_t bytes) const { ASSERT_EQ(::truncate(path_.c_str(), off_t(bytes)), 0); }

  const test::TemporaryDirectory directory_;
  const std::filesystem::path path_ = directory_ / "file";
};

TEST_F(MappedFileTest, IsFoundByItsAddresses) {
  const auto file = map(3 * kPage + 5);
  EXPECT_EQ(file->size(), 3 * kPage + 5);
  EXPECT_EQ(MappedFile::at(file->data()), file);
  EXPECT_EQ(MappedFile::at(file->data() + file->size() - 1), file);
  EXPECT_EQ(MappedFile::at(file->data() + file->size()), nullptr);
  EXPECT_EQ(MappedFile::at(&path_), nullptr);
  EXPECT_EQ(MappedFile::at(nullptr), nullptr);
  file->require_size();
}

TEST_F(MappedFileTest, AnEmptyFileHasNoData) {
  const auto file = map(0);
  EXPECT_EQ(file->data(), nullptr);
  EXPECT_EQ(file->size(), 0u);
  file->require_size();
  file->require_whole();
}

TEST_F(MappedFileTest, PagesThatAreCutReadAsZerosAndAreTold) {
  const auto file = map(4 * kPage);
  EXPECT_EQ(byte_at(*file, 3 * kPage), 'x');
  cut(kPage);
  EXPECT_EQ(byte_at(*file, 2 * kPage), 0);
  EXPECT_EQ(byte_at(*file, 0), 'x');
  EXPECT_EQ(byte_at(*file, kPage), 0);
  EXPECT_FALSE(file->is_whole());
  EXPECT_ERROR(file->require_whole(), kInvalidFile, path_.c_str(),
               "became shorter while it was in use",
               ("has " + std::to_string(kPage) + " now").c_str());
  EXPECT_ERROR(MappedFile::require_all_whole(), kInvalidFile, path_.c_str());
  // It stays so: what the file gets later does not come into these pages.
  cut(4 * kPage);
  EXPECT_ERROR(file->require_size(), kInvalidFile, path_.c_str(), "was written to");
}

// Neither raises a signal where bytes are read: nothing of the page that was cut is.
TEST_F(MappedFileTest, CutsThatNobodyTrippedOverAreToldAllTheSame) {
  for (const std::size_t left : {2 * kPage + 9, 2 * kPage, kPage + 1, std::size_t{0}}) {
    const auto file = map(2 * kPage + 10);
    file->require_size();
    cut(left);
    EXPECT_FALSE(file->is_whole()) << left;
  }
}

TEST_F(MappedFileTest, ZerosAtTheEndHideNoCut) {
  test::write_file(path_, std::string(kPage, 'x') + std::string(2 * kPage, '\0'));
  const auto file = MappedFile::map(path_);
  file->require_size();
  cut(2 * kPage);  // zeros for zeros
  EXPECT_TRUE(file->is_whole());
  cut(kPage - 1);
  EXPECT_FALSE(file->is_whole());
}

TEST_F(MappedFileTest, ManyThreadsTripOverOneCut) {
  constexpr std::size_t kPages = 64;
  const auto file = map(kPages * kPage);
  cut(0);
  std::vector<std::jthread> threads;
  for (std::size_t t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t p = 0; p < kPages; ++p)
        EXPECT_EQ(byte_at(*file, (t % 2 == 0 ? p : kPages - 1 - p) * kPage), 0);
      EXPECT_FALSE(file->is_whole());
    });
  }
}

TEST_F(MappedFileTest, OtherFilesStayWhole) {
  const auto file = map(2 * kPage);
  std::vector<std::shared_ptr<const MappedFile>> others;
  for (int i = 0; i < 600; ++i) {  // more than a block of slots
    const std::filesystem::path path = directory_ / std::to_string(i);
    test::write_file(path, std::string(kPage, 'y'));
    others.push_back(MappedFile::map(path));
    others.back()->require_size();
  }
  const std::filesystem::path last = directory_ / "599";
  ASSERT_EQ(::truncate(last.c_str(), 0), 0);
  EXPECT_EQ(byte_at(*others.back(), 7), 0);
  EXPECT_FALSE(others.back()->is_whole());
  EXPECT_TRUE(file->is_whole());
  EXPECT_TRUE(others.front()->is_whole());
  // A place that was given back is taken as new.
  others.clear();
  for (int i = 0; i < 600; ++i) {
    others.push_back(MappedFile::map(directory_ / std::to_string(i % 599)));
    EXPECT_TRUE(others.back()->is_whole());
  }
}

// A page that no file has, of a mapping that is not MappedFile's.
void fault_elsewhere(const std::filesystem::path& path) {
  test::write_file(path, "some bytes");
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const void* const mapping = ::mmap(nullptr, kPage, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (mapping == MAP_FAILED || ::truncate(path.c_str(), 0) != 0) ::_exit(99);
  static_cast<void>(*static_cast<const volatile char*>(mapping));
}

// Sanitizers have handlers of their own, which report and exit.
bool ended_by_bus_error(int status) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  if (WIFEXITED(status)) return WEXITSTATUS(status) != 0;
#endif
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS;
}

TEST_F(MappedFileTest, OtherFaultsEndTheProcessAsEver) {
  const auto file = map(kPage);
  EXPECT_EXIT(fault_elsewhere(directory_ / "other"), ended_by_bus_error, "");
  EXPECT_EXIT(::raise(SIGBUS), ended_by_bus_error, "");
}

// In processes of their own, whose handlers come before MappedFile's.
class EarlierHandler : public MappedFileTest {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  void TearDown() override { GTEST_FLAG_SET(death_test_style, "fast"); }
};

TEST_F(EarlierHandler, GetsWhatIsNotOfAFile) {
  const auto with_info = [&] {
    struct sigaction action {};
    action.sa_flags = SA_SIGINFO;
    action.sa_sigaction = [](int, siginfo_t* info, void*) {
      ::_exit(info->si_code == BUS_ADRERR ? 7 : 8);
    };
    ::sigaction(SIGBUS, &action, nullptr);
    const auto file = map(2 * kPage);
    cut(0);
    if (byte_at(*file, kPage) != 0 || file->is_whole()) ::_exit(9);
    fault_elsewhere(directory_ / "other");
  };
  EXPECT_EXIT(with_info(), ::testing::ExitedWithCode(7), "");
}

TEST_F(EarlierHandler, OfTheSimpleKindGetsASignalThatIsSent) {
  const auto simple = [&] {
    ::signal(SIGBUS, [](int) { ::_exit(6); });
    const auto file = map(kPage);
    ::raise(SIGBUS);
  };
  EXPECT_EXIT(simple(), ::testing::ExitedWithCode(6), "");
}

TEST_F(EarlierHandler, ThatIgnoresASignalThatIsSentIgnoresItStill) {
  const auto ignores = [&] {
    ::signal(SIGBUS, SIG_IGN);
    const auto file = map(kPage);
    ::raise(SIGBUS);
    ::_exit(5);
  };
  EXPECT_EXIT(ignores(), ::testing::ExitedWithCode(5), "");
}

}  // namespace
}  // namespace switchyard
