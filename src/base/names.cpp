#include "base/names.h"

namespace switchyard {

const char* short_name(DType dtype) {
  switch (dtype) {
    case DType::kBF16: return "bf16";
    case DType::kF32: return "f32";
    case DType::kF16: return "f16";
    case DType::kF8E4M3: return "fp8";
    case DType::kF4E2M1: return "mxfp4";
    case DType::kU4: return "int4";
    default: return to_string(dtype);
  }
}

}  // namespace switchyard
