// Routing drawn at random with a given balancedness. Only operations that IEEE 754 defines to the
// bit are used (no library logarithm or exponential), and every random number is a function of the
// seed and its position, so that the result depends on the arguments alone.
#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "switchyard/error.h"
#include "switchyard/routing.h"

namespace switchyard {
namespace {

// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014)
// used as a hash of a counter.
std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

class RandomStream {
 public:
  RandomStream(std::uint64_t seed, std::uint64_t stream)
      : key_(mix(mix(seed + kGoldenGamma) + (stream + 1) * kGoldenGamma)) {}

  std::uint64_t bits(std::uint64_t position) const {
    return mix(key_ + (position + 1) * kGoldenGamma);
  }
  // Returns a multiple of 2^-53 in [0, 1).
  double uniform(std::uint64_t position) const {
    return static_cast<double>(bits(position) >> 11) * 0x1p-53;
  }

 private:
  static constexpr std::uint64_t kGoldenGamma = 0x9e3779b97f4a7c15u;
  std::uint64_t key_;
};

// ln x for x >= 1: x = 2^n m with m in [1, 2), and ln m = 2 atanh((m - 1) / (m + 1)), whose
// argument is at most 1/3; 17 terms leave less than 2^-53.
double portable_log(double x) {
  constexpr double kLn2 = 0x1.62e42fefa39efp-1;
  const auto bits = std::bit_cast<std::uint64_t>(x);
  const int n = static_cast<int>(bits >> 52) - 1023;
  const double m = std::bit_cast<double>((bits & 0x000fffffffffffffu) | 0x3ff0000000000000u);
  const double s = (m - 1) / (m + 1);
  const double z = s * s;
  double p = 0;
  for (int term = 16; term >= 0; --term) p = p * z + 1.0 / (2 * term + 1);
  return n * kLn2 + 2 * s * p;
}

// Entropy of a histogram of `total` draws: ln total - sum(c ln c) / total.
double entropy(const std::vector<std::int64_t>& counts, std::int64_t total) {
  double sum = 0;
  for (std::int64_t count : counts) {
    if (count > 1) sum += static_cast<double>(count) * portable_log(static_cast<double>(count));
  }
  return portable_log(static_cast<double>(total)) - sum / static_cast<double>(total);
}

// Draws ranks without replacement with odds decay^rank: successive sampling, by descent of a binary
// tree of sums. Sums along a changed path are added up anew rather than subtracted from, because
// the terms span hundreds of orders of magnitude and cancellation would leave nothing of the small
// ones.
class SuccessiveSampler {
 public:
  SuccessiveSampler(int num_ranks, double decay)
      : num_leaves_(static_cast<int>(std::bit_ceil(static_cast<unsigned>(num_ranks)))),
        sums_(2 * static_cast<std::size_t>(num_leaves_), 0.0),
        odds_(static_cast<std::size_t>(num_ranks)) {
    double odds = 1;
    for (int rank = 0; rank < num_ranks; ++rank, odds *= decay) {
      odds_[rank] = odds;
      sums_[num_leaves_ + rank] = odds;
    }
    for (int node = num_leaves_ - 1; node >= 1; --node) {
      sums_[node] = sums_[2 * node] + sums_[2 * node + 1];
    }
  }

  // Draws K distinct ranks into `ranks`, using random numbers `first` to `first` + K - 1.
  void draw(const RandomStream& random, std::uint64_t first, int k, std::int32_t* ranks) {
    for (int slot = 0; slot < k; ++slot) {
      ranks[slot] =
          sums_[1] > 0 ? descend(random.uniform(first + slot)) : lowest_not_in(ranks, slot);
      set(ranks[slot], 0.0);
    }
    for (int slot = 0; slot < k; ++slot) set(ranks[slot], odds_[ranks[slot]]);
  }

 private:
  int descend(double uniform) const {
    double remaining = uniform * sums_[1];
    int node = 1;
    while (node < num_leaves_) {
      const double left = sums_[2 * node];
      // An empty right side is never entered, even where rounding leaves remaining == left.
      if (remaining < left || sums_[2 * node + 1] == 0) {
        node = 2 * node;
      } else {
        remaining -= left;
        node = 2 * node + 1;
      }
    }
    return node - num_leaves_;
  }

