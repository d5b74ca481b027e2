// The routed experts of a layer over hosts in two levels: the exchange takes a token to one rank of
// each host that has experts of it, and a layer of that host's ranks does the rest. For the
// exchange a rank is an expert; a token's slots travel beside it.
#include "exchange/experts_by_host.h"

#include <algorithm>
#include <chrono>

#include "exchange/experts_by_rows.h"
#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "fabric/scoped_fabric.h"
#include "network/proxy.h"
#include "switchyard/error.h"

namespace switchyard {

ExpertsByHost::ExpertsByHost(StagedSite& site)
    : StagedExperts(site),
      hosts_(site.world.fabric().proxy()->hosts()),
      host_(hosts_.host_of(site.world.rank())),
      places_{site.options.placement.num_places(site.spec.num_experts), site.world.size()},
      beside_(make_scoped_fabric(site.world.fabric().host())) {
  if (!site.options.placement.expert_at.empty()) {
    place_of_ =
        places_for(site.options.placement, site.spec.num_experts, rank(), site.world.size());
  }
  on_host_.assign(static_cast<std::size_t>(places_.num_experts), -1);
  for (const int r : hosts_.ranks_of(host_)) {
    for (int p = places_.begin(r); p < places_.end(r); ++p) {
      on_host_[static_cast<std::size_t>(p)] = num_on_host_++;
    }
  }
  top_k_ = std::min(site.spec.top_k, num_on_host_);
}

ExchangeSpec ExpertsByHost::spec_of_ranks(int most_hosts) const {
  ExchangeSpec spec;
  spec.num_experts = site_.world.size();
  spec.top_k = std::min(site_.spec.top_k, most_hosts);
  spec.max_tokens = site_.options.max_tokens;
  spec.weights = CombineWeights::kNone;
  return spec;
}

void ExpertsByHost::make_slots(std::int64_t most) {
  passes_ = static_cast<int>(protocol::ceil_div(most, chunk_));
  slots_ = Mapping::anonymous(bytes_of_rows(site_.options.max_tokens, attached_bytes()));
  came_slots_ = Mapping::anonymous(bytes_of_rows(problem().rows_needed(), attached_bytes()));
  handle_->attached = slots_.data();
  handle_->came_attached = came_slots_.data();
  if (num_on_host_ == 0) return;
  ids_ = site_.allocate(chunk_, static_cast<std::size_t>(top_k_) * sizeof(std::int32_t));
  weights_ = site_.allocate(chunk_, static_cast<std::size_t>(top_k_) * sizeof(float));
}

void ExpertsByHost::make_layer(const MoeWeights& weights) {
  // A rank that waits in the host's layer learns by this that the world has failed.
  exchange_->on_abort([beside = beside_] { beside.abort(); });
  attempt_together(site_.world.fabric(), [&] {
    if (num_on_host_ == 0) return;
    LayerSpec spec =
        spec_of_networks(site_.spec, num_on_host_, site_.spec.intermediate, site_.spec.expert_bias);
    spec.top_k = top_k_;
    spec.weight_on_input = site_.spec.weight_on_input;
    // This deadline is shorter than that of ranks of other hosts, which wait for results: they
    // would see only which rank has none yet, not which is to blame. It is not much shorter,
    // because busy machines make short waits long.
    const std::chrono::milliseconds deadline =
        std::max(site_.options.deadline / 2, std::chrono::milliseconds(1));
    layer_ = site_.make_networks(beside_, spec, weights_of_host(weights), chunk_, deadline);
  });
}

MoeWeights ExpertsByHost::weights_of_host(const MoeWeights& all) const {
  MoeWeights weights;
  weights.experts.resize(static_cast<std::size_t>(num_on_host_));
  for (int p = places_.begin(rank()); p < places_.end(rank()); ++p) {
    const auto place = static_cast<std::size_t>(p);
    weights.experts[static_cast<std::size_t>(on_host_[place])] = all.experts[place];
  }
  weights.owner = all.owner;
  return weights;
}

void ExpertsByHost::add_rows(std::span<const Slot> slots, std::vector<std::int64_t>& rows) {
  const auto of_row = static_cast<std::size_t>(top_k_);
  std::size_t to = host_ids_.size();
  host_ids_.resize(to + slots.size() / top_k() * of_row, kNoExpert);
  host_weights_.resize(host_ids_.size(), 0.0f);
  for (std::size_t first = 0; first < slots.size(); first += top_k(), to += of_row) {
    std::size_t next = to;
    for (const Slot& slot : slots.subspan(first, top_k())) {
      // (It comes from another host.)
      if (slot.place < 0 || slot.place >= places_.num_experts) continue;
      const std::int32_t number = on_host_[static_cast<std::size_t>(slot.place)];
      if (number < 0 || next == to + of_row) continue;
      host_ids_[next] = number;
      host_weights_[next++] = slot.weight;
      ++rows[static_cast<std::size_t>(expert_at(slot.place))];
    }
  }
}

void ExpertsByHost::pass(const MatrixView& tokens, void* results) {
  ForwardInput input;
  input.activations = tokens;
  site_.store(ids_.get(), host_ids_.data(), host_ids_.size() * sizeof(std::int32_t));
  site_.store(weights_.get(), host_weights_.data(), host_weights_.size() * sizeof(float));
  input.topk_ids = SlotView(ids_.get(), DType::kI32, host_ids_.size());
  input.topk_weights = SlotView(weights_.get(), DType::kF32, host_weights_.size());
  input.stream = site_.device.stream();
  ForwardOutput output;
  output.data = results;
  output.dtype = site_.value();
  layer_->forward(input, output);
}

// Blames a rank by its number in the world, not by that in the host's layer.
void ExpertsByHost::blame(const TimeoutError& error) {
  // A failure of the whole world may have ended the host's layer, too.
  exchange_->check();
  const WaitFailure& failure = error.failure();
  if (failure.peer_rank < 0) throw error;
  const int peer = hosts_.ranks_of(host_)[static_cast<std::size_t>(failure.peer_rank)];
  exchange_->give_up(
      peer, std::chrono::nanoseconds(static_cast<std::int64_t>(failure.waited_seconds * 1e9)));
  exchange_->check();
  throw error;
}

namespace {

// The exchange carries tokens and sums.
class Carried final : public ExpertsByHost {
 public:
  Carried(StagedSite& site, const MoeWeights& weights) : ExpertsByHost(site) {
    ExchangeSpec spec = spec_of_ranks(hosts_.num_hosts());
    spec.hidden = site.spec.hidden;
    spec.dispatch = site.quantised() ? DType::kF8E4M3 : site.value();
    spec.combine = site.value();
    ExchangeProblem problem(spec, rank(), site.world.size());
    problem.attached_bytes = attached_bytes();
    make_exchange(problem);
    attempt_together(site.world.fabric(), [&] {
      // `most` is the same on all ranks of the host.
      const std::int64_t most = std::int64_t{site.options.max_tokens} * (1 + hosts_.max_sources());
      make_rows(problem.rows_needed(), std::min(most, std::max(site.most_rows, std::int64_t{1})));
      make_slots(most);
    });
    make_layer(weights);
  }

