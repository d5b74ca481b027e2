#include "cli/tune_report.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "base/join.h"
#include "base/plural.h"
#include "base/printable.h"
#include "cli/format.h"
#include "switchyard/routing.h"
#include "tuning/judgement.h"

namespace switchyard::cli {
namespace {

using tuner::Finding;
using tuner::Fit;
using tuner::FitOptions;
using tuner::Form;
using tuner::Outcome;
using tuner::Point;
using tuner::Profile;
using tuner::Regret;

using Cells = std::vector<std::vector<std::string>>;
using Where = std::function<bool(const Point&)>;

std::string percent(double share) { return fmt::format("{:.2f}", 100 * share); }

std::string regret_text(const Regret& regret) {
  if (regret.points == 0) return "-";
  return fmt::format("{} / {}", percent(regret.mean), percent(regret.max));
}
std::string factor(const std::optional<double>& ratio) {
  return ratio ? fmt::format("{:.3f}x", *ratio) : "-";
}

std::vector<Outcome> those(const Profile& profile, const std::vector<Outcome>& outcomes,
                           const Where& where) {
  std::vector<Outcome> kept;
  for (const Outcome& outcome : outcomes) {
    if (where(profile.points[outcome.point])) kept.push_back(outcome);
  }
  return kept;
}

bool any_point(const Point&) { return true; }

void add_table(std::vector<std::string>& lines, const std::string& title, const Cells& cells) {
  if (!lines.empty()) lines.emplace_back();
  for (const std::string& line : wrap(title, kReportColumns)) lines.push_back(line);
  std::vector<std::size_t> right;
  for (std::size_t i = 1; i < cells.front().size(); ++i) right.push_back(i);
  for (const std::string& line : align_columns(cells, right)) lines.push_back("  " + line);
}

void add_head(std::vector<std::string>& lines, const Profile& profile) {
  const auto rules = static_cast<std::size_t>(
      std::count_if(profile.configurations.begin(), profile.configurations.end(),
                    [](const tuner::Configuration& c) { return c.is_rule; }));
  lines.push_back(fmt::format("{} version {} on {}", printable(profile.kernel), profile.version,
                              printable(profile.device.machine)));
  std::size_t fit = 0, test = 0, held_out = 0;
  for (const Point& point : profile.points) {
    fit += point.fit ? 1 : 0;
    test += point.test ? 1 : 0;
    held_out += point.held_out() ? 1 : 0;
  }
  lines.push_back(
      fmt::format("{}, {}{}; {} to fit on, {} to judge by, {} of them held out; histograms are {}",
                  plural(profile.models.size(), "model"),
                  plural(profile.configurations.size() - rules, "configuration"),
                  rules > 0 ? " and the rule" : "", plural(fit, "point"), test, held_out,
                  to_string(profile.generator)));
  std::size_t pruned = 0;
  for (std::size_t m = 0; m < profile.models.size(); ++m) pruned += num_pruned(profile, m);
  if (pruned == 0) return;
  lines.push_back(
      fmt::format("pruned: {} of the models' {}; exhaustive is the best of the others", pruned,
                  plural(profile.models.size() * profile.configurations.size(), "configuration")));
}

void add_regrets(std::vector<std::string>& lines, const Profile& profile, const Fit& fit,
                 const std::vector<Outcome>& outcomes) {
  Cells cells{{"model", "R2", "R2 log", "in sample", "held out", "static", "coarse", "rule",
               "static b.5", "rule b.5"}};
  const auto add = [&](const std::string& name, const std::vector<std::string>& r2,
                       const Where& where) {
    const auto in = [&](const Where& more) {
      return those(profile, outcomes, [&](const Point& p) { return where(p) && more(p); });
    };
    const auto half = in([](const Point& p) { return p.beta == 0.5; });
    const auto all = in(any_point);
    cells.push_back({name, r2[0], r2[1],
                     regret_text(regret_of(in([](const Point& p) { return !p.held_out(); }))),
                     regret_text(regret_of(in([](const Point& p) { return p.held_out(); }))),
                     factor(speed_up(all, &Outcome::static_us)),
                     factor(speed_up(all, &Outcome::coarse_static_us)),
                     factor(speed_up(all, &Outcome::rule_us)),
                     factor(speed_up(half, &Outcome::static_us)),
                     factor(speed_up(half, &Outcome::rule_us))});
  };
  for (std::size_t m = 0; m < profile.models.size(); ++m) {
    add(printable(profile.models[m].name) + (profile.models[m].unseen ? " *" : ""),
        {fmt::format("{:.3f}", r_squared(profile, fit, m)),
         fmt::format("{:.3f}", r_squared(profile, fit, m, true))},
        [m](const Point& p) { return p.model == m; });
  }
  const auto unseen = [&](const Point& p) { return profile.models[p.model].unseen; };
  add("all", {"", ""}, any_point);
  if (std::any_of(profile.points.begin(), profile.points.end(), unseen)) {
    add("unseen *", {"", ""}, unseen);
  }
  add_table(lines,
            fmt::format("Regret of the form {}{}, mean / max in %; and how much faster its choices "
                        "are than other ways to choose, at all points and at beta 0.5:",
                        to_string(fit.options.form), fit.options.relative ? "" : " (absolute)"),
            cells);
  const Regret all = regret_of(outcomes);
  lines.push_back(fmt::format("  all points: mean {} % (standard error {}), max {} %, {}",
                              percent(all.mean), percent(all.standard_error), percent(all.max),
                              plural(all.points, "point")));
}

void add_ablation(std::vector<std::string>& lines, const Profile& profile) {
  Cells cells{{"form", "error", "all points", "in sample", "held out", "R2 least"}};
  for (const bool relative : {false, true}) {
    for (const Form form : tuner::kForms) {
      const Fit its = tuner::fit(profile, {form, relative, false});
      const std::vector<Outcome> outcomes = evaluate(profile, its);
      double least = 1;
      for (std::size_t m = 0; m < profile.models.size(); ++m) {
        least = std::min(least, r_squared(profile, its, m));
      }
      cells.push_back(
          {to_string(form), relative ? "relative" : "absolute", regret_text(regret_of(outcomes)),
           regret_text(
               regret_of(those(profile, outcomes, [](const Point& p) { return !p.held_out(); }))),
           regret_text(
               regret_of(those(profile, outcomes, [](const Point& p) { return p.held_out(); }))),
           fmt::format("{:.3f}", least)});
    }
  }
  add_table(lines,
            "Ablation, regret mean / max in % (tasks: a + c g; waves: + b g / SMs, which is c g "
            "again; rounded: b ceil(g / SMs); full: + d log(g + 1); experts: a + b ceil(g / SMs) + "
            "c e + d h):",
            cells);
}

void add_other_models(std::vector<std::string>& lines, const Profile& profile,
                      const FitOptions& options) {
  if (profile.models.size() < 2) return;
  FitOptions from_others = options;
  from_others.from_other_models = true;
  Fit its;
  try {
    its = tuner::fit(profile, from_others);
  } catch (const Error& error) {
    lines.push_back(fmt::format("  from other models: {}", error.what()));
    return;
  }
  const std::vector<Outcome> outcomes = evaluate(profile, its);
  Cells cells{{"model", "regret"}};
  for (std::size_t m = 0; m < profile.models.size(); ++m) {
    cells.push_back({printable(profile.models[m].name),
                     regret_text(regret_of(
                         those(profile, outcomes, [m](const Point& p) { return p.model == m; })))});
  }
  cells.push_back({"all", regret_text(regret_of(outcomes))});
  add_table(lines,
            "Held-out models: regret in % of a fit to the other models' points alone:", cells);
}

void add_regions(std::vector<std::string>& lines, const Profile& profile, const Judging& judging) {
  const tuner::Thresholds thresholds =
      tuner::thresholds_of(judging.constants, judging.element_bytes);
  tuner::Configuration reference;
  reference.weight_rows = tuner::kReferenceRows;
  Cells cells{{"model", "rho", "lambda", "kappa", "lambda kappa", "region", "group_m"}};
  for (const tuner::Model& model : profile.models) {
    const std::vector<std::int64_t> none(static_cast<std::size_t>(model.num_experts));
    const tuner::RegionVariables v =
        region_variables(model, reference, none, profile.device.num_sms);
    cells.push_back({printable(model.name), fmt::format("{:.0f}", v.rho),
                     fmt::format("{}", v.lambda), fmt::format("{:.0f}", v.kappa),
                     fmt::format("{:.0f}", v.lambda * v.kappa),
                     std::string(1, to_string(region_of(v, thresholds))[0]),
                     group_m_helps(v, thresholds) ? "yes" : "no"});
  }
  add_table(lines,
            fmt::format("Regions: rho from {:.0f} is B; group_m helps from lambda kappa {:.0f}, "
                        "split_k from kappa {:.0f} below {:.2f} waves, wide_tiles above {:.0f} "
                        "wave:",
                        thresholds.rho, thresholds.lambda_kappa, thresholds.kappa,
                        thresholds.split_omega, thresholds.wide_omega),
            cells);
  const std::vector<Finding> found = findings(profile, judging.constants, judging.element_bytes);
  if (found.empty()) {
    lines.emplace_back(
        "  no prediction can be judged: the kernel has no configurations with and "
        "without");
    return;
  }
  Cells findings_cells{{"model", "prediction", "predicted", "measured", "points", ""}};
  std::size_t confirmed = 0;
  for (const Finding& finding : found) {
    confirmed += finding.confirmed() ? 1 : 0;
    findings_cells.push_back({printable(profile.models[finding.model].name),
                              to_string(finding.prediction), finding.predicted ? "helps" : "no",
                              fmt::format("{:.3f}x", finding.measured_ratio),
                              fmt::format("{}", finding.points),
                              finding.confirmed() ? "as predicted" : "NOT as predicted"});
  }
  add_table(lines,
            fmt::format("Predicted against found ({} of {} as predicted): best time without over "
                        "best time with:",
                        confirmed, found.size()),
            findings_cells);
}

std::string named_time(const Profile& profile, const Point& point, std::size_t configuration) {
  return fmt::format("best {:.1f} us  {}", point.times_us[configuration],
                     printable(profile.configurations[configuration].name));
}

// The rule often runs what one of the configurations is, so the less of two such times is chance. A
// configuration counts as faster where the difference is above the variation of both times'
// repetitions. Few repetitions can vary by anything: above kMostNoise they tell nothing.
bool beats(const Point& point, std::size_t configuration, std::size_t rule) {
  constexpr double kLeastNoise = 0.02, kMostNoise = 0.2;
  const double noise = std::clamp(
      std::hypot(point.variations[configuration], point.variations[rule]), kLeastNoise, kMostNoise);
  return point.times_us[configuration] < (1 - noise) * point.times_us[rule];
}

}  // namespace

std::string point_text(const Profile& profile, const Point& point) {
  const std::size_t none = point.times_us.size();
  std::size_t best = none, rule = none, unsupported = 0;
  for (std::size_t c = 0; c < none; ++c) {
    if (point.times_us[c] == tuner::kPruned) continue;
    if (point.times_us[c] <= 0) {
      ++unsupported;
    } else if (profile.configurations[c].is_rule) {
      rule = c;
    } else if (best == none || point.times_us[c] < point.times_us[best]) {
      best = c;
    }
  }
  std::string text = fmt::format("{:<14} {:>12}  beta {:.2f} ({:.2f})  ",
                                 printable(profile.models[point.model].name),
                                 plural(point.tokens, "token"), point.beta, point.beta_reached);
  if (best == none && rule == none) return text + "nothing runs it";
  if (rule == none) {
    text += named_time(profile, point, best);
  } else if (best == none) {
    text += fmt::format("the rule {:.1f} us", point.times_us[rule]);
  } else if (beats(point, best, rule)) {
    text +=
        fmt::format("{}  rule {:.1f} us", named_time(profile, point, best), point.times_us[rule]);
  } else {
    text += fmt::format("best: the rule {:.1f} us{}  (of the others {:.1f} us  {})",
                        point.times_us[rule],
                        point.times_us[best] < point.times_us[rule] ? ", within noise" : "",
                        point.times_us[best], printable(profile.configurations[best].name));
  }
  if (unsupported > 0) text += fmt::format("  ({} cannot run)", unsupported);
  return text;
}

std::vector<std::string> judgement_text(const Profile& profile, const Judging& judging) {
  std::vector<std::string> lines;
  add_head(lines, profile);
  const Fit its = tuner::fit(profile, judging.fit);
  const std::vector<Outcome> outcomes = evaluate(profile, its);
  if (outcomes.empty()) {
    lines.emplace_back(
        "no point to judge by is timed; measure --test-tokens and "
        "--test-balancedness");
    return lines;
  }
  add_regrets(lines, profile, its, outcomes);
  add_ablation(lines, profile);
  add_other_models(lines, profile, judging.fit);
  add_regions(lines, profile, judging);
  return lines;
}

std::vector<results::RampRow> ramp_rows(const Profile& profile, const Judging& judging,
                                        const RowSource& source) {
  const Fit its = tuner::fit(profile, judging.fit);
  std::vector<results::RampRow> rows;
  for (const Outcome& outcome : evaluate(profile, its)) {
    const Point& point = profile.points[outcome.point];
    const tuner::Model& model = profile.models[point.model];
    results::RampRow row;
    row.machine = profile.device.machine;
    row.commit = source.commit;
    row.command = source.command;
    row.kernel = profile.kernel;
    row.model = model.name;
    row.experts = model.num_experts;
    row.tokens_per_rank = point.tokens;
    row.beta = point.beta;
    row.beta_reached = point.beta_reached;
    row.generator = to_string(profile.generator);
    row.form =
        fmt::format("{}{}", to_string(judging.fit.form), judging.fit.relative ? "" : " (absolute)");
    row.exhaustive_us = outcome.exhaustive_us;
    row.chosen_us = outcome.chosen_us;
    row.predicted_us = std::max(outcome.predicted_us, 0.01);
    row.static_us = outcome.static_us;
    row.rule_us = outcome.rule_us;
    row.best = profile.configurations[outcome.best].name;
    row.chosen = profile.configurations[outcome.chosen].name;
    row.held_out = point.held_out();
    row.unseen = model.unseen;
    rows.push_back(row);
  }
  return rows;
}

std::vector<results::RegionRow> region_rows(const Profile& profile, const Judging& judging,
                                            const RowSource& source) {
  std::vector<results::RegionRow> rows;
  for (const Finding& finding : findings(profile, judging.constants, judging.element_bytes)) {
    results::RegionRow row;
    row.machine = profile.device.machine;
    row.commit = source.commit;
    row.command = source.command;
    row.kernel = profile.kernel;
    row.model = profile.models[finding.model].name;
    row.generator = to_string(profile.generator);
    row.prediction = to_string(finding.prediction);
    row.predicted = finding.predicted;
    row.measured_ratio = finding.measured_ratio;
    row.points = static_cast<std::int64_t>(finding.points);
    rows.push_back(row);
  }
  return rows;
}

}  // namespace switchyard::cli
