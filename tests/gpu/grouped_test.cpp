// GroupedGemm on a GPU: against fp64, in every layout, with poison wherever nothing may be read or
// written.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "gpu/device.h"
#include "model/errors.h"
#include "operators/problem.h"
#include "support/accuracy.h"
#include "support/on_gpu.h"
#include "switchyard/tuner.h"

namespace switchyard::testing {
namespace {

using GpuGroupedGemm = OnGpu<::testing::Test>;

gpu::DeviceBuffer upload(const void* data, std::size_t bytes) {
  gpu::DeviceBuffer buffer(std::max<std::size_t>(bytes, 16));
  if (bytes != 0) buffer.upload(data, bytes);
  return buffer;
}
SlotView moved(const SlotView& view, const gpu::DeviceBuffer& to) {
  return view.empty() ? view : SlotView(to.data(), view.dtype(), view.size());
}
std::size_t bytes_of(const SlotView& view) { return view.size() * size_of(view.dtype()); }

// Moves a call's arrays to the device, and what is stored back.
void call_on_device(GroupedGemm& gemm, GroupedInput input, GroupedOutput output,
                    std::span<const std::byte> x, std::span<std::byte> out,
                    std::span<std::byte> products) {
  const auto num_scales = input.x.scale == nullptr
                              ? 0
                              : static_cast<std::size_t>((input.x.rows - 1) * input.x.scale_stride +
                                                         (input.x.cols + 127) / 128);
  const gpu::DeviceBuffer x_there = upload(x.data(), x.size()),
                          scales = upload(input.x.scale, num_scales * sizeof(float)),
                          ends = upload(input.ends.data(), bytes_of(input.ends)),
                          index = upload(input.index.data(), bytes_of(input.index)),
                          places = upload(output.index.data(), bytes_of(output.index)),
                          weights = upload(output.weights.data(), bytes_of(output.weights)),
                          out_there = upload(out.data(), out.size()),
                          products_there = upload(products.data(), products.size());
  input.x.data = x_there.data();
  if (num_scales != 0) input.x.scale = reinterpret_cast<const float*>(scales.data());
  input.ends = moved(input.ends, ends);
  input.index = moved(input.index, index);
  output.data = out_there.data();
  output.index = moved(output.index, places);
  output.weights = moved(output.weights, weights);
  if (!products.empty()) output.products = products_there.data();
  gemm.run(input, output);
  gpu::synchronize_device();
  if (!out.empty()) out_there.download(out.data(), out.size());
  if (!products.empty()) products_there.download(products.data(), products.size());
}

Rows run_on_gpu(const Problem& problem, const GroupedSchedule& schedule = {}) {
  GroupedGemmOptions options = problem.options();
  options.schedule = schedule;
  GroupedGemm gemm(problem.spec(), problem.weights(), options);
  EXPECT_EQ(gemm.compute(), problem.compute());
  return problem.run(gemm, call_on_device);
}

// Operands of sizes that the copy engine takes, in bf16 or fp16.
constexpr DType kHalves[] = {DType::kBF16, DType::kF16};
Case wide_case(DType type = DType::kBF16) {
  Case c;
  c.n = 208;
  c.k = 72;
  c.weight = c.x = c.out = type;
  c.compute = type;
  c.backend = Backend::kCuda;
  return c;
}

// And in FP8, with a scale for 128 x 128 weights, for a row, or for all.
Case fp8_case(Scales scales) {
  Case c;
  c.n = 512;
  c.k = 272;
  c.weight = DType::kF8E4M3;
  c.scales = scales;
  c.backend = Backend::kCuda;
  return c;
}
constexpr Scales kForms[] = {Scales::kWhole, Scales::kRows, Scales::kBlocks};

// In every type that a GPU computes in.
constexpr DType kTypes[] = {DType::kBF16, DType::kF16, DType::kF8E4M3};
Case case_of(DType type) {
  return type == DType::kF8E4M3 ? fp8_case(Scales::kBlocks) : wide_case(type);
}

// The matrix unit sums FP8 products with few bits, and the activation's tanh has some, too: to be
// seen where the output is not rounded to bf16 or fp16.
void expect_accurate(const Case& c) {
  SCOPED_TRACE(::testing::Message() << c);
  const Problem problem(c);
  const bool fp8 = problem.compute() == DType::kF8E4M3;
  // The matrix unit alone sums a row's products, with some fourteen bits. Tokens that come in FP8
  // are rounded again, to one scale for each.
  const bool sums_rows = fp8 && is_four_bit(c.weight);
  const double rounding = sums_rows ? (c.x == DType::kF8E4M3 ? 0.05 : 5e-3)
                          : c.out == DType::kBF16 || (c.out == DType::kF16 && !fp8) ? 0
                          : fp8                                                     ? 5e-4
                                                                                    : 2e-5;
  expect_as_good(problem, run_on_gpu(problem), rounding);
}

TEST_F(GpuGroupedGemm, NumbersOfExperts) {
  for (const DType type : kHalves) {
    for (const int experts : {1, 3, 32, 33, 64, 512, 513, 1024}) {
      for (const bool gated : {false, true}) {
        Case c = wide_case(type);
        c.rows.clear();
        for (int e = 0; e < experts; ++e) c.rows.push_back(e % 3 == 1 ? 0 : 1 + e * 5 % 4);
        if (gated) c.epilogue = Activation();
        expect_accurate(c);
        c.in = RowLayout::blocked(4);
        c.to = RowLayout::padded(5);
        expect_accurate(c);
      }
    }
  }
}

#if defined(SWITCHYARD_FOUR_BIT_KERNELS)
// Orders, epilogues, tile heights, rows past the last box and columns past the last stage.
TEST_F(GpuGroupedGemm, WeightsOfFourBits) {
  for (const auto& [weight, compute] : {std::pair{DType::kF4E2M1, DType::kBF16},
                                        {DType::kU4, DType::kBF16},
                                        {DType::kF4E2M1, DType::kF8E4M3}}) {
    for (const GateOrder order :
         {GateOrder::kGateUp, GateOrder::kUpGate, GateOrder::kInterleaved}) {
      for (const int epilogue : {0, 1, 2}) {  // none, plain, gated
        for (const auto& [n, k, group] :
             {std::tuple{96, 96, 32}, {208, 256, 32}, {512, 2880, 32}, {64, 384, 128}}) {
          if (group == 128 && weight == DType::kF4E2M1) continue;
          Case c;
          c.backend = Backend::kCuda;
          c.n = n;
          c.k = k;
          c.group = group;
          c.weight = weight;
          c.compute = compute;
          c.order = order;
          c.pad = 32;
          c.biased = true;
          c.rows = {5, 0, 40, 130, 300, 17};
          if (epilogue != 0) c.epilogue = activation_of(ActivationKind::kSilu, epilogue == 2);
          expect_accurate(c);
          c.gathered = false;
          c.scattered = c.weighted = true;
          expect_accurate(c);
          if (compute != DType::kF8E4M3) continue;
          c.x = DType::kF8E4M3;
          expect_accurate(c);
          c.gathered = true;
          expect_accurate(c);
        }
      }
    }
  }
}

TEST_F(GpuGroupedGemm, ATableIsOfNoFourBits) {
  Case c;
  c.backend = Backend::kCuda;
  c.weight = DType::kF4E2M1;
  const Problem problem(c);
  GroupedGemmOptions options = problem.options();
  options.table = std::make_shared<const tuner::Table>();
  EXPECT_ERROR(GroupedGemm(problem.spec(), problem.weights(), options), kUnsupported,
               "the weights are f4_e2m1, whose kernels nothing tunes");
}

// Tiles of every height, up to the highest, and where an expert's rows make one more tile.
TEST_F(GpuGroupedGemm, NumbersOfRowsOfFourBits) {
  for (const auto& [weight, compute] : {std::pair{DType::kF4E2M1, DType::kBF16},
                                        {DType::kU4, DType::kBF16},
                                        {DType::kF4E2M1, DType::kF8E4M3}}) {
    for (const int epilogue : {0, 1, 2}) {  // none, plain, gated
      Case c;
      c.backend = Backend::kCuda;
      c.weight = weight;
      c.compute = compute;
      c.group = 32;
      c.n = 256;
      c.k = 128;
      for (int rows = 1; rows <= 520; rows += rows < 32 ? 1 : 8) c.rows.push_back(rows);
      if (epilogue != 0) c.epilogue = activation_of(ActivationKind::kSilu, epilogue == 2);
      expect_accurate(c);
    }
  }
}
#endif

// All heights of tiles, several tiles of an expert, and experts without rows.
TEST_F(GpuGroupedGemm, NumbersOfRows) {
  for (const std::vector<int>& rows : {std::vector<int>{1},
                                       {0, 1},
                                       {1, 0, 0},
                                       {0, 0, 15, 0, 16, 17, 0},
                                       {40, 64, 70, 96, 99, 128, 130},
                                       {161, 200, 224, 256, 257},
                                       {600, 1},
                                       {0, 1300, 0}}) {
    for (const DType type : kHalves) {
      for (const bool gated : {false, true}) {
        Case c = wide_case(type);
        c.rows = rows;
        if (gated) c.epilogue = Activation();
        expect_accurate(c);
      }
    }
  }
}

TEST_F(GpuGroupedGemm, SizesOfMatrices) {
  for (const auto& [n, k] : {std::pair{16, 8}, {16, 64}, {128, 136}, {1040, 40}, {528, 2056}}) {
    for (const DType type : kHalves) {
      for (const bool gated : {false, true}) {
        Case c = wide_case(type);
        c.n = n;
        c.k = k;
        c.rows = {3, 20, 0, 70};
        if (gated) c.epilogue = Activation();
        expect_accurate(c);
      }
    }
  }
}

TEST_F(GpuGroupedGemm, EveryActivationOrderAndTypeOfWeights) {
  for (const ActivationKind kind :
       {ActivationKind::kSilu, ActivationKind::kGelu, ActivationKind::kGeluTanh,
        ActivationKind::kRelu, ActivationKind::kRelu2, ActivationKind::kIdentity,
        ActivationKind::kSitu}) {
    for (const bool gated : {false, true}) {
      if (!gated && kind == ActivationKind::kSitu) continue;
      for (const GateOrder order :
           {GateOrder::kGateUp, GateOrder::kUpGate, GateOrder::kInterleaved}) {
        if (!gated && order != GateOrder::kGateUp) continue;
        for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
          for (const DType type : kHalves) {
            Case c = wide_case(type);
            c.epilogue = activation_of(kind, gated);
            c.order = order;
            c.weight = dtype;
            c.biased = true;
            expect_accurate(c);
          }
        }
      }
    }
  }
}

TEST_F(GpuGroupedGemm, ClampsBiasesTransposedWeightsAndStrides) {
  for (const DType type : kHalves) {
    Case c = wide_case(type);
    c.epilogue = Activation();
    c.epilogue->alpha = 1.702f;
    c.epilogue->limit = 0.7f;
    c.epilogue->up_bias = 1;
    c.biased = true;
    expect_accurate(c);
    c.transposed = true;
    expect_accurate(c);
    c.transposed = false;
    c.pad = 24;
    expect_accurate(c);
    c.epilogue.reset();
    expect_accurate(c);
  }
}

// The error of a type with three bits more is an eighth. Operands that were rounded to bf16 on
// their way would not leave it so: neither from fp16, nor from fp32 that is converted on the host
// or on the device.
TEST_F(GpuGroupedGemm, Fp16IsFourTimesAsGoodAsBf16) {
  const auto error = [](Case c, DType compute) {
    c.compute = compute;
    const Problem problem(c);
    return distance(run_on_gpu(problem).output, problem.exact().output);
  };
  for (const DType operands : {DType::kF16, DType::kF32}) {
    for (const DType out : {DType::kF16, DType::kF32}) {
      for (const bool gathered : {false, true}) {
        for (const bool activates : {false, true}) {
          Case c = wide_case(DType::kF16);
          c.weight = c.x = operands;
          c.out = out;
          c.gathered = gathered;
          c.rows = {1, 0, 40, 300, 17};
          if (activates) c.epilogue = Activation();
          SCOPED_TRACE(::testing::Message() << c);
          EXPECT_LT(4 * error(c, DType::kF16), error(c, DType::kBF16));
        }
      }
    }
  }
}

TEST_F(GpuGroupedGemm, ChoosesTheTypeOfItsWeights) {
  const auto chosen = [](DType weight) {
    Case c = wide_case(weight);
    c.compute.reset();
    const Problem problem(c);
    expect_as_good(problem, run_on_gpu(problem), 2e-5);
    return problem.compute();
  };
  EXPECT_EQ(chosen(DType::kF16), DType::kF16);
  EXPECT_EQ(chosen(DType::kBF16), DType::kBF16);
  EXPECT_EQ(chosen(DType::kF32), DType::kBF16);
}

TEST_F(GpuGroupedGemm, Fp8WeightsInFp16) {
  for (const Scales scales : kForms) {
    Case c = fp8_case(scales);
    c.compute = c.x = c.out = DType::kF16;
    expect_accurate(c);
    c.epilogue = Activation();
    expect_accurate(c);
  }
}

// As in torch. An operand beyond fp16's range becomes infinite, and so does a value of the output.
TEST_F(GpuGroupedGemm, Fp16OverflowsToInfinity) {
  Case c = wide_case(DType::kF16);
  c.x = DType::kF32;
  c.rows = {5, 0, 40};
  Problem infinite(c);
  infinite.set_token(7, 3, 1e5f);
  const Rows rows = run_on_gpu(infinite);
  for (int r = 0; r < c.total(); ++r) {
    const bool expected = infinite.token_of(r) == infinite.token_of(7);
    for (const float value : rows.output[static_cast<std::size_t>(r)]) {
      ASSERT_EQ(std::isinf(value), expected) << value << " in row " << r;
    }
  }
  // In the middle of the range, so that some sums are within it and some are not.
  Problem large(c);
  for (int column = 0; column < c.k; ++column) large.set_token(7, column, 6e4f);
  const std::vector<float> exact = large.exact().output[7], out = run_on_gpu(large).output[7];
  constexpr float kLargest = 65504;
  int beyond = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (std::abs(exact[i]) < 0.999f * kLargest) {
      EXPECT_NEAR(out[i], exact[i], 1e-3f * kLargest);
    } else if (std::abs(exact[i]) > 1.001f * kLargest) {
      EXPECT_EQ(out[i], std::copysign(std::numeric_limits<float>::infinity(), exact[i]));
      ++beyond;
    }
  }
  EXPECT_GT(beyond, 0);
}

