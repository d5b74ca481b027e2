#include "report/tables.h"

#include <utility>

namespace switchyard::report {
namespace {

// Returns the list of rows in a file, and in `about` what the rows of a program share.
const Json* list_in(const Json& file, Json& about) {
  if (file.is_array()) return &file;
  const Json* const benchmarks = file.find("benchmarks");
  const Json* const list = benchmarks != nullptr ? benchmarks : file.find("classes");
  if (list == nullptr || !list->is_array()) return nullptr;
  about["suite"] = benchmarks != nullptr ? "cpu_bench" : "check_hf";
  if (const Json* const told = file.find("switchyard"); told != nullptr && told->is_object()) {
    about.update(*told);
  }
  for (const char* const name : {"transformers", "torch", "command"}) {
    if (const Json* const value = file.find(name); value != nullptr && value->is_string()) {
      about[name] = *value;
    }
  }
  return list;
}

// Rows of layers and of the all-to-all problem, and events of a trace, are none.
bool is_row(const Json& row) {
  const bool named = row.contains("suite") || row.contains("machine");
  const bool of_layers = row.contains("nvlink_bytes") && row.contains("intermediate");
  return named && !of_layers && !row.contains("rung") && !row.contains("ph");
}

// A row of what failed may tell no number, but not all rows.
bool tells_something(const Json& row) {
  for (const Json::Member& member : row.members()) {
    if (member.value.is_number()) return true;
  }
  return row.contains("status");
}

}  // namespace

std::optional<Table> table_of(const Json& file, std::string name) {
  Json about = Json::object();
  const Json* const list = list_in(file, about);
  if (list == nullptr || list->elements().empty()) return std::nullopt;
  Table table{Json::array(), std::move(name)};
  bool tells = false;
  for (const Json& element : list->elements()) {
    if (!element.is_object()) return std::nullopt;
    Json row = about;
    row.update(element);
    if (!is_row(row)) return std::nullopt;
    tells = tells || tells_something(row);
    Json shown = Json::object();
    for (const Json::Member& member : row.members()) {
      const Json& value = member.value;
      if (value.is_string() || value.is_number() || value.is_boolean()) shown[member.key] = value;
    }
    table.rows.push_back(std::move(shown));
  }
  return tells ? std::optional(std::move(table)) : std::nullopt;
}

}  // namespace switchyard::report
