#include "base/json.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/foreign_file.h"
#include "base/printable.h"

namespace switchyard {
namespace {

// Real files have 5.
constexpr int kMaxDepth = 64;

// The byte at which text nests too deep, if it does. Looked for before parsing, so that a megabyte
// of '[' costs no allocation per level, nor a stack frame afterwards.
std::optional<std::size_t> too_deep_at(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxDepth) return i;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return std::nullopt;
}

// The list that parse_long_list() does not keep.
struct LongList {
  std::string_view key, beside;
  const std::function<void(const Json&)>& take;
};

// Keeps the last value of equal keys, in the place of the first.
void merge_equal_keys(Json::Object& members) {
  std::vector<std::size_t> order(members.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const int difference = members[a].key.compare(members[b].key);
    return difference != 0 ? difference < 0 : a < b;
  });
  std::vector<std::size_t> superfluous;
  for (std::size_t i = 0, first = 0; i < order.size(); ++i) {
    if (i == 0 || members[order[i]].key != members[order[first]].key) {
      first = i;
      continue;
    }
    members[order[first]].value = std::move(members[order[i]].value);
    superfluous.push_back(order[i]);
  }
  std::sort(superfluous.rbegin(), superfluous.rend());
  for (const std::size_t i : superfluous) members.erase(members.begin() + std::ptrdiff_t(i));
}

// Makes a value of the parser's events.
class Builder {
 public:
  explicit Builder(const LongList* list) : list_(list) {}

  Json take_result() { return std::move(result_); }

  // Called by the parser; true: go on.
  bool null() { return add(Json()); }
  bool boolean(bool value) { return add(value); }
  bool number_integer(std::int64_t value) { return add(value); }
  bool number_unsigned(std::uint64_t value) { return add(value); }
  bool number_float(double value, const std::string&) { return add(value); }
  bool string(std::string& value) { return add(std::move(value)); }
  bool binary(const nlohmann::json::binary_t&) { return false; }  // JSON has none
  bool start_object(std::size_t) { return open(Json::object()); }
  bool start_array(std::size_t) { return open(Json::array()); }
  bool end_array() { return close(); }
  bool end_object() {
    if (skipped_levels_ == 0) merge_equal_keys(levels_.back().value.members());
    return close();
  }
  bool key(std::string& key) {
    if (skipped_levels_ == 0) levels_.back().key = std::move(key);
    return true;
  }
  bool parse_error(std::size_t byte, const std::string&,
                   const nlohmann::json::exception& exception) {
    const bool syntax = dynamic_cast<const nlohmann::json::parse_error*>(&exception) != nullptr;
    throw JsonError(syntax ? JsonError::Reason::kSyntax : JsonError::Reason::kNumber, byte,
                    exception.what());
  }

 private:
  // An array or object that is not closed yet.
  struct Level {
    Json value;
    std::string key;  // of the next member, in an object
  };

  bool open(Json empty) {
    if (is_skipped()) {
      ++skipped_levels_;
    } else {
      levels_.push_back({std::move(empty), {}});
    }
    return true;
  }

  bool close() {
    if (skipped_levels_ > 0) {
      --skipped_levels_;
      return true;
    }
    Json closed = std::move(levels_.back().value);
    levels_.pop_back();
    return add(std::move(closed));
  }

  bool add(Json value) {
    if (is_skipped()) return true;
    if (levels_.empty()) {
      result_ = std::move(value);
    } else if (Level& level = levels_.back(); level.value.is_object()) {
      level.value.members().push_back({std::move(level.key), std::move(value)});
    } else if (is_long_list()) {
      list_->take(value);
    } else {
      level.value.push_back(std::move(value));
    }
    return true;
  }

  bool is_skipped() const {
    if (skipped_levels_ > 0) return true;
    if (list_ == nullptr || levels_.size() != 1 || levels_[0].value.is_array()) return false;
    return levels_[0].key != list_->key && levels_[0].key != list_->beside;
  }

  // The innermost level, which is an array.
  bool is_long_list() const {
    if (list_ == nullptr) return false;
    return levels_.size() == 1 ||
           (levels_.size() == 2 && levels_[0].value.is_object() && levels_[0].key == list_->key);
  }

  const LongList* list_;
  Json result_;
  std::vector<Level> levels_;
  int skipped_levels_ = 0;
};

Json parse(std::string_view text, const LongList* list) {
  if (const std::optional<std::size_t> at = too_deep_at(text)) {
    throw JsonError(JsonError::Reason::kTooDeep, *at,
                    fmt::format("nests too deep at byte {}", *at));
  }
  Builder builder(list);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take_result();
}

nlohmann::ordered_json to_library(const Json& value, bool sorted) {
  if (value.is_boolean()) return value.boolean();
  if (value.is_unsigned()) return value.unsigned_integer();
  if (value.is_integer()) return value.integer();
  if (value.is_number()) return value.number();
  if (value.is_string()) return value.text();
  if (value.is_array()) {
    nlohmann::ordered_json array = nlohmann::ordered_json::array();
    for (const Json& element : value.elements()) array.push_back(to_library(element, sorted));
    return array;
  }
  if (!value.is_object()) return nullptr;
  std::vector<const Json::Member*> members;
  for (const Json::Member& member : value.members()) members.push_back(&member);
  if (sorted) {
    std::sort(members.begin(), members.end(),
              [](const Json::Member* a, const Json::Member* b) { return a->key < b->key; });
  }
  nlohmann::ordered_json object = nlohmann::ordered_json::object();
  // This avoids operator[], which looks through all members for each.
  auto& added = object.get_ref<nlohmann::ordered_json::object_t&>();
  for (const Json::Member* member : members) {
    added.push_back({member->key, to_library(member->value, sorted)});
  }
  return object;
}

}  // namespace

