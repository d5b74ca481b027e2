#include "machine/layer_products.h"

#include <algorithm>

#include "cpu/expert_gemm.h"
#include "cpu/pass.h"
#include "protocol/partition.h"

namespace switchyard::machine {
namespace {

void add_matrix(int weight_rows, int weight_cols, int n, int rows, int copies,
                std::vector<TileProduct>& products) {
  const int step = cpu::rows_per_task(weight_cols);
  for (int first = 0; first < weight_rows; first += step) {
    const int m = std::min(step, weight_rows - first);
    products.insert(products.end(), static_cast<std::size_t>(copies), {m, n, weight_cols, rows});
  }
}

void add_ffn(const LayerSpec& spec, int intermediate, std::int64_t tokens,
             protocol::TileShape shape, std::vector<TileProduct>& products) {
  const protocol::TokenTiles tiles(static_cast<std::uint32_t>(tokens), shape);
  for (std::uint32_t t = 0; t < tiles.count; ++t) {
    const int rows = static_cast<int>(tiles.end(t) - tiles.begin(t));
    const int n = protocol::round_up(rows, shape.granule);
    add_matrix(intermediate, spec.hidden, n, rows, spec.activation.gated ? 2 : 1, products);
    add_matrix(spec.hidden, intermediate, n, rows, 1, products);
  }
}

}  // namespace

std::vector<TileProduct> layer_products(const LayerSpec& spec,
                                        std::span<const std::int64_t> tokens_per_expert,
                                        std::span<const std::int64_t> tokens_per_rank) {
  std::vector<TileProduct> products;
  for (const std::int64_t tokens : tokens_per_expert) {
    add_ffn(spec, spec.intermediate, tokens, protocol::TileShape(), products);
  }
  if (spec.shared_intermediate == 0) return products;
  for (const std::int64_t tokens : tokens_per_rank) {
    add_ffn(spec, spec.shared_intermediate, tokens, cpu::kOwnTokensShape, products);
  }
  return products;
}

double useful_flops(std::span<const TileProduct> products) {
  double total = 0;
  for (const TileProduct& p : products) total += p.useful_flops();
  return total;
}

}  // namespace switchyard::machine
