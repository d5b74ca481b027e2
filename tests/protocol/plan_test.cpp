#include "protocol/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <tuple>
#include <vector>

namespace switchyard::protocol {
namespace {

// The routing of a whole world and every rank's plan for it.
struct WorldPlans {
  HeapLayout layout;
  std::uint64_t epoch = 7;
  std::vector<std::vector<std::vector<int>>> experts_of;  // [rank][token] -> experts
  std::vector<std::vector<std::byte>> heaps;
  std::vector<std::vector<std::uint32_t>> words;
  std::vector<Plan> plans;

  WorldPlans(int ranks, int experts, int top_k, int max_tokens, unsigned seed) {
    LayoutParams p;
    p.num_ranks = ranks;
    p.num_experts = experts;
    p.top_k = top_k;
    p.hidden = 8;
    p.max_tokens = max_tokens;
    p.cells_per_token = top_k;
    p.element_bytes = 4;
    p.tile = {32, 16};
    layout = HeapLayout(p);
    std::mt19937 random(seed);
    const double skew = std::uniform_real_distribution<>(0.2, 3.0)(random);
    for (int r = 0; r < ranks; ++r) {
      auto& tokens = experts_of.emplace_back(random() % static_cast<unsigned>(max_tokens + 1));
      for (auto& chosen : tokens) {
        std::set<int> distinct;
        while (static_cast<int>(distinct.size()) < top_k) {
          const double u = std::uniform_real_distribution<>(0, 1)(random);
          distinct.insert(std::min(experts - 1, static_cast<int>(experts * std::pow(u, skew))));
          if (random() % 16 == 0) distinct.insert(static_cast<int>(random() % experts));
        }
        chosen.assign(distinct.begin(), distinct.end());
        chosen.resize(static_cast<std::size_t>(top_k));
      }
    }
    heaps.assign(static_cast<std::size_t>(ranks), std::vector<std::byte>(layout.bytes()));
    words.resize(static_cast<std::size_t>(ranks));
    for (int r = 0; r < ranks; ++r) {
      for (int s = 0; s < ranks; ++s) fill_row(heaps[r].data(), s);
      words[r].resize(Plan::words(experts, ranks));
      plans.push_back(Plan::over(words[r].data(), experts, ranks));
      build_plan(SoloTeam(), heaps_of(r), epoch, plans.back());
    }
  }

  Heaps heaps_of(int rank) {
    Heaps h;
    h.layout = layout;
    h.rank = rank;
    for (std::size_t r = 0; r < heaps.size(); ++r) h.base[r] = heaps[r].data();
    return h;
  }

  void fill_row(std::byte* heap, int source) {
    std::uint32_t* row = layout.counts(heap, epoch, source);
    const int experts = layout.params().num_experts;
    for (const auto& chosen : experts_of[source]) {
      std::set<int> owners;
      for (const int e : chosen) {
        ++row[e];
        owners.insert(layout.experts().owner(e));
      }
      for (const int d : owners) ++row[experts + d];
    }
  }
};

// The conflict-freedom rule of layout.h, as a property of random routings: over all ranks, every
// index of pool and rows is written by exactly one source, and the indices are dense.
TEST(Plan, WritesAreConflictFreeAndDense) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const int ranks = 1 + static_cast<int>(random() % 8);
    const int experts = 2 + static_cast<int>(random() % 30);
    const int top_k = 1 + static_cast<int>(random() % std::min(experts, 6));
    WorldPlans world(ranks, experts, top_k, 60, seed);
    const ExpertPartition partition = world.layout.experts();
    // (destination, region, index) -> source
    std::map<std::tuple<int, char, std::uint32_t>, int> written;
    std::map<std::tuple<int, int, int, int>, int> cells;
    const auto write = [&](int d, char region, std::uint32_t index, int s) {
      const auto [where, fresh] = written.emplace(std::tuple(d, region, index), s);
      ASSERT_TRUE(fresh) << "ranks " << where->second << " and " << s << " both write " << region
                         << index << " of rank " << d;
    };
    std::vector<std::uint32_t> rows(ranks), pool(ranks);
    for (int s = 0; s < ranks; ++s) {
      const Plan& plan = world.plans[s];
      std::vector<std::uint32_t> next_row(plan.my_row_begin, plan.my_row_begin + experts);
      std::vector<std::uint32_t> next_token(plan.my_pool_begin, plan.my_pool_begin + ranks);
      for (std::size_t t = 0; t < world.experts_of[s].size(); ++t) {
        std::set<int> owners;
        for (const int e : world.experts_of[s][t]) {
          const int d = partition.owner(e);
          owners.insert(d);
          write(d, 'r', next_row[e]++, s);
          ++rows[d];
          // The cell is written by the expert's owner alone.
          ASSERT_TRUE(cells.emplace(std::tuple(s, static_cast<int>(t), e, 0), d).second);
        }
        for (const int d : owners) {
          if (d == s) continue;
          write(d, 'p', next_token[d]++, s);
          ++pool[d];
        }
      }
      if (HasFatalFailure()) return;
    }
    for (int d = 0; d < ranks; ++d) {
      for (const Plan& plan : world.plans) {
        ASSERT_EQ(plan.num_rows[d], rows[d]);
        ASSERT_EQ(plan.num_pool_tokens[d], pool[d]);
      }
      ASSERT_LE(rows[d], world.layout.max_rows());
      ASSERT_LE(world.plans[0].num_tiles[d], world.layout.max_tiles());
      for (std::uint32_t i = 0; i < rows[d]; ++i) ASSERT_TRUE(written.count({d, 'r', i}));
      for (std::uint32_t i = 0; i < pool[d]; ++i) ASSERT_TRUE(written.count({d, 'p', i}));
    }
  }
}

