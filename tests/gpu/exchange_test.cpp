// Exchange on GPUs against plain loops. Where there are fewer GPUs than ranks, ranks share them.
#include "switchyard/exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <thread>

#include "gpu/device.h"
#include "gpu/exchange_soak_kernels.h"
#include "support/device_exchange.h"
#include "support/exchange_checks.h"
#include "support/numbers.h"
#include "support/on_gpu.h"
#include "support/ranks.h"

namespace switchyard::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

constexpr DType kFp8 = DType::kF8E4M3;

// Eight ranks have sixteen streams on one device. Streams that share one of its queues wait for
// each other, and a rank's kernels would wait behind another's that wait for them.
const bool kManyQueues = ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0) == 0;

using GpuExchange = OnGpu<::testing::Test>;

ExchangeSpec small_spec(int num_experts = 12, int top_k = 3, int max_tokens = 20) {
  return small_exchange<Player>(num_experts, top_k, max_tokens);
}

INSTANTIATE_TYPED_TEST_SUITE_P(OnGpus, ExchangeOf, Player);

class GpuExchangeShapes : public OnGpu<::testing::TestWithParam<ExchangeShape>> {};
TEST_P(GpuExchangeShapes, RowsArriveAndResultsComeBack) { check_shape<Player>(GetParam(), 700); }
INSTANTIATE_TEST_SUITE_P(Sizes, GpuExchangeShapes, ::testing::ValuesIn(exchange_shapes()));
INSTANTIATE_TEST_SUITE_P(Large, GpuExchangeShapes,
                         ::testing::Values(ExchangeShape{8, 40, 32, RowLayout::blocked(1)},
                                           ExchangeShape{8, 1024, 8, RowLayout::blocked(128)}));

// Whole models' rows, many tokens, few SMs.
TEST_F(GpuExchange, LargeRowsOnFewSms) {
  ExchangeOptions options;
  for (const int sms : {0, 1, 8}) {
    options.max_sms = sms;
    ExchangeSpec spec = small_spec(64, 8, 300);
    spec.hidden = 7168;
    check_round_trip<Player>(ExchangeBatch(spec, 4, DType::kBF16, 2, {300, 1, 0, 257}),
                             DType::kBF16, options);
    spec.dispatch = kFp8;
    check_round_trip<Player>(ExchangeBatch(spec, 2, DType::kBF16, 2, {300, 2}), DType::kBF16,
                             options);
  }
}

// Nothing between the calls of a rank but its stream: ranks run ahead of each other as far as the
// two windows let them. What is left at the end must be right, for each of the batches.
TEST_F(GpuExchange, HundredsOfCallsWithoutABarrier) {
  constexpr std::size_t kBatches = 5;
  const auto calls = static_cast<int>(test::number_from("SWITCHYARD_SOAK_EXCHANGES", 300));
  for (const int ranks : {1, 2, 4, 8}) {
    SCOPED_TRACE(ranks);
    ExchangeSpec spec = small_spec(32, 4, 60);
    spec.layout = RowLayout::blocked(4);
    std::vector<ExchangeBatch> batches;
    for (std::size_t i = 0; i < kBatches; ++i) {
      batches.emplace_back(spec, ranks, DType::kBF16, 20 + i);
    }
    test::run_threads(Player::worlds(ranks), [&](World& world) {
      Player player(world, spec, kBatches);
      for (std::size_t i = 0; i < kBatches; ++i) player.round(batches[i], DType::kF32, i);
      const auto poison_sums = [&](std::size_t i) {
        const std::vector<std::uint8_t> nan(player.arrays(i).out.bytes(), 0xff);
        player.arrays(i).out.upload(nan.data(), nan.size());
      };
      for (std::size_t i = 0; i < kBatches; ++i) {
        poison_sums(i);
        player.load(batches[i], i);
      }
      for (int c = 0; c < calls; ++c) {
        const std::size_t i = static_cast<std::size_t>(c) % kBatches;
        player.enqueue_dispatch(i);
        player.enqueue_combine(DType::kF32, i);
        // Only this rank waits. A queue of launches that is full would stop this process's threads.
        if (c % 40 == 39) player.stream->synchronize();
      }
      player.stream->synchronize();
      for (std::size_t i = 0; i < kBatches; ++i) {
        wrong_rows(batches[i], world.rank(), player.spec().layout, player.got(i));
        wrong_sums(batches[i], world.rank(), player.sums(batches[i], DType::kF32, i));
      }
      EXPECT_EQ(player.exchange().stats().dispatches, kBatches + static_cast<unsigned>(calls));
      EXPECT_EQ(player.exchange().stats().combines, kBatches + static_cast<unsigned>(calls));
    });
  }
}

