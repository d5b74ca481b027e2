#include "results/all_to_all_row.h"

#include <fmt/core.h>

#include "base/read_file.h"
#include "results/fields.h"
#include "results/list.h"
#include "results/visitors.h"

namespace switchyard::results {
namespace {

constexpr const char* kRemedy =
    "give files that 'switchyard bench --suite all_to_all --json' wrote";

// As visit() of row.cpp.
template <typename RowType, typename Visitor>
void visit(RowType& row, Visitor&& field) {
  field.text("suite", row.suite);
  field.text("machine", row.machine);
  field.text("commit", row.commit);
  field.text("command", row.command);
  field.text("case", row.problem);
  field.count("experts", row.experts);
  field.count("top_k", row.top_k);
  field.count("hidden", row.hidden);
  field.count("max_tokens", row.max_tokens);
  field.text("rung", row.rung);
  field.text("stand_in", row.stand_in);
  field.count("ranks", row.ranks);
  field.whole("gpus", row.gpus);
  field.time("median_us", row.median_us);
  field.time("p10_us", row.p10_us);
  field.time("p90_us", row.p90_us);
  field.count("repeats", row.repeats);
  field.amount("nvlink_bytes", row.nvlink_bytes);
  field.time("floor_us", row.floor_us);
  field.text("blocks", row.blocks);
  field.error("receive_imbalance", row.receive_imbalance);
  field.times("rank_us", row.rank_us);
  for (std::size_t s = 0; s < kNumStages; ++s) field.times(kStageFields[s], row.stage_us[s]);
  field.times("times_us", row.times_us);
}

}  // namespace

std::string point_of(const AllToAllRow& row) {
  return fmt::format("{}: {}, {}, experts multiply by {}, {} ranks on {}", row.suite, row.problem,
                     row.rung, row.stand_in, row.ranks,
                     row.gpus ? fmt::format("{} GPUs", *row.gpus) : "the CPU");
}

Json to_json(const AllToAllRow& row) {
  Json json;
  visit(row, FieldWriter(json));
  return json;
}

std::vector<AllToAllRow> all_to_all_rows_of(const Json& file, const std::string& source,
                                            const char* remedy) {
  return rows_of_list<AllToAllRow>(
      file, source, remedy, [](auto& row, auto&& field) { visit(row, field); },
      [](const FieldReader& read, const AllToAllRow& row) {
        const auto require_ranks = [&](const char* field, const std::vector<double>& times) {
          if (times.empty() || times.size() == static_cast<std::size_t>(row.ranks)) return;
          read.refuse(field, fmt::format("a time of each of the {} ranks", row.ranks));
        };
        require_ranks("rank_us", row.rank_us);
        for (std::size_t s = 0; s < kNumStages; ++s) {
          require_ranks(kStageFields[s], row.stage_us[s]);
        }
      });
}

std::vector<AllToAllRow> parse_all_to_all_rows(std::string_view text, const std::string& source) {
  return all_to_all_rows_of(parse(text, source, kRemedy), source, kRemedy);
}

std::vector<AllToAllRow> read_all_to_all_rows(const std::filesystem::path& file) {
  return parse_all_to_all_rows(read_text(file, kMostFileBytes), file.string());
}

bool has_all_to_all_rows(const std::filesystem::path& file) {
  try {
    const Json list = parse(read_text(file, kMostFileBytes), file.string(), kRemedy);
    return list.is_array() && !list.elements().empty() && list.elements().front().contains("rung");
  } catch (const Error&) {
    return false;  // whoever reads it for its rows says what is wrong
  }
}

}  // namespace switchyard::results
