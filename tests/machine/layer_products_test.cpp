#include "machine/layer_products.h"

#include <gtest/gtest.h>

#include "support/specs.h"

namespace switchyard::machine {
namespace {

// The columns of h are not a multiple of a task's rows.
LayerSpec small_spec() { return testing::spec_of(96, 700, 4, 2); }

double ffn_flops(int hidden, int intermediate, double tokens) {
  return 2.0 * 3 * hidden * intermediate * tokens;
}

TEST(LayerProducts, CountTheFlopsOfTheLayer) {
  const LayerSpec spec = small_spec();
  const std::vector<std::int64_t> counts = {0, 1, 129, 300};
  const auto products = layer_products(spec, counts, std::vector<std::int64_t>{200, 230});
  EXPECT_DOUBLE_EQ(useful_flops(products), ffn_flops(96, 700, 430));
  for (const TileProduct& p : products) {
    EXPECT_EQ(p.n % 16, 0);
    EXPECT_LE(p.n, 128);
    EXPECT_LE(p.rows, p.n);
    EXPECT_GT(p.rows, 0);
  }
}

TEST(LayerProducts, IncludeTheSharedExpertOfEveryRank) {
  LayerSpec spec = small_spec();
  spec.shared_intermediate = 64;
  const auto products =
      layer_products(spec, std::vector<std::int64_t>{10, 0, 0, 0}, std::vector<std::int64_t>{3, 4});
  EXPECT_DOUBLE_EQ(useful_flops(products), ffn_flops(96, 700, 10) + ffn_flops(96, 64, 7));
}

TEST(LayerProducts, PlainFfnsHaveNoGate) {
  LayerSpec spec = small_spec();
  spec.activation.gated = false;
  const auto products =
      layer_products(spec, std::vector<std::int64_t>{5, 0, 0, 0}, std::vector<std::int64_t>{5});
  EXPECT_DOUBLE_EQ(useful_flops(products), ffn_flops(96, 700, 5) * 2 / 3);
}

}  // namespace
}  // namespace switchyard::machine