  // Where all remaining odds have underflowed, the first of them outweighs the rest by far.
  static std::int32_t lowest_not_in(const std::int32_t* ranks, int count) {
    std::int32_t candidate = 0;
    while (std::find(ranks, ranks + count, candidate) != ranks + count) ++candidate;
    return candidate;
  }

  void set(int rank, double odds) {
    int node = num_leaves_ + rank;
    sums_[node] = odds;
    for (node /= 2; node >= 1; node /= 2) sums_[node] = sums_[2 * node] + sums_[2 * node + 1];
  }

  int num_leaves_;
  std::vector<double> sums_;  // heap order: node n's children are 2n and 2n + 1
  std::vector<double> odds_;
};

}  // namespace

SyntheticRouting synthetic_routing(int num_tokens, int num_experts, int top_k, double beta,
                                   std::uint64_t seed) {
  if (num_tokens < 0 || num_experts < 1 || top_k < 1 || top_k > num_experts) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("cannot draw {} of {} experts for {} tokens", top_k, num_experts, num_tokens));
  }
  if (!(beta >= 0 && beta <= 1)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("balancedness is {}, but must be in [0, 1]", beta));
  }
  const RandomStream shuffle_random(seed, 0);
  const RandomStream draw_random(seed, 1);
  const RandomStream weight_random(seed, 2);

  SyntheticRouting routing;
  const std::size_t num_slots = static_cast<std::size_t>(num_tokens) * top_k;
  routing.ids.resize(num_slots);
  routing.weights.resize(num_slots);

  const auto draw_tokens = [&](double decay, int count) {
    SuccessiveSampler sampler(num_experts, decay);
    for (int t = 0; t < count; ++t) {
      const std::size_t first = static_cast<std::size_t>(t) * top_k;
      sampler.draw(draw_random, first, top_k, routing.ids.data() + first);
    }
  };

  // The popularity's decay per rank, e^-lambda, is bisected rather than lambda, because it needs no
  // exponential: 1 is uniform and 0 sends all tokens to the same experts. The balancedness at a
  // decay is that of the first tokens' own draws; the random numbers are the same at every step, so
  // it hardly ever moves against the decay.
  constexpr int kMaxPilotSlots = 32768;
  constexpr int kBisectionSteps = 24;
  const int num_pilot_tokens = std::min(num_tokens, (kMaxPilotSlots + top_k - 1) / top_k);
  double decay = 1;
  if (beta <= lowest_balancedness(num_experts, top_k)) {
    decay = 0;
  } else if (beta < 1 && num_tokens > 0) {
    const double target = beta * portable_log(num_experts);
    const std::int64_t num_pilot_slots = static_cast<std::int64_t>(num_pilot_tokens) * top_k;
    std::vector<std::int64_t> counts(static_cast<std::size_t>(num_experts));
    double low = 0, high = 1;
    for (int step = 0; step < kBisectionSteps; ++step) {
      decay = 0.5 * (low + high);
      draw_tokens(decay, num_pilot_tokens);
      std::fill(counts.begin(), counts.end(), 0);
      for (std::int64_t slot = 0; slot < num_pilot_slots; ++slot) ++counts[routing.ids[slot]];
      (entropy(counts, num_pilot_slots) < target ? low : high) = decay;
    }
  }
  draw_tokens(decay, num_tokens);

  std::vector<std::int32_t> expert_of_rank(static_cast<std::size_t>(num_experts));
  for (int rank = 0; rank < num_experts; ++rank) expert_of_rank[rank] = rank;
  for (int rank = num_experts - 1; rank > 0; --rank) {
    const auto other = shuffle_random.bits(rank) % static_cast<std::uint64_t>(rank + 1);
    std::swap(expert_of_rank[rank], expert_of_rank[other]);
  }
  for (std::size_t slot = 0; slot < num_slots; ++slot) {
    routing.ids[slot] = expert_of_rank[routing.ids[slot]];
    routing.weights[slot] =
        static_cast<float>((0.5 + weight_random.uniform(slot)) / static_cast<double>(top_k));
  }
  return routing;
}

}  // namespace switchyard
