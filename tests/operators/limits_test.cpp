// Numbers that are wrong, of every option that is a number: refused with the option's name and the
// value, before anything is allocated, started or waited for.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <climits>
#include <functional>

#include "model/errors.h"
#include "support/layers.h"
#include "switchyard/exchange.h"
#include "switchyard/grouped_gemm.h"
#include "switchyard/symmetric_heap.h"
#include "switchyard/workspace.h"

namespace switchyard::testing {
namespace {

using std::chrono::milliseconds;

class Limits : public ::testing::Test {
 protected:
  Limits() : start_(std::chrono::steady_clock::now()), kilobytes_(peak()) {}
  ~Limits() override {
    EXPECT_LT(std::chrono::steady_clock::now() - start_, std::chrono::seconds(10));
    EXPECT_LT(peak() - kilobytes_, 200'000);
  }

  // make(value) for each value is refused with `name` and the value in the message.
  template <typename T>
  void refuse(const std::string& name, const std::vector<T>& values,
              const std::function<void(T)>& make) {
    for (const T value : values) {
      SCOPED_TRACE(::testing::Message() << name << " = " << value);
      EXPECT_ERROR(make(value), kInvalidArgument, name.c_str(), std::to_string(value).c_str());
    }
  }
  using Ints = std::vector<int>;

  World world_ = World::single();
  LayerSpec spec_ = spec_of(64, 32, 4, 2);
  MoeWeights weights_ = generate_weights(spec_, DType::kBF16, 1, {.num_threads = 1});

 private:
  static long peak() {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
  }
  std::chrono::steady_clock::time_point start_;
  long kilobytes_;
};

TEST_F(Limits, OfWorlds) {
  refuse<int>("size", {-1, 0, 65, 100'000'000, INT_MAX, INT_MIN},
              [](int size) { World::threads(size); });
  // Nobody else comes, and nothing may wait for them.
  refuse<int>("size", {-1, 0, 65, INT_MAX}, [](int size) { World::processes(0, size); });
  refuse<int>("rank", {-1, 2, INT_MAX, INT_MIN}, [](int rank) { World::processes(rank, 2); });
  const auto with = [&](const std::string& name, auto values, auto&& set) {
    using Value = typename decltype(values)::value_type;
    for (const bool processes : {false, true}) {
      refuse<Value>(name, values, [&](Value value) {
        WorldOptions options;
        set(options, value);
        processes ? World::processes(0, 2, options) : World::single(options);
      });
    }
  };
  with("deadline", std::vector<long long>{-1, 0, LLONG_MIN / 4},
       [](WorldOptions& o, long long value) { o.deadline = milliseconds(value); });
  with("chunk_bytes", std::vector<std::uint32_t>{0, 1, 2047, 2049, UINT_MAX},
       [](WorldOptions& o, std::uint32_t value) { o.network.chunk_bytes = value; });
  with("window", std::vector<std::uint32_t>{0, 32769, UINT_MAX},
       [](WorldOptions& o, std::uint32_t value) { o.network.window = value; });
  // As long as there can be is no mistake.
  World::single({.deadline = milliseconds::max()});
}

TEST_F(Limits, OfLayers) {
  const auto option = [&](const std::string& name, const Ints& values,
                          const std::function<void(LayerOptions&, int)>& set) {
    refuse<int>(name, values, [&](int value) {
      LayerOptions options;
      set(options, value);
      MoeLayer(world_, spec_, weights_, options);
    });
  };
  option("max_tokens", {-1, 0, (1 << 26) + 1, INT_MAX, INT_MIN},
         [](LayerOptions& o, int value) { o.max_tokens = value; });
  option("num_threads", {-1, 4097, 1'000'000, INT_MAX, INT_MIN},
         [](LayerOptions& o, int value) { o.cpu.num_threads = value; });
  option("device", {-2, INT_MIN, 0, INT_MAX},
         [](LayerOptions& o, int value) { o.cuda.device = value; });
  option("reserved_sms", {-1, INT_MIN, 1, INT_MAX},
         [](LayerOptions& o, int value) { o.cuda.reserved_sms = value; });
  option("recorded_steps", {-1, (1 << 20) + 1, INT_MAX, INT_MIN},
         [](LayerOptions& o, int value) { o.diagnostics.recorded_steps = value; });
  option("workspace_slot", {-1, 1, INT_MAX, INT_MIN},
         [](LayerOptions& o, int value) { o.workspace_slot = value; });
  option("deadline", {-1, INT_MIN},
         [](LayerOptions& o, int value) { o.deadline = milliseconds(value); });
  option("patience", {-1, INT_MIN},
         [](LayerOptions& o, int value) { o.patience = std::chrono::microseconds(value); });
  option("bad_ids", {2, 255},
         [](LayerOptions& o, int value) { o.bad_ids = static_cast<BadIds>(value); });
  option("backend", {2, 255},
         [](LayerOptions& o, int value) { o.backend = static_cast<Backend>(value); });

  const auto field = [&](const std::string& name, const Ints& values, int LayerSpec::*member) {
    refuse<int>(name, values, [&](int value) {
      LayerSpec spec = spec_;
      spec.*member = value;
      MoeLayer(world_, spec, weights_);
    });
  };
  field("hidden", {-1, 0, INT_MAX}, &LayerSpec::hidden);
  field("intermediate", {-1, 0, INT_MAX}, &LayerSpec::intermediate);
  field("num_experts", {-1, 0, INT_MAX}, &LayerSpec::num_experts);
  field("top_k", {-1, 0, 5, INT_MAX}, &LayerSpec::top_k);
  field("shared_intermediate", {-1, INT_MAX}, &LayerSpec::shared_intermediate);
}

TEST_F(Limits, OfWorkspaces) {
  const auto option = [&](const std::string& name, const Ints& values,
                          int WorkspaceOptions::*member) {
    refuse<int>(name, values, [&](int value) {
      WorkspaceOptions options;
      options.*member = value;
      Workspace(world_, spec_, options);
    });
  };
  option("max_tokens", {-1, 0, (1 << 26) + 1, INT_MAX}, &WorkspaceOptions::max_tokens);
  option("slots", {-1, 0, 17, INT_MAX}, &WorkspaceOptions::slots);
  option("num_threads", {-1, 4097, INT_MAX}, &WorkspaceOptions::num_threads);
  refuse<int>("device", {-2, INT_MIN},
              [&](int value) { Workspace(world_, spec_, {.device = value}); });
  refuse<int>("reserved_sms", {-1, INT_MIN},
              [&](int value) { Workspace(world_, spec_, {.reserved_sms = value}); });
}

TEST_F(Limits, OfExchanges) {
  const ExchangeSpec good{.hidden = 64, .num_experts = 4, .top_k = 2, .max_tokens = 8};
  const auto field = [&](const std::string& name, const Ints& values, int ExchangeSpec::*member) {
    refuse<int>(name, values, [&](int value) {
      ExchangeSpec spec = good;
      spec.*member = value;
      Exchange(world_, spec);
    });
  };
  field("hidden", {-1, 0, (1 << 23) + 1, INT_MAX}, &ExchangeSpec::hidden);
  field("num_experts", {-1, 0, 4097, INT_MAX}, &ExchangeSpec::num_experts);
  field("top_k", {-1, 0, 33, INT_MAX}, &ExchangeSpec::top_k);
  field("max_tokens", {-1, 0, (1 << 26) + 1, INT_MAX}, &ExchangeSpec::max_tokens);
  refuse<long long>("size", {-1, 0, 1ll << 31, LLONG_MAX}, [&](long long value) {
    ExchangeSpec spec = good;
    spec.layout = RowLayout::blocked(value);
    Exchange(world_, spec);
  });
  refuse<long long>("size", {-1, 1ll << 31, LLONG_MAX}, [&](long long value) {
    ExchangeSpec spec = good;
    spec.layout = RowLayout::padded(value);
    Exchange(world_, spec);
  });
  const auto option = [&](const std::string& name, const Ints& values,
                          const std::function<void(ExchangeOptions&, int)>& set) {
    refuse<int>(name, values, [&](int value) {
      ExchangeOptions options;
      set(options, value);
      Exchange(world_, good, options);
    });
  };
  option("num_threads", {-1, 4097, 1'000'000, INT_MAX},
         [](ExchangeOptions& o, int value) { o.num_threads = value; });
  option("device", {-2, INT_MIN, 0}, [](ExchangeOptions& o, int value) { o.device = value; });
  option("max_sms", {-1, INT_MIN, 1, INT_MAX},
         [](ExchangeOptions& o, int value) { o.max_sms = value; });
  option("deadline", {-1, INT_MIN},
         [](ExchangeOptions& o, int value) { o.deadline = milliseconds(value); });
}

TEST_F(Limits, OfGroupedGemms) {
  const Matrix w = Matrix::random(2 * 8, 4, DType::kF32, 1);
  GroupedGemmWeights weights;
  for (int e = 0; e < 2; ++e) {
    weights.matrices.push_back({w.view().row(8 * e), DType::kF32, 8, 4, 4});
  }
  const auto field = [&](const std::string& name, int most, int GroupedGemmSpec::*member) {
    refuse<int>(name, {-1, 0, most + 1, INT_MAX, INT_MIN}, [&](int value) {
      GroupedGemmSpec spec{2, 8, 4, {}, {}};
      spec.*member = value;
      GroupedGemm(spec, weights);
    });
  };
  field("num_experts", 1024, &GroupedGemmSpec::num_experts);
  field("n", 1 << 23, &GroupedGemmSpec::n);
  field("k", 1 << 23, &GroupedGemmSpec::k);
  const auto option = [&](const std::string& name, const Ints& values,
                          int GroupedGemmOptions::*member) {
    refuse<int>(name, values, [&](int value) {
      GroupedGemmOptions options;
      options.*member = value;
      GroupedGemm({2, 8, 4, {}, {}}, weights, options);
    });
  };
  option("max_rows", {-1, 0, INT_MIN}, &GroupedGemmOptions::max_rows);
  option("num_threads", {-1, 4097, 1'000'000, INT_MAX}, &GroupedGemmOptions::num_threads);
  option("device", {-2, 0, INT_MIN, INT_MAX}, &GroupedGemmOptions::device);
  option("reserved_sms", {-1, 1, INT_MIN, INT_MAX}, &GroupedGemmOptions::reserved_sms);
}

TEST_F(Limits, OfRows) {
  constexpr long long kMost = INT_MAX;
  for (const RowLayout& layout :
       {RowLayout::packed(), RowLayout::blocked(16), RowLayout::padded(16)}) {
    refuse<long long>("rows", {-1, kMost + 1, LLONG_MAX, LLONG_MIN},
                      [&](long long value) { rows_needed(layout, 4, value); });
    refuse<int>("num_experts", {-1, INT_MIN}, [&](int value) { rows_needed(layout, value, 4); });
  }
  for (const bool blocked : {false, true}) {
    const auto layout = [&](long long size) {
      return blocked ? RowLayout::blocked(size) : RowLayout::padded(size);
    };
    refuse<long long>("size", {-1, 0, kMost + 1, LLONG_MAX},
                      [&](long long size) { rows_needed(layout(size), 4, 4); });
    // More than an i32 can number.
    refuse<long long>("rows", {1 << 30, kMost},
                      [&](long long size) { rows_needed(layout(size), 8, 64); });
    const std::vector<std::int32_t> ids{0, 1, 2, 3};
    refuse<long long>("an i32 numbers up to 2147483647", {1 << 30}, [&](long long size) {
      try {
        permute(ids, 1, 4, layout(size));
      } catch (const Error& error) {
        throw Error(error.code(), error.what() + std::to_string(size));
      }
    });
  }
  refuse<long long>("together", {kMost + 1, LLONG_MAX}, [&](long long end) {
    const std::vector<std::int64_t> ends{1, end};
    first_rows(RowLayout::blocked(4), ends);
  });
  const std::vector<std::int32_t> ids{0, 1, 2, 3};
  refuse<int>("num_experts", {-1, 0, 1025, INT_MAX},
              [&](int value) { permute(ids, 2, value, {}); });
  refuse<int>("top_k", {-1, 0, INT_MIN}, [&](int value) { permute(ids, value, 4, {}); });
  refuse<long long>("slots", {-1, LLONG_MIN},
                    [&](long long value) { permute_workspace_bytes(value, 4); });
}

TEST_F(Limits, OfHeaps) {
  refuse<std::size_t>("bytes", {0}, [&](std::size_t bytes) { SymmetricHeap(world_, bytes); });
  for (const std::size_t bytes : {std::size_t{1} << 63, ~std::size_t{0}, std::size_t{1} << 55}) {
    EXPECT_ERROR(SymmetricHeap(world_, bytes), kCapacityExceeded);
  }
  refuse<int>("device", {-2, 0, INT_MIN, INT_MAX},
              [&](int device) { SymmetricHeap(world_, 64, {.device = device}); });
  refuse<int>("backend", {2, 255}, [&](int backend) {
    SymmetricHeap(world_, 64, {.backend = static_cast<Backend>(backend)});
  });
  refuse<long long>("deadline", {-1, LLONG_MIN / 4}, [&](long long value) {
    SymmetricHeap(world_, 64, {.deadline = milliseconds(value)});
  });
  SymmetricHeap heap(world_, 4096);
  refuse<std::size_t>("alignment", {0, 3, 8192, std::size_t{1} << 63},
                      [&](std::size_t alignment) { heap.allocate(8, alignment); });
  EXPECT_THROW(heap.allocate(~std::size_t{0}), Error);
}

}  // namespace
}  // namespace switchyard::testing
