// A row of the suite all_to_all for tests.
#pragma once

#include <string>

#include "results/all_to_all_row.h"

namespace switchyard::results {

// Of two ranks, a GPU each. Experts have a time only on rungs below "fused".
inline AllToAllRow example_all_to_all_row(const std::string& rung, double median_us) {
  AllToAllRow row;
  row.suite = "all_to_all";
  row.machine = "2 x NVIDIA H200, 132 SMs, CUDA 13.0";
  row.commit = "abc1234";
  row.command = "switchyard bench --suite all_to_all --backend cuda";
  row.problem = "E 256, K 8, H 7168, up to 255 tokens";
  row.experts = 256;
  row.top_k = 8;
  row.hidden = 7168;
  row.max_tokens = 256;
  row.rung = rung;
  row.stand_in = "rank";
  row.ranks = 2;
  row.gpus = 2;
  row.median_us = median_us;
  row.p10_us = 0.9 * median_us;
  row.p90_us = 1.2 * median_us;
  row.repeats = 3;
  row.nvlink_bytes = 14'680'064;
  row.floor_us = 47.25;
  row.blocks = "128, 128, 128, 128, 128";
  row.receive_imbalance = 1.5;
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
