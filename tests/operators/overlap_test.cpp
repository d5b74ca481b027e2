// Memory that a call must not share between what it writes and anything else: every pair, of every
// call.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "model/errors.h"
#include "support/exchanges.h"
#include "support/layers.h"
#include "switchyard/grouped_gemm.h"

namespace switchyard::testing {
namespace {

constexpr auto kBad = ErrorCode::kInvalidArgument;

// An array of a call, which a test can put elsewhere.
struct Array {
  const char* name;
  std::byte* data;
  std::size_t bytes;
  std::function<void(std::byte*)> put;  // empty: an input
};

// So much memory behind each array that one that is put over it meets no other.
template <typename... T>
void keep_apart(std::vector<T>&... arrays) {
  (arrays.reserve(arrays.size() + 8192), ...);
}

template <typename T>
Array input(const char* name, std::vector<T>& values) {
  return {name, reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(T), {}};
}
// A matrix with as much memory behind it.
class Roomy {
 public:
  Roomy(std::int64_t rows, std::int64_t cols, DType dtype)
      : memory_(rows + kRoom, cols, dtype), rows_(rows) {}
  static Roomy random(std::int64_t rows, std::int64_t cols, DType dtype, std::uint64_t seed) {
    Roomy made(rows, cols, dtype);
    made.memory_ = Matrix::random(rows + kRoom, cols, dtype, seed);
    return made;
  }
  MatrixView view() const { return memory_.rows_from(0, rows_); }

