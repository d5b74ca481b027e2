#include "exchange/host_experts.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <span>
#include <thread>
#include <utility>

#include "base/quantize.h"
#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "network/proxy.h"
#include "switchyard/grouped_gemm.h"
#include "switchyard/routing.h"

namespace switchyard {
namespace {

using network::Lane;
using network::RowsPut;
using Rows = StagingDevice::Rows;

constexpr std::uint64_t kPage = 4096;

// Codes, and their scales behind them, where tokens are quantised. Rows of a kernel begin at
// multiples of 16 bytes.
std::uint64_t bytes_of_token(const StagedContext& context) {
  const auto columns = static_cast<std::uint64_t>(context.spec.hidden);
  if (!context.quantised()) return columns * size_of(context.value());
  const std::uint64_t groups = protocol::ceil_div(columns, std::uint64_t{kQuantGroup});
  return protocol::round_up(columns + groups * sizeof(float), std::uint64_t{16});
}

// out = the sums of rows, in the order of their terms, on the device's stream.
void sum_rows(const StagedContext& context, const MatrixView& rows, const SlotView& positions,
              const SlotView& factors, std::size_t terms, const ForwardOutput& out) {
  const auto num_terms = static_cast<int>(terms);
  if (context.kernels == Backend::kCpu) {
    unpermute(rows, positions, factors, num_terms, out);
  } else {
    unpermute(rows, positions, factors, num_terms, out,
              {context.device.stream(), context.options.cuda.device});
  }
}

}  // namespace

NetworkLayout::NetworkLayout(std::uint64_t max_tokens, std::uint64_t others,
                             std::uint64_t bytes_of_token, std::uint64_t bytes_of_result)
    : hosts(others), token_bytes(bytes_of_token), result_bytes(bytes_of_result) {
  // (Both are powers of two, so the larger is a multiple of the other.)
  tokens = protocol::round_up(max_tokens, std::max(kPage / std::gcd(kPage, token_bytes),
                                                   kPage / std::gcd(kPage, result_bytes)));
}

HostExperts::HostExperts(StagedContext& context, const MoeWeights& weights)
    : context_(context),
      hosts_(context.world.fabric().proxy()->hosts()),
      host_(hosts_.host_of(context.world.rank())),
      shared_(context.spec.shared_intermediate > 0),
      layer_(context) {
  const World& world = context.world;
  // A token of the exchange is the slots of one of the layer, and a rank is its expert.
  ExchangeSpec spec;
  spec.hidden = static_cast<int>(2 * top_k());
  spec.dispatch = DType::kF32;
  spec.num_experts = world.size();
  spec.top_k = std::min(context.spec.top_k, hosts_.num_hosts() - 1);
  spec.max_tokens = context.options.max_tokens;
  spec.weights = CombineWeights::kNone;
  static_assert(sizeof(Slot) == 2 * sizeof(float));
  ExchangeProblem problem(spec, world.rank(), world.size());
  problem.without_results = true;
  ExchangeOptions options;
  options.deadline = context.options.deadline;
  options.num_threads = 1;  // waking threads takes longer than the work
  exchange_ = cpu::make_exchange(world, problem, options);
  handle_ = exchange_->make_handle();
  attempt_together(world.fabric(), [&] { set_up(); });
  keys_ = gather(world.fabric(), region_->key());
  // A rank that waits in the host's layer learns by this that the world has failed.
  exchange_->on_abort(layer_.abort_later());
  attempt_together(world.fabric(), [&] { layer_.make(weights, chunk_); });
}

void HostExperts::set_up() {
  const std::int64_t tokens = context_.options.max_tokens;
  layout_ =
      NetworkLayout(static_cast<std::uint64_t>(tokens),
                    static_cast<std::uint64_t>(hosts_.num_hosts() - 1), bytes_of_token(context_),
                    static_cast<std::uint64_t>(context_.spec.hidden) * size_of(context_.value()));
  for (int h = 0; h < hosts_.num_hosts(); ++h) {
    if (h == host_) continue;
    Peer peer;
    peer.host = h;
    peer.rank = hosts_.gateway(context_.world.rank(), h);
    peer.window = static_cast<std::uint64_t>(host_ - (host_ > h));
    peers_.push_back(peer);
  }
  const std::int64_t most = tokens * hosts_.num_hosts();
  chunk_ = std::min(most, std::max(context_.most_rows, std::int64_t{1}));
  passes_ = static_cast<int>(protocol::ceil_div(most, chunk_));
  const std::int64_t received = exchange_->problem().rows_needed();
  slots_ = Mapping::anonymous(bytes_of_rows(tokens, top_k() * sizeof(Slot)));
  received_slots_ = Mapping::anonymous(bytes_of_rows(received, top_k() * sizeof(Slot)));
  origins_.resize(static_cast<std::size_t>(received));

  rows_ = context_.allocate(chunk_, layout_.token_bytes);
  shared_row_ = (1 + 3 * layout_.hosts) * layout_.tokens;
  if (!share_device_memory()) share_host_memory();
  const auto num_terms = tokens * static_cast<std::int64_t>(terms());
  positions_ = context_.allocate(num_terms, sizeof(std::int32_t));
  if (context_.spec.shared_sigmoid_gate) factors_ = context_.allocate(num_terms, sizeof(float));
  identity_ = context_.allocate(chunk_, sizeof(std::int32_t));
  std::vector<std::int32_t> identity(static_cast<std::size_t>(chunk_));
  std::iota(identity.begin(), identity.end(), 0);
  context_.store(identity_.get(), identity.data(), identity.size() * sizeof(std::int32_t));
  context_.device.await_stream();
}

// Returns false if the network or the device cannot do that.
bool HostExperts::share_device_memory() {
  Fabric& fabric = context_.world.fabric();
  if (!fabric.proxy()->takes_device_memory()) return false;
  const std::uint64_t shared = shared_ ? layout_.tokens * layout_.result_bytes : 0;
  StagingDevice::NetworkMemory memory =
      context_.device.allocate_for_network(layout_.bytes() + shared);
  if (memory.data == nullptr) return false;
  device_memory_ = std::move(memory.data);
  try {
    region_ = fabric.share_rows({device_memory_.get(), layout_.bytes()}, device_memory_,
                                memory.dmabuf.get());
  } catch (const Error&) {
    // A network may say that it takes device memory, and not be able to take this device's.
    device_memory_.reset();
    return false;
  }
  context_.device_bytes += layout_.bytes() + shared;
  return true;
}

void HostExperts::share_host_memory() {
  // Returned sums are copied to the device, where one window is enough.
  shared_row_ = (1 + 2 * layout_.hosts) * layout_.tokens;
  results_ =
      context_.allocate(static_cast<std::int64_t>(shared_row_ + (shared_ ? layout_.tokens : 0)),
                        layout_.result_bytes);
  if (context_.quantised()) {
    quantised_ = context_.allocate(context_.options.max_tokens, layout_.token_bytes);
  }
  host_memory_ = std::make_shared<Mapping>(Mapping::anonymous(layout_.bytes()));
  const auto lend = [&](std::uint64_t at, std::uint64_t bytes) {
    context_.device.lend(host_memory_->data() + at, bytes);
  };
  const std::uint64_t tokens = layout_.tokens * layout_.token_bytes,
                      results = layout_.tokens * layout_.result_bytes;
  lend(0, tokens);
  lend(layout_.result(layout_.tokens), layout_.hosts * results);
  for (std::uint64_t parity = 0; parity < 2; ++parity) {
    for (std::uint64_t host = 0; host < layout_.hosts; ++host) {
      lend(layout_.received(parity, host), tokens);
      lend(layout_.result(layout_.returned_row(parity, host)), results);
    }
  }
  region_ =
      context_.world.fabric().share_rows({host_memory_->data(), layout_.bytes()}, host_memory_, -1);
}

ExchangeStats HostExperts::traffic() {
  ExchangeStats stats = exchange_->stats();
  stats.dispatch_bytes += token_bytes_sent_;
  stats.combine_bytes += result_bytes_sent_;
  return stats;
}

// ------------------------------------------------------------------------------------ dispatch

void HostExperts::load_tokens(const MatrixView& x) {
  tokens_ = x.rows;
  if (x.rows == 0) return;
  const std::size_t width = layout_.token_bytes, count = static_cast<std::size_t>(x.rows);
  if (context_.quantised()) {
    quantise(x, on_device() ? memory() : quantised_.get());
    if (on_device()) return;
    const std::size_t bytes = width * count;
    context_.device.enqueue_to_host(memory(), bytes, quantised_.get(), bytes, {bytes, 1});
    return;
  }
  if (x.dtype != context_.value()) return round(x);
  const std::size_t pitch = static_cast<std::size_t>(x.row_stride) * size_of(x.dtype);
  if (on_device()) {
    context_.device.enqueue_on_device(memory(), width, x.data, pitch, {width, count});
  } else {
    context_.device.enqueue_to_host(memory(), width, x.data, pitch, {width, count});
  }
}

// Converts tokens to the value type: the network's rows are of no other.
void HostExperts::round(const MatrixView& x) {
  for (std::int64_t first = 0; first < x.rows; first += chunk_) {
    MatrixView part = x;
    part.data = x.row(first);
    part.rows = std::min(chunk_, x.rows - first);
    const auto count = static_cast<std::size_t>(part.rows);
    const std::size_t bytes = count * layout_.token_bytes;
    std::byte* const to = memory() + static_cast<std::size_t>(first) * layout_.token_bytes;
    ForwardOutput rounded;
    rounded.data = on_device() ? to : rows_.get();
    rounded.dtype = context_.value();
    sum_rows(context_, part, {identity_.get(), DType::kI32, count}, {}, 1, rounded);
    if (!on_device()) context_.device.enqueue_to_host(to, bytes, rows_.get(), bytes, {bytes, 1});
  }
}

// Quantises rows of the device into other rows of it.
void HostExperts::quantise(const MatrixView& x, std::byte* to) const {
  const std::size_t pitch = layout_.token_bytes;
  if (x.dtype != DType::kF8E4M3)
    return context_.device.enqueue_quantized(to, pitch, x, context_.by_row);
  const auto columns = static_cast<std::size_t>(x.cols), rows = static_cast<std::size_t>(x.rows);
  const std::size_t scales = protocol::ceil_div(columns, std::size_t{kQuantGroup}) * sizeof(float);
  context_.device.enqueue_on_device(to, pitch, x.data, static_cast<std::size_t>(x.row_stride),
                                    {columns, rows});
  context_.device.enqueue_on_device(to + columns, pitch, x.scale,
                                    static_cast<std::size_t>(x.scale_stride) * sizeof(float),
                                    {scales, rows});
}

void HostExperts::compute(const std::vector<std::int32_t>& ids, const std::vector<float>& weights,
                          std::vector<std::int64_t>& rows) {
  ++calls_;
  address(ids, weights);
  put_tokens();
  exchange_slots();
  try {
    // A rank of this host that still waits for another host is no fault of its own.
    exchange_->await_host();
    run_passes(rows);
    put_results();
  } catch (const TimeoutError& error) {
    layer_.abort();
    blame(error);
  } catch (...) {
    layer_.abort();
    throw;
  }
  CombineInput elsewhere;  // in the network's memory
  elsewhere.rows.rows = num_received_;
  exchange_->combine_send(elsewhere, *handle_);
}

// Notes each token's slots, the hosts that it goes to, and where its sums will be, in the order of
// k.
void HostExperts::address(const std::vector<std::int32_t>& ids, const std::vector<float>& weights) {
  const auto hosts = static_cast<std::size_t>(exchange_->problem().spec.top_k);
  const auto tokens = static_cast<std::size_t>(tokens_);
  for (Peer& peer : peers_) peer.sent.clear();
  terms_.assign(tokens * terms(), -1);
  gateways_.assign(tokens * hosts, kNoExpert);
  for (std::size_t t = 0; t < tokens; ++t) {
    std::size_t term = t * terms(), sent = t * hosts;
    std::uint64_t seen = 0;  // hosts
    for (std::size_t s = t * top_k(); s < (t + 1) * top_k(); ++s) {
      const std::int32_t place = layer_.place_of(ids[s]);
      slots()[s] = {place, weights[s]};
      if (place < 0) continue;
      const int host = layer_.host_of(place);
      const std::uint64_t bit = std::uint64_t{1} << host;
      if ((std::exchange(seen, seen | bit) & bit) != 0) continue;
      if (host == host_) {
        terms_[term++] = static_cast<std::int32_t>(t);
        continue;
      }
      Peer& peer = peer_on(host);
      // Beside host memory the device has one window of returned sums.
      const std::uint64_t window = layout_.returned_row(
          on_device() ? parity() : 0, static_cast<std::uint64_t>(&peer - peers_.data()));
      terms_[term++] = static_cast<std::int32_t>(window + peer.sent.size());
      peer.sent.push_back(static_cast<std::uint32_t>(t));
      gateways_[sent++] = peer.rank;
    }
    if (shared_) terms_[(t + 1) * terms() - 1] = static_cast<std::int32_t>(shared_row_ + t);
  }
}

void HostExperts::put_tokens() {
  token_bytes_sent_ = 0;
  for (const Peer& peer : peers_) {
    puts_.clear();
    const std::uint64_t window = layout_.received(parity(), peer.window);
    for (std::size_t i = 0; i < peer.sent.size();) {
      std::size_t end = i + 1;
      while (end < peer.sent.size() && peer.sent[end] == peer.sent[end - 1] + 1) ++end;
      puts_.push_back({peer.sent[i] * layout_.token_bytes, window + i * layout_.token_bytes,
                       (end - i) * layout_.token_bytes});
      i = end;
    }
    token_bytes_sent_ += peer.sent.size() * layout_.token_bytes;
    region_->put(Lane::kDispatch, peer.host, keys_[static_cast<std::size_t>(peer.rank)], puts_);
  }
}

// Sends the slots of tokens to where the tokens go, and finds the rows of each host among all rows.
// They stand in the order of ranks, as they come.
void HostExperts::exchange_slots() {
  const auto columns = static_cast<std::int64_t>(2 * top_k());
  DispatchInput input;
  input.tokens = {slots_.data(), DType::kF32, tokens_, columns, columns};
  input.ids = gateways_;
  DispatchOutput output;
  output.rows = received_slots_.data();
  output.capacity = static_cast<std::int64_t>(origins_.size());
  output.num_rows = &num_received_;
  output.origins = origins_.data();
  exchange_->dispatch(input, output, *handle_, [] {});
  handle_->tokens = tokens_;
  handle_->received = true;
  for (Peer& peer : peers_) peer.received = 0;
  for (std::int32_t row = 0; row < num_received_; ++row) {
    Peer& peer = peer_on(hosts_.host_of(origins_[static_cast<std::size_t>(row)].rank));
    if (peer.received++ == 0) peer.first = tokens_ + row;
  }
}

// Computes all rows: this rank's tokens, then received ones.
void HostExperts::run_passes(std::vector<std::int64_t>& rows) {
  const std::int64_t all = tokens_ + num_received_;
  const auto add = [&](const Slot* from, std::int64_t begin, std::int64_t end) {
    if (begin >= end) return;
    layer_.add_rows({from + static_cast<std::size_t>(begin) * top_k(),
                     static_cast<std::size_t>(end - begin) * top_k()},
                    rows);
  };
  for (int i = 0; i < passes_ && layer_.exists(); ++i) {
    const std::int64_t first = std::min<std::int64_t>(i * chunk_, all);
    const std::int64_t last = std::min<std::int64_t>(first + chunk_, all);
    // Copies of the last pass read the lists of slots that are made anew.
    if (i > 0) context_.device.await_stream();
    layer_.clear_rows();
    add(slots(), first, std::min(last, tokens_));
    add(received_slots(), std::max(first - tokens_, std::int64_t{0}), last - tokens_);
    layer_.pass(load(first, last - first), result_at(static_cast<std::uint64_t>(first)));
  }
}

// Loads rows [first, first + count) of all as the rows of a pass.
MatrixView HostExperts::load(std::int64_t first, std::int64_t count) {
  // Loads the wanted ones of `rows` rows at `at`, the first of which has number `begin`.
  const auto part = [&](std::int64_t begin, std::int64_t rows, const std::byte* at,
                        bool of_device) {
    const std::int64_t from = std::max(begin, first), to = std::min(begin + rows, first + count);
    if (from >= to) return;
    const auto offset = [&](std::int64_t i) {
      return static_cast<std::size_t>(i) * layout_.token_bytes;
    };
    std::byte* const into = rows_.get() + offset(from - first);
    const std::size_t bytes = offset(to - from);
    at += offset(from - begin);
    if (of_device) {
      context_.device.enqueue_on_device(into, bytes, at, bytes, {bytes, 1});
    } else {
      context_.device.enqueue_to_device(into, bytes, at, bytes, {bytes, 1});
    }
  };
  const bool own_on_device = on_device() || quantised_ != nullptr;
  part(0, tokens_, quantised_ != nullptr ? quantised_.get() : memory(), own_on_device);
  for (std::size_t p = 0; p < peers_.size(); ++p) {
    part(peers_[p].first, peers_[p].received, memory() + layout_.received(parity(), p),
         on_device());
  }
  const std::int64_t hidden = context_.spec.hidden;
  MatrixView rows{rows_.get(), context_.value(), count, hidden, hidden};
  if (context_.quantised()) {
    rows.dtype = DType::kF8E4M3;
    rows.row_stride = static_cast<std::int64_t>(layout_.token_bytes);
    rows.scale = reinterpret_cast<const float*>(rows_.get() + hidden);
    rows.scale_rows = 1;
    rows.scale_cols = kQuantGroup;
    rows.scale_stride = static_cast<std::int64_t>(layout_.token_bytes / sizeof(float));
  }
  return rows;
}

// ------------------------------------------------------------------------------------- combine

void HostExperts::put_results() {
  result_bytes_sent_ = 0;
  const std::size_t bytes = static_cast<std::size_t>(num_received_) * layout_.result_bytes;
  const auto tokens = static_cast<std::uint64_t>(tokens_);
  // In the network's memory results of received rows stand behind room for all of this rank's.
  const std::uint64_t first = on_device() ? tokens : layout_.tokens;
  if (!on_device() && bytes != 0) {
    context_.device.enqueue_to_host(memory() + layout_.result(first), bytes, result_at(tokens),
                                    bytes, {bytes, 1});
  }
  context_.device.await_stream();
  // Kernels find only at their end that a rank did not come: then there are no results.
  layer_.check();
  for (const Peer& peer : peers_) {
    if (peer.received == 0) continue;
    const std::uint64_t row = first + static_cast<std::uint64_t>(peer.first - tokens_);
    const RowsPut put{layout_.result(row),
                      layout_.result(layout_.returned_row(parity(), peer.window)),
                      static_cast<std::uint64_t>(peer.received) * layout_.result_bytes};
    result_bytes_sent_ += put.bytes;
    region_->put(Lane::kCombine, peer.host, keys_[static_cast<std::size_t>(peer.rank)], {&put, 1});
  }
}

void HostExperts::sum(const ForwardOutput& output, const std::vector<float>& shared_factors) {
  exchange_->combine_recv({}, *handle_);  // Results are there when all ranks say so.
  await_sent();
  if (tokens_ == 0) return;
  for (std::size_t p = 0; p < peers_.size() && !on_device(); ++p) {
    const std::size_t bytes = peers_[p].sent.size() * layout_.result_bytes;
    if (bytes == 0) continue;
    context_.device.enqueue_to_device(result_at(layout_.returned_row(0, p)), bytes,
                                      memory() + layout_.result(layout_.returned_row(parity(), p)),
                                      bytes, {bytes, 1});
  }
  context_.store(positions_.get(), terms_.data(), terms_.size() * sizeof(std::int32_t));
  SlotView factors;  // all of them 1
  if (factors_ != nullptr) {
    factor_of_term_.assign(terms_.size(), 1.0f);
    for (std::size_t t = 0; t < static_cast<std::size_t>(tokens_); ++t) {
      factor_of_term_[(t + 1) * terms() - 1] = shared_factors[t];
    }
    context_.store(factors_.get(), factor_of_term_.data(), factor_of_term_.size() * sizeof(float));
    factors = SlotView(factors_.get(), DType::kF32, factor_of_term_.size());
  }
  const auto rows = static_cast<std::int64_t>(shared_row_) + (shared_ ? tokens_ : 0);
  const std::int64_t hidden = context_.spec.hidden;
  ForwardOutput out = output;
  out.topk_ids = {};
  out.topk_weights = {};
  sum_rows(context_, {result_at(0), context_.value(), rows, hidden, hidden},
           {positions_.get(), DType::kI32, terms_.size()}, factors, terms(), out);
  context_.device.await_stream();
}

// Blames a rank by its number in the world, not by that in the host's layer.
void HostExperts::blame(const TimeoutError& error) {
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

// Waits until all rows have left, before the memory is written again. A receiver takes rows
// whatever it waits for: if none of them leaves for so long, it has stopped, or the way to it is
// cut.
void HostExperts::await_sent() {
  Clock::time_point since = Clock::now();
  for (std::uint64_t before = 0, left; (left = region_->unsent()) != 0;) {
    exchange_->check();
    const Clock::time_point now = Clock::now();
    if (left != before) since = now;
    before = left;
    if (now - since >= context_.options.deadline) {
      const int host = region_->unsent_host();
      if (host >= 0) exchange_->give_up(peer_on(host).rank, now - since);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

}  // namespace switchyard
