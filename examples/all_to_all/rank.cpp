#include "all_to_all/rank.h"

#include <fmt/core.h>

#include <algorithm>

#include "switchyard/error.h"

namespace switchyard::all_to_all {
namespace {

std::size_t at(std::int64_t value) { return static_cast<std::size_t>(value); }

// The sizes of Memory's arrays, in one place for the heap's size and for its allocations.
struct Counts {
  Counts(const Case& problem, int world_size)
      : ranks(at(world_size)),
        experts(at(problem.num_experts / world_size)),
        slots(at(problem.max_tokens) * at(problem.top_k)),
        hidden(at(problem.hidden)),
        tokens(at(problem.max_tokens)) {}

  // Calls take(pointer, count) for every array.
  template <typename Take>
  void each(Memory& m, std::uint16_t*& x, std::int32_t*& ids, float*& weights, float*& factors,
            std::uint16_t*& y, const Take& take) const {
    const std::size_t room = ranks * tokens;
    take(m.rows, 2 * ranks * slots * hidden);
    take(m.origins, 2 * ranks * slots);
    take(m.counts, 2 * ranks);
    take(m.row_flags, 2 * ranks * slots);
    take(m.results, 2 * slots * hidden);
    take(m.result_flags, 2 * slots);
    take(m.rank_flags, 2 * ranks);
    take(m.sent, ranks + experts + 1);  // and the other counters, which are cleared with it
    take(m.expert_rows, experts * room * hidden);
    take(m.expert_origins, experts * room);
    take(m.placed, ranks * slots);
    take(m.staging, ranks * slots * hidden);
    take(m.staging_origins, ranks * slots);
    take(m.staging_counts, ranks);
    take(m.sent_to, slots);
    take(x, tokens * hidden);
    take(ids, slots);
    take(weights, slots);
    take(factors, experts);
    take(y, tokens * hidden);
  }

  std::size_t ranks, experts, slots, hidden, tokens;
};

struct Pointers {
  Memory memory{};
  std::uint16_t *x = nullptr, *y = nullptr;
  std::int32_t* ids = nullptr;
  float *weights = nullptr, *factors = nullptr;
};

std::size_t bytes_needed(const Case& problem, int ranks) {
  require_playable(problem, ranks);
  std::size_t bytes = 64 * 1024;  // what a backend has besides
  Pointers p;
  Counts(problem, ranks)
      .each(p.memory, p.x, p.ids, p.weights, p.factors, p.y,
            [&]<typename T>(T*&, std::size_t count) {
              bytes += (count * sizeof(T) + SymmetricHeap::kAlignment - 1) /
                       SymmetricHeap::kAlignment * SymmetricHeap::kAlignment;
            });
  return bytes;
}

SymmetricHeapOptions heap_options(const RankOptions& options) {
  return {.backend = options.backend, .device = options.device, .deadline = options.deadline};
}

}  // namespace

Rank::Rank(const World& world, const Case& problem, const RankOptions& options)
    : problem_(problem),
      options_(options),
      world_(world),
      routing_(routing_of(problem, world.rank())),
      traffic_(traffic_of(problem, world.size())),
      heap_(world, bytes_needed(problem, world.size()), heap_options(options)) {
  const int experts = problem.num_experts / world.size();
  Pointers p;
  Counts(problem, world.size())
      .each(
          p.memory, p.x, p.ids, p.weights, p.factors, p.y,
          [&]<typename T>(T*& pointer, std::size_t count) { pointer = heap_.allocate<T>(count); });
  p.memory.expert_counts = p.memory.sent + world.size();
  p.memory.ticket = p.memory.expert_counts + experts;
  call_.map = heap_.peer_map();
  call_.sizes = {experts, problem.top_k, problem.hidden, problem.max_tokens};
  call_.memory = p.memory;
  call_.num_tokens = routing_.num_tokens;
  call_.x = p.x;
  call_.ids = p.ids;
  call_.weights = p.weights;
  call_.factors = p.factors;
  call_.y = p.y;
  heap_.barrier();
}

void Rank::upload_inputs() {
  const auto upload_to = [&]<typename T>(const T* to, const T* from, std::size_t count) {
    upload(const_cast<T*>(to), from, count * sizeof(T));
  };
  const std::vector<std::uint16_t> x = tokens_of(problem_, world_.rank());
  const std::vector<float> factors = expert_factors(problem_, world_.size(), options_.stand_in);
  const std::size_t experts = at(call_.sizes.experts_per_rank);
  upload_to(call_.x, x.data(), x.size());
  upload_to(call_.ids, routing_.ids.data(), routing_.ids.size());
  upload_to(call_.weights, routing_.weights.data(), routing_.weights.size());
  upload_to(call_.factors, factors.data() + at(world_.rank()) * experts, experts);
}

std::vector<std::uint16_t> Rank::result() const {
  std::vector<std::uint16_t> y(at(call_.num_tokens) * at(call_.sizes.hidden));
  download(y.data(), call_.y, y.size() * sizeof(y[0]));
  return y;
}

Grids Rank::default_grids() const {
  Grids grids;
  grids.fill(std::min(usual_blocks(), most_blocks()));
  return grids;
}

void Rank::start(const Features& features, const Grids& grids) {
  for (const int blocks : grids) {
    if (blocks >= 1 && blocks <= most_blocks()) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a grid has {} blocks; use 1 to {}, so that all blocks that wait for "
                            "each other run at once",
                            blocks, most_blocks()));
  }
  features_ = features;
  grids_ = grids;
  heap_.barrier();  // nobody is in a call any more
  const Part counted = counters();
  fill(counted.memory, 0, counted.bytes);
  for (const int window : {0, 1}) {
    for (const Part& part : flags_of_window(window)) fill(part.memory, 0, part.bytes);
  }
  started_ = true;
  heap_.barrier();  // nobody clears flags that others raise
}

