// GroupedGemm on a GPU: against fp64, in every layout, with poison wherever nothing may be read or
// written.
#include <gtest/gtest.h>

#include <span>
#include <vector>

#include "gpu/device.h"
#include "model/errors.h"
#include "operators/problem.h"
#include "support/accuracy.h"
#include "support/on_gpu.h"

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
  GroupedGemmOptions options;
  options.schedule = schedule;
  options.backend = Backend::kCuda;
  options.compute = problem.get().compute;
  GroupedGemm gemm(problem.spec(), problem.weights(), options);
  EXPECT_EQ(gemm.compute(), problem.compute());
  return problem.run(gemm, call_on_device);
}

// Of sizes that the copy engine takes, in bf16.
Case wide_case() {
  Case c;
  c.n = 208;
  c.k = 72;
  c.compute = DType::kBF16;
  return c;
}

// And in FP8, with a scale for 128 x 128 weights, for a row, or for all.
Case fp8_case(Scales scales) {
  Case c;
  c.n = 512;
  c.k = 272;
  c.weight = DType::kF8E4M3;
  c.scales = scales;
  return c;
}
constexpr Scales kForms[] = {Scales::kWhole, Scales::kRows, Scales::kBlocks};

// The matrix unit sums FP8 products with few bits, and the activation's tanh has some, too: to be
// seen where the output is not rounded to bf16.
void expect_accurate(const Case& c) {
  SCOPED_TRACE(::testing::Message() << c);
  const Problem problem(c);
  const double rounding = c.out == DType::kBF16                 ? 0
                          : problem.compute() == DType::kF8E4M3 ? 5e-4
                                                                : 2e-5;
  expect_as_good(problem, run_on_gpu(problem), rounding);
}

