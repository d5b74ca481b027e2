// Ranks that stall, die, skip a call or disagree: every other rank says so, within the deadline.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <mutex>

#include "support/layers.h"
#include "support/ranks.h"

namespace switchyard::testing {
namespace {

using std::chrono::milliseconds;
using test::Gate;
using Kind = ProtocolStep::Kind;

LayerSpec spec_of_16_experts() { return spec_of(64, 32, 16, 4); }

const MoeWeights& weights_of_16_experts() {
  static const MoeWeights weights =
      generate_weights(spec_of_16_experts(), DType::kF32, 1, {.num_threads = 1});
  return weights;
}

// A rank's own share of tokens, everywhere the same size.
struct Share : GatedTokens {
  Share() : GatedTokens(40, 64) {}
};
const char* phase_of(Kind kind) {
  switch (kind) {
    case Kind::kGate:
    case Kind::kPublishCounts: return "counts";
    case Kind::kDispatch:
    case Kind::kArrived: return "dispatch";
    case Kind::kPlan:  // what needs no counts, sending included, is done before
    case Kind::kGemm1:
    case Kind::kGemm2:
    case Kind::kFinished: return "combine";
    case Kind::kCombine:
      return "counts";        // nobody needs it before the next epoch: but see the test
    case Kind::kWait: break;  // see stop_test.cpp
  }
  return "?";
}

class Stall : public ::testing::TestWithParam<Kind> {};

TEST_P(Stall, EveryOtherRankNamesTheStalledOne) {
  constexpr int kRanks = 4, kStalled = 2;
  constexpr std::uint64_t kEpoch = 3;
  const milliseconds deadline{250};
  Gate gate;
  std::atomic<int> others_done{0};
  // Tokens whose rows came back early are summed while rows of another rank are still awaited. A
  // rank that stalls there owes results of this epoch. All epochs have the same tokens, so the one
  // before tells how many it sends.
  int results_sent = 0, results_of_an_epoch = 0;
  bool owes_results = false;
  const std::vector<World> worlds = World::threads(kRanks, {.deadline = deadline});
  const auto failures = run_ranks(worlds, [&](const World& world) {
    LayerOptions options{.max_tokens = 64, .cpu = {.num_threads = 1}};
    if (world.rank() == kStalled) {
      options.diagnostics.on_step = [&](const ProtocolStep& step) {
        if (step.kind == GetParam() && step.epoch == kEpoch) {
          owes_results = results_sent < results_of_an_epoch;
          gate.wait();
        }
        if (step.kind != Kind::kFinished || step.peer == kStalled) return;
        if (step.epoch == kEpoch - 1) ++results_of_an_epoch;
        if (step.epoch == kEpoch) ++results_sent;
      };
    }
    MoeLayer layer(world, spec_of_16_experts(), weights_of_16_experts(), options);
    Share share;
    try {
      for (std::uint64_t epoch = 1; epoch <= kEpoch + 1; ++epoch) share.forward(layer);
    } catch (const TimeoutError&) {
      if (world.rank() != kStalled && ++others_done == kRanks - 1) gate.open();
      throw;
    }
  });
  ASSERT_TRUE(gate.entered());
  const bool next_epoch = GetParam() == Kind::kCombine && !owes_results;
  const char* phase =
      GetParam() == Kind::kCombine && owes_results ? "combine" : phase_of(GetParam());
  int first = 0;
  for (int r = 0; r < kRanks; ++r) {
    SCOPED_TRACE(::testing::Message() << "rank " << r);
    ASSERT_TRUE(failures[r]);
    const test::Blame blame = test::blame_of(
        kStalled, [&] { std::rethrow_exception(failures[r]); }, phase);
    first += blame.code == ErrorCode::kTimeout;
    EXPECT_EQ(blame.failure.epoch, next_epoch ? kEpoch + 1 : kEpoch);
    EXPECT_GE(blame.failure.waited_seconds, 0.25);
    EXPECT_LT(blame.failure.waited_seconds, 0.25 + 5);  // a loaded machine, not a hang
    EXPECT_THAT(blame.words, ::testing::HasSubstr("rank 2 did not do its part"));
  }
  EXPECT_EQ(first, 1) << "exactly one rank's deadline passed first";

  // The process lives, and the next world works.
  run_all_ranks(World::threads(kRanks), [&](const World& world) {
    MoeLayer layer(world, spec_of_16_experts(), weights_of_16_experts(),
                   {.cpu = {.num_threads = 1}});
    Share share;
    share.forward(layer);
  });
}

std::string step_name(const ::testing::TestParamInfo<Kind>& step) {
  constexpr const char* kNames[] = {"Gate",  "PublishCounts", "Plan",     "Dispatch", "Arrived",
                                    "Gemm1", "Gemm2",         "Finished", "Combine"};
  return kNames[static_cast<int>(step.param)];
}

INSTANTIATE_TEST_SUITE_P(EveryStep, Stall,
                         ::testing::Values(Kind::kGate, Kind::kPublishCounts, Kind::kPlan,
                                           Kind::kDispatch, Kind::kArrived, Kind::kGemm1,
                                           Kind::kGemm2, Kind::kFinished, Kind::kCombine),
                         step_name);

TEST(Fault, ASlowRankIsWaitedFor) {
  // Every step takes a tenth of the deadline, the pass many deadlines.
  const WorldOptions world_options{.deadline = milliseconds(300)};
  std::atomic<int> steps{0};
  run_all_ranks(World::threads(2, world_options), [&](const World& world) {
    LayerOptions options{.cpu = {.num_threads = 1}};
    if (world.rank() == 1) {
      options.diagnostics.on_step = [&](const ProtocolStep&) {
        ++steps;
        std::this_thread::sleep_for(milliseconds(30));
      };
    }
    MoeLayer layer(world, spec_of_16_experts(), weights_of_16_experts(), options);
    Share share;
    share.forward(layer);
  });
  EXPECT_GT(steps * 30, 900);
}

TEST(Fault, ASkippedCallIsNoticed) {
  const auto failures =
      run_ranks(World::threads(3, {.deadline = milliseconds(200)}), [&](const World& world) {
        MoeLayer layer(world, spec_of_16_experts(), weights_of_16_experts(),
                       {.cpu = {.num_threads = 1}});
        Share share;
        share.forward(layer);
        if (world.rank() == 1) return;
        share.forward(layer);
      });
  EXPECT_FALSE(failures[1]);
  for (const int r : {0, 2}) {
    ASSERT_TRUE(failures[r]);
    const auto again = [&] { std::rethrow_exception(failures[r]); };
    EXPECT_EQ(test::blame_of(1, again, "counts").failure.epoch, 2u);
  }
}

TEST(Fault, AnExceptionOnOneRankEndsThePassForAll) {
  const auto start = test::Clock::now();
  const auto failures = run_ranks(World::threads(3), [&](const World& world) {
    LayerOptions options{.cpu = {.num_threads = 2}};
    if (world.rank() == 1) {
      options.diagnostics.on_step = [](const ProtocolStep& step) {
        if (step.kind == Kind::kGemm2 && step.epoch == 2) throw std::runtime_error("spilt coffee");
      };
    }
    MoeLayer layer(world, spec_of_16_experts(), weights_of_16_experts(), options);
    Share share;
    share.forward(layer);
    EXPECT_THROW(share.forward(layer), std::runtime_error);
    share.forward(layer);  // dead from now on
  });
  EXPECT_LT(test::since(start), milliseconds(20'000));  // far below the deadline of 30 s
  for (const auto& failure : failures) {
    ASSERT_TRUE(failure);
    test::blame_of(1, [&] { std::rethrow_exception(failure); });
  }
}

TEST(Fault, AKilledProcessIsNamedAndTheSurvivorsGoOn) {
  const std::string rendezvous = test::fresh_rendezvous();
  const std::vector<int> codes = test::run_processes(4, [&](int rank) {
    WorldOptions world_options{.deadline = milliseconds(500), .rendezvous = rendezvous};
    const World world = World::processes(rank, 4, world_options);
    LayerOptions options{.cpu = {.num_threads = 1}};
    options.diagnostics.on_step = [&](const ProtocolStep& step) {
      if (rank == 1 && step.kind == Kind::kDispatch && step.epoch == 3) ::raise(SIGKILL);
    };
    MoeLayer layer(world, spec_of_16_experts(), weights_of_16_experts(), options);
    Share share;
    share.forward(layer);
    share.forward(layer);
    const Matrix before = share.y;
    const test::Blame blame = test::blame_of(
        1, [&] { share.forward(layer); }, "link");
    EXPECT_EQ(blame.failure.epoch, 3u);
    EXPECT_THAT(blame.words, ::testing::HasSubstr("has exited"));
    world_options.rendezvous += " survivors";
    world_options.deadline = test::kGenerous;
    const World survivors = World::processes(rank == 0 ? 0 : rank - 1, 3, world_options);
    MoeLayer again(survivors, spec_of_16_experts(), weights_of_16_experts(),
                   {.cpu = {.num_threads = 1}});
    share.y = Matrix(40, 64, DType::kF32);
    share.forward(again);
    EXPECT_TRUE(share.y == before);
  });
  EXPECT_EQ(codes, (std::vector<int>{0, test::kKilled, 0, 0}));
}

// Bad calls: refused with a typed error, before anything is sent.
class BadCall : public ::testing::Test {
 protected:
  void expect_refused(ErrorCode code, const std::string& words,
                      const std::function<void(ForwardInput&, ForwardOutput&)>& spoil,
                      LayerSpec spec = spec_of_16_experts()) {
    MoeLayer layer(World::single(), spec, weights_of_16_experts(),
                   {.max_tokens = 50, .cpu = {.num_threads = 1}});
    Share share;
    ForwardInput input{.activations = share.x.view()};
    ForwardOutput output{.data = share.y.row(0), .dtype = DType::kF32};
    spoil(input, output);
    const std::string message = test::error_of(code, [&] { layer.forward(input, output); });
    EXPECT_THAT(message, ::testing::HasSubstr(words));
    share.forward(layer);  // and the layer still works
  }
  std::vector<std::int32_t> ids_ = std::vector<std::int32_t>(160, 0);
  std::vector<float> weights_ = std::vector<float>(160, 0.25f);

  void fill_ids() {
    for (std::size_t i = 0; i < ids_.size(); ++i) ids_[i] = static_cast<std::int32_t>(i % 4);
  }
};

TEST_F(BadCall, TooManyTokens) {
  const Matrix x = Matrix::random(51, 64, DType::kF32, 1);
  expect_refused(ErrorCode::kCapacityExceeded,
                 "51 tokens on rank 0; the layer was made for at most 50",
                 [&](ForwardInput& in, ForwardOutput&) { in.activations = x.view(); });
}
TEST_F(BadCall, WrongHiddenSize) {
  expect_refused(ErrorCode::kShapeMismatch, "activations have 63 columns",
                 [](ForwardInput& in, ForwardOutput&) { in.activations.cols = 63; });
}
TEST_F(BadCall, WrongDType) {
  expect_refused(ErrorCode::kDTypeMismatch, "i32",
                 [](ForwardInput& in, ForwardOutput&) { in.activations.dtype = DType::kI32; });
}
TEST_F(BadCall, NoOutput) {
  expect_refused(ErrorCode::kInvalidArgument, "non-null",
                 [](ForwardInput&, ForwardOutput& out) { out.data = nullptr; });
}
TEST_F(BadCall, IdsOutOfRange) {
  for (const std::int32_t id : {-2, 16, 1 << 30}) {
    fill_ids();
    ids_[5] = id;
    expect_refused(ErrorCode::kInvalidArgument, "topk_ids[1][1] is " + std::to_string(id),
                   [&](ForwardInput& in, ForwardOutput&) {
                     in.topk_ids = ids_;
                     in.topk_weights = weights_;
                   });
  }
}
TEST_F(BadCall, RepeatedIds) {
  fill_ids();
  ids_[7] = 0;
  expect_refused(ErrorCode::kInvalidArgument, "token 1 names expert 0 twice",
                 [&](ForwardInput& in, ForwardOutput&) {
                   in.topk_ids = ids_;
                   in.topk_weights = weights_;
                 });
}
TEST_F(BadCall, IdsWithoutWeightsOrOfTheWrongSize) {
  fill_ids();
  expect_refused(ErrorCode::kShapeMismatch, "topk_weights has 0 elements; 40 tokens need 160",
                 [&](ForwardInput& in, ForwardOutput&) { in.topk_ids = ids_; });
  expect_refused(ErrorCode::kShapeMismatch, "topk_ids has 159 elements",
                 [&](ForwardInput& in, ForwardOutput&) {
                   in.topk_ids = std::span(ids_).first(159);
                   in.topk_weights = weights_;
                 });
}

TEST(BadLayer, RanksThatDisagreeSayOnWhat) {
  const auto expect_mismatch = [](const std::string& words,
                                  const std::function<void(LayerSpec&, LayerOptions&)>& spoil) {
    const auto failures = run_ranks(World::threads(3), [&](const World& world) {
      LayerSpec spec = spec_of_16_experts();
      LayerOptions options{.cpu = {.num_threads = 1}};
      if (world.rank() == 2) spoil(spec, options);
      MoeLayer layer(world, spec, weights_of_16_experts(), options);
    });
    for (const auto& failure : failures) {
      ASSERT_TRUE(failure);
      const std::string message =
          test::error_of(ErrorCode::kSpecMismatch, [&] { std::rethrow_exception(failure); });
      EXPECT_THAT(message, ::testing::HasSubstr("rank 2"));
      EXPECT_THAT(message, ::testing::HasSubstr(words));
    }
  };
  expect_mismatch("spec.top_k", [](LayerSpec& spec, LayerOptions&) { spec.top_k = 3; });
  expect_mismatch("spec.routing.scale",
                  [](LayerSpec& spec, LayerOptions&) { spec.routing.scale = 2; });
  expect_mismatch("max_tokens", [](LayerSpec&, LayerOptions& options) { options.max_tokens = 7; });
  expect_mismatch("compute",
                  [](LayerSpec&, LayerOptions& options) { options.compute = DType::kBF16; });
}

TEST(BadLayer, ImpossibleSpecsAndOptions) {
  const auto refused = [](ErrorCode code,
                          const std::function<void(LayerSpec&, LayerOptions&)>& spoil) {
    LayerSpec spec = spec_of_16_experts();
    LayerOptions options;
    spoil(spec, options);
    return test::error_of(
        code, [&] { MoeLayer layer(World::single(), spec, weights_of_16_experts(), options); });
  };
  EXPECT_THAT(
      refused(ErrorCode::kInvalidArgument, [](LayerSpec& spec, LayerOptions&) { spec.top_k = 17; }),
      ::testing::HasSubstr("17"));
  EXPECT_THAT(
      refused(ErrorCode::kShapeMismatch, [](LayerSpec& spec, LayerOptions&) { spec.hidden = 65; }),
      ::testing::HasSubstr("65"));
  EXPECT_THAT(refused(ErrorCode::kInvalidArgument,
                      [](LayerSpec&, LayerOptions& options) { options.max_tokens = 0; }),
              ::testing::HasSubstr("max_tokens is 0"));
  EXPECT_THAT(refused(ErrorCode::kInvalidArgument,
                      [](LayerSpec&, LayerOptions& options) { options.compute = DType::kF16; }),
              ::testing::HasSubstr("f16"));
}

}  // namespace
}  // namespace switchyard::testing
