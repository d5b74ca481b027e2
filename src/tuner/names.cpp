#include "tuner/names.h"

#include "switchyard/tuner.h"

namespace switchyard::tuner {

const char* to_string(Generator generator) {
  return generator == Generator::kDistinct ? "distinct" : "repeated";
}

Generator generator_named(std::string_view name) {
  static constexpr std::array kAll{Generator::kDistinct, Generator::kRepeated};
  return named<Generator>("the generator", name, kAll);
}

const char* to_string(Form form) {
  switch (form) {
    case Form::kTasks: return "tasks";
    case Form::kWaves: return "waves";
    case Form::kRoundedWaves: return "rounded_waves";
    case Form::kFull: return "full";
    case Form::kRoundedFull: return "rounded_full";
    case Form::kExperts: break;
  }
  return "experts";
}

Form form_named(std::string_view name) { return named<Form>("the form", name, kForms); }

}  // namespace switchyard::tuner