TEST_F(GpuGroupedGemm, NumbersOfExperts) {
  for (const int experts : {1, 3, 32, 33, 512, 513, 1024}) {
    for (const bool gated : {false, true}) {
      Case c = wide_case();
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
    for (const bool gated : {false, true}) {
      Case c = wide_case();
      c.rows = rows;
      if (gated) c.epilogue = Activation();
      expect_accurate(c);
    }
  }
}

TEST_F(GpuGroupedGemm, SizesOfMatrices) {
  for (const auto& [n, k] : {std::pair{16, 8}, {16, 64}, {128, 136}, {1040, 40}, {528, 2056}}) {
    for (const bool gated : {false, true}) {
      Case c = wide_case();
      c.n = n;
      c.k = k;
      c.rows = {3, 20, 0, 70};
      if (gated) c.epilogue = Activation();
      expect_accurate(c);
    }
  }
}

TEST_F(GpuGroupedGemm, EveryActivationOrderAndTypeOfWeights) {
  for (const ActivationKind kind :
       {ActivationKind::kSilu, ActivationKind::kGelu, ActivationKind::kGeluTanh,
        ActivationKind::kRelu, ActivationKind::kRelu2, ActivationKind::kIdentity}) {
    for (const bool gated : {false, true}) {
      for (const GateOrder order :
           {GateOrder::kGateUp, GateOrder::kUpGate, GateOrder::kInterleaved}) {
        if (!gated && order != GateOrder::kGateUp) continue;
        for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
          Case c = wide_case();
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

TEST_F(GpuGroupedGemm, ClampsBiasesTransposedWeightsAndStrides) {
  Case c = wide_case();
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

TEST_F(GpuGroupedGemm, SameBitsInEveryLayout) {
  for (const bool gated : {false, true}) {
    Case c = wide_case();
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

// The ends may change between replays: nothing is read by the host.
TEST_F(GpuGroupedGemm, GraphsReadTheEndsOfTheirReplay) {
  Case c = wide_case();
  c.epilogue = Activation();
  c.rows = {30, 0, 70, 9};
  const Problem problem(c);
  GroupedGemmOptions options;
  options.backend = Backend::kCuda;
  GroupedGemm gemm(problem.spec(), problem.weights(), options);
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
        input.stream = stream.handle();
        gpu::Graph graph = gpu::Graph::capture(stream, [&] { op.run(input, output); });
        graph.launch(stream);
        stream.synchronize();
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
  for (const bool fp8 : {false, true}) {
    for (const DType type : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (const std::vector<int>& rows : {std::vector<int>{3, 0, 17, 1}, {130, 0, 300, 150}}) {
        Case c = fp8 ? fp8_case(Scales::kBlocks) : wide_case();
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
    Case c = wide_case();
    c.epilogue = Activation();
    c.order = order;
    c.products = c.biased = true;
    c.pad = 8;
    expect_accurate(c);
  }
}

// FP8 rows are gathered with their scales.
TEST_F(GpuGroupedGemm, AnIndexOrAnUnalignedRowGivesTheSameBits) {
  for (const bool fp8 : {false, true}) {
    Case c = fp8 ? fp8_case(Scales::kBlocks) : wide_case();
    c.x = fp8 ? DType::kF8E4M3 : DType::kBF16;
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
  for (const bool fp8 : {false, true}) {
    Case c = fp8 ? fp8_case(Scales::kBlocks) : wide_case();
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
    for (const int tile_rows : heights) {
      for (const int stages : fp8 ? std::vector<int>{0} : std::vector<int>{2, 3, 12}) {
        for (const int band : {1, 3, 64}) {
          for (const bool paired : {false, true}) {
            for (const int splits : {1, 2, 4}) {
              GroupedSchedule schedule;
              schedule.tile_rows = tile_rows;
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
      GroupedSchedule schedule;
      schedule.tile_rows = tile_rows;
      schedule.splits = 8;
      expect_as_good(plain, run_on_gpu(plain, schedule));
    }
  }
  EXPECT_GE(count, 134);
}

// The rows of a tile come one by one: at every height, by blocks and by pairs. An entry that names
// no row stands for zeros.
TEST_F(GpuGroupedGemm, RowsThroughAnIndexAtEveryHeight) {
  for (const bool fp8 : {false, true}) {
    for (const int height : {1, 16, 31, 64, 65, 96, 120, 128, 200, 256, 300}) {
      Case c = fp8 ? fp8_case(Scales::kBlocks) : wide_case();
      c.x = fp8 ? DType::kF8E4M3 : DType::kBF16;
      c.rows = {height, 0, height / 2 + 1};
      c.gathered = false;
      const Problem problem(c);
      for (const bool paired : {false, true}) {
        SCOPED_TRACE(::testing::Message() << c << (paired ? ", paired" : ""));
        GroupedSchedule schedule;
        schedule.paired = paired;
        const Rows all = run_on_gpu(problem, schedule);
        expect_as_good(problem, all);
        GroupedGemmOptions options;
        options.schedule = schedule;
        options.backend = Backend::kCuda;
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

// What needs memory of its own is refused while it cannot be had.
TEST_F(GpuGroupedGemm, ConvertedRowsAreCapturedAfterACallOfTheirSize) {
  Case c = wide_case();
  c.rows = {30, 0, 70, 9};
  c.gathered = false;
  c.x = DType::kF16;
  const Problem problem(c);
  const Rows expected = run_on_gpu(problem);
  GroupedGemmOptions options;
  options.backend = Backend::kCuda;
  GroupedGemm gemm(problem.spec(), problem.weights(), options);
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
          input.stream = stream.handle();
          gpu::Graph graph = gpu::Graph::capture(stream, [&] { op.run(input, output); });
          graph.launch(stream);
          stream.synchronize();
          out_there.download(out.data(), out.size());
        });
  };
  EXPECT_ERROR(captured(), ErrorCode::kUnsupported, "make a call of this size before it");
  EXPECT_TRUE(problem.run(gemm, call_on_device) == expected);
  EXPECT_TRUE(captured() == expected);
}

TEST_F(GpuGroupedGemm, WhatItDoesNotHaveIsRefused) {
  const auto refused = [](const Case& c, const char* part) {
    EXPECT_ERROR(run_on_gpu(Problem(c)), ErrorCode::kUnsupported, part);
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
    EXPECT_ERROR(run_on_gpu(problem, schedule), ErrorCode::kInvalidArgument, part);
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
