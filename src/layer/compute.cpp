#include "layer/compute.h"

#include <fmt/core.h>

#include <algorithm>
#include <string>

#include "base/quantize.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

bool spans_groups(std::int64_t block, std::int64_t size) {
  return block % kQuantGroup == 0 || block >= size;
}

// Why a matrix does not take part in FP8 arithmetic, if it does not.
struct Obstacle {
  std::string name;
  const MatrixView* matrix = nullptr;
};

bool takes_part(const MatrixView& matrix) {
  return matrix.empty() || is_block_form(matrix) || is_row_form(matrix) ||
         matrix.dtype == DType::kF4E2M1;
}

Obstacle find_obstacle(const std::string& name, const FfnWeights& ffn) {
  for (const auto& [part, matrix] :
       {std::pair{"gate", &ffn.gate}, {"up", &ffn.up}, {"down", &ffn.down}}) {
    if (!takes_part(*matrix)) return {name + "." + part, matrix};
  }
  return {};
}

Obstacle find_obstacle(const MoeWeights& weights) {
  for (std::size_t e = 0; e < weights.experts.size(); ++e) {
    Obstacle found = find_obstacle(fmt::format("experts[{}]", e), weights.experts[e]);
    if (found.matrix != nullptr) return found;
  }
  return find_obstacle("shared", weights.shared);
}

Obstacle find_obstacle(std::span<const MatrixView> matrices) {
  for (std::size_t e = 0; e < matrices.size(); ++e) {
    if (!takes_part(matrices[e])) return {fmt::format("matrices[{}]", e), &matrices[e]};
  }
  return {};
}

void require_fp8(const Obstacle& obstacle) {
  if (obstacle.matrix == nullptr) return;
  const MatrixView& m = *obstacle.matrix;
  constexpr const char* kRemedy = "compute in bf16";
  if (m.dtype != DType::kF8E4M3) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("compute type f8_e4m3, but {} is {}; {}, or leave the type to be chosen",
                    obstacle.name, to_string(m.dtype), kRemedy));
  }
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("compute type f8_e4m3, but {}, [{}, {}], has a scale per {} x {}; FP8 "
                  "arithmetic takes blocks of multiples of {}, or whole rows; {}",
                  obstacle.name, m.rows, m.cols, m.scale_rows, m.scale_cols, kQuantGroup, kRemedy));
}

DType by_weights(const Obstacle& obstacle, DType weight) {
  if (is_four_bit(weight)) return DType::kBF16;
  if (obstacle.matrix == nullptr) return DType::kF8E4M3;
  return weight == DType::kF32 || weight == DType::kF16 ? DType::kF32 : DType::kBF16;
}

DType as_asked(const Obstacle& obstacle, DType asked) {
  if (asked == DType::kF8E4M3) require_fp8(obstacle);
  check_compute_type(asked);
  return asked;
}

}  // namespace

void check_compute_type(DType compute) {
  if (compute == DType::kF8E4M3 || compute == DType::kBF16 || compute == DType::kF32) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("compute type {}; use bf16, f32 or f8_e4m3", to_string(compute)));
}

bool is_block_form(const MatrixView& m) {
  return m.dtype == DType::kF8E4M3 && m.scale != nullptr && spans_groups(m.scale_rows, m.rows) &&
         spans_groups(m.scale_cols, m.cols);
}

bool is_row_form(const MatrixView& m) {
  return m.dtype == DType::kF8E4M3 && m.scale != nullptr && m.scale_cols >= m.cols &&
         !is_block_form(m);
}

std::optional<DType> type_of_routed(const MoeWeights& weights) {
  const auto given = std::ranges::find_if(
      weights.experts, [](const FfnWeights& expert) { return !expert.up.empty(); });
  return given == weights.experts.end() ? std::nullopt : std::optional(given->up.dtype);
}

DType resolve_compute(const MoeWeights& weights, std::optional<DType> asked) {
  if (!asked) {
    const std::optional<DType> routed = type_of_routed(weights);
    if (!routed) {
      throw Error(ErrorCode::kInvalidArgument,
                  "this rank was given no expert's weights, whose type would say what to compute "
                  "in; say it (compute type bf16, f32 or f8_e4m3)");
    }
    return by_weights(find_obstacle(weights), *routed);
  }
  return as_asked(find_obstacle(weights), *asked);
}

DType resolve_compute(std::span<const MatrixView> matrices, std::optional<DType> asked,
                      Backend backend) {
  if (asked == DType::kF16) {
    if (backend == Backend::kCuda) return DType::kF16;
    throw Error(ErrorCode::kUnsupported,
                "compute type f16, but the backend is cpu; use f32, which has every number of f16, "
                "or the backend cuda");
  }
  const Obstacle obstacle = find_obstacle(matrices);
  if (asked) return as_asked(obstacle, *asked);
  const DType weight = matrices.front().dtype, compute = by_weights(obstacle, weight);
  if (backend == Backend::kCpu || compute != DType::kF32) return compute;
  return weight == DType::kF16 ? DType::kF16 : DType::kBF16;
}

}  // namespace switchyard
