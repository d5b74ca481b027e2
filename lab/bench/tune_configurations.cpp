#include <fmt/core.h>

#include <algorithm>
#include <initializer_list>
#include <set>

#include "base/names.h"
#include "bench/tune.h"
#include "switchyard/error.h"

namespace switchyard::bench {
namespace {

using tuner::Configuration;

// Facts about the kernels that the cost model needs (src/gpu/layer/policy.h, src/gpu/grouped): the
// weight rows of a block's task, the token rows of the highest tile, and the bytes of the ring.
struct Facts {
  int weight_rows, most_token_rows;
};
constexpr Facts kBF16Facts{128, 256};
constexpr Facts kFP8Facts{256, 128};
constexpr int kStageRowBytes = 128, kRingBytes = 192 << 10, kMostStages = 12;
// "All tiles of an expert": more than any call has.
constexpr int kWholeBand = 1 << 16;

Facts facts_of(DType dtype, const char* kernel) {
  if (dtype == DType::kBF16) return kBF16Facts;
  if (dtype == DType::kF8E4M3) return kFP8Facts;
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{} in {} cannot be tuned on a GPU, which computes in bf16 and fp8; use "
                          "--dtype bf16 or fp8",
                          kernel, short_name(dtype)));
}

Configuration rule_of(const Facts& facts) {
  Configuration rule;
  rule.name = "rule";
  rule.token_rows = facts.most_token_rows;
  rule.weight_rows = facts.weight_rows;
  rule.is_rule = true;
  return rule;
}

// Threads in powers of two, and all of them.
std::vector<int> thread_counts(int hardware_threads) {
  std::vector<int> all;
  for (int threads = 1; threads < hardware_threads; threads *= 2) all.push_back(threads);
  all.push_back(std::max(hardware_threads, 1));
  return all;
}

// On the CPU a task is one of a thread, and only the threads can be chosen.
template <typename Choice>
std::vector<Choice> choices_of_threads(int hardware_threads) {
  constexpr Facts kTile{64, 64};
  std::vector<Choice> all;
  all.push_back({rule_of(kTile), {}, 0});
  for (const int threads : thread_counts(hardware_threads)) {
    Configuration c = rule_of(kTile);
    c.name = fmt::format("threads={}", threads);
    c.is_rule = false;
    c.values = {{"threads", threads}};
    all.push_back({c, {}, threads});
  }
  return all;
}

int most_stages(int token_rows, int weight_rows) {
  return std::min(kMostStages, kRingBytes / ((token_rows + weight_rows) * kStageRowBytes));
}

GroupedChoice grouped_choice(const Facts& facts, const GroupedSchedule& s, bool scaled) {
  GroupedChoice choice;
  choice.schedule = s;
  Configuration& c = choice.configuration;
  const int band = s.band.value_or(kWholeBand);
  c.token_rows = *s.tile_rows;
  // A pair does twice the weight rows of one tile or, in FP8, two tiles, which are two tasks.
  const bool pair_widens = *s.paired && !scaled;
  c.weight_rows = facts.weight_rows * (pair_widens ? 2 : 1);
  c.blocks = pair_widens ? 2 : 1;
  c.splits = *s.splits;
  c.group_m = band;
  c.name = fmt::format("rows={} {}{}{}{}", *s.tile_rows, *s.paired ? "paired" : "single",
                       s.stages ? fmt::format(" stages={}", *s.stages) : "",
                       s.band ? fmt::format(" band={}", *s.band) : " band=all",
                       *s.splits > 1 ? fmt::format(" splits={}", *s.splits) : "");
  c.values = {{"tile_rows", *s.tile_rows}, {"paired", *s.paired ? 1 : 0}};
  if (s.stages) c.values.emplace_back("stages", *s.stages);
  if (s.band) c.values.emplace_back("band", *s.band);
  c.values.emplace_back("splits", *s.splits);
  return choice;
}

