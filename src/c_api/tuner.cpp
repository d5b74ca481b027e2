// The tuner in the C interface.
#include "switchyard/tuner.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "c_api/guard.h"
#include "c_api/structs.h"
#include "switchyard/error.h"
#include "switchyard/recording.h"

struct sy_tuner {
  switchyard::tuner::Fit fit;
};

namespace switchyard::c_api {
namespace {

using tuner::Configuration;
using tuner::Device;
using tuner::Kernel;
using tuner::Model;
using tuner::Plan;
using tuner::Profile;

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

std::string text_of(const char* name, const char* text) {
  require(name, text);
  return text;
}

// A list that may be null only if it has no elements.
template <typename T>
std::span<const T> list_of(const char* name, const T* data, std::int32_t count) {
  if (count < 0 || (data == nullptr && count > 0)) {
    refuse(fmt::format("{} has {} elements at {}; pass their address and number", name, count,
                       data == nullptr ? "null" : "an address"));
  }
  return {data, static_cast<std::size_t>(count)};
}

tuner::Generator generator_of(sy_generator generator) {
  if (generator == SY_DISTINCT) return tuner::Generator::kDistinct;
  if (generator == SY_REPEATED) return tuner::Generator::kRepeated;
  refuse(fmt::format("the generator is {}; use SY_DISTINCT or SY_REPEATED", generator));
}

tuner::Form form_of(sy_form form) {
  if (form >= SY_FORM_TASKS && form <= SY_FORM_EXPERTS) {
    return tuner::kForms[static_cast<std::size_t>(form)];
  }
  refuse(fmt::format("the form is {}; use SY_FORM_TASKS to SY_FORM_EXPERTS", form));
}

Configuration configuration_of(const sy_tune_configuration& given) {
  Configuration c;
  c.name = text_of("the configuration's name", given.name);
  c.token_rows = given.token_rows;
  c.weight_rows = given.weight_rows;
  c.splits = given.splits;
  c.blocks = given.blocks;
  c.group_m = given.group_m;
  c.is_rule = given.is_rule != 0;
  const auto names = list_of("value_names", given.value_names, given.num_values);
  const auto values = list_of("values", given.values, given.num_values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    c.values.emplace_back(text_of("a value's name", names[i]), values[i]);
  }
  return c;
}

Kernel kernel_of(const sy_tune_kernel& given) {
  Kernel kernel;
  kernel.name = text_of("the kernel's name", given.name);
  kernel.version = given.version;
  for (const auto& c : list_of("configurations", given.configurations, given.num_configurations)) {
    kernel.configurations.push_back(configuration_of(c));
  }
  return kernel;
}

Device device_of(const sy_tune_kernel& given) {
  return {text_of("the machine", given.machine), given.num_sms, given.l2_bytes};
}

template <typename To, typename From>
void put_list(const char* name, const From* data, std::int32_t count, std::vector<To>& to) {
  if (data == nullptr && count == 0) return;  // the default
  const std::span<const From> list = list_of(name, data, count);
  to.assign(list.begin(), list.end());
}

Plan plan_of(const sy_tune_plan& given) {
  Plan plan;
  plan.generator = generator_of(given.generator);
  plan.seed = given.seed;
  for (const sy_tune_model& m : list_of("models", given.models, given.num_models)) {
    plan.models.push_back(
        {text_of("the model's name", m.name), m.num_experts, m.top_k, m.n, m.k, m.unseen != 0});
  }
  put_list("tokens", given.tokens, given.num_tokens, plan.tokens);
  put_list("betas", given.betas, given.num_betas, plan.betas);
  put_list("test_tokens", given.test_tokens, given.num_test_tokens, plan.test_tokens);
  put_list("test_betas", given.test_betas, given.num_test_betas, plan.test_betas);
  if (given.recordings_file != nullptr) {
    constexpr int kMost = 24;
    const int most = given.most_recorded == 0 ? kMost : given.most_recorded;
    if (most < 1) refuse(fmt::format("most_recorded is {}; use 1 or more, or 0 for 24", most));
    tuner::add_recorded(plan, read_recordings(given.recordings_file),
                        static_cast<std::size_t>(most));
  }
  return plan;
}

std::int32_t index_of(const Plan& plan, const std::string& name) {
  for (std::size_t m = 0; m < plan.models.size(); ++m) {
    if (plan.models[m].name == name) return static_cast<std::int32_t>(m);
  }
  return -1;
}

tuner::Timer timer_of(const sy_tune_options& options, const Plan& plan) {
  return [&options, &plan](const Model& model, std::size_t configuration,
                           std::span<const std::int64_t> counts) {
    const std::int32_t index = index_of(plan, model.name);
    if (index < 0) {
      refuse(
          fmt::format("the profile has times to take of the model {}, which the plan does not "
                      "have; add it, or choose another file",
                      printable(model.name)));
    }
    tuner::Timing timing;
    const sy_status status = options.time(
        options.user, index, static_cast<std::int32_t>(configuration), counts.data(),
        static_cast<std::int32_t>(counts.size()), &timing.median_us, &timing.variation);
    if (status == SY_UNSUPPORTED) {
      throw Error(ErrorCode::kUnsupported, "the callback cannot run this configuration");
    }
    if (status != SY_OK) {
      throw Error(ErrorCode::kAborted,
                  fmt::format("the callback that times the kernel returned {}; the times before "
                              "are kept, and resume goes on",
                              sy_status_name(status)));
    }
    return timing;
  };
}

bool measure(const sy_tune_kernel& kernel_given, const Plan& plan, const sy_tune_options& options) {
  const std::string file = text_of("file", options.file);
  if (options.time == nullptr) refuse("time is null; pass the callback that times the kernel");
  if (!(options.budget_seconds >= 0)) {
    refuse(fmt::format("budget_seconds is {}; use 0 or more", options.budget_seconds));
  }
  Kernel kernel = kernel_of(kernel_given);
  const Device device = device_of(kernel_given);
  kernel.time = timer_of(options, plan);
  const bool absent = is_absent(file);
  if (!options.resume && !absent) {
    refuse(fmt::format("{} exists; set resume to go on with it, or choose another file",
                       printable(file)));
  }
  Profile profile = absent ? tuner::new_profile(kernel, device, plan)
                           : tuner::resumed_profile(file, kernel, device, plan);
  tuner::MeasureOptions measuring;
  measuring.file = file;
  measuring.budget_seconds = options.budget_seconds;
  if (options.prune != 0) measuring.prune = options.prune;
  if (options.progress != nullptr) {
    measuring.progress = [&](const tuner::Progress& p) {
      options.progress(options.user, p.done, p.total, p.seconds, p.seconds_left,
                       p.model == nullptr ? -1 : index_of(plan, p.model->name));
    };
  }
  return tuner::measure(profile, kernel, measuring);
}

Profile complete_profile(const char* file) {
  const std::string name = text_of("profile_file", file);
  Profile profile = tuner::complete_models(tuner::read_profile(name));
  if (profile.models.empty()) {
    refuse(fmt::format("{} has no model all of whose points to fit on are timed; go on measuring",
                       printable(name)));
  }
  return profile;
}

Json json_of(const Profile& profile, const tuner::Outcome& outcome) {
  const tuner::Point& point = profile.points[outcome.point];
  const Model& model = profile.models[point.model];
  return {{"model", model.name},
          {"tokens", point.tokens},
          {"beta", point.beta},
          {"beta_reached", point.beta_reached},
          {"held_out", point.held_out()},
          {"unseen", model.unseen},
          {"exhaustive_us", outcome.exhaustive_us},
          {"chosen_us", outcome.chosen_us},
          {"predicted_us", outcome.predicted_us},
          {"static_us", outcome.static_us},
          {"rule_us", outcome.rule_us},
          {"best", profile.configurations[outcome.best].name},
          {"chosen", profile.configurations[outcome.chosen].name}};
}

}  // namespace
}  // namespace switchyard::c_api

