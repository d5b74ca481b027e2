// Fields of a row on their way into a file and out of it. A row's visit() names all of its fields
// once, and calls one of these visitors for each.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "results/fields.h"

namespace switchyard::results {

Remedies remedies_of(const char* other);

// Refuses a row whose percentiles are not in order.
void require_ordered(const FieldReader& read, double p10_us, double median_us, double p90_us);

class FieldWriter {
 public:
  explicit FieldWriter(Json& json) : json_(json) {}

  void text(const char* field, const std::string& value) { put(field, value); }
  void text_if_any(const char* field, const std::string& value) {
    if (!value.empty()) put(field, value);
  }
  void count(const char* field, std::int64_t value) { put(field, value); }
  void amount(const char* field, double value) { put(field, static_cast<std::uint64_t>(value)); }
  void whole(const char* field, const std::optional<std::int64_t>& value) { put(field, value); }
  void error(const char* field, const std::optional<double>& value) { put(field, value); }
  void share(const char* field, double value) { put(field, value); }
  void share(const char* field, const std::optional<double>& value);
  void flag(const char* field, bool value) { put(field, value); }
  void flag(const char* field, const std::optional<bool>& value) {
    if (value) put(field, *value);
  }
  void ratio(const char* field, double value);
  void time(const char* field, double value);
  void time(const char* field, const std::optional<double>& value);
  void quantiles(const char* field, const std::vector<double>& values);
  void times(const char* field, const std::vector<double>& values);

 protected:
  void put(const char* field, Json value);

 private:
  Json& json_;
};

class FieldFiller {
 public:
  explicit FieldFiller(const FieldReader& from) : from_(from) {}

  void text(const char* field, std::string& value) { value = from_.text(field); }
  void text_if_any(const char* field, std::string& value) {
    if (from_.present(field)) value = from_.text(field);
  }
  void count(const char* field, std::int64_t& value) { value = from_.count(field); }
  void amount(const char* field, double& value) { value = from_.whole(field); }
  void whole(const char* field, std::optional<std::int64_t>& value) {
    if (from_.present(field)) value = static_cast<std::int64_t>(from_.whole(field));
  }
  void error(const char* field, std::optional<double>& value) {
    if (from_.present(field)) value = from_.at_least_zero(field);
  }
  void share(const char* field, double& value) { value = from_.share(field); }
  void flag(const char* field, bool& value) { value = from_.flag(field); }
  void flag(const char* field, std::optional<bool>& value) {
    if (from_.present(field)) value = from_.flag(field);
  }
  void ratio(const char* field, double& value) { value = from_.at_least_zero(field); }
  void share(const char* field, std::optional<double>& value) {
    if (from_.present(field)) value = from_.share(field);
  }
  void time(const char* field, double& value) { value = from_.microseconds(field); }
  void time(const char* field, std::optional<double>& value) {
    if (from_.present(field)) value = from_.microseconds(field);
  }
  void quantiles(const char* field, std::vector<double>& values) {
    if (from_.present(field)) values = from_.quantiles(field);
  }
  void times(const char* field, std::vector<double>& values) {
    if (from_.present(field)) values = from_.all_microseconds(field);
  }

 protected:
  const FieldReader& from() const { return from_; }

 private:
  const FieldReader& from_;
};

// Reads a list of rows: fill(row, filler) visits a row's fields, and judge(read, row) refuses
// values that do not fit together.
template <typename RowType, typename Fill, typename Judge>
std::vector<RowType> rows_of_list(const Json& file, const std::string& source, const char* remedy,
                                  Fill&& fill, Judge&& judge) {
  if (!file.is_array()) refuse_file(source, "is not a list of rows", remedy);
  const Remedies remedies = remedies_of(remedy);
  std::vector<RowType> rows;
  for (const Json& element : file.elements()) {
    const FieldReader read(element, source, rows.size() + 1, remedies);
    fill(rows.emplace_back(), FieldFiller(read));
    const RowType& row = rows.back();
    require_ordered(read, row.p10_us, row.median_us, row.p90_us);
    judge(read, row);
  }
  return rows;
}

}  // namespace switchyard::results