// Weights in device memory: those of the compute type are read where they are, and others are
// converted there.
TEST_F(GpuGroupedGemm, WeightsOnTheDevice) {
  for (const DType type : kHalves) {
    for (const DType weight : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (const bool transposed : {false, true}) {
        for (const bool gated : {false, true}) {
          Case c = wide_case(type);
          c.weight = weight;
          c.transposed = transposed;
          if (gated) c.epilogue = Activation();
          SCOPED_TRACE(::testing::Message() << c);
          const Problem problem(c);
          GroupedGemmWeights weights = problem.weights();
          const auto* const first = static_cast<const std::byte*>(weights.matrices[0].data);
          const auto bytes = static_cast<std::size_t>(c.n) * static_cast<std::size_t>(c.k) *
                             size_of(weight) * weights.matrices.size();
          gpu::DeviceBuffer there = upload(first, bytes);
          for (MatrixView& matrix : weights.matrices) {
            matrix.data = there.data() + (static_cast<const std::byte*>(matrix.data) - first);
          }
          GroupedGemm gemm(problem.spec(), weights, problem.options());
          const Rows rows = problem.run(gemm, call_on_device);
          EXPECT_TRUE(rows == run_on_gpu(problem));
          const std::vector<std::byte> zeros(bytes);
          there.upload(zeros.data(), bytes);
          const Rows later = problem.run(gemm, call_on_device);
          if (weight != type || transposed) {
            EXPECT_TRUE(later == rows) << "a copy";
            continue;
          }
          for (const std::vector<float>& row : later.output) {
            EXPECT_EQ(row, std::vector<float>(row.size())) << "in place";
          }
        }
      }
    }
  }
}

