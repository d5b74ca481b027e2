// permute, unpermute and topk on a GPU against those of the host, bit for bit; and a layer of
// operators beside the fused one.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "gpu/device.h"
#include "model/errors.h"
#include "routing/route_cases.h"
#include "support/accuracy.h"
#include "support/device_batch.h"
#include "support/numbers.h"
#include "support/on_gpu.h"
#include "switchyard/grouped_gemm.h"

namespace switchyard::testing {
namespace {

using GpuPermute = OnGpu<::testing::Test>;
using GpuUnpermute = OnGpu<::testing::Test>;
using GpuTopk = OnGpu<::testing::Test>;
using GpuOperators = OnGpu<::testing::Test>;

constexpr std::byte kPoison{0xee};

// Device memory full of poison, with a guard behind it that nobody may write.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t size) : size_(size), buffer_((size + kGuard) * sizeof(T)) {
    const std::vector<std::byte> poison(buffer_.bytes(), kPoison);
    buffer_.upload(poison.data(), poison.size());
  }
  explicit DeviceArray(std::span<const T> values) : DeviceArray(values.size()) { put(values); }

  T* data() const { return reinterpret_cast<T*>(buffer_.data()); }
  std::size_t size() const { return size_; }
  void put(std::span<const T> values) {
    if (!values.empty()) buffer_.upload(values.data(), values.size_bytes());
  }
  std::vector<T> values() const {
    std::vector<T> all(size_ + kGuard);
    buffer_.download(all.data(), buffer_.bytes());
    const auto* const guard = reinterpret_cast<const std::byte*>(all.data() + size_);
    EXPECT_TRUE(std::all_of(guard, guard + kGuard * sizeof(T), [](std::byte b) {
      return b == kPoison;
    })) << "memory behind an array was written";
    all.resize(size_);
    return all;
  }

 private:
  static constexpr std::size_t kGuard = 64;
  std::size_t size_;
  gpu::DeviceBuffer buffer_;
};

// --- permute

struct Permuted {
  std::vector<std::int32_t> ends, positions, tokens;
  std::int32_t dropped = 0;
  bool operator==(const Permuted&) const = default;
};

// The device must give the host's results, with as many tokens as the layout may need. A padded
// expert without room drops its last slots.
template <typename Id>
Permuted permuted_on_host(const std::vector<Id>& ids, int top_k, int experts,
                          const RowLayout& layout) {
  std::vector<Id> kept = ids;
  Permuted expected;
  if (layout.kind == RowLayout::Kind::kPadded) {
    std::vector<std::int64_t> rows(static_cast<std::size_t>(experts));
    for (Id& id : kept) {
      if (id < 0 || id >= experts) continue;
      if (rows[static_cast<std::size_t>(id)]++ < layout.size) continue;
      id = -1;
      ++expected.dropped;
    }
  }
  Permutation host = permute(kept, top_k, experts, layout);
  expected.ends = std::move(host.ends);
  expected.positions = std::move(host.positions);
  expected.tokens = std::move(host.tokens);
  expected.tokens.resize(
      static_cast<std::size_t>(rows_needed(layout, experts, static_cast<std::int64_t>(ids.size()))),
      -1);
  return expected;
}

// Everything that a call of permute() needs on the device.
template <typename Id>
class DevicePermute {
 public:
  DevicePermute(std::span<const Id> ids, int top_k, int experts, const RowLayout& layout,
                std::int64_t more_rows = 0)
      : top_k_(top_k),
        experts_(experts),
        layout_(layout),
        ids_(ids),
        ends_(static_cast<std::size_t>(experts)),
        positions_(ids.size()),
        tokens_(static_cast<std::size_t>(
            rows_needed(layout, experts, static_cast<std::int64_t>(ids.size())) + more_rows)),
        dropped_(1),
        workspace_(permute_workspace_bytes(static_cast<std::int64_t>(ids.size()), experts)) {}

