#include <algorithm>
#include <cmath>
#include <set>

#include "switchyard/tuner.h"
#include "tuner/terms.h"

namespace switchyard::tuner {

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
  Table table{fit.kernel, fit.version, fit.device, its, fit.options.form, {}};
  for (const std::size_t c : chosen) {
    const Coefficients& k = fit.coefficients[model][c];
    table.entries.push_back({fit.configurations[c], k.a, k.b, k.c, k.d});
  }
  return table;
}

std::size_t select(const Table& table, std::span<const std::int64_t> counts) {
  if (table.entries.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "the table has no entries; make it with tuner::make_table()");
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
