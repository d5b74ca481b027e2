// What the handles of the C interface are.
#pragma once

#include <chrono>
#include <vector>

#include "c_api/tensors.h"
#include "switchyard/c.h"
#include "switchyard/layer.h"
#include "switchyard/workspace.h"
#include "switchyard/world.h"

struct sy_world {
  switchyard::World world;
};

struct sy_workspace {
  switchyard::Workspace workspace;
};

struct sy_layer {
  switchyard::World world;
  int max_tokens = 0;
  int device = -1;
  bool has_router = false;
  int places = 0;  // of experts, over all ranks; 0: of a checkpoint
  // What the weights were made of, and copies of scales among them.
  sy_layer_weights given{};
  switchyard::c_api::ScaleCopies scales{};
  // Routing of the caller's that is not contiguous. Host memory.
  std::vector<std::byte> ids{}, weights{};
  switchyard::MoeLayer layer;

  sy_device_type device_type() const {
    return layer.backend() == switchyard::Backend::kCpu ? SY_CPU : SY_CUDA;
  }
};

namespace switchyard::c_api {

// Throws Error{kInvalidArgument} for what is no time, naming it.
std::chrono::milliseconds milliseconds_of(const char* name, double seconds);

}  // namespace switchyard::c_api