TEST_F(GpuGroupedGemm, SameBitsInEveryLayout) {
  for (const auto& [gated, type] : {std::pair{false, DType::kBF16},
                                    {true, DType::kBF16},
                                    {false, DType::kF16},
                                    {true, DType::kF16}}) {
    Case c = wide_case(type);
    c.rows = {0, 1, 130, 16, 0, 37, 300};
    if (gated) c.epilogue = Activation();
    const Rows packed = run_on_gpu(Problem(c));
    EXPECT_TRUE(run_on_gpu(Problem(c)) == packed) << "repeated";
    for (const RowLayout& layout :
         {RowLayout::blocked(1), RowLayout::blocked(16), RowLayout::blocked(50),
          RowLayout::blocked(128), RowLayout::padded(300), RowLayout::padded(313)}) {
      for (const int which : {1, 2, 3}) {
        Case other = c;
        if (which & 1) other.in = layout;
        if (which & 2) other.to = layout;
        other.wide_ends = which == 3;
        EXPECT_TRUE(run_on_gpu(Problem(other)) == packed) << other;
      }
    }
    Case scattered = c;
    scattered.scattered = true;
    const Rows rows = run_on_gpu(Problem(scattered));
    ASSERT_EQ(rows.output.size(), packed.output.size());
    for (std::size_t r = 0; r < rows.output.size(); ++r) {
      if (!rows.output[r].empty()) {
        EXPECT_EQ(rows.output[r], packed.output[r]) << "row " << r;
      }
    }
  }
}

