// route_warp() on the device against route() on the host: the same ids, and the same weights but
// for rounding.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "routing/route_cases.h"
#include "support/identifier.h"

namespace switchyard {
namespace {

using routing::Choice;
using routing::DeviceRouting;
using routing::RouteStatus;
using test::draw;
using test::draw_tokens;
using test::expect_as_on_host;
using test::Family;
using test::Kind;
using test::Routed;
using test::routing_layer;
using test::Tokens;
using testing::identifier;

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
  }
}

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t size) : size_(size) {
    check(cudaMalloc(&data_, std::max<std::size_t>(1, size) * sizeof(T)), "cudaMalloc");
    check(cudaMemset(data_, 0xff, size * sizeof(T)), "cudaMemset");
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    check(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice),
          "cudaMemcpy to the device");
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  T* data() { return data_; }
  std::vector<T> values() const {
    std::vector<T> values(size_);
    check(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost),
          "cudaMemcpy to the host");
    return values;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

// As large as the kernels that route_warp() is written for.
constexpr int kThreads = 512;

template <int kPerLane>
__global__ void __launch_bounds__(kThreads, 1)
    route_tokens(DeviceRouting routing, int num_tokens, const float* logits, const float* bias,
                 const std::int32_t* hashed, std::int32_t* ids, float* weights,
                 RouteStatus* status) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  for (int token = static_cast<int>(blockIdx.x) * warps + warp; token < num_tokens;
       token += static_cast<int>(gridDim.x) * warps) {
    float mine[kPerLane];
    routing::load_logits(logits + token * routing.num_experts, routing.num_experts, mine);
    Choice choice;
    const RouteStatus result =
        routing::route_warp(routing, mine, bias, hashed + token * routing.top_k, choice);
    // Every lane has the same status; the last one's is compared.
    if (lane == 31) status[token] = result;
    if (lane < routing.top_k) {
      ids[token * routing.top_k + lane] = choice.id;
      weights[token * routing.top_k + lane] = choice.weight;
    }
  }
}

template <int kPerLane>
Routed route_on_device(const Tokens& tokens) {
  const int num_tokens = tokens.count();
  const std::size_t num_slots = static_cast<std::size_t>(num_tokens) * tokens.spec.top_k;
  DeviceArray<float> logits(tokens.logits), bias(tokens.bias), weights(num_slots);
  DeviceArray<std::int32_t> hashed(tokens.hashed), ids(num_slots);
  DeviceArray<RouteStatus> status(static_cast<std::size_t>(num_tokens));
  const int warps = kThreads / 32;
  route_tokens<kPerLane><<<std::min(132, (num_tokens + warps - 1) / warps), kThreads>>>(
      routing::make_device_routing(tokens.spec), num_tokens, logits.data(), bias.data(),
      hashed.data(), ids.data(), weights.data(), status.data());
  check(cudaGetLastError(), "launch of route_tokens");
  check(cudaDeviceSynchronize(), "route_tokens");
  return {ids.values(), weights.values(), status.values()};
}

Routed route_on_device(const Tokens& tokens) {
  return routing::with_per_lane(tokens.spec.num_experts, [&](auto per_lane) {
    return route_on_device<decltype(per_lane)::value>(tokens);
  });
}

constexpr auto on_device = [](const Tokens& tokens) { return route_on_device(tokens); };

// The same with values in memory, as layers of more than 512 experts do it.
constexpr int kMemoryThreads = 128;
__global__ void __launch_bounds__(kMemoryThreads)
    route_tokens_in_memory(DeviceRouting routing, int num_tokens, const float* logits,
                           const float* bias, const std::int32_t* hashed, std::int32_t* ids,
                           float* weights, RouteStatus* status) {
  __shared__ float values[kMemoryThreads / 32][routing::kMaxExperts];
  __shared__ routing::OrderKey keys[kMemoryThreads / 32][routing::kMaxExperts];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  for (int token = static_cast<int>(blockIdx.x) * (kMemoryThreads / 32) + warp; token < num_tokens;
       token += static_cast<int>(gridDim.x) * (kMemoryThreads / 32)) {
    routing::warp::MemoryRows rows{values[warp], keys[warp], (routing.num_experts + 31) / 32};
    routing::load_logits(logits + token * routing.num_experts, routing.num_experts, rows);
    Choice choice;
    const RouteStatus result =
        routing::route_warp(routing, rows, bias, hashed + token * routing.top_k, choice);
    if (lane == 31) status[token] = result;
    if (lane < routing.top_k) {
      ids[token * routing.top_k + lane] = choice.id;
      weights[token * routing.top_k + lane] = choice.weight;
    }
  }
}

