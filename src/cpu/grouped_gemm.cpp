#include "cpu/grouped_gemm.h"

#include <algorithm>
#include <cstring>

#include "cpu/expert_gemm.h"
#include "cpu/kernels.h"
#include "layer/compute.h"
#include "protocol/partition.h"

namespace switchyard::cpu {
namespace {

std::int32_t entry(const SlotView& index, std::int64_t i) {
  return static_cast<const std::int32_t*>(index.data())[i];
}

std::byte* element(void* data, std::int64_t i, DType dtype) {
  return static_cast<std::byte*>(data) + i * static_cast<std::int64_t>(size_of(dtype));
}

}  // namespace

// The state that all calls share.
struct GroupedGemmEngine::Problem {
  // Rows of a weight that are gate's or up's: first, first + step, ...
  struct Rows {
    int first = 0, step = 1;
    WeightBlock block(int begin, int count) const { return {first + begin * step, count, step}; }
  };

  GroupedGemmSpec spec;
  GroupedGemmWeights weights;
  DType compute, value, gemm;
  bool gated = false;
  int columns = 0;  // of the output
  int columns_per_task = 0;
  Rows gate, up;  // a plain product has `up` only

  Problem(const GroupedGemmSpec& s, const GroupedGemmWeights& w, DType c)
      : spec(s),
        weights(w),
        compute(c),
        value(value_type(c)),
        gemm(gemm_dtype(c)),
        gated(s.epilogue && s.epilogue->gated),
        columns(s.output_columns()),
        columns_per_task(s.epilogue ? rows_per_activated_task(s.k, quantised())
                                    : rows_per_task(s.k)) {
    if (gated && spec.order == GateOrder::kGateUp) up = {columns, 1};
    if (gated && spec.order == GateOrder::kUpGate) gate = {columns, 1};
    if (gated && spec.order == GateOrder::kInterleaved) {
      gate = {0, 2};
      up = {1, 2};
    }
  }

  bool quantised() const { return compute == DType::kF8E4M3; }
  std::int64_t tasks_per_tile() const { return protocol::ceil_div(columns, columns_per_task); }
};

struct GroupedGemmEngine::Tile {
  int expert = 0;
  std::int64_t packed = 0;  // the first row's number in packed order
  std::int64_t input = 0;   // in the input's layout
  std::int64_t output = 0;  // in the output's layout
  int rows = 0;
  int padded = 0;  // rows rounded up to the matrix unit's width
};

struct GroupedGemmEngine::Call {
  std::uint64_t number = 0;
  const GroupedInput& input;
  const GroupedOutput& output;
  std::vector<Tile> tiles;
  std::int64_t output_stride, products_stride;

  Call(std::uint64_t n, const Problem& problem, const GroupedInput& in, const GroupedOutput& out,
       std::span<const std::int64_t> ends)
      : number(n),
        input(in),
        output(out),
        output_stride(out.row_stride == 0 ? problem.columns : out.row_stride),
        products_stride(out.products_stride == 0 ? problem.spec.n : out.products_stride) {
    const std::vector<std::int64_t> first_in = first_rows(in.layout, ends);
    const std::vector<std::int64_t> first_out = first_rows(out.layout, ends);
    for (std::size_t e = 0; e < ends.size(); ++e) {
      const std::int64_t begin = e == 0 ? 0 : ends[e - 1];
      constexpr protocol::TileShape kShape;
      const protocol::TokenTiles cut(static_cast<std::uint32_t>(ends[e] - begin), kShape);
      for (std::uint32_t t = 0; t < cut.count; ++t) {
        const int rows = static_cast<int>(cut.end(t) - cut.begin(t));
        tiles.push_back({static_cast<int>(e), begin + cut.begin(t), first_in[e] + cut.begin(t),
                         first_out[e] + cut.begin(t), rows,
                         protocol::round_up(rows, kShape.granule)});
      }
    }
  }

  // Null: the row is not stored.
  void* output_row(const Tile& tile, int r) const {
    const std::int64_t row =
        output.index.empty() ? tile.output + r : entry(output.index, tile.packed + r);
    return row < 0 ? nullptr : element(output.data, row * output_stride, output.dtype);
  }
  float weight(const Tile& tile, int r) const {
    return output.weights.empty()
               ? 1.0f
               : static_cast<const float*>(output.weights.data())[tile.packed + r];
  }
  void* products_row(const Tile& tile, int r) const {
    return element(output.products, (tile.output + r) * products_stride, output.dtype);
  }
};

// A thread's scratch, and what it does with a task.
class GroupedGemmEngine::Worker {
 public:
  explicit Worker(const Problem& problem)
      : problem_(problem), kernels_(kernels()), gemm_(problem.gemm) {}

