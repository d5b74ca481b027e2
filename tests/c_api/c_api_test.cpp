// The C interface: what it makes of exceptions, struct sizes, strides and handles. What a layer
// computes is tested in C++ and Python.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "c_api/calls.h"
#include "switchyard/c.h"

namespace switchyard::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Two experts, H 4, I 2, top-1; expert e's output is 2 (e + 1) x silu(x . 1).
class Experts : public ::testing::Test {
 protected:
  static constexpr int kHidden = 4, kIntermediate = 2, kNumExperts = 2, kTopK = 1;

  Experts() {
    EXPECT_EQ(sy_world_single(nullptr, &world_), SY_OK);
    spec_.hidden = kHidden;
    spec_.intermediate = kIntermediate;
    spec_.num_experts = kNumExperts;
    spec_.top_k = kTopK;
    spec_.activation.gated = 0;
    spec_.activation.kind = SY_IDENTITY;
    for (int i = 0; i < kIntermediate * kHidden; ++i) down_.at(8 + i) = 2.0f;
    weights_.up.weight = tensor(up_, SY_F32, {kNumExperts, kIntermediate, kHidden});
    weights_.down.weight = tensor(down_, SY_F32, {kNumExperts, kHidden, kIntermediate});
    options_.max_tokens = 8;
  }
  ~Experts() override {
    EXPECT_EQ(sy_layer_destroy(&layer_), SY_OK);
    EXPECT_EQ(sy_world_destroy(&world_), SY_OK);
  }

  sy_status create() { return sy_layer_create(world_, &spec_, &weights_, &options_, &layer_); }
  template <typename Id>
  sy_status forward(std::vector<Id> ids, sy_dtype id_type) {
    const auto tokens = static_cast<std::int64_t>(ids.size());
    x_.assign(static_cast<std::size_t>(tokens * kHidden), 1.0f);
    y_.assign(x_.size(), -1.0f);
    std::vector<float> weights(ids.size(), 1.0f);
    sy_forward call = SY_FORWARD_INIT;
    call.x = tensor(x_, SY_F32, {tokens, kHidden});
    call.out = tensor(y_, SY_F32, {tokens, kHidden});
    call.topk_ids = tensor(ids, id_type, {tokens, kTopK});
    call.topk_weights = tensor(weights, SY_F32, {tokens, kTopK});
    return sy_layer_forward(layer_, &call);
  }

  std::vector<float> up_ = std::vector<float>(kNumExperts * kIntermediate * kHidden, 1.0f);
  std::vector<float> down_ = std::vector<float>(kNumExperts * kIntermediate * kHidden, 1.0f);
  std::vector<float> x_, y_;
  sy_world* world_ = nullptr;
  sy_layer* layer_ = nullptr;
  sy_layer_spec spec_ = SY_LAYER_SPEC_INIT;
  sy_layer_weights weights_ = SY_LAYER_WEIGHTS_INIT;
  sy_layer_options options_ = SY_LAYER_OPTIONS_INIT;
};

TEST_F(Experts, ComputeWithIdsOfBothTypes) {
  ASSERT_EQ(create(), SY_OK) << last_error().message;
  ASSERT_EQ(forward<std::int32_t>({0, 1, -1}, SY_I32), SY_OK) << last_error().message;
  EXPECT_THAT(y_, ElementsAre(8, 8, 8, 8, 16, 16, 16, 16, 0, 0, 0, 0));
  ASSERT_EQ(forward<std::int64_t>({1, 0}, SY_I64), SY_OK) << last_error().message;
  EXPECT_THAT(y_, ElementsAre(16, 16, 16, 16, 8, 8, 8, 8));
}

TEST_F(Experts, TransposedWeightsAreViews) {
  // [E, H, I] in memory, told as [E, I, H].
  weights_.up.weight.strides[1] = 1;
  weights_.up.weight.strides[2] = kIntermediate;
  up_ = {1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2};
  ASSERT_EQ(create(), SY_OK) << last_error().message;
  ASSERT_EQ(forward<std::int32_t>({0}, SY_I32), SY_OK) << last_error().message;
  EXPECT_THAT(y_, ElementsAre(12, 12, 12, 12));
}