// The numbers of calls advance on the device: each replay is another call, with what the memory
// holds then.
TEST_F(GpuExchange, GraphsAreReplayedWithOtherRouting) {
  for (const int ranks : {1, 2, 4}) {
    SCOPED_TRACE(ranks);
    const ExchangeSpec spec = small_spec(16, 4, 40);
    std::vector<int> counts{40, 0, 13, 29};
    counts.resize(static_cast<std::size_t>(ranks));
    std::vector<ExchangeBatch> batches;
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      batches.emplace_back(spec, ranks, DType::kBF16, 40 + seed, counts);
    }
    test::run_threads(Player::worlds(ranks), [&](World& world) {
      Player player(world, spec);
      player.round(batches[0]);
      check_graphs(player, batches);
    });
  }
}

// As RanksTest.AThousandStartsOnASharedGpu; an exchange's calls are several kernels each.
TEST_F(GpuExchange, AThousandStartsOnASharedGpu) {
  const int starts = static_cast<int>(test::number_from("SWITCHYARD_STARTS", 1000)) / 3;
  for (const int ranks : {2, 4, 8}) {
    const ExchangeSpec spec = small_spec();
    const ExchangeBatch batch(spec, ranks, DType::kBF16, 7);
    test::run_threads(Player::worlds(ranks), [&](World& world) {
      Player player(world, spec, 1, {.deadline = std::chrono::seconds(5)});
      player.round(batch);
      for (int start = 0; start < starts; ++start) {
        world.barrier();
        for (int i = 0; i < 2; ++i) {
          player.enqueue_dispatch();
          player.enqueue_combine(DType::kF32);
        }
        player.stream->synchronize();
      }
      player.exchange().check();
      wrong_sums(batch, world.rank(), player.sums(batch, DType::kF32));
      world.barrier();
    });
  }
}

// For a caller that allocates exactly. Too little room is told by the next call, and what has room
// is there.
TEST_F(GpuExchange, ExactAllocationAndTooLittleRoom) {
  for (const RowLayout& layout :
       {RowLayout::packed(), RowLayout::blocked(8), RowLayout::padded(0)}) {
    ExchangeSpec spec = small_spec();
    spec.layout = layout;
    const ExchangeBatch batch(spec, 3, DType::kBF16, 8, {20, 13, 20});
    test::run_threads(Player::worlds(3), [&](World& world) {
      Player player(world, spec);
      for (int i = 0; i < 3; ++i) {
        player.load(batch);
        player.exchange().dispatch_send(player.input(), player.handle);
        const std::int64_t rows = player.rows_that_came();
        EXPECT_LE(rows, player.exchange().rows_needed());
        DispatchOutput output = player.output();
        output.capacity = i == 1 ? 1 : rows;
        player.exchange().dispatch_recv(output, player.handle);
        player.stream->synchronize();
        if (i == 1) {
          const std::string message =
              test::error_of(ErrorCode::kCapacityExceeded, [&] { player.exchange().check(); });
          EXPECT_THAT(message, HasSubstr("less room"));
          continue;
        }
        wrong_rows(batch, world.rank(), player.spec().layout, player.got());
      }
    });
  }
}

TEST_F(GpuExchange, MoreRowsThanAPaddedExpertHasRoomFor) {
  ExchangeSpec spec = small_spec(4, 2);
  spec.layout = RowLayout::padded(8);
  const ExchangeBatch batch(spec, 2, DType::kBF16, 8, {20, 20});
  test::run_threads(Player::worlds(2), [&](World& world) {
    Player player(world, spec);
    player.load(batch);
    player.enqueue_dispatch();
    player.stream->synchronize();
    const std::string message =
        test::error_of(ErrorCode::kCapacityExceeded, [&] { player.exchange().check(); });
    EXPECT_THAT(message, HasSubstr("the padded layout has room for 8"));
    const ExchangeArrays got = player.got();
    for (const std::int32_t count : got.counts) EXPECT_LE(count, 8);
    // The exchange lives; results without room are zeros.
    player.upload_results(batch, got);
    player.enqueue_combine(DType::kF32);
    for (const float value : player.sums(batch, DType::kF32).floats()) {
      EXPECT_TRUE(std::isfinite(value));
    }
  });
}

