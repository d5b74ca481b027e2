// How each family names and lays out the tensors of an MoE layer in its checkpoints. One
// description serves both the loader and the checkpoint writer, so that the two cannot disagree.
#pragma once

#include <span>
#include <string>

#include "model/config.h"

namespace switchyard {

// The ways in which `experts_gate_up` and `experts_down` pack all experts of a layer into one
// tensor.
enum class Packing : std::uint8_t {
  kRows,                // gate_up [E, 2I, H]: gate rows, then up rows; down [E, H, I]
  kColumns,             // gate_up [E, H, 2I]: gate columns, then up columns; down [E, I, H]
  kInterleavedColumns,  // gate_up [E, H, 2I]: gate and up columns alternate; down [E, I, H]
  kSeparateTransposed,  // gate and up [E * I, H]; down [E * I, H], used transposed (DBRX)
};

// Names are relative to `stack` + layer + `block`; {} stands for the expert index.
struct TensorNames {
  const char* stack;  // "model.layers."; the loader also tries other prefixes of "layers."
  const char* block;  // ".mlp."
  const char* router;
  const char* router_bias;
  const char* correction_bias;
  const char* hash_table;
  const char* gate;  // of one expert, without ".weight"; nullptr if the family is only packed
  const char* up;
  const char* down;
  const char* shared_gate;  // without ".weight"
  const char* shared_up;
  const char* shared_down;
  const char* packed_shared_gate_up;  // gate rows, then up rows: transformers' own MiniMax-M3
  const char* shared_sigmoid_gate;
  Packing packing;
  const char* packed_gate_up;  // or gate, for Packing::kSeparateTransposed
  const char* packed_up;       // Packing::kSeparateTransposed only
  const char* packed_down;
  const char* scale_suffix;  // of "<matrix>.", for FP8; the loader also knows the other spellings
  // True if published checkpoints of this family pack experts; the writer then does so, too.
  bool published_packed;
};

// The layouts that checkpoints of `family` occur in. The first is the published one.
std::span<const TensorNames* const> tensor_names(Family family);

// The published layout of a particular model type (Qwen3.5 publishes packed experts, Qwen3 does
// not).
const TensorNames& published_names(const ModelConfig& config);

// The prefixes of the stack's name: "model.", and those under which multimodal and older exports
// nest the same stack.
inline constexpr const char* kPrefixes[] = {
    "model.",       "language_model.model.", "model.language_model.",
    "transformer.", "language_model.",       ""};

// A name with {} replaced by the expert index.
std::string expert_name(const char* pattern, int expert);

}  // namespace switchyard
