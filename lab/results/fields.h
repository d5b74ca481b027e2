// Strict reading of a list of objects in JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace switchyard::results {

// Larger files are refused unread.
inline constexpr std::uint64_t kMostFileBytes = std::uint64_t{1} << 30;

// Throws Error{kInvalidFile} "source problem; remedy".
[[noreturn]] void refuse_file(const std::string& source, const std::string& problem,
                              const std::string& remedy);

// Parses a file. Throws as refuse_file() does if it is not JSON, or nests too deep for the parser's
// stack.
Json parse(std::string_view text, const std::string& source, const char* remedy);

// The remedies for a file of another kind, an absent field, and a field out of its domain.
struct Remedies {
  const char *other, *absent, *wrong;
};

// One element of a file's list. Every getter refuses a field that is absent or out of its domain.
class FieldReader {
 public:
  FieldReader(const Json& row, const std::string& source, std::size_t number,
              const Remedies& remedies);

  std::string text(const char* field) const;
  std::int64_t count(const char* field) const;              // a whole number from 1
  double whole(const char* field, double least = 0) const;  // below 2^53
  double microseconds(const char* field) const;             // above 0
  double at_least_zero(const char* field) const;
  double share(const char* field) const;  // from 0 to 1
  bool flag(const char* field) const;
  std::vector<double> quantiles(const char* field) const;  // 1 to 64, ascending from 0
  std::vector<double> all_microseconds(const char* field) const;

  // Returns whether a field is neither absent nor null.
  bool present(const char* field) const {
    const Json* const value = row_.find(field);
    return value != nullptr && !value->is_null();
  }
  const Json& required(const char* field) const;

  [[noreturn]] void refuse(const char* field, const std::string& wanted) const;

 private:
  const Json& row_;
  const std::string& source_;
  std::size_t number_;
  const Remedies& remedies_;
};

}  // namespace switchyard::results
