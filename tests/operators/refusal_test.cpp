// What GroupedGemm refuses, and with which words.
#include <gtest/gtest.h>

#include <functional>

#include "gpu/device.h"
#include "model/errors.h"
#include "support/layers.h"
#include "switchyard/grouped_gemm.h"

namespace switchyard::testing {
namespace {

// A good problem, of which a test spoils one thing.
struct Good {
  Good() {
    weights.matrices.assign(3, {w.row(0), DType::kBF16, 8, 4, 4});
    input.x = x.view();
    input.ends = ends;
    output.data = y.row(0);
    output.rows = 6;
  }
  void make_fp8(int scale_rows, int scale_cols) {
    for (MatrixView& m : weights.matrices) {
      m.dtype = DType::kF8E4M3;
      m.scale = scale.data();
      m.scale_rows = scale_rows;
      m.scale_cols = scale_cols;
      m.scale_stride = 1;
    }
  }
  void make() const { GroupedGemm(spec, weights, options); }
  void run() const {
    GroupedGemm gemm(spec, weights, options);
    gemm.run(input, output);
  }

  Matrix w = Matrix::random(8, 4, DType::kBF16, 1);
  Matrix x = Matrix::random(6, 4, DType::kBF16, 2);
  Matrix y{6, 8, DType::kBF16};
  std::vector<float> bias = std::vector<float>(8), scale = std::vector<float>(8, 1.0f);
  std::vector<std::int32_t> ends{2, 2, 6}, index{0, 1, 2, 3, 4, 5};
  GroupedGemmSpec spec{3, 8, 4, {}, {}};
  GroupedGemmWeights weights;
  GroupedGemmOptions options{.num_threads = 1};
  GroupedInput input;
  GroupedOutput output;
};

using Spoil = std::function<void(Good&)>;

void make(const Spoil& spoil) {
  Good good;
  spoil(good);
  good.make();
}
void run(const Spoil& spoil) {
  Good good;
  spoil(good);
  good.run();
}

// Making or running a spoiled problem ends with this error, whose text has these parts.
using Parts = std::initializer_list<const char*>;
void cannot_make(ErrorCode code, Parts parts, const Spoil& spoil) {
  test::expect_error([&] { make(spoil); }, code, parts);
}
void cannot_run(ErrorCode code, Parts parts, const Spoil& spoil) {
  test::expect_error([&] { run(spoil); }, code, parts);
}

constexpr auto kInvalid = ErrorCode::kInvalidArgument;
constexpr auto kShape = ErrorCode::kShapeMismatch;
constexpr auto kType = ErrorCode::kDTypeMismatch;

TEST(GroupedGemmRefusals, TheGoodProblemRuns) {
  run([](Good&) {});
  run([](Good& g) { g.output.index = g.input.index = g.index; });
}

TEST(GroupedGemmRefusals, Specs) {
  cannot_make(kInvalid, {"num_experts is 0"}, [](Good& g) { g.spec.num_experts = 0; });
  cannot_make(kInvalid, {"[1, 1024]"}, [](Good& g) { g.spec.num_experts = 1025; });
  cannot_make(kInvalid, {"n is 0"}, [](Good& g) { g.spec.n = 0; });
  cannot_make(kInvalid, {"k is -4"}, [](Good& g) { g.spec.k = -4; });
  cannot_make(kInvalid, {"order is 9"}, [](Good& g) { g.spec.order = static_cast<GateOrder>(9); });
  cannot_make(kInvalid, {"n is 7", "even"}, [](Good& g) {
    g.spec.n = 7;
    g.spec.epilogue = Activation();
  });
  cannot_make(kInvalid, {"activation.alpha is -1"}, [](Good& g) {
    g.spec.epilogue = Activation();
    g.spec.epilogue->alpha = -1;
  });
}

TEST(GroupedGemmRefusals, Weights) {
  cannot_make(kShape, {"2 matrices for 3 experts"}, [](Good& g) { g.weights.matrices.pop_back(); });
  cannot_make(ErrorCode::kMissingTensor, {"matrices[1] is empty", "[8, 4]"},
              [](Good& g) { g.weights.matrices[1] = {}; });
  cannot_make(kShape, {"matrices[2] is [9, 4]", "[8, 4]"},
              [](Good& g) { g.weights.matrices[2].rows = 9; });
  cannot_make(kType, {"matrices[2] is i32"},
              [](Good& g) { g.weights.matrices[2].dtype = DType::kI32; });
  cannot_make(kType, {"matrices[2] is f16 where matrices[0] is bf16"},
              [](Good& g) { g.weights.matrices[2].dtype = DType::kF16; });
  cannot_make(ErrorCode::kMissingTensor, {"matrices[0] is f8_e4m3 without scales"},
              [](Good& g) { g.weights.matrices[0].dtype = DType::kF8E4M3; });
  cannot_make(kType, {"matrices[1] is f8_e4m3 with a scale per 1 x 4", "matrices[0]"},
              [&](Good& g) {
                g.make_fp8(8, 4);
                g.weights.matrices[1].scale_rows = 1;
              });
  cannot_make(kShape, {"0 x 4"}, [&](Good& g) { g.make_fp8(0, 4); });
  cannot_make(ErrorCode::kUnsupported, {"matrices[0]", "2 x 2", "compute in bf16"}, [&](Good& g) {
    g.make_fp8(2, 2);
    g.options.compute = DType::kF8E4M3;
  });
  const auto biased = [](Good& g) { g.weights.biases.assign(3, {g.bias.data(), DType::kF32, 8}); };
  make(biased);
  cannot_make(kShape, {"2 biases for 3 experts"}, [&](Good& g) {
    biased(g);
    g.weights.biases.pop_back();
  });
  cannot_make(kShape, {"biases[2] has 4 values"}, [&](Good& g) {
    biased(g);
    g.weights.biases[2].size = 4;
  });
  cannot_make(kType, {"biases[0] is i64"}, [&](Good& g) {
    biased(g);
    g.weights.biases[0].dtype = DType::kI64;
  });
}

TEST(GroupedGemmRefusals, Options) {
  cannot_make(kInvalid, {"num_threads is 2, but the backend is cuda"}, [](Good& g) {
    g.options.backend = Backend::kCuda;
    g.options.num_threads = 2;
  });
  if (gpu::device_count() == 0) {
    cannot_make(ErrorCode::kUnsupported, {"use the CPU"}, [](Good& g) {
      g.options.backend = Backend::kCuda;
      g.options.num_threads = 0;
    });
  }
  cannot_make(kInvalid, {"backend is 5"},
              [](Good& g) { g.options.backend = static_cast<Backend>(5); });
  cannot_make(kInvalid, {"max_rows is 0"}, [](Good& g) { g.options.max_rows = 0; });
  cannot_make(kInvalid, {"num_threads is -1"}, [](Good& g) { g.options.num_threads = -1; });
  cannot_make(kInvalid, {"device is 0"}, [](Good& g) { g.options.device = 0; });
  cannot_make(kInvalid, {"reserved_sms is 4"}, [](Good& g) { g.options.reserved_sms = 4; });
  const auto scheduled = [](const GroupedSchedule& schedule) {
    make([&](Good& g) { g.options.schedule = schedule; });
  };
  scheduled({});
  EXPECT_ERROR(scheduled({.tile_rows = 64}), kInvalid, "schedule.tile_rows is 64, but the backend",
               "leave it to the rule");
  EXPECT_ERROR(scheduled({.stages = 4}), kInvalid, "schedule.stages is 4");
  EXPECT_ERROR(scheduled({.paired = false}), kInvalid, "schedule.paired is false");
  EXPECT_ERROR(scheduled({.band = 1}), kInvalid, "schedule.band is 1");
  EXPECT_ERROR(scheduled({.splits = 1}), kInvalid, "schedule.splits is 1");
  cannot_make(ErrorCode::kUnsupported, {"compute type f16", "backend is cpu", "use f32"},
              [](Good& g) { g.options.compute = DType::kF16; });
  cannot_make(kInvalid, {"compute type u8"}, [](Good& g) { g.options.compute = DType::kU8; });
  cannot_make(kInvalid, {"matrices[0] is bf16"},
              [](Good& g) { g.options.compute = DType::kF8E4M3; });
}

TEST(GroupedGemmRefusals, Inputs) {
  cannot_run(kShape, {"x is [6, 5]", "4 columns"}, [](Good& g) { g.input.x.cols = 5; });
  cannot_run(kShape, {"x is [-1, 4]"}, [](Good& g) { g.input.x.rows = -1; });
  cannot_run(kInvalid, {"x has 2147483648 rows", "fewer at a time"},
             [](Good& g) { g.input.x.rows = std::int64_t{1} << 31; });
  cannot_run(kInvalid, {"x is null"}, [](Good& g) { g.input.x.data = nullptr; });
  cannot_run(kInvalid, {"col_stride of 2"}, [](Good& g) { g.input.x.col_stride = 2; });
  cannot_run(kType, {"x is u8"}, [](Good& g) { g.input.x.dtype = DType::kU8; });
  cannot_run(kInvalid, {"x is f8_e4m3", "computes in bf16"},
             [](Good& g) { g.input.x.dtype = DType::kF8E4M3; });
  cannot_run(kShape, {"x has 5 rows", "row 5"}, [](Good& g) { g.input.x.rows = 5; });
  cannot_run(kShape, {"x has 6 rows", "row 7"},
             [](Good& g) { g.input.layout = RowLayout::blocked(4); });
  cannot_run(kInvalid, {"expert 2 has 4 rows", "room for 3"},
             [](Good& g) { g.input.layout = RowLayout::padded(3); });
  cannot_run(kInvalid, {"the input's layout is blocked with size 0"},
             [](Good& g) { g.input.layout = RowLayout::blocked(0); });
  cannot_run(kShape, {"ends has 2 elements", "3 experts"},
             [](Good& g) { g.input.ends = g.input.ends.first(2); });
  cannot_run(kType, {"ends is f32"}, [](Good& g) {
    g.input.ends = {g.ends.data(), DType::kF32, 3};
  });
  cannot_run(kInvalid, {"ends is null"}, [](Good& g) { g.input.ends = {nullptr, DType::kI32, 3}; });
  cannot_run(kInvalid, {"ends[1] is 1", "2 rows"}, [](Good& g) { g.ends[1] = 1; });
  cannot_run(kInvalid, {"ends[0] is -1"}, [](Good& g) { g.ends[0] = -1; });
  cannot_run(ErrorCode::kCapacityExceeded, {"6 rows", "at most 5", "max_rows"},
             [](Good& g) { g.options.max_rows = 5; });
  cannot_run(kType, {"the input's index is i64"}, [](Good& g) {
    g.input.index = {g.index.data(), DType::kI64, 6};
  });
  cannot_run(kShape, {"the input's index has 5 entries"},
             [](Good& g) { g.input.index = SlotView(g.index).first(5); });
  cannot_run(kInvalid, {"index[4] is 6, of expert 2", "rows 0 to 5"}, [](Good& g) {
    g.index[4] = 6;
    g.input.index = g.index;
  });
  cannot_run(kInvalid, {"index[0] is -1, of expert 0"}, [](Good& g) {
    g.index[0] = -1;
    g.input.index = g.index;
  });
  int stream = 0;
  cannot_run(kInvalid, {"a stream is given"}, [&](Good& g) { g.input.stream = &stream; });
}

TEST(GroupedGemmRefusals, Fp8Inputs) {
  const auto fp8 = [](Good& g) {
    g.make_fp8(8, 4);
    g.input.x.dtype = DType::kF8E4M3;
    g.input.x.scale = g.scale.data();
    g.input.x.scale_rows = 1;
    g.input.x.scale_cols = 128;
    g.input.x.scale_stride = 1;
  };
  run(fp8);
  cannot_run(kInvalid, {"scale is null", "[6, 1] scales"}, [&](Good& g) {
    fp8(g);
    g.input.x.scale = nullptr;
  });
  cannot_run(kType, {"x is f8_e4m3 with scales of f8_e8m0", "convert them to f32"}, [&](Good& g) {
    fp8(g);
    g.input.x.scale_dtype = DType::kF8E8M0;
  });
  cannot_run(kInvalid, {"a scale per 1 x 64", "scale_cols 128"}, [&](Good& g) {
    fp8(g);
    g.input.x.scale_cols = 64;
  });
  cannot_run(kInvalid, {"stride 0"}, [&](Good& g) {
    fp8(g);
    g.input.x.scale_stride = 0;
  });
}

TEST(GroupedGemmRefusals, Outputs) {
  cannot_run(kInvalid, {"the output is null"}, [](Good& g) { g.output.data = nullptr; });
  cannot_run(kType, {"the output is f8_e4m3"}, [](Good& g) { g.output.dtype = DType::kF8E4M3; });
  cannot_run(kInvalid, {"row_stride is 7", "a row has 8"},
             [](Good& g) { g.output.row_stride = 7; });
  cannot_run(kShape, {"the output has 5 rows", "row 5"}, [](Good& g) { g.output.rows = 5; });
  cannot_run(kInvalid, {"the output has -2 rows"}, [](Good& g) { g.output.rows = -2; });
  cannot_run(kShape, {"the output has 6 rows", "row 7"},
             [](Good& g) { g.output.layout = RowLayout::blocked(4); });
  cannot_run(kInvalid, {"expert 2 has 4 rows"},
             [](Good& g) { g.output.layout = RowLayout::padded(3); });
  cannot_run(kInvalid, {"the output's layout is padded with size 0"},
             [](Good& g) { g.output.layout = RowLayout::padded(0); });
  cannot_run(kType, {"the output's index is i64"}, [](Good& g) {
    g.output.index = {g.index.data(), DType::kI64, 6};
  });
  cannot_run(kShape, {"the output's index has 5 entries"},
             [](Good& g) { g.output.index = SlotView(g.index).first(5); });
  cannot_run(kInvalid, {"both an index and a layout"}, [](Good& g) {
    g.output.index = g.index;
    g.output.layout = RowLayout::padded(6);
  });
  cannot_run(kInvalid, {"index[3] is 6", "rows 0 to 5"}, [](Good& g) {
    g.index[3] = 6;
    g.output.index = g.index;
  });
  cannot_run(kInvalid, {"index[3] is -2", "-1 for none"}, [](Good& g) {
    g.index[3] = -2;
    g.output.index = g.index;
    g.output.rows = -1;
  });
  cannot_run(kInvalid, {"row 1 twice"}, [](Good& g) {
    g.index[3] = 1;
    g.output.index = g.index;
  });
  cannot_run(kType, {"row_weights is i32"}, [](Good& g) { g.output.weights = g.index; });
  cannot_run(kShape, {"row_weights has 5 entries", "need 6"},
             [](Good& g) { g.output.weights = SlotView(g.bias).first(5); });
}

TEST(GroupedGemmRefusals, Products) {
  cannot_run(kInvalid, {"no epilogue"}, [](Good& g) { g.output.products = g.y.row(0); });
  std::vector<std::uint16_t> products(6 * 8);
  const auto with_products = [&](Good& g) {
    g.spec.epilogue = Activation();
    g.output.products = products.data();
  };
  run(with_products);
  cannot_run(kInvalid, {"the output has an index"}, [&](Good& g) {
    with_products(g);
    g.output.index = g.index;
  });
  cannot_run(kInvalid, {"products_stride is 7", "a row has 8"}, [&](Good& g) {
    with_products(g);
    g.output.products_stride = 7;
  });
}

// A call that is refused has written nothing.
TEST(GroupedGemmRefusals, LeaveTheOutputAlone) {
  Good good;
  const Matrix before = good.y;
  good.index[5] = 9;
  good.output.index = good.index;
  EXPECT_ERROR(good.run(), kInvalid, "index[5] is 9");
  EXPECT_TRUE(good.y == before);
}

}  // namespace
}  // namespace switchyard::testing
