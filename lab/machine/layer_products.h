// The products that a pass of the CPU engine is made of. Measurements of this machine multiply the
// same tiles.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/layer_spec.h"
#include "switchyard/tensor.h"

namespace switchyard::machine {

// A weight block [m, k] times n tokens. Only `rows` of the tokens are wanted; the others fill the
// tile.
struct TileProduct {
  int m = 0;
  int n = 0;
  int k = 0;
  int rows = 0;

  double useful_flops() const { return 2.0 * m * k * rows; }
  friend bool operator==(const TileProduct&, const TileProduct&) = default;
};

// The products of one pass: tokens_per_expert[e] rows of each routed expert, and each rank's tokens
// through the shared expert, in the engine's tiles.
std::vector<TileProduct> layer_products(const LayerSpec& spec,
                                        std::span<const std::int64_t> tokens_per_expert,
                                        std::span<const std::int64_t> tokens_per_rank);

// FLOPs of the wanted rows of all products: what a pass has to compute.
double useful_flops(std::span<const TileProduct> products);

}  // namespace switchyard::machine
