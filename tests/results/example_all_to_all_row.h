// A row of the suite all_to_all for tests.
#pragma once

#include <string>

#include "results/all_to_all_row.h"

namespace switchyard::results {

// Two ranks, a GPU each. Experts have a time only on rungs below "fused".
inline AllToAllRow example_all_to_all_row(const std::string& rung, double median_us) {
  AllToAllRow row{.suite = "all_to_all",
                  .machine = "2 x NVIDIA H200, 132 SMs, CUDA 13.0",
                  .commit = "abc1234",
                  .command = "switchyard bench --suite all_to_all --backend cuda",
                  .problem = "E 256, K 8, H 7168, up to 255 tokens",
                  .experts = 256,
                  .top_k = 8,
                  .hidden = 7168,
                  .max_tokens = 256,
                  .rung = rung,
                  .stand_in = "rank",
                  .ranks = 2,
                  .gpus = 2,
                  .median_us = median_us,
                  .p10_us = 0.9 * median_us,
                  .p90_us = 1.2 * median_us,
                  .repeats = 3,
                  .nvlink_bytes = 14'680'064,
                  .floor_us = 47.25,
                  .blocks = "128, 128, 128, 128, 128",
                  .receive_imbalance = 1.5};
  row.rank_us = {median_us, 0.75 * median_us};
  const bool with_experts = rung == "host" || rung.starts_with("flag_");
  for (std::size_t s = 0; s < kNumStages; ++s) {
    if (s == 2 && !with_experts) continue;
    row.stage_us[s] = {0.25 * median_us, 0.125 * median_us};
  }
  row.times_us = {0.9 * median_us, median_us, 1.2 * median_us};
  return row;
}

}  // namespace switchyard::results
