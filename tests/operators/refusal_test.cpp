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

constexpr auto kInvalid = ErrorCode::kInvalidArgument;
constexpr auto kShape = ErrorCode::kShapeMismatch;
constexpr auto kType = ErrorCode::kDTypeMismatch;

TEST(GroupedGemmRefusals, TheGoodProblemRuns) {
  run([](Good&) {});
  run([](Good& g) { g.output.index = g.input.index = g.index; });
}

TEST(GroupedGemmRefusals, Specs) {
  EXPECT_ERROR(make([](Good& g) { g.spec.num_experts = 0; }), kInvalid, "num_experts is 0");
  EXPECT_ERROR(make([](Good& g) { g.spec.num_experts = 1025; }), kInvalid, "[1, 1024]");
  EXPECT_ERROR(make([](Good& g) { g.spec.n = 0; }), kInvalid, "n is 0");
  EXPECT_ERROR(make([](Good& g) { g.spec.k = -4; }), kInvalid, "k is -4");
  EXPECT_ERROR(make([](Good& g) { g.spec.order = static_cast<GateOrder>(9); }), kInvalid,
               "order is 9");
  EXPECT_ERROR(make([](Good& g) {
                 g.spec.n = 7;
                 g.spec.epilogue = Activation();
               }),
               kInvalid, "n is 7", "even");
  EXPECT_ERROR(make([](Good& g) {
                 g.spec.epilogue = Activation();
                 g.spec.epilogue->alpha = -1;
               }),
               kInvalid, "activation.alpha is -1");
}

TEST(GroupedGemmRefusals, Weights) {
  EXPECT_ERROR(make([](Good& g) { g.weights.matrices.pop_back(); }), kShape,
               "2 matrices for 3 experts");
  EXPECT_ERROR(make([](Good& g) { g.weights.matrices[1] = {}; }), ErrorCode::kMissingTensor,
               "matrices[1] is empty", "[8, 4]");
  EXPECT_ERROR(make([](Good& g) { g.weights.matrices[2].rows = 9; }), kShape,
               "matrices[2] is [9, 4]", "[8, 4]");
  EXPECT_ERROR(make([](Good& g) { g.weights.matrices[2].dtype = DType::kI32; }), kType,
               "matrices[2] is i32");
  EXPECT_ERROR(make([](Good& g) { g.weights.matrices[2].dtype = DType::kF16; }), kType,
               "matrices[2] is f16 where matrices[0] is bf16");
  EXPECT_ERROR(make([](Good& g) { g.weights.matrices[0].dtype = DType::kF8E4M3; }),
               ErrorCode::kMissingTensor, "matrices[0] is f8_e4m3 without scales");
  EXPECT_ERROR(make([&](Good& g) {
                 g.make_fp8(8, 4);
                 g.weights.matrices[1].scale_rows = 1;
               }),
               kType, "matrices[1] is f8_e4m3 with a scale per 1 x 4", "matrices[0]");
  EXPECT_ERROR(make([&](Good& g) { g.make_fp8(0, 4); }), kShape, "0 x 4");
  EXPECT_ERROR(make([&](Good& g) {
                 g.make_fp8(2, 2);
                 g.options.compute = DType::kF8E4M3;
               }),
               ErrorCode::kUnsupported, "matrices[0]", "2 x 2", "compute in bf16");
  const auto biased = [](Good& g) { g.weights.biases.assign(3, {g.bias.data(), DType::kF32, 8}); };
  make(biased);
  EXPECT_ERROR(make([&](Good& g) {
                 biased(g);
                 g.weights.biases.pop_back();
               }),
               kShape, "2 biases for 3 experts");
  EXPECT_ERROR(make([&](Good& g) {
                 biased(g);
                 g.weights.biases[2].size = 4;
               }),
               kShape, "biases[2] has 4 values");
  EXPECT_ERROR(make([&](Good& g) {
                 biased(g);
                 g.weights.biases[0].dtype = DType::kI64;
               }),
               kType, "biases[0] is i64");
}

