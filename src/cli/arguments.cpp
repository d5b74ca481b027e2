#include "cli/arguments.h"

#include <cmath>

#include "base/names.h"

namespace switchyard::cli {
namespace {

constexpr double kMostSeconds = 1e6;

struct WeightType {
  DType dtype;
  bool computes;  // also a type to compute in
};
constexpr WeightType kWeightTypes[] = {
    {DType::kBF16, true}, {DType::kF32, true}, {DType::kF16, false}, {DType::kF8E4M3, true}};

[[noreturn]] void refuse(const std::string& name, const std::string& text,
                         const std::string& remedy) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} is '{}'; {}", name, printable(text), remedy));
}

}  // namespace

CLI::Option* add_real(CLI::App& app, const std::string& name, std::optional<double>& target,
                      double smallest, double largest, const std::string& help) {
  const auto set = [name, &target, smallest, largest](const std::string& text) {
    const std::optional<double> value = parse_real(text);
    if (!value || *value < smallest || *value > largest) {
      refuse(name, text, fmt::format("give a number from {} to {}", smallest, largest));
    }
    target = *value;
  };
  return app.add_option_function<std::string>(name, set, help)->type_name("X");
}

CLI::Option* add_seconds(CLI::App& app, const std::string& name, std::chrono::milliseconds& target,
                         const std::string& help) {
  const auto set = [name, &target](const std::string& text) {
    const std::optional<double> value = parse_real(text);
    if (!value || *value < 0.001 || *value > kMostSeconds) {
      refuse(name, text, fmt::format("give seconds from 0.001 to {:.0f}", kMostSeconds));
    }
    target = std::chrono::milliseconds(std::llround(*value * 1000));
  };
  return app.add_option_function<std::string>(name, set, help)->type_name("SECONDS");
}

CLI::Option* add_bytes(CLI::App& app, const std::string& name, std::uint64_t& target,
                       const std::string& help) {
  const auto set = [name, &target](const std::string& text) {
    const std::optional<std::uint64_t> value = parse_bytes(text);
    if (!value || *value == 0) {
      refuse(name, text, "give a number of bytes such as 500MB, 2GB or 1GiB");
    }
    target = *value;
  };
  return app.add_option_function<std::string>(name, set, help)->type_name("BYTES");
}

CLI::Option* add_dtype(CLI::App& app, const std::string& name, std::optional<DType>& target,
                       bool weights, const std::string& help) {
  const auto set = [name, &target, weights](const std::string& text) {
    for (const WeightType& known : kWeightTypes) {
      if (text != short_name(known.dtype) || !(weights || known.computes)) continue;
      target = known.dtype;
      return;
    }
    refuse(name, text, weights ? "use bf16, f32, f16 or fp8" : "use bf16, f32 or fp8");
  };
  return app.add_option_function<std::string>(name, set, help)->type_name("TYPE");
}

CLI::Option* add_backend(CLI::App& app, const std::string& name, std::optional<Backend>& target,
                         const std::string& help) {
  const auto set = [name, &target](const std::string& text) {
    for (const Backend known : {Backend::kCpu, Backend::kCuda}) {
      if (text == to_string(known)) target = known;
    }
    if (!target) refuse(name, text, "use cpu or cuda");
  };
  return app.add_option_function<std::string>(name, set, help)->type_name("NAME");
}

}  // namespace switchyard::cli