constexpr auto in_memory_on_device = [](const Tokens& tokens) -> Routed {
  const int num_tokens = tokens.count();
  const std::size_t num_slots = static_cast<std::size_t>(num_tokens) * tokens.spec.top_k;
  DeviceArray<float> logits(tokens.logits), bias(tokens.bias), weights(num_slots);
  DeviceArray<std::int32_t> hashed(tokens.hashed), ids(num_slots);
  DeviceArray<RouteStatus> status(static_cast<std::size_t>(num_tokens));
  route_tokens_in_memory<<<std::min(132, (num_tokens + 3) / 4), kMemoryThreads>>>(
      routing::make_device_routing(tokens.spec), num_tokens, logits.data(), bias.data(),
      hashed.data(), ids.data(), weights.data(), status.data());
  check(cudaGetLastError(), "launch of route_tokens_in_memory");
  check(cudaDeviceSynchronize(), "route_tokens_in_memory");
  return {ids.values(), weights.values(), status.values()};
};

void skip_without_gpu() {
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result != cudaSuccess || count == 0) {
    GTEST_SKIP() << "no GPU: cudaGetDeviceCount() finds " << count << " devices ("
                 << cudaGetErrorString(result) << ")";
  }
}

class RouteWarp : public ::testing::Test {
 protected:
  void SetUp() override { skip_without_gpu(); }
};

template <typename Parameter>
class RouteWarpOver : public ::testing::TestWithParam<Parameter> {
 protected:
  void SetUp() override { skip_without_gpu(); }
};

// ---- Every model and every family ----

class RouteWarpOverModels : public RouteWarpOver<ModelEntry> {};

TEST_P(RouteWarpOverModels, RoutesAsTheHost) { test::test_model(GetParam(), 2048, on_device); }
TEST_P(RouteWarpOverModels, RoutesAsTheHostFromMemory) {
  test::test_model(GetParam(), 512, in_memory_on_device);
}

INSTANTIATE_TEST_SUITE_P(Models, RouteWarpOverModels, ::testing::ValuesIn(model_table()),
                         [](const auto& param_info) { return identifier(param_info.param.name); });

class RouteWarpOverFamilies : public RouteWarpOver<Family> {};

TEST_P(RouteWarpOverFamilies, RoutesAsTheHost) {
  std::mt19937 random(2);
  test::test_layer(GetParam().spec, 1024, random, GetParam().name, on_device);
}

INSTANTIATE_TEST_SUITE_P(Families, RouteWarpOverFamilies, ::testing::ValuesIn(test::families()),
                         [](const auto& param_info) { return identifier(param_info.param.name); });

// ---- Every combination of method, score, bias, groups, renormalisation ----

class RouteWarpOverSizes : public RouteWarpOver<int> {};

TEST_P(RouteWarpOverSizes, EveryCombinationRoutesAsTheHost) {
  test::test_combinations(GetParam(), 48, on_device);
}

TEST_P(RouteWarpOverSizes, EveryCombinationRoutesAsTheHostFromMemory) {
  test::test_combinations(GetParam(), 24, in_memory_on_device);
}

INSTANTIATE_TEST_SUITE_P(Sizes, RouteWarpOverSizes,
                         ::testing::Values(1, 2, 3, 7, 8, 16, 31, 32, 33, 51, 60, 63, 64, 65, 96,
                                           127, 128, 129, 160, 192, 255, 256, 257, 384, 500, 512,
                                           513, 640, 768, 1000, 1023, 1024));

// ---- What route() has no counterpart for ----

