#include "machine/host_rates.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <numeric>
#include <random>

#include "base/threads.h"
#include "cpu/tile_gemm.h"

namespace switchyard::machine {
namespace {

using Clock = std::chrono::steady_clock;

// Other processes take time from some windows, and the mean over all would be theirs as well: a
// layer whose passes they left alone would then be faster than "what GEMMs reach here".
constexpr int kGemmWindows = 10;
// Work between two looks at the clock, so that the clock does not count where products are small.
constexpr double kUnclockedFlops = 1e6;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Runs body(i) on `count` threads and throws the first exception, if there was one.
void run_threads(int count, const std::function<void(int)>& body) {
  std::mutex mutex;
  std::exception_ptr failure;
  const auto guarded = [&](int i) {
    try {
      body(i);
    } catch (...) {
      const std::lock_guard lock(mutex);
      failure = std::current_exception();
    }
  };
  Threads threads(1, count, kThreadRemedy, guarded);
  guarded(0);
  threads.join();
  if (failure) std::rethrow_exception(failure);
}

// One thread's operands and library kernels.
class GemmWorker {
 public:
  GemmWorker(std::span<const TileProduct> products, DType dtype, unsigned seed)
      : products_(products), gemm_(dtype) {
    std::size_t most_a = 0;
    std::size_t most_x = 0;
    std::size_t most_c = 0;
    for (const TileProduct& p : products) {
      most_a = std::max(most_a, static_cast<std::size_t>(p.m) * static_cast<std::size_t>(p.k));
      most_x = std::max(most_x, static_cast<std::size_t>(p.n) * static_cast<std::size_t>(p.k));
      most_c = std::max(most_c, static_cast<std::size_t>(p.m) * static_cast<std::size_t>(p.n));
    }
    a_ = random_bytes(most_a * size_of(dtype), seed);
    x_ = random_bytes(most_x * size_of(dtype), seed + 1);
    c_.resize(most_c);
  }

  // Multiplies every shape once, so that generating its kernel is not measured.
  void warm_up() {
    std::vector<TileProduct> seen;
    for (const TileProduct& p : products_) {
      if (std::find(seen.begin(), seen.end(), p) != seen.end()) continue;
      seen.push_back(p);
      multiply(p);
    }
  }

  void multiply(const TileProduct& p) {
    gemm_.multiply(p.m, p.n, p.k, a_.data(), p.k, 1, x_.data(), p.k, c_.data());
  }

 private:
  // Every second byte is 0x3f. That makes ordinary numbers of about 1 in bf16 and fp32 alike: zeros
  // and denormals could be faster or slower than real data.
  static std::vector<std::uint16_t> random_bytes(std::size_t bytes, unsigned seed) {
    std::mt19937 generator(seed);
    std::vector<std::uint16_t> values((bytes + 1) / 2);
    for (std::uint16_t& v : values) {
      const auto bits = static_cast<std::uint32_t>(generator());
      v = static_cast<std::uint16_t>(0x3f00u | (bits & 0x80ffu));
    }
    return values;
  }

  std::span<const TileProduct> products_;
  cpu::TileGemm gemm_;
  std::vector<std::uint16_t> a_, x_;
  std::vector<float> c_;
};

// The bytes from a matrix's first element to its last, whatever its strides.
void add_range(const MatrixView& view, std::vector<ByteRange>& ranges) {
  if (view.empty() || view.rows == 0 || view.cols == 0) return;
  const std::int64_t last = (view.rows - 1) * view.row_stride + (view.cols - 1) * view.col_stride;
  ranges.emplace_back(static_cast<const std::byte*>(view.data),
                      static_cast<std::size_t>(last + 1) * size_of(view.dtype));
}

void add_ffn_ranges(const FfnWeights& ffn, std::vector<ByteRange>& ranges) {
  for (const MatrixView* view : {&ffn.gate, &ffn.up, &ffn.down}) add_range(*view, ranges);
}

const std::byte* end_of(ByteRange range) { return range.data() + range.size(); }

// The ranges sorted and without overlaps: interleaved matrices cover each other.
std::vector<ByteRange> merged(std::vector<ByteRange> ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](ByteRange a, ByteRange b) { return std::less<>()(a.data(), b.data()); });
  std::vector<ByteRange> result;
  for (const ByteRange range : ranges) {
    if (!result.empty() && range.data() < end_of(result.back())) {
      const std::byte* end = std::max(end_of(result.back()), end_of(range));
      result.back() = {result.back().data(), end};
    } else {
      result.push_back(range);
    }
  }
  return result;
}

