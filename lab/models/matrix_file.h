// Activations and other small files of the command line, in safetensors format.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "model/safetensors.h"
#include "switchyard/tensor.h"

namespace switchyard {

// A matrix with its memory.
struct OwnedMatrix {
  MatrixView view;  // contiguous rows
  std::shared_ptr<const void> owner;
};
struct NamedMatrix {
  std::string name;
  MatrixView view;  // any strides, no scales
};

// Reads the tensor `name` as a matrix (a vector is one row). An empty name means the file's only
// tensor. Throws Error{kSystem, kInvalidFile, kMissingTensor, kShapeMismatch, kUnsupported}.
OwnedMatrix read_matrix(const std::filesystem::path& path, const std::string& name);
OwnedMatrix read_matrix(const std::shared_ptr<const SafetensorsFile>& file,
                        const std::string& name);
void write_matrices(const std::filesystem::path& path, const std::vector<NamedMatrix>& matrices);

}  // namespace switchyard
