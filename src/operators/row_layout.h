// Rows of experts in an array, as the operators check them.
#pragma once

#include "base/limits.h"
#include "switchyard/grouped_gemm.h"

namespace switchyard {

// Throws Error{kInvalidArgument} for a layout that is none. `name` is what the caller calls it.
void check_layout(const char* name, const RowLayout& layout);

}  // namespace switchyard