gpu::Graph replayed_once(GroupedGemm& op, GroupedInput input, const GroupedOutput& output,
                         const gpu::Stream& stream) {
  input.stream = stream.handle();
  gpu::Graph graph = gpu::Graph::capture(stream, [&] { op.run(input, output); });
  graph.launch(stream);
  stream.synchronize();
  return graph;
}

// The ends may change between replays: nothing is read by the host.
TEST_F(GpuGroupedGemm, GraphsReadTheEndsOfTheirReplay) {
  Case c = wide_case();
  c.epilogue = Activation();
  c.rows = {30, 0, 70, 9};
  const Problem problem(c);
  GroupedGemm gemm(problem.spec(), problem.weights(), {.backend = Backend::kCuda});
  const Rows expected = run_on_gpu(problem);
  const Rows replayed = problem.run(
      gemm, [](GroupedGemm& op, GroupedInput input, GroupedOutput output,
               std::span<const std::byte> x, std::span<std::byte> out, std::span<std::byte>) {
        const gpu::DeviceBuffer x_there = upload(x.data(), x.size()),
                                out_there = upload(out.data(), out.size());
        const std::vector<std::int32_t> none(input.ends.size());
        gpu::DeviceBuffer ends = upload(none.data(), none.size() * 4);
        const SlotView given = input.ends;
        input.x.data = x_there.data();
        input.ends = moved(given, ends);
        output.data = out_there.data();
        const gpu::Stream stream;
        gpu::Graph graph = replayed_once(op, input, output, stream);
        std::vector<std::byte> untouched(out.size());
        out_there.download(untouched.data(), untouched.size());
        EXPECT_TRUE(std::equal(untouched.begin(), untouched.end(), out.begin())) << "no rows yet";
        ends.upload(given.data(), bytes_of(given));
        graph.launch(stream);
        stream.synchronize();
        out_there.download(out.data(), out.size());
      });
  EXPECT_TRUE(replayed == expected);
}

