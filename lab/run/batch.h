// The tokens that a layer is run on, and their distribution over the ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "run/source.h"
#include "switchyard/tensor.h"

namespace switchyard::run {

struct BatchOptions {
  std::int64_t tokens = 0;  // 0: not given
  std::string input;        // a safetensors file; empty: random activations
  std::optional<double> balancedness;
  std::uint64_t seed = 0;
};

struct Batch {
  MatrixView activations;  // [T, H]
  std::shared_ptr<const void> owner;
  // Both [T, K], or both empty: the gate routes.
  std::vector<std::int32_t> topk_ids;
  std::vector<float> topk_weights;
  std::vector<std::int32_t> token_ids;  // [T] for hash-routed layers, else empty
  std::string origin;                   // of the activations
  std::string routing;                  // "gate", "given", "synthetic, beta 0.80"

  std::int64_t tokens() const { return activations.rows; }
};

// Reads or draws a batch. `dtype` is the type of random activations. The result is a function of
// the arguments and the input file. Throws Error for a file that does not fit the layer, naming the
// tensor.
Batch make_batch(const BatchOptions& options, const Source& source, DType dtype);

// A rank's contiguous share of the tokens. Shares differ by at most one token.
struct Share {
  std::int64_t first = 0;
  std::int64_t count = 0;
};
inline Share share_of(std::int64_t tokens, int rank, int num_ranks) {
  const std::int64_t first = tokens * rank / num_ranks;
  return {first, tokens * (rank + 1) / num_ranks - first};
}
inline std::int64_t largest_share(std::int64_t tokens, int num_ranks) {
  return (tokens + num_ranks - 1) / num_ranks;
}
std::vector<std::int64_t> all_share_sizes(std::int64_t tokens, int num_ranks);

}  // namespace switchyard::run