TEST_F(Experts, ScalesOfPowersOfTwo) {
  std::vector<std::uint8_t> codes(up_.size(), 0x38);  // 1.0 in f8_e4m3
  std::vector<std::uint8_t> scales = {127, 128};      // 1 and 2
  std::vector<std::uint8_t> down_codes(down_.size(), 0x38);
  std::vector<float> down_scales = {1, 1};
  weights_.up.weight = tensor(codes, SY_F8_E4M3, {kNumExperts, kIntermediate, kHidden});
  weights_.up.scale = tensor(scales, SY_F8_E8M0, {kNumExperts, 1, 1});
  weights_.up.scale_rows = kIntermediate;
  weights_.up.scale_cols = kHidden;
  weights_.down.weight = tensor(down_codes, SY_F8_E4M3, {kNumExperts, kHidden, kIntermediate});
  weights_.down.scale = tensor(down_scales, SY_F32, {kNumExperts, 1, 1});
  weights_.down.scale_rows = kHidden;
  weights_.down.scale_cols = kIntermediate;
  options_.compute = SY_F32;
  ASSERT_EQ(create(), SY_OK) << last_error().message;
  ASSERT_EQ(forward<std::int32_t>({0, 1}, SY_I32), SY_OK) << last_error().message;
  EXPECT_THAT(y_, ElementsAre(8, 8, 8, 8, 16, 16, 16, 16));
}

