#include "bench/activations.h"

#include "models/random_tensor.h"

namespace switchyard::bench {

std::vector<std::byte> random_activations(DType dtype, std::int64_t tokens, std::int64_t columns,
                                          std::uint64_t key) {
  const RandomTensor tensor{
      .dtype = dtype, .rows = tokens, .cols = columns, .deviation = 1, .key = key};
  std::vector<std::byte> values(tensor.data_bytes());
  fill(tensor, values.data());
  return values;
}

}  // namespace switchyard::bench
