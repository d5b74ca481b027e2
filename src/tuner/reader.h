// Reads the tuner's files strictly.
#pragma once

#include <fmt/core.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/printable.h"
#include "switchyard/error.h"

namespace switchyard::tuner {

// An object of a file and its place in it, "points[3]". Every getter refuses a field that is absent
// or out of its domain.
class Reader {
 public:
  Reader(const Json& json, const std::string& source, std::string where)
      : json_(json), source_(source), where_(std::move(where)) {
    if (!json_.is_object()) fail(where_.empty() ? "the file" : where_, "an object", json_);
  }

  std::string text(const char* field) const {
    const Json& value = required(field);
    if (!value.is_string()) fail(name(field), "a text", value);
    return value.text();
  }
  std::int64_t whole(const char* field, std::int64_t least,
                     std::int64_t most = std::numeric_limits<int>::max()) const {
    const Json& value = required(field);
    if (!value.is_integer() || value.number() < static_cast<double>(least) ||
        value.number() > static_cast<double>(most)) {
      fail(name(field), fmt::format("a whole number from {} to {}", least, most), value);
    }
    return value.integer();
  }
  int number_of(const char* field, int least = 1) const {
    return static_cast<int>(whole(field, least));
  }
  std::uint64_t any_whole(const char* field) const {
    const Json& value = required(field);
    if (!value.is_integer() || value.number() < 0) fail(name(field), "a whole number", value);
    return value.unsigned_integer();
  }
  bool yes(const char* field) const {
    const Json& value = required(field);
    if (!value.is_boolean()) fail(name(field), "true or false", value);
    return value.boolean();
  }
  double real(const char* field) const {
    const Json& value = required(field);
    if (!value.is_number() || !std::isfinite(value.number())) fail(name(field), "a number", value);
    return value.number();
  }
  double share(const char* field) const {
    const double value = real(field);
    if (value < 0 || value > 1) fail(name(field), "a number from 0 to 1", required(field));
    return value;
  }
  const Json::Array& list(const char* field) const {
    const Json& value = required(field);
    if (!value.is_array()) fail(name(field), "a list", value);
    return value.elements();
  }
  Reader object(const char* field) const { return {required(field), source_, name(field)}; }
  std::vector<Reader> objects(const char* field) const {
    std::vector<Reader> all;
    for (const Json& element : list(field)) {
      all.emplace_back(element, source_, fmt::format("{}[{}]", name(field), all.size()));
    }
    return all;
  }
  const Json& json() const { return json_; }
  bool has(const char* field) const { return json_.contains(field); }
  std::string name(const char* field) const {
    return where_.empty() ? field : fmt::format("{}.{}", where_, field);
  }

  [[noreturn]] void fail(const std::string& field, const std::string& wanted,
                         const Json& value) const {
    throw Error(ErrorCode::kInvalidFile,
                fmt::format("{}: {} is {}, but must be {}; {}", printable(source_), field,
                            excerpt(value), wanted, kRemedy));
  }
  [[noreturn]] void refuse(const std::string& problem) const {
    throw Error(ErrorCode::kInvalidFile,
                fmt::format("{}: {}; {}", printable(source_), problem, kRemedy));
  }

 private:
  static constexpr const char* kRemedy = "give a file that this program wrote, or make it anew";

  const Json& required(const char* field) const {
    const Json* const value = json_.find(field);
    if (value == nullptr) refuse(fmt::format("{} is absent", name(field)));
    return *value;
  }

  const Json& json_;
  const std::string& source_;
  std::string where_;
};

}  // namespace switchyard::tuner
