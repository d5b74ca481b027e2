#include "support/layers.h"

namespace switchyard::testing {

template void forward_share(MoeLayer&, const Batch&, const Shares&, int, BatchResult&,
                            const AdjustCall&);

Matrix Matrix::random(std::int64_t rows, std::int64_t cols, DType dtype, std::uint64_t seed) {
  Matrix m(rows, cols, dtype);
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < rows * cols; ++i) m.set(i, normal(generator));
  return m;
}

Matrix Matrix::quantised(const Matrix& x, bool by_row) {
  Matrix m(x.rows_, x.cols_, DType::kF8E4M3);
  const std::int64_t step = by_row ? m.groups() : 1;  // groups that share a scale
  for (std::int64_t r = 0; r < x.rows_; ++r) {
    for (std::int64_t g = 0; g < m.groups(); g += step) {
      const std::int64_t begin = r * x.cols_ + g * kQuantGroup;
      const std::int64_t end = std::min(begin + step * kQuantGroup, (r + 1) * x.cols_);
      float amax = 0;
      for (std::int64_t i = begin; i < end; ++i) {
        // A NaN stays: nothing compares with it.
        if (!(std::abs(x.get(i)) <= amax) && !std::isnan(amax)) amax = std::abs(x.get(i));
      }
      const GroupScale s = group_scale(amax);
      for (std::int64_t i = begin; i < end; ++i) {
        m.bytes_[static_cast<std::size_t>(i)] = std::byte{f32_to_f8e4m3(x.get(i) * s.inverse)};
      }
      std::fill_n(m.scales_.begin() + r * m.groups() + g, step, s.scale);
    }
  }
  return m;
}

MatrixView Matrix::rows_from(std::int64_t first, std::int64_t count) const {
  MatrixView view{bytes_.data() + static_cast<std::size_t>(first * cols_) * size_of(dtype_), dtype_,
                  count, cols_, cols_};
  if (!scales_.empty()) {
    view.scale = scales_.data() + first * groups();
    view.scale_rows = 1;
    view.scale_cols = kQuantGroup;
    view.scale_stride = groups();
  }
  return view;
}

Matrix Matrix::copy_of_rows(std::int64_t first, std::int64_t count) const {
  Matrix some(count, cols_, dtype_);
  const MatrixView from = rows_from(first, count);
  if (count == 0) return some;
  std::memcpy(some.bytes_.data(), from.data, some.bytes_.size());
  if (from.scale != nullptr)
    std::copy_n(from.f32_scale(), some.scales_.size(), some.scales_.begin());
  return some;
}

std::vector<float> Matrix::floats() const {
  std::vector<float> out(static_cast<std::size_t>(rows_ * cols_));
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = get(static_cast<std::int64_t>(i));
  return out;
}

Shares Shares::even(std::int64_t total, int ranks) {
  std::vector<std::int64_t> counts;
  for (int r = 0; r < ranks; ++r) counts.push_back(total * (r + 1) / ranks - total * r / ranks);
  return of(counts);
}

Shares Shares::of(const std::vector<std::int64_t>& counts) {
  Shares shares;
  std::int64_t at = 0;
  for (const std::int64_t count : counts) {
    shares.first.push_back(at);
    shares.count.push_back(count);
    at += count;
  }
  return shares;
}

LaidOutWeights::LaidOutWeights(const LayerSpec& spec, const MoeWeights& from, GateUpLayout layout)
    : views(from) {
  const std::size_t size = size_of(from.experts[0].up.dtype);
  const std::int64_t i = spec.intermediate, h = spec.hidden, matrix = i * h;
  memory.resize(from.experts.size() * static_cast<std::size_t>(3 * matrix) * size);
  const auto put = [&](MatrixView& view, std::int64_t first, std::int64_t row_stride,
                       std::int64_t col_stride) {
    const MatrixView source = view;
    view.data = memory.data() + static_cast<std::size_t>(first) * size;
    view.row_stride = row_stride;
    view.col_stride = col_stride;
    for (std::int64_t r = 0; r < view.rows; ++r) {
      for (std::int64_t c = 0; c < view.cols; ++c) {
        std::memcpy(memory.data() +
                        static_cast<std::size_t>(first + r * row_stride + c * col_stride) * size,
                    static_cast<const std::byte*>(source.row(r)) +
                        static_cast<std::size_t>(c * source.col_stride) * size,
                    size);
      }
    }
  };
  const auto num_experts = static_cast<std::int64_t>(from.experts.size());
  for (std::int64_t e = 0; e < num_experts; ++e) {
    FfnWeights& expert = views.experts[static_cast<std::size_t>(e)];
    const std::int64_t first = e * 2 * matrix, down = num_experts * 2 * matrix + e * matrix;
    switch (layout) {
      case GateUpLayout::kGateFirst:
        put(expert.gate, first, h, 1);
        put(expert.up, first + matrix, h, 1);
        break;
      case GateUpLayout::kUpFirst:
        put(expert.up, first, h, 1);
        put(expert.gate, first + matrix, h, 1);
        break;
      case GateUpLayout::kInTurn:
        put(expert.gate, first, 2 * h, 1);
        put(expert.up, first + h, 2 * h, 1);
        break;
      case GateUpLayout::kTransposed:
        put(expert.gate, first, 1, 2 * i);
        put(expert.up, first + i, 1, 2 * i);
        put(expert.down, down, 1, h);
        continue;
    }
    put(expert.down, down, i, 1);
  }
}

