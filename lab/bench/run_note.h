// The fields that rows of all suites have: the run that they come from, and their times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/names.h"
#include "bench/load.h"
#include "switchyard/layer_spec.h"

namespace switchyard::bench {

struct RunNote {
  std::uint64_t seed = 0;       // of everything random
  std::string commit, command;  // to note in the rows
};

template <typename Row>
Row row_of_run(const char* suite, const std::string& machine, const RunNote& run) {
  Row row;
  row.suite = suite;
  row.machine = machine;
  row.commit = run.commit;
  row.command = run.command;
  return row;
}

// Sets which layer was measured, and in which arithmetic.
template <typename Row>
void set_layer(Row& row, const std::string& model, const LayerSpec& spec, DType weights,
               DType compute) {
  row.model = model;
  row.hidden = spec.hidden;
  row.intermediate = spec.intermediate;
  row.experts = spec.num_experts;
  row.top_k = spec.top_k;
  row.dtype = short_name(weights);
  row.compute = short_name(compute);
}

template <typename Row>
void set_times(Row& row, const std::vector<double>& times) {
  row.median_us = percentile(times, 0.5);
  row.p10_us = percentile(times, 0.1);
  row.p90_us = percentile(times, 0.9);
  row.repeats = static_cast<std::int64_t>(times.size());
}

}  // namespace switchyard::bench