// It is told once, and the other slots arrive.
TEST_F(GpuExchange, BadIdsAreTold) {
  const ExchangeSpec spec = small_spec();
  const auto told = [&](std::int64_t bad, const char* words, bool others_are_right) {
    ExchangeBatch batch(spec, 2, DType::kBF16, 1, {7, 9});
    batch.ids[1][4] = bad;
    if (!others_are_right) batch.ids[1][3] = bad;
    test::run_threads(Player::worlds(2), [&](World& world) {
      Player player(world, spec);
      player.load(batch);
      player.exchange().dispatch_send(player.input(), player.handle);
      player.stream->synchronize();
      if (world.rank() == 1) {
        const std::string message =
            test::error_of(ErrorCode::kInvalidArgument, [&] { player.exchange().check(); });
        EXPECT_THAT(message, HasSubstr(words));
      }
      player.exchange().dispatch_recv(player.output(), player.handle);
      const ExchangeArrays got = player.got();
      if (others_are_right) wrong_rows(batch, world.rank(), spec.layout, got);
    });
  };
  for (const std::int64_t bad :
       {std::int64_t{spec.num_experts}, std::int64_t{-2}, std::int64_t{1} << 40}) {
    told(bad, "token 1 has expert id", true);
  }
  told(5, "token 1 names expert 5 twice", false);
}

// A send ends although nobody receives, and no other rank has sent. So what comes between it and
// the receive runs meanwhile: rank 0 has done it before rank 1 sends.
TEST_F(GpuExchange, SendsWaitForNobody) {
  const ExchangeSpec spec = small_spec();
  const ExchangeBatch batch(spec, 2, DType::kBF16, 1, {20, 20});
  test::run_threads(Player::worlds(2), [&](World& world) {
    Player player(world, spec);
    player.load(batch);
    gpu::DeviceBuffer other(std::size_t{1} << 26);
    gpu::Event sent, worked, received;
    if (world.rank() == 1) world.barrier();
    player.exchange().dispatch_send(player.input(), player.handle);
    sent.record(*player.stream);
    other.fill(1, *player.stream);
    worked.record(*player.stream);
    worked.synchronize();
    if (world.rank() == 0) world.barrier();
    player.exchange().dispatch_recv(player.output(), player.handle);
    received.record(*player.stream);
    EXPECT_GT(gpu::Event::elapsed_us(sent, worked), 0);
    EXPECT_GT(gpu::Event::elapsed_us(worked, received), 0);
    wrong_rows(batch, world.rank(), player.spec().layout, player.got());
  });
}

// Within some deadlines every other rank says who is late, in this call and in all later ones.
class GpuExchangeStall : public OnGpu<::testing::TestWithParam<bool>> {};

