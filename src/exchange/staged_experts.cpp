#include "exchange/staged_experts.h"

#include <utility>

#include "base/quantize.h"
#include "fabric/collective.h"
#include "fabric/fabric.h"

namespace switchyard {

LayerSpec spec_of_networks(const LayerSpec& spec, int networks, int intermediate, bool biased) {
  LayerSpec inner;
  inner.hidden = spec.hidden;
  inner.intermediate = intermediate;
  inner.num_experts = networks;
  inner.top_k = 1;
  inner.activation = spec.activation;
  inner.expert_bias = biased;
  return inner;
}

std::unique_ptr<LayerEngine> StagedSite::make_networks(const World& of, const LayerSpec& networks,
                                                       const MoeWeights& weights,
                                                       std::int64_t max_tokens,
                                                       std::chrono::milliseconds deadline) const {
  LayerOptions how;
  how.backend = kernels;
  how.max_tokens = static_cast<int>(std::max<std::int64_t>(max_tokens, 1));
  how.compute = compute;
  how.deadline = deadline;
  if (kernels == Backend::kCpu) return cpu::make_engine(of, networks, weights, how, nullptr);
  how.cuda = options.cuda;
  // One SM is left for the kernel that waits in the caller's stream: a launch that needs all
  // others' blocks at once could never begin beside it.
  ++how.cuda.reserved_sms;
  // The number of rows that came must not change bits, as it does not on one host.
  if (!how.cuda.schedule.splits) how.cuda.schedule.splits = 1;
  return gpu::make_engine(of, networks, weights, how, nullptr);
}

void StagedExperts::make_exchange(const ExchangeProblem& problem) {
  ExchangeOptions options;
  options.deadline = site_.options.deadline;
  // If it carries only tokens' slots, waking threads takes longer than the work.
  if (problem.without_results) options.num_threads = 1;
  exchange_ = cpu::make_exchange(site_.world, problem, options);
  handle_ = exchange_->make_handle();
}

void StagedExperts::make_rows(std::int64_t capacity, std::int64_t chunk) {
  const std::size_t scales = problem().scale_bytes();
  chunk_ = chunk;
  rows_ = site_.allocate(chunk_, problem().token_bytes());
  if (scales != 0) row_scales_ = site_.allocate(chunk_, scales);
  results_ = site_.allocate(chunk_, result_bytes());
  host_rows_ = lent_memory(site_.device, bytes_of_rows(capacity, problem().token_bytes()));
  host_row_scales_ = Mapping::anonymous(bytes_of_rows(capacity, scales));
  host_results_ = lent_memory(site_.device, bytes_of_rows(capacity, result_bytes()));
}

void StagedExperts::dispatch(const DispatchInput& input, DispatchOutput output) {
  output.rows = host_rows_.data();
  if (site_.quantised()) output.scales = reinterpret_cast<float*>(host_row_scales_.data());
  exchange(input, output);
}

void StagedExperts::exchange(const DispatchInput& input, DispatchOutput output) {
  output.capacity = problem().rows_needed();
  output.num_rows = &num_rows_;
  exchange_->dispatch(input, output, *handle_, [] {});
  handle_->tokens = input.tokens.rows;
  handle_->received = true;
}

MatrixView StagedExperts::load_rows(std::int64_t first, std::int64_t count) {
  const std::size_t bytes = problem().token_bytes(), scales = problem().scale_bytes();
  const auto at = static_cast<std::size_t>(first), n = static_cast<std::size_t>(count);
  site_.store(rows_.get(), host_rows_.data() + at * bytes, n * bytes);
  MatrixView rows{rows_.get(), token_type(), count, site_.spec.hidden, site_.spec.hidden};
  if (scales != 0) {
    site_.store(row_scales_.get(), host_row_scales_.data() + at * scales, n * scales);
    rows.scale = reinterpret_cast<const float*>(row_scales_.get());
    rows.scale_rows = 1;
    rows.scale_cols = kQuantGroup;
    rows.scale_stride = groups();
  }
  return rows;
}

void StagedExperts::save_results(std::int64_t first, std::int64_t count) {
  const std::size_t bytes = static_cast<std::size_t>(count) * result_bytes();
  if (bytes == 0) return;
  site_.device.to_host(host_results_.data() + static_cast<std::size_t>(first) * result_bytes(),
                       bytes, results_.get(), bytes, {bytes, 1});
}

void StagedExperts::send_results() {
  CombineInput results;
  results.rows = {host_results_.data(), site_.value(), num_rows_, site_.spec.hidden,
                  site_.spec.hidden};
  exchange_->combine_send(results, *handle_);
}

namespace {

class ByRank final : public StagedExperts {
 public:
  ByRank(StagedSite& site, const MoeWeights& weights) : StagedExperts(site) {
    const LayerSpec& spec = site.spec;
    ExchangeSpec exchange;
    exchange.hidden = spec.hidden;
    exchange.num_experts = spec.num_experts;
    exchange.top_k = spec.top_k;
    exchange.max_tokens = site.options.max_tokens;
    exchange.dispatch = site.quantised() ? DType::kF8E4M3 : site.value();
    exchange.combine = site.value();
    const bool sums = site.options.pre_sum_per_host;
    exchange.weights = spec.weight_on_input ? CombineWeights::kNone
                       : sums               ? CombineWeights::kBySender
                                            : CombineWeights::kByReceiver;
    exchange.pre_sum_per_host = sums;
    exchange.placement = site.options.placement;
    make_exchange(ExchangeProblem(exchange, site.world.rank(), site.world.size()));
    attempt_together(site.world.fabric(), [&] { set_up(weights); });
  }

