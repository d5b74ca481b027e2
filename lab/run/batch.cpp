#include "run/batch.h"

#include <fmt/core.h>

#include <cstring>
#include <limits>

#include "base/mix64.h"
#include "base/plural.h"
#include "base/printable.h"
#include "model/safetensors.h"
#include "models/matrix_file.h"
#include "models/random_tensor.h"
#include "switchyard/error.h"
#include "switchyard/routing.h"

namespace switchyard::run {
namespace {

constexpr std::int64_t kDefaultTokens = 1024;

// Makes activations, routing and token ids independent of each other and of the weights, which are
// drawn from the same seed.
enum class Draw : std::uint64_t { kActivations = 0xac71, kRouting = 0x40e7, kTokenIds = 0x7d5 };

std::uint64_t seed_of(Draw draw, std::uint64_t seed) {
  return mix64(mix64(seed) ^ static_cast<std::uint64_t>(draw));
}

[[noreturn]] void misfit(ErrorCode code, const std::string& file, const std::string& message) {
  throw Error(code, fmt::format("{}: {}", printable(file), message));
}

void draw_activations(Batch& batch, const BatchOptions& options, int hidden, DType dtype) {
  const RandomTensor tensor{.dtype = dtype,
                            .rows = options.tokens > 0 ? options.tokens : kDefaultTokens,
                            .cols = hidden,
                            .deviation = 1,
                            .key = seed_of(Draw::kActivations, options.seed)};
  const std::shared_ptr<std::byte[]> memory(new std::byte[tensor.data_bytes()]);
  fill(tensor, memory.get());
  batch.activations = {memory.get(), dtype, tensor.rows, tensor.cols, tensor.cols};
  batch.owner = memory;
  batch.origin = fmt::format("random {}, seed {}", to_string(dtype), options.seed);
}

void require_shape(const MatrixView& view, const std::string& file, const std::string& name,
                   std::int64_t rows, std::int64_t cols) {
  if (view.rows == rows && view.cols == cols) return;
  misfit(ErrorCode::kShapeMismatch, file,
         fmt::format("tensor '{}' is [{}, {}], but this batch and layer need [{}, {}]",
                     printable(name), view.rows, view.cols, rows, cols));
}

std::vector<std::int32_t> integers(const MatrixView& view, const std::string& file,
                                   const std::string& name) {
  if (view.dtype != DType::kI32 && view.dtype != DType::kI64) {
    misfit(ErrorCode::kDTypeMismatch, file,
           fmt::format("tensor '{}' is {}; it must be i32 or i64", name, to_string(view.dtype)));
  }
  std::vector<std::int32_t> values(static_cast<std::size_t>(view.rows * view.cols));
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::int64_t value = 0;
    if (view.dtype == DType::kI32) {
      value = static_cast<const std::int32_t*>(view.data)[i];
    } else {
      value = static_cast<const std::int64_t*>(view.data)[i];
    }
    if (value < std::numeric_limits<std::int32_t>::min() ||
        value > std::numeric_limits<std::int32_t>::max()) {
      misfit(ErrorCode::kInvalidArgument, file,
             fmt::format("tensor '{}' has the id {}, which is no 32-bit number", name, value));
    }
    values[i] = static_cast<std::int32_t>(value);
  }
  return values;
}

std::vector<float> floats(const MatrixView& view, const std::string& file,
                          const std::string& name) {
  if (view.dtype != DType::kF32) {
    misfit(ErrorCode::kDTypeMismatch, file,
           fmt::format("tensor '{}' is {}; it must be f32", name, to_string(view.dtype)));
  }
  const auto* data = static_cast<const float*>(view.data);
  return {data, data + view.rows * view.cols};
}

// Refuses wrong ids before a pass begins. In a pass only the rank that has them would refuse them,
// and the other ranks would wait for it.
void require_valid_ids(const std::vector<std::int32_t>& ids, const LayerSpec& spec,
                       const std::string& file) {
  const auto k = static_cast<std::size_t>(spec.top_k);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::size_t token = i / k;
    if (ids[i] < kNoExpert || ids[i] >= spec.num_experts) {
      misfit(ErrorCode::kInvalidArgument, file,
             fmt::format("topk_ids[{}][{}] is {}; expert ids are 0 to {}, or {} for none", token,
                         i % k, ids[i], spec.num_experts - 1, kNoExpert));
    }
    for (std::size_t j = token * k; j < i; ++j) {
      if (ids[i] == kNoExpert || ids[j] != ids[i]) continue;
      misfit(ErrorCode::kInvalidArgument, file,
             fmt::format("topk_ids[{}] names expert {} twice; a token's experts must be distinct",
                         token, ids[i]));
    }
  }
}

void require_in_vocabulary(const std::vector<std::int32_t>& ids, std::int64_t vocabulary,
                           const std::string& file) {
  for (const std::int32_t id : ids) {
    if (id >= 0 && id < vocabulary) continue;
    misfit(ErrorCode::kInvalidArgument, file,
           fmt::format("token_ids has {}, which is outside the layer's vocabulary of {}", id,
                       vocabulary));
  }
}