TEST_P(GpuExchangeStall, EveryOtherRankNamesTheStalledOne) {
  constexpr int kRanks = 4, kStalled = 2;
  const bool in_combine = GetParam();
  const ExchangeSpec spec = small_spec();
  const ExchangeBatch batch(spec, kRanks, DType::kBF16, 1, {20, 20, 20, 20});
  std::vector<World> worlds = Player::worlds(kRanks, milliseconds(2'000));
  std::barrier all_told(kRanks);
  test::run_threads(worlds, [&](World& world) {
    Player player(world, spec);
    const bool stalls = world.rank() == kStalled;
    for (int i = 0; i < 3; ++i) player.round(batch);
    if (in_combine) player.enqueue_dispatch();
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    std::optional<WaitFailure> failure;
    std::string message;
    try {
      if (!stalls && in_combine) player.enqueue_combine(DType::kF32);
      if (!stalls && !in_combine) player.enqueue_dispatch();
      while (std::chrono::steady_clock::now() < until) {
        std::this_thread::sleep_for(milliseconds(5));
        if (!stalls) player.exchange().check();
        if (stalls && std::chrono::steady_clock::now() + milliseconds(12'000) > until) {
          // By now the others have given up, and its next call finds that out on the device.
          if (in_combine) {
            player.enqueue_combine(DType::kF32);
          } else {
            player.enqueue_dispatch();
          }
          player.stream->synchronize();
          player.exchange().check();
        }
      }
    } catch (const TimeoutError& error) {
      failure = error.failure();
      message = error.what();
    }
    EXPECT_TRUE(failure.has_value()) << "rank " << world.rank() << " noticed nothing";
    if (failure) {
      EXPECT_EQ(failure->peer_rank, kStalled) << message;
      EXPECT_STREQ(failure->phase, in_combine ? "combine" : "dispatch");
      EXPECT_THAT(message, HasSubstr("exchange"));
    }
    EXPECT_THROW(player.enqueue_dispatch(), Error);
    // The others are done seconds before the one that stalled, and players meet when they end.
    all_told.arrive_and_wait();
  });
  // The world lives.
  test::run_threads(worlds, [&](World& world) {
    Player player(world, spec);
    player.round(batch);
  });
}

INSTANTIATE_TEST_SUITE_P(Calls, GpuExchangeStall, ::testing::Bool());

// Sends wait for nobody: a kernel of rank 0's stream, between its send and its receive, ends when
// the other rank has sent.
TEST_F(GpuExchange, WorkBetweenSendAndReceive) {
  const ExchangeSpec spec = small_spec(12, 3, 300);
  const ExchangeBatch batch(spec, 2, DType::kBF16, 1, {300, 299});
  const ExchangeOptions options{.trace = true};
  std::vector<PassTrace> traces(2);
  std::vector<World> worlds = Player::worlds(2);
  Gate gate;
  test::run_threads(worlds, [&](World& world) {
    Player player(world, spec, 1, options);
    player.load(batch);
    world.barrier();
    const auto send = [&] {
      player.exchange().dispatch_send(player.input(), player.handle);
      player.stream->synchronize();
    };
    // Rank 1 sends when rank 0 has sent, and rank 0 receives when rank 1 has.
    if (world.rank() == 0) send();
    world.barrier();
    if (world.rank() == 0) {
      gate.hold(player.stream->handle());
    } else {
      send();
      gate.open();
    }
    player.exchange().dispatch_recv(player.output(), player.handle);
    const ExchangeArrays got = player.got();
    wrong_rows(batch, world.rank(), spec.layout, got);
    player.upload_results(batch, got);
    player.enqueue_combine(DType::kF32);
    wrong_sums(batch, world.rank(), player.sums(batch, DType::kF32));
    traces[static_cast<std::size_t>(world.rank())] = player.exchange().trace();
  });
  struct Times {
    std::int64_t sent = 0, ready = 0, came = 0, placed = 0;
    int sends = 0, placers = 0, returns = 0, sums = 0;
  };
  std::vector<Times> times;
  for (const PassTrace& trace : traces) {
    EXPECT_EQ(trace.num_ranks, 2);
    EXPECT_EQ(trace.epoch, 1u);
    Times& of = times.emplace_back();
    const auto counts = std::ranges::find(trace.events, TraceKind::kCounts, &TraceEvent::kind);
    ASSERT_NE(counts, trace.events.end());
    of.ready = counts->ready_ns;
    of.came = counts->begin_ns;
    for (const TraceEvent& event : trace.events) {
      EXPECT_LE(event.ready_ns, event.begin_ns);
      EXPECT_LE(event.begin_ns, event.end_ns);
      if (event.kind == TraceKind::kPack) {
        of.placed = std::max(of.placed, event.end_ns);
        ++of.placers;
      } else if (event.kind == TraceKind::kCombine) {
        ++of.sums;
      } else if (event.kind == TraceKind::kSend && event.begin_ns > of.came) {
        ++of.returns;
      } else if (event.kind == TraceKind::kRoute || event.kind == TraceKind::kSend) {
        of.sent = std::max(of.sent, event.end_ns);
        ++of.sends;
      } else {
        EXPECT_EQ(event.kind, TraceKind::kCounts);
      }
    }
    EXPECT_GT(of.sends, 1);
    EXPECT_GT(of.placers, 0);
    EXPECT_GT(of.returns, 0);
    EXPECT_GT(of.sums, 1);
    EXPECT_LE(of.sent, of.ready);
    EXPECT_LE(of.came, of.placed);
  }
  // Rank 0 sent, then worked while the other sent, and had nothing to wait for when it received.
  EXPECT_LT(times[0].sent, times[1].sent);
  EXPECT_LT(times[1].sent, times[0].ready);
  EXPECT_LT(times[0].came - times[0].ready, 1'000'000);
}

TEST_F(GpuExchange, WhatIsNotThereIsRefused) {
  const auto refused = [](const ExchangeSpec& spec, const ExchangeOptions& options) {
    std::vector<World> worlds = Player::worlds(1);
    return test::error_of(ErrorCode::kUnsupported,
                          [&] { Exchange exchange(worlds[0], spec, options_of(0, options)); });
  };
  ExchangeSpec spec = small_spec();
  spec.hidden = 140;
  EXPECT_THAT(refused(spec, {}), HasSubstr("multiple of 8"));
  spec = small_spec(1025);
  EXPECT_THAT(refused(spec, {}), HasSubstr("1025 experts"));
}

}  // namespace
}  // namespace switchyard::testing
