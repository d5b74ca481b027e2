// Profiles, fits and tables as JSON, written and read strictly.
#include <fmt/core.h>

#include <cmath>

#include "base/json.h"
#include "base/plural.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "base/whole_file.h"
#include "switchyard/tuner.h"
#include "tuner/match.h"
#include "tuner/names.h"
#include "tuner/reader.h"

namespace switchyard::tuner {
namespace {

constexpr std::int64_t kFileVersion = 1;
constexpr std::uint64_t kMostFileBytes = std::uint64_t{1} << 30;

// Rounds to six digits: clocks resolve no more.
double rounded(double value) {
  if (value == 0 || !std::isfinite(value)) return value;
  const double unit = std::pow(10, std::floor(std::log10(std::abs(value))) - 5);
  const double digits = std::round(value / unit) * unit;
  // The nearest number that prints short.
  return std::stod(fmt::format("{:.6g}", digits));
}

Json json_of(const Device& device) {
  return {{"machine", device.machine}, {"num_sms", device.num_sms}, {"l2_bytes", device.l2_bytes}};
}
Device device_of(const Reader& from) {
  return {from.text("machine"), from.number_of("num_sms"), from.any_whole("l2_bytes")};
}

Json json_of(const Model& model) {
  return {{"name", model.name},   {"experts", model.num_experts},
          {"top_k", model.top_k}, {"n", model.n},
          {"k", model.k},         {"unseen", model.unseen}};
}
Model model_of(const Reader& from) {
  Model model{from.text("name"),   from.number_of("experts"), from.number_of("top_k"),
              from.number_of("n"), from.number_of("k"),       from.yes("unseen")};
  if (model.top_k > model.num_experts) from.refuse("a model's top_k is above its experts");
  return model;
}

Json json_of(const Configuration& c) {
  Json values = Json::object();
  for (const auto& [name, value] : c.values) values[name] = value;
  return {{"name", c.name},
          {"token_rows", c.token_rows},
          {"weight_rows", c.weight_rows},
          {"splits", c.splits},
          {"blocks", c.blocks},
          {"group_m", c.group_m},
          {"is_rule", c.is_rule},
          {"values", values}};
}
Configuration configuration_of(const Reader& from) {
  Configuration c;
  c.name = from.text("name");
  c.token_rows = from.number_of("token_rows");
  c.weight_rows = from.number_of("weight_rows");
  c.splits = from.number_of("splits");
  c.blocks = from.number_of("blocks");
  c.group_m = from.number_of("group_m");
  c.is_rule = from.yes("is_rule");
  const Reader values = from.object("values");
  for (const Json::Member& member : values.json().members()) {
    if (!member.value.is_integer()) values.fail(member.key, "a whole number", member.value);
    c.values.emplace_back(member.key, member.value.integer());
  }
  return c;
}

Json json_of(const Coefficients& k) {
  // Floats print exactly as the shortest double of nine digits.
  const auto exact = [](float value) { return std::stod(fmt::format("{:.9g}", value)); };
  return {{"a", exact(k.a)}, {"b", exact(k.b)},    {"c", exact(k.c)},
          {"d", exact(k.d)}, {"points", k.points}, {"r2", rounded(k.r2)}};
}

template <typename T>
Json list_of(const std::vector<T>& all) {
  Json list = Json::array();
  for (const T& one : all) list.push_back(json_of(one));
  return list;
}
template <typename T>
std::vector<T> list_from(const Reader& from, const char* field, T (*one)(const Reader&)) {
  std::vector<T> all;
  for (const Reader& element : from.objects(field)) {
    all.push_back(one(element));
    if (all.size() == 1) continue;
    if constexpr (requires(T t) { t.name; }) {
      for (std::size_t i = 0; i + 1 < all.size(); ++i) {
        if (all[i].name == all.back().name) {
          from.refuse(fmt::format("{} has two elements named '{}'", from.name(field),
                                  printable(all.back().name)));
        }
      }
    }
  }
  if (all.empty()) from.refuse(fmt::format("{} is empty", from.name(field)));
  return all;
}

Json json_of(const Point& point, const Profile& profile) {
  Json times = Json::array(), variations = Json::array();
  for (std::size_t c = 0; c < point.times_us.size(); ++c) {
    const double time = point.times_us[c];
    times.push_back(time == kNotTimed      ? Json()
                    : time == kUnsupported ? Json(0)
                    : time == kPruned      ? Json(-1)
                                           : Json(time));
    variations.push_back(rounded(point.variations[c]));
  }
  return {{"model", profile.models[point.model].name},
          {"tokens", point.tokens},
          {"beta", point.beta},
          {"beta_reached", point.beta_reached},
          {"fit", point.fit},
          {"test", point.test},
          {"counts", point.counts},
          {"times_us", times},
          {"variations", variations}};
}

Point point_of(const Reader& from, const Profile& profile) {
  Point point;
  const std::string model = from.text("model");
  while (point.model < profile.models.size() && profile.models[point.model].name != model) {
    ++point.model;
  }
  if (point.model == profile.models.size()) {
    from.refuse(fmt::format("{} is '{}', which models does not have", from.name("model"),
                            printable(model)));
  }
  point.tokens = from.number_of("tokens");
  point.beta = from.share("beta");
  point.beta_reached = from.share("beta_reached");
  point.fit = from.yes("fit");
  point.test = from.yes("test");
  for (const Json& count : from.list("counts")) {
    if (!count.is_integer() || count.number() < 0) {
      from.fail(from.name("counts"), "a list of whole numbers", count);
    }
    point.counts.push_back(count.integer());
  }
  const auto require_length = [&](const char* field, std::size_t found, std::size_t wanted) {
    if (found == wanted) return;
    from.refuse(fmt::format("{} has {}, but must have {}", from.name(field),
                            plural(found, "element"), wanted));
  };
  require_length("counts", point.counts.size(),
                 static_cast<std::size_t>(profile.models[point.model].num_experts));
  for (const Json& time : from.list("times_us")) {
    if (time.is_null()) {
      point.times_us.push_back(kNotTimed);
    } else if (time.is_number() && time.number() == -1) {
      point.times_us.push_back(kPruned);
    } else if (time.is_number() && time.number() >= 0 && std::isfinite(time.number())) {
      point.times_us.push_back(time.number());
    } else {
      from.fail(from.name("times_us"), "a list of numbers from 0 on, -1 and nulls", time);
    }
  }
  for (const Json& variation : from.list("variations")) {
    if (!variation.is_number() || variation.number() < 0) {
      from.fail(from.name("variations"), "a list of numbers from 0 on", variation);
    }
    point.variations.push_back(variation.number());
  }
  require_length("times_us", point.times_us.size(), profile.configurations.size());
  require_length("variations", point.variations.size(), profile.configurations.size());
  return point;
}

// The head of every file.
Json new_file(const char* kind, const std::string& kernel, std::int64_t version,
              const Device& device) {
  return {{"file", kind},
          {"file_version", kFileVersion},
          {"kernel", kernel},
          {"kernel_version", version},
          {"device", json_of(device)}};
}

template <typename File>
void read_head(const Reader& from, const char* kind, File& file) {
  if (!from.has("file") || from.text("file") != kind) {
    from.refuse(fmt::format("this is no file of the kind '{}'", kind));
  }
  const std::int64_t version = from.whole("file_version", 1);
  if (version != kFileVersion) {
    from.refuse(fmt::format("it is a file of version {}, and this program reads version {}",
                            version, kFileVersion));
  }
  file.kernel = from.text("kernel");
  file.version = from.whole("kernel_version", 0, std::int64_t{1} << 53);
  file.device = device_of(from.object("device"));
}

constexpr const char* kProfile = "switchyard profile";
constexpr const char* kFit = "switchyard fit";
constexpr const char* kTable = "switchyard table";

Form form_of(const Reader& from) {
  const std::string form = from.text("form");
  try {
    return form_named(form);
  } catch (const Error& error) {
    from.refuse(error.what());
  }
}

float real32(const Reader& from, const char* field) { return static_cast<float>(from.real(field)); }

Coefficients coefficients_of(const Reader& from) {
  Coefficients k{real32(from, "a"), real32(from, "b"), real32(from, "c"), real32(from, "d")};
  k.points = from.number_of("points", 0);
  k.r2 = from.real("r2");
  return k;
}

// Writes each element of the longest list on its own line, so that differences of two files can be
// read.
std::string text_of(const Json& file, const char* long_list) {
  std::string text = "{\n";
  for (const Json::Member& member : file.members()) {
    if (text.size() > 2) text += ",\n";
    text += fmt::format("{}: ", Json(member.key).dump());
    if (member.key != long_list && member.key != "configurations") {
      text += member.value.dump();
      continue;
    }
    std::string lines;
    for (const Json& element : member.value.elements()) {
      lines += fmt::format("{}{}", lines.empty() ? "\n" : ",\n", element.dump());
    }
    text += fmt::format("[{}\n]", lines);
  }
  return text + "\n}\n";
}

}  // namespace

std::string to_json(const Profile& profile) {
  Json file = new_file(kProfile, profile.kernel, profile.version, profile.device);
  file["generator"] = to_string(profile.generator);
  file["seed"] = profile.seed;
  file["configurations"] = list_of(profile.configurations);
  file["models"] = list_of(profile.models);
  Json points = Json::array();
  for (const Point& point : profile.points) points.push_back(json_of(point, profile));
  file["points"] = points;
  return text_of(file, "points");
}

Profile parse_profile(std::string_view text, const std::string& source) {
  const Json json = parse_json(text, ErrorCode::kInvalidFile, source);
  const Reader from(json, source, "");
  Profile profile;
  read_head(from, kProfile, profile);
  const std::string generator = from.text("generator");
  if (generator != to_string(Generator::kDistinct) &&
      generator != to_string(Generator::kRepeated)) {
    from.refuse(
        fmt::format("generator is '{}', but must be distinct or repeated", printable(generator)));
  }
  profile.generator = generator_named(generator);
  profile.seed = from.any_whole("seed");
  profile.configurations = list_from(from, "configurations", configuration_of);
  profile.models = list_from(from, "models", model_of);
  for (const Reader& point : from.objects("points")) {
    profile.points.push_back(point_of(point, profile));
  }
  return profile;
}

Profile read_profile(const std::filesystem::path& file) {
  return parse_profile(read_named(file, kMostFileBytes), file.string());
}
void write_profile(const std::filesystem::path& file, const Profile& profile) {
  write_whole(file, to_json(profile));
}

std::string to_json(const Fit& fit) {
  Json file = new_file(kFit, fit.kernel, fit.version, fit.device);
  file["form"] = to_string(fit.options.form);
  file["relative"] = fit.options.relative;
  file["from_other_models"] = fit.options.from_other_models;
  file["configurations"] = list_of(fit.configurations);
  Json models = Json::array();
  for (std::size_t m = 0; m < fit.models.size(); ++m) {
    Json model = json_of(fit.models[m]);
    model["coefficients"] = list_of(fit.coefficients[m]);
    models.push_back(model);
  }
  file["models"] = models;
  return text_of(file, "models");
}

Fit parse_fit(std::string_view text, const std::string& source) {
  const Json json = parse_json(text, ErrorCode::kInvalidFile, source);
  const Reader from(json, source, "");
  Fit fit;
  read_head(from, kFit, fit);
  fit.options.form = form_of(from);
  fit.options.relative = from.yes("relative");
  fit.options.from_other_models = from.yes("from_other_models");
  fit.configurations = list_from(from, "configurations", configuration_of);
  fit.models = list_from(from, "models", model_of);
  for (const Reader& model : from.objects("models")) {
    fit.coefficients.push_back(list_from(model, "coefficients", coefficients_of));
    if (fit.coefficients.back().size() != fit.configurations.size()) {
      from.refuse(fmt::format(
          "{} has {}, but must have {}, one for each configuration", model.name("coefficients"),
          plural(fit.coefficients.back().size(), "element"), fit.configurations.size()));
    }
  }
  return fit;
}

Fit read_fit(const std::filesystem::path& file, const Kernel& kernel, const Device& device) {
  Fit fit = parse_fit(read_named(file, kMostFileBytes), file.string());
  const Match match{"the fit", printable(file)};
  match.require_kernel(fit.kernel, fit.version, kernel.name, kernel.version);
  match.require_device(fit.device, device);
  match.require_configurations(fit.configurations, kernel.configurations);
  return fit;
}
void write_fit(const std::filesystem::path& file, const Fit& fit) {
  write_whole(file, to_json(fit));
}

std::string to_json(const Table& table) {
  Json file = new_file(kTable, table.kernel, table.version, table.device);
  file["model"] = json_of(table.model);
  file["form"] = to_string(table.form);
  Json entries = Json::array();
  for (const Table::Entry& entry : table.entries) {
    Json json = json_of(Coefficients{entry.a, entry.b, entry.c, entry.d});
    json.erase("points");
    json.erase("r2");
    json["configuration"] = json_of(entry.configuration);
    entries.push_back(json);
  }
  file["entries"] = entries;
  return text_of(file, "entries");
}

Table parse_table(std::string_view text, const std::string& source) {
  const Json json = parse_json(text, ErrorCode::kInvalidFile, source);
  const Reader from(json, source, "");
  Table table;
  read_head(from, kTable, table);
  table.model = model_of(from.object("model"));
  table.form = form_of(from);
  for (const Reader& entry : from.objects("entries")) {
    table.entries.push_back({configuration_of(entry.object("configuration")), real32(entry, "a"),
                             real32(entry, "b"), real32(entry, "c"), real32(entry, "d")});
  }
  if (table.entries.empty()) from.refuse("entries is empty");
  return table;
}

Table read_table(const std::filesystem::path& file) {
  return parse_table(read_named(file, kMostFileBytes), file.string());
}
void write_table(const std::filesystem::path& file, const Table& table) {
  write_whole(file, to_json(table));
}

}  // namespace switchyard::tuner
