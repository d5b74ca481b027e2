#include "exchange/experts_by_rows.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <span>
#include <thread>
#include <utility>

#include "base/quantize.h"
#include "exchange/experts_by_host.h"
#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "network/proxy.h"
#include "network/rows.h"
#include "switchyard/grouped_gemm.h"

namespace switchyard {
namespace {

using network::Lane;
using network::RowsPut;

// Where everything is in the memory that networks read and write. T is max_tokens, or a little more
// so that every part begins a page, as pinning wants it; S is the number of other hosts, which
// number from 0 on without the own one. Windows are there twice, and used in turn: see
// docs/exchange.md, "Why nobody is lapped".
//
//   tokens   [T]           this rank's, as they leave
//   came     [2][S][T]     others'
//   results  [T + S T]     of this rank's tokens, then of what came
//   back     [2][S][T]     sums of this rank's tokens
struct Layout {
  static constexpr std::uint64_t kPage = 4096;

  std::uint64_t tokens = 0, hosts = 0;              // T and S
  std::uint64_t token_bytes = 0, result_bytes = 0;  // of a row

  Layout() = default;
  Layout(std::uint64_t max_tokens, std::uint64_t others, std::uint64_t bytes_of_token,
         std::uint64_t bytes_of_result)
      : hosts(others), token_bytes(bytes_of_token), result_bytes(bytes_of_result) {
    // (Both are powers of two, so the larger is a multiple of the other.)
    tokens = protocol::round_up(max_tokens, std::max(kPage / std::gcd(kPage, token_bytes),
                                                     kPage / std::gcd(kPage, result_bytes)));
  }

  std::uint64_t window(std::uint64_t parity, std::uint64_t host) const {
    return (parity * hosts + host) * tokens;
  }
  std::uint64_t came(std::uint64_t parity, std::uint64_t host) const {
    return (tokens + window(parity, host)) * token_bytes;
  }
  // Rows of results, and what comes back behind them, are numbered together.
  std::uint64_t back_row(std::uint64_t parity, std::uint64_t host) const {
    return (1 + hosts) * tokens + window(parity, host);
  }
  std::uint64_t result(std::uint64_t row) const {
    return (1 + 2 * hosts) * tokens * token_bytes + row * result_bytes;
  }
  std::uint64_t bytes() const { return result((1 + 3 * hosts) * tokens); }
};

// Codes, and their scales behind them, where tokens are quantised. Rows of a kernel begin at
// multiples of 16 bytes.
std::uint64_t bytes_of_token(const StagedSite& site) {
  const auto columns = static_cast<std::uint64_t>(site.spec.hidden);
  if (!site.quantised()) return columns * size_of(site.value());
  const std::uint64_t groups = protocol::ceil_div(columns, std::uint64_t{kQuantGroup});
  return protocol::round_up(columns + groups * sizeof(float), std::uint64_t{16});
}

class ByRows final : public ExpertsByHost {
 public:
  ByRows(StagedSite& site, const MoeWeights& weights);

  std::byte* token_memory() override { return takes_from_device() ? nullptr : memory(); }
  bool takes_from_device() const override { return on_device() || site_.quantised(); }
  DType token_type() const override { return site_.value(); }
  bool sums_on_device() const override { return true; }
  void compute(const Tokens& given, const std::vector<std::int32_t>& ids,
               const std::vector<float>& weights, std::vector<std::int64_t>& rows) override;
  std::byte* shared_memory() override {
    return shared_ ? sums_at(static_cast<std::int64_t>(shared_row_)) : nullptr;
  }
  void sum_on_device(const ForwardOutput& output, std::int64_t tokens,
                     const std::vector<float>& shared_factors) override;
  ExchangeStats traffic() override {
    ExchangeStats stats = exchange_->stats();
    stats.dispatch_bytes += token_bytes_sent_;
    stats.combine_bytes += result_bytes_sent_;
    return stats;
  }

