// Layers of more experts than have tables of their own in a block's shared memory: up to 1,024,
// whose tables large passes keep in the end of the ring. tests/gpu/ranks_test.cpp has those of
// several ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <vector>

#include "gpu/device.h"
#include "gpu/route/limits.h"
#include "model/errors.h"
#include "support/accuracy.h"
#include "support/device_batch.h"
#include "support/fp8.h"
#include "support/layers.h"

namespace switchyard::testing {
namespace {

struct Many {
  int experts;
  bool fp8;

  DType weights() const { return fp8 ? kFp8 : DType::kBF16; }
  void expect(const LayerSpec& spec, const MoeWeights& w, const Batch& batch,
              const BatchResult& result) const {
    // With a few tokens, one code that rounds the other way makes much of the distance to the FP8
    // program.
    const bool few = batch.x.view().rows < 40;
    if (fp8) {
      expect_accurate_fp8(spec, w, batch, result, few ? 2 : 0.8);
    } else {
      expect_accurate(spec, w, batch, result);
    }
  }
};
void PrintTo(const Many& many, std::ostream* out) {
  *out << many.experts << (many.fp8 ? " in fp8" : " in bf16");
}

// Small passes have up to 6144 logits in bf16 and 3072 in FP8; without the rule, up to 32 tokens.
constexpr int kTokens[] = {1, 3, 6, 7, 40, 900};

class GpuManyExperts : public OnGpu<::testing::TestWithParam<Many>> {};
INSTANTIATE_TEST_SUITE_P(Experts, GpuManyExperts,
                         ::testing::Values(Many{512, false}, Many{513, false}, Many{1000, false},
                                           Many{1024, false}, Many{512, true}, Many{513, true},
                                           Many{1024, true}));

TEST_P(GpuManyExperts, AreChosenAndMultiplied) {
  const Many many = GetParam();
  LayerSpec plain = spec_of(192, 72, many.experts, 8);
  LayerSpec other = plain;
  other.routing.score = ScoreFunction::kSigmoid;
  other.routing.has_correction_bias = true;
  other.routing.renormalize = true;
  for (const int groups : {8, 4, 3}) {
    if (many.experts % groups != 0) continue;
    other.routing.num_groups = groups;
    other.routing.top_k_groups = 2;
    break;
  }
  other.shared_intermediate = 48;
  for (const LayerSpec& spec : {plain, other}) {
    const MoeWeights w = make_weights(spec, many.weights(), 3);
    DeviceLayer layer(spec, w, 900);
    for (const int tokens : kTokens) {
      SCOPED_TRACE(::testing::Message()
                   << tokens << " tokens, " << spec.routing.num_groups << " groups");
      const Batch batch = random_batch(spec, tokens, DType::kBF16, 200 + tokens);
      const BatchResult result = layer.run(batch, DType::kBF16);
      expect_same_routing(spec, w, batch, result);
      many.expect(spec, w, batch, result);
      EXPECT_TRUE(layer.run(batch, DType::kBF16).output == result.output) << "repeated";
      std::uint64_t rows = 0;
      for (const auto count : result.stats[0].tokens_per_expert) rows += count;
      EXPECT_EQ(rows, static_cast<std::uint64_t>(tokens) * 8);
      if (HasFatalFailure() || HasNonfatalFailure()) return;
    }
  }
}

// From evenly spread rows to tall tiles, in passes of every kind.
TEST_P(GpuManyExperts, OfGivenRouting) {
  const Many many = GetParam();
  const LayerSpec spec = spec_of(192, 136, many.experts, 8);
  const MoeWeights w = make_weights(spec, many.weights(), 3);
  for (const int paired_rows : {-1, 0}) {
    LayerOptions options;
    options.cuda.schedule.paired_rows = paired_rows;
    options.cuda.schedule.small_tokens = 32;
    DeviceLayer layer(spec, w, 2000, options);
    for (const double beta : {1.0, 0.5, 0.05}) {
      for (const int tokens : {1, 32, 33, 2000}) {
        SCOPED_TRACE(::testing::Message()
                     << "beta " << beta << " T " << tokens << " pairs " << paired_rows);
        SyntheticRouting routing = synthetic_routing(tokens, many.experts, 8, beta, 9);
        const Batch batch{Matrix::random(tokens, spec.hidden, DType::kBF16, 17),
                          std::move(routing.ids),
                          std::move(routing.weights),
                          {}};
        const BatchResult result = layer.run(batch, DType::kBF16);
        EXPECT_EQ(result.ids, batch.topk_ids);
        many.expect(spec, w, batch, result);
        if (HasFatalFailure() || HasNonfatalFailure()) return;
      }
    }
  }
}

TEST_P(GpuManyExperts, OfGivenLogits) {
  const Many many = GetParam();
  const LayerSpec spec = spec_of(192, 72, many.experts, 6);
  MoeWeights w = make_weights(spec, many.weights(), 3);
  w.router = {};
  w.router_bias = {};
  for (const int tokens : kTokens) {
    DeviceLayer layer(spec, w, tokens);
    const Batch batch = random_batch(spec, tokens, DType::kBF16, 4);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens, logits in " << to_string(dtype));
      const std::int64_t stride = spec.num_experts + 5;
      const Matrix logits = Matrix::random(tokens, stride, dtype, 9);
      gpu::DeviceBuffer memory(static_cast<std::size_t>(tokens * stride) * size_of(dtype));
      memory.upload(logits.view().data, memory.bytes());
      const BatchResult result =
          layer.run(batch, DType::kBF16, [&](ForwardInput& input, ForwardOutput&, std::size_t) {
            input.logits = {memory.data(), dtype, tokens, spec.num_experts, stride};
          });
      std::vector<float> values;
      for (std::int64_t t = 0; t < tokens; ++t) {
        for (int e = 0; e < spec.num_experts; ++e) values.push_back(logits.get(t * stride + e));
      }
      std::vector<std::int32_t> ids(result.ids.size());
      std::vector<float> weights(result.ids.size());
      route(spec, values, {}, {}, ids, weights);
      EXPECT_EQ(result.ids, ids);
      many.expect(spec, w, batch, result);
    }
  }
}

// Experts that nobody chooses change no bit of the others' results, although they move the tables
// and take stages from the ring.
TEST_P(GpuManyExperts, ChangeNothingWhereNobodyChoosesThem) {
  const Many many = GetParam();
  constexpr int kFew = 300;
  const LayerSpec spec = spec_of(320, 272, many.experts, 8);
  const MoeWeights w = make_weights(spec, many.weights(), 3);
  const LayerSpec few_spec = spec_of(320, 272, kFew, 8);
  MoeWeights few = w;
  few.experts.resize(kFew);
  few.router = {};
  few.router_bias = {};
  for (const int paired_rows : {-1, 0}) {
    LayerOptions options;
    options.cuda.schedule.paired_rows = paired_rows;
    options.cuda.schedule.small_tokens = 32;
    options.cuda.schedule.splits = 1;  // the rule looks at the number of tiles
    for (const int tokens : {3, 32, 2000}) {
      for (const double beta : {1.0, 0.1}) {
        SCOPED_TRACE(::testing::Message()
                     << "T " << tokens << " beta " << beta << " pairs " << paired_rows);
        SyntheticRouting routing = synthetic_routing(tokens, kFew, 8, beta, 9);
        const Batch batch{Matrix::random(tokens, spec.hidden, DType::kBF16, 17),
                          std::move(routing.ids),
                          std::move(routing.weights),
                          {}};
        const BatchResult expected =
            DeviceLayer(few_spec, few, tokens, options).run(batch, DType::kBF16);
        const BatchResult result = DeviceLayer(spec, w, tokens, options).run(batch, DType::kBF16);
        EXPECT_TRUE(result.output == expected.output);
      }
    }
  }
}

using GpuMostExperts = OnGpu<::testing::Test>;

// All rows are of the last expert, of the last that has a place in the usual tables, or of the
// first after it.
TEST_F(GpuMostExperts, OneExpertHasAllRows) {
  for (const bool fp8 : {false, true}) {
    const Many many{gpu::kMaxDeviceExperts, fp8};
    const LayerSpec spec = spec_of(192, 136, many.experts, 1);
    const MoeWeights w = make_weights(spec, many.weights(), 3);
    DeviceLayer layer(spec, w, 700);
    for (const int expert : {gpu::kUsualExperts - 1, gpu::kUsualExperts, many.experts - 1}) {
      for (const int tokens : {2, 700}) {
        SCOPED_TRACE(::testing::Message() << "expert " << expert << " fp8 " << fp8);
        const auto n = static_cast<std::size_t>(tokens);
        const Batch batch{Matrix::random(tokens, spec.hidden, DType::kBF16, 17),
                          std::vector<std::int32_t>(n, expert),
                          std::vector<float>(n, 0.75f),
                          {}};
        const BatchResult result = layer.run(batch, DType::kBF16);
        many.expect(spec, w, batch, result);
        EXPECT_EQ(result.stats[0].tokens_per_expert[static_cast<std::size_t>(expert)], n);
      }
    }
  }
}

// More places than experts: those experts that are computed twice.
TEST_F(GpuMostExperts, PlacesOfFewerExperts) {
  const LayerSpec spec = spec_of(192, 72, 400, 8);
  const MoeWeights w = make_weights(spec, DType::kBF16, 3);
  MoeWeights placed = w;
  placed.experts.clear();
  LayerOptions options;
  for (int p = 0; p < gpu::kMaxDeviceExperts; ++p) {
    const int expert = (p * 7 + 5) % 400;
    options.placement.expert_at.push_back(expert);
    placed.experts.push_back(w.experts[static_cast<std::size_t>(expert)]);
  }
  DeviceLayer layer(spec, placed, 900, options);
  for (const int tokens : kTokens) {
    SCOPED_TRACE(tokens);
    const Batch batch = random_batch(spec, tokens, DType::kBF16, 8);
    const BatchResult result = layer.run(batch, DType::kBF16);
    expect_same_routing(spec, w, batch, result);
    expect_accurate(spec, w, batch, result);
  }
}

TEST_F(GpuMostExperts, MoreAreRefused) {
  LayerSpec spec = spec_of(8, 8, gpu::kMaxDeviceExperts + 1, 1);
  EXPECT_ERROR(DeviceLayer(spec, make_weights(spec, DType::kBF16, 3), 8), kUnsupported,
               "1025 places of experts");
  // As places of fewer experts, too.
  spec.num_experts = 16;
  MoeWeights w = make_weights(spec, DType::kBF16, 3);
  LayerOptions options;
  w.experts.resize(16);
  for (int p = 0; p <= gpu::kMaxDeviceExperts; ++p) {
    options.placement.expert_at.push_back(p % 16);
    if (p >= 16) w.experts.push_back(w.experts[static_cast<std::size_t>(p % 16)]);
  }
  EXPECT_ERROR(DeviceLayer(spec, w, 8, options), kUnsupported, "up to 1024: use fewer replicas");
}

}  // namespace
}  // namespace switchyard::testing
