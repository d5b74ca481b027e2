// topk() on a GPU: what is checked before. On the host it is route().
#include <fmt/core.h>

#include <limits>

#include "base/overlap.h"
#include "gpu/operators.h"
#include "model/check_tensor.h"
#include "routing/route.h"
#include "switchyard/error.h"
#include "switchyard/grouped_gemm.h"

namespace switchyard {
namespace {

void require_size(const char* name, std::size_t size, std::size_t expected) {
  if (size == expected) return;
  throw Error(ErrorCode::kShapeMismatch,
              fmt::format("{} has {} elements; pass {}", name, size, expected));
}

void require_memory(const char* name, const void* data, std::size_t size) {
  if (size == 0 || data != nullptr) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} is null; pass its memory on the device", name));
}

}  // namespace

void topk(const RoutingSpec& routing, int top_k, const MatrixView& logits,
          std::span<const float> correction_bias, std::span<std::int32_t> ids,
          std::span<float> weights, const DeviceStream& where) {
  if (!is_float(logits.dtype)) {
    throw Error(ErrorCode::kDTypeMismatch,
                fmt::format("logits are {}; use f32, bf16 or f16", to_string(logits.dtype)));
  }
  if (logits.rows < 0 || logits.cols < 1 || logits.cols > routing::kMaxExperts ||
      logits.rows > std::numeric_limits<std::int32_t>::max() / routing::kMaxTopK) {
    throw Error(
        ErrorCode::kShapeMismatch,
        fmt::format("logits are [{}, {}]; pass [T, E] with E of 1 to {} and T of at most {}",
                    logits.rows, logits.cols, routing::kMaxExperts,
                    std::numeric_limits<std::int32_t>::max() / routing::kMaxTopK));
  }
  LayerSpec spec;
  // Fields that routing does not look at must make sense, too.
  spec.hidden = spec.intermediate = 1;
  spec.num_experts = static_cast<int>(logits.cols);
  spec.top_k = top_k;
  spec.routing = routing;
  validate(spec);
  routing::check_routable(spec);
  if (routing.method == RoutingMethod::kHash) {
    throw Error(ErrorCode::kUnsupported, "hash routing needs a table; make a layer with a router");
  }
  const auto slots = static_cast<std::size_t>(logits.rows) * static_cast<std::size_t>(top_k);
  require_size("correction_bias", correction_bias.size(),
               routing.has_correction_bias ? static_cast<std::size_t>(logits.cols) : 0);
  require_size("ids", ids.size(), slots);
  require_size("weights", weights.size(), slots);
  if (logits.rows == 0) return;
  if (logits.col_stride != 1 && logits.cols > 1) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("logits have a col_stride of {}; pass rows that are contiguous",
                            logits.col_stride));
  }
  require_memory("logits", logits.data, slots);
  require_memory("correction_bias", correction_bias.data(), correction_bias.size());
  require_memory("ids", ids.data(), slots);
  require_memory("weights", weights.data(), slots);
  require_apart({{"ids", ids}, {"weights", weights}},
                {{"logits", logits}, {"correction_bias", correction_bias}});
  gpu::topk(spec, logits, correction_bias.data(), ids.data(), weights.data(), where);
}

}  // namespace switchyard