std::vector<GroupedChoice> grouped_bf16() {
  constexpr int kSplitRows = 64;  // most rows of a tile whose K is split
  std::vector<GroupedChoice> all;
  for (const int rows : {16, 32, 48, 64, 80, 96, 128, 160, 192, 256}) {
    const int most = most_stages(rows, kBF16Facts.weight_rows);
    for (const int stages : std::set{most, std::min(most, 4), 2}) {
      for (const bool paired : {false, true}) {
        for (const int splits : {1, 2, 4, 8}) {
          // A short ring and a split K are for tiles that wait for memory, never together.
          if (splits > 1 && (rows > kSplitRows || stages != most)) continue;
          for (const std::optional<int> band : {std::optional<int>(1), std::optional<int>()}) {
            GroupedSchedule s;
            s.tile_rows = rows;
            s.stages = stages;
            s.paired = paired;
            s.band = band;
            s.splits = splits;
            all.push_back(grouped_choice(kBF16Facts, s, false));
          }
        }
      }
    }
  }
  return all;
}

std::vector<GroupedChoice> grouped_fp8() {
  std::vector<GroupedChoice> all;
  for (const int rows : {64, 128}) {
    for (const bool paired : {false, true}) {
      for (const int splits : {1, 2, 4, 8}) {
        for (const int band : {1, 2, 3, 4, 6, 8, 12, 16, 0}) {
          GroupedSchedule s;
          s.tile_rows = rows;
          s.paired = paired;
          if (band > 0) s.band = band;
          s.splits = splits;
          all.push_back(grouped_choice(kFP8Facts, s, true));
        }
      }
    }
  }
  return all;
}

}  // namespace

std::vector<GroupedChoice> grouped_choices(Backend backend, DType dtype, int hardware_threads) {
  if (backend == Backend::kCpu) return choices_of_threads<GroupedChoice>(hardware_threads);
  const Facts facts = facts_of(dtype, "the grouped GEMM");
  std::vector<GroupedChoice> all = dtype == DType::kBF16 ? grouped_bf16() : grouped_fp8();
  all.insert(all.begin(), GroupedChoice{rule_of(facts), {}, 0});
  return all;
}

std::vector<LayerChoice> layer_choices(Backend backend, DType dtype, int hardware_threads) {
  if (backend == Backend::kCpu) return choices_of_threads<LayerChoice>(hardware_threads);
  const Facts facts = facts_of(dtype, "the layer");
  std::vector<LayerChoice> all{{rule_of(facts), {}, 0}};
  const auto add = [&](const std::string& name, const Schedule& schedule, Configuration c,
                       std::vector<std::pair<std::string, std::int64_t>> values) {
    c.name = name;
    c.is_rule = false;
    c.values = std::move(values);
    all.push_back({c, schedule, 0});
  };
  for (const int splits : {1, 2, kMostSplits}) {
    Schedule s;
    s.small_tokens = kMostSmallTokens;
    s.splits = splits;
    Configuration c;
    c.token_rows = kMostSmallTokens;
    c.weight_rows = 128;
    c.splits = splits;
    add(fmt::format("small splits={}", splits), s, c,
        {{"small_tokens", kMostSmallTokens}, {"splits", splits}});
  }
  for (const bool paired : {false, true}) {
    for (const int band : {1, 2, 4, 8, 16}) {
      for (const int lag : {0, 1, 4, 16, 64}) {  // 0: the rule
        Schedule s;
        s.small_tokens = 0;
        s.paired_rows = paired ? 0 : -1;
        s.band = band;
        if (lag > 0) s.lag = lag;
        Configuration c = all.front().configuration;
        c.weight_rows = facts.weight_rows * (paired ? 2 : 1);
        c.blocks = paired ? 2 : 1;
        c.group_m = band;
        std::vector<std::pair<std::string, std::int64_t>> values{
            {"small_tokens", 0}, {"paired_rows", *s.paired_rows}, {"band", band}};
        if (lag > 0) values.emplace_back("lag", lag);
        add(fmt::format("{} band={}{}", paired ? "paired" : "large", band,
                        lag > 0 ? fmt::format(" lag={}", lag) : ""),
            s, c, std::move(values));
      }
    }
  }
  return all;
}

}  // namespace switchyard::bench
