// Memory that passes work in, of one layer or of several, as far as both engines' is the same.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/origin.h"
#include "switchyard/layer.h"
#include "switchyard/workspace.h"
#include "switchyard/world.h"

namespace switchyard {

class PassMemory {
 public:
  // `id` is the same on all ranks, and that of no other memory of theirs.
  PassMemory(const World& world, Backend backend, std::uint64_t id)
      : world_(world), backend_(backend), id_(id) {}
  virtual ~PassMemory() = default;
  PassMemory(const PassMemory&) = delete;
  PassMemory& operator=(const PassMemory&) = delete;

  const World& world() const { return world_; }
  Backend backend() const { return backend_; }
  std::uint64_t id() const { return id_; }

  virtual std::uint64_t bytes() const = 0;  // of this rank, released or not
  // Waits for the passes of this rank that are enqueued. Throws if one is under way or was given
  // up.
  virtual void end_passes() = 0;
  // Releases this rank's part, once all ranks have ended their passes. Does nothing if it was
  // released.
  virtual void release() = 0;
  // Collective, and a barrier. If it throws, it does so on all ranks, and it stays released. Does
  // nothing if it was not released.
  virtual void restore() = 0;
  bool released() const { return released_; }

 protected:
  bool released_ = false;

 private:
  World world_;
  Backend backend_;
  std::uint64_t id_;
};

// Collective. Throws Error{kSpecMismatch} unless all ranks give the same memory, or none does.
// Returns the id of the memory that is then to be made. `given` may be null.
std::uint64_t agree_on_memory(Fabric& fabric, const PassMemory* given);

// Throws Error{kInvalidArgument} if a pass begins in memory that was released.
void require_restored(const PassMemory& memory);

// Throws Error{kAborted} because a pass in the memory was given up.
[[noreturn]] void throw_given_up();

// Throws Error{kInvalidArgument}, saying that the layer does not fit and what to do.
[[noreturn]] void throw_no_room(std::uint64_t needed, std::uint64_t there);

// Collective. Makes room for a layer of each spec. See Workspace.
namespace cpu {
std::shared_ptr<PassMemory> make_memory(const World& world, std::span<const LayerSpec> specs,
                                        const WorkspaceOptions& options, std::uint64_t id);
}
namespace gpu {
std::shared_ptr<PassMemory> make_memory(const World& world, std::span<const LayerSpec> specs,
                                        const WorkspaceOptions& options, std::uint64_t id);
}

struct Workspace::State {
  Origin origin;
  WorkspaceOptions options;
  std::vector<std::shared_ptr<PassMemory>> slots;
};

}  // namespace switchyard
