// Random activations of a layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "switchyard/tensor.h"

namespace switchyard::bench {

// [tokens, columns] of `dtype`, standard normal; a function of the arguments.
std::vector<std::byte> random_activations(DType dtype, std::int64_t tokens, std::int64_t columns,
                                          std::uint64_t key);

}  // namespace switchyard::bench