TEST_F(GpuGroupedGemm, Fp8) {
  for (const Scales scales : kForms) {
    for (const DType x : {DType::kF8E4M3, DType::kBF16, DType::kF32}) {
      for (const std::vector<int>& rows : {std::vector<int>{1},
                                           {0, 5, 0, 16, 17, 64},
                                           {65, 128, 0, 129, 3},
                                           {200, 256, 257, 1000, 320},
                                           {700, 0, 1}}) {
        for (const bool gated : {false, true}) {
          Case c = fp8_case(scales);
          c.x = x;
          c.rows = rows;
          if (gated) c.epilogue = Activation();
          expect_accurate(c);
        }
      }
    }
  }
}

TEST_F(GpuGroupedGemm, Fp8SizesActivationsAndBiases) {
  for (const auto& [n, k] : {std::pair{16, 16}, {256, 128}, {272, 144}, {1296, 400}, {768, 2064}}) {
    for (const std::vector<int>& rows : {std::vector<int>{3, 20, 0, 70}, {300, 140}}) {
      Case c = fp8_case(Scales::kRows);
      c.n = n;
      c.k = k;
      c.rows = rows;
      expect_accurate(c);
      for (const bool gated : {false, true}) {
        c.epilogue = activation_of(ActivationKind::kGelu, gated);
        c.biased = true;
        expect_accurate(c);
        if (!gated) continue;
        c.epilogue->kind = ActivationKind::kSilu;
        c.epilogue->limit = 0.7f;
        for (const GateOrder order : {GateOrder::kInterleaved, GateOrder::kUpGate}) {
          c.order = order;
          expect_accurate(c);
        }
        c.order = GateOrder::kGateUp;
      }
    }
  }
}

