// A row as bench makes it.
#pragma once

#include <cstdint>

#include "results/row.h"

namespace switchyard::results {

inline Row example_row(std::int64_t tokens, double microseconds) {
  Row row;
  row.suite = "one_gpu_bf16";
  row.machine = "a machine";
  row.commit = "abc1234";
  row.command = "switchyard bench";
  row.model = "olmoe";
  row.hidden = 2048;
  row.intermediate = 1024;
  row.experts = 64;
  row.top_k = 8;
  row.dtype = "bf16";
  row.tokens_per_rank = tokens;
  row.median_us = microseconds + 1;
  row.p10_us = microseconds;
  row.p90_us = microseconds + 2;
  row.repeats = 3;
  row.times_us = {microseconds, microseconds + 1, microseconds + 2};
  row.median_us_no_graph = microseconds + 10;
  row.times_us_no_graph = {microseconds + 10};
  row.touched_bytes = 1000;
  row.flops = 2000;
  row.floor_us = 8;
  return row;
}

}  // namespace switchyard::results
