// The names that people and files use where the library's own names are too exact.
#pragma once

#include "switchyard/tensor.h"

namespace switchyard {

// The element type as options and files of results name it: "bf16", "f32", "f16", "fp8". Other
// types have the name of to_string().
const char* short_name(DType dtype);

}  // namespace switchyard