TEST_F(RouteWarp, MoreRegistersThanNeededChangeNothing) {
  std::mt19937 random(3);
  for (const Family& family : test::families()) {
    if (family.spec.num_experts > 64) continue;
    const Tokens tokens = draw_tokens(family.spec, 256, Kind::kNormal, random);
    expect_as_on_host(tokens, route_on_device<2>(tokens), family.name);
    expect_as_on_host(tokens, route_on_device<4>(tokens), family.name);
    expect_as_on_host(tokens, route_on_device<12>(tokens), family.name);
    expect_as_on_host(tokens, route_on_device<32>(tokens), family.name);
  }
}

TEST_F(RouteWarp, HashedIdsThatAreNoExpertsAreSkippedAndReported) {
  RoutingSpec routing;
  routing.method = RoutingMethod::kHash;
  routing.score = ScoreFunction::kSigmoid;
  routing.renormalize = true;
  Tokens tokens{.spec = routing_layer(6, 6, routing)};
  tokens.logits.assign(6, 0.0f);
  tokens.hashed = {-1, 3, 6, INT32_MIN, 5, INT32_MAX};
  const Routed routed = route_on_device(tokens);
  EXPECT_EQ(routed.ids, (std::vector<std::int32_t>{-1, 3, -1, -1, 5, -1}));
  EXPECT_EQ(routed.weights, (std::vector<float>{0, 0.5f, 0, 0, 0.5f, 0}));
  EXPECT_EQ(routed.status[0].bad_hashed_id_mask, 0b101101u);
  EXPECT_EQ(routed.status[0].num_nan, 0);
}

// ---- Scores, to the bit ----

__global__ void count_wrong_quotients(std::uint32_t first, std::uint32_t last,
                                      unsigned long long* num_wrong) {
  unsigned long long wrong = 0;
  const std::uint32_t step = gridDim.x * blockDim.x;
  for (std::uint32_t bits = first + blockIdx.x * blockDim.x + threadIdx.x; bits <= last;
       bits += step) {
    const float y = __uint_as_float(bits);
    const auto differs = [](float n, float d) {
      return __float_as_uint(routing::divide_small(n, d)) != __float_as_uint(__fdiv_rn(n, d));
    };
    if (differs(1.0f, 1.0f + y) || differs(y, 1.0f + y) || differs(y, 2.0f + y)) ++wrong;
  }
  if (wrong != 0) atomicAdd(num_wrong, wrong);
}

TEST_F(RouteWarp, QuotientsOfScoresAreCorrectlyRoundedForEveryOperand) {
  DeviceArray<unsigned long long> num_wrong(std::vector<unsigned long long>{0});
  count_wrong_quotients<<<1024, 256>>>(0, 0, num_wrong.data());
  count_wrong_quotients<<<1024, 256>>>(routing::bits_of(0x1p-126f), routing::bits_of(1.0f),
                                       num_wrong.data());
  check(cudaGetLastError(), "launch of count_wrong_quotients");
  EXPECT_EQ(num_wrong.values()[0], 0u);
}

struct Scores {
  float exp, sigmoid, sqrt_softplus;
};

SWITCHYARD_HOST_DEVICE Scores scores_of(std::uint32_t bits) {
  const float x = routing::float_of(bits);
  return {routing::exp_nonpositive(-std::fabs(x)), routing::sigmoid(x), routing::sqrt_softplus(x)};
}

__global__ void score_every(std::uint32_t step, Scores* scores, std::uint32_t count) {
  for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += gridDim.x * blockDim.x) {
    scores[i] = scores_of(i * step);
  }
}

TEST_F(RouteWarp, ScoresAreTheHostsToTheBit) {
  // 16 million of all floats, of every exponent and either sign. Fails if the host contracts
  // products and sums: see score.h.
  constexpr std::uint32_t kStep = 257, kCount = UINT32_MAX / kStep;
  DeviceArray<Scores> scores(kCount);
  score_every<<<1024, 256>>>(kStep, scores.data(), kCount);
  check(cudaGetLastError(), "launch of score_every");
  const std::vector<Scores> on_device = scores.values();
  const auto same = [](float a, float b) { return routing::bits_of(a) == routing::bits_of(b); };
  int num_different = 0;
  for (std::uint32_t i = 0; i < kCount; ++i) {
    if (std::isnan(routing::float_of(i * kStep))) continue;
    const Scores host = scores_of(i * kStep);
    if (!same(on_device[i].exp, host.exp) || !same(on_device[i].sigmoid, host.sigmoid) ||
        !same(on_device[i].sqrt_softplus, host.sqrt_softplus)) {
      if (++num_different <= 5) {
        ADD_FAILURE() << "of " << routing::float_of(i * kStep) << ": " << on_device[i].exp << ", "
                      << on_device[i].sigmoid << ", " << on_device[i].sqrt_softplus
                      << "; on the host " << host.exp << ", " << host.sigmoid << ", "
                      << host.sqrt_softplus;
      }
    }
  }
  EXPECT_EQ(num_different, 0) << "of " << kCount;
}

