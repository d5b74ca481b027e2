#include "layer/call.h"

#include <fmt/format.h>

#include <cstdlib>

#include "base/quantize.h"
#include "protocol/partition.h"
#include "switchyard/routing.h"

namespace switchyard {

namespace {

void require_size(const char* name, std::size_t size, std::size_t expected, std::int64_t tokens) {
  if (size == expected) return;
  throw Error(ErrorCode::kShapeMismatch,
              fmt::format("{} has {} elements; {} tokens need {}", name, size, tokens, expected));
}

// Activations that arrive quantised: nothing can be made of them but the experts' operands.
void check_quantised(const LayerSpec& spec, const ForwardInput& input, DType compute) {
  const MatrixView& x = input.activations;
  const auto refuse = [](const std::string& message) {
    throw Error(ErrorCode::kInvalidArgument, "activations are f8_e4m3, but " + message);
  };
  if (compute != DType::kF8E4M3) {
    refuse(
        fmt::format("the layer computes in {}; pass bf16, f16 or f32, or make a layer that "
                    "computes in f8_e4m3",
                    to_string(compute)));
  }
  if (spec.shared_sigmoid_gate) {
    refuse("the shared expert's gate needs them unquantised; pass bf16, f16 or f32");
  }
  if (x.rows == 0) return;
  if (input.topk_ids.empty()) {
    refuse(
        "the gate needs them unquantised; pass topk_ids and topk_weights, or activations in bf16, "
        "f16 or f32");
  }
  const std::int64_t groups = protocol::ceil_div<std::int64_t>(x.cols, kQuantGroup);
  if (x.scale == nullptr) {
    refuse(fmt::format("their scale is null; pass [{}, {}] scales, one for {} columns of a token",
                       x.rows, groups, kQuantGroup));
  }
  if (x.scale_rows != 1 || x.scale_cols != kQuantGroup || x.scale_stride < groups) {
    refuse(
        fmt::format("they have a scale per {} x {}, with stride {}; use scale_rows 1, scale_cols "
                    "{} and a scale_stride of at least {}",
                    x.scale_rows, x.scale_cols, x.scale_stride, kQuantGroup, groups));
  }
}

void check_activations(const LayerSpec& spec, int max_tokens, int rank, const ForwardInput& input,
                       const ForwardOutput& output, DType compute) {
  const MatrixView& x = input.activations;
  if (x.rows > 0 && x.cols != spec.hidden) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("activations have {} columns; the layer's hidden size is {}", x.cols,
                            spec.hidden));
  }
  if (x.rows < 0 || x.rows > max_tokens) {
    throw Error(ErrorCode::kCapacityExceeded,
                fmt::format("{} tokens on rank {}; the layer was made for at most {} "
                            "(max_tokens): make it for more, or pass fewer",
                            x.rows, rank, max_tokens));
  }
  const auto floating = [](DType t) {
    return t == DType::kF32 || t == DType::kBF16 || t == DType::kF16;
  };
  const bool quantised = x.dtype == DType::kF8E4M3;
  if ((!floating(x.dtype) && !quantised) || !floating(output.dtype)) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("activations are {} and output is {}; use bf16, f16 or f32",
                            to_string(x.dtype), to_string(output.dtype)));
  }
  if (x.rows > 0 && (x.data == nullptr || output.data == nullptr || x.col_stride != 1)) {
    throw Error(ErrorCode::kInvalidArgument,
                "activations and output must be non-null, with contiguous rows (col_stride 1)");
  }
  if (x.rows > 1 && output.row_stride != 0 && std::abs(output.row_stride) < spec.hidden) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("output rows are {} elements apart, but have {}; use a row_stride of at "
                    "least that, or 0 for rows one behind the other",
                    output.row_stride, spec.hidden));
  }
  if (quantised) check_quantised(spec, input, compute);
}

void check_given_routing(const LayerSpec& spec, const ForwardInput& input) {
  const auto top_k = static_cast<std::size_t>(spec.top_k);
  for (std::size_t i = 0; i < input.topk_ids.size(); ++i) {
    const std::int32_t id = input.topk_ids[i];
    if (id < kNoExpert || id >= spec.num_experts) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("topk_ids[{}][{}] is {}; expert ids are 0 to {}, or {} for none",
                              i / top_k, i % top_k, id, spec.num_experts - 1, kNoExpert));
    }
    for (std::size_t j = i - i % top_k; j < i; ++j) {
      if (id == kNoExpert || input.topk_ids[j] != id) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("token {} names expert {} twice; ids must be distinct within a token",
                              i / top_k, id));
    }
  }
}

void check_hashed_tokens(const MoeWeights& weights, const ForwardInput& input) {
  for (const std::int32_t id : input.token_ids) {
    if (id >= 0 && id < weights.hash_table.rows) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("token id {} is outside the routing table's vocabulary of {}", id,
                            weights.hash_table.rows));
  }
}

}  // namespace

void check_call(const LayerSpec& spec, const MoeWeights& weights, int max_tokens, int rank,
                const ForwardInput& input, const ForwardOutput& output, DType compute) {
  const std::int64_t tokens = input.activations.rows;
  check_activations(spec, max_tokens, rank, input, output, compute);
  const auto slots = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(spec.top_k);
  if (!input.topk_ids.empty() || !input.topk_weights.empty()) {
    require_size("topk_ids", input.topk_ids.size(), slots, tokens);
    require_size("topk_weights", input.topk_weights.size(), slots, tokens);
  } else if (tokens > 0 && weights.router.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "the layer has no router weights; pass topk_ids and topk_weights");
  } else if (spec.routing.method == RoutingMethod::kHash) {
    require_size("token_ids", input.token_ids.size(), static_cast<std::size_t>(tokens), tokens);
  }
  if (!output.topk_ids.empty()) {
    require_size("output topk_ids", output.topk_ids.size(), slots, tokens);
  }
  if (!output.topk_weights.empty()) {
    require_size("output topk_weights", output.topk_weights.size(), slots, tokens);
  }
}

void check_ids(const LayerSpec& spec, const MoeWeights& weights, const ForwardInput& input) {
  if (!input.topk_ids.empty()) {
    check_given_routing(spec, input);
  } else if (spec.routing.method == RoutingMethod::kHash) {
    check_hashed_tokens(weights, input);
  }
}

}  // namespace switchyard
