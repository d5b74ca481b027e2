#include "results/visitors.h"

#include <fmt/core.h>

#include <cmath>
#include <utility>

namespace switchyard::results {
namespace {

double rounded(double value, int digits) {
  const double scale = std::pow(10.0, digits);
  return std::round(value * scale) / scale;
}
// Events resolve half a microsecond or worse; more digits only make the files longer.
double hundredths(double value) { return rounded(value, 2); }

}  // namespace

Remedies remedies_of(const char* other) {
  return {other, "give files that 'switchyard bench --json' wrote, or measure the point again",
          "measure the point again with 'switchyard bench --json'"};
}

void require_ordered(const FieldReader& read, double p10_us, double median_us, double p90_us) {
  if (p10_us > median_us) read.refuse("p10_us", fmt::format("at most the median, {}", median_us));
  if (p90_us < median_us) read.refuse("p90_us", fmt::format("at least the median, {}", median_us));
}

void FieldWriter::put(const char* field, Json value) { json_[field] = std::move(value); }
void FieldWriter::share(const char* field, const std::optional<double>& value) {
  put(field, value ? Json(rounded(*value, 4)) : Json());
}
void FieldWriter::ratio(const char* field, double value) { put(field, rounded(value, 4)); }
void FieldWriter::time(const char* field, double value) { put(field, hundredths(value)); }
void FieldWriter::time(const char* field, const std::optional<double>& value) {
  put(field, value ? Json(hundredths(*value)) : Json());
}
void FieldWriter::quantiles(const char* field, const std::vector<double>& values) {
  put(field, nullptr);
  for (const double value : values) json_[field].push_back(rounded(value, 3));
}
void FieldWriter::times(const char* field, const std::vector<double>& values) {
  for (const double value : values) json_[field].push_back(hundredths(value));
}

}  // namespace switchyard::results
