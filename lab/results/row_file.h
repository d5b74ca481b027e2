// Files of rows: a list of JSON objects, one on each line. A type of rows has
//
//   visit(row, field)   names all fields once, in their order in a file; reading and writing share
//   it point()             what was measured: a new row replaces the one with the same point and
//   card kKind               what its rows are of, for messages kRemedy             which file to
//   give instead of one that holds something else judge(read)         optional: refuses values that
//   do not fit together
//
// and shares the rest, which is here. Reading is strict, because a page must not show a number that
// no file has.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "results/fields.h"
#include "results/visitors.h"

namespace switchyard::results {

// Returns the name of the device in a row's `machine`: "NVIDIA H200" of "2 x NVIDIA H200, 132 SMs,
// CUDA 13.0".
std::string card_of(std::string_view machine);

// Returns a row's key. Rows of different cards are of different points.
template <typename RowType>
std::string point_of(const RowType& row) {
  return row.point() + ", on " + card_of(row.machine);
}

// Writes a row. Times are rounded to hundredths of a microsecond, because events resolve no more.
template <typename RowType>
Json to_json(const RowType& row) {
  Json json;
  RowType::visit(row, FieldWriter(json));
  return json;
}

// Returns the rows of a list, which may have none. Throws Error{kInvalidFile} if an element is not
// a row. The error names `source`, the element (counted from 1) and the field, and gives `remedy`
// if the list is of something else.
template <typename RowType>
std::vector<RowType> rows_of(const Json& file, const std::string& source, const char* remedy) {
  refuse_other_files(file, source, RowType::kKind, remedy);
  const Remedies remedies = remedies_of(remedy);
  std::vector<RowType> rows;
  for (const Json& element : file.elements()) {
    const FieldReader read(element, source, rows.size() + 1, remedies);
    RowType& row = rows.emplace_back();
    RowType::visit(row, FieldFiller(read));
    if constexpr (requires { row.median_us; }) {
      require_ordered(read, row.p10_us, row.median_us, row.p90_us);
    }
    if constexpr (requires { row.judge(read); }) row.judge(read);
  }
  return rows;
}

// The same of a file's text, which must have rows.
template <typename RowType>
std::vector<RowType> parse_rows(std::string_view text, const std::string& source) {
  std::vector<RowType> rows =
      rows_of<RowType>(parse(text, source, RowType::kRemedy), source, RowType::kRemedy);
  if (rows.empty()) refuse_file(source, "is an empty list", RowType::kRemedy);
  return rows;
}

// A row to write.
struct NewRow {
  Json json;
  std::string point;
  bool keeps_rival = false;  // takes the rival of the row that it replaces, if it has none
};
// Reads a list and returns the points of its rows.
using PointsOf = std::vector<std::string> (*)(const Json&, const std::string&, const char*);
template <typename RowType>
std::vector<std::string> points_of(const Json& file, const std::string& source,
                                   const char* remedy) {
  std::vector<std::string> points;
  for (const RowType& row : rows_of<RowType>(file, source, remedy)) points.push_back(point_of(row));
  return points;
}
void require_mergeable(const std::filesystem::path& file, PointsOf points_of);
void merge_new(const std::filesystem::path& file, std::vector<NewRow> rows, PointsOf points_of);

// Throws what merge_rows() would throw for this file. Call it before a measurement, so that its
// rows are not lost.
template <typename RowType>
void require_mergeable(const std::filesystem::path& file) {
  require_mergeable(file, points_of<RowType>);
}

// Replaces the rows of a file that are of the same point as one of `rows`, and appends the others.
// The rest of the file stays as it is. The new file appears whole or not at all. Processes that
// merge at the same time wait for each other. With `keep_rival`, a row without a rival inherits the
// rival of the row that it replaces. Throws Error{kInvalidFile} if the file holds something else,
// and what write_whole() throws.
template <typename RowType>
void merge_rows(const std::filesystem::path& file, const std::vector<RowType>& rows,
                bool keep_rival = false) {
  std::vector<NewRow> written;
  for (const RowType& row : rows) written.push_back({to_json(row), point_of(row), keep_rival});
  merge_new(file, std::move(written), points_of<RowType>);
}

}  // namespace switchyard::results
