#include "results/fields.h"

#include <fmt/core.h>

#include <cmath>

#include "base/printable.h"
#include "switchyard/error.h"

namespace switchyard::results {
namespace {

// JavaScript, which reads the page's numbers, does not have every whole number beyond this.
constexpr double kMostWhole = 9007199254740992;  // 2^53
constexpr std::size_t kMostQuantiles = 64;

// Infinity is not JSON, but a number that is too large for a double is read as infinity.
bool is_time(const Json& value) {
  return value.is_number() && value.number() > 0 && std::isfinite(value.number());
}

}  // namespace

void refuse_file(const std::string& source, const std::string& problem, const std::string& remedy) {
  throw Error(ErrorCode::kInvalidFile,
              fmt::format("{} {}; {}", printable(source), problem, remedy));
}

Json parse(std::string_view text, const std::string& source, const char* remedy) {
  try {
    return Json::parse(text);
  } catch (const JsonError& error) {
    if (error.reason() == JsonError::Reason::kTooDeep) refuse_file(source, error.what(), remedy);
    refuse_file(source, fmt::format("is not JSON ({})", printable(error.what())), remedy);
  }
}

FieldReader::FieldReader(const Json& row, const std::string& source, std::size_t number,
                         const Remedies& remedies)
    : row_(row), source_(source), number_(number), remedies_(remedies) {
  if (row.is_object()) return;
  refuse_file(source, fmt::format("row {}: is not an object, but {}", number, excerpt(row)),
              remedies.other);
}

std::string FieldReader::text(const char* field) const {
  const Json& value = required(field);
  if (!value.is_string() || value.text().empty()) {
    refuse(field, "a text that is not empty");
  }
  return value.text();
}

std::int64_t FieldReader::count(const char* field) const {
  return static_cast<std::int64_t>(whole(field, 1));
}

double FieldReader::whole(const char* field, double least) const {
  const Json& value = required(field);
  const double number = value.is_number() ? value.number() : -1;
  if (number < least || number > kMostWhole || number != std::floor(number)) {
    refuse(field, fmt::format("a whole number from {}", least));
  }
  return number;
}

double FieldReader::microseconds(const char* field) const {
  const Json& value = required(field);
  if (!is_time(value)) refuse(field, "microseconds, above 0");
  return value.number();
}

double FieldReader::at_least_zero(const char* field) const {
  const Json& value = required(field);
  const double number = value.is_number() ? value.number() : -1;
  if (!(number >= 0) || !std::isfinite(number)) refuse(field, "a number from 0");
  return number;
}

double FieldReader::share(const char* field) const {
  const Json& value = required(field);
  const double number = value.is_number() ? value.number() : -1;
  if (!(number >= 0 && number <= 1)) refuse(field, "a number from 0 to 1");
  return number;
}

bool FieldReader::flag(const char* field) const {
  const Json& value = required(field);
  if (!value.is_boolean()) refuse(field, "true or false");
  return value.boolean();
}

std::vector<double> FieldReader::quantiles(const char* field) const {
  const Json& list = required(field);
  const std::string wanted =
      fmt::format("1 to {} ascending numbers, the least not below 0", kMostQuantiles);
  if (!list.is_array() || list.elements().empty() || list.elements().size() > kMostQuantiles) {
    refuse(field, wanted);
  }
  std::vector<double> values;
  for (const Json& element : list.elements()) {
    const double value = element.is_number() ? element.number() : -1;
    if (!(value >= (values.empty() ? 0 : values.back())) || !std::isfinite(value)) {
      refuse(field, wanted);
    }
    values.push_back(value);
  }
  return values;
}

std::vector<double> FieldReader::all_microseconds(const char* field) const {
  const Json& list = required(field);
  const char* const wanted = "a list of microseconds, each above 0";
  if (!list.is_array()) refuse(field, wanted);
  std::vector<double> values;
  for (const Json& element : list.elements()) {
    if (!is_time(element)) refuse(field, wanted);
    values.push_back(element.number());
  }
  return values;
}

const Json& FieldReader::required(const char* field) const {
  if (const Json* const value = row_.find(field)) return *value;
  refuse_file(source_, fmt::format("row {}: has no '{}'", number_, field), remedies_.absent);
}

void FieldReader::refuse(const char* field, const std::string& wanted) const {
  refuse_file(
      source_,
      fmt::format("row {}: '{}' is {}, not {}", number_, field, excerpt(*row_.find(field)), wanted),
      remedies_.wrong);
}

}  // namespace switchyard::results