 private:
  // The rows to and from another host.
  struct Way {
    int host = 0;
    int rank = 0;                      // this one's neighbour there
    std::uint64_t own_number = 0;      // of this host, among the others there
    std::vector<std::uint32_t> sent;   // tokens, in order
    std::int64_t first = 0, came = 0;  // rows from there: among all, and how many
  };

  void set_up();
  bool share_device_memory();
  void share_host_memory();
  bool on_device() const { return device_memory_ != nullptr; }
  std::byte* memory() const { return on_device() ? device_memory_.get() : host_memory_->data(); }
  // The device's results, and the sums that came back.
  std::byte* sums_at(std::int64_t row) const {
    return (on_device() ? device_memory_.get() + layout_.result(0) : sums_.get()) +
           static_cast<std::uint64_t>(row) * layout_.result_bytes;
  }
  std::size_t number_of(int host) const {
    return static_cast<std::size_t>(host < host_ ? host : host - 1);
  }
  std::uint64_t parity() const { return calls_ & 1; }
  void take(const Tokens& given);
  void put_tokens();
  void exchange_slots(std::int64_t tokens);
  void find_rows(std::int64_t tokens);
  void quantise(const MatrixView& tokens, std::byte* to) const;
  MatrixView load(std::int64_t first, std::int64_t count, std::int64_t tokens);
  void put_results(std::int64_t tokens);
  void await_sent();

