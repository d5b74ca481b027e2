// The all-to-all problem of GPU MODE: its cases, its data, and what must come out.
//
// Every rank has tokens in fp16 and, for each, K of E experts with weights. A token goes to the
// ranks of its experts, experts make something of it, and the token's rank sums what comes back:
//
//   y[t] = sum over k of weights[t, k] * expert(x[t])
//
// Experts are stand-ins: a rank multiplies by 1 + its number, or each expert by a random weight.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace switchyard::all_to_all {

struct Case {
  int num_experts = 0, top_k = 0, hidden = 0;
  int max_tokens = 0;  // of a rank, which has from 1 to max_tokens - 1
  std::uint64_t seed = 0;

  bool operator==(const Case&) const = default;
};

// The problem's nine test cases and five benchmark cases.
const std::vector<Case>& test_cases();
const std::vector<Case>& benchmark_cases();

// "E 8, K 2, H 6144, up to 15 tokens"
std::string name_of(const Case& problem);

// The factor that an expert multiplies by.
enum class StandIn {
  kRank,    // 1 + its rank
  kRandom,  // a weight of its own
};

// A rank's part of a case. It depends on the case, the rank and nothing else, so every rank can
// also tell what the others have.
struct Routing {
  int num_tokens = 0;
  std::vector<std::int32_t> ids;  // [T, K], distinct within a token
  std::vector<float> weights;     // [T, K], from 0 to 1
};
Routing routing_of(const Case& problem, int rank);
std::vector<std::uint16_t> tokens_of(const Case& problem, int rank);  // [T, H] in fp16

// Throws Error{kInvalidArgument} if the ranks do not divide the experts, if a token has more
// experts than there are, or if H is no multiple of 8.
void require_playable(const Case& problem, int ranks);

// [E]: what each expert multiplies by. `ranks` must divide the experts.
std::vector<float> expert_factors(const Case& problem, int ranks, StandIn stand_in);

// How many rows go where.
struct Traffic {
  int ranks = 0;
  std::vector<std::int64_t> rows;         // [ranks, ranks]: from a rank to a rank
  std::vector<std::int64_t> expert_rows;  // [E]

  std::int64_t between(int from, int to) const {
    return rows[static_cast<std::size_t>(from * ranks + to)];
  }
  // The most rows that any rank sends to, or gets from, the other ranks.
  std::int64_t busiest() const;
};
Traffic traffic_of(const Case& problem, int ranks);

// Compares a rank's result with the formula in fp64, by the problem's tolerance: 5e-3 and a
// hundredth of the number. Returns the first fault in words, or nothing.
std::string fault_of(const Case& problem, int rank, int ranks, StandIn stand_in,
                     const std::vector<std::uint16_t>& y);

}  // namespace switchyard::all_to_all
