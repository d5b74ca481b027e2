// Memory that the layers of a model work in one after the other, in place of one each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "switchyard/layer.h"
#include "switchyard/layer_spec.h"
#include "switchyard/tensor.h"
#include "switchyard/world.h"

namespace switchyard {

// Where device memory comes from. Both functions are called with the workspace's device current, by
// the thread that makes, releases, restores or ends the workspace, or ends the last layer in it.
// allocate() returns device memory, or null; free() gets what it returned.
struct DeviceAllocator {
  std::function<void*(std::size_t bytes)> allocate{};
  std::function<void(void* memory)> free{};
  explicit operator bool() const { return allocate != nullptr; }
};

struct WorkspaceOptions {
  Backend backend = Backend::kCpu;
  int max_tokens = 8192;         // as in LayerOptions; layers may declare less
  DType compute = DType::kBF16;  // that of the layers: kBF16, kF32 or kF8E4M3
  // The type of experts' weights of four bits: kF4E2M1 or kU4. With kCuda and kF8E4M3 their kernels
  // want more memory than those of FP8, which have room, too. Empty: no layer has such weights, or
  // `compute` is another.
  std::optional<DType> weights{};
  // Layers that work at the same time need a slot each, with memory of its own: two for two-batch
  // overlap. A layer works in one slot (LayerOptions::workspace_slot). 1 to 16.
  int slots = 1;
  int num_threads = 0;   // kCpu only; as in CpuOptions
  int device = -1;       // kCuda only; as in CudaOptions
  int reserved_sms = 0;  // kCuda only; as in CudaOptions
  // Makes room for layers with LayerOptions::pre_sum_per_host. The same on all ranks.
  bool pre_sum_per_host = false;
  // kCuda only. Allocates the memory that other ranks do not write, which is all of it in a world
  // of one rank. The library allocates the rest, because other processes map it. Empty: it
  // allocates all.
  DeviceAllocator allocator{};
};

// Passes of layers in the same slot must follow one another: on one stream, or on streams that wait
// for each other, on all ranks in the same order. After a pass was given up, all layers in its slot
// are dead. A copy is another handle to the same memory, which stays as long as a handle or a layer
// in it does.
class Workspace {
 public:
  // Collective. Makes room for a layer of each of `specs`, with the ranks' own experts
  // (own_experts(), or as many places with a placement), and for every layer that needs no more
  // than one of them. Only a spec's sizes, top_k, shared expert, weight_on_input and activation
  // matter. Throws Error{kInvalidArgument} for options that make no sense together, {kUnsupported}
  // as MoeLayer's constructor, {kSpecMismatch} where ranks differ, {kCapacityExceeded} if memory is
  // short.
  Workspace(const World& world, std::span<const LayerSpec> specs, const WorkspaceOptions& options);
  Workspace(const World& world, const LayerSpec& largest, const WorkspaceOptions& options);
  ~Workspace();
  Workspace(const Workspace&);
  Workspace& operator=(const Workspace&);
  Workspace(Workspace&&) noexcept;
  Workspace& operator=(Workspace&&) noexcept;

  // Bytes of this rank in all slots, released or not. With kCpu they are address space, and passes
  // commit what they use.
  std::uint64_t bytes() const;
  int slots() const;
  Backend backend() const;
  bool released() const;

  // Collective. Gives the memory back until restore(); contents are lost. No pass may be under way
  // or enqueued. Until then forward() of the layers throws Error{kInvalidArgument}. Addresses stay
  // the same, so captured graphs can be launched again after restore(); but with memory from
  // `allocator` they have to be captured anew. Throws what forward() would if a pass was given up;
  // does nothing if released already.
  void release();
  // Collective. Throws Error{kCapacityExceeded} if memory is short; it is released then. Does
  // nothing if there is nothing to restore.
  void restore();

 private:
  friend class MoeLayer;
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace switchyard