  Layout layout_;
  std::shared_ptr<Mapping> host_memory_;  // the memory that networks see,
  StagedSite::Buffer device_memory_;      // or this
  StagedSite::Buffer quantised_;          // beside host memory, of FP8: this rank's tokens
  StagedSite::Buffer sums_;               // beside host memory: [T + 2 S T, + T] results
  StagedSite::Buffer positions_, factors_;
  std::unique_ptr<network::RowsRegion> region_;
  std::vector<network::RowsKey> keys_;  // by rank
  std::vector<Way> ways_;               // by number
  std::vector<std::int32_t> gateways_, order_;
  std::vector<RowOrigin> origins_;
  std::vector<float> factor_of_slot_, rows_of_exchange_;
  std::vector<RowsPut> puts_;
  std::uint64_t calls_ = 0, shared_row_ = 0;
  std::uint64_t token_bytes_sent_ = 0, result_bytes_sent_ = 0;
  bool shared_ = false;
};

ByRows::ByRows(StagedSite& site, const MoeWeights& weights)
    : ExpertsByHost(site), shared_(site.spec.shared_intermediate > 0) {
  ExchangeSpec spec = spec_of_ranks(hosts_.num_hosts() - 1);
  spec.hidden = 1;
  spec.dispatch = spec.combine = DType::kF32;
  ExchangeProblem problem(spec, rank(), site.world.size());
  problem.attached_bytes = attached_bytes();
  problem.without_results = true;
  make_exchange(problem);
  Fabric& fabric = site.world.fabric();
  attempt_together(fabric, [&] { set_up(); });
  keys_ = gather(fabric, region_->key());
  make_layer(weights);
}

void ByRows::set_up() {
  layout_ = Layout(static_cast<std::uint64_t>(site_.options.max_tokens),
                   static_cast<std::uint64_t>(hosts_.num_hosts() - 1), bytes_of_token(site_),
                   static_cast<std::uint64_t>(site_.spec.hidden) * size_of(site_.value()));
  for (int h = 0; h < hosts_.num_hosts(); ++h) {
    if (h == host_) continue;
    Way way;
    way.host = h;
    way.rank = hosts_.gateway(rank(), h);
    way.own_number = static_cast<std::uint64_t>(host_ < h ? host_ : host_ - 1);
    ways_.push_back(way);
  }
  const std::int64_t tokens = site_.options.max_tokens;
  const std::int64_t most = tokens * hosts_.num_hosts();
  chunk_ = std::min(most, std::max(site_.most_rows, std::int64_t{1}));
  rows_ = site_.allocate(chunk_, layout_.token_bytes);
  make_slots(most);

  shared_row_ = (1 + 3 * layout_.hosts) * layout_.tokens;
  if (!share_device_memory()) share_host_memory();
  const std::int64_t terms = hosts_.num_hosts() + (shared_ ? 1 : 0);
  positions_ = site_.allocate(tokens * terms, sizeof(std::int32_t));
  factors_ = site_.allocate(tokens * terms, sizeof(float));
}

// Returns false if the network or the device cannot do that.
bool ByRows::share_device_memory() {
  Fabric& fabric = site_.world.fabric();
  if (!fabric.proxy()->takes_device_memory()) return false;
  const std::uint64_t shared = shared_ ? layout_.tokens * layout_.result_bytes : 0;
  StagingDevice::NetworkMemory memory = site_.device.allocate_for_network(layout_.bytes() + shared);
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
  site_.device_bytes += layout_.bytes() + shared;
  return true;
}

void ByRows::share_host_memory() {
  // Sums that come back are copied to the device, where one window is enough.
  shared_row_ = (1 + 2 * layout_.hosts) * layout_.tokens;
  sums_ = site_.allocate(static_cast<std::int64_t>(shared_row_ + (shared_ ? layout_.tokens : 0)),
                         layout_.result_bytes);
  if (site_.quantised()) quantised_ = site_.allocate(site_.options.max_tokens, layout_.token_bytes);
  host_memory_ = std::make_shared<Mapping>(Mapping::anonymous(layout_.bytes()));
  const auto lend = [&](std::uint64_t at, std::uint64_t bytes) {
    site_.device.lend(host_memory_->data() + at, bytes);
  };
  const std::uint64_t tokens = layout_.tokens * layout_.token_bytes,
                      results = layout_.tokens * layout_.result_bytes;
  lend(0, tokens);
  lend(layout_.result(layout_.tokens), layout_.hosts * results);
  for (std::uint64_t parity = 0; parity < 2; ++parity) {
    for (std::uint64_t host = 0; host < layout_.hosts; ++host) {
      lend(layout_.came(parity, host), tokens);
      lend(layout_.result(layout_.back_row(parity, host)), results);
    }
  }
  region_ =
      site_.world.fabric().share_rows({host_memory_->data(), layout_.bytes()}, host_memory_, -1);
}

// ------------------------------------------------------------------------------------ dispatch

void ByRows::compute(const Tokens& given, const std::vector<std::int32_t>& ids,
                     const std::vector<float>& weights, std::vector<std::int64_t>& rows) {
  const MatrixView& tokens = given.rows;
  ++calls_;
  const auto hosts = static_cast<std::size_t>(hosts_.num_hosts());
  const std::size_t terms = hosts + (shared_ ? 1 : 0);
  const auto exchanged = static_cast<std::size_t>(problem().spec.top_k);
  const auto count = static_cast<std::size_t>(tokens.rows);
  for (Way& way : ways_) way.sent.clear();
  order_.assign(count * terms, -1);
  gateways_.assign(count * exchanged, kNoExpert);
  std::size_t token = 0, term = 0, sent = 0;
  address(ids, weights, [&](std::size_t t, int host) {
    if (t != token) term = sent = 0;
    token = t;
    std::int32_t& position = order_[t * terms + term++];
    if (host == host_) {
      position = static_cast<std::int32_t>(t);
      return;
    }
    const std::size_t number = number_of(host);
    Way& way = ways_[number];
    // (Windows of the other parity, which only a device's memory has, are added when it is known.)
    position = static_cast<std::int32_t>(layout_.back_row(0, number) + way.sent.size());
    way.sent.push_back(static_cast<std::uint32_t>(t));
    gateways_[t * exchanged + sent++] = way.rank;
  });
  take(given);
  put_tokens();
  exchange_slots(tokens.rows);
  find_rows(tokens.rows);
  together([&] {
    const std::int64_t all = tokens.rows + num_rows_;
    for (int i = 0; i < passes_ && layer_; ++i) {
      const std::int64_t first = std::min<std::int64_t>(i * chunk_, all);
      const std::int64_t last = std::min<std::int64_t>(first + chunk_, all);
      // Copies of the last pass read the lists of slots that are made anew.
      if (i > 0) site_.device.await_stream();
      // Own tokens come first.
      const auto slots_between = [&](const Slot* from, std::int64_t begin, std::int64_t end) {
        const std::int64_t slots = std::max<std::int64_t>(end - begin, 0);
        return std::span(slots == 0 ? from : from + static_cast<std::size_t>(begin) * top_k(),
                         static_cast<std::size_t>(slots) * top_k());
      };
      clear_rows();
      add_rows(slots_between(slots().data(), first, std::min(last, tokens.rows)), rows);
      add_rows(slots_between(came_slots(), std::max(first - tokens.rows, std::int64_t{0}),
                             last - tokens.rows),
               rows);
      pass(load(first, last - first, tokens.rows), sums_at(first));
    }
    put_results(tokens.rows);
  });
  CombineInput nothing;
  const float zero = 0;
  nothing.rows = {&zero, DType::kF32, num_rows_, 1, 0};
  exchange_->combine_send(nothing, *handle_);
}

// Takes tokens that are not yet where the network reads them.
void ByRows::take(const Tokens& given) {
  const MatrixView& tokens = given.rows;
  if (tokens.data == memory() || tokens.rows == 0) return;
  if (site_.quantised()) {
    quantise(tokens, on_device() ? memory() : quantised_.get());
    const std::size_t bytes = static_cast<std::size_t>(tokens.rows) * layout_.token_bytes;
    if (!on_device()) {
      site_.device.enqueue_to_host(memory(), bytes, quantised_.get(), bytes, {bytes, 1});
    }
    site_.device.await_stream();
    return;
  }
  const auto* const from = static_cast<const std::byte*>(tokens.data);
  const std::size_t pitch = static_cast<std::size_t>(tokens.row_stride) * size_of(tokens.dtype);
  const StagingDevice::Rows rows{layout_.token_bytes, static_cast<std::size_t>(tokens.rows)};
  if (given.on_device) {
    site_.device.on_device(memory(), rows.width, from, pitch, rows);
  } else if (on_device()) {
    site_.device.to_device(memory(), rows.width, from, pitch, rows);
  } else {
    std::memcpy(memory(), from, rows.width * rows.count);  // as they were rounded, without gaps
  }
}

// Quantises rows of the device into other rows of it.
void ByRows::quantise(const MatrixView& tokens, std::byte* to) const {
  const std::size_t pitch = layout_.token_bytes;
  if (tokens.dtype != DType::kF8E4M3) return site_.device.enqueue_quantized(to, pitch, tokens);
  const auto columns = static_cast<std::size_t>(tokens.cols),
             rows = static_cast<std::size_t>(tokens.rows);
  const std::size_t scales = protocol::ceil_div(columns, std::size_t{kQuantGroup}) * sizeof(float);
  site_.device.enqueue_on_device(to, pitch, tokens.data,
                                 static_cast<std::size_t>(tokens.row_stride), {columns, rows});
  site_.device.enqueue_on_device(to + columns, pitch, tokens.scale,
                                 static_cast<std::size_t>(tokens.scale_stride) * sizeof(float),
                                 {scales, rows});
}

void ByRows::put_tokens() {
  token_bytes_sent_ = 0;
  for (const Way& way : ways_) {
    puts_.clear();
    const std::uint64_t window = layout_.came(parity(), way.own_number);
    for (std::size_t i = 0; i < way.sent.size();) {
      std::size_t end = i + 1;
      while (end < way.sent.size() && way.sent[end] == way.sent[end - 1] + 1) ++end;
      puts_.push_back({way.sent[i] * layout_.token_bytes, window + i * layout_.token_bytes,
                       (end - i) * layout_.token_bytes});
      i = end;
    }
    token_bytes_sent_ += way.sent.size() * layout_.token_bytes;
    region_->put(Lane::kDispatch, way.host, keys_[static_cast<std::size_t>(way.rank)], puts_);
  }
}

void ByRows::exchange_slots(std::int64_t tokens) {
  origins_.resize(static_cast<std::size_t>(problem().rows_needed()));
  const float zero = 0;
  DispatchInput input;
  input.tokens = {&zero, DType::kF32, tokens, 1, 0};
  input.ids = gateways_;
  DispatchOutput output;
  rows_of_exchange_.resize(origins_.size());
  output.rows = rows_of_exchange_.data();
  output.origins = origins_.data();
  exchange(input, output);
}

// Finds the rows of each host among all rows. They stand in the order of ranks, as they come.
void ByRows::find_rows(std::int64_t tokens) {
  for (Way& way : ways_) way.came = 0;
  for (std::int32_t row = 0; row < num_rows_; ++row) {
    const int source = origins_[static_cast<std::size_t>(row)].rank;
    Way& way = ways_[number_of(hosts_.host_of(source))];
    if (way.came++ == 0) way.first = tokens + row;
  }
}

// Loads rows [first, first + count) of all as the rows of a pass.
MatrixView ByRows::load(std::int64_t first, std::int64_t count, std::int64_t tokens) {
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
      site_.device.enqueue_on_device(into, bytes, at, bytes, {bytes, 1});
    } else {
      site_.device.enqueue_to_device(into, bytes, at, bytes, {bytes, 1});
    }
  };
  const bool own_on_device = on_device() || quantised_ != nullptr;
  part(0, tokens, quantised_ != nullptr ? quantised_.get() : memory(), own_on_device);
  for (std::size_t number = 0; number < ways_.size(); ++number) {
    part(ways_[number].first, ways_[number].came, memory() + layout_.came(parity(), number),
         on_device());
  }
  MatrixView rows{rows_.get(), site_.value(), count, site_.spec.hidden, site_.spec.hidden};
  if (site_.quantised()) {
    rows.dtype = DType::kF8E4M3;
    rows.row_stride = static_cast<std::int64_t>(layout_.token_bytes);
    rows.scale = reinterpret_cast<const float*>(rows_.get() + site_.spec.hidden);
    rows.scale_rows = 1;
    rows.scale_cols = kQuantGroup;
    rows.scale_stride = static_cast<std::int64_t>(layout_.token_bytes / sizeof(float));
  }
  return rows;
}

