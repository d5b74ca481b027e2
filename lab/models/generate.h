// Random weights with the statistics of real ones, and whole checkpoints of them. Benchmarks and
// tests use them when the published weights are not at hand.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>

#include "model/config.h"
#include "models/model_table.h"
#include "switchyard/layer_spec.h"
#include "switchyard/weights.h"

namespace switchyard {

// A function that is called now and then with the bytes done and their total, from one thread at a
// time.
using Progress = std::function<void(std::uint64_t done, std::uint64_t total)>;

struct GenerateOptions {
  std::int64_t vocabulary = 129280;  // rows of the table of a hash-routed layer
  int num_threads = 0;               // 0: all of the machine's; the result does not depend on it
  Progress progress = {};
};

// Every matrix ~ N(0, 1 / columns), all different. `dtype` (f32, f16, bf16, f8_e4m3 with 128 x 128
// scales, or f4_e2m1 or u4 with one for 32 columns) is that of the routed and shared experts, but
// beside f4_e2m1 the shared one is f8_e4m3, and beside u4 bf16. Router and biases are in `dtype`,
// or bf16 if that has eight or four bits; the correction bias is f32. A function of (spec, dtype,
// seed, vocabulary) alone. Throws Error{kInvalidArgument} for other dtypes, and for four bits if 32
// does not divide the sizes; kCapacityExceeded if the memory is not there.
MoeWeights generate_weights(const LayerSpec& spec, DType dtype, std::uint64_t seed,
                            const GenerateOptions& options = {});

// Bytes that generate_weights allocates.
std::uint64_t generated_bytes(const LayerSpec& spec, DType dtype,
                              std::int64_t vocabulary = GenerateOptions{}.vocabulary);

// The seed with which write_checkpoint generates layer `layer`.
std::uint64_t layer_seed(std::uint64_t seed, int layer);

struct WriteOptions {
  std::optional<DType> dtype = {};  // the entry's if not given
  std::uint64_t seed = 0;
  std::uint64_t max_shard_bytes = std::uint64_t{5} << 30;
  ConfigOverrides overrides = {};
  Progress progress = {};
};

// Writes a Hugging Face directory with the MoE layers of a model under the model's own tensor
// names, four-bit experts in the layout that they are published in (models/four_bit_layout.h):
// Checkpoint::open yields the model's specs, load_layer(l) the values of
// generate_weights(spec, dtype, layer_seed(seed, l), {.vocabulary = vocab_size}). `directory`
// appears only when complete. Throws Error{kInvalidArgument} if it exists and is not empty or an
// override makes no sense, kCapacityExceeded if the disk is too full, kUnsupported for FP8 or
// four bits in families that have no such form, kSystem.
void write_checkpoint(const ModelEntry& entry, const std::filesystem::path& directory,
                      const WriteOptions& options = {});

}  // namespace switchyard
