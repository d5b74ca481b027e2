// Ranks that come late: what the others do in the meantime, and that outputs have the same bits.
//
//   SWITCHYARD_SOAK_EPOCHS=100000   passes of the soak (default 10000)
//   SWITCHYARD_SOAK_SEED=7          other batches and delays
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>

#include "cpu/split.h"
#include "cpu/tile_gemm.h"
#include "model/errors.h"
#include "support/layers.h"
#include "support/numbers.h"
#include "support/ranks.h"

namespace switchyard::testing {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Kind = ProtocolStep::Kind;

constexpr microseconds kNever = std::chrono::hours(1);

// A layer whose rows fill tiles of every height, and whose experts have several blocks of rows.
LayerSpec layer_of(bool shared) {
  LayerSpec spec = spec_of(256, 192, 12, 3);
  if (shared) spec.shared_intermediate = 96;
  return spec;
}

// Counts GEMM tasks of each rank before and after another rank comes.
struct Watch {
  std::atomic<bool> late_rank_came{false};
  std::atomic<int> early[8] = {}, all[8] = {};

  void see(const ProtocolStep& step) {
    if (step.kind != Kind::kGemm1 && step.kind != Kind::kGemm2) return;
    ++all[step.rank];
    if (!late_rank_came) ++early[step.rank];
  }
};

struct LateCase {
  DType weights, compute;
  const char* name;
};

class Late : public ::testing::TestWithParam<LateCase> {
 protected:
  static bool splits() {
    // The same answer for all layers here: their products differ in size only.
    return std::string(cpu::gemm_instruction_set()) != "amx_bf16";
  }
  // The fewest tasks of rank `r` with all that the ranks but `late` feed it, or the shared
  // expert's.
  static int tasks_without(int late, bool routed, const LayerSpec& spec,
                           const std::vector<std::int32_t>& ids, const Shares& shares, int r) {
    const protocol::ExpertPartition experts{spec.num_experts,
                                            static_cast<int>(shares.count.size())};
    std::map<std::int32_t, std::uint32_t> rows;
    const auto late_rank = static_cast<std::size_t>(late);
    for (std::size_t i = 0; i < ids.size() && routed; ++i) {
      const auto token = static_cast<std::int64_t>(i) / spec.top_k;
      const bool is_late = token >= shares.first[late_rank] &&
                           token < shares.first[late_rank] + shares.count[late_rank];
      if (!is_late && experts.owner(ids[i]) == r) ++rows[ids[i]];
    }
    const std::int64_t own = shares.count[static_cast<std::size_t>(r)];
    int tiles = spec.shared_intermediate > 0 ? static_cast<int>((own + 31) / 32) : 0;
    for (const auto& [expert, count] : rows) {
      tiles += static_cast<int>(protocol::TokenTiles(count, {}).count);
    }
    return 2 * tiles;  // one block of weight rows in each GEMM
  }
};

// One rank calls forward() only after the others have done all that they can do without it.
TEST_P(Late, OthersWorkInTheMeantimeAndBitsAreTheSame) {
  constexpr int kRanks = 3;
  for (const bool shared : {true, false}) {
    const LayerSpec spec = layer_of(shared);
    const MoeWeights weights = generate_weights(spec, GetParam().weights, 3, {.num_threads = 1});
    for (const std::int64_t tokens : {7, 400}) {
      const Batch batch{Matrix::random(tokens, spec.hidden, DType::kBF16, 5), {}, {}, {}};
      const LayerOptions alone_options{.compute = GetParam().compute};
      const BatchResult alone =
          run_batch(spec, weights, batch, Shares::of({tokens}), DType::kF32, alone_options);
      const Shares shares = Shares::even(tokens, kRanks);
      for (int late = 0; late < kRanks; ++late) {
        for (const microseconds patience : {microseconds(0), kNever}) {
          SCOPED_TRACE(::testing::Message()
                       << tokens << " tokens, rank " << late << " late, shared " << shared
                       << ", patience " << patience.count());
          std::vector<int> expected;
          for (int r = 0; r < kRanks; ++r) {
            const bool routed = patience != kNever && splits();
            expected.push_back(tasks_without(late, routed, spec, alone.ids, shares, r));
          }
          Watch watch;
          BatchResult result = empty_result(spec, batch, kRanks, DType::kF32);
          run_all_ranks(World::threads(kRanks), [&](const World& world) {
            LayerOptions options = alone_options;
            options.cpu.num_threads = 1;
            options.patience = patience;
            options.diagnostics.on_step = [&](const ProtocolStep& step) { watch.see(step); };
            MoeLayer layer(world, spec, weights_of_rank(weights, world.rank(), kRanks), options);
            if (world.rank() == late) {
              const bool done = test::eventually([&] {
                for (int r = 0; r < kRanks; ++r) {
                  if (r != late && watch.all[r] < expected[static_cast<std::size_t>(r)])
                    return false;
                }
                return true;
              });
              EXPECT_TRUE(done) << "ranks do not work while another is late";
              std::this_thread::sleep_for(milliseconds(20));  // for what they should not do
              watch.late_rank_came = true;
            }
            forward_share(layer, batch, shares, world.rank(), result);
          });
          EXPECT_TRUE(result.output == alone.output);
          EXPECT_EQ(result.ids, alone.ids);
          for (int r = 0; r < kRanks; ++r) {
            if (r == late) continue;
            const int least = expected[static_cast<std::size_t>(r)];
            if (patience == kNever) {
              EXPECT_EQ(watch.early[r], least) << "rank " << r;
            } else {
              EXPECT_GE(watch.early[r], least) << "rank " << r;
            }
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Late,
                         ::testing::Values(LateCase{DType::kF32, DType::kF32, "f32"},
                                           LateCase{DType::kBF16, DType::kBF16, "bf16"},
                                           LateCase{DType::kF8E4M3, DType::kF8E4M3, "fp8"}),
                         [](const ::testing::TestParamInfo<LateCase>& type) {
                           return std::string(type.param.name);
                         });

// The late rank's rows are not lost where all that it has is for experts that others have begun.
TEST(LateRank, RowsThatComeLaterGetTilesOfTheirOwn) {
  const LayerSpec spec = layer_of(false);
  const MoeWeights weights = generate_weights(spec, DType::kF32, 3, {.num_threads = 1});
  constexpr std::int64_t kTokens = 64;
  Batch batch{Matrix::random(kTokens, spec.hidden, DType::kF32, 5), {}, {}, {}};
  for (std::int64_t i = 0; i < kTokens; ++i) {
    for (const int e : {0, 1, 2}) {
      batch.topk_ids.push_back(e);  // of rank 0 alone
      batch.topk_weights.push_back(0.25f * static_cast<float>(e + 1));
    }
  }
  const BatchResult alone = run_batch(spec, weights, batch, Shares::of({kTokens}), DType::kF32);
  const Shares shares = Shares::even(kTokens, 2);
  BatchResult result = empty_result(spec, batch, 2, DType::kF32);
  Watch watch;
  // AMX has other tiles, whose number is not looked at.
  const bool counts = std::string(cpu::gemm_instruction_set()) != "amx_bf16";
  run_all_ranks(World::threads(2), [&](const World& world) {
    LayerOptions options{.cpu = {.num_threads = 1}, .patience = microseconds(0)};
    options.diagnostics.on_step = [&](const ProtocolStep& step) { watch.see(step); };
    MoeLayer layer(world, spec, weights, options);
    if (world.rank() == 1) {
      test::eventually([&] { return watch.all[0] >= 6; },
                       counts ? test::kGenerous : milliseconds(500));
      watch.late_rank_came = true;
    }
    forward_share(layer, batch, shares, world.rank(), result);
  });
  EXPECT_TRUE(result.output == alone.output);
  if (!counts) return;
  EXPECT_EQ(watch.early[0], 6) << "three tiles of two tasks";
  EXPECT_EQ(watch.all[0], 12) << "and again for the rows of rank 1";
}

// A rank that never comes is named, although the others had work of their own.
TEST(LateRank, ADeadRankIsNamed) {
  const LayerSpec spec = layer_of(true);
  const MoeWeights weights = generate_weights(spec, DType::kF32, 3, {.num_threads = 1});
  for (int dead = 0; dead < 3; ++dead) {
    std::atomic<int> gemms{0};
    const auto failures = run_ranks(
        World::threads(3, test::with_deadline(milliseconds(250))), [&](const World& world) {
          LayerOptions options{.cpu = {.num_threads = 1}, .patience = microseconds(0)};
          options.diagnostics.on_step = [&](const ProtocolStep& step) {
            gemms += step.kind == Kind::kGemm1;
          };
          MoeLayer layer(world, spec, weights, options);
          if (world.rank() == dead) return;
          const Batch batch{Matrix::random(90, spec.hidden, DType::kF32, 5), {}, {}, {}};
          BatchResult result = empty_result(spec, batch, 3, DType::kF32);
          forward_share(layer, batch, Shares::even(90, 3), world.rank(), result);
        });
    EXPECT_GT(gemms, 0);
    EXPECT_FALSE(failures[static_cast<std::size_t>(dead)]);
    for (int r = 0; r < 3; ++r) {
      if (r == dead) continue;
      const std::exception_ptr& failure = failures[static_cast<std::size_t>(r)];
      ASSERT_TRUE(failure) << "rank " << r;
      const auto again = [&] { std::rethrow_exception(failure); };
      EXPECT_EQ(test::blame_of(dead, again, "counts").failure.epoch, 1u);
    }
  }
}

// Passes back to back in which every rank has a random number of tokens and comes a random time
// late. Each output is compared with what one rank computes alone.
TEST(LateSoak, RandomLatenessAndSizes) {
  constexpr int kRanks = 4, kBatches = 48;
  LayerSpec spec = spec_of(32, 16, 10, 3);
  spec.shared_intermediate = 16;
  const std::uint64_t seed = test::soak_seed();
  const MoeWeights weights = generate_weights(spec, DType::kF32, seed, {.num_threads = 1});
  std::vector<Batch> batches;
  std::vector<Shares> shares;
  std::vector<BatchResult> expected;
  for (std::uint64_t b = 0; b < kBatches; ++b) {
    std::vector<std::int64_t> counts;
    std::int64_t total = 0;
    for (std::uint64_t r = 0; r < kRanks; ++r) {
      const std::uint64_t roll = mix64(seed * kBatches * kRanks + b * kRanks + r);
      counts.push_back(roll % 5 == 0 ? 0 : static_cast<std::int64_t>(roll / 5 % 150));
      total += counts.back();
    }
    batches.push_back({Matrix::random(total, spec.hidden, DType::kF32, seed + b), {}, {}, {}});
    shares.push_back(Shares::of(counts));
    expected.push_back(run_batch(spec, weights, batches.back(), Shares::of({total}), DType::kF32));
  }
  const std::uint64_t passes = test::number_from("SWITCHYARD_SOAK_EPOCHS", 10'000);
  std::atomic<int> different{0};
  std::atomic<std::uint64_t> early{0};
  run_all_ranks(World::threads(kRanks), [&](const World& world) {
    const auto r = static_cast<std::uint64_t>(world.rank());
    LayerOptions options{.max_tokens = 160,
                         .cpu = {.num_threads = world.rank() == 1 ? 2 : 1},
                         .patience = microseconds(20)};
    std::atomic<bool> planned{false};
    options.diagnostics.on_step = [&](const ProtocolStep& step) {
      if (step.kind == Kind::kPublishCounts) planned = false;
      if (step.kind == Kind::kPlan) planned = true;
      early += step.kind == Kind::kGemm1 && !planned;
    };
    MoeLayer layer(world, spec, weights, options);
    for (std::uint64_t pass = 0; pass < passes; ++pass) {
      const std::size_t b = mix64(seed ^ pass) % kBatches;
      const std::uint64_t roll = mix64(seed + pass * kRanks + r);
      if (roll % 4 == 0) {
        std::this_thread::sleep_for(microseconds(roll / 4 % (roll % 64 == 0 ? 3000 : 300)));
      }
      BatchResult result = empty_result(spec, batches[b], kRanks, DType::kF32);
      forward_share(layer, batches[b], shares[b], world.rank(), result);
      const std::int64_t first = shares[b].first[r], count = shares[b].count[r];
      different += std::memcmp(result.output.row(first), expected[b].output.row(first),
                               static_cast<std::size_t>(count * spec.hidden) * 4) != 0;
    }
  });
  EXPECT_EQ(different, 0);
  // The shared expert alone gives some tasks in most passes.
  EXPECT_GT(early, passes / 2) << "no rank worked while others were late";
}

// The rule by which rows may be split, against products of the heights that it does not try.
TEST(BitsIgnoreHeight, HoldsForEveryHeightInUse) {
  const LayerSpec spec = layer_of(false);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    if (dtype == DType::kBF16 && !cpu::has_native_bf16()) continue;
    const MoeWeights weights = generate_weights(spec, dtype, 3, {.num_threads = 1});
    cpu::LayerState layer{.spec = spec, .gemm = dtype};
    layer.places = {spec.num_experts, 1};
    for (const FfnWeights& expert : weights.experts) {
      cpu::Ffn ffn;
      ffn.weights = &expert;
      ffn.intermediate = spec.intermediate;
      ffn.gemm1_rows = ffn.gemm2_rows = 128;
      layer.experts.push_back(std::move(ffn));
    }
    if (!cpu::bits_ignore_height(layer)) GTEST_SKIP() << "not on " << cpu::gemm_instruction_set();
    const cpu::SingleThreadedLibrary confined;
    cpu::TileGemm gemm(dtype);
    const Matrix x = Matrix::random(128, spec.hidden, dtype, 9);
    const MatrixView& w = weights.experts[0].up;
    const auto multiply = [&](int first, int n) {
      std::vector<float> c(static_cast<std::size_t>(n) * 128);
      gemm.multiply(128, n, spec.hidden, w.data, w.row_stride, w.col_stride,
                    x.rows_from(first, n).data, spec.hidden, c.data());
      return c;
    };
    const std::vector<float> all = multiply(0, 128);
    for (int n = 16; n <= 128; n += 16) {
      for (int first = 0; first + n <= 128; first += 16) {
        const std::vector<float> some = multiply(first, n);
        for (int i = 0; i < 128; ++i) {
          ASSERT_EQ(0, std::memcmp(&some[static_cast<std::size_t>(i * n)],
                                   &all[static_cast<std::size_t>(i * 128 + first)],
                                   static_cast<std::size_t>(n) * 4))
              << n << " rows from " << first;
        }
      }
    }
  }
}

}  // namespace
}  // namespace switchyard::testing
