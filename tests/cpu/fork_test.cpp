// A child of fork() and the objects that its parent made: calls are refused at once, letting go of
// it disturbs nobody, and what the child makes anew works.
//
// The parents here have threads, unlike those of run_processes(). They all sleep between two calls,
// so they hold no lock that a child could miss.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <optional>

#include "cpu/core_lease.h"
#include "fabric/rendezvous.h"
#include "support/accuracy.h"
#include "support/exchanges.h"
#include "support/layers.h"
#include "support/ranks.h"
#include "switchyard/grouped_gemm.h"
#include "switchyard/symmetric_heap.h"
#include "switchyard/workspace.h"

namespace switchyard::testing {
namespace {

// Runs `body` in a child, which is given 20 seconds.
void in_child(const std::function<void()>& body) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    try {
      body();
    } catch (const std::exception& error) {
      ADD_FAILURE() << "the child threw: " << error.what();
    }
    std::fflush(nullptr);
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

void expect_inherited(const char* what, const std::function<void()>& call) {
  EXPECT_THAT(test::error_of(ErrorCode::kInvalidArgument, call),
              ::testing::AllOf(::testing::HasSubstr(what),
                               ::testing::HasSubstr("in another process, before fork()")));
}

struct LayerProblem {
  LayerSpec spec = spec_of(64, 32, 8, 2);
  MoeWeights weights = generate_weights(spec, DType::kF32, 1, {.num_threads = 1});
  Batch batch = random_batch(spec, 16, DType::kF32, 2);
  LayerOptions options{.cpu = {.num_threads = 3}};

