// quantization_config of a config.json: how weights of FP8 and of four bits are to be read.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "switchyard/tensor.h"

namespace switchyard {

class Keys;

// Weights of four bits: how many columns share a scale, and whether zero points are stored.
struct FourBitFormat {
  DType dtype = DType::kF4E2M1;  // or kU4
  std::int64_t group = kMxGroup;
  bool has_zero = false;
  friend bool operator==(const FourBitFormat&, const FourBitFormat&) = default;
};

struct Quantization {
  std::string method;  // quant_method: "fp8", "compressed-tensors", "mxfp4", ...; empty: none
  int block_rows = 0;  // of the scales' blocks; 0: a scale for each row, or for the whole matrix
  int block_cols = 0;
  std::optional<FourBitFormat> four_bit;  // of the weights that are stored so
  // Why weights of FP8 or four bits of this checkpoint cannot be read: the key, its value and the
  // remedy. Empty if they can. Modules that are not quantised can be read all the same.
  std::string problem;
};

// Reads quantization_config, or compression_config, from the whole config.json or from its text
// part. Throws Error{kInvalidConfig} for values that are malformed. Well-formed values that change
// the numbers in an unsupported way, as an unknown key may, become the `problem`.
Quantization parse_quantization(const Keys& root, const Keys& text);

}  // namespace switchyard
