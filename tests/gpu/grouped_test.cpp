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

// Moves a call's arrays to the device, and the output back.
void call_on_device(GroupedGemm& gemm, GroupedInput input, GroupedOutput output,
                    std::span<const std::byte> x, std::span<std::byte> out) {
  const gpu::DeviceBuffer x_there = upload(x.data(), x.size()),
                          ends = upload(input.ends.data(), bytes_of(input.ends)),
                          places = upload(output.index.data(), bytes_of(output.index)),
                          out_there = upload(out.data(), out.size());
  input.x.data = x_there.data();
  input.ends = moved(input.ends, ends);
  output.data = out_there.data();
  output.index = moved(output.index, places);
  gemm.run(input, output);
  gpu::synchronize_device();
  if (!out.empty()) out_there.download(out.data(), out.size());
}

Rows run_on_gpu(const Problem& problem) {
  GroupedGemmOptions options;
  options.backend = Backend::kCuda;
  options.compute = problem.get().compute;
  GroupedGemm gemm(problem.spec(), problem.weights(), options);
  EXPECT_EQ(gemm.compute(), DType::kBF16);
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

void expect_accurate(const Case& c) {
  SCOPED_TRACE(::testing::Message() << c);
  const Problem problem(c);
  expect_as_good(problem, run_on_gpu(problem));
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
  const Rows replayed =
      problem.run(gemm, [](GroupedGemm& op, GroupedInput input, GroupedOutput output,
                           std::span<const std::byte> x, std::span<std::byte> out) {
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
  c = wide_case();
  c.x = DType::kF32;
  refused(c, "x is f32");
  c = wide_case();
  c.gathered = false;
  refused(c, "the input has an index");
  c = wide_case();
  c.weighted = true;
  refused(c, "row weights");
}

}  // namespace
}  // namespace switchyard::testing
