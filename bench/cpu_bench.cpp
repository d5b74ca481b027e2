// Times the CPU engine at OLMoE geometry in bf16. The same run measures what bounds it on the same
// cores: the library's own rate on the same tiles, and the rate at which memory is read.
//
//   cpu_bench --benchmark_format=json
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <random>
#include <thread>
#include <vector>

#include "base/convert.h"
#include "cpu/thread_trace.h"
#include "cpu/tile_gemm.h"
#include "model/config.h"
#include "models/generate.h"
#include "protocol/partition.h"
#include "switchyard/layer.h"
#include "switchyard/routing.h"

namespace switchyard {
namespace {

using Clock = std::chrono::steady_clock;

int hardware_threads() {
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

LayerSpec olmoe() {
  const ModelEntry& entry = find_model("olmoe");
  return *parse_config(entry.config_json, entry.name).layers.front();
}

const MoeWeights& olmoe_weights() {
  static const MoeWeights weights = generate_weights(olmoe(), DType::kBF16, 1);
  return weights;
}

std::vector<std::uint16_t> random_bf16(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> values(count);
  for (std::uint16_t& v : values) v = f32_to_bf16(normal(generator));
  return values;
}

double expert_flops(const LayerSpec& spec, std::int64_t tokens) {
  return 2.0 * 3 * spec.hidden * spec.intermediate * spec.top_k * static_cast<double>(tokens);
}

// Runs body(i) on `count` threads and returns the seconds until the last has finished.
template <typename Body>
double run_threads(int count, Body&& body) {
  const auto start = Clock::now();
  std::vector<std::thread> threads;
  for (int i = 1; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
  body(0);
  for (std::thread& thread : threads) thread.join();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Range 0: tokens in all; 1: ranks, as threads sharing the machine's cores. Passes take turns at
// several batches, so that a small one does not find its few experts' weights in the cache.
void time_layer(benchmark::State& state, bool trace) {
  const LayerSpec spec = olmoe();
  const MoeWeights& weights = olmoe_weights();
  const std::int64_t tokens = state.range(0);
  const int ranks = static_cast<int>(state.range(1));
  constexpr std::uint64_t kBatches = 16;
  const std::vector<std::uint16_t> x =
      random_bf16(static_cast<std::size_t>(kBatches * tokens * spec.hidden), 3);
  std::vector<std::uint16_t> y(static_cast<std::size_t>(tokens * spec.hidden));

  std::atomic<int> arrived{0};
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> round{0};
  double weight_bytes = 0;
  const std::vector<World> worlds = World::threads(ranks);
  std::vector<std::thread> threads;
  for (const World& world : worlds) {
    threads.emplace_back([&, world] {
      LayerOptions options;
      options.max_tokens = static_cast<int>(tokens);
      options.diagnostics.trace = trace;
      MoeLayer moe(world, spec, weights, options);
      const std::int64_t begin = tokens * world.rank() / ranks;
      const std::int64_t end = tokens * (world.rank() + 1) / ranks;
      ForwardInput input;
      input.activations = {nullptr, DType::kBF16, end - begin, spec.hidden, spec.hidden};
      ForwardOutput output;
      output.data = y.data() + begin * spec.hidden;
      for (std::uint64_t next = 1;; ++next) {
        round.wait(next - 1);
        if (stop) return;
        const std::int64_t batch = static_cast<std::int64_t>(next % kBatches) * tokens;
        input.activations.data = x.data() + (batch + begin) * spec.hidden;
        moe.forward(input, output);
        if (world.rank() == 0) {
          weight_bytes +=
              static_cast<double>(touched_weight_bytes(weights, moe.stats().tokens_per_expert));
        }
        if (arrived.fetch_add(1) + 1 == ranks) arrived.notify_all();
      }
    });
  }
  const auto pass = [&] {
    const auto start = Clock::now();
    arrived = 0;
    ++round;
    round.notify_all();
    for (int seen; (seen = arrived.load()) < ranks;) arrived.wait(seen);
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  pass();  // makes kernels, touches pages
  // The CPU time of all threads. On a shared machine, other programs change it less than wall time.
  const std::clock_t cpu_start = std::clock();
  for (auto _ : state) state.SetIterationTime(pass());
  const double cpu_seconds = static_cast<double>(std::clock() - cpu_start) / CLOCKS_PER_SEC;
  stop = true;
  ++round;
  round.notify_all();
  for (std::thread& thread : threads) thread.join();

  using benchmark::Counter;
  state.counters["cpu_seconds"] = Counter(cpu_seconds, Counter::kAvgIterations);
  state.counters["flops"] =
      Counter(expert_flops(spec, tokens), Counter::kIsIterationInvariantRate, Counter::kIs1000);
  state.counters["weight_bytes"] = Counter(weight_bytes / static_cast<double>(round - 1),
                                           Counter::kIsIterationInvariantRate, Counter::kIs1000);
}

void layer(benchmark::State& state) { time_layer(state, false); }
void traced_layer(benchmark::State& state) { time_layer(state, true); }

// Measures the library's rate on the tiles of a layer pass: the same products in the same order,
// and nothing else.
void library_tiles(benchmark::State& state) {
  const LayerSpec spec = olmoe();
  const MoeWeights& weights = olmoe_weights();
  const std::int64_t tokens = state.range(0);
  const SyntheticRouting routing =
      synthetic_routing(static_cast<int>(tokens), spec.num_experts, spec.top_k, 1.0, 5);
  std::vector<std::uint32_t> rows(static_cast<std::size_t>(spec.num_experts));
  for (const std::int32_t id : routing.ids) ++rows[static_cast<std::size_t>(id)];

  struct Product {
    const MatrixView* weight;
    int first, m, n;
  };
  std::vector<Product> products;
  const protocol::TileShape shape;
  for (int e = 0; e < spec.num_experts; ++e) {
    const protocol::TokenTiles tiles(rows[static_cast<std::size_t>(e)], shape);
    const FfnWeights& ffn = weights.experts[static_cast<std::size_t>(e)];
    for (std::uint32_t t = 0; t < tiles.count; ++t) {
      const int n = static_cast<int>(protocol::round_up(tiles.end(t) - tiles.begin(t), 16u));
      for (int first = 0; first < spec.intermediate; first += 256) {
        products.push_back({&ffn.gate, first, 256, n});
        products.push_back({&ffn.up, first, 256, n});
      }
      for (int first = 0; first < spec.hidden; first += 512) {
        products.push_back({&ffn.down, first, 512, n});
      }
    }
  }
  const std::vector<std::uint16_t> x =
      random_bf16(static_cast<std::size_t>(shape.max_height * spec.hidden), 3);
  const auto pass = [&] {
    std::atomic<std::size_t> next{0};
    return run_threads(hardware_threads(), [&](int) {
      const cpu::SingleThreadedLibrary confined;
      thread_local cpu::TileGemm gemm(DType::kBF16);
      std::vector<float> c(512 * 128);
      for (std::size_t i; (i = next.fetch_add(1)) < products.size();) {
        const Product& p = products[i];
        gemm.multiply(p.m, p.n, static_cast<int>(p.weight->cols), p.weight->row(p.first),
                      p.weight->row_stride, 1, x.data(), p.weight->cols, c.data());
      }
    });
  };
  pass();
  for (auto _ : state) state.SetIterationTime(pass());
  state.counters["flops"] =
      benchmark::Counter(expert_flops(spec, tokens), benchmark::Counter::kIsIterationInvariantRate,
                         benchmark::Counter::kIs1000);
}

// Reads all expert weights once, with all threads together.
void memory_read(benchmark::State& state) {
  const MoeWeights& weights = olmoe_weights();
  const LayerSpec spec = olmoe();
  const auto* begin = static_cast<const std::uint64_t*>(weights.experts.front().gate.data);
  const std::uint64_t bytes = std::uint64_t{2} * 3 * static_cast<std::uint64_t>(spec.num_experts) *
                              static_cast<std::uint64_t>(spec.hidden) *
                              static_cast<std::uint64_t>(spec.intermediate);
  const std::uint64_t words = bytes / 8 / static_cast<std::uint64_t>(hardware_threads());
  const auto pass = [&] {
    return run_threads(hardware_threads(), [&](int i) {
      const std::uint64_t* p = begin + static_cast<std::uint64_t>(i) * words;
      std::uint64_t sums[32] = {};
      for (std::uint64_t w = 0; w + 32 <= words; w += 32) {
        for (int j = 0; j < 32; ++j) sums[j] ^= p[w + static_cast<std::uint64_t>(j)];
      }
      benchmark::DoNotOptimize(sums);
    });
  };
  for (auto _ : state) state.SetIterationTime(pass());
  state.counters["weight_bytes"] =
      benchmark::Counter(static_cast<double>(bytes), benchmark::Counter::kIsIterationInvariantRate,
                         benchmark::Counter::kIs1000);
}

// Measures what recording adds to a task: it reads the clock three times and writes an event.
void record_event(benchmark::State& state) {
  constexpr std::size_t kEvents = 4096;
  cpu::ThreadTrace trace(0, kEvents);
  for (auto _ : state) {
    if (trace.events().size() == kEvents) trace.clear();
    trace.begin({TraceKind::kGemm1, TraceRole::kMath});
    trace.complete();
    trace.end();
  }
}

BENCHMARK(record_event);
BENCHMARK(memory_read)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(library_tiles)->Arg(2048)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(layer)
    ->ArgsProduct({{1, 32, 256, 2048}, {1, 4}})
    ->ArgNames({"tokens", "ranks"})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(traced_layer)
    ->ArgsProduct({{1, 256, 2048}, {1, 4}})
    ->ArgNames({"tokens", "ranks"})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace switchyard

BENCHMARK_MAIN();
