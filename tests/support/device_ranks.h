// Worlds of ranks on the GPUs that there are, which several ranks share if they must.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "gpu/device.h"
#include "support/device_batch.h"
#include "support/layers.h"
#include "switchyard/routing.h"
#include "switchyard/world.h"

namespace switchyard::testing {

// A batch in bf16 whose routing is drawn with this balancedness.
inline Batch routed(const LayerSpec& spec, std::int64_t tokens, double beta,
                    DType dtype = DType::kBF16) {
  SyntheticRouting routing =
      synthetic_routing(static_cast<int>(tokens), spec.num_experts, spec.top_k, beta, 9);
  return {Matrix::random(tokens, spec.hidden, dtype, 17),
          std::move(routing.ids),
          std::move(routing.weights),
          {}};
}

// Makes `options` those of one of `ranks` ranks, rank r on GPU r modulo their number. All blocks of
// ranks on the same GPU must run at once: each rank gets its part of the multiprocessors, and a few
// less, because pairs of blocks do not fit everywhere.
inline LayerOptions options_of_rank(int rank, int ranks, LayerOptions options) {
  constexpr int kSpare = 8;
  const int devices = gpu::device_count();
  options.backend = Backend::kCuda;
  options.cuda.device = rank % devices;
  const int neighbours = (ranks + devices - 1) / devices;
  const int sms = gpu::device_info(options.cuda.device).num_sms;
  if (neighbours > 1) options.cuda.reserved_sms = sms - std::max(2, sms / neighbours - kSpare);
  if (options.deadline.count() == 0) options.deadline = std::chrono::seconds(10);
  return options;
}

inline Batch share_of_batch(const Batch& batch, const Shares& shares, int rank, int top_k) {
  const auto first = static_cast<std::size_t>(shares.first[static_cast<std::size_t>(rank)]);
  const auto count = static_cast<std::size_t>(shares.count[static_cast<std::size_t>(rank)]);
  Batch share{
      batch.x.copy_of_rows(static_cast<std::int64_t>(first), static_cast<std::int64_t>(count)),
      {},
      {},
      {}};
  const auto cut = [&](const auto& from, auto& to, std::size_t k) {
    if (from.empty()) return;
    const auto begin = from.begin() + static_cast<std::ptrdiff_t>(first * k);
    to.assign(begin, begin + static_cast<std::ptrdiff_t>(count * k));
  };
  cut(batch.topk_ids, share.topk_ids, static_cast<std::size_t>(top_k));
  cut(batch.topk_weights, share.topk_weights, static_cast<std::size_t>(top_k));
  cut(batch.token_ids, share.token_ids, 1);
  return share;
}

// Whether a rank's result has its rows of that of all ranks, bit by bit.
inline bool has_rows_of(const BatchResult& mine, const BatchResult& all, const Shares& shares,
                        int rank) {
  const auto r = static_cast<std::size_t>(rank);
  const MatrixView rows = all.output.rows_from(shares.first[r], shares.count[r]);
  return rows.rows == 0 ||
         std::memcmp(mine.output.view().data, rows.data,
                     static_cast<std::size_t>(rows.rows * rows.cols) * size_of(rows.dtype)) == 0;
}

// One rank's layer on its GPU, for the thread that plays the rank. Nothing may be allocated or
// freed while a pass is under way: that may wait for the other ranks on the GPU, which wait for
// this one.
class DeviceRank {
 public:
  DeviceRank(World world, const LayerSpec& spec, const MoeWeights& weights, int max_tokens,
             LayerOptions options = {})
      : world_(std::move(world)), spec_(spec) {
    options = options_of_rank(world_.rank(), world_.size(), options);
    options.max_tokens = max_tokens;
    gpu::set_device(options.cuda.device);
    stream_ = std::make_unique<gpu::Stream>();
    layer_ = std::make_unique<MoeLayer>(
        world_, spec, weights_of_rank(weights, world_.rank(), world_.size()), options);
  }
  ~DeviceRank() {
    try {
      world_.barrier();
    } catch (const Error&) {
      // A dead world has nobody to wait for.
    }
  }
  DeviceRank(const DeviceRank&) = delete;
  DeviceRank& operator=(const DeviceRank&) = delete;

  World& world() { return world_; }
  void destroy_layer() { layer_.reset(); }
  MoeLayer& layer() { return *layer_; }
  const gpu::Stream& stream() const { return *stream_; }

