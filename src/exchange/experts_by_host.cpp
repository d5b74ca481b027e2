// The routed experts of a layer over hosts in two levels: the exchange takes a token to one rank of
// each host that has experts of it, and a layer of that host's ranks does the rest. For the
// exchange a rank is an expert; what a token's slots are travels beside it.
#include <algorithm>
#include <chrono>

#include "exchange/staged_experts.h"
#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "network/hosts.h"
#include "network/proxy.h"
#include "protocol/partition.h"
#include "switchyard/error.h"
#include "switchyard/routing.h"

namespace switchyard {
namespace {

const network::Hosts& hosts_of(const World& world) { return world.fabric().proxy()->hosts(); }

// A slot of a token, as it travels.
struct Slot {
  std::int32_t place;  // over all ranks; -1: none
  float weight;
};

class ByHost final : public StagedExperts {
 public:
  ByHost(StagedSite& site, const MoeWeights& weights);

  void compute(const MatrixView& tokens, const std::vector<std::int32_t>& ids,
               const std::vector<float>& weights, std::vector<std::int64_t>& rows) override;
  void refresh() override {
    if (layer_) layer_->refresh(site_.device.stream());
  }
  void rebind(const MoeWeights& weights) override {
    if (layer_) layer_->rebind(weights_of_host(weights), nullptr);
  }

 private:
  static ExchangeProblem problem_of(const StagedSite& site);
  void set_up();
  MoeWeights weights_of_host(const MoeWeights& all) const;
  std::size_t slots_of(std::int64_t tokens) const {
    return static_cast<std::size_t>(tokens) * static_cast<std::size_t>(site_.spec.top_k);
  }
  void address(const std::vector<std::int32_t>& ids, const std::vector<float>& weights);
  void list_slots(std::int64_t first, std::int64_t count, std::vector<std::int64_t>& rows);
  void pass(std::int64_t first, std::int64_t count);

