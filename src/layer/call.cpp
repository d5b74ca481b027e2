#include "layer/call.h"

#include <fmt/core.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/convert.h"
#include "base/overlap.h"
#include "base/quantize.h"
#include "model/check_tensor.h"
#include "protocol/partition.h"
#include "routing/route.h"
#include "switchyard/routing.h"

namespace switchyard {

namespace {

void require_size(const char* name, std::size_t size, std::size_t expected, std::int64_t tokens) {
  if (size == expected) return;
  throw Error(ErrorCode::kShapeMismatch,
              fmt::format("{} has {} elements; {} tokens need {}", name, size, tokens, expected));
}

void require_type(const char* name, const SlotView& slots, DType one, DType other) {
  if (slots.empty() || slots.dtype() == one || slots.dtype() == other) return;
  throw Error(ErrorCode::kDTypeMismatch,
              fmt::format("{} are {}; use {} or {}", name, to_string(slots.dtype()), to_string(one),
                          to_string(other)));
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
  if (input.topk_ids.empty() && input.logits.empty()) {
    refuse(
        "the gate needs them unquantised; pass topk_ids and topk_weights, or logits, or "
        "activations in bf16, f16 or f32");
  }
  check_row_scales("activations are", x);
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
  const int promised = input.max_tokens_per_rank;
  if (promised < 0 || promised > max_tokens || (promised != 0 && x.rows > promised)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("max_tokens_per_rank is {} and rank {} has {} tokens; give the most "
                            "that any rank has in "
                            "this pass, up to the layer's max_tokens of {}, or 0",
                            promised, rank, x.rows, max_tokens));
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
  if (x.rows > 1 && output.row_stride != 0 && is_short(output.row_stride, spec.hidden)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("output rows are {} elements apart, but have {}; use a row_stride of at "
                    "least that, or 0 for rows one behind the other",
                    output.row_stride, spec.hidden));
  }
  if (quantised) check_quantised(spec, input, compute);
}

void check_logits(const LayerSpec& spec, const MoeWeights& weights, const ForwardInput& input) {
  const MatrixView& logits = input.logits;
  const auto refuse = [](const std::string& message) {
    throw Error(ErrorCode::kInvalidArgument, message);
  };
  if (!input.topk_ids.empty() || !input.topk_weights.empty()) {
    refuse("both logits and topk_ids are given; pass one of them");
  }
  if (logits.rows != input.activations.rows || logits.cols != spec.num_experts) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("logits are [{}, {}]; {} tokens and {} experts need [{}, {}]",
                            logits.rows, logits.cols, input.activations.rows, spec.num_experts,
                            input.activations.rows, spec.num_experts));
  }
  if (logits.dtype != DType::kF32 && logits.dtype != DType::kBF16) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("logits are {}; use f32 or bf16", to_string(logits.dtype)));
  }
  if (logits.col_stride != 1) {
    refuse(fmt::format("logits have a col_stride of {}; pass rows that are contiguous",
                       logits.col_stride));
  }
  const auto require = [](bool there, const char* name) {
    if (there) return;
    throw Error(ErrorCode::kMissingTensor,
                fmt::format("logits are given, but the layer was made without {}, which its "
                            "routing needs; make it with that, or pass topk_ids",
                            name));
  };
  require(!spec.routing.has_correction_bias || !weights.correction_bias.empty(), "correction_bias");
  require(spec.routing.method != RoutingMethod::kHash || !weights.hash_table.empty(), "hash_table");
  routing::check_routable(spec);
}

void check_given_routing(const LayerSpec& spec, const ForwardInput& input, const IdRules& rules) {
  const auto top_k = static_cast<std::size_t>(spec.top_k);
  for_each_id(
      spec.num_experts, spec.top_k, input.topk_ids, input.topk_weights, rules,
      [](std::size_t, std::int32_t) {},
      [&](std::size_t i, std::int64_t id, bool twice) {
        throw Error(ErrorCode::kInvalidArgument,
                    twice ? named_twice_text(i / top_k, id)
                          : bad_id_text("topk_ids", i / top_k, i % top_k, id, spec.num_experts));
      });
}

