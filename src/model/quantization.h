// quantization_config of a config.json: how FP8 weights are to be read.
#pragma once

#include <string>

namespace switchyard {

class Keys;

struct Quantization {
  std::string method;  // quant_method: "fp8", "compressed-tensors", "mxfp4", ...; empty: none
  int block_rows = 0;  // of the scales' blocks; 0: a scale for each row, or for the whole matrix
  int block_cols = 0;
  // Why FP8 weights of this checkpoint cannot be read: the key, its value and the remedy. Empty if
  // they can. Modules that are not quantised can be read all the same.
  std::string problem;
};

// Reads quantization_config, or compression_config, from the whole config.json or from its text
// part. Throws Error{kInvalidConfig} for values that are malformed. Well-formed values that change
// the numbers in an unsupported way, as an unknown key may, become the `problem`.
Quantization parse_quantization(const Keys& root, const Keys& text);

}  // namespace switchyard
