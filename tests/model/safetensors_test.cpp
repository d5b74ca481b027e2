#include "model/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "model/errors.h"
#include "model/temporary_directory.h"
#include "models/matrix_file.h"
#include "models/safetensors_writer.h"

namespace switchyard {
namespace {

std::string file_bytes(const std::string& header, const std::string& data) {
  std::string bytes(8, '\0');
  const std::uint64_t length = header.size();
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes + header + data;
}

SafetensorsHeader parse(const std::string& bytes) {
  return parse_safetensors_header(std::as_bytes(std::span(bytes)), bytes.size(), "m.safetensors");
}

void expect_bad(const std::string& bytes, std::initializer_list<const char*> parts) {
  test::expect_error([&] { parse(bytes); }, ErrorCode::kInvalidFile, parts);
}

TEST(SafetensorsHeader, ParsesTensorsInFileOrder) {
  const SafetensorsHeader header = parse(file_bytes(
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
      R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
      R"("z":{"dtype":"I64","shape":[0,9],"data_offsets":[16,16]}})",
      std::string(16, 'x')));
  ASSERT_EQ(header.tensors.size(), 3u);
  EXPECT_EQ(header.tensors[0].name, "a");
  EXPECT_EQ(header.tensors[1].name, "b");
  EXPECT_EQ(header.tensors[1].shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(header.tensors[1].dtype, "BF16");
  EXPECT_EQ(header.tensors[1].bytes(), 12u);
  EXPECT_EQ(header.metadata.at("format"), "pt");
}

TEST(SafetensorsHeader, UnknownDTypesAreAcceptedUntilUsed) {
  EXPECT_EQ(parse(file_bytes(R"({"q":{"dtype":"F3_X","shape":[9],"data_offsets":[0,4]}})", "1234"))
                .tensors.size(),
            1u);
}

TEST(SafetensorsHeader, EveryTruncationIsNamed) {
  const std::string whole =
      file_bytes(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "12345678");
  parse(whole);
  for (std::size_t size = 0; size < whole.size(); ++size)
    expect_bad(whole.substr(0, size), {"m.safetensors", "download it again"});
  expect_bad(whole.substr(0, whole.size() - 1), {"tensor 'a' ends at byte 8", "has only 7"});
  expect_bad(whole + "x", {"ends at byte 8", "has 9 bytes"});
}

TEST(SafetensorsHeader, LyingHeadersAreNamed) {
  const std::string huge(16, '\xff');
  expect_bad(huge, {"announces a header of 18446744073709551615 bytes"});
  std::string too_long = file_bytes("{}", "");
  too_long[0] = 127;
  expect_bad(too_long, {"header of 127 bytes", "only 2 follow"});
  expect_bad(file_bytes("{\"a\":", ""), {"not valid JSON", "its 5 bytes end in the middle"});
  expect_bad(file_bytes("[]", ""), {"header, not an object"});
  expect_bad(file_bytes(std::string(1000, '['), ""), {"nested deeper than 64"});
  expect_bad(file_bytes(R"({"__metadata__":{"n":1}})", ""), {"1 in __metadata__"});

  const auto one = [](const std::string& body, std::size_t bytes) {
    return file_bytes(R"({"a":)" + body + "}", std::string(bytes, 'x'));
  };
  expect_bad(one("7", 0), {"tensor 'a'", "not described by an object"});
  expect_bad(one(R"({"dtype":"F32","shape":[1]})", 0), {"tensor 'a'", "no 'data_offsets'"});
  expect_bad(one(R"({"dtype":3,"shape":[1],"data_offsets":[0,4]})", 4), {"dtype 3"});
  expect_bad(one(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})", 4), {"extent -1"});
  expect_bad(one(R"({"dtype":"F32","shape":[1.5],"data_offsets":[0,4]})", 4), {"extent 1.5"});
  expect_bad(one(R"({"dtype":"F32","shape":[1],"data_offsets":[4,0]})", 4), {"data_offsets [4,0]"});
  expect_bad(one(R"({"dtype":"F32","shape":[1],"data_offsets":[0]})", 4), {"data_offsets [0]"});
  expect_bad(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})", 4),
             {"shape [2] of F32, which is 8 bytes", "span 4"});
  // 2^62 * 4 * 4 wraps to zero.
  expect_bad(one(R"({"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]})", 0),
             {"an impossible number of bytes"});
}

TEST(SafetensorsHeader, OverlapsAndHolesAreNamed) {
  expect_bad(file_bytes(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                        R"("b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
                        std::string(12, 'x')),
             {"tensor 'b' begins at byte 4", "inside 'a'", "ends at 8"});
  expect_bad(file_bytes(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                        R"("b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})",
                        std::string(12, 'x')),
             {"bytes 4 to 8", "before tensor 'b'", "no tensor"});
}

