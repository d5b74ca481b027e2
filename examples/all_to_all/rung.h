// The rungs of the ladder: what an implementation of the problem does, step by step faster.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard::all_to_all {

// The steps, each of which can be taken by itself. None: ranks put rows into each other's memory,
// with one flag for all rows of a rank; experts are a kernel of their own; flags and counters are
// set to 0 by memset; a block receives the rows of one rank, and sends those of one expert.
struct Features {
  // The host moves the rows: it reads the counts, copies, and meets the other hosts. No flags.
  bool host = false;
  bool flag_per_token = false;  // a row that came can be used before the others came
  bool fused = false;           // the sender of results multiplies as it sends
  bool epochs = false;          // flags have the number of the call, and are never reset
  bool flattened = false;       // all received rows are one list, of which blocks take equal parts
  bool tuned = false;           // of each kernel the fastest number of blocks

  bool operator==(const Features&) const = default;
};

struct Rung {
  std::string name;
  Features features;
};

// The ladder: host, flag_per_rank, and then one step more each: flag_per_token, fused, epochs,
// flattened, tuned.
const std::vector<Rung>& ladder();
// Each step taken alone, from flag_per_rank: flag_per_token_alone, ..., tuned_alone.
const std::vector<Rung>& steps_alone();

// "all": the ladder; "alone": flag_per_rank and the steps alone; otherwise names, with commas.
// Throws Error{kInvalidArgument} for a name that is none, naming those that there are.
std::vector<Rung> find_rungs(std::string_view names);

enum class Stage : std::uint8_t {
  kDispatchSend,
  kDispatchReceive,
  kExperts,  // where they are not fused
  kCombineSend,
  kCombineReceive,
};
inline constexpr std::size_t kNumStages = 5;
inline constexpr std::array<Stage, kNumStages> kStages = {
    Stage::kDispatchSend, Stage::kDispatchReceive, Stage::kExperts, Stage::kCombineSend,
    Stage::kCombineReceive};
const char* to_string(Stage stage);  // "dispatch send", ...

}  // namespace switchyard::all_to_all