TEST(GroupedGemmRefusals, Options) {
  EXPECT_ERROR(make([](Good& g) {
                 g.options.backend = Backend::kCuda;
                 g.options.num_threads = 2;
               }),
               kInvalid, "num_threads is 2, but the backend is cuda");
  if (gpu::device_count() == 0) {
    EXPECT_ERROR(make([](Good& g) {
                   g.options.backend = Backend::kCuda;
                   g.options.num_threads = 0;
                 }),
                 ErrorCode::kUnsupported, "use the CPU");
  }
  EXPECT_ERROR(make([](Good& g) { g.options.backend = static_cast<Backend>(5); }), kInvalid,
               "backend is 5");
  EXPECT_ERROR(make([](Good& g) { g.options.max_rows = 0; }), kInvalid, "max_rows is 0");
  EXPECT_ERROR(make([](Good& g) { g.options.num_threads = -1; }), kInvalid, "num_threads is -1");
  EXPECT_ERROR(make([](Good& g) { g.options.device = 0; }), kInvalid, "device is 0");
  EXPECT_ERROR(make([](Good& g) { g.options.reserved_sms = 4; }), kInvalid, "reserved_sms is 4");
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
  EXPECT_ERROR(make([](Good& g) { g.options.compute = DType::kF16; }), ErrorCode::kUnsupported,
               "compute type f16", "backend is cpu", "use f32");
  EXPECT_ERROR(make([](Good& g) { g.options.compute = DType::kU8; }), kInvalid, "compute type u8");
  EXPECT_ERROR(make([](Good& g) { g.options.compute = DType::kF8E4M3; }), kInvalid,
               "matrices[0] is bf16");
}

TEST(GroupedGemmRefusals, Inputs) {
  EXPECT_ERROR(run([](Good& g) { g.input.x.cols = 5; }), kShape, "x is [6, 5]", "4 columns");
  EXPECT_ERROR(run([](Good& g) { g.input.x.rows = -1; }), kShape, "x is [-1, 4]");
  EXPECT_ERROR(run([](Good& g) { g.input.x.data = nullptr; }), kInvalid, "x is null");
  EXPECT_ERROR(run([](Good& g) { g.input.x.col_stride = 2; }), kInvalid, "col_stride of 2");
  EXPECT_ERROR(run([](Good& g) { g.input.x.dtype = DType::kU8; }), kType, "x is u8");
  EXPECT_ERROR(run([](Good& g) { g.input.x.dtype = DType::kF8E4M3; }), kInvalid, "x is f8_e4m3",
               "computes in bf16");
  EXPECT_ERROR(run([](Good& g) { g.input.x.rows = 5; }), kShape, "x has 5 rows", "row 5");
  EXPECT_ERROR(run([](Good& g) { g.input.layout = RowLayout::blocked(4); }), kShape, "x has 6 rows",
               "row 7");
  EXPECT_ERROR(run([](Good& g) { g.input.layout = RowLayout::padded(3); }), kInvalid,
               "expert 2 has 4 rows", "room for 3");
  EXPECT_ERROR(run([](Good& g) { g.input.layout = RowLayout::blocked(0); }), kInvalid,
               "the input's layout is blocked with size 0");
  EXPECT_ERROR(run([](Good& g) { g.input.ends = g.input.ends.first(2); }), kShape,
               "ends has 2 elements", "3 experts");
  EXPECT_ERROR(run([](Good& g) {
                 g.input.ends = {g.ends.data(), DType::kF32, 3};
               }),
               kType, "ends is f32");
  EXPECT_ERROR(run([](Good& g) {
                 g.input.ends = {nullptr, DType::kI32, 3};
               }),
               kInvalid, "ends is null");
  EXPECT_ERROR(run([](Good& g) { g.ends[1] = 1; }), kInvalid, "ends[1] is 1", "2 rows");
  EXPECT_ERROR(run([](Good& g) { g.ends[0] = -1; }), kInvalid, "ends[0] is -1");
  EXPECT_ERROR(run([](Good& g) { g.options.max_rows = 5; }), ErrorCode::kCapacityExceeded, "6 rows",
               "at most 5", "max_rows");
  EXPECT_ERROR(run([](Good& g) {
                 g.input.index = {g.index.data(), DType::kI64, 6};
               }),
               kType, "the input's index is i64");
  EXPECT_ERROR(run([](Good& g) { g.input.index = SlotView(g.index).first(5); }), kShape,
               "the input's index has 5 entries");
  EXPECT_ERROR(run([](Good& g) {
                 g.index[4] = 6;
                 g.input.index = g.index;
               }),
               kInvalid, "index[4] is 6, of expert 2", "rows 0 to 5");
  EXPECT_ERROR(run([](Good& g) {
                 g.index[0] = -1;
                 g.input.index = g.index;
               }),
               kInvalid, "index[0] is -1, of expert 0");
  int stream = 0;
  EXPECT_ERROR(run([&](Good& g) { g.input.stream = &stream; }), kInvalid, "a stream is given");
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
  EXPECT_ERROR(run([&](Good& g) {
                 fp8(g);
                 g.input.x.scale = nullptr;
               }),
               kInvalid, "scale is null", "[6, 1] scales");
  EXPECT_ERROR(run([&](Good& g) {
                 fp8(g);
                 g.input.x.scale_dtype = DType::kF8E8M0;
               }),
               kType, "x is f8_e4m3 with scales of f8_e8m0", "convert them to f32");
  EXPECT_ERROR(run([&](Good& g) {
                 fp8(g);
                 g.input.x.scale_cols = 64;
               }),
               kInvalid, "a scale per 1 x 64", "scale_cols 128");
  EXPECT_ERROR(run([&](Good& g) {
                 fp8(g);
                 g.input.x.scale_stride = 0;
               }),
               kInvalid, "stride 0");
}