  const network::Hosts& hosts_;
  const int host_;
  const protocol::ExpertPartition places_;
  std::vector<std::int32_t> place_of_;  // [E]; empty: an expert's place is its number
  std::vector<std::int32_t> on_host_;   // [places]: the number among this host's, or -1
  int num_on_host_ = 0, top_k_ = 0;     // of the host's layer
  int passes_ = 1;                      // of the host's layer in each of this one: on all its ranks
  World beside_;                        // the ranks of this host
  std::unique_ptr<LayerEngine> layer_;  // null if the host has no experts
  StagedSite::Buffer ids_, weights_;    // [chunk, top_k_], on the device
  Mapping slots_, came_slots_;          // of own tokens, and of rows
  std::vector<std::int32_t> gateways_, host_ids_;
  std::vector<float> host_weights_;
};

ExchangeProblem ByHost::problem_of(const StagedSite& site) {
  ExchangeSpec spec;
  spec.hidden = site.spec.hidden;
  spec.num_experts = site.world.size();
  spec.top_k = std::min(site.spec.top_k, hosts_of(site.world).num_hosts());
  spec.max_tokens = site.options.max_tokens;
  spec.dispatch = site.quantised() ? DType::kF8E4M3 : site.value();
  spec.combine = site.value();
  spec.weights = CombineWeights::kNone;
  ExchangeProblem problem(spec, site.world.rank(), site.world.size());
  problem.attached_bytes = static_cast<std::size_t>(site.spec.top_k) * sizeof(Slot);
  return problem;
}

ByHost::ByHost(StagedSite& site, const MoeWeights& weights)
    : StagedExperts(site),
      hosts_(hosts_of(site.world)),
      host_(hosts_.host_of(site.world.rank())),
      places_{site.options.placement.num_places(site.spec.num_experts), site.world.size()},
      beside_(site.world.fabric().host()) {
  if (!site.options.placement.expert_at.empty()) {
    place_of_ = places_for(site.options.placement, site.spec.num_experts, site.world.rank(),
                           site.world.size());
  }
  on_host_.assign(static_cast<std::size_t>(places_.num_experts), -1);
  for (const int r : hosts_.ranks_of(host_)) {
    for (int p = places_.begin(r); p < places_.end(r); ++p) {
      on_host_[static_cast<std::size_t>(p)] = num_on_host_++;
    }
  }
  top_k_ = std::min(site.spec.top_k, num_on_host_);
  make_exchange(problem_of(site));
  attempt_together(site.world.fabric(), [&] { set_up(); });
  attempt_together(site.world.fabric(), [&] {
    if (num_on_host_ == 0) return;
    LayerSpec spec =
        spec_of_networks(site.spec, num_on_host_, site.spec.intermediate, site.spec.expert_bias);
    spec.top_k = top_k_;
    spec.weight_on_input = site.spec.weight_on_input;
    // Shorter than that of ranks of other hosts, which wait for results: they would see only who
    // has none yet, not who is to blame.
    const std::chrono::milliseconds deadline =
        std::max(site.options.deadline * 3 / 4, std::chrono::milliseconds(1));
    layer_ = site.make_networks(beside_, spec, weights_of_host(weights), chunk_, deadline);
  });
}

void ByHost::set_up() {
  const std::int64_t tokens = site_.options.max_tokens;
  // The same on all ranks of the host.
  const std::int64_t most = tokens * (1 + hosts_.max_sources());
  const std::int64_t capacity = problem().rows_needed();
  make_rows(capacity, std::min(most, std::max(site_.most_rows, std::int64_t{1})));
  passes_ = static_cast<int>(protocol::ceil_div(most, chunk_));
  slots_ = Mapping::anonymous(bytes_of_rows(tokens, problem().attached_bytes));
  came_slots_ = Mapping::anonymous(bytes_of_rows(capacity, problem().attached_bytes));
  handle_->attached = slots_.data();
  handle_->came_attached = came_slots_.data();
  if (num_on_host_ == 0) return;
  ids_ = site_.allocate(chunk_, static_cast<std::size_t>(top_k_) * sizeof(std::int32_t));
  weights_ = site_.allocate(chunk_, static_cast<std::size_t>(top_k_) * sizeof(float));
}

MoeWeights ByHost::weights_of_host(const MoeWeights& all) const {
  MoeWeights weights;
  weights.experts.resize(static_cast<std::size_t>(num_on_host_));
  for (int p = places_.begin(site_.world.rank()); p < places_.end(site_.world.rank()); ++p) {
    const auto place = static_cast<std::size_t>(p);
    weights.experts[static_cast<std::size_t>(on_host_[place])] = all.experts[place];
  }
  weights.owner = all.owner;
  return weights;
}

// Where each token goes, and what its slots are.
void ByHost::address(const std::vector<std::int32_t>& ids, const std::vector<float>& weights) {
  const auto top_k = static_cast<std::size_t>(site_.spec.top_k);
  const auto ways = static_cast<std::size_t>(problem().spec.top_k);
  const std::size_t tokens = ids.size() / top_k;
  auto* const slots = reinterpret_cast<Slot*>(slots_.data());
  gateways_.assign(tokens * ways, kNoExpert);
  for (std::size_t t = 0; t < tokens; ++t) {
    std::uint64_t seen = 0;  // hosts
    std::size_t way = t * ways;
    for (std::size_t s = t * top_k; s < (t + 1) * top_k; ++s) {
      const std::int32_t id = ids[s];
      const std::int32_t place =
          id < 0 || place_of_.empty() ? id : place_of_[static_cast<std::size_t>(id)];
      slots[s] = {place, weights[s]};
      if (place < 0) continue;
      const int host = hosts_.host_of(places_.owner(place));
      const std::uint64_t bit = std::uint64_t{1} << host;
      if ((seen & bit) != 0) continue;
      seen |= bit;
      const int rank = site_.world.rank();
      gateways_[way++] = host == host_ ? rank : hosts_.gateway(rank, host);
    }
  }
}

// Of rows [first, first + count): the slots that are this host's, in the order of k.
void ByHost::list_slots(std::int64_t first, std::int64_t count, std::vector<std::int64_t>& rows) {
  const auto of_token = static_cast<std::size_t>(site_.spec.top_k);
  const auto of_row = static_cast<std::size_t>(top_k_);
  const auto* const slots = reinterpret_cast<const Slot*>(came_slots_.data()) + slots_of(first);
  host_ids_.assign(static_cast<std::size_t>(count) * of_row, kNoExpert);
  host_weights_.assign(host_ids_.size(), 0.0f);
  for (std::size_t row = 0; row < static_cast<std::size_t>(count); ++row) {
    std::size_t to = row * of_row;
    for (std::size_t k = 0; k < of_token; ++k) {
      const Slot& slot = slots[row * of_token + k];
      if (slot.place < 0) continue;
      const std::int32_t number = on_host_[static_cast<std::size_t>(slot.place)];
      if (number < 0) continue;
      host_ids_[to] = number;
      host_weights_[to++] = slot.weight;
      ++rows[static_cast<std::size_t>(expert_at(slot.place))];
    }
  }
}

void ByHost::pass(std::int64_t first, std::int64_t count) {
  ForwardInput input;
  input.activations = load_rows(first, count);
  site_.store(ids_.get(), host_ids_.data(), host_ids_.size() * sizeof(std::int32_t));
  site_.store(weights_.get(), host_weights_.data(), host_weights_.size() * sizeof(float));
  input.topk_ids = SlotView(ids_.get(), DType::kI32, host_ids_.size());
  input.topk_weights = SlotView(weights_.get(), DType::kF32, host_weights_.size());
  input.stream = site_.device.stream();
  ForwardOutput results;
  results.data = results_.get();
  results.dtype = site_.value();
  layer_->forward(input, results);
  save_results(first, count);
  // Kernels find only at their end that somebody did not come: what was saved may be nothing.
  layer_->check();
}

void ByHost::compute(const MatrixView& tokens, const std::vector<std::int32_t>& ids,
                     const std::vector<float>& weights, std::vector<std::int64_t>& rows) {
  address(ids, weights);
  DispatchInput input;
  input.tokens = tokens;
  input.ids = gateways_;
  dispatch(input, {});
  // A rank of this host that still waits for another host is no fault of its own.
  exchange_->await_host();
  try {
    for (int i = 0; i < passes_ && layer_; ++i) {
      const std::int64_t first = std::min<std::int64_t>(i * chunk_, num_rows_);
      const std::int64_t count = std::min<std::int64_t>(chunk_, num_rows_ - first);
      list_slots(first, count, rows);
      pass(first, count);
    }
  } catch (const TimeoutError& error) {
    // What ended all ranks' work may have ended the host's layer, too.
    exchange_->check();
    const WaitFailure& failure = error.failure();
    if (failure.peer_rank < 0) throw;
    const int peer = hosts_.ranks_of(host_)[static_cast<std::size_t>(failure.peer_rank)];
    exchange_->give_up(
        peer, std::chrono::nanoseconds(static_cast<std::int64_t>(failure.waited_seconds * 1e9)));
    exchange_->check();
    throw;
  }
  send_results();
}

}  // namespace

bool can_share_by_host(const World& world, int num_places) {
  const network::Hosts& hosts = hosts_of(world);
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
  return std::make_unique<ByHost>(site, weights);
}

}  // namespace switchyard