void require_hash_routing(const LayerSpec& spec, const ForwardInput& input) {
  if (input.token_ids.empty() || spec.routing.method == RoutingMethod::kHash) return;
  throw Error(ErrorCode::kInvalidArgument,
              "token_ids are given, but the layer's routing does not read them; leave them out");
}

void check_hashed_tokens(const MoeWeights& weights, const ForwardInput& input) {
  for (const std::int32_t id : input.token_ids) {
    if (id >= 0 && id < weights.hash_table.rows) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("token id {} is outside the routing table's vocabulary of {}", id,
                            weights.hash_table.rows));
  }
}

void require_memory_apart(const LayerSpec& spec, const ForwardInput& input,
                          const ForwardOutput& output) {
  const MatrixView& x = input.activations;
  const auto element = static_cast<std::int64_t>(size_of(output.dtype));
  const std::int64_t stride = output.row_stride == 0 ? spec.hidden : output.row_stride;
  require_apart({{"out", output.data, x.rows, spec.hidden * element, stride * element},
                 {"ids_out", output.topk_ids},
                 {"weights_out", output.topk_weights}},
                {{"x", x},
                 CallArray::scales("x_scale", x, kQuantGroup),
                 {"topk_ids", input.topk_ids},
                 {"topk_weights", input.topk_weights},
                 {"logits", input.logits},
                 {"token_ids", input.token_ids}});
}

}  // namespace

void check_call(const LayerSpec& spec, const MoeWeights& weights, int max_tokens, int rank,
                const ForwardInput& input, const ForwardOutput& output, DType compute) {
  const std::int64_t tokens = input.activations.rows;
  check_activations(spec, max_tokens, rank, input, output, compute);
  const auto slots = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(spec.top_k);
  if (!std::isfinite(output.scale)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the output's scale is {}; use a finite number", output.scale));
  }
  if (!input.logits.empty()) check_logits(spec, weights, input);
  if (!input.topk_ids.empty() || !input.topk_weights.empty()) {
    require_size("topk_ids", input.topk_ids.size(), slots, tokens);
    require_size("topk_weights", input.topk_weights.size(), slots, tokens);
    require_type("topk_ids", input.topk_ids, DType::kI32, DType::kI64);
    require_type("topk_weights", input.topk_weights, DType::kF32, DType::kBF16);
  } else if (tokens > 0 && weights.router.empty() && input.logits.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "the layer has no router weights; pass topk_ids and topk_weights, or logits");
  } else if (spec.routing.method == RoutingMethod::kHash) {
    require_size("token_ids", input.token_ids.size(), static_cast<std::size_t>(tokens), tokens);
  }
  require_hash_routing(spec, input);
  if (!output.topk_ids.empty()) {
    require_size("output topk_ids", output.topk_ids.size(), slots, tokens);
  }
  if (!output.topk_weights.empty()) {
    require_size("output topk_weights", output.topk_weights.size(), slots, tokens);
  }
  require_memory_apart(spec, input, output);
}

namespace {

// The first routed expert's that this rank was given; empty if there is none.
MatrixView routed_up(const MoeWeights& weights) {
  for (const FfnWeights& expert : weights.experts) {
    if (!expert.up.empty()) return expert.up;
  }
  return {};
}

void require_same_form(const char* whose, const MatrixView& old, const MatrixView& fresh) {
  const auto form_of = [](const MatrixView& m) {
    return is_four_bit(m.dtype) ? four_bit_form(m) : std::string(to_string(m.dtype));
  };
  if (old.empty() || fresh.empty()) return;
  if (!is_four_bit(old.dtype) && !is_four_bit(fresh.dtype)) return;
  if (form_of(old) == form_of(fresh)) return;
  throw Error(ErrorCode::kDTypeMismatch,
              fmt::format("{} {}, and were {}; convert them, or make the layer anew", whose,
                          form_of(fresh), form_of(old)));
}

}  // namespace

