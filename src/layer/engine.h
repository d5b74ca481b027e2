// What MoeLayer asks of an engine. Each engine is made by its own make_engine(); neither knows the
// other.
#pragma once

#include <cstdint>
#include <memory>

#include "base/origin.h"
#include "switchyard/layer.h"
#include "switchyard/recording.h"

namespace switchyard {

class PassMemory;

class LayerEngine {
 public:
  virtual ~LayerEngine() = default;
  const Origin origin;

  // See MoeLayer.
  virtual void forward(const ForwardInput& input, const ForwardOutput& output) = 0;
  virtual void check() = 0;
  virtual void refresh(void* stream) = 0;
  virtual bool copies() const = 0;
  // Null: the placement stays.
  virtual void rebind(const MoeWeights& weights, const ExpertPlacement* placement) = 0;
  virtual const ForwardStats& stats() = 0;
  virtual Recording recording() = 0;  // only with Diagnostics::recorded_steps
  virtual bool records() const = 0;
  virtual PassTrace trace() = 0;  // only with Diagnostics::trace
  virtual bool traces() const = 0;
  virtual const LayerSpec& spec() const = 0;
  virtual Backend backend() const = 0;
  virtual DType compute() const = 0;
  virtual int num_threads() const = 0;
  virtual std::uint64_t workspace_bytes() const = 0;
};

// MoeLayer has checked the options by themselves and against the machine; spec and weights, and the
// options against them, are the engine's to check. `memory`: of LayerOptions::workspace, and of
// this backend and world; or null, for memory of the layer's own.
namespace cpu {
std::unique_ptr<LayerEngine> make_engine(const World& world, const LayerSpec& spec,
                                         const MoeWeights& weights, const LayerOptions& options,
                                         std::shared_ptr<switchyard::PassMemory> memory);
}

namespace gpu {
// The device that runs the layer: CudaOptions::device, or the current one. Throws
// Error{kUnsupported} for one that the kernels do not run on, {kInvalidArgument} for more
// reserved_sms than it has.
int choose_device(const LayerOptions& options);

// `options.cuda.device` is a device, not -1; it need not be the current one. Throws
// Error{kUnsupported} in a build without CUDA.
std::unique_ptr<LayerEngine> make_engine(const World& world, const LayerSpec& spec,
                                         const MoeWeights& weights, const LayerOptions& options,
                                         std::shared_ptr<switchyard::PassMemory> memory);

// The same for ranks on several hosts (exchange/staged_layer.h), which share no memory.
std::unique_ptr<LayerEngine> make_engine_over_hosts(const World& world, const LayerSpec& spec,
                                                    const MoeWeights& weights,
                                                    const LayerOptions& options);
}  // namespace gpu

}  // namespace switchyard