TEST_F(Experts, BadIdsAreErrorsOrSkippedAndCounted) {
  ASSERT_EQ(create(), SY_OK);
  expect_failed(forward<std::int64_t>({5'000'000'000}, SY_I64), SY_INVALID_ARGUMENT,
                "topk_ids[0][0] is 5000000000");
  EXPECT_EQ(sy_layer_destroy(&layer_), SY_OK);

  options_.bad_ids = SY_BAD_IDS_SKIP;
  options_.large_ids_are_none = 1;
  ASSERT_EQ(create(), SY_OK);
  ASSERT_EQ(forward<std::int32_t>({-7, 2, 1}, SY_I32), SY_OK) << last_error().message;
  EXPECT_THAT(y_, ElementsAre(0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16));
  std::array<std::int64_t, kNumExperts> tokens_per_expert{};
  sy_stats stats = SY_STATS_INIT;
  stats.num_experts = kNumExperts;
  stats.tokens_per_expert = tokens_per_expert.data();
  ASSERT_EQ(sy_layer_get_stats(layer_, &stats), SY_OK);
  EXPECT_EQ(stats.bad_slots, 1);  // 2 means none
  EXPECT_THAT(tokens_per_expert, ElementsAre(0, 1));
}

TEST_F(Experts, StructsSayTheirSizes) {
  spec_.struct_size = 8;
  expect_failed(create(), SY_INVALID_ARGUMENT, "sy_layer_spec.struct_size is 8");

  // A caller compiled with a later version of the header.
  struct Later {
    sy_layer_spec spec = SY_LAYER_SPEC_INIT;
    std::int64_t field_of_the_future = 0;
  } later;
  spec_.struct_size = sizeof(Later);
  later.spec = spec_;
  EXPECT_EQ(sy_layer_create(world_, &later.spec, &weights_, &options_, &layer_), SY_OK);
  EXPECT_EQ(sy_layer_destroy(&layer_), SY_OK);
  later.field_of_the_future = 1;
  EXPECT_EQ(sy_layer_create(world_, &later.spec, &weights_, &options_, &layer_), SY_UNSUPPORTED);
}

TEST_F(Experts, NullIsAnError) {
  expect_failed(sy_layer_create(nullptr, &spec_, &weights_, &options_, &layer_),
                SY_INVALID_ARGUMENT, "world is null");
  EXPECT_EQ(sy_layer_create(world_, &spec_, &weights_, &options_, nullptr), SY_INVALID_ARGUMENT);
  EXPECT_EQ(sy_layer_forward(nullptr, nullptr), SY_INVALID_ARGUMENT);
  EXPECT_EQ(sy_last_error(nullptr), SY_INVALID_ARGUMENT);
}

TEST_F(Experts, ErrorsOfTensorsNameThem) {
  sy_layer_weights weights = weights_;
  weights_.up.weight.shape[0] = 3;
  expect_failed(create(), SY_SHAPE_MISMATCH, "up.weight is [3, 2, 4]");
  weights_ = weights;
  weights_.down.weight.device_type = SY_CUDA;
  expect_failed(create(), SY_INVALID_ARGUMENT, "down.weight is in CUDA memory");
  weights_ = weights;
  weights_.up.weight.dtype = 99;
  EXPECT_EQ(create(), SY_DTYPE_MISMATCH);
  weights_ = weights;
  weights_.up.weight.data = nullptr;
  EXPECT_EQ(create(), SY_INVALID_ARGUMENT);
}

TEST_F(Experts, HandlesAreSafeToEndTwice) {
  ASSERT_EQ(create(), SY_OK);
  EXPECT_EQ(sy_layer_destroy(&layer_), SY_OK);
  EXPECT_EQ(layer_, nullptr);
  EXPECT_EQ(sy_layer_destroy(&layer_), SY_OK);
}

// A layer's sizes and weights, and a batch for it.
struct Shape {
  Shape(int hidden, int intermediate, int experts, int top_k, int tokens)
      : up(numbers(experts * intermediate * hidden, 1)),
        down(numbers(experts * hidden * intermediate, 2)),
        x(numbers(tokens * hidden, 3)),
        topk_weights(numbers(tokens * top_k, 4)) {
    spec.hidden = hidden;
    spec.intermediate = intermediate;
    spec.num_experts = experts;
    spec.top_k = top_k;
    spec.activation.gated = 0;
    weights.up.weight = tensor(up, SY_F32, {experts, intermediate, hidden});
    weights.down.weight = tensor(down, SY_F32, {experts, hidden, intermediate});
    for (int t = 0; t < tokens; ++t) {
      for (int k = 0; k < top_k; ++k) ids.push_back((3 * t + k) % experts);
    }
    options.max_tokens = tokens;
    options.num_threads = 1;
  }
  static std::vector<float> numbers(int count, int seed) {
    std::vector<float> values;
    for (int i = 0; i < count; ++i) values.push_back(std::sin(static_cast<float>(i * 7 + seed)));
    return values;
  }
  sy_status create(sy_world* world, sy_layer** out) const {
    return sy_layer_create(world, &spec, &weights, &options, out);
  }
  sy_status forward(sy_layer* layer, std::vector<float>& y) {
    const std::int64_t tokens = options.max_tokens;
    y.assign(x.size(), -1.0f);
    sy_forward call = SY_FORWARD_INIT;
    call.x = tensor(x, SY_F32, {tokens, spec.hidden});
    call.out = tensor(y, SY_F32, {tokens, spec.hidden});
    call.topk_ids = tensor(ids, SY_I32, {tokens, spec.top_k});
    call.topk_weights = tensor(topk_weights, SY_F32, {tokens, spec.top_k});
    return sy_layer_forward(layer, &call);
  }

  std::vector<float> up, down, x, topk_weights;
  std::vector<std::int32_t> ids;
  sy_layer_spec spec = SY_LAYER_SPEC_INIT;
  sy_layer_weights weights = SY_LAYER_WEIGHTS_INIT;
  sy_layer_options options = SY_LAYER_OPTIONS_INIT;
};

// Two layers, of which each is larger in some size.
class Workspaces : public ::testing::Test {
 protected:
  Workspaces() {
    EXPECT_EQ(sy_world_single(nullptr, &world_), SY_OK);
    options_.max_tokens = 24;
    options_.compute = SY_F32;
    options_.num_threads = 1;
    for (std::size_t i = 0; i < 2; ++i) {
      sy_layer* alone = nullptr;
      EXPECT_EQ(shapes_[i].create(world_, &alone), SY_OK) << last_error().message;
      EXPECT_EQ(shapes_[i].forward(alone, expected_[i]), SY_OK) << last_error().message;
      EXPECT_EQ(sy_layer_destroy(&alone), SY_OK);
    }
  }
  ~Workspaces() override {
    for (sy_layer*& layer : layers_) EXPECT_EQ(sy_layer_destroy(&layer), SY_OK);
    EXPECT_EQ(sy_workspace_destroy(&workspace_), SY_OK);
    EXPECT_EQ(sy_world_destroy(&world_), SY_OK);
  }

  sy_status create() {
    const std::array specs = {shapes_[0].spec, shapes_[1].spec};
    return sy_workspace_create(world_, specs.data(), 2, &options_, &workspace_);
  }
  sy_status create_layer(std::size_t i, int slot = 0) {
    shapes_[i].options.workspace = workspace_;
    shapes_[i].options.workspace_slot = slot;
    return shapes_[i].create(world_, &layers_[i]);
  }
  void expect_same_bits() {
    for (const std::size_t i : {0, 1, 1, 0}) {
      std::vector<float> y;
      ASSERT_EQ(shapes_[i].forward(layers_[i], y), SY_OK) << last_error().message;
      EXPECT_EQ(y, expected_[i]);
    }
  }
  sy_workspace_info info() const {
    sy_workspace_info info = SY_WORKSPACE_INFO_INIT;
    EXPECT_EQ(sy_workspace_get_info(workspace_, &info), SY_OK);
    return info;
  }

  std::array<Shape, 2> shapes_{Shape(64, 24, 5, 2, 13), Shape(32, 48, 9, 3, 24)};
  std::array<std::vector<float>, 2> expected_;
  std::array<sy_layer*, 2> layers_{};
  sy_world* world_ = nullptr;
  sy_workspace* workspace_ = nullptr;
  sy_workspace_options options_ = SY_WORKSPACE_OPTIONS_INIT;
};

TEST_F(Workspaces, ServeLayersOfDifferentShapes) {
  ASSERT_EQ(create(), SY_OK) << last_error().message;
  for (std::size_t i = 0; i < 2; ++i) ASSERT_EQ(create_layer(i), SY_OK) << last_error().message;
  expect_same_bits();
  const sy_workspace_info info = this->info();
  EXPECT_EQ(info.backend, SY_CPU);
  EXPECT_EQ(info.slots, 1);
  EXPECT_EQ(info.released, 0);
  EXPECT_GT(info.bytes, 0u);
  options_.slots = 3;
  EXPECT_EQ(sy_workspace_destroy(&workspace_), SY_OK);
  ASSERT_EQ(create(), SY_OK) << last_error().message;
  EXPECT_EQ(this->info().bytes, 3 * info.bytes);
}

TEST_F(Workspaces, MayEndBeforeTheirLayersAndTheirWorld) {
  ASSERT_EQ(create(), SY_OK);
  for (std::size_t i = 0; i < 2; ++i) ASSERT_EQ(create_layer(i), SY_OK);
  EXPECT_EQ(sy_workspace_destroy(&workspace_), SY_OK);
  EXPECT_EQ(workspace_, nullptr);
  EXPECT_EQ(sy_workspace_destroy(&workspace_), SY_OK);
  EXPECT_EQ(sy_world_destroy(&world_), SY_OK);
  expect_same_bits();
}

TEST_F(Workspaces, AreNotJoinedByWayOfALayer) {
  ASSERT_EQ(create(), SY_OK);
  ASSERT_EQ(create_layer(0), SY_OK);
  shapes_[1].options.share_memory_with = layers_[0];
  expect_failed(shapes_[1].create(world_, &layers_[1]), SY_INVALID_ARGUMENT,
                "make one with sy_workspace_create()");
  shapes_[1].options.share_memory_with = nullptr;
  shapes_[1].options.table_file = "layer.olmoe.table.json";
  EXPECT_EQ(shapes_[1].create(world_, &layers_[1]), SY_INVALID_ARGUMENT);
  EXPECT_THAT(last_error().message,
              HasSubstr("table_file is 'layer.olmoe.table.json', but layers have no tables"));
  EXPECT_EQ(layers_[1], nullptr);
}

TEST_F(Workspaces, RefuseLayersThatNeedMore) {
  ASSERT_EQ(sy_workspace_create(world_, &shapes_[0].spec, 1, &options_, &workspace_), SY_OK);
  expect_failed(create_layer(1), SY_INVALID_ARGUMENT, "make the workspace for the largest layer");
  shapes_[0].options.max_tokens = 25;
  expect_failed(create_layer(0), SY_INVALID_ARGUMENT, "does not fit");
  EXPECT_EQ(layers_[0], nullptr);
  shapes_[0].options.max_tokens = 13;
  EXPECT_EQ(create_layer(0), SY_OK);
}

TEST_F(Workspaces, ReleaseAndRestore) {
  ASSERT_EQ(create(), SY_OK);
  for (std::size_t i = 0; i < 2; ++i) ASSERT_EQ(create_layer(i), SY_OK);
  expect_same_bits();
  const std::uint64_t bytes = info().bytes;
  for (int again = 0; again < 2; ++again) {
    ASSERT_EQ(sy_workspace_release(workspace_), SY_OK) << last_error().message;
    EXPECT_EQ(info().released, 1);
    EXPECT_EQ(info().bytes, bytes);
    std::vector<float> y;
    expect_failed(shapes_[0].forward(layers_[0], y), SY_INVALID_ARGUMENT, "workspace was released");
    ASSERT_EQ(sy_workspace_restore(workspace_), SY_OK) << last_error().message;
    EXPECT_EQ(info().released, 0);
    expect_same_bits();
  }
}

TEST_F(Workspaces, HaveSlots) {
  options_.slots = 2;
  ASSERT_EQ(create(), SY_OK);
  EXPECT_EQ(info().slots, 2);
  for (const int slot : {-1, 2}) {
    expect_failed(create_layer(0, slot), SY_INVALID_ARGUMENT, "the workspace has slots 0 to 1");
  }
  ASSERT_EQ(create_layer(0, 0), SY_OK);
  ASSERT_EQ(create_layer(1, 1), SY_OK);
  std::array<std::vector<float>, 2> y;
  std::thread other([&] {
    for (int i = 0; i < 50; ++i) EXPECT_EQ(shapes_[1].forward(layers_[1], y[1]), SY_OK);
  });
  for (int i = 0; i < 50; ++i) EXPECT_EQ(shapes_[0].forward(layers_[0], y[0]), SY_OK);
  other.join();
  EXPECT_EQ(y, expected_);
  EXPECT_EQ(sy_layer_destroy(&layers_[0]), SY_OK);
  EXPECT_EQ(sy_workspace_destroy(&workspace_), SY_OK);
  expect_failed(create_layer(0, 1), SY_INVALID_ARGUMENT,
                "workspace_slot is 1, but there is no workspace");
}

TEST_F(Workspaces, RefuseWhatMakesNoSense) {
  const auto refused = [&](const char* part) {
    expect_failed(create(), SY_INVALID_ARGUMENT, part);
    EXPECT_EQ(workspace_, nullptr);
  };
  const sy_workspace_options good = options_;
  options_.slots = 17;
  refused("slots is 17; use 1 to 16");
  options_ = good;
  options_.backend = 7;
  refused("backend is 7");
  options_ = good;
  options_.compute = SY_F16;
  refused("compute type f16; use bf16, f32 or f8_e4m3");
  options_ = good;
  options_.allocate = [](std::uint64_t, void*) -> void* { return nullptr; };
  refused("release is null, but allocate is not");
  options_.release = [](void*, void*) {};
  refused("an allocator is given, but the backend is cpu");
  options_.allocate = nullptr;
  refused("allocate is null, but release is not");
  options_ = good;
  options_.struct_size = 16;
  refused("sy_workspace_options.struct_size is 16");
  options_ = good;
  shapes_[1].spec.struct_size += 8;
  refused("specs[1].struct_size is");
  EXPECT_EQ(sy_workspace_create(world_, &shapes_[0].spec, 0, &options_, &workspace_),
            SY_INVALID_ARGUMENT);
  EXPECT_THAT(last_error().message, HasSubstr("no layers"));
  EXPECT_EQ(sy_workspace_create(world_, nullptr, 1, &options_, &workspace_), SY_INVALID_ARGUMENT);
  EXPECT_EQ(sy_workspace_create(nullptr, &shapes_[0].spec, 1, &options_, &workspace_),
            SY_INVALID_ARGUMENT);
}

// A caller compiled with a later version of the header has longer elements.
TEST_F(Workspaces, TakeArraysOfLongerSpecs) {
  struct Later {
    sy_layer_spec spec = SY_LAYER_SPEC_INIT;
    std::int64_t field_of_the_future = 0;
  };
  std::array<Later, 2> specs;
  for (std::size_t i = 0; i < 2; ++i) {
    specs[i].spec = shapes_[i].spec;
    specs[i].spec.struct_size = sizeof(Later);
  }
  ASSERT_EQ(sy_workspace_create(world_, &specs[0].spec, 2, &options_, &workspace_), SY_OK)
      << last_error().message;
  for (std::size_t i = 0; i < 2; ++i) ASSERT_EQ(create_layer(i), SY_OK) << last_error().message;
  expect_same_bits();
}

TEST(WorldOptions, OfTheNetworkAreChecked) {
  sy_world* world = nullptr;
  const std::string name = "c_api_test " + std::to_string(getpid());
  const auto make = [&](std::uint32_t chunk_bytes, std::uint32_t window) {
    sy_world_options options = SY_WORLD_OPTIONS_INIT;
    options.rendezvous = name.c_str();
    options.network_chunk_bytes = chunk_bytes;
    options.network_window = window;
    return sy_world_processes(0, 1, &options, &world);
  };
  expect_failed(make(100, 0), SY_INVALID_ARGUMENT, "chunk_bytes is 100; use 2048 to 1073741824");
  expect_failed(make(2080, 0), SY_INVALID_ARGUMENT, "chunk_bytes is 2080; use a multiple of 64");
  expect_failed(make(0, 32'769), SY_INVALID_ARGUMENT, "window is 32769; use 1 to 32768");
  for (const auto& [chunk_bytes, window] : {std::pair(0u, 0u), {2048u, 1u}}) {
    ASSERT_EQ(make(chunk_bytes, window), SY_OK) << last_error().message;
    EXPECT_EQ(sy_world_destroy(&world), SY_OK);
  }
  // A caller of the first version has no such fields.
  sy_world_options first = SY_WORLD_OPTIONS_INIT;
  first.struct_size = offsetof(sy_world_options, network_chunk_bytes);
  first.network_chunk_bytes = 100;
  ASSERT_EQ(sy_world_single(&first, &world), SY_OK) << last_error().message;
  EXPECT_EQ(sy_world_destroy(&world), SY_OK);
}

// Another library may know what it means.
TEST(WorldOptions, ReservedFieldsAreZero) {
  sy_world* world = nullptr;
  sy_world_options options = SY_WORLD_OPTIONS_INIT;
  options.reserved = 7;
  expect_failed(sy_world_single(&options, &world), SY_UNSUPPORTED,
                "sy_world_options.reserved is 7");
  EXPECT_EQ(world, nullptr);
}

TEST(WorldOptions, SecretsThatAreTooShortAreRefused) {
  sy_world* world = nullptr;
  sy_world_options options = SY_WORLD_OPTIONS_INIT;
  options.rendezvous = "tcp://127.0.0.1:29124";
  options.secret = "short";
  const sy_status status = sy_world_processes(0, 2, &options, &world);
  if (status == SY_UNSUPPORTED) GTEST_SKIP() << last_error().message;
  expect_failed(status, SY_INVALID_ARGUMENT, "has 5 bytes; use at least 16");
  // Callers that were compiled before it was there do not have it.
  options.struct_size = offsetof(sy_world_options, secret);
  EXPECT_EQ(sy_world_single(&options, &world), SY_OK) << last_error().message;
  EXPECT_EQ(sy_world_destroy(&world), SY_OK);
}

TEST(Errors, BelongToTheirThread) {
  sy_world* world = nullptr;
  ASSERT_EQ(sy_world_threads(0, nullptr, &world), SY_INVALID_ARGUMENT);
  const std::string message = last_error().message;
  std::thread([] {
    EXPECT_EQ(last_error().code, SY_OK);
    EXPECT_EQ(sy_world_destroy(nullptr), SY_INVALID_ARGUMENT);
  }).join();
  EXPECT_EQ(last_error().message, message);
  EXPECT_EQ(last_error().code, SY_INVALID_ARGUMENT);
}

TEST(Errors, OfWaitsNameTheRank) {
  std::array<sy_world*, 2> worlds{};
  sy_world_options options = SY_WORLD_OPTIONS_INIT;
  options.deadline_seconds = 0.2;
  ASSERT_EQ(sy_world_threads(2, &options, worlds.data()), SY_OK);
  EXPECT_EQ(sy_world_barrier(worlds[0]), SY_TIMEOUT);
  const sy_error error = last_error();
  EXPECT_EQ(error.wait_failed, 1);
  EXPECT_EQ(error.waiter_rank, 0);
  EXPECT_EQ(error.peer_rank, 1);
  for (sy_world*& world : worlds) EXPECT_EQ(sy_world_destroy(&world), SY_OK);
}

TEST(TopK, ChoosesAsTheRoutingSays) {
  std::vector<float> logits = {0, 2, 1, 1, 0, 3};
  std::vector<std::int32_t> ids(4);
  std::vector<float> weights(4);
  const sy_tensor l = tensor(logits, SY_F32, {2, 3});
  const sy_tensor i = tensor(ids, SY_I32, {2, 2});
  const sy_tensor w = tensor(weights, SY_F32, {2, 2});
  sy_routing routing = SY_ROUTING_INIT;
  routing.renormalize = 1;
  std::int64_t nans = -1;
  ASSERT_EQ(sy_topk(&routing, 2, &l, nullptr, &i, &w, &nans), SY_OK) << last_error().message;
  EXPECT_THAT(ids, ElementsAre(1, 2, 2, 0));
  EXPECT_NEAR(weights[0], 1 / (1 + std::exp(-1.0f)), 1e-6);
  EXPECT_EQ(nans, 0);
  routing.method = 7;
  EXPECT_EQ(sy_topk(&routing, 2, &l, nullptr, &i, &w, &nans), SY_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace switchyard::testing