TEST(GroupedGemmRefusals, Outputs) {
  EXPECT_ERROR(run([](Good& g) { g.output.data = nullptr; }), kInvalid, "the output is null");
  EXPECT_ERROR(run([](Good& g) { g.output.dtype = DType::kF8E4M3; }), kType,
               "the output is f8_e4m3");
  EXPECT_ERROR(run([](Good& g) { g.output.row_stride = 7; }), kInvalid, "row_stride is 7",
               "a row has 8");
  EXPECT_ERROR(run([](Good& g) { g.output.rows = 5; }), kShape, "the output has 5 rows", "row 5");
  EXPECT_ERROR(run([](Good& g) { g.output.rows = -2; }), kInvalid, "the output has -2 rows");
  EXPECT_ERROR(run([](Good& g) { g.output.layout = RowLayout::blocked(4); }), kShape,
               "the output has 6 rows", "row 7");
  EXPECT_ERROR(run([](Good& g) { g.output.layout = RowLayout::padded(3); }), kInvalid,
               "expert 2 has 4 rows");
  EXPECT_ERROR(run([](Good& g) { g.output.layout = RowLayout::padded(0); }), kInvalid,
               "the output's layout is padded with size 0");
  EXPECT_ERROR(run([](Good& g) {
                 g.output.index = {g.index.data(), DType::kI64, 6};
               }),
               kType, "the output's index is i64");
  EXPECT_ERROR(run([](Good& g) { g.output.index = SlotView(g.index).first(5); }), kShape,
               "the output's index has 5 entries");
  EXPECT_ERROR(run([](Good& g) {
                 g.output.index = g.index;
                 g.output.layout = RowLayout::padded(6);
               }),
               kInvalid, "both an index and a layout");
  EXPECT_ERROR(run([](Good& g) {
                 g.index[3] = 6;
                 g.output.index = g.index;
               }),
               kInvalid, "index[3] is 6", "rows 0 to 5");
  EXPECT_ERROR(run([](Good& g) {
                 g.index[3] = -2;
                 g.output.index = g.index;
                 g.output.rows = -1;
               }),
               kInvalid, "index[3] is -2", "-1 for none");
  EXPECT_ERROR(run([](Good& g) {
                 g.index[3] = 1;
                 g.output.index = g.index;
               }),
               kInvalid, "row 1 twice");
  EXPECT_ERROR(run([](Good& g) { g.output.weights = g.index; }), kType, "row_weights is i32");
  EXPECT_ERROR(run([](Good& g) { g.output.weights = SlotView(g.bias).first(5); }), kShape,
               "row_weights has 5 entries", "need 6");
}

TEST(GroupedGemmRefusals, Products) {
  EXPECT_ERROR(run([](Good& g) { g.output.products = g.y.row(0); }), kInvalid, "no epilogue");
  std::vector<std::uint16_t> products(6 * 8);
  const auto with_products = [&](Good& g) {
    g.spec.epilogue = Activation();
    g.output.products = products.data();
  };
  run(with_products);
  EXPECT_ERROR(run([&](Good& g) {
                 with_products(g);
                 g.output.index = g.index;
               }),
               kInvalid, "the output has an index");
  EXPECT_ERROR(run([&](Good& g) {
                 with_products(g);
                 g.output.products_stride = 7;
               }),
               kInvalid, "products_stride is 7", "a row has 8");
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
