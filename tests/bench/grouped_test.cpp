// The points of --suite grouped, its draws of rows, and the comparison with fp64.
#include "bench/grouped.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <set>
#include <string>

#include "bench/grouped_operands.h"
#include "switchyard/grouped_gemm.h"

namespace switchyard::bench {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::Ge;
using ::testing::Le;

TEST(GroupedSuite, HasTheShapesThatRivalsPublish) {
  const std::vector<GroupedPoint> points = grouped_suite();
  for (const std::int64_t rows : {4, 16, 64, 128, 512, 2048}) {
    EXPECT_THAT(points, Contains(GroupedPoint{32, 4096, 7168, rows, false, {}}));
    EXPECT_THAT(points, Contains(GroupedPoint{32, 7168, 2048, rows, false, {}}));
  }
  for (const std::int64_t rows : {1, 8, 64, 512}) {
    EXPECT_THAT(points, Contains(GroupedPoint{64, 2048, 2048, rows, false, {}}));
  }
  EXPECT_THAT(points, Contains(GroupedPoint{4, 4096, 7168, 8192, false, {}}));
  EXPECT_THAT(points, Contains(Field(&GroupedPoint::swiglu, true)));
  for (const GroupedPoint& point : points) {
    EXPECT_EQ(point.n % 16, 0);
    EXPECT_EQ(point.k % 8, 0);
  }
  for (auto a = points.begin(); a != points.end(); ++a) {
    EXPECT_EQ(std::count(points.begin(), points.end(), *a), 1);
  }
}

TEST(GroupedSuite, RowsAreEqualOrDrawn) {
  const GroupedPoint equal{3, 64, 64, 5, false, {}};
  EXPECT_THAT(ends_of(equal, 0), ElementsAre(5, 10, 15));
  const std::vector<GroupedPoint> drawn =
      with_balancedness({{32, 64, 64, 16, false, {}}}, {1, 0.7});
  ASSERT_EQ(drawn.size(), 2u);
  for (const GroupedPoint& point : drawn) {
    const std::vector<std::int32_t> ends = ends_of(point, 7);
    EXPECT_EQ(ends, ends_of(point, 7));
    EXPECT_NE(ends, ends_of(point, 8));
    EXPECT_TRUE(std::is_sorted(ends.begin(), ends.end()));
    EXPECT_THAT(ends.back(), AllOf(Ge(32 * 16 - 8), Le(32 * 16)));
  }
  const auto most = [](const std::vector<std::int32_t>& ends) {
    std::int32_t largest = ends[0];
    for (std::size_t e = 1; e < ends.size(); ++e) {
      largest = std::max(largest, ends[e] - ends[e - 1]);
    }
    return largest;
  };
  EXPECT_GT(most(ends_of(drawn[1], 7)), most(ends_of(drawn[0], 7)));
}

TEST(GroupedOperands, OfFourBitsHaveAScaleForThirtyTwoColumnsAndRowsInBf16) {
  for (const auto& [dtype, scale_bytes] :
       {std::pair(DType::kF4E2M1, 1), std::pair(DType::kU4, 2)}) {
    const GroupedOperands operands(3, 80, 96, 4, dtype, 5);
    const std::vector<MatrixView> matrices = operands.matrices(operands.here());
    EXPECT_EQ(operands.matrix_bytes(), 80u * 48 + 80u * 3 * static_cast<unsigned>(scale_bytes));
    std::set<std::string> different;
    for (const MatrixView& view : matrices) {
      different.emplace(static_cast<const char*>(view.data), 80 * 48);
      EXPECT_EQ(view.scale_cols, 32);
    }
    EXPECT_EQ(different.size(), 3u);
    EXPECT_EQ(operands.first_rows(operands.here(), 2).dtype, DType::kBF16);
    EXPECT_EQ(operands.output_dtype(), DType::kBF16);
    // The operator takes them, and computes as well as a straightforward program.
    GroupedGemm gemm({.num_experts = 3, .n = 80, .k = 96}, {.matrices = matrices},
                     {.backend = Backend::kCpu, .max_rows = 4});
    const std::vector<std::int32_t> ends = {1, 1, 4};
    std::vector<std::byte> output(4 * 80 * 2);
    gemm.run({.x = operands.first_rows(operands.here(), 4), .ends = ends},
             {.data = output.data(), .dtype = DType::kBF16});
    const GroupedAccuracy accuracy = check_rows(operands, ends, false, output.data());
    EXPECT_GT(accuracy.error, 0);
    EXPECT_LE(accuracy.error, accuracy.bound);
  }
}

TEST(GroupedOperands, AreAllDifferentAndOfTheirType) {
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16, DType::kF8E4M3}) {
    const GroupedOperands operands(3, 144, 200, 4, dtype, 5);
    const std::vector<MatrixView> matrices = operands.matrices(operands.here());
    ASSERT_EQ(matrices.size(), 3u);
    const std::size_t matrix = 144 * 200 * size_of(dtype);
    std::set<std::string> different;
    for (const MatrixView& view : matrices) {
      different.emplace(static_cast<const char*>(view.data), matrix);
    }
    EXPECT_EQ(different.size(), 3u);
    const bool fp8 = dtype == DType::kF8E4M3;
    EXPECT_EQ(operands.matrix_bytes(), matrix + (fp8 ? 2 * 2 * sizeof(float) : 0));
    EXPECT_EQ(matrices[2].scale != nullptr, fp8);
    EXPECT_EQ(operands.first_rows(operands.here(), 2).rows, 2);
  }
}

// The output of GroupedGemm passes, and one with a wrong row or a wrong expert's matrix does not.
TEST(GroupedOperands, TheCheckFindsWhatIsWrong) {
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16, DType::kF8E4M3}) {
    for (const bool swiglu : {false, true}) {
      const GroupedOperands operands(4, 160, 264, 20, dtype, 1);
      const std::vector<std::int32_t> ends = {5, 5, 19, 20};
      GroupedGemmSpec spec{.num_experts = 4, .n = 160, .k = 264};
      if (swiglu) spec.epilogue = Activation();
      GroupedGemm gemm(spec, {.matrices = operands.matrices(operands.here())});
      const std::size_t row =
          static_cast<std::size_t>(spec.output_columns()) * size_of(operands.output_dtype());
      std::vector<std::byte> out(20 * row);
      GroupedInput input{.x = operands.first_rows(operands.here(), 20), .ends = ends};
      const GroupedOutput output{.data = out.data(), .dtype = operands.output_dtype()};
      gemm.run(input, output);
      const GroupedAccuracy right = check_rows(operands, ends, swiglu, out.data());
      EXPECT_LE(right.error, right.bound);
      EXPECT_GT(right.error, 0);

      std::vector<std::byte> wrong = out;
      std::copy(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(row),
                wrong.end() - static_cast<std::ptrdiff_t>(row));
      const GroupedAccuracy found = check_rows(operands, ends, swiglu, wrong.data());
      EXPECT_GT(found.error, 10 * found.bound);

      const std::vector<std::int32_t> others = {4, 5, 19, 20};
      input.ends = others;
      gemm.run(input, output);
      const GroupedAccuracy shifted = check_rows(operands, ends, swiglu, out.data());
      EXPECT_GT(shifted.error, 10 * shifted.bound);
    }
  }
}

}  // namespace
}  // namespace switchyard::bench