// The xor of a block's words. It reads every word, and the compiler must keep it because the result
// is used.
std::uint64_t checksum(ByteRange block) {
  constexpr std::size_t kLanes = 32;
  std::uint64_t lanes[kLanes] = {};
  const std::byte* p = block.data();
  for (std::size_t left = block.size() / sizeof lanes; left > 0; --left, p += sizeof lanes) {
    std::uint64_t words[kLanes];
    std::memcpy(words, p, sizeof words);
    for (std::size_t i = 0; i < kLanes; ++i) lanes[i] ^= words[i];
  }
  std::uint64_t sum = 0;
  for (const std::uint64_t lane : lanes) sum ^= lane;
  return sum;
}

}  // namespace

double measure_gemm_rate(std::vector<TileProduct> products, DType dtype, int num_threads,
                         double seconds) {
  if (products.empty()) return 0;
  // A pass over all products may take longer than there is time. Shuffling keeps the first ones
  // from being one expert's alone.
  std::shuffle(products.begin(), products.end(), std::mt19937(1));
  std::atomic<std::size_t> next{0};
  std::vector<double> rates(static_cast<std::size_t>(num_threads));
  double best = 0;
  std::barrier window_begin(num_threads, []() noexcept {});
  std::barrier window_end(num_threads, [&]() noexcept {
    best = std::max(best, std::accumulate(rates.begin(), rates.end(), 0.0));
  });
  run_threads(num_threads, [&](int i) {
    const cpu::SingleThreadedLibrary confined;
    GemmWorker worker(products, dtype, static_cast<unsigned>(2 * i));
    worker.warm_up();
    for (int window = 0; window < kGemmWindows; ++window) {
      window_begin.arrive_and_wait();
      const Clock::time_point start = Clock::now();
      double mine = 0, elapsed = 0;
      while (elapsed < seconds / kGemmWindows) {
        for (double unclocked = 0; unclocked < kUnclockedFlops;) {
          const TileProduct& p = products[next.fetch_add(1) % products.size()];
          worker.multiply(p);
          // No product is without a row; the bound is for the loop's end alone.
          unclocked += std::max(p.useful_flops(), 1.0);
          mine += p.useful_flops();
        }
        elapsed = seconds_since(start);
      }
      rates[static_cast<std::size_t>(i)] = mine / elapsed;
      window_end.arrive_and_wait();
    }
  });
  return best;
}

std::vector<ByteRange> touched_weights(const MoeWeights& weights,
                                       std::span<const std::int64_t> tokens_per_expert) {
  std::vector<ByteRange> ranges;
  for (std::size_t e = 0; e < weights.experts.size(); ++e) {
    if (tokens_per_expert[e] > 0) add_ffn_ranges(weights.experts[e], ranges);
  }
  add_ffn_ranges(weights.shared, ranges);
  return merged(std::move(ranges));
}

double measure_read_rate(std::span<const ByteRange> ranges, int num_threads, double seconds) {
  constexpr std::size_t kBlock = std::size_t{1} << 18;
  std::vector<ByteRange> blocks;
  std::size_t bytes = 0;
  for (ByteRange range : ranges) {
    bytes += range.size();
    for (; !range.empty(); range = range.subspan(blocks.back().size())) {
      blocks.push_back(range.first(std::min(kBlock, range.size())));
    }
  }
  if (blocks.empty()) return 0;

  std::atomic<std::uint64_t> sums{0};
  constexpr std::size_t kMostPasses = 10'000;
  std::vector<double> times;
  times.reserve(kMostPasses);
  std::atomic<std::size_t> next{0};
  Clock::time_point pass_start;
  const Clock::time_point start = Clock::now();
  bool done = false;
  // The function runs on one thread between passes, while the others wait.
  std::barrier pass_end(num_threads, [&]() noexcept {
    if (next.load() > 0) times.push_back(seconds_since(pass_start));
    done = times.size() == kMostPasses || (times.size() >= 2 && seconds_since(start) >= seconds);
    next = 0;
    pass_start = Clock::now();
  });
  run_threads(num_threads, [&](int) {
    for (;;) {
      pass_end.arrive_and_wait();
      if (done) return;
      std::uint64_t sum = 0;
      for (std::size_t i; (i = next.fetch_add(1)) < blocks.size();) sum ^= checksum(blocks[i]);
      sums.fetch_xor(sum);
    }
  });
  return static_cast<double>(bytes) / *std::min_element(times.begin() + 1, times.end());
}

}  // namespace switchyard::machine
