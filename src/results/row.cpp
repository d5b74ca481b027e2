#include "results/row.h"

#include <fmt/core.h>

#include <map>

#include "base/printable.h"
#include "base/read_file.h"
#include "results/fields.h"
#include "results/list.h"
#include "results/visitors.h"
#include "switchyard/error.h"

namespace switchyard::results {
namespace {

constexpr const char* kRowsRemedy = "give files that 'switchyard bench --json' wrote";

// Visits all fields of a row, in the order of a file. Reading and writing share this list. RowType
// is Row for reading, and const Row for writing.
template <typename RowType, typename Visitor>
void visit(RowType& row, Visitor&& field) {
  field.text("suite", row.suite);
  field.text("machine", row.machine);
  field.text("commit", row.commit);
  field.text("command", row.command);
  field.text_if_any("date", row.date);
  field.text("model", row.model);
  field.count("hidden", row.hidden);
  field.count("intermediate", row.intermediate);
  field.count("experts", row.experts);
  field.count("top_k", row.top_k);
  field.text("dtype", row.dtype);
  field.text_if_any("compute", row.compute);
  field.count("ranks", row.ranks);
  field.count("tokens_per_rank", row.tokens_per_rank);
  field.share("beta", row.beta);
  field.time("median_us", row.median_us);
  field.time("p10_us", row.p10_us);
  field.time("p90_us", row.p90_us);
  field.count("repeats", row.repeats);
  field.amount("touched_bytes", row.touched_bytes);
  field.amount("flops", row.flops);
  field.amount("nvlink_bytes", row.nvlink_bytes);
  field.time("floor_us", row.floor_us);
  field.rival(row.rival);
  field.time("median_us_no_graph", row.median_us_no_graph);
  field.share("beta_reached", row.beta_reached);
  field.whole("experts_hit", row.experts_hit);
  field.quantiles("expert_load", row.expert_load);
  field.text_if_any("routing", row.routing);
  field.whole("rotation_copies", row.rotation_copies);
  field.whole("rotation_passes", row.rotation_passes);
  field.whole("graph_nodes", row.graph_nodes);
  field.error("error", row.error);
  field.error("error_bound", row.error_bound);
  field.flag("gate", row.gate);
  field.times("times_us", row.times_us);
  field.times("times_us_no_graph", row.times_us_no_graph);
}

class Writer : public FieldWriter {
 public:
  using FieldWriter::FieldWriter;

  void rival(const std::optional<Rival>& rival) {
    put("rival", rival ? Json(rival->name) : Json());
    time("rival_us", rival ? std::optional(rival->median_us) : std::nullopt);
    time("rival_p10_us", rival ? rival->p10_us : std::nullopt);
    time("rival_p90_us", rival ? rival->p90_us : std::nullopt);
  }
};

class Reader : public FieldFiller {
 public:
  using FieldFiller::FieldFiller;

  void rival(std::optional<Rival>& value) {
    if (!from().present("rival") && !from().present("rival_us")) return;
    value = Rival{from().text("rival"), from().microseconds("rival_us"), {}, {}};
    time("rival_p10_us", value->p10_us);
    time("rival_p90_us", value->p90_us);
  }
};

Row row_of(const Json& json, const std::string& source, std::size_t number,
           const Remedies& remedies) {
  const FieldReader read(json, source, number, remedies);
  Row row;
  visit(row, Reader(read));
  require_ordered(read, row.p10_us, row.median_us, row.p90_us);
  if (row.gate && *row.gate != (row.routing == "gate")) {
    read.refuse("gate", fmt::format("{}, since 'routing' is '{}'", !*row.gate, row.routing));
  }
  return row;
}

}  // namespace

std::string point_of(const Row& row) {
  return fmt::format(
      "{}: {}, H {}, I {}, {} experts, top-{}, {} computed in {}, {} ranks, routing {}, "
      "{} tokens, beta {}",
      row.suite, row.model, row.hidden, row.intermediate, row.experts, row.top_k, row.dtype,
      row.compute, row.ranks, row.routing, row.tokens_per_rank, row.beta);
}

Json to_json(const Row& row) {
  Json json;
  visit(row, Writer(json));
  return json;
}

// A trace and the results of another program get messages of their own, because they are most
// likely to be given by mistake.
std::vector<Row> rows_of(const Json& file, const std::string& source, const char* remedy) {
  if (file.contains("traceEvents")) {
    refuse_file(source, "is a trace", "give it with --trace, beside files of rows");
  }
  if (file.contains("benchmarks")) {
    refuse_file(source, "is a result of Google Benchmark, which has other rows", remedy);
  }
  if (!file.is_array()) {
    refuse_file(source, fmt::format("is not a list of rows, but {}", excerpt(file)), remedy);
  }
  if (!file.elements().empty() && file.elements().front().contains("ph")) {
    refuse_file(source, "is a trace", "give it with --trace, beside files of rows");
  }
  const Remedies remedies = remedies_of(remedy);
  if (!file.elements().empty() && file.elements().front().contains("implementation")) {
    refuse_file(source, "has rows of the grouped GEMM, which are no layers", remedy);
  }
  if (!file.elements().empty() && file.elements().front().contains("link_bytes")) {
    refuse_file(source, "has rows of the suite hosts, which are no layers", remedy);
  }
  if (!file.elements().empty() && file.elements().front().contains("stage")) {
    refuse_file(source, "has rows of an exchange, which are no layers", remedy);
  }
  if (!file.elements().empty() && file.elements().front().contains("rung")) {
    refuse_file(source, "has rows of the suite all_to_all, which are no layers", remedy);
  }
  std::vector<Row> rows;
  for (const Json& element : file.elements()) {
    rows.push_back(row_of(element, source, rows.size() + 1, remedies));
  }
  return rows;
}

std::vector<Row> parse_rows(std::string_view text, const std::string& source) {
  std::vector<Row> rows = rows_of(parse(text, source, kRowsRemedy), source, kRowsRemedy);
  if (rows.empty()) {
    refuse_file(source, "is an empty list", "measure something with 'switchyard bench --json'");
  }
  return rows;
}

std::vector<Row> read_rows(std::span<const std::filesystem::path> paths) {
  std::vector<Row> all;
  std::map<std::string, std::string> place_of;
  for (const std::filesystem::path& path : paths) {
    std::size_t number = 0;
    for (Row& row : parse_rows(read_named(path, kMostFileBytes), path.string())) {
      const std::string point = point_of(row);
      const std::string place = fmt::format("{} row {}", printable(path), ++number);
      const auto [first, is_new] = place_of.emplace(point, place);
      if (!is_new) {
        throw Error(ErrorCode::kInvalidFile,
                    fmt::format("{} is of the same point as {} ({}); give only one of them", place,
                                first->second, point));
      }
      all.push_back(std::move(row));
    }
  }
  return all;
}

}  // namespace switchyard::results