// Rows through an index or of other types, weights of rows, stored products, and every type of
// output, where tiles are low and where blocks go in pairs.
TEST_F(GpuGroupedGemm, RowsAndOutputsOfEveryForm) {
  for (const DType compute : kTypes) {
    for (const DType type : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (const std::vector<int>& rows : {std::vector<int>{3, 0, 17, 1}, {130, 0, 300, 150}}) {
        Case c = case_of(compute);
        c.rows = rows;
        c.x = c.out = type;
        expect_accurate(c);
        c.gathered = false;
        expect_accurate(c);
        c.weighted = true;
        expect_accurate(c);
        c.scattered = true;
        c.in = RowLayout::blocked(16);
        expect_accurate(c);
        c.scattered = false;
        c.to = RowLayout::padded(300);
        for (const bool gated : {false, true}) {
          c.epilogue = activation_of(ActivationKind::kSilu, gated);
          expect_accurate(c);
          c.products = true;
          expect_accurate(c);
          c.products = false;
        }
      }
    }
  }
  for (const GateOrder order : {GateOrder::kGateUp, GateOrder::kUpGate, GateOrder::kInterleaved}) {
    for (const DType type : kHalves) {
      Case c = wide_case(type);
      c.epilogue = Activation();
      c.order = order;
      c.products = c.biased = true;
      c.pad = 8;
      expect_accurate(c);
    }
  }
}

// FP8 rows are gathered with their scales.
TEST_F(GpuGroupedGemm, AnIndexOrAnUnalignedRowGivesTheSameBits) {
  for (const DType type : kTypes) {
    Case c = case_of(type);
    c.x = type;
    c.rows = {30, 0, 200, 1};
    c.epilogue = Activation();
    const Rows expected = run_on_gpu(Problem(c));
    c.gathered = false;
    EXPECT_TRUE(run_on_gpu(Problem(c)) == expected);
    c.in = RowLayout::padded(210);
    EXPECT_TRUE(run_on_gpu(Problem(c)) == expected);
    c.gathered = true;
    c.in = RowLayout::packed();
    Case padded = c;
    padded.pad = 8;  // of x in FP8 as well: no multiple of 16 bytes
    EXPECT_TRUE(run_on_gpu(Problem(padded)).output == expected.output);
  }
}

// Every configuration gives right results, and without splits the same bits. Twice each: counts of
// stored parts have to be cleared.
TEST_F(GpuGroupedGemm, EveryConfiguration) {
  const auto check = [](const Problem& problem, const Rows& expected, GroupedSchedule schedule) {
    SCOPED_TRACE(::testing::Message()
                 << schedule.tile_rows.value_or(0) << " rows, " << schedule.stages.value_or(0)
                 << " stages, band " << schedule.band.value_or(0) << ", "
                 << (schedule.paired.value_or(false) ? "paired, " : "")
                 << schedule.splits.value_or(1) << " splits");
    const Rows rows = run_on_gpu(problem, schedule);
    if (schedule.splits.value_or(1) == 1) {
      EXPECT_TRUE(rows == expected);
      return;
    }
    expect_as_good(problem, rows);
    EXPECT_TRUE(run_on_gpu(problem, schedule) == rows);
  };
  int count = 0;
  for (const DType type : kTypes) {
    const bool fp8 = type == DType::kF8E4M3;
    Case c = case_of(type);
    c.rows = {3, 0, 150, 40, 300};
    if (!fp8) c.k = 328;
    c.epilogue = Activation();
    c.biased = true;
    const Problem problem(c);
    c.epilogue.reset();
    const Problem plain(c);
    const Rows expected = run_on_gpu(problem);
    const std::vector<int> heights =
        fp8 ? std::vector<int>{64, 128} : std::vector<int>{16, 32, 48, 64, 96, 128, 192, 256};
    // (The ring does not know the elements: bf16's stages stand for fp16's.)
    const std::vector<int> all_stages =
        type == DType::kBF16 ? std::vector<int>{2, 3, 12} : std::vector<int>{0};
    for (const int tile_rows : heights) {
      for (const int stages : all_stages) {
        for (const int band : {1, 3, 64}) {
          for (const bool paired : {false, true}) {
            for (const int splits : {1, 2, 4}) {
              GroupedSchedule schedule{.tile_rows = tile_rows};
              if (stages != 0) schedule.stages = stages;
              schedule.band = band;
              schedule.paired = paired;
              schedule.splits = splits;
              check(problem, expected, schedule);
              ++count;
            }
          }
        }
      }
      expect_as_good(plain, run_on_gpu(plain, {.tile_rows = tile_rows, .splits = 8}));
    }
  }
  EXPECT_EQ(count, 612);
}

