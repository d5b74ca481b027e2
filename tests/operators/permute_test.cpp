// permute() and unpermute() against their definitions, and the layouts of rows.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "model/errors.h"
#include "operators/problem.h"
#include "support/numbers.h"
#include "switchyard/grouped_gemm.h"

namespace switchyard::testing {
namespace {

TEST(RowLayout, RowsNeededAreEnoughAndSometimesAllNeeded) {
  test::Numbers numbers(5);
  for (const RowLayout& layout : {RowLayout::packed(), RowLayout::blocked(1), RowLayout::blocked(7),
                                  RowLayout::blocked(64), RowLayout::padded(20)}) {
    for (const int experts : {1, 2, 9}) {
      for (int total = 0; total <= 20; ++total) {
        std::int64_t most = 0;
        for (int trial = 0; trial < 300; ++trial) {
          std::vector<std::int64_t> ends(static_cast<std::size_t>(experts));
          for (std::int64_t& end : ends) end = numbers.between(0, total);
          std::sort(ends.begin(), ends.end());
          ends.back() = total;
          most = std::max(most, first_rows(layout, ends).back());
        }
        const std::int64_t needed = rows_needed(layout, experts, total);
        EXPECT_LE(most, needed);
        if (experts < 9) {
          EXPECT_EQ(most, needed) << experts << " experts, " << total;
        }
      }
    }
  }
}

TEST(RowLayout, FirstRows) {
  const std::vector<std::int64_t> ends{3, 3, 8, 9};
  using Rows = std::vector<std::int64_t>;
  EXPECT_EQ(first_rows(RowLayout::packed(), ends), (Rows{0, 3, 3, 8, 9}));
  EXPECT_EQ(first_rows(RowLayout::blocked(4), ends), (Rows{0, 4, 4, 12, 16}));
  EXPECT_EQ(first_rows(RowLayout::padded(5), ends), (Rows{0, 5, 10, 15, 20}));
  EXPECT_ERROR(first_rows(RowLayout::padded(4), ends), kInvalidArgument, "expert 2 has 5 rows",
               "room for 4");
  EXPECT_ERROR(first_rows({}, std::vector<std::int64_t>{3, 2}), kInvalidArgument, "ends[1] is 2",
               "never decrease");
  EXPECT_ERROR(first_rows({}, std::vector<std::int64_t>{-1, 2}), kInvalidArgument, "ends[0] is -1");
  EXPECT_ERROR(rows_needed(RowLayout::blocked(0), 3, 4), kInvalidArgument, "blocked with size 0");
  EXPECT_ERROR(rows_needed(RowLayout::padded(-3), 3, 4), kInvalidArgument, "padded with size -3");
  EXPECT_ERROR(rows_needed({RowLayout::Kind::kPacked, 3}, 3, 4), kInvalidArgument,
               "packed, but has size 3");
  EXPECT_ERROR(rows_needed({static_cast<RowLayout::Kind>(7), 3}, 3, 4), kInvalidArgument, "kind 7");
  EXPECT_ERROR(rows_needed({}, -1, 4), kInvalidArgument, "num_experts is -1");
}

// Every slot by its definition: the order of (expert, token, k).
template <typename Id>
void expect_permuted(const std::vector<Id>& ids, int top_k, int experts, const RowLayout& layout) {
  const Permutation p = permute(ids, top_k, experts, layout);
  ASSERT_EQ(p.ends.size(), static_cast<std::size_t>(experts));
  ASSERT_EQ(p.positions.size(), ids.size());
  EXPECT_EQ(p.layout, layout);
  const std::vector<std::int64_t> ends(p.ends.begin(), p.ends.end());
  const std::vector<std::int64_t> first = first_rows(layout, ends);
  ASSERT_EQ(static_cast<std::int64_t>(p.tokens.size()), first.back());
  std::vector<std::int32_t> tokens(p.tokens.size(), -1), positions(ids.size(), -1);
  std::int64_t end = 0;
  for (int e = 0; e < experts; ++e) {
    std::int64_t row = first[static_cast<std::size_t>(e)];
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] != static_cast<Id>(e)) continue;
      tokens[static_cast<std::size_t>(row)] =
          static_cast<std::int32_t>(i / static_cast<std::size_t>(top_k));
      positions[i] = static_cast<std::int32_t>(row++);
      ++end;
    }
    EXPECT_EQ(p.ends[static_cast<std::size_t>(e)], end);
  }
  EXPECT_EQ(p.tokens, tokens);
  EXPECT_EQ(p.positions, positions);
}