  BatchResult run(MoeLayer& layer) const {
    BatchResult result = empty_result(spec, batch, 1, DType::kF32);
    forward_share(layer, batch, Shares::even(16, 1), 0, result);
    return result;
  }
};

TEST(Fork, OfALayerAndItsWorkspace) {
  const LayerProblem problem;
  World world = World::single();
  std::optional<Workspace> workspace(
      std::in_place, world, problem.spec,
      WorkspaceOptions{.max_tokens = 16, .compute = DType::kF32, .num_threads = 3});
  LayerOptions options = problem.options;
  options.max_tokens = 16;
  options.workspace = &*workspace;
  std::optional<MoeLayer> layer(std::in_place, world, problem.spec, problem.weights, options);
  const BatchResult expected = problem.run(*layer);
  in_child([&] {
    expect_inherited("the layer", [&] { problem.run(*layer); });
    expect_inherited("the layer", [&] { layer->refresh(); });
    expect_inherited("the layer", [&] { layer->rebind(problem.weights); });
    expect_inherited("the layer", [&] { layer->check(); });
    expect_inherited("the layer", [&] { (void)layer->stats(); });
    expect_inherited("the workspace", [&] { workspace->release(); });
    expect_inherited("the workspace", [&] { workspace->restore(); });
    expect_inherited("the world", [&] { world.barrier(); });
    expect_inherited("the world", [&] { MoeLayer(world, problem.spec, problem.weights); });
    expect_inherited("the world", [&] { Workspace(world, problem.spec, {}); });
    world.abort();  // is nothing to the parent
    {
      World fresh = World::single();
      MoeLayer again(fresh, problem.spec, problem.weights, problem.options);
      EXPECT_TRUE(problem.run(again).output == expected.output);
      *layer = std::move(again);  // lets go of the parent's, and is the child's
      EXPECT_TRUE(problem.run(*layer).output == expected.output);
      // A child of a child.
      in_child([&] {
        expect_inherited("the layer", [&] { problem.run(*layer); });
        layer.reset();
      });
      EXPECT_TRUE(problem.run(*layer).output == expected.output);
    }
    layer.reset();
    workspace.reset();
    world = World::single();
    world.barrier();
  });
  EXPECT_TRUE(problem.run(*layer).output == expected.output);
}

TEST(Fork, OfAGroupedGemm) {
  Matrix w = Matrix::random(3 * 8, 4, DType::kF32, 1), x = Matrix::random(6, 4, DType::kF32, 2);
  const std::vector<std::int32_t> ends{2, 2, 6};
  GroupedGemmWeights weights;
  for (int e = 0; e < 3; ++e) {
    weights.matrices.push_back({w.row(8 * e), DType::kF32, 8, 4, 4});
  }
  const auto make = [&] { return GroupedGemm({3, 8, 4, {}, {}}, weights, {.num_threads = 3}); };
  const auto run = [&](GroupedGemm& gemm) {
    Matrix y(6, 8, DType::kF32);
    gemm.run({.x = x.view(), .ends = ends}, {.data = y.row(0), .dtype = DType::kF32, .rows = 6});
    return y;
  };
  std::optional<GroupedGemm> gemm(make());
  const Matrix expected = run(*gemm);
  in_child([&] {
    expect_inherited("the operator", [&] { run(*gemm); });
    expect_inherited("the operator", [&] { gemm->refresh(); });
    GroupedGemm again = make();
    EXPECT_TRUE(run(again) == expected);
    gemm.reset();
  });
  EXPECT_TRUE(run(*gemm) == expected);
}

TEST(Fork, OfAnExchange) {
  const ExchangeSpec spec{.hidden = 64, .num_experts = 4, .top_k = 2, .max_tokens = 300};
  const ExchangeBatch batch(spec, 1, DType::kBF16, 3, {300});
  const auto run = [&](Exchange& exchange, ExchangeHandle& handle) {
    ExchangeArrays got(exchange.spec(), exchange.own_places(), exchange.rows_needed());
    exchange.dispatch(input_of(batch, 0), got.output(), handle);
    wrong_rows(batch, 0, exchange.spec().layout, got);
    const Matrix y = results_of(batch, got);
    Matrix out(300, spec.hidden, DType::kF32);
    exchange.combine({y.view()}, output_of(out), handle);
    wrong_sums(batch, 0, out);
  };
  std::optional<Exchange> exchange(std::in_place, World::single(), spec,
                                   ExchangeOptions{.num_threads = 3});
  std::optional<ExchangeHandle> handle(exchange->make_handle());
  run(*exchange, *handle);
  in_child([&] {
    expect_inherited("the exchange", [&] { run(*exchange, *handle); });
    expect_inherited("the exchange", [&] { (void)exchange->make_handle(); });
    expect_inherited("the exchange", [&] { exchange->check(); });
    expect_inherited("the exchange", [&] { (void)exchange->stats(); });
    Exchange again(World::single(), spec, {.num_threads = 3});
    ExchangeHandle fresh = again.make_handle();
    run(again, fresh);
    *handle = std::move(fresh);
    run(again, *handle);
    handle.reset();
    exchange.reset();
  });
  run(*exchange, *handle);
}

// Ranks that are threads: the parent's go on with what they have.
TEST(Fork, OfAWorldOfThreads) {
  std::vector<World> worlds = World::threads(2, test::with_deadline(test::kGenerous));
  std::vector<std::unique_ptr<SymmetricHeap>> heaps(2);
  const auto meet = [&](World& world) {
    auto& heap = heaps[static_cast<std::size_t>(world.rank())];
    if (heap == nullptr) heap = std::make_unique<SymmetricHeap>(world, 4096);
    world.barrier();
    heap->barrier();
  };
  test::run_threads(worlds, meet);
  in_child([&] {
    expect_inherited("the world", [&] { worlds[0].barrier(); });
    expect_inherited("the world", [&] { SymmetricHeap(worlds[0], 64); });
    expect_inherited("the symmetric heap", [&] { heaps[0]->allocate(8); });
    expect_inherited("the symmetric heap", [&] { heaps[0]->barrier(); });
    expect_inherited("the symmetric heap", [&] { heaps[0]->check(); });
    expect_inherited("the symmetric heap", [&] { heaps[0]->reset(); });
    worlds[1].abort();
    heaps.clear();
    worlds.clear();
    worlds = World::threads(2, test::with_deadline(test::kGenerous));
    heaps.resize(2);
    test::run_threads(worlds, meet);
  });
  test::run_threads(worlds, meet);
}

// Ranks that are processes, one of which has a child that comes and goes.
TEST(Fork, OfAWorldOfProcesses) {
  const LayerProblem problem;
  const std::string rendezvous = test::fresh_rendezvous();
  test::expect_processes(2, [&](int rank) {
    WorldOptions options = test::with_deadline(test::kGenerous);
    options.rendezvous = rendezvous;
    std::optional<World> world(World::processes(rank, 2, options));
    std::optional<MoeLayer> layer(std::in_place, *world, problem.spec, problem.weights,
                                  problem.options);
    std::optional<SymmetricHeap> heap(std::in_place, *world, std::size_t{4096});
    auto* const word = heap->allocate<std::uint64_t>();
    const auto pass = [&] {
      BatchResult result = empty_result(problem.spec, problem.batch, 2, DType::kF32);
      forward_share(*layer, problem.batch, Shares::even(16, 2), rank, result);
      heap->barrier();
    };
    pass();
    if (rank == 0) {
      in_child([&] {
        expect_inherited("the layer", pass);
        expect_inherited("the world", [&] { world->barrier(); });
        expect_inherited("the symmetric heap", [&] { heap->translate(word, 1); });
        world->abort();
        heap.reset();
        layer.reset();
        world.reset();
        MoeLayer alone(World::single(), problem.spec, problem.weights, problem.options);
        problem.run(alone);
      });
    }
    for (int i = 0; i < 3; ++i) pass();
    world->barrier();
  });
}

// Cores that the parent's threads have taken are not taken in the child.
TEST(Fork, CoresAreTheChildsOwn) {
  protocol::Heaps heaps;
  std::optional<cpu::CoreLease> all[256];
  for (auto& lease : all) {
    if (!cpu::CoreLease::core_is_free()) break;
    lease.emplace(heaps);
  }
  EXPECT_FALSE(cpu::CoreLease::core_is_free());
  in_child([] { EXPECT_TRUE(cpu::CoreLease::core_is_free()); });
  EXPECT_FALSE(cpu::CoreLease::core_is_free());
}

}  // namespace
}  // namespace switchyard::testing
