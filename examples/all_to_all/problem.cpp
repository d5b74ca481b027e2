#include "all_to_all/problem.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/convert.h"
#include "switchyard/error.h"

namespace switchyard::all_to_all {
namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

constexpr double kRelative = 1e-2, kAbsolute = 5e-3;

// Vigna's splitmix64: any seed will do, also one beside another.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int below(int end) {
    return static_cast<int>(next() % static_cast<std::uint64_t>(end));  // bias below 2^-50
  }
  float share() { return static_cast<float>(next() >> 40) * 0x1p-24f; }
  // Mean 0 and variance 1: a sum of four uniform numbers is near enough to a normal one.
  float normal() {
    const std::uint64_t bits = next();
    std::int32_t sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<std::int32_t>((bits >> (16 * i)) & 0xffff);
    return (static_cast<float>(sum) * 0x1p-16f - 2.0f) * 1.7320508f;
  }

 private:
  std::uint64_t state_;
};

// Streams of numbers of a rank: tokens do not depend on how many the routing took.
enum class Use : std::uint64_t { kRouting = 1, kTokens, kFactors };

Random random_of(const Case& problem, int rank, Use use) {
  return Random((problem.seed + static_cast<std::uint64_t>(rank)) * 8 +
                static_cast<std::uint64_t>(use));
}

// The numbers that a case begins with: how many tokens a rank has comes first.
int tokens_of_rank(const Case& problem, Random& random) {
  return 1 + random.below(std::max(problem.max_tokens - 1, 1));
}

}  // namespace

const std::vector<Case>& test_cases() {
  static const std::vector<Case> cases = {
      {8, 2, 6144, 4, 1236},    {64, 6, 2048, 4, 1234},  {64, 6, 2048, 8, 542},
      {128, 4, 2880, 16, 347},  {128, 4, 2880, 32, 51},  {128, 8, 4096, 64, 175},
      {128, 8, 4096, 128, 534}, {256, 8, 7168, 64, 897}, {256, 8, 7168, 128, 4}};
  return cases;
}

const std::vector<Case>& benchmark_cases() {
  static const std::vector<Case> cases = {{8, 2, 6144, 16, 6635},
                                          {64, 6, 2048, 32, 1234},
                                          {128, 4, 2880, 128, 51},
                                          {128, 8, 4096, 256, 175},
                                          {256, 8, 7168, 256, 4}};
  return cases;
}

std::string name_of(const Case& problem) {
  return fmt::format("E {}, K {}, H {}, up to {} tokens", problem.num_experts, problem.top_k,
                     problem.hidden, problem.max_tokens - 1);
}

Routing routing_of(const Case& problem, int rank) {
  Random random = random_of(problem, rank, Use::kRouting);
  Routing routing;
  routing.num_tokens = tokens_of_rank(problem, random);
  std::vector<std::int32_t> experts(static_cast<std::size_t>(problem.num_experts));
  std::iota(experts.begin(), experts.end(), 0);
  for (int t = 0; t < routing.num_tokens; ++t) {
    // The first K of a shuffle.
    for (int k = 0; k < problem.top_k; ++k) {
      const int other = k + random.below(problem.num_experts - k);
      std::swap(experts[static_cast<std::size_t>(k)], experts[static_cast<std::size_t>(other)]);
      routing.ids.push_back(experts[static_cast<std::size_t>(k)]);
      routing.weights.push_back(random.share());
    }
  }
  return routing;
}

std::vector<std::uint16_t> tokens_of(const Case& problem, int rank) {
  Random of_routing = random_of(problem, rank, Use::kRouting);
  const auto tokens = static_cast<std::size_t>(tokens_of_rank(problem, of_routing));
  Random random = random_of(problem, rank, Use::kTokens);
  std::vector<std::uint16_t> x(tokens * static_cast<std::size_t>(problem.hidden));
  for (std::uint16_t& value : x) value = f32_to_f16(random.normal());
  return x;
}

