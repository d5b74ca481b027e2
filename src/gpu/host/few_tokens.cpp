#include "gpu/host/few_tokens.h"

#include "gpu/route/limits.h"

namespace switchyard::gpu {
namespace {

FewWeights describe(const WeightArray& array, const float* scales, const std::byte* codes,
                    const Numerics& numerics) {
  const bool halves = array.halves == 2;
  FewWeights w{};
  if (numerics.four_bit()) {
    w.data = codes;
    w.row_bytes =
        static_cast<std::uint32_t>(protocol::ceil_div(array.columns, kBoxColumnsOfFourBits));
    w.row_stride = std::int64_t{w.row_bytes} * box_bytes(numerics.weight.storage);
    w.expert_stride = w.row_stride * protocol::ceil_div(array.halves * array.rows, kTileRows);
  } else {
    w.data = array.data;
    w.expert_stride = array.expert_stride;
    w.row_stride = array.row_stride;
    w.second = halves ? array.half_stride : 8 * array.row_stride;
    w.row_bytes = static_cast<std::uint32_t>(array.columns * array.element_bytes);
  }
  w.rows = static_cast<std::uint32_t>(array.rows);
  w.tile_rows = halves ? kFewRows / 2 : kFewRows;
  w.more_rows = w.tile_rows - kFewRows / 2;
  w.tiles = Divisor::of(protocol::ceil_div(w.rows, w.tile_rows));
  w.scales = scales;
  const int boxes = protocol::round_up(protocol::ceil_div(array.halves * array.rows, kTileRows), 2);
  w.expert_scales =
      static_cast<std::uint32_t>(2 * boxes * protocol::ceil_div(array.columns, kQuantGroup));
  return w;
}

}  // namespace

bool few_tokens_serve(const LayerParams& layer, const PolicyFacts& policy,
                      std::int64_t rows_per_rank) {
  // (It does not read boxes of codes that become E5M2.)
  return !policy.numerics.makes_codes() && layer.cells_per_token == layer.top_k &&
         !layer.weight_on_input &&
         few_tokens_fit(
             rows_per_rank * layer.heaps.size(), layer.heaps.size(), layer.top_k, layer.hidden,
             layer.routed.intermediate, few_numbers(policy.numerics),
             layer.routed.gemm1_rows > static_cast<std::uint32_t>(layer.routed.intermediate));
}

bool few_tokens_take(const LayerParams& layer, const CallParams& call) {
  return call.given_ids != nullptr && !call.gated && call.x_type == DType::kBF16 &&
         call.y_type == DType::kBF16 && !call.accumulate && call.capacity == kNoCapacity &&
         layer.ring.words == nullptr && call.trace.records == nullptr;
}

FewParams few_params(const LayerParams& layer, const CallParams& call, const DeviceFfn& experts,
                     const PolicyFacts& policy, std::int64_t rows_per_rank) {
  const FfnParams& ffn = layer.routed;
  const FewNumbers numbers = few_numbers(policy.numerics);
  const auto top_k = static_cast<std::uint32_t>(layer.top_k);
  FewParams few{};
  static_cast<WaitParams&>(few) = layer;
  static_cast<ActivationParams&>(few) = layer;
  static_cast<RouteCall&>(few) = call;
  static_cast<InputCall&>(few) = call;
  static_cast<OutputCall&>(few) = call;
  few.tokens = call.tokens;
  few.rows_per_rank = static_cast<std::uint32_t>(rows_per_rank);
  few.rows = few.rows_per_rank * static_cast<std::uint32_t>(layer.heaps.size());
  few.top_k = Divisor::of(top_k);
  few.num_routed = static_cast<std::uint32_t>(layer.num_routed);
  few.num_experts = static_cast<std::uint32_t>(layer.num_experts);
  few.place_of = layer.place_of;
  few.first_expert = static_cast<std::uint32_t>(layer.first_expert);
  few.local_experts = static_cast<std::uint32_t>(layer.local_experts);
  few.heap = layer.heap;
  few.weights[0] = describe(experts.gemm1(), ffn.gemm1_scales, ffn.gemm1_boxes, policy.numerics);
  few.weights[1] = describe(experts.gemm2(), ffn.gemm2_scales, ffn.gemm2_boxes, policy.numerics);
  few.operands[0] = FewOperand::of(few.rows, static_cast<std::uint32_t>(layer.hidden), numbers);
  few.operands[1] =
      FewOperand::of(few.rows * top_k, static_cast<std::uint32_t>(ffn.intermediate), numbers);
  few.h_stages = Divisor::of(few.operands[1].stages);
  few.operand_bytes = few_operand_bytes(few.operands[0], few.operands[1], numbers);
  few.more_of_first = ffn.more_of_first;
  few.more_of_second = ffn.more_of_second;
  few.gate_scale = ffn.gate_scale;
  few.up_scale = ffn.up_scale;
  few.down_scale = ffn.down_scale;
  few.gate_bias = ffn.gate_bias;
  few.up_biases = ffn.up_bias;
  few.down_bias = ffn.down_bias;
  // (A slot for a tile has room for 64 rows in bf16.)
  few.h = reinterpret_cast<std::uint16_t*>(layer.h);
  few.epoch_word = layer.epoch_word;
  few.readers = layer.readers;
  for (int odd = 0; odd < 2; ++odd) few.pass_words[odd] = layer.pass_words[odd];
  few.num_pass_words = layer.num_pass_words;
  few.stats = layer.stats;
  return few;
}

}  // namespace switchyard::gpu
