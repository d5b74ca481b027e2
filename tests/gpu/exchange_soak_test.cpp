// Dispatch and combine back to back for long: nothing between the calls of a rank but its stream,
// and everything made and checked on the device.
#include <gtest/gtest.h>

#include <cstdlib>

#include "gpu/device.h"
#include "gpu/exchange_soak_kernels.h"
#include "support/numbers.h"
#include "support/on_gpu.h"
#include "support/ranks.h"
#include "switchyard/exchange.h"

namespace switchyard::testing {
namespace {

// See exchange_test.cpp.
const bool kManyQueues = ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0) == 0;

using GpuExchangeSoak = OnGpu<::testing::TestWithParam<int>>;

struct Arrays {
  gpu::DeviceBuffer tokens, ids, weights, rows, ends, num_rows, origins, row_weights, out, findings;

  Arrays(const SoakShape& shape, std::int64_t capacity)
      : tokens(count(shape.max_tokens, shape.hidden) * 2),
        ids(count(shape.max_tokens, shape.top_k) * 4),
        weights(ids.bytes()),
        rows(count(capacity, shape.hidden) * 2),
        ends(count(shape.experts, 4)),
        num_rows(4),
        origins(count(capacity, sizeof(RowOrigin))),
        row_weights(count(capacity, 4)),
        out(count(shape.max_tokens, shape.hidden) * 4),
        findings(sizeof(SoakFindings)) {
    const SoakFindings none{};
    findings.upload(&none, sizeof none);
  }
  static std::size_t count(std::int64_t a, std::int64_t b) {
    return static_cast<std::size_t>(a * b);
  }

  template <typename T>
  static T* as(const gpu::DeviceBuffer& buffer) {
    return reinterpret_cast<T*>(buffer.data());
  }
  SoakMemory memory() const {
    return {as<std::uint16_t>(tokens), as<std::int32_t>(ids),  as<float>(weights),
            as<std::uint16_t>(rows),   as<std::int32_t>(ends), as<std::int32_t>(num_rows),
            as<RowOrigin>(origins),    as<float>(row_weights), as<float>(out)};
  }
};

TEST_P(GpuExchangeSoak, CallsWithoutABarrier) {
  const auto calls =
      static_cast<std::uint32_t>(test::number_from("SWITCHYARD_SOAK_EXCHANGES", 3000));
  // Rows of more than one step of a warp, and enough tokens for placing to begin early.
  const SoakShape shape{GetParam(), 32, 4, 2048, 400};
  test::run_threads(
      World::threads(shape.ranks, test::with_deadline(std::chrono::milliseconds(30'000))),
      [&](World& world) {
        const ExchangeSpec spec{.hidden = shape.hidden,
                                .num_experts = shape.experts,
                                .top_k = shape.top_k,
                                .max_tokens = shape.max_tokens};
        const ExchangeOptions options{.backend = Backend::kCuda,
                                      .device = world.rank() % gpu::device_count()};
        gpu::set_device(options.device);
        const gpu::Stream stream;
        Exchange exchange(world, spec, options);
        ExchangeHandle handle = exchange.make_handle();
        const std::int64_t capacity = exchange.rows_needed();
        const Arrays arrays(shape, capacity);
        const SoakMemory memory = arrays.memory();
        auto* const findings = Arrays::as<SoakFindings>(arrays.findings);
        soak_load();
        world.barrier();
        for (std::uint32_t c = 0; c < calls; ++c) {
          const bool reuse = c % 7 == 6, in_two = c % 3 == 1;
          const SoakCall call{shape, world.rank(), c, reuse ? c - 1 : c};
          const int tokens = soak_tokens(shape, world.rank(), call.ids_of);
          soak_fill(call, memory, stream.handle());
          DispatchInput input;
          input.tokens = {arrays.tokens.data(), DType::kBF16, tokens, shape.hidden, shape.hidden};
          const auto slots = static_cast<std::size_t>(tokens * shape.top_k);
          input.reuse = reuse;
          if (!reuse) {
            input.ids = {memory.ids, DType::kI32, slots};
            input.weights = {memory.weights, DType::kF32, slots};
          }
          input.stream = stream.handle();
          const DispatchOutput output{.rows = arrays.rows.data(),
                                      .capacity = capacity,
                                      .ends = memory.ends,
                                      .num_rows = memory.num_rows,
                                      .origins = memory.origins,
                                      .weights = memory.row_weights,
                                      .stream = stream.handle()};
          if (in_two) {
            exchange.dispatch_send(input, handle);
            exchange.dispatch_recv(output, handle);
          } else {
            exchange.dispatch(input, output, handle);
          }
          soak_check_rows(call, memory, findings, stream.handle());
          CombineInput results;
          results.rows = {arrays.rows.data(), DType::kBF16, capacity, shape.hidden, shape.hidden};
          results.stream = stream.handle();
          exchange.combine(
              results, {.data = arrays.out.data(), .dtype = DType::kF32, .stream = stream.handle()},
              handle);
          soak_check_sums(call, memory, findings, stream.handle());
          // Only this rank waits. A queue of launches that is full would stop this process's
          // threads.
          if (c % 40 == 39) stream.synchronize();
        }
        stream.synchronize();
        exchange.check();
        SoakFindings found{};
        arrays.findings.download(&found, sizeof found);
        EXPECT_EQ(found.wrong_rows, 0u)
            << "of " << found.rows << ", first in call " << found.first_wrong - 1;
        EXPECT_EQ(found.wrong_sums, 0u)
            << "of " << found.sums << ", first in call " << found.first_wrong - 1;
        EXPECT_GE(found.rows, calls);
        EXPECT_EQ(exchange.stats().dispatches, calls);
        EXPECT_EQ(exchange.stats().combines, calls);
        // Memory is freed when nobody waits any more.
        world.barrier();
      });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuExchangeSoak, ::testing::Values(1, 2, 4));

}  // namespace
}  // namespace switchyard::testing