  void run(const Call& call, std::size_t tile_index, int block) {
    const Tile& tile = call.tiles[tile_index];
    const int first = block * problem_.columns_per_task;
    const int m = std::min(problem_.columns_per_task, problem_.columns - first);
    gather(call, tile_index);
    multiply(tile, problem_.up.block(first, m), product_up_);
    if (problem_.gated) multiply(tile, problem_.gate.block(first, m), product_gate_);
    if (problem_.spec.epilogue) {
      if (call.output.products != nullptr) store_products(call, tile, first, m);
      activate(call, tile, first, m);
    } else {
      store_product(call, tile, first, m);
    }
  }

 private:
  void gather(const Call& call, std::size_t tile_index);
  void read_row(const MatrixView& x, std::int64_t row, std::byte* to);
  void multiply(const Tile& tile, const WeightBlock& block, std::vector<float>& product) {
    product.resize(std::max(product.size(), static_cast<std::size_t>(block.rows) *
                                                static_cast<std::size_t>(tile.padded)));
    gemm_.multiply(problem_.weights.matrices[static_cast<std::size_t>(tile.expert)], block,
                   tile.padded, gathered_.data(), problem_.spec.k, product.data());
  }
  void activate(const Call& call, const Tile& tile, int first, int m);
  void store_product(const Call& call, const Tile& tile, int first, int m);
  void store_products(const Call& call, const Tile& tile, int first, int m);
  // Stores rows of a block in scratch, [rows][m] of `dtype`, in the output, times their weights.
  void store_rows(const Call& call, const Tile& tile, int first, int m, DType dtype);
  // Returns the biases of a block of gate's or up's rows; null if there are none.
  const float* bias(const Tile& tile, const WeightBlock& block, std::vector<float>& scratch) const {
    const std::vector<VectorView>& all = problem_.weights.biases;
    if (all.empty()) return nullptr;
    return floats_of(all[static_cast<std::size_t>(tile.expert)], block.first, block.rows,
                     block.step, scratch);
  }
  std::byte* scratch(int rows, int m, DType dtype) {
    rows_.resize(std::max(rows_.size(), static_cast<std::size_t>(rows) *
                                            static_cast<std::size_t>(m) * size_of(dtype)));
    return rows_.data();
  }
  // out[r][i] = product[i][r] + bias[i], r < the tile's rows, rows of `out` at address_of(r).
  template <typename AddressOf>
  void scatter(const std::vector<float>& product, const float* bias, const Tile& tile, int m,
               DType dtype, AddressOf&& address_of) {
    addresses_.resize(static_cast<std::size_t>(tile.rows));
    for (int r = 0; r < tile.rows; ++r) addresses_[static_cast<std::size_t>(r)] = address_of(r);
    kernels_.scatter(product.data(), bias, m, tile.padded, tile.rows, addresses_.data(), dtype);
  }