TEST(Permute, ByItsDefinition) {
  test::Numbers numbers(3);
  for (const int experts : {1, 3, 32, 33, 1024}) {
    for (const int top_k : {1, 2, 5, 20}) {
      for (const int tokens : {0, 1, 70}) {
        std::vector<std::int64_t> ids;
        for (int i = 0; i < tokens * top_k; ++i) {
          // Some have no expert, whether they say -1, something smaller or something large.
          ids.push_back(numbers.between(-2, experts + experts / 8));
        }
        if (!ids.empty()) ids[0] = std::int64_t{1} << 40;
        for (const RowLayout& layout :
             {RowLayout::packed(), RowLayout::blocked(8), RowLayout::padded(70 * 20)}) {
          expect_permuted(ids, top_k, experts, layout);
          std::vector<std::int32_t> narrow(ids.begin(), ids.end());
          expect_permuted(narrow, top_k, experts, layout);
        }
      }
    }
  }
}

TEST(Permute, Refusals) {
  const std::vector<std::int32_t> ids{0, 1, 1, 1};
  const std::vector<float> floats(4);
  EXPECT_ERROR(permute(ids, 0, 2), kInvalidArgument, "top_k is 0");
  EXPECT_ERROR(permute(ids, 3, 2), kShapeMismatch, "4 elements", "top_k, 3");
  EXPECT_ERROR(permute(ids, 2, 0), kInvalidArgument, "num_experts is 0", "1024");
  EXPECT_ERROR(permute(ids, 2, 1025), kInvalidArgument, "num_experts is 1025");
  EXPECT_ERROR(permute(floats, 2, 2), kDTypeMismatch, "ids are f32", "i32 or i64");
  EXPECT_ERROR(permute(SlotView(nullptr, DType::kI32, 4), 2, 2), kInvalidArgument, "ids is null");
  EXPECT_ERROR(permute(ids, 2, 2, RowLayout::padded(2)), kInvalidArgument, "expert 1 has 3 rows");
  EXPECT_ERROR(permute(ids, 2, 2, RowLayout::blocked(0)), kInvalidArgument, "size 0");
  EXPECT_ERROR(permute(ids, 2, 1024, RowLayout::padded(1 << 30)), kInvalidArgument,
               "an i32 numbers up to 2147483647");
}

