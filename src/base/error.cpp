#include "switchyard/error.h"

#include "base/printable.h"
#include "switchyard/tensor.h"

namespace switchyard {
namespace {

constexpr std::size_t kMostMessage = 4096;

}  // namespace

// Messages are escaped here as well as where text from outside enters them, because the latter is
// easily forgotten. Escaping twice changes nothing.
Error::Error(ErrorCode code, const std::string& message)
    : std::runtime_error(printable(message, kMostMessage)), code_(code) {}

const char* to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument: return "invalid_argument";
    case ErrorCode::kInvalidConfig: return "invalid_config";
    case ErrorCode::kInvalidFile: return "invalid_file";
    case ErrorCode::kMissingTensor: return "missing_tensor";
    case ErrorCode::kShapeMismatch: return "shape_mismatch";
    case ErrorCode::kDTypeMismatch: return "dtype_mismatch";
    case ErrorCode::kUnsupported: return "unsupported";
    case ErrorCode::kCapacityExceeded: return "capacity_exceeded";
    case ErrorCode::kSpecMismatch: return "spec_mismatch";
    case ErrorCode::kTimeout: return "timeout";
    case ErrorCode::kAborted: return "aborted";
    case ErrorCode::kSystem: return "system";
  }
  return "unknown";
}

const char* to_string(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kF16: return "f16";
    case DType::kBF16: return "bf16";
    case DType::kF8E4M3: return "f8_e4m3";
    case DType::kI32: return "i32";
    case DType::kI64: return "i64";
    case DType::kU8: return "u8";
    case DType::kF4E2M1: return "f4_e2m1";
    case DType::kU4: return "u4";
    case DType::kF8E8M0: return "f8_e8m0";
  }
  return "unknown";
}

}  // namespace switchyard
