// Recordings of routings: their files, and what the tuner makes of them.
#include "switchyard/recording.h"

#include <fmt/core.h>

#include <algorithm>
#include <set>

#include "base/plural.h"
#include "base/read_file.h"
#include "base/whole_file.h"
#include "switchyard/routing.h"
#include "switchyard/tuner.h"
#include "tuner/reader.h"

namespace switchyard {
namespace {

using tuner::Reader;

constexpr const char* kFile = "switchyard routing";
constexpr std::int64_t kFileVersion = 1;
constexpr std::uint64_t kMostFileBytes = std::uint64_t{1} << 30;
constexpr std::int64_t kMostRows = std::int64_t{1} << 53;

Json json_of(const RecordedStep& step) {
  return {
      {"step", step.step}, {"epoch", step.epoch}, {"tokens", step.tokens}, {"counts", step.counts}};
}
RecordedStep step_of(const Reader& from, int num_experts) {
  RecordedStep step;
  step.step = from.any_whole("step");
  step.epoch = from.any_whole("epoch");
  step.tokens = from.whole("tokens", 0, kMostRows);
  for (const Json& count : from.list("counts")) {
    if (!count.is_integer() || count.number() < 0) {
      from.fail(from.name("counts"), "a list of whole numbers", count);
    }
    step.counts.push_back(count.integer());
  }
  if (step.counts.size() != static_cast<std::size_t>(num_experts)) {
    from.refuse(fmt::format("{} has {}, but must have {}", from.name("counts"),
                            plural(step.counts.size(), "element"), num_experts));
  }
  return step;
}

Recording recording_of(const Reader& from) {
  Recording recording;
  recording.layer = from.text("layer");
  recording.num_ranks = from.number_of("ranks");
  recording.rank = from.number_of("rank", 0);
  recording.num_experts = from.number_of("experts");
  recording.top_k = from.number_of("top_k");
  recording.n = from.number_of("n");
  recording.k = from.number_of("k");
  recording.overwritten = from.any_whole("overwritten");
  if (recording.rank >= recording.num_ranks) {
    from.refuse(fmt::format("{} is {} of {}", from.name("rank"), recording.rank,
                            plural(recording.num_ranks, "rank")));
  }
  for (const Reader& step : from.objects("steps")) {
    recording.steps.push_back(step_of(step, recording.num_experts));
  }
  return recording;
}

}  // namespace

std::vector<double> balancedness_of(const Recording& recording) {
  std::vector<double> betas;
  betas.reserve(recording.steps.size());
  for (const RecordedStep& step : recording.steps) betas.push_back(balancedness(step.counts));
  return betas;
}

// Writes each step on its own line, so that differences of two files can be read.
std::string to_json(const Recordings& recordings) {
  std::string text = fmt::format("{{\n\"file\": \"{}\",\n\"file_version\": {},\n\"machine\": {},\n",
                                 kFile, kFileVersion, Json(recordings.machine).dump());
  text += "\"layers\": [";
  for (const Recording& recording : recordings.layers) {
    Json head = {{"layer", recording.layer},
                 {"rank", recording.rank},
                 {"ranks", recording.num_ranks},
                 {"experts", recording.num_experts},
                 {"top_k", recording.top_k},
                 {"n", recording.n},
                 {"k", recording.k},
                 {"overwritten", recording.overwritten}};
    std::string line = head.dump();
    line.pop_back();
    text +=
        fmt::format("{}\n{},\"steps\":[", &recording == recordings.layers.data() ? "" : ",", line);
    for (const RecordedStep& step : recording.steps) {
      text +=
          fmt::format("{}\n{}", &step == recording.steps.data() ? "" : ",", json_of(step).dump());
    }
    text += "]}";
  }
  return text + "\n]\n}\n";
}

Recordings parse_recordings(std::string_view text, const std::string& source) {
  const Json json = parse_json(text, ErrorCode::kInvalidFile, source);
  const Reader from(json, source, "");
  if (!from.has("file") || from.text("file") != kFile) {
    from.refuse(fmt::format("this is no file of the kind '{}'", kFile));
  }
  if (const std::int64_t version = from.whole("file_version", 1); version != kFileVersion) {
    from.refuse(fmt::format("it is a file of version {}, and this program reads version {}",
                            version, kFileVersion));
  }
  Recordings recordings;
  recordings.machine = from.text("machine");
  for (const Reader& layer : from.objects("layers")) {
    recordings.layers.push_back(recording_of(layer));
  }
  return recordings;
}

Recordings read_recordings(const std::filesystem::path& file) {
  return parse_recordings(read_named(file, kMostFileBytes), file.string());
}
void write_recordings(const std::filesystem::path& file, const Recordings& recordings) {
  write_whole(file, to_json(recordings));
}

namespace tuner {

void add_recorded(Plan& plan, const Recordings& recordings, std::size_t most) {
  if (most < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                "no histogram is to be taken of a recording; take 1 or more");
  }
  for (std::size_t m = 0; m < plan.models.size(); ++m) {
    const Model& model = plan.models[m];
    // Histograms that differ, of all layers of this shape and in their order.
    std::vector<std::vector<std::int64_t>> found;
    std::set<std::vector<std::int64_t>> known;
    for (const Recording& recording : recordings.layers) {
      if (recording.num_experts != model.num_experts || recording.top_k != model.top_k) continue;
      for (const RecordedStep& step : recording.steps) {
        const bool empty = std::all_of(step.counts.begin(), step.counts.end(),
                                       [](std::int64_t count) { return count == 0; });
        if (!empty && known.insert(step.counts).second) found.push_back(step.counts);
      }
    }
    if (found.empty()) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("no layer of the recordings has routed tokens to {} with "
                      "top-{}, as the model {} does; name the model that was recorded",
                      plural(model.num_experts, "expert"), model.top_k, printable(model.name)));
    }
    const std::size_t taken = std::min(found.size(), most);
    for (std::size_t i = 0; i < taken; ++i) {
      plan.recorded.push_back({m, found[i * found.size() / taken]});
    }
  }
}

}  // namespace tuner
}  // namespace switchyard
