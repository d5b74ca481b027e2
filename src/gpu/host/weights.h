// A layer's weights on the device, in the forms the kernel reads.
#pragma once

#include "gpu/device.h"
#include "gpu/host/lay_out.h"
#include "gpu/host/tensor_map.h"
#include "gpu/layer/params.h"
#include "switchyard/weights.h"

namespace switchyard::gpu {

// One kind of expert: all networks' matrices in the type of `numerics`, their scales, and their
// biases in fp32.
class DeviceFfn {
 public:
  // `experts` all have the shape [intermediate, hidden]. Matrices of that type in device
  // memory that lie there as one array, at one distance from expert to expert and between gate and
  // up, are used where they are and must stay there. Others are copied, for bf16 and fp16 from any
  // type, for FP8 from FP8 of block or row form. Four-bit matrices are copied into boxes
  // (tile/four_bit.h). Everything may be in either memory. All experts may lack gate and up, or
  // down.
  DeviceFfn() = default;
  DeviceFfn(const Numerics& numerics, std::span<const FfnWeights> experts, int hidden,
            int intermediate, bool gated);

  FfnParams params() const;
  const WeightArray& gemm1() const { return gemm1_; }
  const WeightArray& gemm2() const { return gemm2_; }
  // Whether any matrix is used where it is.
  bool borrows() const;
  // Copies the rest.
  const WeightLayout& layout() const { return layout_; }

 private:
  // Lays out biases, and all that was added before.
  void finish(std::span<const FfnWeights> experts, int hidden, int width);

  bool four_bit_ = false;
  WeightArray gemm1_, gemm2_;
  DeviceBuffer own1_, own2_;                  // copies
  DeviceBuffer gemm1_scales_, gemm2_scales_;  // see FfnParams
  DeviceBuffer gate_row_scales_, up_row_scales_, down_row_scales_;
  DeviceBuffer gate_bias_, up_bias_, down_bias_;
  WeightLayout layout_;
};

// Rows and columns of the router's matrix are padded to multiples of the kernel's unit: see
// route/gate.cuh.
inline constexpr int kGateMultiple = 32;
// The columns of the gate's product: of the experts, and of a sigmoid-gated shared one.
int gate_columns(const LayerSpec& spec);

// The gate's weights: see LayerParams::router.
class DeviceGate {
 public:
  DeviceGate() = default;
  DeviceGate(const LayerSpec& spec, const MoeWeights& weights);

  void describe(LayerParams& params) const;
  bool has_router() const { return has_router_; }
  const WeightLayout& layout() const { return layout_; }

 private:
  int num_planes_ = 0, columns_ = 0, stride_ = 0, hash_rows_ = 0;
  bool has_router_ = false, shared_sigmoid_ = false;
  DeviceBuffer planes_, router_bias_, correction_bias_, hash_table_;
  WeightLayout layout_;
};

}  // namespace switchyard::gpu