  void put(std::span<const Id> ids) { ids_.put(ids); }
  DevicePermutation output() const {
    return {.layout = layout_,
            .ends = ends_.data(),
            .positions = positions_.data(),
            .tokens = tokens_.data(),
            .rows = static_cast<std::int64_t>(tokens_.size()),
            .dropped = dropped_.data(),
            .workspace = workspace_.data(),
            .workspace_bytes = workspace_.size()};
  }
  SlotView ids() const { return {ids_.data(), ids_.size()}; }
  std::vector<Id> fetched_ids() const { return ids_.values(); }
  void enqueue(void* stream) const {
    permute(ids(), top_k_, experts_, output(), {.stream = stream});
  }
  Permuted fetch() const {
    workspace_.values();  // for its guard
    return {ends_.values(), positions_.values(), tokens_.values(), dropped_.values()[0]};
  }

 private:
  int top_k_, experts_;
  RowLayout layout_;
  DeviceArray<Id> ids_;
  DeviceArray<std::int32_t> ends_, positions_, tokens_, dropped_;
  DeviceArray<std::uint8_t> workspace_;
};

template <typename Id>
void expect_permuted(const std::vector<Id>& ids, int top_k, int experts, const RowLayout& layout) {
  SCOPED_TRACE(::testing::Message()
               << ids.size() << " slots, K " << top_k << ", E " << experts << ", layout "
               << static_cast<int>(layout.kind) << " of " << layout.size);
  const DevicePermute<Id> call(ids, top_k, experts, layout);
  call.enqueue(nullptr);
  gpu::synchronize_device();
  const Permuted expected = permuted_on_host(ids, top_k, experts, layout);
  const Permuted actual = call.fetch();
  EXPECT_EQ(actual.ends, expected.ends);
  EXPECT_EQ(actual.dropped, expected.dropped);
  EXPECT_TRUE(actual.positions == expected.positions);
  EXPECT_TRUE(actual.tokens == expected.tokens);
}

// Some slots have no expert, whether they say -1, something smaller or something large.
template <typename Id>
std::vector<Id> draw_ids(std::size_t slots, int experts, std::uint64_t seed) {
  test::Numbers numbers(seed);
  std::vector<Id> ids(slots);
  for (Id& id : ids) {
    // Half of them among few experts.
    const int most = numbers.between(0, 1) == 0 ? experts / 8 : experts - 1;
    id = static_cast<Id>(numbers.between(0, 9) == 0 ? numbers.between(-3, -1)
                                                    : numbers.between(0, most + experts / 16));
  }
  if (slots > 1) ids[1] = static_cast<Id>(std::int64_t{1} << 40 | 0x7fffffff);
  if (slots > 2) ids[2] = std::numeric_limits<Id>::min();
  return ids;
}

TEST_F(GpuPermute, IsTheHostsInEveryShapeAndLayout) {
  for (const int experts : {1, 2, 31, 32, 33, 512, 513, 1023, 1024}) {
    for (const int top_k : {1, 2, 8, 20}) {
      for (const int tokens : {0, 1, 5, 204, 205, 700, 3000}) {
        const auto slots = static_cast<std::size_t>(tokens * top_k);
        const auto narrow = draw_ids<std::int32_t>(slots, experts, 3);
        for (const RowLayout& layout :
             {RowLayout::packed(), RowLayout::blocked(1), RowLayout::blocked(7),
              RowLayout::blocked(128), RowLayout::padded(1), RowLayout::padded(40),
              RowLayout::padded(500)}) {
          expect_permuted(narrow, top_k, experts, layout);
          if (HasFailure()) return;
        }
        expect_permuted(draw_ids<std::int64_t>(slots, experts, 4), top_k, experts, RowLayout());
      }
    }
  }
}

// Around the sizes at which one block, and a chunk of each block, end.
TEST_F(GpuPermute, EveryNumberOfSlotsAroundALimit) {
  for (const int limit : {32, 128, 512, 4096, 6144, 8192, 262144}) {
    for (const int slots : {limit - 33, limit - 1, limit, limit + 1, limit + 31, limit + 513}) {
      if (slots < 0) continue;
      expect_permuted(draw_ids<std::int32_t>(static_cast<std::size_t>(slots), 60, 5), 1, 60,
                      RowLayout());
      if (HasFailure()) return;
    }
  }
}