void require_same_weights(const MoeWeights& old, const MoeWeights& fresh, DType old_compute,
                          DType fresh_compute) {
  const auto require = [](bool before, bool now, const char* name) {
    if (before == now) return;
    throw Error(ErrorCode::kMissingTensor,
                fmt::format("the layer was made {} {}, and the weights that it is to have now are "
                            "{}; give it the same tensors, or make it anew",
                            before ? "without" : "with", name, before ? "with" : "without"));
  };
  require(old.router.empty(), fresh.router.empty(), "a router");
  require(old.correction_bias.empty(), fresh.correction_bias.empty(), "correction_bias");
  require(old.hash_table.empty(), fresh.hash_table.empty(), "hash_table");
  if (!old.router.empty() && old.router.dtype != fresh.router.dtype) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("the router is {}, and was {}; convert it, or make the layer anew",
                            to_string(fresh.router.dtype), to_string(old.router.dtype)));
  }
  // Both may compute in one type, but kernels of GPUs are for one form of four-bit weights.
  require_same_form("the routed experts' weights are", routed_up(old), routed_up(fresh));
  require_same_form("the shared expert's weights are", old.shared.up, fresh.shared.up);
  if (old_compute == fresh_compute) return;
  throw Error(ErrorCode::kDTypeMismatch,
              fmt::format("the layer computes in {}, and would compute in {} with these weights; "
                          "convert them, or make the layer anew",
                          to_string(old_compute), to_string(fresh_compute)));
}

void require_as_many_places(int now, int before) {
  if (now == before) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("the placement has {} places, and the layer was made with {}; keep their "
                          "number, or make the layer anew",
                          now, before));
}

void check_ids(const LayerSpec& spec, const MoeWeights& weights, const ForwardInput& input,
               const IdRules& rules) {
  if (rules.bad == BadIds::kSkip) return;
  if (!input.topk_ids.empty()) {
    check_given_routing(spec, input, rules);
  } else if (spec.routing.method == RoutingMethod::kHash) {
    check_hashed_tokens(weights, input);
  }
}

std::int64_t read_routing(const LayerSpec& spec, const ForwardInput& input, const IdRules& rules,
                          std::span<std::int32_t> ids, std::span<float> weights) {
  std::int64_t num_bad = 0;
  for_each_id(
      spec.num_experts, spec.top_k, input.topk_ids, input.topk_weights, rules,
      [&](std::size_t i, std::int32_t id) { ids[i] = id; },
      [&](std::size_t, std::int64_t, bool) { ++num_bad; });
  for (std::size_t i = 0; i < weights.size(); ++i) {
    weights[i] = input.topk_weights.dtype() == DType::kBF16
                     ? bf16_to_f32(static_cast<const std::uint16_t*>(input.topk_weights.data())[i])
                     : static_cast<const float*>(input.topk_weights.data())[i];
  }
  return num_bad;
}

std::int64_t drop_over_capacity(const LayerSpec& spec, std::int64_t tokens,
                                std::span<std::int32_t> ids, std::span<float> weights) {
  if (spec.capacity_factor <= 0) return 0;
  const std::uint32_t capacity = expert_capacity(spec, tokens);
  std::vector<std::uint32_t> kept(static_cast<std::size_t>(spec.num_experts));
  std::int64_t dropped = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0) continue;
    if (kept[static_cast<std::size_t>(ids[i])]++ < capacity) continue;
    ids[i] = kNoExpert;
    weights[i] = 0;
    ++dropped;
  }
  return dropped;
}

void require_aligned(const char* what, const void* data, std::int64_t row_stride, DType dtype,
                     std::int64_t rows) {
  const std::size_t stride = static_cast<std::size_t>(row_stride) * size_of(dtype);
  if (rows > 1 && row_stride < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} have a row stride of {} elements; the GPU engine takes rows in the "
                            "order of their addresses: pass a copy with row_stride >= 0",
                            what, row_stride));
  }
  if (rows == 0 || (reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride % 16 == 0)) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} start at {} with {} bytes from row to row; the GPU engine moves 16 "
                          "bytes at a time, so both must be multiples of 16",
                          what, data, stride));
}

}  // namespace switchyard
