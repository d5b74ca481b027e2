#include "base/json.h"

#include <gmock/gmock.h>

#include <limits>
#include <string>
#include <vector>

#include "base/parsed.h"

namespace switchyard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

JsonError error_of(std::string_view text) {
  try {
    Json::parse(text);
  } catch (const JsonError& error) {
    return error;
  }
  ADD_FAILURE() << text << " was read";
  return JsonError(JsonError::Reason::kSyntax, 0, "");
}

// A list of names, to see what reached the taker.
struct Taken {
  std::vector<std::string> elements;
  Json rest;
};
Taken read_long_list(std::string_view text) {
  Taken taken;
  const auto take = [&](const Json& element) { taken.elements.push_back(element.dump()); };
  taken.rest = parse_long_list(text, "list", "about", take);
  return taken;
}

TEST(Json, IsWrittenAsItWasRead) {
  const std::string text =
      R"({"z":[1,-2,2.5,1e300,18446744073709551615,-9223372036854775808],"a":{"t":true,"n":null},)"
      R"("empty":[{},[],""],"text":"\"\\\u0001ü\n"})";
  const Json json = Json::parse(text);
  EXPECT_EQ(test::parsed(json), nlohmann::ordered_json::parse(text));
  EXPECT_EQ(json.dump(), nlohmann::ordered_json::parse(text).dump());
  EXPECT_EQ(json.dump({.indent = 2, .ascii = true}),
            nlohmann::ordered_json::parse(text).dump(2, ' ', true));
  EXPECT_EQ(json.dump({.sorted = true}), nlohmann::json::parse(text).dump());
}

TEST(Json, KindsOfNumbers) {
  const Json json = Json::parse("[7, -7, 7.0, 9223372036854775808]");
  const Json::Array& numbers = json.elements();
  EXPECT_TRUE(numbers[0].is_unsigned());
  EXPECT_TRUE(numbers[1].is_integer());
  EXPECT_FALSE(numbers[1].is_unsigned());
  EXPECT_FALSE(numbers[2].is_integer());
  EXPECT_EQ(numbers[0].integer(), 7);
  EXPECT_EQ(numbers[1].integer(), -7);
  EXPECT_EQ(numbers[1].number(), -7);
  EXPECT_EQ(numbers[2].number(), 7);
  EXPECT_EQ(numbers[3].unsigned_integer(), std::uint64_t{1} << 63);
  for (const Json& number : numbers) EXPECT_TRUE(number.is_number());
  EXPECT_THROW(numbers[2].integer(), std::bad_variant_access);
  EXPECT_THROW(numbers[0].text(), std::bad_variant_access);
  // A C++ type does not matter, only the value.
  EXPECT_EQ((Json(std::vector<std::uint8_t>{0, 255})).dump(), "[0,255]");
  EXPECT_EQ(Json(0.5f).dump(), "0.5");
  EXPECT_EQ(Json(std::numeric_limits<double>::infinity()).dump(), "null");
}

TEST(Json, OfEqualKeysTheLastCountsInThePlaceOfTheFirst) {
  EXPECT_EQ(Json::parse(R"({"b":1,"a":2,"b":{"x":3},"c":4,"b":[5],"a":6})").dump(),
            R"({"b":[5],"a":6,"c":4})");
}

TEST(Json, IsChangedInPlace) {
  Json json;
  json["list"].push_back(1);
  json["list"].push_back({{"a", "b"}, {"c", std::optional<int>()}});
  json["gone"] = true;
  json["late"] = "x";
  json.erase("gone");
  json.erase("never there");
  json.update({{"late", 1.5}, {"new", nullptr}});
  EXPECT_EQ(json.dump(), R"({"list":[1,{"a":"b","c":null}],"late":1.5,"new":null})");
  EXPECT_TRUE(json.contains("new"));
  EXPECT_EQ(json.find("gone"), nullptr);
  EXPECT_EQ(json.find("list")->find("a"), nullptr);  // no object
  const Json copy = json;
  json["late"] = 2;
  EXPECT_EQ(copy.find("late")->number(), 1.5);
  EXPECT_EQ(Json::object().dump() + Json::array().dump() + Json().dump(), "{}[]null");
}

TEST(Json, TextThatIsNotUtf8IsReplaced) {
  EXPECT_EQ(Json("a\xff").dump(), "\"a\ufffd\"");
  EXPECT_EQ(Json("a\xff").dump({.ascii = true}), "\"a\\ufffd\"");
}

TEST(Json, ErrorsSayWhyAndWhere) {
  EXPECT_EQ(error_of(R"({"a":)").reason(), JsonError::Reason::kSyntax);
  EXPECT_EQ(error_of(R"({"a" 1})").byte(), 6u);
  EXPECT_EQ(error_of("[1] 2").reason(), JsonError::Reason::kSyntax);
  EXPECT_EQ(error_of("[1e999]").reason(), JsonError::Reason::kNumber);
  EXPECT_THAT(error_of("[1e999]").what(), HasSubstr("1e999"));
  const std::string deep = "[\"[[\"," + std::string(200'000, '[');
  EXPECT_EQ(error_of(deep).reason(), JsonError::Reason::kTooDeep);
  EXPECT_EQ(error_of(deep).byte(), 6u + 63);
  EXPECT_NO_THROW(Json::parse(std::string(64, '[') + std::string(64, ']')));
}

TEST(JsonLongList, AtTheTop) {
  const Taken taken = read_long_list(R"([1,{"list":[2]},[3,[4]]])");
  EXPECT_THAT(taken.elements, ElementsAre("1", R"({"list":[2]})", "[3,[4]]"));
  EXPECT_EQ(taken.rest.dump(), "[]");
}

TEST(JsonLongList, InAnObject) {
  const Taken taken = read_long_list(
      R"({"skipped":[{"list":[9]}],"list":[{"a":[1]},2],"about":{"list":[3]},"x":{"about":4}})");
  EXPECT_THAT(taken.elements, ElementsAre(R"({"a":[1]})", "2"));
  EXPECT_EQ(taken.rest.dump(), R"({"list":[],"about":{"list":[3]}})");
}

TEST(JsonLongList, IsNoList) {
  EXPECT_EQ(read_long_list(R"({"list":{"a":[1]}})").rest.dump(), R"({"list":{"a":[1]}})");
  EXPECT_EQ(read_long_list("7").rest.dump(), "7");
  EXPECT_TRUE(read_long_list(R"({"list":{"a":[1]}})").elements.empty());
  EXPECT_THROW(read_long_list("[1,2"), JsonError);
}

}  // namespace
}  // namespace switchyard
