#include "report/tuning.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "base/printable.h"
#include "switchyard/error.h"

namespace switchyard::report {
namespace {

using tuner::Outcome;
using tuner::Point;
using tuner::Profile;

// Six digits: a profile of eight models has fifty thousand times.
Json short_number(double value) {
  if (!std::isfinite(value)) return {};
  return std::stod(fmt::format("{:.6g}", value));
}

tuner::Configuration reference_configuration() {
  tuner::Configuration reference;
  reference.token_rows = 16;
  reference.weight_rows = tuner::kReferenceRows;
  return reference;
}

Json json_of(const tuner::Model& model, const tuner::Device& device,
             const tuner::Thresholds& thresholds) {
  const std::vector<std::int64_t> none(static_cast<std::size_t>(model.num_experts));
  const tuner::RegionVariables v =
      region_variables(model, reference_configuration(), none, device.num_sms);
  return {{"name", model.name},
          {"experts", model.num_experts},
          {"top_k", model.top_k},
          {"n", model.n},
          {"k", model.k},
          {"unseen", model.unseen},
          {"rho", short_number(v.rho)},
          {"lambda", v.lambda},
          {"kappa", short_number(v.kappa)},
          {"group_m", group_m_helps(v, thresholds)}};
}

Json json_of(const Tuning& tuning, const Point& point, const std::optional<Outcome>& outcome,
             const tuner::Thresholds& thresholds) {
  const tuner::Model& model = tuning.profile.models[point.model];
  Json times = Json::array(), predicted = Json::array();
  for (std::size_t c = 0; c < point.times_us.size(); ++c) {
    const bool fitted = tuning.fit.coefficients[point.model][c].points > 0;
    times.push_back(point.times_us[c] > 0 ? short_number(point.times_us[c]) : Json());
    predicted.push_back(fitted ? short_number(predict_us(tuning.fit, point.model, c, point.counts))
                               : Json());
  }
  const tuner::RegionVariables v = region_variables(model, reference_configuration(), point.counts,
                                                    tuning.profile.device.num_sms);
  Json json = {{"model", point.model},
               {"tokens", point.tokens},
               {"beta", point.beta},
               {"beta_reached", short_number(point.beta_reached)},
               {"held_out", point.held_out()},
               {"omega", short_number(v.omega)},
               {"region", to_string(region_of(v, thresholds))},
               {"split_k", split_k_helps(v, thresholds)},
               {"times", times},
               {"predicted", predicted},
               {"outcome", nullptr}};
  if (outcome) {
    json["outcome"] = {
        {"best", outcome->best},
        {"chosen", outcome->chosen},
        {"exhaustive_us", short_number(outcome->exhaustive_us)},
        {"chosen_us", short_number(outcome->chosen_us)},
        {"predicted_us", short_number(outcome->predicted_us)},
        {"static_us", outcome->static_us ? short_number(*outcome->static_us) : Json()},
        {"rule_us", outcome->rule_us ? short_number(*outcome->rule_us) : Json()}};
  }
  return json;
}

}  // namespace

Tuning read_tuning(const std::filesystem::path& path, const std::string& name) {
  Tuning tuning;
  tuning.profile = tuner::complete_models(tuner::read_profile(path));
  if (tuning.profile.models.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} has no model all of whose points to fit on are timed; go on "
                            "measuring with 'switchyard tune --resume'",
                            printable(path)));
  }
  tuning.fit = tuner::fit(tuning.profile);
  tuning.constants.num_sms = tuning.profile.device.num_sms;
  if (tuning.profile.device.l2_bytes > 0) {
    tuning.constants.l2_bytes = tuning.profile.device.l2_bytes;
  }
  tuning.element_bytes = tuning.profile.kernel.ends_with("_bf16")  ? 2
                         : tuning.profile.kernel.ends_with("_f32") ? 4
                                                                   : 1;
  tuning.file = name;
  return tuning;
}

Json tuning_json(const Tuning& tuning) {
  const Profile& profile = tuning.profile;
  const tuner::Thresholds thresholds = thresholds_of(tuning.constants, tuning.element_bytes);
  Json configurations = Json::array(), models = Json::array(), points = Json::array(),
       findings = Json::array();
  Json rule;
  for (std::size_t c = 0; c < profile.configurations.size(); ++c) {
    configurations.push_back(profile.configurations[c].name);
    if (profile.configurations[c].is_rule) rule = c;
  }
  for (const tuner::Model& model : profile.models) {
    models.push_back(json_of(model, profile.device, thresholds));
  }
  const std::vector<Outcome> outcomes = evaluate(profile, tuning.fit);
  for (std::size_t p = 0; p < profile.points.size(); ++p) {
    const auto found = std::find_if(outcomes.begin(), outcomes.end(),
                                    [&](const Outcome& outcome) { return outcome.point == p; });
    points.push_back(json_of(tuning, profile.points[p],
                             found == outcomes.end() ? std::nullopt : std::optional(*found),
                             thresholds));
  }
  for (const tuner::Finding& finding :
       tuner::findings(profile, tuning.constants, tuning.element_bytes)) {
    findings.push_back({{"model", finding.model},
                        {"prediction", to_string(finding.prediction)},
                        {"predicted", finding.predicted},
                        {"points", finding.points},
                        {"ratio", short_number(finding.measured_ratio)},
                        {"confirmed", finding.confirmed()}});
  }
  return {{"file", tuning.file},
          {"kernel", profile.kernel},
          {"version", profile.version},
          {"machine", profile.device.machine},
          {"generator", to_string(profile.generator)},
          {"form", to_string(tuning.fit.options.form)},
          {"thresholds",
           {{"rho", short_number(thresholds.rho)},
            {"lambda_kappa", short_number(thresholds.lambda_kappa)},
            {"kappa", short_number(thresholds.kappa)},
            {"split_omega", short_number(thresholds.split_omega)}}},
          {"configurations", configurations},
          {"rule", rule},
          {"models", models},
          {"points", points},
          {"findings", findings}};
}

}  // namespace switchyard::report
