// The accuracy that the outputs of both engines must have, against the fp64 reference.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "reference/reference.h"
#include "support/layers.h"

namespace switchyard::testing {

// Rows of the token-id table of hash-routed layers.
inline constexpr int kVocabulary = 50;

Batch random_batch(const LayerSpec& spec, std::int64_t tokens, DType dtype, std::uint64_t seed);

MoeWeights make_weights(const LayerSpec& spec, DType dtype, std::uint64_t seed = 3,
                        int num_threads = 0);

// Engine routing against fp64 routing: equal ids wherever fp32 logits can decide, and close
// weights.
void expect_same_routing(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                         const BatchResult& result);

// A batch with this routing, as the reference takes it.
reference::ReferenceInput problem_of(const Batch& batch, std::span<const std::int32_t> ids,
                                     std::span<const float> weights, bool quantised,
                                     std::int64_t scale_columns);

// The output against fp64, with the routing that the engine used. The yardstick is the error of a
// straightforward program. `quantised`: the layer computes in FP8, the problem is the quantised
// one, and so is what the program solves; else the program computes in bf16. `scale_columns`: those
// of a quantised token, or of h, that share a scale.
double output_error(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                    const BatchResult& result, double* yardstick = nullptr, bool quantised = false,
                    std::int64_t scale_columns = kQuantGroup);

// The output's error against fp64 must be below twice a plain bf16 program's, with the routing that
// the engine used.
void expect_accurate(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                     const BatchResult& result);

// The CPU engine's output has the same bits over each of these numbers of ranks, with 1 and 3
// threads each.
struct OnRanks {
  std::int64_t tokens;
  std::vector<int> ranks;
};
void expect_same_bits(const LayerSpec& spec, const MoeWeights& weights, DType dtype,
                      const OnRanks& on);

// How far an FP8 layer's output is from that of the straightforward program: bits in the last
// place, where both round the same values. A bound of half the yardstick notices what twice the
// yardstick cannot, a layer that does not quantise h: it is three times as far or more.
double distance_to_fp8_program(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                               const BatchResult& result, std::int64_t scale_columns = kQuantGroup);

}  // namespace switchyard::testing
