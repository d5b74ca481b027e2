// Activations on the device against fp64.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "gpu/device.h"
#include "gpu/host/activation_form.h"
#include "gpu/tile/activation.cuh"
#include "support/on_gpu.h"

namespace switchyard::testing {
namespace {

using ActivationTest = OnGpu<::testing::Test>;

enum class Part {
  kGate,
  kSiluGate,  // as kernels for SiLU alone compute it
  kUp
};

__global__ void evaluate(gpu::ActivationForm form, float limit, Part part, const float* v,
                         float* result, std::size_t count) {
  const std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x;
  if (i >= count) return;
  result[i] = part == Part::kSiluGate ? gpu::silu(v[i], form.first)
              : part == Part::kUp     ? gpu::bend_up(form, limit, v[i])
              : form.is_tanh          ? gpu::activate_tanh(form, v[i])
              : form.bend != 0        ? gpu::activate_bend(form, v[i])
                                      : gpu::activate_ramp(form, v[i]);
}

std::vector<float> on_device(const std::vector<float>& values, const Activation& activation,
                             Part part) {
  constexpr unsigned kBlock = 256;
  const std::size_t bytes = values.size() * sizeof(float);
  gpu::DeviceBuffer from(bytes), to(bytes);
  from.upload(values.data(), bytes);
  const auto blocks = static_cast<unsigned>((values.size() + kBlock - 1) / kBlock);
  evaluate<<<blocks, kBlock>>>(gpu::form_of(activation), activation.limit, part,
                               reinterpret_cast<const float*>(from.data()),
                               reinterpret_cast<float*>(to.data()), values.size());
  gpu::synchronize_device();
  std::vector<float> results(values.size());
  to.download(results.data(), bytes);
  return results;
}

// A hundredth of the rounding of values near 1 to bf16, 2^-9. Beyond, rounding grows with them.
constexpr double kBound = 4e-5;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// `most`: what the values tend to.
template <typename Exact>
void expect_close(const Activation& activation, Exact&& exact, Part part = Part::kGate,
                  float most = kInfinity) {
  const double bound = std::isfinite(most) ? kBound * most : kBound;
  std::vector<float> values;
  for (int i = -400'000; i <= 400'000; ++i) values.push_back(static_cast<float>(i) * 1e-4f);
  for (float v = 50; v < 1e37f; v *= 7) {
    values.push_back(v);
    values.push_back(-v);
  }
  const std::vector<float> results = on_device(values, activation, part);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double v = values[i], expected = exact(v);
    ASSERT_NEAR(results[i], expected, bound + 1e-6 * std::abs(expected)) << "of " << v;
  }
  const auto special = on_device({std::nanf(""), kInfinity, 0.0f}, activation, part);
  EXPECT_TRUE(std::isnan(special[0]));
  EXPECT_EQ(special[1], most);
  EXPECT_EQ(special[2], 0.0f);
}

Activation of_kind(ActivationKind kind) { return {.kind = kind}; }

TEST_F(ActivationTest, SiluIsCloseToFp64) {
  for (const float alpha : {1.0f, 1.702f}) {
    for (const bool compiled_in : {true, false}) {
      SCOPED_TRACE(::testing::Message() << alpha << (compiled_in ? ", compiled in" : ""));
      expect_close(
          {.kind = ActivationKind::kSilu, .alpha = alpha},
          [=](double v) { return v / (1 + std::exp(-double{alpha} * v)); },
          compiled_in ? Part::kSiluGate : Part::kGate);
    }
  }
}

TEST_F(ActivationTest, GeluIsCloseToFp64) {
  expect_close(of_kind(ActivationKind::kGelu),
               [](double v) { return 0.5 * v * std::erfc(-v / std::sqrt(2.0)); });
}

TEST_F(ActivationTest, GeluByTanhIsCloseToFp64) {
  expect_close(of_kind(ActivationKind::kGeluTanh), [](double v) {
    const double u = std::sqrt(2 / 3.14159265358979324) * (v + 0.044715 * v * v * v);
    return 0.5 * v * (1 + std::tanh(u));
  });
}

TEST_F(ActivationTest, SituIsCloseToFp64) {
  for (const float alpha : {1.0f, 4.0f}) {
    for (const float limit : {25.0f, kInfinity}) {
      SCOPED_TRACE(::testing::Message() << alpha << ", " << limit);
      const Activation situ{.kind = ActivationKind::kSitu, .alpha = alpha, .limit = limit};
      expect_close(
          situ, [=](double v) { return alpha * std::tanh(v / alpha) / (1 + std::exp(-v)); },
          Part::kGate, alpha);
      expect_close(
          situ, [=](double u) { return std::isfinite(limit) ? limit * std::tanh(u / limit) : u; },
          Part::kUp, limit);
    }
  }
}

}  // namespace
}  // namespace switchyard::testing
