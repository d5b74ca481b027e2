// A layer's weights on the device, in the forms the kernel reads.
#pragma once

#include "gpu/device.h"
#include "gpu/layer_params.h"
#include "switchyard/weights.h"

namespace switchyard::gpu {

// One kind of expert: all networks' matrices side by side, bf16, and their biases, fp32.
class DeviceFfn {
 public:
  // Packs `experts`, which all have the shape [intermediate, hidden], into device memory. Weights
  // may be in host memory, in any dtype, or in device memory, in bf16 with contiguous rows.
  DeviceFfn() = default;
  DeviceFfn(std::span<const FfnWeights> experts, int hidden, int intermediate, bool gated);

  FfnParams params() const;

 private:
  int hidden_ = 0, intermediate_ = 0;  // the second rounded up to a multiple of 8
  std::int64_t num_experts_ = 0;
  bool gated_ = false;
  DeviceBuffer gemm1_, gemm2_;  // [E, gate/up, I, H], [E, H, I]
  DeviceBuffer gate_bias_, up_bias_, down_bias_;
};

// The gate's weights: see LayerParams::router.
class DeviceGate {
 public:
  DeviceGate() = default;
  DeviceGate(const LayerSpec& spec, const MoeWeights& weights);

  void describe(LayerParams& params) const;

 private:
  int num_planes_ = 0, columns_ = 0, stride_ = 0, hash_rows_ = 0;
  bool has_router_ = false, shared_sigmoid_ = false;
  DeviceBuffer planes_, router_bias_, correction_bias_, hash_table_;
};

}  // namespace switchyard::gpu