TEST(Plan, EveryRankAgreesOnSegmentsAndTiles) {
  for (unsigned seed = 0; seed < 50; ++seed) {
    WorldPlans world(5, 17, 3, 80, seed);
    for (int d = 0; d < 5; ++d) {
      std::uint32_t row = 0, tile = 0;
      for (int e = world.layout.experts().begin(d); e < world.layout.experts().end(d); ++e) {
        std::uint32_t of_expert = 0;
        for (const auto& tokens : world.experts_of) {
          for (const auto& chosen : tokens) {
            of_expert += static_cast<std::uint32_t>(std::count(chosen.begin(), chosen.end(), e));
          }
        }
        for (const Plan& plan : world.plans) {
          ASSERT_EQ(plan.rows_of_expert[e], of_expert);
          ASSERT_EQ(plan.row_begin[e], row);
          ASSERT_EQ(plan.tile_begin[e], tile);
        }
        row += of_expert;
        tile += TokenTiles(of_expert, world.layout.params().tile).count;
      }
    }
  }
}

// Lanes that run on threads and meet for every prefix sum, as the lanes of a warp do.
class ThreadTeam {
 public:
  ThreadTeam(int lane, std::vector<std::uint32_t>& shared, std::barrier<>& barrier)
      : lane_(lane), shared_(shared), barrier_(barrier) {}
  int lane() const { return lane_; }
  int size() const { return static_cast<int>(shared_.size()); }
  std::uint32_t exclusive_sum(std::uint32_t value, std::uint32_t& total) const {
    shared_[lane_] = value;
    barrier_.arrive_and_wait();
    std::uint32_t before = 0;
    total = 0;
    for (int i = 0; i < size(); ++i) {
      if (i < lane_) before += shared_[i];
      total += shared_[i];
    }
    barrier_.arrive_and_wait();
    return before;
  }

 private:
  int lane_;
  std::vector<std::uint32_t>& shared_;
  std::barrier<>& barrier_;
};

TEST(Plan, ATeamOfLanesBuildsTheSamePlan) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    WorldPlans world(3, 29, 4, 50, seed);
    std::vector<std::uint32_t> words(world.words[1].size(), 0xdeadbeef);
    const Plan plan = Plan::over(words.data(), 29, 3);
    constexpr int kLanes = 4;
    std::vector<std::uint32_t> shared(kLanes);
    std::barrier<> barrier(kLanes);
    std::vector<std::thread> lanes;
    for (int lane = 0; lane < kLanes; ++lane) {
      lanes.emplace_back([&, lane] {
        build_plan(ThreadTeam(lane, shared, barrier), world.heaps_of(1), world.epoch, plan);
      });
    }
    for (std::thread& lane : lanes) lane.join();
    EXPECT_EQ(words, world.words[1]);
  }
}

}  // namespace
}  // namespace switchyard::protocol