// The second block of the last pair has no weight rows, but counts parts like every other.
TEST_F(GpuGroupedGemm, PartsOfAnOddNumberOfBlocksInPairs) {
  for (const DType type : kTypes) {
    const bool fp8 = type == DType::kF8E4M3;
    Case c = case_of(type);
    c.rows = {256, 0, 40, 300};
    c.n = fp8 ? 768 : 384;
    if (!fp8) c.k = 328;
    for (const bool gated : {false, true}) {
      if (gated) c.epilogue = Activation();
      const Problem problem(c);
      for (const int splits : {2, 4}) {
        SCOPED_TRACE(::testing::Message() << c << ", " << splits << " splits");
        const GroupedSchedule schedule{.paired = true, .splits = splits};
        const Rows rows = run_on_gpu(problem, schedule);
        expect_as_good(problem, rows);
        for (int repetition = 0; repetition < 20; ++repetition) {
          ASSERT_TRUE(run_on_gpu(problem, schedule) == rows) << repetition;
        }
      }
    }
  }
}

// The rows of a tile come one by one: at every height, by blocks and by pairs. An entry that names
// no row stands for zeros.
TEST_F(GpuGroupedGemm, RowsThroughAnIndexAtEveryHeight) {
  for (const DType type : kTypes) {
    for (const int height : {1, 16, 31, 64, 65, 96, 120, 128, 200, 256, 300}) {
      Case c = case_of(type);
      c.x = type;
      c.rows = {height, 0, height / 2 + 1};
      c.gathered = false;
      const Problem problem(c);
      for (const bool paired : {false, true}) {
        SCOPED_TRACE(::testing::Message() << c << (paired ? ", paired" : ""));
        const GroupedSchedule schedule{.paired = paired};
        const Rows all = run_on_gpu(problem, schedule);
        expect_as_good(problem, all);
        GroupedGemmOptions options = problem.options();
        options.schedule = schedule;
        GroupedGemm gemm(problem.spec(), problem.weights(), options);
        std::vector<std::int32_t> index;
        const Rows some =
            problem.run(gemm, [&](GroupedGemm& op, GroupedInput input, const GroupedOutput& output,
                                  std::span<const std::byte> x, std::span<std::byte> out,
                                  std::span<std::byte> products) {
              const auto* const entries = static_cast<const std::int32_t*>(input.index.data());
              index.assign(entries, entries + input.index.size());
              for (std::size_t i = 0; i < index.size(); i += 3) {
                index[i] = i % 2 == 0 ? -1 : static_cast<std::int32_t>(input.x.rows);
              }
              input.index = SlotView(index.data(), DType::kI32, input.index.size());
              call_on_device(op, input, output, x, out, products);
            });
        ASSERT_EQ(some.output.size(), all.output.size());
        for (std::size_t row = 0; row < all.output.size(); ++row) {
          const std::vector<float> zeros(all.output[row].size());
          ASSERT_EQ(some.output[row], row % 3 == 0 ? zeros : all.output[row]) << "row " << row;
        }
      }
    }
  }
}

