// The rates of this host, measured in this process. A layer's time on the CPU is compared with
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "machine/layer_products.h"
#include "switchyard/tensor.h"
#include "switchyard/weights.h"

namespace switchyard::machine {

// Useful FLOP/s of the small-GEMM library over a random sample of `products` on `num_threads`
// threads: the best of ten windows that take about `seconds` together, as for measure_read_rate().
// Every thread has its own operands, which stay in cache, so memory does not count.
double measure_gemm_rate(std::vector<TileProduct> products, DType dtype, int num_threads,
                         double seconds);

using ByteRange = std::span<const std::byte>;

// The memory that holds the expert weights of a pass, without overlaps.
std::vector<ByteRange> touched_weights(const MoeWeights& weights,
                                       std::span<const std::int64_t> tokens_per_expert);

// The rate, in bytes per second, at which `num_threads` threads read all of `ranges`. It is the
// best of the passes that fit in about `seconds` (at least one after a warm-up).
double measure_read_rate(std::span<const ByteRange> ranges, int num_threads, double seconds);

}  // namespace switchyard::machine
