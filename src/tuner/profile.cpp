#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <numeric>
#include <optional>
#include <set>

#include "base/mix64.h"
#include "base/plural.h"
#include "base/printable.h"
#include "switchyard/routing.h"
#include "switchyard/tuner.h"
#include "tuner/match.h"

namespace switchyard::tuner {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

void check_model(const Model& model) {
  if (model.name.empty()) refuse("a model has no name; give it one");
  if (model.num_experts < 1 || model.top_k < 1 || model.top_k > model.num_experts || model.n < 1 ||
      model.k < 1) {
    refuse(fmt::format(
        "the model {} has {}, top_k {}, n {} and k {}; all are 1 or more, "
        "and top_k at most the experts",
        printable(model.name), plural(model.num_experts, "expert"), model.top_k, model.n, model.k));
  }
}

void check_kernel(const Kernel& kernel) {
  if (kernel.name.empty()) refuse("the kernel has no name; give it one");
  if (kernel.version < 0) {
    refuse(fmt::format("the version of the kernel {} is {}; use 0 or more", printable(kernel.name),
                       kernel.version));
  }
  std::set<std::string> names;
  std::size_t rules = 0;
  for (const Configuration& c : kernel.configurations) {
    if (c.token_rows < 1 || c.weight_rows < 1 || c.splits < 1 || c.blocks < 1 || c.group_m < 1) {
      refuse(fmt::format(
          "the configuration '{}' has token_rows {}, weight_rows {}, splits {}, blocks {} and "
          "group_m {}; all are 1 or more",
          printable(c.name), c.token_rows, c.weight_rows, c.splits, c.blocks, c.group_m));
    }
    if (!names.insert(c.name).second) {
      refuse(fmt::format("two configurations are named '{}'; names tell them apart",
                         printable(c.name)));
    }
    rules += c.is_rule ? 1 : 0;
  }
  if (rules > 1) {
    refuse(fmt::format("{} configurations stand for the kernel's own rule; mark one", rules));
  }
  if (kernel.configurations.size() == rules) {
    refuse(fmt::format("the kernel {} has no configuration to choose; give it some",
                       printable(kernel.name)));
  }
}

std::int64_t rows_of(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

void check_plan(const Plan& plan) {
  if (plan.models.empty()) refuse("the plan has no models; give it some");
  std::set<std::string> names;
  for (const Model& model : plan.models) {
    check_model(model);
    if (!names.insert(model.name).second) {
      refuse(
          fmt::format("two models are named '{}'; names tell them apart", printable(model.name)));
    }
  }
  if (plan.recorded.empty() && (plan.tokens.empty() || plan.betas.empty())) {
    refuse("the plan has no points to fit on; give it tokens and betas");
  }
  for (const Plan::Recorded& recorded : plan.recorded) {
    const std::size_t experts = recorded.counts.size();
    if (recorded.model >= plan.models.size()) {
      refuse(fmt::format("a recorded histogram is of model {} of {}; use the index of one",
                         recorded.model, plan.models.size()));
    }
    const Model& model = plan.models[recorded.model];
    if (experts != static_cast<std::size_t>(model.num_experts)) {
      refuse(fmt::format("a recorded histogram has {}, and the model {} has {}",
                         plural(experts, "expert"), printable(model.name), model.num_experts));
    }
    if (rows_of(recorded.counts) < 1) {
      refuse(fmt::format("a recorded histogram of the model {} has no rows; leave it out",
                         printable(model.name)));
    }
  }
  for (const std::vector<int>* all : {&plan.tokens, &plan.test_tokens}) {
    for (const int tokens : *all) {
      if (tokens < 1)
        refuse(fmt::format("the plan has {}; use 1 or more", plural(tokens, "token")));
    }
  }
  for (const std::vector<double>* all : {&plan.betas, &plan.test_betas}) {
    for (const double beta : *all) {
      if (!(beta >= 0 && beta <= 1)) {
        refuse(fmt::format("the plan has a balancedness of {}; use 0 to 1", beta));
      }
    }
  }
}

// The seed of a point depends on nothing but the point, so that a profile can be extended.
std::uint64_t seed_of(std::uint64_t seed, const Model& model, int tokens, double beta) {
  std::uint64_t key = mix64(seed + 1);
  for (const char c : model.name) key = mix64(key ^ static_cast<unsigned char>(c));
  key = mix64(key ^ static_cast<std::uint64_t>(tokens));
  return mix64(key ^ std::bit_cast<std::uint64_t>(beta));
}

Point new_point(const Profile& profile, std::size_t model, int tokens,
                std::vector<std::int64_t> counts) {
  Point point;
  point.model = model;
  point.tokens = tokens;
  point.counts = std::move(counts);
  point.beta = point.beta_reached = balancedness(point.counts);
  point.times_us.assign(profile.configurations.size(), kNotTimed);
  point.variations.assign(profile.configurations.size(), 0);
  return point;
}

// Adds the points of a grid to those that a model has.
void add_grid(Profile& profile, std::size_t model, const std::vector<int>& tokens,
              const std::vector<double>& betas, bool Point::*role) {
  for (const int t : tokens) {
    for (const double beta : betas) {
      auto point = std::find_if(profile.points.begin(), profile.points.end(), [&](const Point& p) {
        return p.model == model && p.tokens == t && p.beta == beta;
      });
      if (point == profile.points.end()) {
        const Model& its = profile.models[model];
        profile.points.push_back(
            new_point(profile, model, t,
                      draw_counts(profile.generator, t, its.num_experts, its.top_k, beta,
                                  seed_of(profile.seed, its, t, beta))));
        point = std::prev(profile.points.end());
        point->beta = beta;
      }
      (*point).*role = true;
    }
  }
}

// `plan_model`: the model's index in the plan.
void add_recorded_points(Profile& profile, std::size_t model, const Plan& plan,
                         std::size_t plan_model) {
  std::size_t count = 0;
  for (const Plan::Recorded& recorded : plan.recorded) {
    if (recorded.model != plan_model) continue;
    const int top_k = profile.models[model].top_k;
    auto point = std::find_if(profile.points.begin(), profile.points.end(), [&](const Point& p) {
      return p.model == model && p.counts == recorded.counts;
    });
    if (point == profile.points.end()) {
      // Slots may have been dropped or have had no expert, so the rows need be no multiple of
      // top_k.
      profile.points.push_back(
          new_point(profile, model, static_cast<int>(ceil_div(rows_of(recorded.counts), top_k)),
                    recorded.counts));
      point = std::prev(profile.points.end());
    }
    point->test = true;
    if (count++ % 4 != 3) point->fit = true;
  }
}

void add_points(Profile& profile, std::size_t model, const Plan& plan, std::size_t plan_model) {
  add_grid(profile, model, plan.tokens, plan.betas, &Point::fit);
  add_grid(profile, model, plan.test_tokens, plan.test_betas, &Point::test);
  add_recorded_points(profile, model, plan, plan_model);
}

// A model's points stand together, because a kernel that changes its model may have to make weights
// anew. Those to fit on come first, because a profile without them is of no use.
void sort_points(Profile& profile) {
  std::stable_sort(profile.points.begin(), profile.points.end(),
                   [](const Point& a, const Point& b) {
                     return a.model != b.model ? a.model < b.model : a.fit > b.fit;
                   });
}

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::uint64_t timings_left(const Profile& profile) {
  std::uint64_t left = 0;
  for (const Point& point : profile.points) {
    left += static_cast<std::uint64_t>(
        std::count(point.times_us.begin(), point.times_us.end(), kNotTimed));
  }
  return left;
}

// The points of a model that tell which configurations are worth timing at the others.
std::vector<std::size_t> pilots_of(const Profile& profile, std::size_t model) {
  std::set<int> tokens;
  std::set<double> betas;
  for (const Point& point : profile.points) {
    if (point.model != model || !point.fit) continue;
    tokens.insert(point.tokens);
    betas.insert(point.beta);
  }
  if (tokens.empty()) return {};
  const std::set<int> chosen{
      *tokens.begin(), *std::next(tokens.begin(), static_cast<std::ptrdiff_t>(tokens.size() / 2)),
      *tokens.rbegin()};
  std::vector<std::size_t> pilots;
  for (std::size_t p = 0; p < profile.points.size(); ++p) {
    const Point& point = profile.points[p];
    if (point.model != model || !point.fit || !chosen.contains(point.tokens)) continue;
    if (point.beta == *betas.begin() || point.beta == *betas.rbegin()) pilots.push_back(p);
  }
  return pilots;
}

bool is_timed(const Point& point) {
  return std::find(point.times_us.begin(), point.times_us.end(), kNotTimed) == point.times_us.end();
}

// Returns the configuration with the least time among those for which `counts` holds; or none.
template <typename Counts>
std::optional<std::size_t> best_of(const Profile& profile, const Point& point, Counts&& counts) {
  std::optional<std::size_t> best;
  for (std::size_t c = 0; c < point.times_us.size(); ++c) {
    if (point.times_us[c] <= 0 || profile.configurations[c].is_rule) continue;
    if (!counts(profile.configurations[c])) continue;
    if (!best || point.times_us[c] < point.times_us[*best]) best = c;
  }
  return best;
}

// Marks what need not be timed any more for a model, once its pilots are timed. See MeasureOptions.
// Returns whether it marked anything.
bool prune(Profile& profile, std::size_t model, double share) {
  const std::vector<std::size_t> pilots = pilots_of(profile, model);
  std::set<std::size_t> kept;
  for (const std::size_t p : pilots) {
    const Point& point = profile.points[p];
    if (!is_timed(point)) return false;
    const auto keep = [&](auto&& counts) {
      if (const auto best = best_of(profile, point, counts)) kept.insert(*best);
    };
    keep([](const Configuration&) { return true; });
    for (const bool with : {false, true}) {
      keep([&](const Configuration& c) { return (c.splits > 1) == with; });
      keep([&](const Configuration& c) { return (c.group_m > 1) == with; });
      keep([&](const Configuration& c) { return (c.weight_rows > kReferenceRows) == with; });
    }
  }
  bool marked = false;
  for (std::size_t c = 0; c < profile.configurations.size(); ++c) {
    if (profile.configurations[c].is_rule || kept.contains(c)) continue;
    const bool near = std::any_of(pilots.begin(), pilots.end(), [&](std::size_t p) {
      const Point& point = profile.points[p];
      const auto best = best_of(profile, point, [](const Configuration&) { return true; });
      return best && point.times_us[c] > 0 &&
             point.times_us[c] <= (1 + share) * point.times_us[*best];
    });
    if (near) continue;
    for (Point& point : profile.points) {
      if (point.model != model || point.times_us[c] != kNotTimed) continue;
      point.times_us[c] = kPruned;
      marked = true;
    }
  }
  return marked;
}

// The order in which points are timed: a model's pilots first, where there is to be pruning.
std::vector<std::size_t> order_of(const Profile& profile, bool pilots_first) {
  std::vector<std::size_t> order;
  for (std::size_t m = 0; m < profile.models.size(); ++m) {
    std::set<std::size_t> first;
    if (pilots_first) {
      for (const std::size_t p : pilots_of(profile, m)) first.insert(p);
    }
    order.insert(order.end(), first.begin(), first.end());
    for (std::size_t p = 0; p < profile.points.size(); ++p) {
      if (profile.points[p].model == m && !first.contains(p)) order.push_back(p);
    }
  }
  return order;
}

// Times one configuration at a point.
void time_one(const Profile& profile, const Kernel& kernel, Point& point,
              std::size_t configuration) {
  Timing timing;
  try {
    timing = kernel.time(profile.models[point.model], configuration, point.counts);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    point.times_us[configuration] = kUnsupported;
    return;
  }
  if (!(timing.median_us > 0) || !std::isfinite(timing.median_us)) {
    refuse(fmt::format("the time of the configuration '{}' is {} us; a time is above 0",
                       printable(profile.configurations[configuration].name), timing.median_us));
  }
  point.times_us[configuration] = timing.median_us;
  point.variations[configuration] = std::isfinite(timing.variation) ? timing.variation : 0;
}

}  // namespace

std::int64_t grid_of(const Configuration& configuration, int n,
                     std::span<const std::int64_t> counts) {
  std::int64_t tiles = 0;
  for (const std::int64_t count : counts) tiles += ceil_div(count, configuration.token_rows);
  return tiles * ceil_div(n, configuration.weight_rows) * configuration.splits *
         configuration.blocks;
}

Profile new_profile(const Kernel& kernel, const Device& device, const Plan& plan) {
  check_kernel(kernel);
  check_plan(plan);
  if (device.num_sms < 1) {
    refuse(fmt::format("the device runs {} at a time; use 1 or more",
                       plural(device.num_sms, "block")));
  }
  Profile profile;
  profile.kernel = kernel.name;
  profile.version = kernel.version;
  profile.device = device;
  profile.generator = plan.generator;
  profile.seed = plan.seed;
  profile.configurations = kernel.configurations;
  for (const Model& model : plan.models) {
    profile.models.push_back(model);
    const std::size_t index = profile.models.size() - 1;
    add_points(profile, index, plan, index);
  }
  sort_points(profile);
  return profile;
}

Profile resumed_profile(const std::filesystem::path& file, const Kernel& kernel,
                        const Device& device, const Plan& plan) {
  Profile profile = read_profile(file);
  const Profile wanted = new_profile(kernel, device, plan);
  const Match match{"the profile", printable(file)};
  match.require_kernel(profile.kernel, profile.version, wanted.kernel, wanted.version);
  match.require_device(profile.device, wanted.device);
  match.require_configurations(profile.configurations, wanted.configurations);
  match.require("generator", to_string(profile.generator), to_string(wanted.generator));
  match.require("seed", fmt::format("{}", profile.seed), fmt::format("{}", wanted.seed));
  for (const Model& model : wanted.models) {
    auto same = std::find_if(profile.models.begin(), profile.models.end(),
                             [&](const Model& known) { return known.name == model.name; });
    if (same == profile.models.end()) {
      profile.models.push_back(model);
      same = std::prev(profile.models.end());
    }
    match.require_model(*same, model);
    add_points(profile, static_cast<std::size_t>(same - profile.models.begin()), plan,
               static_cast<std::size_t>(&model - wanted.models.data()));
  }
  sort_points(profile);
  return profile;
}

bool measure(Profile& profile, const Kernel& kernel, const MeasureOptions& options) {
  const Match match{"the profile", "in memory"};
  match.require_kernel(profile.kernel, profile.version, kernel.name, kernel.version);
  match.require_configurations(profile.configurations, kernel.configurations);
  if (!kernel.time) refuse("the kernel has no callback that times it; set Kernel::time");
  if (options.prune && !(*options.prune >= 0)) {
    refuse(fmt::format("the share beyond which configurations are pruned is {}; use 0 or more",
                       *options.prune));
  }
  const std::function<double()> clock = options.clock ? options.clock : steady_seconds;
  const double begin = clock();
  Progress progress;
  for (const Point& point : profile.points) progress.total += point.times_us.size();
  std::uint64_t left = timings_left(profile);
  progress.done = progress.total - left;
  std::uint64_t timed = 0;
  const auto report_progress = [&](const Model* next) {
    progress.model = next;
    progress.seconds = clock() - begin;
    progress.seconds_left = timed == 0 ? 0
                                       : progress.seconds / static_cast<double>(timed) *
                                             static_cast<double>(left - timed);
    if (options.progress) options.progress(progress);
  };
  const auto keep = [&] {
    if (!options.file.empty()) write_profile(options.file, profile);
  };
  bool in_time = true;
  for (const std::size_t index : order_of(profile, options.prune.has_value())) {
    Point& point = profile.points[index];
    bool changed = false;
    if (options.prune) {
      changed = prune(profile, point.model, *options.prune);
      if (changed) {
        const std::uint64_t now = timings_left(profile) + timed;
        progress.done += left - now;
        left = now;
      }
    }
    for (std::size_t c = 0; c < point.times_us.size() && in_time; ++c) {
      if (point.times_us[c] != kNotTimed) continue;
      report_progress(&profile.models[point.model]);
      in_time = progress.seconds < options.budget_seconds;
      if (!in_time) break;
      try {
        time_one(profile, kernel, point, c);
      } catch (...) {
        if (changed) keep();
        throw;
      }
      changed = true;
      ++timed;
      ++progress.done;
    }
    if (changed) keep();
    if (!in_time) break;
  }
  report_progress(nullptr);
  if (timed == 0) keep();
  return progress.done == progress.total;
}

std::size_t num_pruned(const Profile& profile, std::size_t model) {
  std::size_t count = 0;
  for (std::size_t c = 0; c < profile.configurations.size(); ++c) {
    count += std::any_of(profile.points.begin(), profile.points.end(),
                         [&](const Point& point) {
                           return point.model == model && point.times_us[c] == kPruned;
                         })
                 ? 1
                 : 0;
  }
  return count;
}

Profile complete_models(const Profile& profile) {
  std::vector<bool> complete(profile.models.size(), true);
  for (const Point& point : profile.points) {
    const bool timed =
        std::find(point.times_us.begin(), point.times_us.end(), kNotTimed) == point.times_us.end();
    if (point.fit && !timed) complete[point.model] = false;
  }
  Profile kept = profile;
  kept.models.clear();
  kept.points.clear();
  for (std::size_t m = 0; m < profile.models.size(); ++m) {
    if (!complete[m]) continue;
    kept.models.push_back(profile.models[m]);
    for (const Point& point : profile.points) {
      if (point.model != m) continue;
      kept.points.push_back(point);
      kept.points.back().model = kept.models.size() - 1;
    }
  }
  return kept;
}

}  // namespace switchyard::tuner
