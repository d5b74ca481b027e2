// GroupedGemm on the CPU: against fp64, in every layout, and against the fused layer.
#include "switchyard/grouped_gemm.h"

#include <gtest/gtest.h>

#include "cpu/tile_gemm.h"
#include "operators/problem.h"
#include "support/accuracy.h"
#include "support/fp8.h"
#include "support/numbers.h"

namespace switchyard::testing {
namespace {

constexpr GateOrder kOrders[] = {GateOrder::kGateUp, GateOrder::kUpGate, GateOrder::kInterleaved};
constexpr ActivationKind kKinds[] = {ActivationKind::kSilu,     ActivationKind::kGelu,
                                     ActivationKind::kGeluTanh, ActivationKind::kRelu,
                                     ActivationKind::kRelu2,    ActivationKind::kIdentity,
                                     ActivationKind::kSitu};
constexpr DType kWide[] = {DType::kBF16, DType::kF16, DType::kF32};

int most_rows(const Case& c) { return *std::max_element(c.rows.begin(), c.rows.end()); }

std::vector<RowLayout> layouts_of(const Case& c) {
  return {RowLayout::packed(),
          RowLayout::blocked(1),
          RowLayout::blocked(16),
          RowLayout::blocked(50),
          RowLayout::padded(std::max(1, most_rows(c))),
          RowLayout::padded(most_rows(c) + 13)};
}

void expect_accurate_and_contained(const Case& c) {
  SCOPED_TRACE(::testing::Message() << c);
  const Problem problem(c);
  expect_as_good(problem, problem.run());
}

TEST(GroupedGemm, NumbersOfExperts) {
  for (const int experts : {1, 3, 32, 33, 512, 1024}) {
    for (const bool gated : {false, true}) {
      Case c;
      c.n = 48;
      c.k = 40;
      c.rows.clear();
      for (int e = 0; e < experts; ++e) c.rows.push_back(e % 3 == 1 ? 0 : 1 + e * 5 % 4);
      if (gated) c.epilogue = Activation();
      expect_accurate_and_contained(c);
      c.in = RowLayout::blocked(4);
      c.to = RowLayout::padded(5);
      expect_accurate_and_contained(c);
    }
  }
}

TEST(GroupedGemm, WeightsOfFourBits) {
  for (const DType weight : {DType::kF4E2M1, DType::kU4}) {
    for (const GateOrder order : kOrders) {
      for (const int epilogue : {0, 1, 2}) {  // none, plain, gated
        for (const int group : {32, 128}) {
          if (group == 128 && weight == DType::kF4E2M1) continue;
          Case c;
          c.n = 96;
          c.k = 256;
          c.weight = weight;
          c.group = group;
          c.order = order;
          c.pad = 6;
          c.biased = true;
          if (epilogue != 0) c.epilogue = activation_of(ActivationKind::kSilu, epilogue == 2);
          expect_accurate_and_contained(c);
          c.k = 2880 / group * group;
          c.gathered = false;
          c.scattered = c.weighted = true;
          expect_accurate_and_contained(c);
          if (weight == DType::kU4) continue;
          c.compute = DType::kF8E4M3;
          expect_accurate_and_contained(c);
        }
      }
    }
  }
}

// Rows around the heights of tiles, and experts without any, at the ends and in between.
TEST(GroupedGemm, NumbersOfRows) {
  for (const std::vector<int>& rows : {std::vector<int>{1},
                                       {0, 1},
                                       {1, 0, 0},
                                       {0, 0, 15, 0, 16, 17, 0},
                                       {127, 128, 129},
                                       {600, 1},
                                       {0, 257, 0}}) {
    for (const DType compute : {DType::kBF16, DType::kF32}) {
      Case c;
      c.rows = rows;
      c.compute = compute;
      c.epilogue = Activation();
      expect_accurate_and_contained(c);
    }
  }
}

TEST(GroupedGemm, NoRowsAtAll) {
  Case c;
  c.rows = {0, 0, 0};
  for (const RowLayout& layout :
       {RowLayout::packed(), RowLayout::blocked(8), RowLayout::padded(4)}) {
    c.in = c.to = layout;
    EXPECT_TRUE(Problem(c).run().output.empty());
  }
  // No memory either.
  const Problem problem(c);
  GroupedGemm gemm(problem.spec(), problem.weights(), problem.options());
  const std::vector<std::int64_t> ends(3);
  gemm.run({.ends = ends}, {});
}

TEST(GroupedGemm, EveryActivationOrderAndType) {
  for (const ActivationKind kind : kKinds) {
    for (const bool gated : {false, true}) {
      if (!gated && kind == ActivationKind::kSitu) continue;
      for (const GateOrder order : kOrders) {
        if (!gated && order != GateOrder::kGateUp) continue;
        for (const DType dtype : kWide) {
          Case c;
          c.epilogue = activation_of(kind, gated);
          c.order = order;
          c.weight = c.x = c.out = dtype;
          c.biased = true;
          c.products = true;
          expect_accurate_and_contained(c);
        }
      }
    }
  }
}

TEST(GroupedGemm, ClampedActivations) {
  Case c;
  c.epilogue = Activation();
  c.epilogue->alpha = 1.702f;
  c.epilogue->limit = 0.7f;
  c.epilogue->up_bias = 1;
  c.biased = true;
  for (const GateOrder order : kOrders) {
    c.order = order;
    expect_accurate_and_contained(c);
  }
}

// Shapes at which a tile's rows of weight make several tasks, with odd last ones.
TEST(GroupedGemm, SizesOfMatrices) {
  for (const auto& [n, k] : {std::pair{2, 1}, {2, 7}, {34, 129}, {1030, 33}, {700, 1100}}) {
    for (const bool gated : {false, true}) {
      for (const DType weight : {DType::kBF16, DType::kF8E4M3}) {
        Case c;
        c.n = n;
        c.k = k;
        c.rows = {3, 20};
        c.weight = weight;
        c.scales = Scales::kBlocks;
        c.products = gated;
        if (gated) c.epilogue = Activation();
        expect_accurate_and_contained(c);
      }
    }
  }
}

// One result, to the bit, whatever the layouts, indexes, orders and threads are.
TEST(GroupedGemm, SameBitsInEveryLayout) {
  for (const DType weight : {DType::kBF16, DType::kF32, DType::kF8E4M3}) {
    for (const bool gated : {false, true}) {
      Case c;
      c.n = 96;
      c.k = 160;
      c.rows = {0, 1, 130, 16, 0, 37};
      c.weight = weight;
      c.scales = Scales::kRows;
      c.x = c.out = weight == DType::kF32 ? DType::kF32 : DType::kBF16;
      c.biased = c.weighted = true;
      c.products = gated;
      if (gated) c.epilogue = Activation();
      const Rows packed = Problem(c).run();
      int compared = 0;
      for (const RowLayout& in : layouts_of(c)) {
        for (const RowLayout& to : layouts_of(c)) {
          for (const bool gathered : {true, false}) {
            Case other = c;
            other.in = in;
            other.to = to;
            other.gathered = gathered;
            other.pad = compared % 3;
            other.threads = 1 + compared % 4;
            other.wide_ends = compared % 2 == 0;
            if (gated) other.order = kOrders[compared % 3];
            EXPECT_TRUE(Problem(other).run() == packed) << other;
            ++compared;
          }
        }
      }
      c.scattered = true;
      c.products = false;
      const Rows scattered = Problem(c).run();
      std::size_t stored = 0;
      for (std::size_t r = 0; r < packed.output.size(); ++r) {
        if (scattered.output[r].empty()) continue;
        ++stored;
        EXPECT_EQ(scattered.output[r], packed.output[r]) << r;
      }
      EXPECT_GT(stored, packed.output.size() / 2);
      EXPECT_LT(stored, packed.output.size());
    }
  }
}

// Other experts' rows change nothing.
TEST(GroupedGemm, SameBitsBesideAnyExperts) {
  Case c;
  c.rows = {21, 60, 3};
  c.epilogue = Activation();
  const Rows all = Problem(c).run();
  const Problem problem(c);
  GroupedGemm gemm(problem.spec(), problem.weights(), problem.options());
  EXPECT_TRUE(problem.run(gemm) == all);
  EXPECT_TRUE(problem.run(gemm) == all);  // again, with what the first call left in scratch

  Problem alone(c);
  alone.keep_only(1);
  const Rows some = alone.run();
  ASSERT_EQ(some.output.size(), 60u);
  EXPECT_TRUE(std::equal(some.output.begin(), some.output.end(), all.output.begin() + 21));
}

TEST(GroupedGemm, NanStaysInItsRows) {
  for (const DType weight : {DType::kBF16, DType::kF8E4M3}) {
    for (const bool gated : {false, true}) {
      Case c;
      c.rows = {5, 0, 140};
      c.weight = weight;
      if (gated) c.epilogue = Activation();
      Problem problem(c);
      const Rows clean = problem.run();
      problem.set_token(7, 3, NAN);
      const Rows poisoned = problem.run();
      for (int r = 0; r < c.total(); ++r) {
        const auto at = static_cast<std::size_t>(r);
        if (problem.token_of(r) != problem.token_of(7)) {
          EXPECT_EQ(poisoned.output[at], clean.output[at]) << r;
          continue;
        }
        for (const float value : poisoned.output[at]) EXPECT_TRUE(std::isnan(value)) << r;
      }
    }
  }
}

TEST(GroupedGemm, ComputesInTheTypeOfLayers) {
  Case c;
  const auto compute_of = [&](DType weight, std::optional<DType> asked = {}) {
    c.weight = weight;
    c.compute = asked;
    const Problem problem(c);
    return GroupedGemm(problem.spec(), problem.weights(), problem.options()).compute();
  };
  EXPECT_EQ(compute_of(DType::kBF16), DType::kBF16);
  EXPECT_EQ(compute_of(DType::kF16), DType::kF32);
  EXPECT_EQ(compute_of(DType::kF32), DType::kF32);
  EXPECT_EQ(compute_of(DType::kF8E4M3), DType::kF8E4M3);
  EXPECT_EQ(compute_of(DType::kF8E4M3, DType::kBF16), DType::kBF16);
  EXPECT_EQ(compute_of(DType::kBF16, DType::kF32), DType::kF32);
}

Case random_case(test::Numbers& numbers, std::uint64_t seed) {
  const auto one_in = [&](int n) { return numbers.between(1, n) == 1; };
  Case c;
  c.seed = seed;
  c.rows.clear();
  const int experts = one_in(8) ? numbers.between(33, 200) : numbers.between(1, 9);
  for (int e = 0; e < experts; ++e) {
    c.rows.push_back(one_in(3)                   ? 0
                     : one_in(9) && experts < 10 ? numbers.between(100, 300)
                                                 : numbers.between(1, 20));
  }
  c.n = 2 * numbers.between(1, 80);
  c.k = numbers.between(1, 200);
  if (!one_in(3)) c.epilogue = activation_of(kKinds[numbers.between(0, 5)], numbers.between(0, 1));
  c.order = kOrders[numbers.between(0, 2)];
  c.weight = one_in(3) ? DType::kF8E4M3 : kWide[numbers.between(0, 2)];
  c.scales = static_cast<Scales>(numbers.between(0, 2));
  c.x = kWide[numbers.between(0, 2)];
  c.out = kWide[numbers.between(0, 2)];
  if (one_in(3)) c.compute = one_in(2) ? DType::kBF16 : DType::kF32;
  if (c.weight == DType::kF8E4M3 && !c.compute && one_in(2)) c.x = DType::kF8E4M3;
  const int room = std::max(1, most_rows(c)) + numbers.between(0, 9);
  const auto layout = [&] {
    const int kind = numbers.between(0, 2);
    return kind == 0   ? RowLayout::packed()
           : kind == 1 ? RowLayout::blocked(numbers.between(1, 70))
                       : RowLayout::padded(room);
  };
  c.in = layout();
  c.to = layout();
  c.biased = one_in(2);
  c.weighted = one_in(2);
  c.gathered = one_in(2);
  c.scattered = one_in(3);
  c.products = c.epilogue && !c.scattered && one_in(2);
  c.wide_ends = one_in(2);
  c.transposed = one_in(3);
  c.col_step = one_in(4) ? 2 : 1;
  c.pad = one_in(2) ? 0 : numbers.between(1, 20);
  c.threads = numbers.between(1, 4);
  return c;
}

TEST(GroupedGemm, RandomProblems) {
  const std::uint64_t seed = test::soak_seed();
  test::Numbers numbers(seed);
  const auto trials = static_cast<int>(test::number_from("SWITCHYARD_OPERATOR_TRIALS", 300));
  for (int i = 0; i < trials; ++i) {
    const Case c = random_case(numbers, seed * 100'000 + static_cast<std::uint64_t>(i));
    expect_accurate_and_contained(c);
    if (HasFailure()) return;
  }
}

// The layer's routed experts out of operators, with the layer's bits.
class UnfusedLayer : public ::testing::TestWithParam<ModelEntry> {};

// W[e] of gate and up, in one of the orders; scales and biases with them.
struct Fused {
  std::deque<std::vector<std::byte>> memory;
  std::deque<std::vector<float>> floats;
  GroupedGemmWeights gate_up, down;

  Fused(const LayerSpec& spec, const MoeWeights& weights, GateOrder order) {
    for (const FfnWeights& expert : weights.experts) {
      down.matrices.push_back(expert.down);
      if (!expert.down_bias.empty()) down.biases.push_back(expert.down_bias);
      if (!spec.activation.gated) {
        gate_up.matrices.push_back(expert.up);
        if (!expert.up_bias.empty()) gate_up.biases.push_back(expert.up_bias);
        continue;
      }
      add(spec, expert, order);
    }
  }

  void add(const LayerSpec& spec, const FfnWeights& expert, GateOrder order) {
    const std::int64_t rows = spec.intermediate, cols = spec.hidden;
    const bool in_turn = order == GateOrder::kInterleaved;
    const auto row_of = [&](bool gate, std::int64_t i) {
      if (in_turn) return 2 * i + (gate ? 0 : 1);
      return i + (gate == (order == GateOrder::kGateUp) ? 0 : rows);
    };
    const std::size_t row_bytes = static_cast<std::size_t>(cols) * size_of(expert.up.dtype);
    std::vector<std::byte>& all =
        memory.emplace_back(static_cast<std::size_t>(2 * rows) * row_bytes);
    MatrixView view{all.data(), expert.up.dtype, 2 * rows, cols, cols};
    for (const bool gate : {true, false}) {
      const MatrixView& from = gate ? expert.gate : expert.up;
      for (std::int64_t i = 0; i < rows; ++i) {
        std::memcpy(&all[static_cast<std::size_t>(row_of(gate, i)) * row_bytes], from.row(i),
                    row_bytes);
      }
    }
    if (expert.up.scale != nullptr) {
      // Blocks of 128 rows, of which gate and up have whole ones.
      ASSERT_FALSE(in_turn);
      ASSERT_EQ(rows % 128, 0);
      view.scale_rows = view.scale_cols = 128;
      view.scale_stride = (cols + 127) / 128;
      std::vector<float>& scales = floats.emplace_back();
      for (const bool first : {true, false}) {
        const float* const from =
            (first == (order == GateOrder::kGateUp) ? expert.gate : expert.up).f32_scale();
        scales.insert(scales.end(), from, from + rows / 128 * view.scale_stride);
      }
      view.scale = scales.data();
    }
    gate_up.matrices.push_back(view);
    if (expert.up_bias.empty()) return;
    std::vector<float>& bias = floats.emplace_back(static_cast<std::size_t>(2 * rows));
    std::vector<double> values(static_cast<std::size_t>(rows));
    for (const bool gate : {true, false}) {
      reference::decode_vector(gate ? expert.gate_bias : expert.up_bias, values.data());
      for (std::int64_t i = 0; i < rows; ++i) {
        bias[static_cast<std::size_t>(row_of(gate, i))] =
            static_cast<float>(values[static_cast<std::size_t>(i)]);
      }
    }
    gate_up.biases.push_back({bias.data(), DType::kF32, 2 * rows});
  }
};

void expect_bits_of_layer(const LayerSpec& spec, DType dtype, DType x, GateOrder order,
                          const RowLayout& layout, int threads) {
  constexpr std::int64_t kTokens = 203;
  const MoeWeights weights = make_weights(spec, dtype, 11, 1);
  const Batch batch = routed_batch(spec, kTokens, x);
  const BatchResult fused = run_batch(spec, weights, batch, Shares::even(kTokens, 1), DType::kF32,
                                      {.cpu = {.num_threads = threads}});

  const Fused problem(spec, weights, order);
  const GroupedGemmOptions options{.num_threads = threads};
  const int gate_up_rows = (spec.activation.gated ? 2 : 1) * spec.intermediate;
  GroupedGemm gate_up({spec.num_experts, gate_up_rows, spec.hidden, spec.activation, order},
                      problem.gate_up, options);
  GroupedGemm down({spec.num_experts, spec.hidden, spec.intermediate, {}, {}}, problem.down,
                   options);
  ASSERT_EQ(gate_up.compute(), down.compute());
  const DType value = value_type(gate_up.compute());

  const Permutation order_of_rows = permute(batch.topk_ids, spec.top_k, spec.num_experts, layout);
  const auto rows = static_cast<std::int64_t>(order_of_rows.tokens.size());
  Matrix h(rows, spec.intermediate, value), y(rows, spec.hidden, value),
      out(kTokens, spec.hidden, DType::kF32);
  GroupedInput input{.x = batch.x.view(),
                     .layout = layout,
                     .ends = order_of_rows.ends,
                     .index = order_of_rows.tokens};
  GroupedOutput output{.data = h.row(0), .dtype = value, .rows = rows, .layout = layout};
  gate_up.run(input, output);
  input.x = h.view();
  input.index = {};
  output.data = y.row(0);
  down.run(input, output);
  unpermute(y.view(), order_of_rows.positions, batch.topk_weights, spec.top_k,
            {.data = out.row(0), .dtype = DType::kF32});
  EXPECT_TRUE(out == fused.output);
}

TEST_P(UnfusedLayer, HasTheBitsOfTheFusedOne) {
  LayerSpec spec = small_spec(GetParam());
  spec.shared_intermediate = 0;  // not an expert of the operator's: its tiles are of other heights
  spec.shared_sigmoid_gate = false;
  spec.weight_on_input = false;
  spec.capacity_factor = 0;
  int i = 0;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF8E4M3}) {
    if (dtype == DType::kF8E4M3) {
      spec.hidden = 320;
      spec.intermediate = 256;
    }
    if (dtype == DType::kBF16 && !cpu::has_native_bf16()) continue;  // the layer's h is in f32
    for (const GateOrder order : kOrders) {
      if (dtype == DType::kF8E4M3 && order == GateOrder::kInterleaved) continue;
      SCOPED_TRACE(::testing::Message()
                   << to_string(dtype) << ", order " << static_cast<int>(order));
      const RowLayout layouts[] = {RowLayout::packed(), RowLayout::blocked(32),
                                   RowLayout::padded(203)};
      expect_bits_of_layer(spec, dtype, i % 2 == 0 ? DType::kF32 : DType::kBF16, order,
                           layouts[i % 3], 1 + i % 3);
      ++i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(ModelTable, UnfusedLayer, ::testing::ValuesIn(model_table()),
                         name_of_model);

}  // namespace
}  // namespace switchyard::testing