TEST(Unpermute, AgainstFp64) {
  test::Numbers numbers(9);
  constexpr DType kTypes[] = {DType::kBF16, DType::kF16, DType::kF32};
  for (const DType in : kTypes) {
    for (const DType out : kTypes) {
      for (const int hidden : {1, 16, 77}) {
        for (const int top_k : {1, 2, 30}) {
          const int tokens = 23, num_rows = 60;
          SCOPED_TRACE(::testing::Message() << to_string(in) << " to " << to_string(out) << ", H "
                                            << hidden << ", K " << top_k);
          Matrix rows = Matrix::random(num_rows, hidden, in, 1);
          // Rows that no slot has may hold anything.
          for (int i = 0; i < hidden; ++i) rows.set(std::int64_t{7} * hidden + i, NAN);
          const Matrix before = Matrix::random(tokens, 2 * hidden, out, 2);
          std::vector<std::int32_t> positions;
          std::vector<float> weights;
          std::vector<std::uint16_t> narrow;
          for (int i = 0; i < tokens * top_k; ++i) {
            const int row = numbers.between(-4, num_rows - 1);
            positions.push_back(row < 0 || row == 7 ? -1 : row);
            narrow.push_back(f32_to_bf16(static_cast<float>(numbers.between(1, 100)) / 77));
            weights.push_back(bf16_to_f32(narrow.back()));
          }
          for (const bool accumulate : {false, true}) {
            Matrix wide = before, with_narrow = before;
            ForwardOutput output{.data = wide.row(0),
                                 .dtype = out,
                                 .row_stride = 2 * hidden,
                                 .scale = 1.5f,
                                 .accumulate = accumulate};
            unpermute(rows.view(), positions, weights, top_k, output);
            output.data = with_narrow.row(0);
            unpermute(rows.view(), positions, {narrow.data(), DType::kBF16, narrow.size()}, top_k,
                      output);
            EXPECT_TRUE(with_narrow == wide);
            std::vector<float> actual, plain;
            std::vector<double> exact;
            for (int t = 0; t < tokens; ++t) {
              for (int i = 0; i < 2 * hidden; ++i) {
                const std::int64_t at = std::int64_t{t} * 2 * hidden + i;
                if (i >= hidden) {
                  ASSERT_EQ(wide.get(at), before.get(at)) << "between rows";
                  continue;
                }
                double sum = 0;
                float single = 0;
                for (int k = 0; k < top_k; ++k) {
                  const auto slot = static_cast<std::size_t>(t * top_k + k);
                  if (positions[slot] < 0) continue;
                  const float value = rows.get(std::int64_t{positions[slot]} * hidden + i);
                  sum += double{weights[slot]} * value;
                  single += weights[slot] * value;
                }
                exact.push_back(1.5 * sum + (accumulate ? double{before.get(at)} : 0.0));
                plain.push_back(rounded(1.5f * single + (accumulate ? before.get(at) : 0.0f), out));
                actual.push_back(wide.get(at));
              }
            }
            EXPECT_LE(reference::relative_error(actual, exact),
                      2 * reference::relative_error(plain, exact) + 0x1p-23);
          }
        }
      }
    }
  }
}

TEST(Unpermute, WithoutWeightsSums) {
  const Matrix rows = Matrix::random(4, 3, DType::kF32, 1);
  Matrix out(2, 3, DType::kF32);
  const std::vector<std::int32_t> positions{2, 0, -1, -1};
  const ForwardOutput output{.data = out.row(0), .dtype = DType::kF32};
  unpermute(rows.view(), positions, {}, 2, output);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(out.get(i), rows.get(6 + i) + rows.get(i));
    EXPECT_EQ(out.get(3 + i), 0);
  }
  unpermute(rows.view(), {}, {}, 2, {});  // no tokens
}

TEST(Unpermute, Refusals) {
  const Matrix rows = Matrix::random(4, 3, DType::kF32, 1);
  Matrix out(2, 3, DType::kF32);
  const std::vector<std::int32_t> positions{0, 1, 2, 3};
  const std::vector<std::int64_t> wide{0, 1, 2, 3};
  const std::vector<float> weights(4), few(3);
  const ForwardOutput good{.data = out.row(0), .dtype = DType::kF32};
  const auto run = [&](auto&& change) {
    MatrixView r = rows.view();
    SlotView p = positions, w = weights;
    ForwardOutput o = good;
    int k = 2;
    change(r, p, w, o, k);
    unpermute(r, p, w, k, o);
  };
  using V = MatrixView;
  using S = SlotView;
  using O = ForwardOutput;
  run([](V&, S&, S&, O&, int&) {});
  EXPECT_ERROR(run([](V&, S&, S&, O&, int& k) { k = 0; }), kInvalidArgument, "top_k is 0");
  EXPECT_ERROR(run([](V&, S&, S&, O&, int& k) { k = 3; }), kShapeMismatch, "top_k, 3");
  EXPECT_ERROR(run([&](V&, S& p, S&, O&, int&) { p = wide; }), kDTypeMismatch, "positions are i64");
  EXPECT_ERROR(run([&](V&, S&, S& w, O&, int&) { w = positions; }), kDTypeMismatch,
               "weights are i32");
  EXPECT_ERROR(run([&](V&, S&, S& w, O&, int&) { w = few; }), kShapeMismatch,
               "3 weights for 4 positions");
  EXPECT_ERROR(run([](V& r, S&, S&, O&, int&) { r.dtype = DType::kI32; }), kDTypeMismatch,
               "rows are i32");
  EXPECT_ERROR(run([](V&, S&, S&, O& o, int&) { o.dtype = DType::kF8E4M3; }), kDTypeMismatch,
               "out is f8_e4m3");
  EXPECT_ERROR(run([](V& r, S&, S&, O&, int&) { r.cols = 0; }), kShapeMismatch, "[4, 0]");
  EXPECT_ERROR(run([](V& r, S&, S&, O&, int&) { r.col_stride = 2; }), kInvalidArgument,
               "contiguous");
  EXPECT_ERROR(run([](V& r, S&, S&, O&, int&) { r.rows = 3; }), kInvalidArgument,
               "positions[3] is 3", "0 to 2");
  EXPECT_ERROR(run([](V&, S&, S&, O& o, int&) { o.data = nullptr; }), kInvalidArgument,
               "output is null");
  EXPECT_ERROR(run([](V&, S&, S&, O& o, int&) { o.row_stride = 2; }), kInvalidArgument,
               "2 elements apart");
  EXPECT_ERROR(run([](V&, S&, S&, O& o, int&) { o.scale = NAN; }), kInvalidArgument,
               "scale is nan");
  std::vector<float> kept(4);
  EXPECT_ERROR(run([&](V&, S&, S&, O& o, int&) { o.topk_weights = kept; }), kInvalidArgument,
               "topk_weights");
  const std::vector<std::int32_t> below{0, -2, 0, 0};
  EXPECT_ERROR(run([&](V&, S& p, S&, O&, int&) { p = below; }), kInvalidArgument,
               "positions[1] is -2");
}