TEST_F(GpuPermute, ManySlots) {
  for (const auto& [tokens, top_k, experts] :
       {std::tuple{60000, 8, 256}, {65536, 8, 1024}, {131072, 4, 8}, {700000, 8, 1024}}) {
    const auto slots = static_cast<std::size_t>(tokens * top_k);
    const auto ids = draw_ids<std::int32_t>(slots, experts, 6);
    expect_permuted(ids, top_k, experts, RowLayout());
    expect_permuted(ids, top_k, experts, RowLayout::blocked(64));
    expect_permuted(ids, top_k, experts, RowLayout::padded(300));
    expect_permuted(draw_ids<std::int64_t>(slots, experts, 7), top_k, experts, RowLayout());
  }
}

TEST_F(GpuPermute, AllSlotsOfOneExpertOrOfNone) {
  for (const int slots : {1, 33, 4096, 4097, 300000}) {
    for (const int id : {-1, 0, 5, 511, 512, 1023, 1024}) {
      const std::vector<std::int32_t> ids(static_cast<std::size_t>(slots), id);
      for (const RowLayout& layout :
           {RowLayout::packed(), RowLayout::blocked(16), RowLayout::padded(100)}) {
        expect_permuted(ids, 1, 1024, layout);
      }
      if (HasFailure()) return;
    }
  }
}

// With so many rows others must help to fill them.
TEST_F(GpuPermute, FewSlotsInALargeLayout) {
  const auto ids = draw_ids<std::int32_t>(64, 256, 8);
  expect_permuted(ids, 8, 256, RowLayout::padded(5000));
  expect_permuted(ids, 8, 256, RowLayout::blocked(2048));
  expect_permuted(std::vector<std::int32_t>(), 8, 256, RowLayout::padded(5000));
}

TEST_F(GpuPermute, TokensAndDroppedMayBeLeftOut) {
  const auto ids = draw_ids<std::int32_t>(20000, 64, 9);
  for (const std::size_t slots : {std::size_t{800}, ids.size()}) {
    const std::vector<std::int32_t> some(ids.begin(),
                                         ids.begin() + static_cast<std::ptrdiff_t>(slots));
    const DevicePermute<std::int32_t> call(some, 4, 64, RowLayout());
    DevicePermutation out = call.output();
    out.tokens = nullptr;
    out.rows = 0;
    out.dropped = nullptr;
    permute(call.ids(), 4, 64, out, {});
    gpu::synchronize_device();
    const Permuted expected = permuted_on_host(some, 4, 64, RowLayout()), actual = call.fetch();
    EXPECT_EQ(actual.ends, expected.ends);
    EXPECT_EQ(actual.positions, expected.positions);
    EXPECT_EQ(actual.dropped, std::bit_cast<std::int32_t>(0xeeeeeeeeu));
  }
}

TEST_F(GpuPermute, TokensBehindTheLayoutAreNobodys) {
  const auto ids = draw_ids<std::int32_t>(600, 32, 10);
  const DevicePermute<std::int32_t> call(ids, 4, 32, RowLayout::blocked(8), 1000);
  call.enqueue(nullptr);
  gpu::synchronize_device();
  Permuted expected = permuted_on_host(ids, 4, 32, RowLayout::blocked(8));
  expected.tokens.resize(expected.tokens.size() + 1000, -1);
  EXPECT_TRUE(call.fetch() == expected);
}

// Ids may change between replays: nothing is read by the host.
TEST_F(GpuPermute, GraphsReadTheIdsOfTheirReplay) {
  for (const std::size_t slots : {600, 60000}) {
    for (const RowLayout& layout :
         {RowLayout::packed(), RowLayout::blocked(32), RowLayout::padded(700)}) {
      const std::vector<std::int32_t> none(slots, -1);
      DevicePermute<std::int32_t> call(none, 4, 96, layout);
      const gpu::Stream stream;
      call.enqueue(stream.handle());  // loads the kernels
      gpu::Graph graph = gpu::Graph::capture(stream, [&] { call.enqueue(stream.handle()); });
      EXPECT_EQ(graph.num_nodes(), graph.num_kernel_nodes());
      for (const std::uint64_t seed : {1, 2, 3}) {
        const auto ids = draw_ids<std::int32_t>(slots, 96, seed);
        call.put(ids);
        graph.launch(stream);
        stream.synchronize();
        EXPECT_TRUE(call.fetch() == permuted_on_host(ids, 4, 96, layout)) << "seed " << seed;
      }
    }
  }
}

