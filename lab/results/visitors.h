// Fields of a row on their way into a file and out of it. A row's visit() names all of its fields
// once, and calls one of these visitors for each.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "results/fields.h"

namespace switchyard::results {

struct Rival {
  std::string name;  // "torch 2.11.0 ordered"
  double median_us = 0;
  std::optional<double> p10_us, p90_us;
};
// In files.
inline constexpr const char* kRivalFields[] = {"rival", "rival_us", "rival_p10_us", "rival_p90_us"};

Remedies remedies_of(const char* other);

// Refuses files that are likely to be given by mistake: traces, results of other programs, and rows
// of another kind than `kind` (a type's kKind).
void refuse_other_files(const Json& file, const std::string& source, std::string_view kind,
                        const char* remedy);

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
  void rival(const std::optional<Rival>& rival);

 private:
  void put(const char* field, Json value);

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
  void rival(std::optional<Rival>& value) {
    if (!from_.present("rival") && !from_.present("rival_us")) return;
    value = Rival{from_.text("rival"), from_.microseconds("rival_us"), {}, {}};
    time("rival_p10_us", value->p10_us);
    time("rival_p90_us", value->p90_us);
  }

 private:
  const FieldReader& from_;
};

// Fields that most types of rows have, in their order.
template <typename RowType, typename Visitor>
void visit_head(RowType& row, Visitor& field) {
  field.text("suite", row.suite);
  field.text("machine", row.machine);
  field.text("commit", row.commit);
  field.text("command", row.command);
}
// The layer that was measured.
template <typename RowType, typename Visitor>
void visit_layer(RowType& row, Visitor& field) {
  field.text("model", row.model);
  field.count("hidden", row.hidden);
  field.count("intermediate", row.intermediate);
  field.count("experts", row.experts);
  field.count("top_k", row.top_k);
  field.text("dtype", row.dtype);
}
template <typename RowType, typename Visitor>
void visit_times(RowType& row, Visitor& field) {
  field.time("median_us", row.median_us);
  field.time("p10_us", row.p10_us);
  field.time("p90_us", row.p90_us);
  field.count("repeats", row.repeats);
}

}  // namespace switchyard::results
