// What this machine can do, measured in this process: the rates that a layer's time is compared
// with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/layer_spec.h"
#include "switchyard/tensor.h"
#include "switchyard/weights.h"

namespace switchyard::cli {

// A weight block [m, k] times n tokens, of which `rows` are wanted and the others fill the tile.
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

// Useful FLOP/s of the small-GEMM library over a random sample of `products` on `num_threads`
// threads for about `seconds`. Operands are a tile's own and stay in cache: memory is left out.
double measure_gemm_rate(std::vector<TileProduct> products, DType dtype, int num_threads,
                         double seconds);

// The element type that the library multiplies when a layer computes in `compute`.
DType gemm_dtype(DType compute);

using ByteRange = std::span<const std::byte>;

// The memory that holds the expert weights of a pass, without overlaps.
std::vector<ByteRange> touched_weights(const MoeWeights& weights,
                                       std::span<const std::int64_t> tokens_per_expert);

// Bytes per second at which `num_threads` threads read all of `ranges`, the best of the passes
// that fit in about `seconds` (at least one after a warm-up).
double measure_read_rate(std::span<const ByteRange> ranges, int num_threads, double seconds);

}  // namespace switchyard::cli
