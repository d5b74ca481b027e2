// A row as bench writes it, to be made wrong in one field.
#pragma once

#include <nlohmann/json.hpp>

namespace switchyard::results {

inline nlohmann::json good_row() {
  return {{"suite", "one_gpu_bf16"},
          {"machine", "NVIDIA H200, 132 SMs, CUDA 13.0"},
          {"commit", "11782be"},
          {"command", "switchyard bench --suite one_gpu_bf16"},
          {"model", "olmoe"},
          {"hidden", 2048},
          {"intermediate", 1024},
          {"experts", 64},
          {"top_k", 8},
          {"dtype", "bf16"},
          {"compute", "bf16"},
          {"ranks", 1},
          {"tokens_per_rank", 512},
          {"beta", 0.5},
          {"median_us", 120.0},
          {"p10_us", 110.5},
          {"p90_us", 130.25},
          {"repeats", 20},
          {"touched_bytes", 100663296},
          {"flops", 51539607552},
          {"nvlink_bytes", 0},
          {"floor_us", 60.0},
          {"rival", "torch 2.11.0 compiled"},
          {"rival_us", 240.0},
          {"rival_p10_us", 230.0},
          {"rival_p90_us", nullptr},
          {"beta_reached", 0.51},
          {"routing", "gate"},
          {"expert_load", {0, 0.5, 2.5}},
          {"times_us", {120.0}}};
}

inline nlohmann::json good_row_with(const char* field, const nlohmann::json& value) {
  nlohmann::json row = good_row();
  row[field] = value;
  return row;
}

}  // namespace switchyard::results