// The rule of FP8 goes by the rows of each expert, which only the device knows: on both sides of it
// the bits are those of either height.
TEST_F(GpuGroupedGemm, TilesOfHalfTheRowsWhereEveryTaskFindsABlock) {
  for (const std::vector<int>& rows :
       {std::vector<int>{200, 0, 90}, {1000, 900, 70, 0, 64, 65}, {9000, 300}}) {
    Case c = fp8_case(Scales::kBlocks);
    c.rows = rows;
    c.x = DType::kF8E4M3;
    const Problem problem(c);
    GroupedSchedule low, high;
    low.paired = high.paired = false;
    const Rows by_rule = run_on_gpu(problem, high);
    expect_as_good(problem, by_rule);
    low.tile_rows = 64;
    high.tile_rows = 128;
    EXPECT_TRUE(run_on_gpu(problem, low) == by_rule);
    EXPECT_TRUE(run_on_gpu(problem, high) == by_rule);
  }
}

// A call that needs memory of its own is refused while it cannot be had.
TEST_F(GpuGroupedGemm, ConvertedRowsAreCapturedAfterACallOfTheirSize) {
  Case c = wide_case();
  c.rows = {30, 0, 70, 9};
  c.gathered = false;
  c.x = DType::kF16;
  const Problem problem(c);
  const Rows expected = run_on_gpu(problem);
  GroupedGemm gemm(problem.spec(), problem.weights(), {.backend = Backend::kCuda});
  const auto captured = [&] {
    return problem.run(
        gemm, [](GroupedGemm& op, GroupedInput input, GroupedOutput output,
                 std::span<const std::byte> x, std::span<std::byte> out, std::span<std::byte>) {
          const gpu::DeviceBuffer x_there = upload(x.data(), x.size()),
                                  out_there = upload(out.data(), out.size()),
                                  ends = upload(input.ends.data(), bytes_of(input.ends)),
                                  index = upload(input.index.data(), bytes_of(input.index));
          input.x.data = x_there.data();
          input.ends = moved(input.ends, ends);
          input.index = moved(input.index, index);
          output.data = out_there.data();
          const gpu::Stream stream;
          replayed_once(op, input, output, stream);
          out_there.download(out.data(), out.size());
        });
  };
  EXPECT_ERROR(captured(), kUnsupported, "make a call of this size before it");
  EXPECT_TRUE(problem.run(gemm, call_on_device) == expected);
  EXPECT_TRUE(captured() == expected);
}

TEST_F(GpuGroupedGemm, WhatItDoesNotHaveIsRefused) {
  const auto refused = [](const Case& c, const char* part) {
    EXPECT_ERROR(run_on_gpu(Problem(c)), kUnsupported, part);
  };
  Case c = wide_case();
  c.k = 100;
  refused(c, "k is 100");
  c = wide_case();
  c.n = 204;
  refused(c, "output columns is 204");
  c = wide_case();
  c.compute = DType::kF32;
  refused(c, "computes in f32");
  c = fp8_case(Scales::kBlocks);
  c.k = 264;
  refused(c, "k is 264");
  c = fp8_case(Scales::kBlocks);
  c.epilogue = Activation();
  c.n = 416;
  refused(c, "shared by 128 rows");
  c = wide_case();
  c.epilogue = Activation();
  c.epilogue->limit = 1;
  c.products = true;
  refused(c, "an activation that clamps");
}

TEST_F(GpuGroupedGemm, SchedulesThatDoNotExistAreRefused) {
  const auto refused = [](bool fp8, GroupedSchedule schedule, const char* part) {
    const Problem problem(fp8 ? fp8_case(Scales::kBlocks) : wide_case());
    EXPECT_ERROR(run_on_gpu(problem, schedule), kInvalidArgument, part);
  };
  refused(false, {.tile_rows = 8}, "tile_rows is 8");
  refused(false, {.tile_rows = 272}, "tile_rows is 272");
  refused(true, {.tile_rows = 96}, "tile_rows is 96; use 64 or 128");
  refused(false, {.stages = 1}, "stages is 1");
  refused(false, {.band = 0}, "band is 0");
  refused(true, {.splits = 3}, "splits is 3");
}

}  // namespace
}  // namespace switchyard::testing