MoeWeights LaidOutWeights::at(const std::byte* copy) const {
  MoeWeights moved = views;
  const auto move = [&](MatrixView& view) {
    view.data = copy + (static_cast<const std::byte*>(view.data) - memory.data());
  };
  for (FfnWeights& expert : moved.experts) {
    move(expert.gate);
    move(expert.up);
    move(expert.down);
  }
  return moved;
}

std::vector<std::exception_ptr> run_ranks(const std::vector<World>& worlds,
                                          const std::function<void(const World&)>& body) {
  std::vector<std::exception_ptr> failures(worlds.size());
  Threads threads(0, static_cast<int>(worlds.size()), kThreadRemedy, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    try {
      body(worlds[r]);
    } catch (...) {
      failures[r] = std::current_exception();
    }
  });
  threads.join();
  return failures;
}

void expect_thrown(const std::vector<std::exception_ptr>& failures, ErrorCode code,
                   const std::string& part) {
  for (const std::exception_ptr& failure : failures) {
    ASSERT_TRUE(failure);
    const std::string words = test::error_of(code, [&] { std::rethrow_exception(failure); });
    EXPECT_NE(words.find(part), std::string::npos) << words;
  }
}

BatchResult empty_result(const LayerSpec& spec, const Batch& batch, int ranks, DType output_dtype) {
  const auto slots =
      static_cast<std::size_t>(batch.x.rows()) * static_cast<std::size_t>(spec.top_k);
  return {Matrix(batch.x.rows(), spec.hidden, output_dtype), std::vector<std::int32_t>(slots, -7),
          std::vector<float>(slots, NAN),
          std::vector<ForwardStats>(static_cast<std::size_t>(ranks))};
}

MoeWeights weights_of_rank(MoeWeights weights, int rank, int num_ranks) {
  const auto num_experts = static_cast<int>(weights.experts.size());
  const ExpertRange own = own_experts(num_experts, rank, num_ranks);
  for (int e = 0; e < num_experts; ++e) {
    if (e < own.begin || e >= own.end) weights.experts[static_cast<std::size_t>(e)] = {};
  }
  return weights;
}

BatchResult run_batch(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                      const Shares& shares, DType output_dtype, LayerOptions options,
                      const AdjustCall& adjust) {
  const int ranks = static_cast<int>(shares.count.size());
  BatchResult result = empty_result(spec, batch, ranks, output_dtype);
  if (options.cpu.num_threads == 0) options.cpu.num_threads = 1;
  run_all_ranks(World::threads(ranks), [&](const World& world) {
    MoeLayer layer(world, spec, weights_of_rank(weights, world.rank(), ranks), options);
    forward_share(layer, batch, shares, world.rank(), result, adjust);
  });
  return result;
}

LayerSpec small_spec(const ModelEntry& entry) {
  const ModelConfig config = parse_config(entry.config_json, entry.name);
  LayerSpec spec = *config.layers.at(static_cast<std::size_t>(config.moe_layers().front()));
  spec.hidden = 64;
  spec.intermediate = 48;
  if (spec.shared_intermediate > 0) spec.shared_intermediate = 80;
  if (spec.routing.num_groups == 1) spec.num_experts = std::min(spec.num_experts, 24);
  if (spec.routing.num_groups > 1) spec.num_experts = spec.routing.num_groups * 4;
  spec.top_k = std::min(spec.top_k, spec.num_experts);
  return spec;
}

}  // namespace switchyard::testing