void read_routing(Batch& batch, const std::string& file,
                  const std::shared_ptr<const SafetensorsFile>& tensors, const LayerSpec& spec) {
  const bool has_ids = tensors->find("topk_ids") != nullptr;
  const bool has_weights = tensors->find("topk_weights") != nullptr;
  if (!has_ids && !has_weights) return;
  if (!has_ids || !has_weights) {
    misfit(
        ErrorCode::kMissingTensor, file,
        fmt::format("'{}' is there without '{}'; give both or neither",
                    has_ids ? "topk_ids" : "topk_weights", has_ids ? "topk_weights" : "topk_ids"));
  }
  const OwnedMatrix ids = read_matrix(tensors, "topk_ids");
  const OwnedMatrix weights = read_matrix(tensors, "topk_weights");
  require_shape(ids.view, file, "topk_ids", batch.tokens(), spec.top_k);
  require_shape(weights.view, file, "topk_weights", batch.tokens(), spec.top_k);
  batch.topk_ids = integers(ids.view, file, "topk_ids");
  batch.topk_weights = floats(weights.view, file, "topk_weights");
  require_valid_ids(batch.topk_ids, spec, file);
  batch.routing = "given";
}

void read_token_ids(Batch& batch, const std::string& file,
                    const std::shared_ptr<const SafetensorsFile>& tensors,
                    const MoeWeights& weights) {
  if (tensors->find("token_ids") == nullptr) return;
  const OwnedMatrix ids = read_matrix(tensors, "token_ids");
  require_shape(ids.view, file, "token_ids", 1, batch.tokens());
  batch.token_ids = integers(ids.view, file, "token_ids");
  if (!weights.hash_table.empty()) {
    require_in_vocabulary(batch.token_ids, weights.hash_table.rows, file);
  }
}

// Returns the name of the tensor that holds activations: the file's only one, or `activations`.
std::string activations_name(const SafetensorsFile& file, const std::string& path) {
  const std::vector<TensorInfo>& tensors = file.header().tensors;
  if (tensors.size() == 1) return tensors.front().name;
  if (file.find("activations") != nullptr) return "activations";
  std::vector<std::string_view> names;
  for (const TensorInfo& tensor : tensors) names.push_back(tensor.name);
  misfit(ErrorCode::kMissingTensor, path,
         fmt::format("has {}, and none is named 'activations'; give the one that holds "
                     "them that name{}",
                     plural(tensors.size(), "tensor"), closest_names("activations", names)));
}

void read_input(Batch& batch, const BatchOptions& options, const Source& source) {
  const std::string& file = options.input;
  const auto tensors = SafetensorsFile::open(file);
  const std::string name = activations_name(*tensors, file);
  const OwnedMatrix x = read_matrix(tensors, name);
  if (x.view.dtype != DType::kBF16 && x.view.dtype != DType::kF16 && x.view.dtype != DType::kF32) {
    misfit(ErrorCode::kDTypeMismatch, file,
           fmt::format("tensor '{}' is {}; activations must be bf16, f16 or f32", printable(name),
                       to_string(x.view.dtype)));
  }
  require_shape(x.view, file, name, options.tokens > 0 ? options.tokens : x.view.rows,
                source.spec.hidden);
  if (x.view.rows == 0) {
    misfit(ErrorCode::kShapeMismatch, file,
           fmt::format("tensor '{}' has no rows", printable(name)));
  }
  batch.activations = x.view;
  batch.owner = x.owner;
  batch.origin = fmt::format("{} ({})", file, to_string(x.view.dtype));
  read_routing(batch, file, tensors, source.spec);
  read_token_ids(batch, file, tensors, source.weights);
}

void draw_token_ids(Batch& batch, std::int64_t vocabulary, std::uint64_t seed) {
  const std::uint64_t key = seed_of(Draw::kTokenIds, seed);
  for (std::int64_t t = 0; t < batch.tokens(); ++t) {
    const std::uint64_t bits = mix64(key + static_cast<std::uint64_t>(t));
    batch.token_ids.push_back(
        static_cast<std::int32_t>(bits % static_cast<std::uint64_t>(vocabulary)));
  }
}

void draw_routing(Batch& batch, double beta, const LayerSpec& spec, std::uint64_t seed) {
  SyntheticRouting drawn = synthetic_routing(static_cast<int>(batch.tokens()), spec.num_experts,
                                             spec.top_k, beta, seed_of(Draw::kRouting, seed));
  batch.topk_ids = std::move(drawn.ids);
  batch.topk_weights = std::move(drawn.weights);
  batch.routing = fmt::format("synthetic, beta {:.2f}", beta);
}

}  // namespace

Batch make_batch(const BatchOptions& options, const Source& source, DType dtype) {
  Batch batch;
  batch.routing = "gate";
  if (options.input.empty()) {
    draw_activations(batch, options, source.spec.hidden, dtype);
  } else {
    read_input(batch, options, source);
  }
  if (options.balancedness) {
    if (!batch.topk_ids.empty()) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("--balancedness makes up the routing, but {} has topk_ids; drop one",
                              printable(options.input)));
    }
    draw_routing(batch, *options.balancedness, source.spec, options.seed);
  }
  const bool hashed = source.spec.routing.method == RoutingMethod::kHash;
  if (!hashed || !batch.topk_ids.empty()) {
    batch.token_ids.clear();
  } else if (batch.token_ids.empty()) {
    draw_token_ids(batch, source.weights.hash_table.rows, options.seed);
  }
  return batch;
}

std::vector<std::int64_t> all_share_sizes(std::int64_t tokens, int num_ranks) {
  std::vector<std::int64_t> sizes;
  for (int r = 0; r < num_ranks; ++r) sizes.push_back(share_of(tokens, r, num_ranks).count);
  return sizes;
}

}  // namespace switchyard::run
