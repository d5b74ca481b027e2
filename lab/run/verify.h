// Compares a run's output and routing with the fp64 reference.
#pragma once

#include <cstdint>
#include <optional>

#include "run/batch.h"
#include "run/ranks.h"
#include "run/source.h"

namespace switchyard::run {

struct Verification {
  DType compute =
      DType::kBF16;  // what the layer computes in; fp8: the problem is the quantised one
  double error = 0;  // ||output - reference|| / ||reference||, for the routing that was used
  // The same error of a straightforward program in that type; none for fp32.
  std::optional<double> yardstick;
  double bound = 0;  // 1e-5, or twice the yardstick

  // Tokens whose ids or weights differ from the fp64 routing although fp32 logits decide it.
  std::int64_t misrouted_tokens = 0;
  // Tokens so close to a tie that fp32 logits may decide it either way.
  std::int64_t undecided_tokens = 0;
  double margin = 0;  // a token with a smaller margin is undecided
  // Tokens with a NaN among their logits. The reference leaves out the same experts, so no other
  // number here shows them.
  std::int64_t nan_tokens = 0;

  bool error_ok() const { return error <= bound; }
  bool ok() const { return error_ok() && misrouted_tokens == 0 && nan_tokens == 0; }
};

Verification verify(const Source& source, const Batch& batch, const RunResult& result,
                    DType compute);

}  // namespace switchyard::run