// ---- How long it takes: --gtest_also_run_disabled_tests --gtest_filter=*Cycles* ----

template <int kPerLane>
__global__ void __launch_bounds__(kThreads, 1)
    time_tokens(DeviceRouting routing, int num_rounds, const float* logits, const float* bias,
                const std::int32_t* hashed, long long* cycles, Choice* choices) {
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  for (int round = 0; round < num_rounds; ++round) {
    const int token = round * warps + warp;
    float mine[kPerLane];
    routing::load_logits(logits + token * routing.num_experts, routing.num_experts, mine);
    // The logits must be there before the clock is read, and the choice before it is read again.
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) asm volatile("" : "+f"(mine[j])::"memory");
    const long long start = clock64();
    Choice choice;
    routing::route_warp(routing, mine, bias, hashed + token * routing.top_k, choice);
    asm volatile("" : "+r"(choice.id), "+f"(choice.weight)::"memory");
    cycles[token] = clock64() - start;
    choices[token * 32 + static_cast<int>(threadIdx.x) % 32] = choice;
  }
}

// The median over tokens of the cycles that routing one takes, and those of the first, whose
// instructions and bias are in no cache yet.
struct Cycles {
  long long median, first;
};

Cycles time_on_device(const LayerSpec& spec, int num_warps) {
  constexpr int kRounds = 200;
  std::mt19937 random(4);
  Tokens tokens{.spec = spec};
  const int num_tokens = kRounds * num_warps;
  for (int i = 0; i < num_tokens * spec.num_experts; ++i) {
    tokens.logits.push_back(draw(Kind::kNormal, random));
  }
  for (int e = 0; spec.routing.has_correction_bias && e < spec.num_experts; ++e) {
    tokens.bias.push_back(0.1f * draw(Kind::kNormal, random));
  }
  tokens.hashed.assign(static_cast<std::size_t>(num_tokens) * spec.top_k, 0);
  DeviceArray<float> logits(tokens.logits), bias(tokens.bias);
  DeviceArray<std::int32_t> hashed(tokens.hashed);
  DeviceArray<long long> cycles(static_cast<std::size_t>(num_tokens));
  DeviceArray<Choice> choices(static_cast<std::size_t>(num_tokens) * 32);
  routing::with_per_lane(spec.num_experts, [&](auto per_lane) {
    time_tokens<decltype(per_lane)::value>
        <<<1, 32 * num_warps>>>(routing::make_device_routing(spec), kRounds, logits.data(),
                                bias.data(), hashed.data(), cycles.data(), choices.data());
  });
  check(cudaGetLastError(), "launch of time_tokens");
  check(cudaDeviceSynchronize(), "time_tokens");
  std::vector<long long> times = cycles.values();
  const long long first = times[0];
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return {times[times.size() / 2], first};
}

TEST_F(RouteWarp, DISABLED_CyclesPerToken) {
  std::printf("%-14s %5s %3s | one warp: median  per expert  first | 16 warps: median\n", "model",
              "E", "K");
  for (const char* name : {"olmoe", "qwen3-30b", "mixtral-8x7b", "deepseek-v3", "glm-5"}) {
    const ModelConfig config = parse_config(find_model(name).config_json, name);
    const LayerSpec& spec = *config.layers[static_cast<std::size_t>(config.moe_layers().front())];
    const Cycles alone = time_on_device(spec, 1);
    const Cycles crowded = time_on_device(spec, kThreads / 32);
    std::printf("%-14s %5d %3d | %16lld  %10lld  %5lld | %16lld\n", name, spec.num_experts,
                spec.top_k, alone.median, alone.median / spec.top_k, alone.first, crowded.median);
  }
}

}  // namespace
}  // namespace switchyard
