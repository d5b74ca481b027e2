// The structs behind the handles of the C interface.
#pragma once

#include <atomic>
#include <chrono>
#include <vector>

#include "base/interrupt.h"
#include "c_api/tensors.h"
#include "fabric/fabric.h"
#include "switchyard/c.h"
#include "switchyard/layer.h"
#include "switchyard/workspace.h"
#include "switchyard/world.h"

namespace switchyard::c_api {

// Counts the calls that are under way with a handle.
class Calls {
 public:
  bool any() const { return count_.load(std::memory_order_acquire) != 0; }

 private:
  friend class Call;
  std::atomic<int> count_{0};
};
class Call {
 public:
  explicit Call(Calls& calls) : calls_(calls) {
    calls_.count_.fetch_add(1, std::memory_order_relaxed);
  }
  // For calls that may wait for other ranks of `world`. If the caller interrupts one, the world
  // ends for all of them.
  Call(Calls& calls, const World& world) : Call(calls) {
    world_ = &world;
    refuse_inside_check();
  }
  // Release: a thread that sees that there is no call sees what the call did.
  ~Call() {
    if (world_ != nullptr && was_interrupted()) world_->fabric().abort(AbortCause::kInterrupted);
    calls_.count_.fetch_sub(1, std::memory_order_release);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  // Throws Error{kInvalidArgument} if the interrupt check of another call makes this call: that one
  // may wait in the midst of what this one would use.
  static void refuse_inside_check();

  Calls& calls_;
  const World* world_ = nullptr;
};

// Keeps the address of a handle that is never destroyed, so that tools that look for leaks find it.
void leave_behind(void* handle);

// Destroys a handle. One that another thread uses in a call is left behind, as at the end of a
// process whose threads nobody joined: Python closes its handles while they run.
template <typename Handle>
void destroy(Handle*& handle) {
  if (handle != nullptr && handle->calls.any()) {
    leave_behind(handle);
  } else {
    delete handle;
  }
  handle = nullptr;
}

}  // namespace switchyard::c_api

struct sy_world {
  switchyard::World world;
  switchyard::c_api::Calls calls{};
};

struct sy_workspace {
  switchyard::World world;
  switchyard::Workspace workspace;
  switchyard::c_api::Calls calls{};
};

struct sy_layer {
  switchyard::World world;
  int max_tokens = 0;
  int device = -1;
  bool has_router = false;
  int places = 0;  // of experts, over all ranks; 0: of a checkpoint
  // The caller's structs that the weights were made of, and copies of their scales.
  sy_layer_weights given{};
  switchyard::c_api::ScaleCopies scales{};
  // Copies of the caller's routing where it is not contiguous, in host memory.
  std::vector<std::byte> ids{}, weights{};
  switchyard::MoeLayer layer;
  switchyard::c_api::Calls calls{};

  sy_device_type device_type() const {
    return layer.backend() == switchyard::Backend::kCpu ? SY_CPU : SY_CUDA;
  }
};

namespace switchyard::c_api {

// Throws Error{kInvalidArgument} for a number that is no time, naming it.
std::chrono::milliseconds milliseconds_of(const char* name, double seconds);

}  // namespace switchyard::c_api