TEST_F(GpuPermute, Refusals) {
  const DevicePermute<std::int32_t> call(std::vector<std::int32_t>(40, 0), 4, 8, RowLayout());
  DevicePermutation out = call.output();
  EXPECT_ERROR(permute(call.ids(), 3, 8, out, {}), kShapeMismatch, "top_k, 3");
  EXPECT_ERROR(permute(call.ids(), 4, 1025, out, {}), kInvalidArgument, "1025");
  out.rows = 39;
  EXPECT_ERROR(permute(call.ids(), 4, 8, out, {}), kShapeMismatch, "39 entries");
  out = call.output();
  out.workspace_bytes = 4;
  EXPECT_ERROR(permute(call.ids(), 4, 8, out, {}), kInvalidArgument, "workspace has 4");
  out = call.output();
  out.ends = nullptr;
  EXPECT_ERROR(permute(call.ids(), 4, 8, out, {}), kInvalidArgument, "ends is null");
  EXPECT_ERROR(permute(call.ids(), 4, 8, call.output(), {.device = 4711}), kInvalidArgument,
               "device 4711");
}

// --- unpermute

struct UnpermuteCase {
  DType in = DType::kBF16, out = DType::kBF16;
  int hidden = 256, top_k = 2, tokens = 23;
  int pad = 0;      // elements between rows
  int shift = 0;    // elements before the first row
  int weights = 1;  // 0: none, 1: f32, 2: bf16
  float scale = 1;
  bool accumulate = false;
};

void expect_unpermuted(const UnpermuteCase& c) {
  SCOPED_TRACE(::testing::Message()
               << to_string(c.in) << " to " << to_string(c.out) << ", H " << c.hidden << ", K "
               << c.top_k << ", T " << c.tokens << ", pad " << c.pad << ", shift " << c.shift
               << ", weights " << c.weights << ", scale " << c.scale << ", accumulate "
               << c.accumulate);
  test::Numbers numbers(9);
  const int num_rows = 61, stride = c.hidden + c.pad;
  Matrix rows = Matrix::random(num_rows + 1, stride, c.in, 1);
  // Rows that no slot has may hold anything.
  for (int i = 0; i < c.hidden; ++i) rows.set(std::int64_t{7} * stride + c.shift + i, NAN);
  const Matrix before = Matrix::random(c.tokens + 1, stride, c.out, 2);
  std::vector<std::int32_t> positions;
  std::vector<float> wide;
  std::vector<std::uint16_t> narrow;
  for (int i = 0; i < c.tokens * c.top_k; ++i) {
    const int row = numbers.between(-8, num_rows - 1);
    positions.push_back(row < 0 || row == 7 ? -1 : row);
    narrow.push_back(f32_to_bf16(static_cast<float>(numbers.between(-100, 100)) / 77));
    wide.push_back(c.weights == 2 ? bf16_to_f32(narrow.back())
                                  : static_cast<float>(numbers.between(-100, 100)) / 77);
  }
  MatrixView view = rows.view();
  const auto in_shift = static_cast<std::size_t>(c.shift) * size_of(c.in);
  const auto out_shift = static_cast<std::size_t>(c.shift) * size_of(c.out);
  view.data = static_cast<const std::byte*>(view.data) + in_shift;
  view.rows = num_rows;
  view.cols = c.hidden;
  // The sum as the header defines it: fused in the order of k, then scaled, then added.
  Matrix expected = before;
  for (int t = 0; t < c.tokens; ++t) {
    for (int i = 0; i < c.hidden; ++i) {
      float sum = 0;
      for (int k = 0; k < c.top_k; ++k) {
        const auto slot = static_cast<std::size_t>(t * c.top_k + k);
        if (positions[slot] < 0) continue;
        const std::int64_t at = std::int64_t{positions[slot]} * stride + c.shift + i;
        sum = std::fma(c.weights == 0 ? 1.0f : wide[slot], rows.get(at), sum);
      }
      sum *= c.scale;
      const std::int64_t at = std::int64_t{t} * stride + c.shift + i;
      expected.set(at, c.accumulate ? sum + before.get(at) : sum);
    }
  }
  ForwardOutput output{
      .dtype = c.out, .row_stride = stride, .scale = c.scale, .accumulate = c.accumulate};
  SlotView weights;

  const auto bytes = [](const Matrix& m) {
    return std::span(static_cast<const std::byte*>(m.view().data),
                     static_cast<std::size_t>(m.rows() * m.view().cols) * size_of(m.dtype()));
  };
  const DeviceArray<std::byte> rows_there(bytes(rows)), out_there(bytes(before));
  const DeviceArray<std::int32_t> positions_there(positions);
  const DeviceArray<float> wide_there(wide);
  const DeviceArray<std::uint16_t> narrow_there(narrow);
  view.data = rows_there.data() + in_shift;
  output.data = out_there.data() + out_shift;
  if (c.weights == 1) weights = {wide_there.data(), wide.size()};
  if (c.weights == 2) weights = {narrow_there.data(), DType::kBF16, narrow.size()};
  unpermute(view, {positions_there.data(), positions.size()}, weights, c.top_k, output, {});
  gpu::synchronize_device();
  const std::vector<std::byte> actual = out_there.values();
  EXPECT_EQ(0, std::memcmp(actual.data(), bytes(expected).data(), actual.size()));
}

