#include "bench/torch.h"

#include <fmt/core.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>

#include "base/names.h"
#include "base/plural.h"
#include "base/printable.h"
#include "fabric/launch.h"
#include "machine/host.h"
#include "reference/decode.h"
#include "switchyard/error.h"

namespace switchyard::bench {
namespace {

namespace fs = std::filesystem;

constexpr int kScaledMultiple = 16;  // torch._scaled_grouped_mm requires it
constexpr int kExitNoTorch = 77;
constexpr int kExitDeadline = 124;  // launch() returns it
// The L2 cache of an H200, times the same factor as in gpu::flush_l2().
constexpr std::int64_t kFlushBytes = 4 * (std::int64_t{60} << 20);

const char* activation_name(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::kSilu: return "silu";
    case ActivationKind::kGelu: return "gelu";
    case ActivationKind::kGeluTanh: return "gelu_tanh";
    case ActivationKind::kRelu: return "relu";
    case ActivationKind::kRelu2: return "relu2";
    case ActivationKind::kIdentity: return "identity";
    case ActivationKind::kSitu: return "situ";
  }
  return "unknown";
}

const char* score_name(const RoutingSpec& routing) {
  if (routing.method == RoutingMethod::kSparseMixer) return "sparse_mixer";
  return routing.score == ScoreFunction::kSigmoid ? "sigmoid" : "softmax";
}

fs::path make_directory() {
  std::string pattern = (fs::temp_directory_path() / "switchyard-bench-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) {
    throw Error(ErrorCode::kSystem,
                fmt::format("cannot make a directory '{}'; set TMPDIR to one that can be written",
                            printable(pattern)));
  }
  return pattern;
}

void write_rows(const fs::path& path, const MatrixView& view) {
  if (view.dtype != DType::kBF16) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("--against torch needs bf16 activations and routers, not {}",
                            to_string(view.dtype)));
  }
  std::ofstream file(path, std::ios::binary);
  for (std::int64_t r = 0; r < view.rows; ++r) {
    file.write(static_cast<const char*>(view.row(r)),
               static_cast<std::streamsize>(view.cols * static_cast<std::int64_t>(sizeof(short))));
  }
  if (!file.flush()) {
    throw Error(ErrorCode::kSystem,
                fmt::format("cannot write {}; free some disk or set TMPDIR", printable(path)));
  }
}

std::map<std::size_t, TimedRival> read_results(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::map<std::size_t, TimedRival> rivals;
  Json results;
  try {
    results = Json::parse(text);
  } catch (const JsonError&) {
    return rivals;  // the chain ended before it had written results
  }
  if (!results.contains("points")) return rivals;
  for (Json& result : results["points"].elements()) {
    if (!result.contains("rival_us")) continue;  // no variant could be timed
    rivals[result["tag"].unsigned_integer()] = {
        {result["rival"].text(), result["rival_us"].number(), result["rival_p10_us"].number(),
         result["rival_p90_us"].number()},
        static_cast<int>(result["experts_hit"].integer())};
  }
  return rivals;
}

}  // namespace

fs::path find_torch_script(const std::string& given) {
  if (!given.empty()) {
    if (fs::is_regular_file(given)) return given;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--torch-script is '{}', which is not a file", printable(given)));
  }
  const fs::path name = fs::path("bench") / "torch_chain.py";
  const fs::path build = fs::path(machine::own_executable()).parent_path();  // build/src/cli
  for (const fs::path& root : {fs::current_path(), build / "../../.."}) {
    if (fs::is_regular_file(root / name)) return (root / name).lexically_normal();
  }
  throw Error(ErrorCode::kInvalidArgument,
              "bench/torch_chain.py is neither under the working directory nor beside the build; "
              "name it with --torch-script");
}

