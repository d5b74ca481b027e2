// Where ranks write for each other, and where a call's output goes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/heap.h"
#include "switchyard/tensor.h"

namespace switchyard::gpu {

struct ExchangeParams {
  protocol::Heap heap;
  std::byte* mine;       // this rank's heap
  std::uint16_t* cells;  // [T, cells_per_token, H] bf16, in this rank's heap
};

struct OutputCall {
  void* y;  // [T, H] of y_type
  std::int64_t y_stride;
  DType y_type;
  float scale;
  bool accumulate;
};

}  // namespace switchyard::gpu
