#include "exchange/host_layer.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/plural.h"
#include "fabric/fabric.h"
#include "fabric/scoped_fabric.h"
#include "layer/shared_beside.h"
#include "network/proxy.h"
#include "switchyard/error.h"
#include "switchyard/routing.h"

namespace switchyard {
namespace {

// How the layer of these ranks deals experts to them. Ranks that would not have their own number
// each count as having as many as the one with the most.
protocol::ExpertPartition experts_of(const std::vector<int>& ranks,
                                     const protocol::ExpertPartition& places) {
  const auto num_ranks = static_cast<int>(ranks.size());
  int most = 0;
  protocol::ExpertPartition dealt{0, num_ranks};
  for (const int r : ranks) {
    most = std::max(most, places.count(r));
    dealt.num_experts += places.count(r);
  }
  for (int i = 0; i < num_ranks; ++i) {
    if (places.count(ranks[static_cast<std::size_t>(i)]) != dealt.count(i)) {
      return {num_ranks * most, num_ranks};
    }
  }
  return dealt;
}

}  // namespace

void require_host_layers(const network::Hosts& hosts, const protocol::ExpertPartition& places) {
  for (int h = 0; h < hosts.num_hosts(); ++h) {
    const std::vector<int>& ranks = hosts.ranks_of(h);
    if (ranks.size() != hosts.ranks_of(0).size()) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("host {} has {}, and host 0 has {}; layers of GPUs on several hosts "
                              "need as many on every host: start them so, or use the CPU engine",
                              h, plural(ranks.size(), "rank"), hosts.ranks_of(0).size()));
    }
    const protocol::ExpertPartition dealt = experts_of(ranks, places);
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (places.count(ranks[i]) != 0 || dealt.count(static_cast<int>(i)) == 0) continue;
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format("rank {} has no expert of {}, and others of its host have too many for it to "
                      "have none; give each rank an expert by a placement, or use fewer ranks",
                      ranks[i], places.num_experts));
    }
  }
}

std::unique_ptr<LayerEngine> StagedContext::make_networks(
    const World& of, const LayerSpec& networks, const MoeWeights& weights, std::int64_t max_tokens,
    std::chrono::milliseconds deadline) const {
  LayerOptions how;
  how.backend = kernels;
  how.max_tokens = static_cast<int>(std::max<std::int64_t>(max_tokens, 1));
  how.compute = compute;
  how.deadline = deadline;
  if (kernels == Backend::kCpu) return cpu::make_engine(of, networks, weights, how, nullptr);
  how.cuda.device = options.cuda.device;
  // One SM is left for the kernel that waits in the caller's stream: a launch that needs all
  // others' blocks at once could never begin beside it.
  how.cuda.reserved_sms = options.cuda.reserved_sms + 1;
  how.cuda.schedule = options.cuda.schedule;
  // The number of rows that came must not change bits, as it does not on one host.
  if (!how.cuda.schedule.splits) how.cuda.schedule.splits = 1;
  how.cuda.cooperative_launch = options.cuda.cooperative_launch;
  return gpu::make_engine(of, networks, weights, how, nullptr);
}

HostLayer::HostLayer(StagedContext& context)
    : context_(context),
      hosts_(context.world.fabric().proxy()->hosts()),
      places_{context.options.placement.num_places(context.spec.num_experts), context.world.size()},
      world_(make_scoped_fabric(context.world.fabric().host())) {
  const int rank = context.world.rank();
  if (!context.options.placement.expert_at.empty()) {
    place_of_ =
        places_for(context.options.placement, context.spec.num_experts, rank, context.world.size());
  }
  const std::vector<int>& ranks = hosts_.ranks_of(hosts_.host_of(rank));
  const protocol::ExpertPartition dealt = experts_of(ranks, places_);
  expert_.assign(static_cast<std::size_t>(places_.num_experts), -1);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const int begin = places_.begin(ranks[i]);
    for (int p = begin; p < places_.end(ranks[i]); ++p) {
      expert_[static_cast<std::size_t>(p)] = dealt.begin(static_cast<int>(i)) + p - begin;
    }
  }
  num_experts_ = dealt.num_experts;
  top_k_ = std::min(context.spec.top_k, num_experts_);
}

