// What the handles of the C interface are.
#pragma once

#include <chrono>
#include <vector>

#include "c_api/tensors.h"
#include "switchyard/c.h"
#include "switchyard/layer.h"
#include "switchyard/world.h"

struct sy_world {
  switchyard::World world;
};

struct sy_layer {
  switchyard::World world;
  int max_tokens = 0;
  int device = -1;
  bool has_router = false;
  sy_bad_ids bad_ids = SY_BAD_IDS_RAISE;
  bool large_ids_are_none = false;
  std::int64_t bad_slots = 0;  // of the last pass
  switchyard::c_api::ScaleCopies scales;
  // Routing in the form that the layer takes, where the caller's has another. Host memory.
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  switchyard::MoeLayer layer;

  sy_device_type device_type() const {
    return layer.backend() == switchyard::Backend::kCpu ? SY_CPU : SY_CUDA;
  }
};

namespace switchyard::c_api {

// Throws Error{kInvalidArgument} for what is no time, naming it.
std::chrono::milliseconds milliseconds_of(const char* name, double seconds);

}  // namespace switchyard::c_api
