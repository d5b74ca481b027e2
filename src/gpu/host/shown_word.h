// This rank's word of the world's record, for kernels: their waits are shown there as those of the
// host are.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <optional>

#include "gpu/host/abort_link.h"
#include "protocol/control.h"
#include "protocol/world_record.h"

namespace switchyard::gpu {

class ShownWord {
 public:
  // Shows the waits of kernels that use `heaps`, and ends them by `link` when the rank that they
  // wait for is gone. Nothing is shown if the device cannot write to the record's memory, or if the
  // ranks of `heaps` have other numbers in the world. `link` and `heaps` have to outlive it.
  ShownWord(const protocol::WorldView& view, protocol::Heaps& heaps, const AbortLink& link);
  ~ShownWord();
  ShownWord(const ShownWord&) = delete;
  ShownWord& operator=(const ShownWord&) = delete;

 private:
  protocol::WorldView view_;
  void* page_ = nullptr;  // registered; null: none
  std::optional<protocol::WorldRecord::LossHook> hook_;
};

}  // namespace switchyard::gpu