void Rank::poison() {
  constexpr int kNan = 0xff;  // a half of all ones is a NaN
  heap_.barrier();
  const Memory& m = call_.memory;
  const Sizes& s = call_.sizes;
  const auto hidden = at(s.hidden);
  const auto rows = [&](std::uint16_t* first, std::int64_t count) {
    fill(first, kNan, at(count) * s.row_bytes());
  };
  // Only what a call uses: a CPU's heap has memory where it was touched, and is much larger.
  for (int rank = 0; rank < world_.size(); ++rank) {
    for (const int window : {0, 1}) {
      rows(m.rows + call_.of_row(window, rank, 0) * hidden,
           std::max(traffic_.between(rank, world_.rank()), traffic_.between(world_.rank(), rank)));
    }
  }
  for (int rank = 0; rank < world_.size(); ++rank) {
    rows(m.staging + call_.of_row(0, rank, 0) * hidden,
         std::max(traffic_.between(rank, world_.rank()), traffic_.between(world_.rank(), rank)));
  }
  for (const int window : {0, 1}) {
    rows(m.results + call_.of_slot(window, 0) * hidden, call_.num_slots());
  }
  for (int e = 0; e < s.experts_per_rank; ++e) {
    rows(m.expert_rows + at(e) * call_.expert_room() * hidden,
         traffic_.expert_rows[at(world_.rank() * s.experts_per_rank + e)]);
  }
  rows(call_.y, call_.num_tokens);
  heap_.barrier();
}

Call Rank::next_call() {
  if (!started_) {
    throw Error(ErrorCode::kInvalidArgument, "no rung was chosen; call start() before call()");
  }
  ++number_;
  Call call = call_;
  call.host = features_.host;
  call.flag_per_token = features_.flag_per_token;
  call.fused = features_.fused;
  call.epochs = features_.epochs;
  call.flattened = features_.flattened;
  call.window = features_.host ? 0 : static_cast<std::int32_t>(number_ % 2);
  call.tag = features_.epochs ? number_ : 1;
  return call;
}

Rank::Part Rank::counters() const {
  return {call_.memory.sent,
          (call_.ranks() + at(call_.sizes.experts_per_rank) + 1) * sizeof(std::uint32_t)};
}

std::vector<Rank::Part> Rank::flags_of_window(int window) const {
  const Memory& m = call_.memory;
  const std::size_t ranks = call_.ranks(), slots = call_.sizes.slots();
  return {{m.counts + call_.of_rank(window, 0), ranks * sizeof(*m.counts)},
          {m.rank_flags + call_.of_rank(window, 0), ranks * sizeof(*m.rank_flags)},
          {m.row_flags + call_.of_row(window, 0, 0), ranks * slots * sizeof(*m.row_flags)},
          {m.result_flags + call_.of_slot(window, 0), slots * sizeof(*m.result_flags)}};
}

std::unique_ptr<Rank> make_rank(const World& world, const Case& problem,
                                const RankOptions& options) {
  return options.backend == Backend::kCuda ? make_gpu_rank(world, problem, options)
                                           : make_cpu_rank(world, problem, options);
}

}  // namespace switchyard::all_to_all
