#include "base/read_file.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>

#include "base/file_error.h"
#include "model/errors.h"
#include "model/temporary_directory.h"

namespace switchyard {
namespace {

namespace fs = std::filesystem;

TEST(ReadFile, ReadsAllOfIt) {
  const test::TemporaryDirectory directory;
  const fs::path path = directory / "x";
  for (const std::size_t size : {0u, 1u, 4096u, 1'000'000u}) {
    const std::string text(size, 'x');
    test::write_file(path, text);
    EXPECT_EQ(read_text(path, 1'000'000), text);
  }
  EXPECT_ERROR(read_text(path, 999'999), kInvalidFile, "more than the 999999 bytes");
  // This file system tells no sizes.
  EXPECT_EQ(read_text("/proc/self/comm", 100).back(), '\n');
  EXPECT_ERROR(read_text("/proc/self/maps", 100), kInvalidFile, "more than the 100");
}

TEST(ReadFile, SparseFilesCostNothing) {
  const test::TemporaryDirectory directory;
  test::write_file(directory / "x", "");
  fs::resize_file(directory / "x", std::uintmax_t{10} << 30);
  EXPECT_ERROR(read_text(directory / "x", 1 << 20), kInvalidFile, "more than the");
}

// To open a pipe without a writer would block for ever; the alarm would end it.
TEST(ReadFile, WhatIsNoFileIsRefusedWithoutWaiting) {
  const test::TemporaryDirectory directory;
  ::alarm(20);
  ASSERT_EQ(::mkfifo((directory / "pipe").c_str(), 0600), 0);
  fs::create_symlink("pipe", directory / "link");
  for (const char* name : {"pipe", "link"}) {
    EXPECT_ERROR(open_input(directory / name), kInvalidFile, name, "is a pipe");
  }
  EXPECT_ERROR(open_input("/dev/zero"), kInvalidFile, "is a device");
  EXPECT_ERROR(open_input(directory.path()), kInvalidFile, "is a directory");
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  std::strncpy(address.sun_path, (directory / "socket").c_str(), sizeof address.sun_path - 1);
  const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  EXPECT_ERROR(open_input(directory / "socket"), kInvalidFile, "is a socket");
  ::alarm(0);
}

TEST(ReadFile, LinksSayWhatIsWrongWithThem) {
  const test::TemporaryDirectory directory;
  fs::create_symlink("nothing", directory / "dangling");
  fs::create_symlink("circle", directory / "circle");
  EXPECT_TRUE(is_absent(directory / "nothing"));
  EXPECT_FALSE(is_absent(directory / "dangling"));
  EXPECT_FALSE(is_absent(directory / "circle"));
  EXPECT_ERROR(open_input(directory / "nothing"), kSystem, "No such file");
  EXPECT_ERROR(open_input(directory / "dangling"), kInvalidFile,
               "a symbolic link to a file that is not there");
  EXPECT_ERROR(open_input(directory / "circle"), kSystem, "leads back to itself");
}

TEST(FileErrors, NameTheRemedyOfTheirCause) {
  const auto expect = [](int code, const char* remedy) {
    EXPECT_ERROR(errno = code;
                 throw_file_error("dir/a\nb", "mmap"), kSystem, "dir/a\\nb: mmap failed: ", remedy);
  };
  expect(ENOMEM, "memory");
  expect(ENODEV, "copy it to a file system that can map");
  expect(ENOSPC, "disk space");
  expect(EMFILE, "ulimit -n");
  expect(EACCES, "permissions");
  expect(EIO, "check the disk");
}

}  // namespace
}  // namespace switchyard