void HostLayer::make(const MoeWeights& weights, std::int64_t most_rows) {
  if (num_experts_ == 0) return;
  const LayerSpec& whole = context_.spec;
  LayerSpec spec = spec_of_networks(whole, num_experts_, whole.intermediate, whole.expert_bias);
  spec.top_k = top_k_;
  spec.weight_on_input = whole.weight_on_input;
  // This deadline is shorter than that of ranks of other hosts, which wait for results: they would
  // see only which rank has none yet, not which is to blame. It is not much shorter, because busy
  // machines make short waits long.
  const std::chrono::milliseconds deadline =
      std::max(context_.options.deadline / 2, std::chrono::milliseconds(1));
  engine_ = context_.make_networks(world_, spec, weights_of_host(weights), most_rows, deadline);
  const auto slots = static_cast<std::size_t>(top_k_);
  device_ids_ = context_.allocate(most_rows, slots * sizeof(std::int32_t));
  device_weights_ = context_.allocate(most_rows, slots * sizeof(float));
}

MoeWeights HostLayer::weights_of_host(const MoeWeights& all) const {
  const std::vector<int>& ranks = hosts_.ranks_of(hosts_.host_of(context_.world.rank()));
  const protocol::ExpertPartition dealt{num_experts_, static_cast<int>(ranks.size())};
  const int rank = context_.world.rank(), index = hosts_.local_index(rank);
  MoeWeights weights;
  weights.experts.resize(static_cast<std::size_t>(num_experts_));
  for (int e = 0; e < dealt.count(index); ++e) {
    // Experts that it only counts as having are its first one again. No slot chooses them.
    const int place = places_.begin(rank) + (e < places_.count(rank) ? e : 0);
    weights.experts[static_cast<std::size_t>(dealt.begin(index)) + static_cast<std::size_t>(e)] =
        all.experts[static_cast<std::size_t>(place)];
  }
  weights.owner = all.owner;
  return weights;
}

void HostLayer::add_rows(std::span<const Slot> slots, std::vector<std::int64_t>& rows) {
  const std::vector<std::int32_t>& expert_at = context_.options.placement.expert_at;
  const auto of_row = static_cast<std::size_t>(top_k_);
  std::size_t to = ids_.size();
  ids_.resize(to + slots.size() / top_k() * of_row, kNoExpert);
  weights_.resize(ids_.size(), 0.0f);
  for (std::size_t first = 0; first < slots.size(); first += top_k(), to += of_row) {
    std::size_t next = to;
    for (const Slot& slot : slots.subspan(first, top_k())) {
      // (It comes from another host.)
      if (slot.place < 0 || slot.place >= places_.num_experts) continue;
      const auto place = static_cast<std::size_t>(slot.place);
      if (expert_[place] < 0 || next == to + of_row) continue;
      ids_[next] = expert_[place];
      weights_[next++] = slot.weight;
      ++rows[expert_at.empty() ? place : static_cast<std::size_t>(expert_at[place])];
    }
  }
}

void HostLayer::pass(const MatrixView& tokens, void* results) {
  ForwardInput input;
  input.activations = tokens;
  context_.store(device_ids_.get(), ids_.data(), ids_.size() * sizeof(std::int32_t));
  context_.store(device_weights_.get(), weights_.data(), weights_.size() * sizeof(float));
  input.topk_ids = SlotView(device_ids_.get(), DType::kI32, ids_.size());
  input.topk_weights = SlotView(device_weights_.get(), DType::kF32, weights_.size());
  input.stream = context_.device.stream();
  ForwardOutput output;
  output.data = results;
  output.dtype = context_.value();
  engine_->forward(input, output);
}

}  // namespace switchyard