  const Problem& problem_;
  const Kernels& kernels_;
  ExpertGemm gemm_;
  std::vector<std::byte> gathered_;  // one tile, [padded][K] in the GEMM's type
  std::uint64_t gathered_call_ = 0;  // the call of that tile; 0: none
  std::size_t gathered_tile_ = 0;
  std::vector<std::byte> row_;  // a token on its way there, in the value type
  std::vector<float> product_gate_, product_up_;
  std::vector<float> gate_bias_, up_bias_;  // where they have to be converted
  std::vector<std::byte> rows_;             // a block of the output
  std::vector<void*> addresses_;
};

void GroupedGemmEngine::Worker::gather(const Call& call, std::size_t tile_index) {
  if (gathered_call_ == call.number && gathered_tile_ == tile_index) return;
  const Tile& tile = call.tiles[tile_index];
  const std::size_t row_bytes = gemm_.row_bytes(problem_.spec.k);
  gathered_call_ = 0;
  gathered_.resize(std::max(gathered_.size(), static_cast<std::size_t>(tile.padded) * row_bytes));
  std::byte* to = gathered_.data();
  for (int r = 0; r < tile.rows; ++r, to += row_bytes) {
    const std::int64_t row = tile.input + r;
    read_row(call.input.x, call.input.index.empty() ? row : entry(call.input.index, row), to);
  }
  std::memset(to, 0, static_cast<std::size_t>(tile.padded - tile.rows) * row_bytes);
  gathered_call_ = call.number;
  gathered_tile_ = tile_index;
}

// Reads a token as the layer does: rounds it to the type of values, and then to that of the GEMM.
void GroupedGemmEngine::Worker::read_row(const MatrixView& x, std::int64_t row, std::byte* to) {
  const std::int64_t k = problem_.spec.k;
  if (x.dtype == DType::kF8E4M3) {
    gemm_.unpack(static_cast<const std::uint8_t*>(x.row(row)), x.f32_scale() + row * x.scale_stride,
                 k, 1, to);
    return;
  }
  const void* in = x.row(row);
  DType dtype = x.dtype;
  if (dtype != problem_.value && (problem_.quantised() || problem_.value != problem_.gemm)) {
    row_.resize(static_cast<std::size_t>(k) * size_of(problem_.value));
    kernels_.convert(in, dtype, row_.data(), problem_.value, k, 1);
    in = row_.data();
    dtype = problem_.value;
  }
  if (problem_.quantised()) {
    gemm_.requantize(static_cast<const std::uint16_t*>(in), k, to);
  } else {
    kernels_.convert(in, dtype, to, problem_.gemm, k, 1);
  }
}

void GroupedGemmEngine::Worker::activate(const Call& call, const Tile& tile, int first, int m) {
  // One rounding: weights multiply values that are not rounded yet.
  const DType dtype = call.output.weights.empty() ? call.output.dtype : DType::kF32;
  const bool gated = problem_.gated;
  kernels_.activate(*problem_.spec.epilogue, gated ? product_gate_.data() : nullptr,
                    product_up_.data(),
                    gated ? bias(tile, problem_.gate.block(first, m), gate_bias_) : nullptr,
                    bias(tile, problem_.up.block(first, m), up_bias_), m, tile.padded,
                    scratch(tile.padded, m, dtype), dtype, m);
  store_rows(call, tile, first, m, dtype);
}

void GroupedGemmEngine::Worker::store_product(const Call& call, const Tile& tile, int first,
                                              int m) {
  const bool weighted = !call.output.weights.empty();
  const DType dtype = weighted ? DType::kF32 : call.output.dtype;
  std::byte* const rows = scratch(tile.rows, m, dtype);
  const float* const its_bias = bias(tile, problem_.up.block(first, m), up_bias_);
  scatter(product_up_, its_bias, tile, m, dtype, [&](int r) -> void* {
    void* const out = weighted ? nullptr : call.output_row(tile, r);
    // Rows that are not stored have to go somewhere.
    return out == nullptr ? element(rows, std::int64_t{r} * m, dtype) : element(out, first, dtype);
  });
  if (weighted) store_rows(call, tile, first, m, dtype);
}

void GroupedGemmEngine::Worker::store_rows(const Call& call, const Tile& tile, int first, int m,
                                           DType dtype) {
  for (int r = 0; r < tile.rows; ++r) {
    void* const out = call.output_row(tile, r);
    if (out == nullptr) continue;
    kernels_.convert(element(rows_.data(), std::int64_t{r} * m, dtype), dtype,
                     element(out, first, call.output.dtype), call.output.dtype, m,
                     call.weight(tile, r));
  }
}

void GroupedGemmEngine::Worker::store_products(const Call& call, const Tile& tile, int first,
                                               int m) {
  const DType dtype = call.output.dtype;
  const auto store = [&](const std::vector<float>& product, const Problem::Rows& part) {
    const float* const its_bias = bias(tile, part.block(first, m), up_bias_);
    const int column = part.first + first * part.step;
    const auto in_place = [&](int r) {
      return static_cast<void*>(element(call.products_row(tile, r), column, dtype));
    };
    if (part.step == 1) {
      scatter(product, its_bias, tile, m, dtype, in_place);
      return;
    }
    std::byte* const rows = scratch(tile.rows, m, dtype);
    scatter(product, its_bias, tile, m, dtype,
            [&](int r) -> void* { return element(rows, std::int64_t{r} * m, dtype); });
    const std::size_t size = size_of(dtype);
    for (int r = 0; r < tile.rows; ++r) {
      auto* to = static_cast<std::byte*>(in_place(r));
      const std::byte* in = element(rows, std::int64_t{r} * m, dtype);
      for (int i = 0; i < m; ++i, in += size, to += size * static_cast<std::size_t>(part.step)) {
        std::memcpy(to, in, size);
      }
    }
  };
  store(product_up_, problem_.up);
  if (problem_.gated) store(product_gate_, problem_.gate);
}

GroupedGemmEngine::GroupedGemmEngine(const GroupedGemmSpec& spec, const GroupedGemmWeights& weights,
                                     DType compute, int num_threads)
    : problem_(std::make_unique<Problem>(spec, weights, compute)),
      pool_(threads_of(num_threads, 1), [] { thread_local const SingleThreadedLibrary confined; }) {
  for (int i = 0; i < pool_.size(); ++i) workers_.emplace_back(*problem_);
}
GroupedGemmEngine::~GroupedGemmEngine() = default;

void GroupedGemmEngine::run(const GroupedInput& input, const GroupedOutput& output,
                            std::span<const std::int64_t> ends) {
  const Call call(++call_, *problem_, input, output, ends);
  const std::int64_t blocks = problem_->tasks_per_tile();
  const std::int64_t tasks = static_cast<std::int64_t>(call.tiles.size()) * blocks;
  if (tasks == 0) return;
  const SingleThreadedLibrary confined;
  std::atomic<std::int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  pool_.run([&](int i) {
    try {
      for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
        workers_[static_cast<std::size_t>(i)].run(call, static_cast<std::size_t>(task / blocks),
                                                  static_cast<int>(task % blocks));
      }
    } catch (...) {
      next.store(tasks, std::memory_order_relaxed);
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  });
  if (failure) std::rethrow_exception(failure);
}

}  // namespace switchyard::cpu
