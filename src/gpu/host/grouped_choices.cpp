#include "gpu/host/grouped_choices.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <limits>
#include <string>
#include <string_view>

#include "base/printable.h"
#include "gpu/grouped/limits.h"
#include "gpu/tile/config.h"
#include "switchyard/error.h"
#include "switchyard/grouped_gemm.h"

namespace switchyard::gpu {
namespace {

constexpr std::size_t kMostCandidates = 256;
constexpr int kMostTokenRows = 256;  // of a task; see TileHeights

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

// The index of a height, which is added if it is new.
std::uint32_t height_index(TileHeights& heights, std::uint32_t& count, int rows) {
  if (rows < 2 || rows > kMostTokenRows) {
    refuse(fmt::format("a configuration has {} token rows; use 2 to {}", rows, kMostTokenRows));
  }
  const auto height = static_cast<std::uint32_t>(rows);
  const auto* const end = heights.rows + count;
  const auto* const found = std::find(static_cast<const std::uint32_t*>(heights.rows), end, height);
  if (found != end) return static_cast<std::uint32_t>(found - heights.rows);
  if (count == kMostHeights) {
    refuse(
        fmt::format("the table's configurations have more than {} numbers of token rows; leave "
                    "some out",
                    kMostHeights));
  }
  heights.rows[count] = height;
  heights.reciprocals[count] = TileHeights::reciprocal_of(height);
  return count++;
}

void check_table(const tuner::Table& table, const TableFacts& facts) {
  const auto require_text = [](const char* field, const std::string& found,
                               const std::string& its) {
    if (found == its) return;
    throw tuner::MismatchError(
        fmt::format("the table is of the {} '{}', and the grouped GEMM of '{}'; tune that, or give "
                    "its table",
                    field, printable(found), printable(its)),
        field, found, its);
  };
  const auto require_number = [&](const char* field, std::int64_t found, std::int64_t its) {
    require_text(field, fmt::format("{}", found), fmt::format("{}", its));
  };
  require_text("kernel", table.kernel, grouped_kernel_name(facts.compute));
  require_number("version", table.version, kGroupedKernelVersion);
  require_number("number of SMs", table.device.num_sms, facts.num_sms);
  require_number("number of experts", table.model.num_experts, facts.num_experts);
  require_number("N", table.model.n, facts.n);
  require_number("K", table.model.k, facts.k);
  if (table.entries.empty() || table.entries.size() > kMostCandidates) {
    refuse(fmt::format("the table has {} entries; use 1 to {}, as tuner::make_table() does",
                       table.entries.size(), kMostCandidates));
  }
}

// Returns so many rows in equal shares.
std::vector<std::uint32_t> balanced_rows(int num_experts, std::int64_t rows) {
  std::vector<std::uint32_t> balanced(static_cast<std::size_t>(num_experts));
  for (std::size_t e = 0; e < balanced.size(); ++e) {
    const auto experts = static_cast<std::int64_t>(num_experts), i = static_cast<std::int64_t>(e);
    balanced[e] = static_cast<std::uint32_t>(rows * (i + 1) / experts - rows * i / experts);
  }
  return balanced;
}

}  // namespace

GroupedCut cut_of(const GroupedSchedule& schedule, const CutFacts& facts) {
  const auto refuse_value = [](const char* name, int value, std::string_view use) {
    refuse(fmt::format("schedule.{} is {}; use {}", name, value, use));
  };
  GroupedCut cut{facts.tile, kUsualStages, 1u << 20, 0};
  if (const auto rows = schedule.tile_rows) {
    const int most = cut.tile.max_height;
    if (facts.token_major
            ? *rows != most && *rows != most / 2
            : *rows < static_cast<int>(kUnitRows) || *rows > most || *rows % 16 != 0) {
      refuse_value(
          "tile_rows", *rows,
          facts.token_major ? "64 or 128" : fmt::format("a multiple of 16 up to {}", most));
    }
    cut.tile.granule = std::min(cut.tile.granule, *rows);
    // Heights that kernels have: a tile may be lower than asked, never higher.
    cut.tile.max_height = *rows - *rows % cut.tile.granule;
  }
  if (const auto stages = schedule.stages) {
    if (facts.token_major) {
      throw Error(ErrorCode::kUnsupported,
                  "schedule.stages is given, but tiles in f8_e4m3 have 4 stages; leave it");
    }
    if (*stages < 2 || *stages > static_cast<int>(kUsualStages)) {
      refuse_value("stages", *stages, "2 to 12");
    }
    cut.most_stages = static_cast<std::uint32_t>(*stages);
  }
  if (const auto band = schedule.band) {
    if (*band < 1) refuse_value("band", *band, "1 or more");
    cut.band = static_cast<std::uint32_t>(*band);
  }
  if (const auto splits = schedule.splits) {
    if (*splits < 1 || *splits > kMostGroupedSplits ||
        !std::has_single_bit(static_cast<unsigned>(*splits))) {
      refuse_value("splits", *splits, "1, 2, 4 or 8");
    }
    const unsigned whole = std::bit_floor(facts.k_blocks);
    cut.log2_splits = static_cast<std::uint32_t>(
        std::countr_zero(std::min(static_cast<unsigned>(*splits), whole)));
    if (cut.log2_splits != 0 && !facts.token_major) {
      cut.tile.max_height = std::min(cut.tile.max_height, kMostSplitRows);
    }
  }
  return cut;
}

GroupedSchedule schedule_of(const tuner::Configuration& configuration) {
  GroupedSchedule schedule;
  for (const auto& [name, value] : configuration.values) {
    if (value < 0 || value > std::numeric_limits<int>::max()) {
      refuse(fmt::format("the configuration '{}' has {} {}; use a whole number of 32 bits",
                         printable(configuration.name), printable(name), value));
    }
    const int number = static_cast<int>(value);
    if (name == "tile_rows") {
      schedule.tile_rows = number;
    } else if (name == "stages") {
      schedule.stages = number;
    } else if (name == "paired") {
      schedule.paired = number != 0;
    } else if (name == "band") {
      schedule.band = number;
    } else if (name == "splits") {
      schedule.splits = number;
    } else {
      refuse(
          fmt::format("the configuration '{}' has a value {}, which no grouped GEMM has; use "
                      "tile_rows, stages, paired, band and splits",
                      printable(configuration.name), printable(name)));
    }
  }
  if (!schedule.paired || !schedule.tile_rows) {
    refuse(fmt::format("the configuration '{}' tells no {}; a grouped GEMM's has one",
                       printable(configuration.name), schedule.paired ? "tile_rows" : "paired"));
  }
  return schedule;
}

std::uint32_t GroupedChoices::count(const std::vector<Candidate>& candidates,
                                    std::uint32_t log2_splits) {
  return static_cast<std::uint32_t>(
      std::count_if(candidates.begin(), candidates.end(),
                    [&](const Candidate& c) { return c.log2_splits <= log2_splits; }));
}

GroupedChoices choices_of(const tuner::Table& table, const TableFacts& facts) {
  check_table(table, facts);
  GroupedChoices choices{};
  choices.rule.num_sms = static_cast<std::uint32_t>(facts.num_sms);
  choices.rule.rounded_waves = tuner::rounds_waves(table.form);
  choices.rule.of_experts = table.form == tuner::Form::kExperts;
  std::uint32_t heights = 0;
  for (const tuner::Table::Entry& entry : table.entries) {
    const tuner::Configuration& c = entry.configuration;
    const GroupedSchedule schedule = schedule_of(c);
    const GroupedCut cut = cut_of(schedule, facts.cut);
    Candidate candidate{};
    candidate.a = entry.a;
    candidate.b = entry.b;
    candidate.c = entry.c;
    candidate.d = entry.d;
    candidate.height = height_index(choices.rule.heights, heights, c.token_rows);
    // As tuner::grid_of() of one tile.
    candidate.tasks_of_tile = static_cast<std::uint32_t>(
        std::int64_t{protocol::ceil_div(facts.n, std::max(c.weight_rows, 1))} * c.splits *
        c.blocks);
    candidate.entry = static_cast<std::uint32_t>(&entry - table.entries.data());
    candidate.band = cut.band;
    candidate.max_height = static_cast<std::uint16_t>(cut.tile.max_height);
    candidate.granule = static_cast<std::uint16_t>(cut.tile.granule);
    candidate.least = static_cast<std::uint16_t>(cut.tile.least);
    candidate.most_stages = static_cast<std::uint16_t>(cut.most_stages);
    candidate.log2_splits = static_cast<std::uint16_t>(cut.log2_splits);
    (*schedule.paired ? choices.paired : choices.single).push_back(candidate);
  }
  for (std::vector<Candidate>* all : {&choices.single, &choices.paired}) {
    std::stable_sort(all->begin(), all->end(), [](const Candidate& a, const Candidate& b) {
      return a.log2_splits < b.log2_splits;
    });
  }
  return choices;
}

std::uint32_t most_log2_splits(std::int64_t rows, std::int64_t width) {
  const auto sums = static_cast<std::uint64_t>(rows * width) * sizeof(float);
  std::uint32_t log2 = 0;
  while (2u << log2 <= static_cast<unsigned>(kMostGroupedSplits) &&
         sums << (log2 + 1) <= kMostSplitBytes) {
    ++log2;
  }
  return log2;
}

bool choose_pairs(const GroupedChoices& choices, int num_experts, std::int64_t rows,
                  std::uint32_t log2_splits) {
  std::vector<Candidate> all;
  for (const std::vector<Candidate>* some : {&choices.single, &choices.paired}) {
    all.insert(all.end(), some->begin(), some->begin() + GroupedChoices::count(*some, log2_splits));
  }
  // (Without any the caller has no choice, and the rule decides.)
  if (all.empty()) return false;
  const Candidate& best = choose(all, choices.rule, balanced_rows(num_experts, rows));
  return std::any_of(choices.paired.begin(), choices.paired.end(),
                     [&](const Candidate& c) { return c.entry == best.entry; });
}

}  // namespace switchyard::gpu
