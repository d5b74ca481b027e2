#include "bench/hosts.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <thread>

#include "base/convert.h"
#include "base/plural.h"
#include "bench/load.h"
#include "bench/memory.h"
#include "fabric/fabric.h"
#include "gpu/device.h"
#include "machine/description.h"
#include "models/generate.h"
#include "network/proxy.h"
#include "protocol/atomics.h"
#include "switchyard/error.h"
#include "switchyard/exchange.h"
#include "switchyard/routing.h"

namespace switchyard::bench {
namespace {

using Clock = std::chrono::steady_clock;
using network::Lane;
using network::RecordKind;
using results::HostsRow;

constexpr int kWarmUps = 2;
constexpr std::size_t kStreamBytes = 32 << 20;
constexpr std::size_t kPieceBytes = 64 << 10;
constexpr int kFlags = 200, kStreams = 7;

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// A rank's measurements: times, wrong results, and the bytes that it sent in each repetition.
struct Measured {
  std::vector<double> times_us;
  std::uint64_t wrong = 0;
  double bytes = 0;
};

class Session {
 public:
  Session(World& world, const HostsBenchOptions& options)
      : world_(world), options_(options), proxy_(proxy_of(world)), hosts_(proxy_.hosts()) {
    for (int h = 0; h < hosts_.num_hosts(); ++h) {
      if (hosts_.ranks_of(h).size() == hosts_.ranks_of(0).size()) continue;
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("host {} has {}, and host 0 has {}; measure with as many on "
                      "every host",
                      h, plural(hosts_.ranks_of(h).size(), "rank"), hosts_.ranks_of(0).size()));
    }
  }

  std::vector<HostsRow> run() {
    const HostsRow flag = collect("flag", measure_flags());
    const HostsRow stream = collect("stream", measure_streams());
    rates_ = {flag.median_us / 2, stream.link_bytes / stream.median_us};
    std::vector<HostsRow> rows = {flag, stream};
    for (const std::int64_t tokens : options_.tokens) {
      auto [dispatch, combine] = measure_exchange(tokens);
      rows.push_back(collect("dispatch", dispatch, tokens));
      rows.push_back(collect("combine", combine, tokens));
      rows.push_back(collect("combine_summed", measure_exchange(tokens, true).second, tokens));
    }
    if (options_.backend == Backend::kCuda) {
      measure_layers("layer_summed", DType::kBF16, rows);
      // Others are not for FP8.
      if (options_.hidden % 16 == 0 && options_.intermediate % 16 == 0) {
        measure_layers("layer_summed_fp8", DType::kF8E4M3, rows);
      }
    }
    return rows;
  }

 private:
  static const network::Proxy& proxy_of(const World& world) {
    if (const network::Proxy* const proxy = world.fabric().proxy()) return *proxy;
    throw Error(
        ErrorCode::kInvalidArgument,
        "bench hosts measures between hosts, and all ranks are on this one; start them on "
        "several, such as `switchyard launch --namespaces 2 -n 2 -- switchyard bench hosts`");
  }

  int rank() const { return world_.rank(); }
  int host() const { return hosts_.host_of(rank()); }
  int next_host() const { return (host() + 1) % hosts_.num_hosts(); }

  // A word of the heap behind its Control, and the payload behind the words.
  static constexpr std::size_t kWords = 4096, kPayload = 8192;
  static std::uint64_t* word(std::byte* base, int index) {
    return reinterpret_cast<std::uint64_t*>(base + kWords) + index;
  }

  // One side sends, in the lane of dispatch.
  void send(const SymmetricSegment& heap, RecordKind kind, int to, std::uint64_t offset,
            const void* from, std::size_t bytes) const {
    network::RemoteHeap& remote = *heap.remote();
    const network::Target target{offset, to, 0};
    std::size_t done = 0;
    const Clock::time_point until = Clock::now() + world_.deadline();
    while (!remote.append(Lane::kDispatch, hosts_.host_of(to), kind, {&target, 1}, from, bytes,
                          done)) {
      if (Clock::now() > until) give_up(to);
      std::this_thread::yield();
    }
  }
  void raise(const SymmetricSegment& heap, int to, int index, std::uint64_t value) const {
    send(heap, RecordKind::kWords, to, kWords + 8 * static_cast<std::uint64_t>(index), &value,
         sizeof value);
    heap.remote()->flush(Lane::kDispatch, hosts_.host_of(to));
  }
  void await(const SymmetricSegment& heap, int from, int index, std::uint64_t value) const {
    const std::uint64_t* const flag = word(heap.base(rank()), index);
    const Clock::time_point until = Clock::now() + world_.deadline();
    while (protocol::load_acquire(flag) != value) {
      if (Clock::now() > until) give_up(from);
      std::this_thread::yield();
    }
  }
  [[noreturn]] void give_up(int peer) const {
    const WaitFailure failure{.waiter_rank = rank(), .peer_rank = peer, .phase = "link"};
    throw TimeoutError(ErrorCode::kTimeout,
                       fmt::format("rank {} did not answer within {} ms; {}", peer,
                                   world_.deadline().count(), world_.fabric().liveness(peer)),
                       failure);
  }

