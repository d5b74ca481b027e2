// JSON: how untrusted text enters the library, and how files and reports are written. nlohmann-json
// parses and prints it. Only json.cpp includes that library, which takes seconds in every file.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "switchyard/error.h"

namespace switchyard {

struct JsonStyle {
  int indent = -1;      // columns per level; -1: everything on one line
  bool ascii = false;   // escapes all other characters
  bool sorted = false;  // members by key, instead of in their order
};

// A value. Getters of the wrong kind throw std::bad_variant_access: ask is_...() before. Objects
// keep their members in order, and have a key once. A reference to an element or member is valid
// until its array or object gets or loses another.
class Json {
 public:
  struct Member;
  using Array = std::vector<Json>;
  using Object = std::vector<Member>;

  Json();  // null
  Json(std::nullptr_t);
  Json(bool value);
  Json(double value);
  Json(const char* text);
  Json(std::string_view text);
  Json(std::string text);
  template <std::integral Integer>
  Json(Integer value);
  // An empty value is null.
  template <typename T>
  Json(const std::optional<T>& value) : Json(value ? Json(*value) : Json()) {}
  template <typename T>
  Json(const std::vector<T>& elements) : Json(Array(elements.begin(), elements.end())) {}
  Json(Array elements);
  // An object of members with different keys.
  Json(std::initializer_list<Member> members);

  Json(const Json& other);
  Json(Json&& other) noexcept;
  Json& operator=(const Json& other);
  Json& operator=(Json&& other) noexcept;
  ~Json();

  static Json array();
  static Json object();

  bool is_null() const;
  bool is_boolean() const;
  bool is_number() const;
  bool is_integer() const;
  bool is_unsigned() const;  // an integer of text without a minus
  bool is_string() const;
  bool is_array() const;
  bool is_object() const;

  bool boolean() const;
  double number() const;
  // Requires a number that 64 bits can hold; others wrap.
  std::int64_t integer() const;
  std::uint64_t unsigned_integer() const;
  const std::string& text() const;
  const Array& elements() const;
  Array& elements();
  const Object& members() const;
  Object& members();

  // Returns null where this is no object, or has no such member.
  const Json* find(std::string_view key) const;
  Json* find(std::string_view key);
  bool contains(std::string_view key) const { return find(key) != nullptr; }

  // Returns an object's member, which is added if there is none. Null becomes an object.
  Json& operator[](std::string_view key);
  // Adds all members of another object; those of the same key are replaced.
  void update(const Json& object);
  void erase(std::string_view key);
  // Null becomes an array.
  void push_back(Json element);

  // Bytes that are not UTF-8 are replaced.
  std::string dump(const JsonStyle& style = {}) const;

  // Throws JsonError.
  static Json parse(std::string_view text);

 private:
  // (Whatever needs Member to be complete is defined behind it.)
  using Value = std::variant<std::nullptr_t, bool, std::int64_t, std::uint64_t, double, std::string,
                             Array, Object>;
  Value value_;
};

struct Json::Member {
  std::string key;
  Json value;
};

template <std::integral Integer>
Json::Json(Integer value) {
  if constexpr (std::signed_integral<Integer>) {
    value_ = static_cast<std::int64_t>(value);
  } else {
    value_ = static_cast<std::uint64_t>(value);
  }
}

// The reason why text is no JSON, in the parser's words.
class JsonError : public std::runtime_error {
 public:
  enum class Reason { kSyntax, kTooDeep, kNumber };

  JsonError(Reason reason, std::size_t byte, const std::string& message)
      : std::runtime_error(message), reason_(reason), byte_(byte) {}

  Reason reason() const { return reason_; }
  std::size_t byte() const { return byte_; }  // where the error is

 private:
  Reason reason_;
  std::size_t byte_;
};

// Reads a file that is a long list, without keeping the list: its elements are passed to `take` as
// they are read. The list is the whole text or, in an object, the member `list`. Returns the text's
// value with an empty list; of an object, only that and the member `beside`. Throws JsonError, and
// what `take` throws.
Json parse_long_list(std::string_view text, std::string_view list, std::string_view beside,
                     const std::function<void(const Json&)>& take);

// Does the same as Json::parse(), but throws Error{code}, which names `source`.
Json parse_json(std::string_view text, ErrorCode code, const std::string& source);

// Returns at most 60 characters of a value, for messages.
std::string excerpt(const Json& value);

}  // namespace switchyard
