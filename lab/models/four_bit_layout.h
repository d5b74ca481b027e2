// The layouts in which checkpoints hold four-bit experts, and how their config.json declares them.
#pragma once

#include <string>
#include <vector>

#include "model/config.h"
#include "model/tensor_names.h"
#include "models/random_tensor.h"
#include "switchyard/tensor.h"

namespace switchyard {

// All of them keep the bytes of a MatrixView: two columns to a byte, the even one in its low half.
enum class FourBitLayout {
  kNone,  // for types of other sizes
  // gpt-oss, MXFP4: all experts in one tensor, gate and up rows in turn; X is gate_up_proj or down.
  //   X_blocks U8 [E, rows, columns / 32, 16], X_scales U8 [E, rows, columns / 32]
  kBlocks,
  // DeepSeek-V4, MXFP4: X.weight I8 [rows, columns / 2], X.scale F8_E8M0 [rows, columns / 32]; the
  // shared expert is FP8.
  kDeepseek,
  // compressed-tensors "mxfp4-pack-quantized", Kimi-K3's:
  //   X.weight_packed U8 [rows, columns / 2], X.weight_scale U8 [rows, columns / 32]
  kMxfp4Packed,
  // compressed-tensors "pack-quantized", Kimi-K2-Thinking's INT4. A word has eight columns, the
  // first in its lowest four bits.
  //   X.weight_packed I32 [rows, columns / 8], X.weight_scale BF16 [rows, columns / 32],
  //   X.weight_shape I64 [2]
  kInt4Packed,
};

// The layout for experts of `dtype` in checkpoints of a model. Throws Error{kUnsupported} if there
// is none.
FourBitLayout four_bit_layout(const ModelConfig& config, DType dtype);

// Adds to a config.json the keys that declare the layout.
std::string declare_layout(const std::string& config_json, FourBitLayout layout);

// A tensor that holds one matrix, or a part of it.
struct StoredTensor {
  enum class Part { kCodes, kScales, kShape };
  const char* suffix;  // behind the matrix's module: "weight_packed"
  Part part;
  const char* dtype;  // as safetensors spells it
  std::vector<std::int64_t> shape;
};

// The tensors of one matrix in a layout that has a module for each: all but kNone and kBlocks.
std::vector<StoredTensor> stored_tensors(FourBitLayout layout, const RandomTensor& matrix);

}  // namespace switchyard
