// Typed access to the keys of a config.json.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/join.h"
#include "base/json.h"
#include "base/printable.h"
#include "switchyard/error.h"

namespace switchyard {

// Typed access to one JSON object. null counts as absent: it is what transformers writes for a key
// whose default is None.
class Keys {
 public:
  Keys(const Json& object, std::string source, std::string path)
      : object_(&object), source_(std::move(source)), path_(std::move(path)) {}

  // The sentence with which fail() names a key.
  std::string sentence(std::string_view key, std::string_view problem) const {
    return fmt::format("{}: '{}{}' {}", printable(source_), path_, printable(key), problem);
  }
  [[noreturn]] void fail(std::string_view key, std::string_view problem) const {
    throw Error(ErrorCode::kInvalidConfig, sentence(key, problem));
  }

  const Json* find(std::string_view key) const {
    const Json* const found = object_->find(key);
    return found == nullptr || found->is_null() ? nullptr : found;
  }
  bool has(std::string_view key) const { return find(key) != nullptr; }
  // True if the key is written out as null, for the rare key whose default is something else.
  bool is_null(std::string_view key) const {
    const Json* const found = object_->find(key);
    return found != nullptr && found->is_null();
  }

  // Returns one number under any of several names. Refuses names that contradict each other.
  int integer(std::initializer_list<std::string_view> names, int low, int high) const {
    std::optional<int> result;
    std::string_view first;
    for (const std::string_view name : names) {
      const Json* const value = find(name);
      if (value == nullptr) continue;
      const int number = to_integer(name, *value, low, high);
      if (result && *result != number)
        fail(name, fmt::format("is {}, but '{}{}' is {}; both name the same size, so correct one",
                               number, path_, first, *result));
      if (!result) first = name;
      result = number;
    }
    if (result) return *result;
    fail(*names.begin(),
         fmt::format("is missing{}; it has no default, use the config.json that the model's "
                     "publisher ships",
                     names.size() > 1
                         ? fmt::format(" (also looked for: {})",
                                       join(std::span(names.begin() + 1, names.end()), ", "))
                         : std::string()));
  }
  // Returns the first key with a value that is not among `known`, or nothing.
  std::optional<std::string> unknown(std::initializer_list<std::string_view> known) const {
    for (const auto& [key, value] : object_->members())
      if (!value.is_null() && std::find(known.begin(), known.end(), key) == known.end()) return key;
    return std::nullopt;
  }
  // Returns the names of all keys, for an object that is a list of named things.
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& [key, value] : object_->members()) result.push_back(key);
    return result;
  }

  int integer(std::string_view name, int low, int high) const { return integer({name}, low, high); }
  int integer_or(std::string_view name, int fallback, int low, int high) const {
    const Json* value = find(name);
    return value ? to_integer(name, *value, low, high) : fallback;
  }

  float number_or(std::string_view name, float fallback, float low, float high) const {
    const Json* value = find(name);
    if (!value) return fallback;
    if (!value->is_number()) fail(name, fmt::format("is {}; expected a number", excerpt(*value)));
    const double number = value->number();
    if (!(number >= low && number <= high))
      fail(name, fmt::format("is {}; expected a number in [{}, {}]", excerpt(*value), low, high));
    return static_cast<float>(number);
  }

  bool boolean_or(std::string_view name, bool fallback) const {
    const Json* value = find(name);
    if (!value) return fallback;
    if (!value->is_boolean())
      fail(name, fmt::format("is {}; expected true or false", excerpt(*value)));
    return value->boolean();
  }

  std::string text_or(std::string_view name, const char* fallback) const {
    const Json* value = find(name);
    if (!value) return fallback;
    if (!value->is_string()) fail(name, fmt::format("is {}; expected a string", excerpt(*value)));
    return value->text();
  }

  std::string text_in(std::string_view name, const char* fallback,
                      std::initializer_list<std::string_view> allowed) const {
    std::string value = text_or(name, fallback);
    if (std::find(allowed.begin(), allowed.end(), value) == allowed.end())
      fail(name, fmt::format("is {}; this model family has only: {}", excerpt(Json(value)),
                             join(allowed, ", ")));
    return value;
  }

  // Returns an array of integers in [low, high], or nothing if absent.
  std::optional<std::vector<int>> integers(std::string_view name, int low, int high) const {
    const Json* value = find(name);
    if (!value) return std::nullopt;
    if (!value->is_array())
      fail(name, fmt::format("is {}; expected an array of integers", excerpt(*value)));
    std::vector<int> result;
    for (const Json& element : value->elements())
      result.push_back(to_integer(name, element, low, high));
    return result;
  }

  std::optional<Keys> object(std::string_view name) const {
    const Json* value = find(name);
    if (!value) return std::nullopt;
    if (!value->is_object()) fail(name, fmt::format("is {}; expected an object", excerpt(*value)));
    return Keys(*value, source_, fmt::format("{}{}.", path_, name));
  }

 private:
  int to_integer(std::string_view name, const Json& value, int low, int high) const {
    bool fits = false;
    std::int64_t number = 0;
    if (value.is_unsigned()) {
      const std::uint64_t magnitude = value.unsigned_integer();
      fits = magnitude <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
      number = fits ? static_cast<std::int64_t>(magnitude) : 0;
    } else if (value.is_integer()) {
      fits = true;
      number = value.integer();
    }
    if (!fits || number < low || number > high)
      fail(name, fmt::format("is {}; expected an integer in [{}, {}], use the config.json that the "
                             "model's publisher ships",
                             excerpt(value), low, high));
    return static_cast<int>(number);
  }

  const Json* object_;
  std::string source_, path_;
};

}  // namespace switchyard