TEST(SafetensorsIndex, RoundTripsAndRejectsNonsense) {
  const std::map<std::string, std::string> weight_map = {{"a.b", "one.safetensors"},
                                                         {"c\"d", "two.safetensors"}};
  EXPECT_EQ(parse_safetensors_index(safetensors_index_json(weight_map, 12), "index"), weight_map);
  EXPECT_ERROR(parse_safetensors_index("{}", "index"), kInvalidFile, "weight_map");
  EXPECT_ERROR(parse_safetensors_index(R"({"weight_map":{"a":7}})", "index"), kInvalidFile,
               "tensor 'a' to 7");
  EXPECT_ERROR(parse_safetensors_index(R"({"weight_map":{"a":"../x"}})", "index"), kInvalidFile,
               "../x", "same directory");
}

TEST(SafetensorsFile, WriterStreamsAndReaderMaps) {
  const test::TemporaryDirectory directory;
  const std::filesystem::path path = directory / "x.safetensors";
  std::vector<float> values(1000);
  std::iota(values.begin(), values.end(), 0.0f);
  const std::span<const std::byte> bytes = std::as_bytes(std::span(values));
  {
    SafetensorsWriter writer(path,
                             {{.name = "a", .dtype = "F32", .shape = {10, 50}},
                              {.name = "b", .dtype = "F32", .shape = {500}}},
                             {{"format", "pt"}});
    writer.append(bytes.subspan(0, 123));
    writer.append(bytes.subspan(123));
    EXPECT_FALSE(std::filesystem::exists(path));
    writer.finish();
  }
  const auto file = SafetensorsFile::open(path);
  EXPECT_EQ(file->header().data_begin % 64, 0u);
  EXPECT_EQ(file->header().metadata.at("format"), "pt");
  const TensorInfo* b = file->find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(std::memcmp(file->data(*b), values.data() + 500, 2000), 0);
  EXPECT_EQ(file->find("c"), nullptr);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory.path()), {}), 1);
}

