#include "switchyard/workspace.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "c_api/guard.h"
#include "c_api/handles.h"
#include "c_api/specs.h"
#include "c_api/structs.h"
#include "c_api/tensors.h"
#include "switchyard/error.h"

using namespace switchyard::c_api;

namespace {

switchyard::DeviceAllocator allocator_of(const sy_workspace_options& given) {
  if ((given.allocate == nullptr) != (given.release == nullptr)) {
    throw switchyard::Error(switchyard::ErrorCode::kInvalidArgument,
                            given.allocate == nullptr
                                ? "allocate is null, but release is not; pass both, or neither"
                                : "release is null, but allocate is not; pass both, or neither");
  }
  if (given.allocate == nullptr) return {};
  const auto allocate = given.allocate;
  const auto release = given.release;
  void* const user = given.user;
  return {.allocate = [=](std::size_t bytes) { return allocate(bytes, user); },
          .free = [=](void* memory) { release(memory, user); }};
}

switchyard::WorkspaceOptions options_of(const sy_workspace_options* pointer) {
  const auto given = read_struct_or("sy_workspace_options", pointer,
                                    sy_workspace_options SY_WORKSPACE_OPTIONS_INIT);
  switchyard::WorkspaceOptions options;
  options.backend = backend_of(given.backend);
  options.max_tokens = given.max_tokens;
  options.compute = dtype_of("compute", given.compute);
  if (given.weights != SY_DTYPE_NONE) options.weights = dtype_of("weights", given.weights);
  options.slots = given.slots;
  options.num_threads = given.num_threads;
  options.device = given.device;
  options.reserved_sms = given.reserved_sms;
  options.pre_sum_per_host = given.pre_sum_per_host != 0;
  options.allocator = allocator_of(given);
  return options;
}

}  // namespace

sy_status sy_workspace_create(sy_world* world, const sy_layer_spec* specs, int32_t num_specs,
                              const sy_workspace_options* options, sy_workspace** out) {
  return guarded([&] {
    require("world", world);
    require("specs", specs);
    require("out", out);
    const Call in_call(world->calls, world->world);
    *out = new sy_workspace{
        world->world,
        switchyard::Workspace(world->world, specs_of(specs, num_specs), options_of(options))};
  });
}

sy_status sy_workspace_get_info(const sy_workspace* workspace, sy_workspace_info* out) {
  return guarded([&] {
    require("workspace", workspace);
    sy_workspace_info info = SY_WORKSPACE_INFO_INIT;
    info.backend = workspace->workspace.backend() == switchyard::Backend::kCpu ? SY_CPU : SY_CUDA;
    info.slots = workspace->workspace.slots();
    info.released = workspace->workspace.released() ? 1 : 0;
    info.bytes = workspace->workspace.bytes();
    write_struct("sy_workspace_info", info, out);
  });
}

sy_status sy_workspace_release(sy_workspace* workspace) {
  return guarded([&] {
    require("workspace", workspace);
    const Call in_call(workspace->calls, workspace->world);
    workspace->workspace.release();
  });
}

sy_status sy_workspace_restore(sy_workspace* workspace) {
  return guarded([&] {
    require("workspace", workspace);
    const Call in_call(workspace->calls, workspace->world);
    workspace->workspace.restore();
  });
}

sy_status sy_workspace_destroy(sy_workspace** workspace) {
  return guarded([&] {
    require("workspace", workspace);
    destroy(*workspace);
  });
}
