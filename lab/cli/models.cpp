// `switchyard models`: the models whose layers can be made up by name.
#include <fmt/core.h>
#include <unistd.h>

#include <memory>

#include "base/json.h"
#include "base/names.h"
#include "base/plural.h"
#include "cli/commands.h"
#include "cli/format.h"
#include "model/config.h"
#include "models/generate.h"
#include "models/model_table.h"

namespace switchyard::cli {
namespace {

struct ModelRow {
  const ModelEntry& entry;
  LayerSpec spec;
  std::size_t num_moe_layers;
  std::uint64_t layer_bytes;
};

// Describes a model by its last layer, because a model's layers differ only in that the first ones
// may route by hash.
ModelRow row_of(const ModelEntry& entry) {
  const ModelConfig config = parse_config(entry.config_json, entry.name);
  const std::vector<int> layers = config.moe_layers();
  const LayerSpec spec = *config.layers.at(static_cast<std::size_t>(layers.back()));
  return {entry, spec, layers.size(), generated_bytes(spec, entry.dtype)};
}

std::string routing_name(const LayerSpec& spec) {
  const RoutingSpec& routing = spec.routing;
  if (routing.method == RoutingMethod::kSparseMixer) return "sparse mixer";
  if (routing.method == RoutingMethod::kHash) return "hash";
  std::string name = name_of(routing.score);
  if (routing.num_groups > 1) {
    name += fmt::format(" {}/{}", routing.top_k_groups, plural(routing.num_groups, "group"));
  }
  return name;
}

void print_table(const std::vector<ModelRow>& models) {
  std::vector<std::vector<std::string>> rows = {{"model", "experts", "top-k", "H", "I", "routing",
                                                 "activation", "shared", "layers", "dtype",
                                                 "per layer"}};
  for (const ModelRow& m : models) {
    const LayerSpec& s = m.spec;
    rows.push_back({m.entry.name, fmt::format("{}", s.num_experts), fmt::format("{}", s.top_k),
                    fmt::format("{}", s.hidden), fmt::format("{}", s.intermediate), routing_name(s),
                    name_of(s.activation),
                    s.shared_intermediate > 0 ? fmt::format("{}", s.shared_intermediate) : "-",
                    fmt::format("{}", m.num_moe_layers), short_name(m.entry.dtype),
                    format_bytes(static_cast<double>(m.layer_bytes))});
  }
  constexpr std::size_t kRight[] = {1, 2, 3, 4, 7, 8, 10};
  const Palette palette = Palette::for_output(STDOUT_FILENO);
  const std::vector<std::string> lines = align_columns(rows, kRight);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    fmt::print("{}\n", i == 0 ? palette.bold(lines[i]) : lines[i]);
  }
}

void print_json(const std::vector<ModelRow>& models) {
  Json all = Json::array();
  for (const ModelRow& m : models) {
    const LayerSpec& s = m.spec;
    all.push_back({{"name", m.entry.name},
                   {"experts", s.num_experts},
                   {"top_k", s.top_k},
                   {"hidden", s.hidden},
                   {"intermediate", s.intermediate},
                   {"routing", routing_name(s)},
                   {"activation", name_of(s.activation)},
                   {"shared_intermediate", s.shared_intermediate},
                   {"moe_layers", m.num_moe_layers},
                   {"dtype", short_name(m.entry.dtype)},
                   {"layer_bytes", m.layer_bytes},
                   {"description", describe(s)}});
  }
  fmt::print("{}\n", all.dump({.indent = 2}));
}

}  // namespace

void add_models(CommandLine& line) {
  Command& command = line.add_command("models", "List the models known by name");
  const auto json = std::make_shared<bool>(false);
  command.add_flag("--json", *json, "As JSON");
  command.runs([json] {
    std::vector<ModelRow> models;
    for (const ModelEntry& entry : model_table()) models.push_back(row_of(entry));
    *json ? print_json(models) : print_table(models);
    return kExitOk;
  });
}

}  // namespace switchyard::cli
