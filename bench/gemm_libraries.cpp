// Compares libraries that could multiply the CPU engine's tiles: oneDNN, libxsmm and OpenBLAS, on
// the same tiles and cores. Each is called in the form that suits it best. Where a library wants
// the tokens packed, packing is not timed. Weights are rotated through 256 MiB. docs/decisions
// records the outcome.
//
//   gemm_libraries --benchmark_format=json
#include <benchmark/benchmark.h>
#include <cblas.h>
#include <libxsmm.h>

#include <chrono>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/convert.h"
#include "cpu/tile_gemm.h"

namespace switchyard {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kWeightBytes = std::size_t{256} << 20;

struct Tile {
  int m, n, k;  // weight rows, tokens, depth
};

struct Operands {
  std::vector<float> w32, x32;
  std::vector<std::uint16_t> w16, x16;

  Operands() {
    std::mt19937_64 generator(1);
    std::normal_distribution<float> normal;
    w32.resize(kWeightBytes / 4);
    for (std::size_t i = 0; i < w32.size(); ++i) {
      w32[i] = i < (1u << 20) ? normal(generator) : w32[i - (1u << 20)];
    }
    w16.resize(kWeightBytes / 2);
    for (std::size_t i = 0; i < w16.size(); ++i) w16[i] = f32_to_bf16(w32[i % w32.size()]);
    x32.assign(w32.begin(), w32.begin() + (1 << 19));
    x16.assign(w16.begin(), w16.begin() + (1 << 19));
  }
};

const Operands& operands() {
  static const Operands all;
  return all;
}

// Every hardware thread calls multiply(weight index) on weights of its own. `make` returns the
// function `multiply` of one thread. The result is the rate over all threads.
template <typename Make>
void measure(benchmark::State& state, Tile tile, std::size_t element_bytes, Make&& make) {
  const auto threads = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t weight_elements = static_cast<std::size_t>(tile.m) * tile.k;
  const std::size_t weights = kWeightBytes / element_bytes / weight_elements;
  constexpr int kCalls = 64;
  std::size_t round = 0;
  const auto pass = [&] {
    const auto start = Clock::now();
    std::vector<std::thread> workers;
    for (unsigned t = 0; t < threads; ++t) {
      workers.emplace_back([&, t] {
        const cpu::SingleThreadedLibrary confined;
        auto multiply = make();
        for (int i = 0; i < kCalls; ++i) {
          multiply((round + t * weights / threads + i) % weights * weight_elements);
        }
      });
    }
    for (std::thread& worker : workers) worker.join();
    round += kCalls;
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  pass();
  for (auto _ : state) state.SetIterationTime(pass());
  state.counters["flops"] = benchmark::Counter(2.0 * tile.m * tile.n * tile.k * kCalls * threads,
                                               benchmark::Counter::kIsIterationInvariantRate,
                                               benchmark::Counter::kIs1000);
}

Tile tile_of(const benchmark::State& state) {
  return {static_cast<int>(state.range(0)), static_cast<int>(state.range(1)),
          static_cast<int>(state.range(2))};
}

template <DType kDType>
void onednn(benchmark::State& state) {
  const Tile tile = tile_of(state);
  measure(state, tile, size_of(kDType), [tile] {
    return [tile, c = std::vector<float>(static_cast<std::size_t>(tile.m) * tile.n)](
               std::size_t at) mutable {
      thread_local cpu::TileGemm gemm(kDType);
      const void* w = kDType == DType::kF32 ? static_cast<const void*>(&operands().w32[at])
                                            : &operands().w16[at];
      const void* x = kDType == DType::kF32 ? static_cast<const void*>(operands().x32.data())
                                            : operands().x16.data();
      gemm.multiply(tile.m, tile.n, tile.k, w, tile.k, 1, x, tile.k, c.data());
    };
  });
}

// Column-major: C [n, m] = X [n, k] W^T [k, m], with the bf16 X in pairs of k as the library wants
// it.
template <DType kDType>
void libxsmm(benchmark::State& state) {
  const Tile tile = tile_of(state);
  const libxsmm_blasint lda = tile.n, ldb = tile.k, ldc = tile.n;
  const float alpha = 1, beta = 0;
  if constexpr (kDType == DType::kF32) {
    const auto kernel = libxsmm_smmdispatch(tile.n, tile.m, tile.k, &lda, &ldb, &ldc, &alpha, &beta,
                                            nullptr, nullptr);
    if (kernel == nullptr) return state.SkipWithError("libxsmm has no kernel for this shape");
    measure(state, tile, 4, [tile, kernel] {
      return [kernel, c = std::vector<float>(static_cast<std::size_t>(tile.m) * tile.n)](
                 std::size_t at) mutable {
        kernel(operands().x32.data(), &operands().w32[at], c.data());
      };
    });
  } else {
    const int flags = LIBXSMM_GEMM_FLAG_VNNI_A;
    const auto kernel = libxsmm_bsmmdispatch(tile.n, tile.m, tile.k, &lda, &ldb, &ldc, &alpha,
                                             &beta, &flags, nullptr);
    if (kernel == nullptr) return state.SkipWithError("libxsmm has no kernel for this shape");
    measure(state, tile, 2, [tile, kernel] {
      return [kernel, c = std::vector<float>(static_cast<std::size_t>(tile.m) * tile.n)](
                 std::size_t at) mutable {
        kernel(reinterpret_cast<const libxsmm_bfloat16*>(operands().x16.data()),
               reinterpret_cast<const libxsmm_bfloat16*>(&operands().w16[at]), c.data());
      };
    });
  }
}

void openblas_f32(benchmark::State& state) {
  const Tile tile = tile_of(state);
  openblas_set_num_threads(1);
  measure(state, tile, 4, [tile] {
    return [tile, c = std::vector<float>(static_cast<std::size_t>(tile.m) * tile.n)](
               std::size_t at) mutable {
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, tile.m, tile.n, tile.k, 1,
                  &operands().w32[at], tile.k, operands().x32.data(), tile.k, 0, c.data(), tile.n);
    };
  });
}

void shapes(benchmark::internal::Benchmark* benchmark) {
  for (const int n : {16, 32, 64, 128}) {
    benchmark->Args({256, n, 2048});  // OLMoE gate or up
    benchmark->Args({512, n, 1024});  // OLMoE down
  }
  benchmark->ArgNames({"m", "n", "k"})
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond)
      ->MinTime(0.2);
}

BENCHMARK_TEMPLATE(onednn, DType::kBF16)->Name("onednn_bf16")->Apply(shapes);
BENCHMARK_TEMPLATE(libxsmm, DType::kBF16)->Name("libxsmm_bf16")->Apply(shapes);
BENCHMARK_TEMPLATE(onednn, DType::kF32)->Name("onednn_f32")->Apply(shapes);
BENCHMARK_TEMPLATE(libxsmm, DType::kF32)->Name("libxsmm_f32")->Apply(shapes);
BENCHMARK(openblas_f32)->Apply(shapes);

}  // namespace
}  // namespace switchyard

BENCHMARK_MAIN();
