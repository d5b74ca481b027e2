// Epochs back to back without a barrier, with random delays at every step of the protocol, compared
// bit by bit with what one rank computes alone, and that with the fp64 reference.
//
//   SWITCHYARD_SOAK_EPOCHS=100000   how many (default 10000)
//   SWITCHYARD_SOAK_SEED=7          other weights, batches and delays
#include <gtest/gtest.h>

#include "support/accuracy.h"
#include "support/layers.h"
#include "support/numbers.h"
#include "support/ranks.h"

namespace switchyard::testing {
namespace {

constexpr int kRanks = 4;
constexpr int kBatches = 64;
// Every wait has a deadline of its own; this one only ends a test whose deadlines do not work.
constexpr std::chrono::minutes kHang{9};

// Batches of random sizes, shares (zero tokens included) and skews, and their outputs.
struct Script {
  LayerSpec spec;
  MoeWeights weights;
  std::vector<Batch> batches;
  std::vector<Shares> shares;
  std::vector<Matrix> expected;
  std::uint64_t seed = test::soak_seed();

  Script() {
    spec = spec_of(32, 16, 10, 3);
    spec.shared_intermediate = 16;
    weights = generate_weights(spec, DType::kF32, seed, {.num_threads = 1});
    for (std::uint64_t b = 0; b < kBatches; ++b) {
      const std::uint64_t batch_seed = mix64(seed * kBatches + b);
      std::vector<std::int64_t> counts;
      std::int64_t total = 0;
      for (std::uint64_t r = 0; r < kRanks; ++r) {
        const std::uint64_t roll = mix64(batch_seed + r);
        counts.push_back(roll % 4 == 0 ? 0 : static_cast<std::int64_t>(roll / 4 % 40));
        total += counts.back();
      }
      const double beta = 0.2 + 0.1 * static_cast<double>(b % 9);
      const SyntheticRouting routing = synthetic_routing(static_cast<int>(total), spec.num_experts,
                                                         spec.top_k, beta, batch_seed);
      batches.push_back({Matrix::random(total, spec.hidden, DType::kF32, batch_seed),
                         routing.ids,
                         routing.weights,
                         {}});
      shares.push_back(Shares::of(counts));
      const BatchResult alone =
          run_batch(spec, weights, batches.back(), Shares::of({total}), DType::kF32);
      // Sums of 32 products in fp32; a wrong expert, weight or token is off by about 1.
      EXPECT_LT(output_error(spec, weights, batches.back(), alone), 1e-5)
          << "batch " << b << ", " << total << " tokens";
      expected.push_back(alone.output);
    }
  }

  // Plays `epochs` epochs as `world`'s rank and returns how many outputs differed.
  int play(const World& world, std::uint64_t epochs) const {
    MoeLayer layer(world, spec, weights,
                   {.max_tokens = 64,
                    .cpu = {.num_threads = world.rank() == 0 ? 2 : 1},
                    .diagnostics = {.on_step = test::random_delays(seed)}});
    int different = 0;
    const auto r = static_cast<std::size_t>(world.rank());
    for (std::uint64_t epoch = 0; epoch < epochs; ++epoch) {
      const std::size_t b = mix64(seed + epoch) % kBatches;
      // Only this rank's rows are written; the others keep the expected values.
      Matrix output(batches[b].x.rows(), spec.hidden, DType::kF32);
      ForwardInput in{.activations =
                          batches[b].x.rows_from(shares[b].first[r], shares[b].count[r])};
      const auto slots = static_cast<std::size_t>(shares[b].count[r] * spec.top_k);
      const auto first = static_cast<std::size_t>(shares[b].first[r] * spec.top_k);
      in.topk_ids = std::span(batches[b].topk_ids).subspan(first, slots);
      in.topk_weights = std::span(batches[b].topk_weights).subspan(first, slots);
      layer.forward(in, {.data = output.row(shares[b].first[r]), .dtype = DType::kF32});
      for (std::int64_t i = shares[b].first[r] * spec.hidden;
           i < (shares[b].first[r] + shares[b].count[r]) * spec.hidden; ++i) {
        if (output.get(i) != expected[b].get(i)) {
          ++different;
          break;
        }
      }
    }
    return different;
  }
};

std::uint64_t num_epochs() { return test::number_from("SWITCHYARD_SOAK_EPOCHS", 10'000); }

TEST(Soak, ThreadsBackToBackWithJitter) {
  const Script script;
  std::atomic<int> different{0};
  run_all_ranks(World::threads(kRanks),
                [&](const World& world) { different += script.play(world, num_epochs()); });
  EXPECT_EQ(different, 0);
}

TEST(Soak, ProcessesBackToBackWithJitter) {
  const std::string rendezvous = test::fresh_rendezvous();
  test::expect_processes(
      kRanks,
      [&](int rank) {
        const Script script;
        EXPECT_EQ(
            script.play(World::processes(rank, kRanks, {.rendezvous = rendezvous}), num_epochs()),
            0);
      },
      kHang);
}

}  // namespace
}  // namespace switchyard::testing