// ------------------------------------------------------------------------------------- combine

void ByRows::put_results(std::int64_t tokens) {
  result_bytes_sent_ = 0;
  const std::size_t bytes = static_cast<std::size_t>(num_rows_) * layout_.result_bytes;
  // In the network's memory results of received rows stand behind room for all of this rank's.
  std::uint64_t first = on_device() ? static_cast<std::uint64_t>(tokens) : layout_.tokens;
  if (!on_device() && bytes != 0) {
    site_.device.enqueue_to_host(memory() + layout_.result(first), bytes, sums_at(tokens), bytes,
                                 {bytes, 1});
  }
  site_.device.await_stream();
  // Kernels find only at their end that a rank did not come: then there are no results.
  if (layer_) layer_->check();
  for (const Way& way : ways_) {
    if (way.came == 0) continue;
    const std::uint64_t row = first + static_cast<std::uint64_t>(way.first - tokens);
    const RowsPut put{layout_.result(row),
                      layout_.result(layout_.back_row(parity(), way.own_number)),
                      static_cast<std::uint64_t>(way.came) * layout_.result_bytes};
    result_bytes_sent_ += put.bytes;
    region_->put(Lane::kCombine, way.host, keys_[static_cast<std::size_t>(way.rank)], {&put, 1});
  }
}