  void compute(const Tokens& tokens, const std::vector<std::int32_t>& ids,
               const std::vector<float>& weights, std::vector<std::int64_t>& rows) override;
  void refresh() override {
    if (networks_) networks_->refresh(site_.device.stream());
  }
  void rebind(const MoeWeights& weights) override {
    if (networks_) networks_->rebind(own_weights(weights), nullptr);
  }

 private:
  void set_up(const MoeWeights& weights);
  MoeWeights own_weights(const MoeWeights& all) const {
    const ExpertRange range = problem().own();
    MoeWeights own;
    own.experts.assign(all.experts.begin() + range.begin, all.experts.begin() + range.end);
    own.owner = all.owner;
    return own;
  }

  const World alone_ = World::single();
  std::unique_ptr<LayerEngine> networks_;
  StagedSite::Buffer ids_, weights_;  // of rows: a network, and 1 or the slot's weight
  Mapping host_weights_;
  std::vector<std::int32_t> ends_, expert_of_row_;
};

void ByRank::set_up(const MoeWeights& weights) {
  const std::int64_t capacity = problem().rows_needed();
  host_weights_ = Mapping::anonymous(bytes_of_rows(capacity, sizeof(float)));
  ends_.resize(static_cast<std::size_t>(problem().num_own()));
  make_rows(capacity, std::min(capacity, site_.most_rows));
  if (ends_.empty()) return;
  const LayerSpec& spec = site_.spec;
  LayerSpec inner =
      spec_of_networks(spec, problem().num_own(), spec.intermediate, spec.expert_bias);
  inner.weight_on_input = spec.weight_on_input;
  networks_ =
      site_.make_networks(alone_, inner, own_weights(weights), chunk_, site_.options.deadline);
  ids_ = site_.allocate(chunk_, sizeof(std::int32_t));
  weights_ = site_.allocate(chunk_, sizeof(float));
  const std::vector<float> ones(static_cast<std::size_t>(chunk_), 1.0f);
  site_.store(weights_.get(), ones.data(), ones.size() * sizeof(float));
  site_.device.await_stream();
}

void ByRank::compute(const Tokens& tokens, const std::vector<std::int32_t>& ids,
                     const std::vector<float>& weights, std::vector<std::int64_t>& rows) {
  DispatchInput input;
  input.tokens = tokens.rows;
  input.ids = ids;
  input.weights = weights;
  DispatchOutput output;
  output.ends = ends_.data();
  output.weights = reinterpret_cast<float*>(host_weights_.data());
  dispatch(input, output);

  expert_of_row_.resize(static_cast<std::size_t>(num_rows_));
  std::int32_t row = 0;
  for (std::size_t e = 0; e < ends_.size(); ++e) {
    const int place = problem().own().begin + static_cast<int>(e);
    rows[static_cast<std::size_t>(expert_at(place))] += ends_[e] - row;
    for (; row < ends_[e]; ++row) {
      expert_of_row_[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(e);
    }
  }
  for (std::int64_t first = 0; first < num_rows_; first += chunk_) {
    const std::int64_t count = std::min<std::int64_t>(chunk_, num_rows_ - first);
    const auto at = static_cast<std::size_t>(first), n = static_cast<std::size_t>(count);
    ForwardInput of_rows;
    of_rows.activations = load_rows(first, count);
    site_.store(ids_.get(), &expert_of_row_[at], n * sizeof(std::int32_t));
    of_rows.topk_ids = SlotView(ids_.get(), DType::kI32, n);
    if (site_.spec.weight_on_input) {
      site_.store(weights_.get(), host_weights_.data() + at * sizeof(float), n * sizeof(float));
    }
    of_rows.topk_weights = SlotView(weights_.get(), DType::kF32, n);
    of_rows.stream = site_.device.stream();
    ForwardOutput results;
    results.data = results_.get();
    results.dtype = site_.value();
    networks_->forward(of_rows, results);
    save_results(first, count);
  }
  send_results();
}

}  // namespace

std::unique_ptr<StagedExperts> make_experts_by_rank(StagedSite& site, const MoeWeights& weights) {
  return std::make_unique<ByRank>(site, weights);
}

}  // namespace switchyard