// Calls for a GPU that are refused before they reach one.
TEST(OnDevice, Refusals) {
  std::vector<std::int32_t> numbers(40);
  std::vector<float> floats(40);
  DevicePermutation out;
  out.ends = out.positions = out.tokens = numbers.data();
  out.rows = 4;
  out.workspace = floats.data();
  const SlotView ids(numbers.data(), 4);
  EXPECT_ERROR(permute(ids, 3, 2, out, {}), kShapeMismatch, "top_k, 3");
  EXPECT_ERROR(permute(ids, 2, 1025, out, {}), kInvalidArgument, "1025");
  EXPECT_ERROR(permute(SlotView(floats.data(), 4), 2, 2, out, {}), kDTypeMismatch, "ids are f32");
  EXPECT_ERROR(permute(ids, 2, 2, out, {}), kInvalidArgument, "workspace has 0 bytes",
               "permute_workspace_bytes()");
  out.workspace_bytes = permute_workspace_bytes(4, 2);
  EXPECT_GE(out.workspace_bytes, 2 * sizeof(std::int32_t));
  out.layout = RowLayout::blocked(8);
  EXPECT_ERROR(permute(ids, 2, 2, out, {}), kShapeMismatch, "tokens has 4 entries", "need 16");
  out.layout = {};
  out.ends = nullptr;
  EXPECT_ERROR(permute(ids, 2, 2, out, {}), kInvalidArgument, "ends is null");
  EXPECT_ERROR(permute_workspace_bytes(4, 0), kInvalidArgument, "num_experts is 0");

  ForwardOutput sums;
  const MatrixView rows{floats.data(), DType::kF32, 4, 10, 10};
  EXPECT_ERROR(unpermute(rows, ids, {}, 2, sums, {}), kInvalidArgument, "output is null");
  EXPECT_ERROR(unpermute(rows, ids, SlotView(floats.data(), 3), 2, sums, {}), kShapeMismatch,
               "3 weights for 4 positions");

  RoutingSpec routing;
  const std::span<std::int32_t> chosen(numbers.data(), 8);
  const std::span<float> weights(floats.data(), 8);
  EXPECT_ERROR(topk(routing, 3, rows, {}, chosen, weights, {}), kShapeMismatch,
               "ids has 8 elements; pass 12");
  EXPECT_ERROR(topk(routing, 11, rows, {}, chosen, weights, {}), kInvalidArgument, "11");
  routing.has_correction_bias = true;
  EXPECT_ERROR(topk(routing, 2, rows, {}, chosen, weights, {}), kShapeMismatch,
               "correction_bias has 0 elements; pass 10");
  routing = {};
  routing.method = RoutingMethod::kHash;
  EXPECT_ERROR(topk(routing, 2, rows, {}, chosen, weights, {}), kUnsupported, "hash routing");
}

}  // namespace
}  // namespace switchyard::testing