void ByRows::sum_on_device(const ForwardOutput& output, std::int64_t tokens,
                           const std::vector<float>& shared_factors) {
  exchange_->combine_recv({}, *handle_);  // The sums come another way.
  await_sent();
  if (tokens == 0) return;
  const std::size_t terms = order_.size() / static_cast<std::size_t>(tokens);
  const std::uint64_t moved = on_device() ? layout_.window(parity(), 0) : 0;
  for (std::size_t number = 0; number < ways_.size() && !on_device(); ++number) {
    const std::size_t bytes = ways_[number].sent.size() * layout_.result_bytes;
    if (bytes == 0) continue;
    site_.device.enqueue_to_device(
        sums_at(static_cast<std::int64_t>(layout_.back_row(0, number))), bytes,
        memory() + layout_.result(layout_.back_row(parity(), number)), bytes, {bytes, 1});
  }
  factor_of_slot_.assign(order_.size(), 1.0f);
  const auto first_back = static_cast<std::int32_t>(layout_.back_row(0, 0));
  for (std::size_t t = 0; t < static_cast<std::size_t>(tokens); ++t) {
    for (std::size_t i = t * terms; i < (t + 1) * terms; ++i) {
      if (order_[i] >= first_back) order_[i] += static_cast<std::int32_t>(moved);
    }
    if (!shared_) continue;
    const std::size_t last = (t + 1) * terms - 1;
    order_[last] = static_cast<std::int32_t>(shared_row_ + t);
    if (!shared_factors.empty()) factor_of_slot_[last] = shared_factors[t];
  }
  site_.store(positions_.get(), order_.data(), order_.size() * sizeof(std::int32_t));
  site_.store(factors_.get(), factor_of_slot_.data(), factor_of_slot_.size() * sizeof(float));
  const auto rows = static_cast<std::int64_t>(shared_row_) + (shared_ ? tokens : 0);
  const MatrixView sums{sums_at(0), site_.value(), rows, site_.spec.hidden, site_.spec.hidden};
  const SlotView positions(positions_.get(), DType::kI32, order_.size());
  const SlotView factors(factors_.get(), DType::kF32, order_.size());
  ForwardOutput out = output;
  out.topk_ids = {};
  out.topk_weights = {};
  if (site_.kernels == Backend::kCpu) {
    unpermute(sums, positions, factors, static_cast<int>(terms), out);
  } else {
    unpermute(sums, positions, factors, static_cast<int>(terms), out,
              {site_.device.stream(), site_.options.cuda.device});
  }
  site_.device.await_stream();
}

// Waits until all rows have left, before the memory is written again. A receiver takes rows
// whatever it waits for: if none of them leaves for so long, it has stopped, or the way to it is
// cut.
void ByRows::await_sent() {
  using Clock = std::chrono::steady_clock;
  Clock::time_point since = Clock::now();
  for (std::uint64_t before = 0, left; (left = region_->unsent()) != 0;) {
    exchange_->check();
    const Clock::time_point now = Clock::now();
    if (left != before) since = now;
    before = left;
    if (now - since >= site_.options.deadline) {
      const int host = region_->unsent_host();
      if (host >= 0) exchange_->give_up(hosts_.gateway(rank(), host), now - since);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

}  // namespace

bool can_put_rows(const StagedSite& site) {
  const network::Hosts& hosts = site.world.fabric().proxy()->hosts();
  for (int h = 1; h < hosts.num_hosts(); ++h) {
    if (hosts.ranks_of(h).size() != hosts.ranks_of(0).size()) return false;
  }
  return true;
}

std::unique_ptr<StagedExperts> make_experts_by_rows(StagedSite& site, const MoeWeights& weights) {
  return std::make_unique<ByRows>(site, weights);
}

}  // namespace switchyard
