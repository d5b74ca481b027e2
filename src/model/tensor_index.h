// The tensors of a checkpoint's files by their names.
#pragma once

#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/safetensors.h"

namespace switchyard {

struct Located {
  const SafetensorsFile* file = nullptr;
  const TensorInfo* info = nullptr;
};

class TensorIndex {
 public:
  // Opens the *.safetensors files of a directory, or those that its index names. Throws
  // Error{kInvalidFile, kSystem} and std::filesystem::filesystem_error.
  void open(const std::filesystem::path& directory);

  const std::filesystem::path& directory() const { return directory_; }
  const std::vector<std::shared_ptr<const SafetensorsFile>>& files() const { return files_; }

  // Without `info` if there is none.
  Located find(std::string_view name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? Located{} : found->second;
  }
  bool has(std::string_view name) const { return find(name).info != nullptr; }
  // Throws Error{kMissingTensor} with the names that look like it.
  [[noreturn]] void missing(const std::string& name) const;

 private:
  void add(const std::shared_ptr<const SafetensorsFile>& file);
  [[noreturn]] void throw_no_weights(const std::set<std::string>& others) const;

  std::filesystem::path directory_;
  std::vector<std::shared_ptr<const SafetensorsFile>> files_;
  std::unordered_map<std::string_view, Located> tensors_;
};

}  // namespace switchyard
