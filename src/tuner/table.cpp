#include <algorithm>
#include <cmath>
#include <set>

#include "switchyard/tuner.h"
#include "tuner/terms.h"

namespace switchyard::tuner {
namespace {

// A table without entries.
Table table_for(const Fit& fit, std::size_t model) {
  Table table;
  table.kernel = fit.kernel;
  table.version = fit.version;
  table.device = fit.device;
  table.model = fit.models.at(model);
  table.form = fit.options.form;
  return table;
}

// The index of a configuration's entry, which is added if it is new.
std::size_t entry_of(Table& table, const Fit& fit, std::size_t model, std::size_t configuration) {
  const Configuration& its = fit.configurations[configuration];
  for (std::size_t i = 0; i < table.entries.size(); ++i) {
    if (table.entries[i].configuration.name == its.name) return i;
  }
  const Coefficients& k = fit.coefficients[model][configuration];
  table.entries.push_back({its, k.a, k.b, k.c, k.d});
  return table.entries.size() - 1;
}

}  // namespace

Table make_table(const Fit& fit, std::size_t model, int most_tokens) {
  const Model& its = fit.models.at(model);
  std::set<std::size_t> chosen;
  constexpr int kBetaSteps = 20;
  for (const Generator generator : {Generator::kDistinct, Generator::kRepeated}) {
    for (int tokens = 1; tokens <= std::max(most_tokens, 1); tokens *= 2) {
      for (int step = 0; step <= kBetaSteps; ++step) {
        chosen.insert(select(
            fit, model,
            draw_counts(generator, tokens, its.num_experts, its.top_k,
                        static_cast<double>(step) / kBetaSteps, static_cast<std::uint64_t>(step))));
      }
    }
  }
  Table table = table_for(fit, model);
  for (const std::size_t c : chosen) entry_of(table, fit, model, c);
  return table;
}

Table make_table_by_tokens(const Profile& profile, const Fit& fit, std::size_t model) {
  Table table = table_for(fit, model);
  table.by_tokens.emplace();
  std::optional<std::size_t> before;  // the choice at the number of tokens before
  for (const TokensChoice& choice : choices_by_tokens(profile, model)) {
    std::optional<std::size_t> its;
    if (choice.gain >= kLeastGain) its = choice.configuration;
    if (its && its == before) {
      table.by_tokens->back().last = choice.tokens;
    } else if (its) {
      table.by_tokens->push_back({choice.tokens, choice.tokens, entry_of(table, fit, model, *its)});
    }
    before = its;
  }
  return table;
}

std::optional<std::size_t> entry_for(const Table& table, std::int64_t tokens) {
  if (!table.by_tokens) return {};
  for (const Table::Range& range : *table.by_tokens) {
    if (range.first <= tokens && tokens <= range.last) return range.entry;
  }
  return {};
}

std::size_t select(const Table& table, std::span<const std::int64_t> counts) {
  if (table.entries.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "the table has no entries, since the kernel's own rule is the best; run the kernel "
                "without a table");
  }
  const Terms terms{table.form, table.device.num_sms};
  std::size_t best = 0;
  float least = std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i < table.entries.size(); ++i) {
    const Table::Entry& entry = table.entries[i];
    const Work work = work_of(entry.configuration, table.model.n, counts);
    const std::int64_t sms = table.device.num_sms;
    const std::int64_t whole_waves = (work.grid + sms - 1) / sms;
    const auto grid = static_cast<float>(work.grid);
    const float waves =
        terms.rounds() ? static_cast<float>(whole_waves) : grid / static_cast<float>(sms);
    const float tasks = terms.of_experts() ? static_cast<float>(work.experts) : grid;
    const float last = terms.of_experts() ? static_cast<float>(work.highest) : std::log(grid + 1);
    const float time = entry.a + entry.b * waves + entry.c * tasks + entry.d * last;
    if (time < least) {
      best = i;
      least = time;
    }
  }
  return best;
}

}  // namespace switchyard::tuner
