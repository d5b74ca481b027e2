#include "machine/gpu_facts.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "base/json.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "machine/embedded_facts.h"
#include "switchyard/error.h"

namespace switchyard::machine {
namespace {

constexpr std::uint64_t kMostFileBytes = std::uint64_t{1} << 20;

// The names of a file's roofs, each with its unit in seconds, bytes or FLOPs.
constexpr const char* kLaunch = "launch_us";
constexpr const char* kRanksLaunch = "ranks_launch_us";
constexpr const char* kRead = "read_gb_per_s";
constexpr const char* kNvlink = "nvlink_gb_per_s";
constexpr const char* kBf16 = "bf16_tflop_per_s";
constexpr const char* kFp8 = "fp8_tflop_per_s";
constexpr const char* kRoofs[] = {kLaunch, kRanksLaunch, kRead, kNvlink, kBf16, kFp8};
constexpr double kMicro = 1e-6, kGiga = 1e9, kTera = 1e12;

[[noreturn]] void refuse(const std::string& source, const std::string& problem) {
  throw Error(ErrorCode::kInvalidFile,
              fmt::format("{} {}; write it like lab/machine/facts/nvidia_h200.json, or as "
                          "'switchyard bench --help' shows",
                          printable(source), problem));
}

bool is_one_of(const std::string& name, std::initializer_list<const char*> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// The fields of one object of the file; `where` is how messages name the object.
class Fields {
 public:
  Fields(const Json& json, const std::string& source, std::string where)
      : json_(json), source_(source), where_(std::move(where)) {
    if (!json.is_object()) {
      refuse(source_, fmt::format("{} is {}, not an object", where_, excerpt(json)));
    }
  }

  template <typename Known>
  void require_known(const Known& known) const {
    for (const Json::Member& member : json_.members()) {
      if (known(member.key)) continue;
      refuse(source_, fmt::format("{} has '{}', which is unknown", where_, printable(member.key)));
    }
  }
  bool has(const char* name) const { return json_.contains(name); }
  const Json& at(const char* name) const {
    if (const Json* const value = json_.find(name)) return *value;
    refuse(source_, fmt::format("{} has no '{}'", where_, name));
  }
  std::string text(const char* name) const {
    const Json& value = at(name);
    if (!value.is_string() || value.text().empty()) {
      refuse(source_, fmt::format("{} has '{}' {}, not a text that is not empty", where_, name,
                                  excerpt(value)));
    }
    return value.text();
  }
  double above_zero(const char* name) const {
    const Json& value = at(name);
    const double number = value.is_number() ? value.number() : 0;
    if (!(number > 0) || !std::isfinite(number)) {
      refuse(source_,
             fmt::format("{} has '{}' {}, not a number above 0", where_, name, excerpt(value)));
    }
    return number;
  }
  Roof roof(const char* name, double unit) const {
    const Fields fields(at(name), source_, fmt::format("'{}'", name));
    fields.require_known([](const std::string& key) {
      return is_one_of(key, {"value", "source"});
    });
    return {fields.above_zero("value") * unit, fields.text("source")};
  }
  std::optional<Roof> roof_if_any(const char* name, double unit) const {
    return has(name) ? std::optional(roof(name, unit)) : std::nullopt;
  }

 private:
  const Json& json_;
  const std::string& source_;
  std::string where_;
};

Json parse(std::string_view text, const std::string& source) {
  try {
    return Json::parse(text);
  } catch (const JsonError& error) {
    if (error.reason() == JsonError::Reason::kTooDeep) refuse(source, error.what());
    refuse(source, fmt::format("is not JSON ({})", printable(error.what())));
  }
}

const std::optional<Roof>& arithmetic(const GpuFacts& facts, DType compute) {
  return compute == DType::kF8E4M3 ? facts.fp8_flops_per_second : facts.bf16_flops_per_second;
}

}  // namespace

GpuFacts parse_gpu_facts(std::string_view text, const std::string& source) {
  const Json json = parse(text, source);
  const Fields file(json, source, "the file");
  file.require_known([](const std::string& key) { return is_one_of(key, {"gpu", "roofs"}); });
  GpuFacts facts{.gpu = file.text("gpu")};
  const Fields roofs(file.at("roofs"), source, "'roofs'");
  roofs.require_known([](const std::string& key) {
    return std::find(std::begin(kRoofs), std::end(kRoofs), key) != std::end(kRoofs);
  });
  facts.launch_seconds = roofs.roof(kLaunch, kMicro);
  facts.read_bytes_per_second = roofs.roof(kRead, kGiga);
  facts.ranks_launch_seconds = roofs.roof_if_any(kRanksLaunch, kMicro);
  facts.nvlink_bytes_per_second = roofs.roof_if_any(kNvlink, kGiga);
  facts.bf16_flops_per_second = roofs.roof_if_any(kBf16, kTera);
  facts.fp8_flops_per_second = roofs.roof_if_any(kFp8, kTera);
  return facts;
}

GpuFacts read_gpu_facts(const std::filesystem::path& path) {
  return parse_gpu_facts(read_named(path, kMostFileBytes), path.string());
}

std::optional<GpuFacts> known_gpu_facts(std::string_view gpu) {
  for (const EmbeddedFacts& embedded : embedded_facts()) {
    GpuFacts facts = parse_gpu_facts(embedded.text, std::string(embedded.file));
    if (facts.gpu == gpu) return facts;
  }
  return std::nullopt;
}

std::vector<std::string> missing_roofs(const GpuFacts& facts, DType compute, int ranks) {
  std::vector<std::string> missing;
  if (!arithmetic(facts, compute)) missing.push_back(compute == DType::kF8E4M3 ? kFp8 : kBf16);
  if (ranks > 1 && !facts.ranks_launch_seconds) missing.push_back(kRanksLaunch);
  if (ranks > 1 && !facts.nvlink_bytes_per_second) missing.push_back(kNvlink);
  return missing;
}

std::optional<double> floor_us(const GpuFacts& facts, const Load& load, DType compute, int ranks) {
  if (!missing_roofs(facts, compute, ranks).empty()) return std::nullopt;
  const Roof& launch = ranks == 1 ? facts.launch_seconds : *facts.ranks_launch_seconds;
  const double read =
      launch.value + static_cast<double>(load.touched_bytes) / facts.read_bytes_per_second.value;
  const double multiply = load.flops / arithmetic(facts, compute)->value;
  const double send =
      ranks == 1 ? 0
                 : static_cast<double>(load.nvlink_bytes) / facts.nvlink_bytes_per_second->value;
  return 1e6 * std::max({read, multiply, send});
}

}  // namespace switchyard::machine