  // This rank's share of a batch, on the device.
  DeviceBatch share(const Batch& batch, const Shares& shares, DType output = DType::kBF16) const {
    return {spec_, share_of_batch(batch, shares, world_.rank(), spec_.top_k), output};
  }
  // Collective: a pass of a batch that is on the device.
  void forward(DeviceBatch& batch, const AdjustCall& adjust = {}) {
    batch.poison(*stream_);
    world_.barrier();
    batch.enqueue(*layer_, *stream_, adjust);
    stream_->synchronize();
    world_.barrier();
  }
  // Collective: this rank's share of the batch, into its place in `result`.
  void run(const Batch& batch, const Shares& shares, BatchResult& result,
           const AdjustCall& adjust = {}) {
    const int rank = world_.rank();
    const auto r = static_cast<std::size_t>(rank);
    DeviceBatch device = share(batch, shares, result.output.dtype());
    forward(device, adjust);
    BatchResult mine = device.fetch();
    const std::size_t slots = mine.ids.size();
    if (slots != 0) {
      const auto first = static_cast<std::size_t>(shares.first[r] * spec_.top_k);
      std::memcpy(result.output.row(shares.first[r]), mine.output.row(0),
                  static_cast<std::size_t>(shares.count[r] * spec_.hidden) *
                      size_of(result.output.dtype()));
      std::copy_n(mine.ids.begin(), slots, result.ids.begin() + static_cast<std::ptrdiff_t>(first));
      std::copy_n(mine.weights.begin(), slots,
                  result.weights.begin() + static_cast<std::ptrdiff_t>(first));
    }
    result.stats[r] = layer_->stats();
    world_.barrier();
  }

 private:
  World world_;
  LayerSpec spec_;
  std::unique_ptr<gpu::Stream> stream_;
  std::unique_ptr<MoeLayer> layer_;
};

// The batch through a fresh world of ranks on GPUs, `passes` times, which must all be the same.
inline BatchResult run_on_gpus(const LayerSpec& spec, const MoeWeights& weights, const Batch& batch,
                               const Shares& shares, DType output_dtype, int passes = 2,
                               LayerOptions options = {}, const AdjustCall& adjust = {}) {
  const int ranks = static_cast<int>(shares.count.size());
  const auto max_tokens =
      static_cast<int>(std::max<std::int64_t>(1, *std::ranges::max_element(shares.count)));
  std::vector<BatchResult> results(static_cast<std::size_t>(passes),
                                   empty_result(spec, batch, ranks, output_dtype));
  run_all_ranks(World::threads(ranks), [&](const World& world) {
    DeviceRank rank(world, spec, weights, max_tokens, options);
    for (BatchResult& result : results) rank.run(batch, shares, result, adjust);
  });
  for (const BatchResult& result : results) {
    EXPECT_TRUE(result.output == results[0].output) << "repeated";
    EXPECT_EQ(result.ids, results[0].ids) << "repeated";
  }
  return std::move(results[0]);
}

// Two ranks, each with half of the batch and room for eight tokens, refuse the call.
inline void expect_call_refused(const LayerSpec& spec, const MoeWeights& weights,
                                const Batch& batch, const AdjustCall& adjust, ErrorCode code,
                                const char* words) {
  const Shares shares = Shares::even(batch.x.rows(), 2);
  expect_thrown(run_ranks(World::threads(2),
                          [&](const World& world) {
                            DeviceRank rank(world, spec, weights, 8);
                            DeviceBatch share = rank.share(batch, shares);
                            share.enqueue(rank.layer(), rank.stream(), adjust);
                          }),
                code, words);
}

// In a world in which one rank makes the first pass and not the second, all others name it, and
// their layers are dead.
inline void expect_absent_is_named(const LayerSpec& spec, const MoeWeights& weights,
                                   const Batch& batch, const Shares& shares, int absent,
                                   const LayerOptions& options, const AdjustCall& adjust = {},
                                   const char* phase = "counts") {
  const int ranks = static_cast<int>(shares.count.size());
  const auto most = static_cast<int>(*std::ranges::max_element(shares.count));
  run_all_ranks(World::threads(ranks), [&](const World& world) {
    DeviceRank rank(world, spec, weights, most, options);
    DeviceBatch share = rank.share(batch, shares);
    rank.forward(share, adjust);
    const bool is_there = world.rank() != absent;
    if (is_there) share.enqueue(rank.layer(), rank.stream(), adjust);
    rank.stream().synchronize();
    rank.world().barrier();
    if (is_there) {
      const test::Blame blame = test::blame_of(
          absent, [&] { rank.layer().stats(); }, phase);
      EXPECT_EQ(blame.failure.epoch, 2u) << blame.words;
      EXPECT_TRUE(blame.code == ErrorCode::kTimeout || blame.code == ErrorCode::kAborted);
      EXPECT_THROW(share.enqueue(rank.layer(), rank.stream()), TimeoutError);
    }
    rank.world().barrier();
  });
}

}  // namespace switchyard::testing