Json::Json() = default;
Json::Json(std::nullptr_t) {}
Json::Json(bool value) : value_(value) {}
Json::Json(double value) : value_(value) {}
Json::Json(const char* text) : value_(std::string(text)) {}
Json::Json(std::string_view text) : value_(std::string(text)) {}
Json::Json(std::string text) : value_(std::move(text)) {}
Json::Json(Array elements) : value_(std::move(elements)) {}
Json::Json(std::initializer_list<Member> members) : value_(Object(members)) {}

Json::Json(const Json& other) = default;
Json::Json(Json&& other) noexcept = default;
Json& Json::operator=(const Json& other) = default;
Json& Json::operator=(Json&& other) noexcept = default;
Json::~Json() = default;

Json Json::array() { return Json(Array()); }
Json Json::object() { return Json(std::initializer_list<Member>()); }

bool Json::is_null() const { return std::holds_alternative<std::nullptr_t>(value_); }
bool Json::is_boolean() const { return std::holds_alternative<bool>(value_); }
bool Json::is_number() const { return is_integer() || std::holds_alternative<double>(value_); }
bool Json::is_integer() const {
  return is_unsigned() || std::holds_alternative<std::int64_t>(value_);
}
bool Json::is_unsigned() const { return std::holds_alternative<std::uint64_t>(value_); }
bool Json::is_string() const { return std::holds_alternative<std::string>(value_); }
bool Json::is_array() const { return std::holds_alternative<Array>(value_); }
bool Json::is_object() const { return std::holds_alternative<Object>(value_); }

bool Json::boolean() const { return std::get<bool>(value_); }
double Json::number() const {
  if (is_unsigned()) return static_cast<double>(unsigned_integer());
  return is_integer() ? static_cast<double>(integer()) : std::get<double>(value_);
}
std::int64_t Json::integer() const {
  return is_unsigned() ? static_cast<std::int64_t>(std::get<std::uint64_t>(value_))
                       : std::get<std::int64_t>(value_);
}
std::uint64_t Json::unsigned_integer() const {
  return is_unsigned() ? std::get<std::uint64_t>(value_) : static_cast<std::uint64_t>(integer());
}
const std::string& Json::text() const { return std::get<std::string>(value_); }
const Json::Array& Json::elements() const { return std::get<Array>(value_); }
Json::Array& Json::elements() { return std::get<Array>(value_); }
const Json::Object& Json::members() const { return std::get<Object>(value_); }
Json::Object& Json::members() { return std::get<Object>(value_); }

const Json* Json::find(std::string_view key) const {
  if (!is_object()) return nullptr;
  for (const Member& member : members()) {
    if (member.key == key) return &member.value;
  }
  return nullptr;
}
Json* Json::find(std::string_view key) { return const_cast<Json*>(std::as_const(*this).find(key)); }

Json& Json::operator[](std::string_view key) {
  if (is_null()) value_ = Object();
  if (Json* const found = find(key)) return *found;
  return members().emplace_back(Member{std::string(key), Json()}).value;
}

void Json::update(const Json& object) {
  for (const Member& member : object.members()) (*this)[member.key] = member.value;
}

void Json::erase(std::string_view key) {
  std::erase_if(members(), [key](const Member& member) { return member.key == key; });
}

void Json::push_back(Json element) {
  if (is_null()) value_ = Array();
  elements().push_back(std::move(element));
}

std::string Json::dump(const JsonStyle& style) const {
  return to_library(*this, style.sorted)
      .dump(style.indent, ' ', style.ascii, nlohmann::ordered_json::error_handler_t::replace);
}

Json Json::parse(std::string_view text) { return switchyard::parse(text, nullptr); }

Json parse_long_list(std::string_view text, std::string_view list, std::string_view beside,
                     const std::function<void(const Json&)>& take) {
  const LongList long_list{list, beside, take};
  return parse(text, &long_list);
}

Json parse_json(std::string_view text, ErrorCode code, const std::string& source) {
  try {
    return Json::parse(text);
  } catch (const JsonError& error) {
    switch (error.reason()) {
      case JsonError::Reason::kTooDeep:
        throw Error(code,
                    fmt::format("{}: nested deeper than {} levels at byte {}; this is not a file "
                                "that any model publisher writes, download it again",
                                printable(source), kMaxDepth, error.byte()));
      case JsonError::Reason::kSyntax:
        if (text.empty())
          throw Error(code, fmt::format("{}: is empty; download it again", printable(source)));
        if (const std::string what = foreign_contents(text); !what.empty())
          throw Error(code, fmt::format("{}: {}", printable(source), what));
        if (error.byte() > text.size()) {
          throw Error(code, fmt::format("{}: not valid JSON: its {} bytes end in the middle; the "
                                        "file is cut off, download it again",
                                        printable(source), text.size()));
        }
        throw Error(
            code, fmt::format("{}: not valid JSON at byte {} of {}; the file is damaged or is not "
                              "what it claims to be, download it again",
                              printable(source), error.byte(), text.size()));
      case JsonError::Reason::kNumber: break;
    }
    throw Error(code, fmt::format("{}: not usable JSON ({}); download the file again",
                                  printable(source), printable(error.what())));
  }
}

std::string excerpt(const Json& value) {
  std::string text = value.dump({.ascii = true});
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

}  // namespace switchyard
