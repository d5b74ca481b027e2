// The keys of each type of rows, and the values that do not fit together.
#include <fmt/core.h>

#include <map>

#include "base/printable.h"
#include "base/read_file.h"
#include "results/all_to_all_row.h"
#include "results/chain_row.h"
#include "results/exchange_row.h"
#include "results/grouped_row.h"
#include "results/hosts_row.h"
#include "results/late_row.h"
#include "results/ramp_row.h"
#include "results/row.h"
#include "switchyard/error.h"

namespace switchyard::results {

std::string Row::point() const {
  return fmt::format(
      "{}: {}, H {}, I {}, {} experts, top-{}, {} computed in {}, {} ranks, routing {}, "
      "{} tokens, beta {}",
      suite, model, hidden, intermediate, experts, top_k, dtype, compute, ranks, routing,
      tokens_per_rank, beta);
}

void Row::judge(const FieldReader& read) const {
  if (gate && *gate != (routing == "gate")) {
    read.refuse("gate", fmt::format("{}, since 'routing' is '{}'", !*gate, routing));
  }
  if (!weights.empty() && weights != dtype) {
    read.refuse("weights", fmt::format("'{}', since 'dtype' is that", printable(dtype)));
  }
  if (!tokens_in.empty() && tokens_in != compute) {
    read.refuse("tokens_in", fmt::format("'{}', since 'compute' is that", printable(compute)));
  }
}

std::string GroupedRow::point() const {
  return fmt::format(
      "{}: {}, {} experts, N {}, K {}, {} rows each{}, activation {}, {} computed in {}", suite,
      implementation, experts, n, k, rows_per_expert, beta ? fmt::format(" at beta {}", *beta) : "",
      activation, dtype, compute);
}

std::string ExchangeRow::point() const {
  return fmt::format("{}: {}, H {}, top-{} of {}, {} ranks with {} tokens each, in {}{}", suite,
                     stage, hidden, top_k, experts, ranks, tokens_per_rank, dtype,
                     pre_sum ? ", summed before" : "");
}

std::string HostsRow::point() const {
  const std::string of_exchange =
      tokens_per_rank ? fmt::format(", H {}, top-{} of {}, {} tokens each", hidden.value_or(0),
                                    top_k.value_or(0), experts.value_or(0), *tokens_per_rank)
                      : "";
  return fmt::format("{}: {} on {}, {} hosts with {} ranks over {}{}", suite, stage, engine, hosts,
                     ranks, link, of_exchange);
}

void HostsRow::judge(const FieldReader& read) const {
  if (ranks < hosts) read.refuse("ranks", "at least one rank for each host");
}

std::string LateRow::point() const {
  return fmt::format("{}: {} on {}, {}, {} ranks with {} tokens each, in {}, {} {} us late", suite,
                     model, engine, policy, ranks, tokens_per_rank, dtype,
                     jitter ? "all up to" : "one", late_us);
}

void LateRow::judge(const FieldReader& read) const {
  if (own_share > 1) read.refuse("own_share", "at most 1");
  if (engine != "cpu" && engine != "cuda") read.refuse("engine", "cpu or cuda");
  if (policy != "works" && policy != "waits") read.refuse("policy", "works or waits");
}

std::string ChainRow::point() const {
  return fmt::format(
      "{}: {}, H {}, I {}, {} experts, top-{}, {} computed in {}, {} layers, {} tokens, {}", suite,
      model, hidden, intermediate, experts, top_k, dtype, compute, layers, tokens,
      early_launch ? "launched early" : "one after the other");
}

std::string AllToAllRow::point() const {
  return fmt::format("{}: {}, {}, experts multiply by {}, {} ranks on {}", suite, problem, rung,
                     stand_in, ranks, gpus ? fmt::format("{} GPUs", *gpus) : "the CPU");
}

void AllToAllRow::judge(const FieldReader& read) const {
  const auto require_ranks = [&](const char* field, const std::vector<double>& times) {
    if (times.empty() || times.size() == static_cast<std::size_t>(ranks)) return;
    read.refuse(field, fmt::format("a time of each of the {} ranks", ranks));
  };
  require_ranks("rank_us", rank_us);
  for (std::size_t s = 0; s < kNumStages; ++s) {
    require_ranks(kStageFields[s], stage_us[s]);
  }
}

std::string RampRow::point() const {
  return fmt::format("{}: {} on {}, {} experts, {} tokens, beta {} ({})", suite, kernel, model,
                     experts, tokens_per_rank, beta, generator);
}

std::string RegionRow::point() const {
  return fmt::format("{}: {} on {} ({}), {} predicted {}", suite, kernel, model, generator,
                     prediction, predicted ? "to help" : "not to help");
}

std::vector<Row> read_rows(std::span<const std::filesystem::path> paths) {
  std::vector<Row> all;
  std::map<std::string, std::string> place_of;
  for (const std::filesystem::path& path : paths) {
    std::size_t number = 0;
    for (Row& row : parse_rows<Row>(read_named(path, kMostFileBytes), path.string())) {
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

bool has_all_to_all_rows(const std::filesystem::path& file) {
  try {
    const Json list = parse(read_text(file, kMostFileBytes), file.string(), AllToAllRow::kRemedy);
    return list.is_array() && !list.elements().empty() && list.elements().front().contains("rung");
  } catch (const Error&) {
    return false;  // whoever reads it for its rows says what is wrong
  }
}

}  // namespace switchyard::results
