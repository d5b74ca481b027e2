// The files that weights are mapped from, and whether they are still what they were.
#pragma once

#include <memory>
#include <vector>

#include "base/mapped_file.h"

namespace switchyard {

struct MoeWeights;

// The mapped files that a layer's weights lie in. There are none if weights were copied, or came
// from elsewhere.
class MappedWeights {
 public:
  MappedWeights() = default;
  // Throws Error{kInvalidFile} if one of them has become shorter already.
  explicit MappedWeights(const MoeWeights& weights);

  // Throws Error{kInvalidFile} if one of them has become shorter. Call it after reading weights,
  // before anybody uses what was made of them. It makes no system call.
  void require_whole() const {
    for (const std::shared_ptr<const MappedFile>& file : files_) file->require_whole();
  }

 private:
  void add(const void* data);

  std::vector<std::shared_ptr<const MappedFile>> files_;
};

}  // namespace switchyard
