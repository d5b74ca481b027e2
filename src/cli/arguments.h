// Options of the command line, read strictly: what is not entirely the number asked for is refused
// with the option's name, the text and the range.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "base/numbers.h"
#include "base/printable.h"
#include "cli/format.h"
#include "switchyard/error.h"
#include "switchyard/layer.h"
#include "switchyard/tensor.h"

namespace switchyard::cli {

// A subcommand as main() drives it: `run` returns the exit code, once `app` has been parsed.
struct Subcommand {
  CLI::App* app;
  std::function<int()> run;
};

inline constexpr int kExitOk = 0;
inline constexpr int kExitVerification = 1;  // computed, but wrong; or a check did not pass
inline constexpr int kExitInvalid = 2;       // arguments, files or this machine do not allow it
inline constexpr int kExitTimeout = 3;       // a rank did not do its part
inline constexpr int kExitInternal = 4;

template <typename Integer>
CLI::Option* add_whole(CLI::App& app, const std::string& name, Integer& target,
                       std::int64_t smallest, std::int64_t largest, const std::string& help) {
  const auto set = [name, &target, smallest, largest](const std::string& text) {
    const std::optional<std::int64_t> value = parse_whole(text);
    if (!value || *value < smallest || *value > largest) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} is '{}'; give a whole number from {} to {}", name,
                              printable(text), smallest, largest));
    }
    target = static_cast<Integer>(*value);
  };
  return app.add_option_function<std::string>(name, set, help)->type_name("N");
}

CLI::Option* add_real(CLI::App& app, const std::string& name, std::optional<double>& target,
                      double smallest, double largest, const std::string& help);
CLI::Option* add_seconds(CLI::App& app, const std::string& name, std::chrono::milliseconds& target,
                         const std::string& help);
CLI::Option* add_bytes(CLI::App& app, const std::string& name, std::uint64_t& target,
                       const std::string& help);
// bf16, f32, fp8, and where `weights` is set f16.
CLI::Option* add_dtype(CLI::App& app, const std::string& name, std::optional<DType>& target,
                       bool weights, const std::string& help);

// cpu or cuda.
CLI::Option* add_backend(CLI::App& app, const std::string& name, std::optional<Backend>& target,
                         const std::string& help);

}  // namespace switchyard::cli