TEST(SafetensorsFile, AnAbandonedWriterLeavesNothing) {
  const test::TemporaryDirectory directory;
  {
    SafetensorsWriter writer(directory / "x", {{.name = "a", .dtype = "U8", .shape = {4}}});
    EXPECT_ERROR(writer.finish(), kInvalidArgument, "after 0 of 4");
    std::vector<std::byte> five(5);
    EXPECT_ERROR(writer.append(five), kInvalidArgument, "5 bytes", "announced as 4");
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  EXPECT_ERROR(SafetensorsWriter(directory / "no/such", {}), kSystem, "open failed");
  EXPECT_ERROR(SafetensorsWriter(directory / "x", {{.name = "a", .dtype = "F9", .shape = {4}}}),
               kInvalidArgument, "tensor 'a' of dtype F9");
}

TEST(SafetensorsFile, UnreadableFilesAreNamed) {
  const test::TemporaryDirectory directory;
  EXPECT_ERROR(SafetensorsFile::open(directory / "absent"), kSystem, "absent", "No such file");
  EXPECT_ERROR(SafetensorsFile::open(directory.path()), kInvalidFile, "regular file");
  test::write_file(directory / "empty", "");
  EXPECT_ERROR(SafetensorsFile::open(directory / "empty"), kInvalidFile, "is empty");
}

// If opening the pipe blocked, the alarm would end the test.
TEST(SafetensorsFile, PipesAreRefusedWithoutWaiting) {
  const test::TemporaryDirectory directory;
  ASSERT_EQ(::mkfifo((directory / "x.safetensors").c_str(), 0600), 0);
  ::alarm(20);
  EXPECT_ERROR(SafetensorsFile::open(directory / "x.safetensors"), kInvalidFile, "is a pipe");
  ::alarm(0);
}

// A file with one tensor, which is mapped.
class MappedSafetensors : public ::testing::Test {
 protected:
  MappedSafetensors() {
    write_matrices(path, {{"a", {values.data(), DType::kF32, 10, 100, 100}}});
    file = SafetensorsFile::open(path);
    file->mapping().require_size();
  }
  const test::TemporaryDirectory directory;
  const std::filesystem::path path = directory / "x";
  const std::vector<float> values = std::vector<float>(1000, 1.0f);
  decltype(SafetensorsFile::open(path)) file;
};

TEST_F(MappedSafetensors, OneThatBecomesShorterIsNoticed) {
  const std::uintmax_t bytes = std::filesystem::file_size(path);
  std::filesystem::resize_file(path, bytes - 1);
  EXPECT_ERROR(file->mapping().require_size(), kInvalidFile, path.c_str(),
               std::to_string(bytes).c_str(), std::to_string(bytes - 1).c_str());
  // A byte that was cut is a zero after the file has grown again.
  std::filesystem::resize_file(path, bytes);
  EXPECT_ERROR(file->mapping().require_size(), kInvalidFile, path.c_str(), "was written to");
}

// Another file of that name is none of its business: the mapped one lives on.
TEST_F(MappedSafetensors, OneWhoseNameIsTakenLivesOn) {
  write_matrices(path, {{"a", {values.data(), DType::kF32, 1, 1, 1}}});
  file->mapping().require_size();
  std::filesystem::remove(path);
  file->mapping().require_size();
  EXPECT_EQ(std::memcmp(file->data(*file->find("a")), values.data(), 4000), 0);
}

TEST(SafetensorsHeader, NamesCannotForgeLinesNorFloodTheTerminal) {
  const auto message_of = [](const std::string& bytes) -> std::string {
    try {
      parse(bytes);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const std::string escape = R"({"a\nforged\u001b[2J":{"dtype":"F\u009b32","shape":[1]}})";
  EXPECT_THAT(message_of(file_bytes(escape, "")), ::testing::HasSubstr("'a\\nforged\\x1b[2J'"));
  const std::string huge = "{\"" + std::string(1 << 20, 'n') + "\":7}";
  const std::string shown = message_of(file_bytes(huge, ""));
  EXPECT_LE(shown.size(), 1000u);
  EXPECT_THAT(shown, ::testing::HasSubstr("[1048576 bytes]"));
  // The message still says what is wrong, and what to do.
  EXPECT_THAT(shown, ::testing::HasSubstr("is not described by an object"));
  EXPECT_THAT(shown, ::testing::EndsWith("download the file again"));
  EXPECT_THAT(closest_names("x", {"x\n", "x\x1b"}), ::testing::HasSubstr("x\\n, x\\x1b"));
}

TEST(SafetensorsIndex, ShardNamesAreNamesOfFiles) {
  for (const char* shard : {"../x", "a/b", "", "a\\u0000b"}) {
    const std::string text = std::string(R"({"weight_map":{"t":")") + shard + "\"}}";
    EXPECT_ERROR(parse_safetensors_index(text, "index.json"), kInvalidFile, "index.json",
                 "name of a file in the same directory");
  }
}

TEST(Matrices, RoundTripAnyStridesAndDTypes) {
  const test::TemporaryDirectory directory;
  const std::filesystem::path path = directory / "activations.safetensors";
  const std::vector<float> values = {0, 1, 2, 3, 4, 5};
  const std::vector<std::int32_t> ids = {7, 8};
  const MatrixView plain{
      .data = values.data(), .dtype = DType::kF32, .rows = 2, .cols = 3, .row_stride = 3};
  const MatrixView transposed{.data = values.data(),
                              .dtype = DType::kF32,
                              .rows = 3,
                              .cols = 2,
                              .row_stride = 1,
                              .col_stride = 3};
  const MatrixView integers{
      .data = ids.data(), .dtype = DType::kI32, .rows = 1, .cols = 2, .row_stride = 2};
  write_matrices(path, {{"x", plain}, {"t", transposed}, {"ids", integers}});
  const OwnedMatrix t = read_matrix(path, "t");
  EXPECT_EQ(t.view.rows, 3);
  const std::vector<float> expected = {0, 3, 1, 4, 2, 5};
  EXPECT_EQ(std::memcmp(t.view.data, expected.data(), 24), 0);
  const OwnedMatrix read_ids = read_matrix(path, "ids");
  EXPECT_EQ(read_ids.view.dtype, DType::kI32);
  EXPECT_EQ(std::memcmp(read_ids.view.data, ids.data(), 8), 0);
  EXPECT_ERROR(read_matrix(path, "y"), kMissingTensor, "no tensor 'y'", "ids");
  EXPECT_ERROR(read_matrix(path, ""), kMissingTensor, "has 3 tensors", "name the one");
}

TEST(Matrices, ReadOnlyTensorsTheyCanHold) {
  const test::TemporaryDirectory directory;
  const std::filesystem::path path = directory / "x";
  // One byte before the fp32 vector leaves it misaligned in the file.
  const float value = 2.5f;
  std::string data(5, '\x01');
  std::memcpy(data.data() + 1, &value, 4);
  std::string header = R"({"u":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                       R"("v":{"dtype":"F32","shape":[1],"data_offsets":[1,5]},)"
                       R"("d":{"dtype":"F64","shape":[1],"data_offsets":[5,13]},)"
                       R"("c":{"dtype":"U8","shape":[1,1,1],"data_offsets":[13,14]}})";
  test::write_file(path, file_bytes(header, data + std::string(9, 'x')));
  const OwnedMatrix v = read_matrix(path, "v");
  EXPECT_EQ(*static_cast<const float*>(v.view.data), 2.5f);
  EXPECT_EQ(v.view.rows, 1);
  EXPECT_ERROR(read_matrix(path, "d"), kUnsupported, "tensor 'd' has dtype F64", "BF16");
  EXPECT_ERROR(read_matrix(path, "c"), kShapeMismatch, "[1, 1, 1]");
}

}  // namespace
}  // namespace switchyard