 private:
  static constexpr std::int64_t kRoom = 2048;
  Matrix memory_;
  std::int64_t rows_;
};
template <typename M>
concept HasView = requires(const M& m) {
  m.view();
};
Array input(const char* name, const HasView auto& m) {
  const MatrixView view = m.view();
  return {name,
          static_cast<std::byte*>(const_cast<void*>(view.data)),
          static_cast<std::size_t>(view.rows * view.cols) * size_of(view.dtype),
          {}};
}
template <typename T>
Array output(const char* name, std::vector<T>& values, T*& pointer) {
  Array array = input(name, values);
  pointer = values.data();
  array.put = [&pointer](std::byte* to) { pointer = reinterpret_cast<T*>(to); };
  return array;
}
template <typename T>
Array output(const char* name, std::vector<T>& values, std::span<T>& span) {
  Array array = input(name, values);
  span = values;
  array.put = [&span](std::byte* to) { span = {reinterpret_cast<T*>(to), span.size()}; };
  return array;
}
Array output(const char* name, const HasView auto& m, void*& pointer) {
  Array array = input(name, m);
  pointer = array.data;
  array.put = [&pointer](std::byte* to) { pointer = to; };
  return array;
}

// Each output over each other array, wholly and in part.
void check_every_pair(const std::vector<Array>& arrays, const std::function<void()>& call) {
  call();
  int pairs = 0;
  for (const Array& out : arrays) {
    if (!out.put) continue;
    for (const Array& other : arrays) {
      if (&other == &out) continue;
      for (const std::size_t offset : {std::size_t{0}, other.bytes / 2 / 8 * 8}) {
        out.put(other.data + offset);
        SCOPED_TRACE(::testing::Message() << out.name << " at " << other.name << " + " << offset);
        EXPECT_ERROR(call(), kBad, out.name, other.name, "overlaps", "memory of its own");
        ++pairs;
      }
    }
    out.put(out.data);
  }
  EXPECT_GT(pairs, 1);
  call();
}

TEST(OverlappingMemory, OfALayer) {
  const LayerSpec spec = spec_of(64, 32, 8, 2);
  const MoeWeights weights = generate_weights(spec, DType::kF32, 1, {});
  MoeLayer layer(World::single(), spec, weights, {.cpu = {.num_threads = 1}});
  Roomy x = Roomy::random(6, 64, DType::kF32, 2), y(6, 64, DType::kF32);
  Roomy logits = Roomy::random(6, 8, DType::kF32, 3);
  std::vector<std::int64_t> ids{0, 1, 2, 3, 4, 5, 6, 7, 0, 2, 1, 3};
  std::vector<float> factors(12, 0.5f), factors_out(12);
  std::vector<std::int32_t> ids_out(12);
  keep_apart(ids, factors, factors_out, ids_out);
  ForwardInput in;
  ForwardOutput out;
  in.activations = x.view();
  const std::vector<Array> outputs{output("out", y, out.data),
                                   output("ids_out", ids_out, out.topk_ids),
                                   output("weights_out", factors_out, out.topk_weights)};
  out.dtype = DType::kF32;
  const auto check = [&](std::initializer_list<Array> inputs) {
    std::vector<Array> arrays = outputs;
    arrays.insert(arrays.end(), inputs);
    check_every_pair(arrays, [&] { layer.forward(in, out); });
  };
  check({input("x", x)});
  in.logits = logits.view();
  check({input("logits", logits)});
  in.logits = {};
  in.topk_ids = ids;
  in.topk_weights = factors;
  check({input("topk_ids", ids), input("topk_weights", factors)});
}

// The two halves of the columns of one array are no overlap, and give the right numbers.
TEST(OverlappingMemory, HalvesOfOneArrayAreNone) {
  const LayerSpec spec = spec_of(64, 32, 8, 2);
  const MoeWeights weights = generate_weights(spec, DType::kF32, 1, {});
  MoeLayer layer(World::single(), spec, weights, {.cpu = {.num_threads = 1}});
  Matrix x = Matrix::random(6, 64, DType::kF32, 2), y(6, 64, DType::kF32),
         both(6, 128, DType::kF32);
  ForwardInput in;
  ForwardOutput out;
  in.activations = x.view();
  out.data = y.row(0);
  out.dtype = DType::kF32;
  layer.forward(in, out);
  for (std::int64_t r = 0; r < 6; ++r) std::memcpy(both.row(r), x.row(r), 64 * sizeof(float));
  in.activations = {both.row(0), DType::kF32, 6, 64, 128};
  out.data = static_cast<float*>(both.row(0)) + 64;
  out.row_stride = 128;
  layer.forward(in, out);
  for (std::int64_t r = 0; r < 6; ++r) {
    EXPECT_EQ(std::memcmp(static_cast<float*>(both.row(r)) + 64, y.row(r), 64 * sizeof(float)), 0);
    EXPECT_EQ(std::memcmp(both.row(r), x.row(r), 64 * sizeof(float)), 0);
  }
  out.row_stride = 32;
  EXPECT_ERROR(layer.forward(in, out), kBad, "row");
}

TEST(OverlappingMemory, OfAGroupedGemm) {
  Matrix w = Matrix::random(3 * 8, 4, DType::kF32, 1);
  Roomy x = Roomy::random(6, 4, DType::kF32, 2), y(6, 4, DType::kF32), products(6, 8, DType::kF32);
  std::vector<std::int32_t> ends{2, 2, 6}, index{5, 4, 3, 2, 1, 0}, out_index = index;
  std::vector<float> factors(6, 1.0f);
  keep_apart(ends, index, out_index, factors);
  GroupedGemmSpec spec{3, 8, 4, Activation(), {}};
  GroupedGemmWeights weights;
  for (int e = 0; e < 3; ++e) {
    weights.matrices.push_back({w.row(8 * e), DType::kF32, 8, 4, 4});
  }
  GroupedGemm gemm(spec, weights, {.num_threads = 1});
  for (const bool rows_are_told : {true, false}) {
    GroupedInput in;
    GroupedOutput out;
    in.x = x.view();
    in.ends = ends;
    in.index = index;
    out.rows = rows_are_told ? 6 : -1;
    out.weights = factors;
    const Array result = output("out", y, out.data);
    out.dtype = DType::kF32;
    const auto run = [&] { gemm.run(in, out); };
    check_every_pair({result, output("products", products, out.products), input("x", x),
                      input("ends", ends), input("index", index), input("row_weights", factors)},
                     run);
    out.products = nullptr;
    out.index = out_index;
    check_every_pair({result, input("out_index", out_index)}, run);
  }
}

TEST(OverlappingMemory, OfUnpermute) {
  Roomy rows = Roomy::random(8, 16, DType::kF32, 1), y(4, 16, DType::kF32);
  std::vector<std::int32_t> positions{0, 1, 2, 3, 4, 5, 6, 7};
  std::vector<float> factors(8, 0.5f);
  keep_apart(positions, factors);
  ForwardOutput out;
  const Array result = output("out", y, out.data);
  out.dtype = DType::kF32;
  check_every_pair(
      {result, input("rows", rows), input("positions", positions), input("weights", factors)},
      [&] { unpermute(rows.view(), positions, factors, 2, out); });
}

TEST(OverlappingMemory, OfAnExchange) {
  for (const DType wire : {DType::kF32, DType::kF8E4M3}) {
    Exchange exchange(World::single(),
                      {.hidden = 64,
                       .num_experts = 4,
                       .top_k = 2,
                       .max_tokens = 6,
                       .dispatch = wire,
                       .combine = DType::kF32},
                      {.num_threads = 1});
    ExchangeHandle handle = exchange.make_handle();
    ExchangeArrays got(exchange.spec(), exchange.own_places(), exchange.rows_needed());
    Roomy x = Roomy::random(6, 64, DType::kF32, 2), y(6, 64, DType::kF32);
    std::vector<std::int64_t> ids{0, 1, 2, 3, 0, 1, 2, 3, 0, 2, 1, 3};
    std::vector<float> factors(12, 0.5f);
    std::vector<std::int32_t> num_rows(1);
    keep_apart(ids, factors, num_rows);
    keep_apart(got.ends, got.counts, got.origins, got.weights, got.scales);
    const DispatchInput in{.tokens = x.view(), .ids = ids, .weights = factors};
    DispatchOutput out = got.output();
    std::vector<Array> outputs{
        output("rows (out)", got.rows, out.rows),    output("ends", got.ends, out.ends),
        output("counts", got.counts, out.counts),    output("num_rows", num_rows, out.num_rows),
        output("origins", got.origins, out.origins), output("weights", got.weights, out.weights)};
    if (wire == DType::kF8E4M3) outputs.push_back(output("scales", got.scales, out.scales));
    std::vector<Array> all = outputs;
    all.insert(all.end(), {input("x", x), input("ids", ids), input("weights", factors)});
    check_every_pair(all, [&] { exchange.dispatch(in, out, handle); });
    // By itself, a receive may go over what was sent; its outputs must be apart all the same.
    exchange.dispatch_send(in, handle);
    for (const Array& array : outputs) {
      for (const Array& other : outputs) {
        if (&array == &other) continue;
        array.put(other.data);
        EXPECT_ERROR(exchange.dispatch_recv(out, handle), kBad, array.name, other.name);
      }
      array.put(array.data);
    }
    exchange.dispatch_recv(out, handle);
    Roomy results = Roomy::random(got.capacity, 64, DType::kF32, 4);
    CombineOutput sums;
    const Array result = output("out", y, sums.data);
    sums.dtype = DType::kF32;
    check_every_pair({result, input("rows", results)},
                     [&] { exchange.combine({results.view()}, sums, handle); });
  }
}

}  // namespace
}  // namespace switchyard::testing