std::string torch_refusal(const LayerSpec& spec, DType compute) {
  if (compute != DType::kBF16 && compute != DType::kF8E4M3) {
    return fmt::format("the chain has no arithmetic in {}", short_name(compute));
  }
  if (compute == DType::kF8E4M3 &&
      (spec.hidden % kScaledMultiple != 0 || spec.intermediate % kScaledMultiple != 0)) {
    return fmt::format("FP8 products of PyTorch need multiples of {}, but H is {} and I is {}",
                       kScaledMultiple, spec.hidden, spec.intermediate);
  }
  if (spec.shared_intermediate > 0) return "it has a shared expert";
  if (spec.routing.num_groups > 1) return "its routing is limited to groups";
  if (spec.routing.method == RoutingMethod::kHash) return "it routes by token id";
  if (spec.routing.score == ScoreFunction::kSqrtSoftplus) return "its score is sqrt-softplus";
  if (spec.routing.top_k_before_score) return "it chooses before it scores";
  if (spec.router_bias) return "its router has a bias";
  if (spec.weight_on_input) return "its weights apply to the input";
  if (spec.capacity_factor > 0) return "it drops tokens";
  const Activation plain{spec.activation.kind, spec.activation.gated};
  if (!(spec.activation == plain)) return "its activation is parameterised";
  return "";
}

TorchJob::TorchJob() : directory_(make_directory()) {}
TorchJob::~TorchJob() {
  std::error_code ignored;
  fs::remove_all(directory_, ignored);
}

void TorchJob::add_layer(const BenchLayer& layer, const MoeWeights& weights,
                         const MatrixView& activations, DType compute) {
  const LayerSpec& spec = layer.spec;
  const fs::path x = directory_ / fmt::format("activations-{}.bf16", layers_.elements().size());
  const fs::path router = directory_ / fmt::format("router-{}.bf16", layers_.elements().size());
  write_rows(x, activations);
  write_rows(router, weights.router);
  Json json = {
      {"name", layer.model},
      {"compute", short_name(compute)},
      {"hidden", spec.hidden},
      {"intermediate", spec.intermediate},
      {"experts", spec.num_experts},
      {"top_k", spec.top_k},
      {"gated", spec.activation.gated},
      {"activation", activation_name(spec.activation.kind)},
      {"bias", spec.expert_bias},
      {"score", score_name(spec.routing)},
      {"jitter", spec.routing.jitter_eps},
      {"renormalize", spec.routing.renormalize},
      {"scale", spec.routing.scale},
      {"activations", x.string()},
      {"router", router.string()},
  };
  if (!weights.correction_bias.empty()) {
    std::vector<double> bias(static_cast<std::size_t>(weights.correction_bias.size));
    reference::decode_vector(weights.correction_bias, bias.data());
    json["correction_bias"] = bias;
  }
  layers_.push_back(std::move(json));
}

void TorchJob::add_point(std::size_t tag, std::int64_t tokens, double beta, float skew, int repeats,
                         const Rotation& rotation) {
  points_.push_back({{"tag", tag},
                     {"layer", layers_.elements().size() - 1},
                     {"tokens", tokens},
                     {"beta", beta},
                     {"skew", skew},
                     {"repeats", repeats},
                     {"copies", rotation.copies},
                     {"passes", rotation.passes}});
}

Json TorchJob::to_json() const {
  return {{"layers", layers_}, {"points", points_}, {"flush_bytes", kFlushBytes}};
}

std::map<std::size_t, TimedRival> TorchJob::run(
    const TorchOptions& options, const std::function<void(const std::string&)>& note) const {
  const fs::path job = directory_ / "job.json";
  const fs::path out = directory_ / "out.json";
  std::ofstream(job) << to_json().dump({.indent = 1}) << '\n';
  LaunchOptions launch_options;
  launch_options.command = {options.python, find_torch_script(options.script).string(),
                            job.string(), out.string()};
  if (!options.variants.empty()) {
    launch_options.command.push_back("--variants=" + options.variants);
  }
  launch_options.deadline = options.limit;
  std::fflush(stdout);
  const int status = launch(launch_options);
  std::map<std::size_t, TimedRival> rivals = read_results(out);
  if (status == kExitNoTorch && rivals.empty()) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("--against torch, but '{}' has no PyTorch; name one that has with "
                            "--python",
                            printable(options.python)));
  }
  if (status == kExitDeadline) {
    note(fmt::format("PyTorch timed {} of {} in {} s; --torch-limit is more", rivals.size(),
                     plural(points_.elements().size(), "point"), options.limit.count()));
  } else if (status != 0 && rivals.empty()) {
    throw Error(ErrorCode::kSystem,
                fmt::format("{} ended with exit code {} and no times; see its messages above",
                            printable(launch_options.command[1]), status));
  }
  return rivals;
}

}  // namespace switchyard::bench