void require_playable(const Case& problem, int ranks) {
  if (ranks < 1 || problem.num_experts % ranks != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} ranks do not divide {} experts; use 1, 2, 4 or 8 ranks", ranks,
                            problem.num_experts));
  }
  if (problem.top_k < 1 || problem.top_k > problem.num_experts) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a token has {} of {} experts; use 1 to {}", problem.top_k,
                            problem.num_experts, problem.num_experts));
  }
  if (problem.hidden < 8 || problem.hidden % 8 != 0 || problem.max_tokens < 2) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("H is {} and ranks have fewer than {} tokens; H must be a multiple of "
                            "8, for rows are copied by 16 bytes, and the bound 2 or more",
                            problem.hidden, problem.max_tokens));
  }
}

std::vector<float> expert_factors(const Case& problem, int ranks, StandIn stand_in) {
  const int experts_per_rank = problem.num_experts / ranks;
  std::vector<float> factors;
  Random random = random_of(problem, 1'000'003, Use::kFactors);
  for (int e = 0; e < problem.num_experts; ++e) {
    const int rank = e / experts_per_rank;
    factors.push_back(stand_in == StandIn::kRank ? 1.0f + static_cast<float>(rank)
                                                 : 2 * random.share() - 1);
  }
  return factors;
}

std::int64_t Traffic::busiest() const {
  std::int64_t most = 0;
  for (int r = 0; r < ranks; ++r) {
    std::int64_t out = 0, in = 0;
    for (int other = 0; other < ranks; ++other) {
      if (other == r) continue;
      out += between(r, other);
      in += between(other, r);
    }
    most = std::max({most, out, in});
  }
  return most;
}

Traffic traffic_of(const Case& problem, int ranks) {
  const int experts_per_rank = problem.num_experts / ranks;
  Traffic traffic;
  traffic.ranks = ranks;
  traffic.rows.resize(at(ranks) * at(ranks));
  traffic.expert_rows.resize(static_cast<std::size_t>(problem.num_experts));
  for (int r = 0; r < ranks; ++r) {
    for (const std::int32_t id : routing_of(problem, r).ids) {
      ++traffic.rows[at(r) * at(ranks) + at(id / experts_per_rank)];
      ++traffic.expert_rows[at(id)];
    }
  }
  return traffic;
}

std::string fault_of(const Case& problem, int rank, int ranks, StandIn stand_in,
                     const std::vector<std::uint16_t>& y) {
  const Routing routing = routing_of(problem, rank);
  const std::vector<std::uint16_t> x = tokens_of(problem, rank);
  const std::vector<float> factors = expert_factors(problem, ranks, stand_in);
  if (y.size() != x.size()) {
    return fmt::format("rank {} has a result of {} numbers instead of {}", rank, y.size(),
                       x.size());
  }
  const auto hidden = static_cast<std::size_t>(problem.hidden);
  const auto top_k = static_cast<std::size_t>(problem.top_k);
  for (std::size_t t = 0; t < static_cast<std::size_t>(routing.num_tokens); ++t) {
    double sum = 0;  // of weight * factor: all experts of a token multiply the same row
    for (std::size_t slot = t * top_k; slot < (t + 1) * top_k; ++slot) {
      sum += static_cast<double>(routing.weights[slot]) *
             static_cast<double>(factors[static_cast<std::size_t>(routing.ids[slot])]);
    }
    for (std::size_t c = 0; c < hidden; ++c) {
      const double expected = sum * static_cast<double>(f16_to_f32(x[t * hidden + c]));
      const double found = static_cast<double>(f16_to_f32(y[t * hidden + c]));
      // Not so for a NaN, which poisoned memory is full of.
      if (std::abs(found - expected) <= kAbsolute + kRelative * std::abs(expected)) continue;
      return fmt::format("rank {} has {} for token {}, column {}, instead of {}", rank, found, t, c,
                         expected);
    }
  }
  return {};
}

}  // namespace switchyard::all_to_all
