// Checkpoints in Hugging Face format (config.json + safetensors, sharded or not), memory-mapped.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "switchyard/layer_spec.h"
#include "switchyard/tensor.h"
#include "switchyard/weights.h"

namespace switchyard {

// A directory with config.json and *.safetensors. Opening reads headers only; tensors are mapped
// read-only and shared, and pages are read when touched.
class Checkpoint {
 public:
  // Throws Error{kInvalidConfig, kInvalidFile, kUnsupported, kSystem}.
  static Checkpoint open(const std::filesystem::path& directory);

  const std::string& model_type() const;  // "olmoe", "mixtral", "deepseek_v3", ...
  int num_layers() const;
  std::vector<int> moe_layers() const;  // indices of the layers that are MoE layers
  DType dtype() const;                  // of the expert weights

  // Throws Error{kInvalidArgument} if `layer` is not an MoE layer.
  LayerSpec layer_spec(int layer) const;
  // Throws Error{kMissingTensor, kShapeMismatch, kDTypeMismatch}. The views live as long as
  // MoeWeights::owner does, also after the Checkpoint is gone.
  MoeWeights load_layer(int layer) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace switchyard