  // A flag from rank 0 to host 1 and back. Other ranks only meet.
  Measured measure_flags() const {
    const auto heap = world_.fabric().allocate_heap(kPayload);
    const int there = hosts_.gateway(0, hosts_.host_of(0) == 0 ? 1 : 0);
    Measured measured;
    for (int i = 1; i <= kFlags + kWarmUps; ++i) {
      const auto value = static_cast<std::uint64_t>(i);
      const Clock::time_point start = Clock::now();
      if (rank() == 0) {
        raise(*heap, there, 0, value);
        await(*heap, there, 0, value);
      } else if (rank() == there) {
        await(*heap, 0, 0, value);
        raise(*heap, 0, 0, value);
      }
      // Ranks that only wait would report no time at all.
      if (i > kWarmUps) measured.times_us.push_back(rank() == 0 ? microseconds_since(start) : 0);
    }
    measured.bytes = 64;
    world_.barrier();
    return measured;
  }

  // Every rank sends to its peer on the next host, which says when all is there.
  Measured measure_streams() const {
    const auto heap = world_.fabric().allocate_heap(kPayload + kPieceBytes);
    const int to = hosts_.gateway(rank(), next_host());
    const int num_hosts = hosts_.num_hosts();
    const int from = hosts_.gateway(rank(), (host() + num_hosts - 1) % num_hosts);
    std::vector<std::byte> piece(kPieceBytes);
    for (std::size_t i = 0; i < piece.size(); ++i) {
      piece[i] = static_cast<std::byte>(i * 7 + static_cast<std::size_t>(rank()));
    }
    Measured measured;
    const std::uint64_t before = proxy_.traffic().bytes_sent;
    for (int i = 1; i <= kStreams; ++i) {
      world_.barrier();
      const auto value = static_cast<std::uint64_t>(i);
      const Clock::time_point start = Clock::now();
      for (std::size_t sent = 0; sent < kStreamBytes; sent += kPieceBytes) {
        send(*heap, RecordKind::kCopy, to, kPayload, piece.data(), piece.size());
      }
      raise(*heap, to, 0, value);
      await(*heap, from, 0, value);
      raise(*heap, from, 1, value);
      await(*heap, to, 1, value);
      measured.times_us.push_back(microseconds_since(start));
    }
    const std::byte* const got = heap->base(rank()) + kPayload;
    for (std::size_t i = 0; i < piece.size(); ++i) {
      measured.wrong += got[i] != static_cast<std::byte>(i * 7 + static_cast<std::size_t>(from));
    }
    measured.bytes = static_cast<double>(proxy_.traffic().bytes_sent - before) / kStreams;
    world_.barrier();
    return measured;
  }