TEST_F(GpuUnpermute, TypesAndSizes) {
  for (const DType in : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const DType out : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (const int hidden : {1, 8, 77, 250, 256, 264, 1000, 4096}) {
        for (const int top_k : {1, 2, 8, 9, 33, 70}) {
          UnpermuteCase c{.in = in, .out = out, .hidden = hidden, .top_k = top_k};
          expect_unpermuted(c);
          c.accumulate = true;
          c.scale = 1.3f;
          c.weights = 2;
          expect_unpermuted(c);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_F(GpuUnpermute, StridesAlignmentWeightsAndTokens) {
  for (const int pad : {0, 1, 4, 8, 9}) {
    for (const int shift : {0, 1, 4, 8}) {
      if (shift > pad) continue;
      for (const int weights : {0, 1, 2}) {
        for (const bool accumulate : {false, true}) {
          UnpermuteCase c{.hidden = 520,
                          .pad = pad,
                          .shift = shift,
                          .weights = weights,
                          .scale = accumulate ? 0.7f : 1.0f,
                          .accumulate = accumulate};
          expect_unpermuted(c);
          c.in = DType::kF32;
          expect_unpermuted(c);
        }
      }
    }
  }
  UnpermuteCase c;
  for (const int tokens : {0, 1, 2, 1000}) {
    c.tokens = tokens;
    expect_unpermuted(c);
  }
}

TEST_F(GpuUnpermute, PositionsThatAreNoRowAreLeftOut) {
  const std::vector<float> values{1, 2, 3, 4};
  const std::vector<std::int32_t> positions{0, 2, -7, 1, 2147483647, -1};
  const DeviceArray<float> rows(values), out(6);
  const DeviceArray<std::int32_t> places(positions);
  const ForwardOutput output{.data = out.data(), .dtype = DType::kF32};
  unpermute({rows.data(), DType::kF32, 2, 2, 2}, {places.data(), positions.size()}, {}, 2, output,
            {});
  gpu::synchronize_device();
  EXPECT_EQ(out.values(), (std::vector<float>{1, 2, 3, 4, 0, 0}));
}

// --- topk

test::Routed routed_on_host(const test::Tokens& tokens) {
  const std::size_t slots = static_cast<std::size_t>(tokens.count() * tokens.spec.top_k);
  test::Routed routed{std::vector<std::int32_t>(slots), std::vector<float>(slots), {}};
  route(tokens.spec, tokens.logits, tokens.bias, tokens.hashed, routed.ids, routed.weights);
  return routed;
}

// `logits`: those of the tokens, in a type, `stride` apart.
template <typename T>
void expect_routed(const test::Tokens& tokens, const std::vector<T>& logits, DType type,
                   std::int64_t stride) {
  const LayerSpec& spec = tokens.spec;
  const test::Routed expected = routed_on_host(tokens);
  const DeviceArray<T> given(logits);
  const DeviceArray<float> bias(tokens.bias), weights(expected.weights.size());
  const DeviceArray<std::int32_t> ids(expected.ids.size());
  topk(spec.routing, spec.top_k, {given.data(), type, tokens.count(), spec.num_experts, stride},
       {bias.data(), bias.size()}, {ids.data(), ids.size()}, {weights.data(), weights.size()}, {});
  gpu::synchronize_device();
  ASSERT_EQ(ids.values(), expected.ids) << describe(spec);
  const std::vector<float> actual = weights.values();
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const bool same = std::bit_cast<std::uint32_t>(actual[i]) ==
                          std::bit_cast<std::uint32_t>(expected.weights[i]) ||
                      (std::isnan(actual[i]) && std::isnan(expected.weights[i]));
    ASSERT_TRUE(same) << describe(spec) << ", slot " << i << ": " << actual[i] << ", host "
                      << expected.weights[i];
  }
}

// In every type. The host routes what the type holds.
void expect_routed(test::Tokens tokens) {
  const auto num_experts = static_cast<std::int64_t>(tokens.spec.num_experts);
  expect_routed(tokens, tokens.logits, DType::kF32, num_experts);
  for (const DType type : {DType::kBF16, DType::kF16}) {
    if (::testing::Test::HasFatalFailure()) return;
    const bool bf16 = type == DType::kBF16;
    const std::int64_t stride = num_experts + 3;
    std::vector<std::uint16_t> codes(static_cast<std::size_t>(tokens.count() * stride), 0x7fff);
    test::Tokens rounded = tokens;
    for (std::size_t i = 0; i < tokens.logits.size(); ++i) {
      const std::uint16_t code =
          bf16 ? f32_to_bf16(tokens.logits[i]) : f32_to_f16(tokens.logits[i]);
      rounded.logits[i] = bf16 ? bf16_to_f32(code) : f16_to_f32(code);
      const auto at = static_cast<std::int64_t>(i);
      codes[static_cast<std::size_t>(at / num_experts * stride + at % num_experts)] = code;
    }
    expect_routed(rounded, codes, type, stride);
  }
}

TEST_F(GpuTopk, RoutesAsTheHostForEveryFamily) {
  std::mt19937 random(2);
  for (const test::Family& family : test::families()) {
    if (family.spec.routing.method == RoutingMethod::kHash) continue;
    SCOPED_TRACE(family.name);
    for (const int count : {1, 7, 600}) {
      ASSERT_NO_FATAL_FAILURE(
          expect_routed(test::draw_tokens(family.spec, count, test::Kind::kNormal, random)));
    }
  }
}

TEST_F(GpuTopk, EveryCombination) {
  int routed_there = 0;
  for (const int experts : {1, 32, 33, 60, 128, 500, 512, 513, 1024}) {
    test::test_combinations(experts, 24, [&](const test::Tokens& tokens) {
      test::Routed routed = routed_on_host(tokens);
      // Some combinations make no layer, so topk() refuses them.
      try {
        if (tokens.spec.routing.method != RoutingMethod::kHash) {
          expect_routed(tokens);
          ++routed_there;
        }
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
      }
      // The caller's comparisons are no part of this test.
      for (int t = 0; t < tokens.count(); ++t) {
        const auto first = tokens.logits.begin() + std::ptrdiff_t{t} * tokens.spec.num_experts;
        const auto nans = std::count_if(first, first + tokens.spec.num_experts,
                                        [](float logit) { return std::isnan(logit); });
        routed.status.push_back({static_cast<int>(nans), 0});
      }
      return routed;
    });
    if (HasFailure()) return;
  }
  EXPECT_GT(routed_there, 100);
}

TEST_F(GpuTopk, Refusals) {
  const DeviceArray<float> logits(40), weights(8);
  const DeviceArray<std::int32_t> ids(8);
  const std::span<std::int32_t> i(ids.data(), 8);
  const std::span<float> w(weights.data(), 8);
  RoutingSpec routing;
  const MatrixView view{logits.data(), DType::kF32, 4, 10, 10};
  EXPECT_ERROR(topk(routing, 3, view, {}, i, w, {}), kShapeMismatch, "ids has 8");
  EXPECT_ERROR(topk(routing, 11, view, {}, i, w, {}), kInvalidArgument, "11");
  routing.has_correction_bias = true;
  EXPECT_ERROR(topk(routing, 2, view, {}, i, w, {}), kShapeMismatch, "correction_bias has 0");
  routing = {};
  routing.method = RoutingMethod::kHash;
  EXPECT_ERROR(topk(routing, 2, view, {}, i, w, {}), kUnsupported, "hash routing");
}

// --- A layer of operators

// The weights of GroupedGemm: gate's rows and then up's.
std::vector<Matrix> gate_up_of(const LayerSpec& spec, const MoeWeights& weights) {
  std::vector<Matrix> matrices;
  for (const FfnWeights& expert : weights.experts) {
    Matrix& both = matrices.emplace_back(2 * spec.intermediate, spec.hidden, DType::kBF16);
    for (int r = 0; r < 2 * spec.intermediate; ++r) {
      const MatrixView& part = r < spec.intermediate ? expert.gate : expert.up;
      const auto* const from = static_cast<const std::uint16_t*>(part.row(r % spec.intermediate));
      for (int c = 0; c < spec.hidden; ++c) {
        both.set(std::int64_t{r} * spec.hidden + c, bf16_to_f32(from[c * part.col_stride]));
      }
    }
  }
  return matrices;
}

// topk, permute, grouped GEMM with SwiGLU, grouped GEMM, unpermute.
class LayerOfOperators {
 public:
  // `indexed`: the first product gathers its rows; else a call of unpermute() does.
  LayerOfOperators(const LayerSpec& spec, const MoeWeights& weights, int tokens, RowLayout layout,
                   bool indexed)
      : spec_(spec),
        tokens_(tokens),
        indexed_(indexed),
        gate_up_weights_(gate_up_of(spec, weights)),
        gate_up_(make(spec, gate_up_weights_, weights, true)),
        down_(make(spec, gate_up_weights_, weights, false)),
        order_(std::vector<std::int32_t>(slots()), spec.top_k, spec.num_experts, layout),
        rows_(static_cast<std::size_t>(order_.output().rows)),
        logits_(static_cast<std::size_t>(tokens * spec.num_experts)),
        weights_(slots()),
        x_(elements(static_cast<std::size_t>(tokens), spec.hidden)),
        gathered_(elements(indexed ? 0 : rows_, spec.hidden)),
        h_(elements(rows_, spec.intermediate)),
        y_(elements(rows_, spec.hidden)),
        out_(x_.size()) {}

  void put(const std::vector<float>& logits, const Matrix& x) {
    logits_.put(logits);
    x_.put(std::span(static_cast<const std::uint16_t*>(x.view().data), x_.size()));
  }
  void enqueue(void* stream) {
    const DeviceStream where{.stream = stream};
    const DevicePermutation order = order_.output();
    auto* const ids = static_cast<std::int32_t*>(const_cast<void*>(order_.ids().data()));
    topk(spec_.routing, spec_.top_k,
         {logits_.data(), DType::kF32, tokens_, spec_.num_experts, spec_.num_experts}, {},
         {ids, slots()}, {weights_.data(), slots()}, where);
    order_.enqueue(stream);
    const auto num_rows = static_cast<std::int64_t>(rows_);
    const SlotView index{order.tokens, rows_};
    GroupedInput input;
    input.x = {x_.data(), DType::kBF16, tokens_, spec_.hidden, spec_.hidden};
    input.layout = order.layout;
    input.ends = {order.ends, static_cast<std::size_t>(spec_.num_experts)};
    input.stream = stream;
    if (indexed_) {
      input.index = index;
    } else {
      const ForwardOutput gathered{.data = gathered_.data()};
      unpermute(input.x, index, {}, 1, gathered, where);
      input.x = {gathered_.data(), DType::kBF16, num_rows, spec_.hidden, spec_.hidden};
    }
    GroupedOutput output{.data = h_.data(), .rows = num_rows, .layout = order.layout};
    gate_up_.run(input, output);
    input.x = {h_.data(), DType::kBF16, num_rows, spec_.intermediate, spec_.intermediate};
    input.index = {};
    output.data = y_.data();
    down_.run(input, output);
    const ForwardOutput summed{.data = out_.data()};
    unpermute({y_.data(), DType::kBF16, num_rows, spec_.hidden, spec_.hidden},
              {order.positions, slots()}, {weights_.data(), slots()}, spec_.top_k, summed, where);
  }
  BatchResult fetch() const {
    BatchResult result{Matrix(tokens_, spec_.hidden, DType::kBF16), {}, {}, {}};
    const std::vector<std::uint16_t> out = out_.values();
    std::memcpy(result.output.row(0), out.data(), out.size() * 2);
    result.ids = order_.fetched_ids();
    result.weights = weights_.values();
    return result;
  }

 private:
  std::size_t slots() const { return static_cast<std::size_t>(tokens_ * spec_.top_k); }
  static std::size_t elements(std::size_t rows, int columns) {
    return rows * static_cast<std::size_t>(columns);
  }
  static GroupedGemm make(const LayerSpec& spec, const std::vector<Matrix>& gate_up,
                          const MoeWeights& weights, bool first) {
    GroupedGemmSpec gemm{.num_experts = spec.num_experts,
                         .n = first ? 2 * spec.intermediate : spec.hidden,
                         .k = first ? spec.hidden : spec.intermediate};
    if (first) gemm.epilogue = spec.activation;
    GroupedGemmWeights matrices;
    for (std::size_t e = 0; e < gate_up.size(); ++e) {
      matrices.matrices.push_back(first ? gate_up[e].view() : weights.experts[e].down);
    }
    return GroupedGemm(gemm, matrices, {.backend = Backend::kCuda});
  }

  LayerSpec spec_;
  int tokens_;
  bool indexed_;
  std::vector<Matrix> gate_up_weights_;
  GroupedGemm gate_up_, down_;
  DevicePermute<std::int32_t> order_;
  std::size_t rows_;
  DeviceArray<float> logits_, weights_;
  DeviceArray<std::uint16_t> x_, gathered_, h_, y_, out_;
};

std::vector<float> draw_logits(const LayerSpec& spec, int tokens, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> logits(static_cast<std::size_t>(tokens * spec.num_experts));
  for (float& logit : logits) logit = normal(random);
  return logits;
}

// In one graph, replayed with other tokens and other experts. It has the fused layer's bits where
// the fused one cuts no sum in parts, which is not told here: the error must be as small as its.
void expect_layer(const RowLayout& layout, bool indexed) {
  LayerSpec spec = spec_of(512, 256, 24, 4);
  spec.routing.renormalize = true;
  const MoeWeights weights = make_weights(spec, DType::kBF16, 3);
  for (const int tokens : {1, 40, 900}) {
    LayerOfOperators layer(spec, weights, tokens, layout, indexed);
    DeviceLayer fused(spec, weights, tokens);
    const gpu::Stream stream;
    layer.put(draw_logits(spec, tokens, 9), Matrix::random(tokens, spec.hidden, DType::kBF16, 9));
    layer.enqueue(stream.handle());  // loads the kernels
    gpu::Graph graph = gpu::Graph::capture(stream, [&] { layer.enqueue(stream.handle()); });
    EXPECT_EQ(graph.num_nodes(), graph.num_kernel_nodes()) << "copies or host work";
    for (const std::uint32_t seed : {1u, 2u}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens, seed " << seed);
      const std::vector<float> logits = draw_logits(spec, tokens, seed);
      const Matrix x = Matrix::random(tokens, spec.hidden, DType::kBF16, seed);
      layer.put(logits, x);
      graph.launch(stream);
      stream.synchronize();
      const BatchResult result = layer.fetch();
      std::vector<std::int32_t> ids(result.ids.size());
      std::vector<float> factors(result.weights.size());
      route(spec, logits, {}, {}, ids, factors);
      EXPECT_EQ(result.ids, ids);
      EXPECT_EQ(result.weights, factors);
      const Batch batch{x, ids, factors, {}};
      expect_accurate(spec, weights, batch, result);
      const BatchResult other = fused.run(batch, DType::kBF16);
      int equal = 0;
      for (std::int64_t i = 0; i < x.rows() * spec.hidden; ++i) {
        equal += result.output.get(i) == other.output.get(i) ? 1 : 0;
      }
      ::testing::Test::RecordProperty(
          "equal_of_" + std::to_string(tokens * spec.hidden) + "_seed_" + std::to_string(seed),
          equal);
    }
  }
}

TEST_F(GpuOperators, ALayerOfOperators) {
  for (const RowLayout& layout :
       {RowLayout::packed(), RowLayout::blocked(64), RowLayout::padded(900)}) {
    expect_layer(layout, false);
  }
}

TEST_F(GpuOperators, ALayerInFiveCalls) {
  try {
    expect_layer(RowLayout::packed(), true);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    GTEST_SKIP() << error.what();
  }
}

}  // namespace
}  // namespace switchyard::testing
