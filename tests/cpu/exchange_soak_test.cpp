// Calls of an exchange back to back without a barrier, of random sizes, with random delays at every
// step of the protocol: all rows are compared, and all sums judged.
//
//   SWITCHYARD_SOAK_EPOCHS=100000   how many (default 10000)
//   SWITCHYARD_SOAK_SEED=7          other batches and delays
#include <gtest/gtest.h>

#include <deque>

#include "support/exchanges.h"
#include "support/ranks.h"

namespace switchyard::testing {
namespace {

constexpr int kBatches = 48;
// Every wait has a deadline of its own; this one only ends a test whose deadlines do not work.
constexpr std::chrono::minutes kHang{9};

struct Script {
  ExchangeSpec spec;
  int ranks;
  std::uint64_t seed = test::soak_seed();
  std::vector<ExchangeBatch> batches;

  Script(int num_ranks, bool pre_sum, const RowLayout& layout) : ranks(num_ranks) {
    spec.hidden = 24;
    spec.num_experts = 10;
    spec.top_k = 3;
    spec.max_tokens = 40;
    spec.layout = layout;
    spec.combine = DType::kF32;
    spec.pre_sum = pre_sum;
    spec.weights = pre_sum ? CombineWeights::kBySender : CombineWeights::kByReceiver;
    for (std::uint64_t b = 0; b < kBatches; ++b) {
      batches.emplace_back(spec, ranks, DType::kBF16, mix64(seed * kBatches + b));
    }
  }

  // Plays `rounds` dispatches and combines as `world`'s rank. What is done in each round is the
  // same on all ranks: a plain round, one whose dispatch is sent before the combine of the round
  // before, or one that reuses the handle of an earlier one.
  int play(const World& world, std::uint64_t rounds) const {
    Exchange exchange(
        world, spec,
        {.num_threads = world.rank() == 0 ? 2 : 1, .on_step = test::random_delays(seed)});
    struct Slot {
      ExchangeHandle handle;
      ExchangeArrays got;
      Matrix results{0, 1, DType::kF32};
      const ExchangeBatch* batch = nullptr;
    };
    std::deque<Slot> slots;
    for (int i = 0; i < 2; ++i) {
      slots.push_back({exchange.make_handle(),
                       {exchange.spec(), exchange.own_places(), exchange.rows_needed()}});
    }
    int wrong = 0;
    const auto finish = [&](Slot& slot) {
      Matrix out(slot.batch->count(world.rank()), spec.hidden, DType::kF32);
      exchange.combine_recv(output_of(out), slot.handle);
      wrong += wrong_sums(*slot.batch, world.rank(), out);
    };
    Slot* open = nullptr;  // whose combine has been sent
    for (std::uint64_t round = 0; round < rounds; ++round) {
      const std::uint64_t roll = mix64(seed + round);
      Slot& slot = slots[round % 2];
      const bool reuse = slot.batch != nullptr && roll % 4 == 0;
      const ExchangeBatch* tokens = &batches[roll / 4 % kBatches];
      DispatchInput input = input_of(*tokens, world.rank());
      if (reuse) {
        tokens = slot.batch;
        input = {};
        input.tokens = tokens->tokens[static_cast<std::size_t>(world.rank())].view();
        input.reuse = true;
      }
      slot.got = {exchange.spec(), exchange.own_places(), exchange.rows_needed()};
      slot.batch = tokens;
      exchange.dispatch_send(input, slot.handle);
      if (open != nullptr) finish(*open);
      exchange.dispatch_recv(slot.got.output(), slot.handle);
      wrong += wrong_rows(*tokens, world.rank(), exchange.spec().layout, slot.got);
      slot.results = results_of(*tokens, slot.got);
      exchange.combine_send({slot.results.view()}, slot.handle);
      open = &slot;
      if (roll / 1024 % 2 == 0) {
        finish(slot);
        open = nullptr;
      }
      if (wrong > 0) break;
    }
    if (open != nullptr) finish(*open);
    return wrong;
  }
};

void soak_threads(const Script& script, std::uint64_t rounds) {
  const auto start = test::Clock::now();
  const std::vector<World> worlds = World::threads(script.ranks);
  std::vector<int> wrong(worlds.size(), -1);
  run_all_ranks(worlds, [&](const World& world) {
    wrong[static_cast<std::size_t>(world.rank())] = script.play(world, rounds);
  });
  EXPECT_EQ(wrong, std::vector<int>(worlds.size(), 0));
  EXPECT_LT(test::Clock::now() - start, kHang);
}

std::uint64_t epochs() { return test::number_from("SWITCHYARD_SOAK_EPOCHS", 10'000); }

TEST(ExchangeSoak, ThreadsPacked) {
  soak_threads(Script(4, false, RowLayout::packed()), epochs() / 2);
}
TEST(ExchangeSoak, ThreadsPaddedAndPreSummed) {
  soak_threads(Script(3, true, RowLayout::padded(0)), epochs() / 4);
}
TEST(ExchangeSoak, TwoThreadsBlocked) {
  soak_threads(Script(2, false, RowLayout::blocked(8)), epochs() / 4);
}

#if !defined(__SANITIZE_THREAD__)
TEST(ExchangeSoak, Processes) {
  const Script script(4, true, RowLayout::packed());
  const std::string rendezvous = test::fresh_rendezvous();
  test::expect_processes(
      script.ranks,
      [&](int rank) {
        const World world =
            World::processes(rank, script.ranks, test::with_deadline(test::kGenerous, rendezvous));
        EXPECT_EQ(script.play(world, epochs() / 2), 0);
      },
      std::chrono::duration_cast<test::milliseconds>(kHang));
}
#endif

}  // namespace
}  // namespace switchyard::testing