  // Experts return what they get, so that a token's sum is the token times the sum of its weights.
  // Measures dispatch and combine; `summed`: with sums per host.
  std::pair<Measured, Measured> measure_exchange(std::int64_t tokens, bool summed = false) const {
    ExchangeSpec spec{.hidden = options_.hidden,
                      .num_experts = options_.experts,
                      .top_k = options_.top_k,
                      .max_tokens = static_cast<int>(tokens),
                      .pre_sum_per_host = summed};
    if (summed) spec.weights = CombineWeights::kBySender;
    Exchange exchange(world_, spec, {.backend = options_.backend, .device = options_.device});
    ExchangeHandle handle = exchange.make_handle();
    const auto hidden = static_cast<std::size_t>(spec.hidden);
    const RankTokens mine = tokens_of_rank(tokens);
    Memory x(options_.backend, mine.x), y(options_.backend, mine.x.size() * 2),
        ids(options_.backend, mine.routing.ids), weights(options_.backend, mine.routing.weights),
        rows(options_.backend, static_cast<std::size_t>(exchange.rows_needed()) * hidden * 2);
    const std::optional<gpu::Stream> stream = make_stream();
    DispatchInput input;
    input.tokens = {x.as<std::uint16_t>(), DType::kBF16, tokens, spec.hidden, spec.hidden};
    input.ids = SlotView(ids.as<std::int32_t>(), mine.routing.ids.size());
    input.weights = SlotView(weights.as<float>(), mine.routing.weights.size());
    DispatchOutput received{.rows = rows.as<std::byte>(), .capacity = exchange.rows_needed()};
    CombineInput results;
    results.rows = {rows.as<std::byte>(), DType::kBF16, exchange.rows_needed(), spec.hidden,
                    spec.hidden};
    CombineOutput output{.data = y.as<std::byte>()};
    input.stream = received.stream = results.stream = output.stream =
        stream ? stream->handle() : nullptr;

    Measured dispatch, combine;
    const int repeat = repeats_of(tokens);
    for (int i = 0; i < kWarmUps + repeat; ++i) {
      time(dispatch, i >= kWarmUps, repeat, stream,
           [&] { exchange.dispatch(input, received, handle); });
      time(combine, i >= kWarmUps, repeat, stream,
           [&] { exchange.combine(results, output, handle); });
    }
    exchange.check();
    combine.wrong = mine.wrong_sums(y.read<std::uint16_t>()).size();
    world_.barrier();  // freeing memory waits for the device
    return {dispatch, combine};
  }

  LayerSpec layer_spec() const {
    return {.hidden = options_.hidden,
            .intermediate = options_.intermediate,
            .num_experts = options_.experts,
            .top_k = options_.top_k};
  }

  void measure_layers(const char* stage, DType type, std::vector<HostsRow>& rows) {
    const LayerSpec spec = layer_spec();
    const MoeWeights weights = generate_weights(spec, type, options_.seed);
    for (const std::int64_t tokens : options_.tokens) {
      rows.push_back(collect(stage, measure_layer(spec, weights, tokens), tokens));
    }
  }

  // On GPUs. What comes out must be what one rank computes alone, but for the rounding of the
  // hosts' sums.
  Measured measure_layer(const LayerSpec& spec, const MoeWeights& weights,
                         std::int64_t tokens) const {
    const RankTokens mine = tokens_of_rank(tokens);
    Memory x(options_.backend, mine.x), y(options_.backend, mine.x.size() * 2),
        ids(options_.backend, mine.routing.ids),
        weights_of_ids(options_.backend, mine.routing.weights);
    const std::optional<gpu::Stream> stream = make_stream();
    ForwardInput input;
    input.activations = {x.as<std::uint16_t>(), DType::kBF16, tokens, spec.hidden, spec.hidden};
    input.topk_ids = SlotView(ids.as<std::int32_t>(), mine.routing.ids.size());
    input.topk_weights = SlotView(weights_of_ids.as<float>(), mine.routing.weights.size());
    input.stream = stream->handle();
    const ForwardOutput output{.data = y.as<std::byte>()};
    LayerOptions how{.backend = options_.backend,
                     .max_tokens = static_cast<int>(tokens),
                     .cuda = {.device = options_.device}};
    std::vector<std::uint16_t> expected;
    {
      LayerOptions alone = how;
      alone.cuda.schedule.splits = 1;  // as over several ranks
      const World world = World::single();
      MoeLayer layer(world, spec, weights, alone);
      layer.forward(input, output);
      stream->synchronize();
      expected = y.read<std::uint16_t>();
    }
    MoeLayer layer(world_, spec, weights, how);
    Measured measured;
    const int repeat = repeats_of(tokens);
    for (int i = 0; i < kWarmUps + repeat; ++i) {
      time(measured, i >= kWarmUps, repeat, stream, [&] { layer.forward(input, output); });
    }
    layer.check();
    measured.wrong = wrong_rows(y.read<std::uint16_t>(), expected);
    world_.barrier();
    return measured;
  }