  void compute(const Tokens& tokens, const std::vector<std::int32_t>& ids,
               const std::vector<float>& weights, std::vector<std::int64_t>& rows) override {
    const auto ways = static_cast<std::size_t>(problem().spec.top_k);
    gateways_.assign(ids.size() / top_k() * ways, kNoExpert);
    std::size_t token = 0, way = 0;
    address(ids, weights, [&](std::size_t t, int host) {
      if (t != token) way = 0;
      token = t;
      gateways_[t * ways + way++] = host == host_ ? rank() : hosts_.gateway(rank(), host);
    });
    DispatchInput input;
    input.tokens = tokens.rows;
    input.ids = gateways_;
    dispatch(input, {});
    together([&] {
      for (int i = 0; i < passes_ && layer_; ++i) {
        const std::int64_t first = std::min<std::int64_t>(i * chunk_, num_rows_);
        const std::int64_t count = std::min<std::int64_t>(chunk_, num_rows_ - first);
        const std::size_t slots = static_cast<std::size_t>(count) * top_k();
        clear_rows();
        add_rows({came_slots() + static_cast<std::size_t>(first) * top_k(), slots}, rows);
        pass(load_rows(first, count), results_.get());
        save_results(first, count);
        // Kernels find only at their end that a rank did not come: the saved results may be void.
        layer_->check();
      }
    });
    send_results();
  }

 private:
  std::vector<std::int32_t> gateways_;
};

}  // namespace

bool can_share_by_host(const World& world, int num_places) {
  const network::Hosts& hosts = world.fabric().proxy()->hosts();
  const protocol::ExpertPartition places{num_places, world.size()};
  for (int h = 0; h < hosts.num_hosts(); ++h) {
    const std::vector<int>& ranks = hosts.ranks_of(h);
    int of_host = 0;
    for (const int r : ranks) of_host += places.count(r);
    const protocol::ExpertPartition alone{of_host, static_cast<int>(ranks.size())};
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (places.count(ranks[i]) != alone.count(static_cast<int>(i))) return false;
    }
  }
  return true;
}

std::unique_ptr<StagedExperts> make_experts_by_host(StagedSite& site, const MoeWeights& weights) {
  if (can_put_rows(site)) return make_experts_by_rows(site, weights);
  return std::make_unique<Carried>(site, weights);
}

}  // namespace switchyard