using namespace switchyard::c_api;
namespace tuner = switchyard::tuner;

sy_status sy_draw_counts(sy_generator generator, int32_t tokens, int32_t num_experts, int32_t top_k,
                         double beta, uint64_t seed, int64_t* counts) {
  return guarded([&] {
    require("counts", counts);
    const std::vector<std::int64_t> drawn =
        tuner::draw_counts(generator_of(generator), tokens, num_experts, top_k, beta, seed);
    std::copy(drawn.begin(), drawn.end(), counts);
  });
}

sy_status sy_tune_measure(const sy_tune_kernel* kernel, const sy_tune_plan* plan,
                          const sy_tune_options* options, int32_t* complete) {
  return guarded([&] {
    const sy_tune_options how = read_struct("sy_tune_options", options);
    const bool all = measure(read_struct("sy_tune_kernel", kernel),
                             plan_of(read_struct("sy_tune_plan", plan)), how);
    if (complete != nullptr) *complete = all ? 1 : 0;
  });
}

sy_status sy_tune_fit(const char* profile_file, sy_form form, int32_t relative,
                      const char* fit_file) {
  return guarded([&] {
    require("fit_file", fit_file);
    tuner::write_fit(fit_file, tuner::fit(complete_profile(profile_file),
                                          {form_of(form), relative != 0, false}));
  });
}

sy_status sy_tune_evaluate(const char* profile_file, sy_form form, int32_t relative, char* text,
                           uint64_t* size) {
  return guarded([&] {
    require("size", size);
    const tuner::Profile profile = complete_profile(profile_file);
    const tuner::Fit fit = tuner::fit(profile, {form_of(form), relative != 0, false});
    switchyard::Json list = switchyard::Json::array();
    for (const tuner::Outcome& outcome : tuner::evaluate(profile, fit)) {
      list.push_back(json_of(profile, outcome));
    }
    const std::string json = list.dump();
    if (text != nullptr && *size > json.size()) std::memcpy(text, json.c_str(), json.size() + 1);
    *size = json.size() + 1;
  });
}

sy_status sy_tuner_open(const sy_tune_kernel* kernel, const char* fit_file, sy_tuner** out) {
  return guarded([&] {
    require("fit_file", fit_file);
    require("out", out);
    const sy_tune_kernel given = read_struct("sy_tune_kernel", kernel);
    *out = new sy_tuner{tuner::read_fit(fit_file, kernel_of(given), device_of(given))};
  });
}

sy_status sy_tuner_select(const sy_tuner* tuner, const char* model, const int64_t* counts,
                          int32_t num_experts, int32_t* configuration, double* predicted_us) {
  return guarded([&] {
    require("tuner", tuner);
    require("model", model);
    require("configuration", configuration);
    const std::span<const std::int64_t> rows = list_of("counts", counts, num_experts);
    const std::size_t index = switchyard::tuner::model_index(tuner->fit, model);
    const std::size_t chosen = switchyard::tuner::select(tuner->fit, index, rows);
    *configuration = static_cast<int32_t>(chosen);
    if (predicted_us != nullptr) {
      *predicted_us = switchyard::tuner::predict_us(tuner->fit, index, chosen, rows);
    }
  });
}

sy_status sy_tuner_destroy(sy_tuner** tuner) {
  return guarded([&] {
    require("tuner", tuner);
    delete *tuner;
    *tuner = nullptr;
  });
}