  // Sums of hosts are rounded to bf16, and so is their sum.
  std::uint64_t wrong_rows(const std::vector<std::uint16_t>& found,
                           const std::vector<std::uint16_t>& expected) const {
    constexpr double kRoundings = 4 * 0x1p-8;
    const auto hidden = static_cast<std::size_t>(options_.hidden);
    std::uint64_t wrong = 0;
    for (std::size_t first = 0; first < found.size(); first += hidden) {
      double error = 0, norm = 0;
      for (std::size_t i = first; i < first + hidden; ++i) {
        const double is = static_cast<double>(bf16_to_f32(found[i])),
                     should_be = static_cast<double>(bf16_to_f32(expected[i]));
        error += (is - should_be) * (is - should_be);
        norm += should_be * should_be;
      }
      wrong += !(error <= kRoundings * kRoundings * norm);
    }
    return wrong;
  }

  int repeats_of(std::int64_t tokens) const {
    if (options_.repeat > 0) return options_.repeat;
    return static_cast<int>(std::clamp<std::int64_t>(8192 / tokens, 5, 50));
  }

  std::optional<gpu::Stream> make_stream() const {
    std::optional<gpu::Stream> stream;
    if (options_.backend == Backend::kCuda) stream.emplace();
    return stream;
  }

  RankTokens tokens_of_rank(std::int64_t tokens) const {
    return {tokens, options_.hidden, options_.experts, options_.top_k,
            options_.seed * 64 + static_cast<std::uint64_t>(rank())};
  }

  // Until the call's stream has passed it.
  void time(Measured& into, bool counts, int repeat, const std::optional<gpu::Stream>& stream,
            const std::function<void()>& call) const {
    world_.barrier();
    const std::uint64_t before = proxy_.traffic().bytes_sent;
    const Clock::time_point start = Clock::now();
    call();
    if (stream) stream->synchronize();
    const double elapsed = microseconds_since(start);
    if (!counts) return;
    into.times_us.push_back(elapsed);
    into.bytes += static_cast<double>(proxy_.traffic().bytes_sent - before) / repeat;
  }

  // Collective: the row of all ranks' measurements.
  HostsRow collect(const char* stage, const Measured& mine,
                   std::optional<std::int64_t> tokens = std::nullopt) const {
    std::vector<double> slowest = mine.times_us;
    const std::vector<double> all =
        gather_all<double>(world_.fabric(), std::span<const double>(mine.times_us));
    for (std::size_t i = 0; i < all.size(); ++i) {
      double& time = slowest[i % slowest.size()];
      time = std::max(time, all[i]);
    }
    const auto sums =
        gather(world_.fabric(), std::array<double, 2>{mine.bytes, static_cast<double>(mine.wrong)});
    std::vector<double> bytes_of_host(static_cast<std::size_t>(hosts_.num_hosts()));
    const bool cuda = options_.backend == Backend::kCuda;
    auto row = row_of_run<HostsRow>(
        kHostsSuite, machine::describe_machine(options_.backend, cuda ? 1 : world_.size()),
        options_);
    for (int r = 0; r < world_.size(); ++r) {
      const auto i = static_cast<std::size_t>(r);
      bytes_of_host[static_cast<std::size_t>(hosts_.host_of(r))] += sums[i][0];
      row.wrong += sums[i][1];
    }
    row.engine = to_string(options_.backend);
    row.stage = stage;
    row.link = proxy_.network_name();
    row.hosts = hosts_.num_hosts();
    row.ranks = world_.size();
    if (tokens) {
      row.hidden = options_.hidden;
      row.experts = options_.experts;
      row.top_k = options_.top_k;
      row.tokens_per_rank = tokens;
    }
    set_times(row, slowest);
    row.link_bytes = *std::max_element(bytes_of_host.begin(), bytes_of_host.end());
    if (tokens) row.model_us = model_us(rates_, row.link_bytes);
    row.times_us = slowest;
    return row;
  }

  World& world_;
  const HostsBenchOptions& options_;
  const network::Proxy& proxy_;
  const network::Hosts& hosts_;
  LinkRates rates_;
};

}  // namespace

double model_us(const LinkRates& rates, double link_bytes) {
  return rates.flag_us + link_bytes / rates.bytes_per_us;
}

std::vector<HostsRow> measure_hosts(World& world, const HostsBenchOptions& options) {
  std::vector<HostsRow> rows = Session(world, options).run();
  if (world.rank() != 0) rows.clear();
  return rows;
}

}  // namespace switchyard::bench
