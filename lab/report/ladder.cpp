#include "report/ladder.h"

#include <fmt/core.h>

#include "base/printable.h"
#include "switchyard/error.h"

namespace switchyard::report {
namespace {

Json json_of(const results::AllToAllRow& row) {
  Json stages = Json::array();
  for (const std::vector<double>& times : row.stage_us) stages.push_back(Json(times));
  return {{"case", row.problem},        {"rung", row.rung},
          {"stand_in", row.stand_in},   {"ranks", row.ranks},
          {"gpus", row.gpus},           {"machine", row.machine},
          {"commit", row.commit},       {"command", row.command},
          {"median_us", row.median_us}, {"p10_us", row.p10_us},
          {"p90_us", row.p90_us},       {"floor_us", row.floor_us},
          {"blocks", row.blocks},       {"receive_imbalance", row.receive_imbalance},
          {"rank_us", row.rank_us},     {"stage_us", stages}};
}

}  // namespace

Json ladder_json(const Ladder& ladder) {
  Json stages = Json::array(), rows = Json::array();
  for (const char* name : results::kStageNames) stages.push_back(name);
  for (const results::AllToAllRow& row : ladder.rows) {
    if (row.rank_us.empty() || row.stage_us[0].empty()) {
      throw Error(ErrorCode::kInvalidFile,
                  fmt::format("{}: the row '{}' has no times of its ranks and stages; measure it "
                              "again with 'switchyard bench all_to_all --json'",
                              printable(ladder.file), printable(point_of(row))));
    }
    rows.push_back(json_of(row));
  }
  return {{"file", ladder.file}, {"stages", stages}, {"rows", rows}};
}

}  // namespace switchyard::report
