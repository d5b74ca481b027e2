// Exchange on the CPU: dispatch and combine, as a reader follows a token.
#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <functional>
#include <optional>
#include <utility>

#include "base/convert.h"
#include "base/mapping.h"
#include "cpu/exchange_handle.h"
#include "cpu/host_sum.h"
#include "cpu/kernels.h"
#include "cpu/rank_link.h"
#include "cpu/thread_trace.h"
#include "exchange/call.h"
#include "exchange/engine.h"
#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "protocol/exchange_heap.h"
#include "protocol/host_sums.h"
#include "protocol/wait.h"
#include "switchyard/routing.h"

namespace switchyard::cpu {
namespace {

using network::Lane;
using protocol::ExchangeEntry;
using protocol::Missing;
using protocol::Phase;
using protocol::SlotEntry;
using Step = ProtocolStep::Kind;

// Tokens or rows that a thread takes at a time.
constexpr std::size_t kChunk = 32;
// One thread sends this little before other threads are awake.
constexpr std::size_t kAloneBytes = 256 << 10;
constexpr std::size_t kMostTraceEvents = 1 << 14;

void require_no_stream(const void* stream) {
  if (stream == nullptr) return;
  throw Error(ErrorCode::kInvalidArgument,
              "a stream is given, but the exchange's backend is cpu; leave it null");
}

class Engine final : public ExchangeEngine {
 public:
  Engine(const World& world, const ExchangeProblem& problem, const ExchangeOptions& options);

  std::unique_ptr<State> make_handle() override;
  void dispatch_send(const DispatchInput& input, State& handle) override;
  void dispatch_recv(const DispatchOutput& output, State& handle) override;
  std::int64_t rows_needed(State& handle, void* stream) override;
  void combine_send(const CombineInput& input, State& handle) override;
  void combine_recv(const CombineOutput& output, State& handle) override;
  void check() override { link_->check(); }
  void check_received(const DispatchOutput& output) const override {
    require_no_stream(output.stream);
  }
  void check_combined(const CombineOutput& output, const State&) const override {
    require_no_stream(output.stream);
  }
  void await_host() override;
  void give_up(int peer, std::chrono::nanoseconds waited) override;
  void on_abort(std::function<void()> hook) override { link_->on_abort(std::move(hook)); }
  const ExchangeStats& stats() override { return stats_; }
  PassTrace trace() override {
    check();
    return link_->trace(dispatch_.number);
  }
  int num_threads() const override { return link_->num_threads(); }

 private:
  // A call that was sent: its number among its kind, and among all calls.
  struct Call {
    std::uint64_t number = 0, of_all = 0;
  };

  const ExchangeSpec& spec() const { return problem_.spec; }
  int rank() const { return problem_.rank; }
  int num_ranks() const { return problem_.num_ranks; }
  int peer(int i) const { return link_->peer(i); }
  void step(Step kind, int peer, const Call& call) const {
    if (options_.on_step) options_.on_step({kind, rank(), peer, call.of_all});
  }

  void list_slots(const SlotView& weights, DispatchHandle& handle);
  void publish_counts(const DispatchHandle& handle);
  void prepare_tokens(const MatrixView& tokens);
  const std::byte* prepared(std::uint32_t token) const {
    return quantised_.data() + token * prepared_bytes();
  }
  std::size_t prepared_bytes() const { return problem_.wire_bytes(); }
  void send_tokens(const MatrixView& tokens, const DispatchHandle& handle, bool entries);
  template <typename To>
  void send_chunk(const MatrixView& tokens, const DispatchHandle& handle, int peer, bool entries,
                  std::size_t begin, std::size_t end, To& to) const;
  void put_token(const MatrixView& tokens, std::uint32_t token, std::byte* to) const;
  void plan(DispatchHandle& handle);
  void await_counts(DispatchHandle& handle);
  void await_arrived(int source, std::uint64_t layout);
  void put_rows(const DispatchOutput& output, const DispatchHandle& handle, int source);
  template <typename To>
  void return_rows(const CombineInput& input, const DispatchHandle& handle, int source,
                   std::size_t begin, std::size_t end, To& to);
  // Returns the sums of tokens whose first row stands in [begin, end) of the order by token. Where
  // this host sums, the rank with a token's last row sums those of all its ranks.
  template <typename To>
  void return_sums(const CombineInput& input, const DispatchHandle& handle, int source,
                   std::size_t begin, std::size_t end, To& to);
  // Appends the rows of a token, of which `first` is the first in the order by token. Returns their
  // slots: a bit for each k.
  std::uint32_t rows_of_token(const CombineInput& input, const DispatchHandle& handle, int source,
                              std::size_t first, Summands& rows) const;
  // True if the rows for a rank are summed with those of this host's other ranks.
  bool sums_per_host(int to) const { return link_->way_back(to) == RankLink::Return::kSummed; }
  void sum_tokens(const CombineOutput& output, const DispatchHandle& handle, std::size_t begin,
                  std::size_t end) const;

  // Sends to all ranks by all threads, or, if it is little, by this one: body(peer, begin, end) for
  // chunks of items(peer), each of `item_bytes`, and sent(peer) after the last one of a rank. All
  // chunks of the first rank come before those of the next.
  template <typename Items, typename Body, typename Sent>
  void send_to_all(std::size_t item_bytes, const Items& items, const Body& body, const Sent& sent);
  // body(begin, end) for chunks of `count` items, by all threads.
  template <typename Body>
  void for_chunks(std::size_t count, const TraceEvent& event, const Body& body);
  // Waits until ready(); `missing` as in wait_until().
  template <typename Ready, typename WhatIsMissing>
  void wait(const Call& call, Ready&& ready, WhatIsMissing&& missing);
  [[noreturn]] void refuse_mixture(int source, std::uint64_t expected, std::uint64_t observed);

  protocol::ExchangeHeap heap_;
  std::optional<RankLink> link_;
  Mapping quantised_;        // this rank's tokens as they travel, where they are quantised
  Call dispatch_, combine_;  // the last ones that were sent
  std::uint64_t calls_ = 0;  // of both kinds
  std::atomic<std::int64_t> rows_returned_{0};  // to other ranks, by the last combine
  std::vector<std::int32_t> ids_;
  ExchangeStats stats_;
};

Engine::Engine(const World& world, const ExchangeProblem& problem, const ExchangeOptions& options)
    : ExchangeEngine(problem, options) {
  protocol::ExchangeHeap::Shape shape;
  shape.num_ranks = num_ranks();
  shape.most_experts = problem_.places.max_count();
  shape.max_tokens = spec().max_tokens;
  shape.top_k = spec().top_k;
  shape.code_bytes = problem_.token_bytes();
  shape.scale_bytes = problem_.scale_bytes();
  shape.result_bytes = problem_.result_bytes();
  heap_ = protocol::ExchangeHeap(shape);
  protocol::HostSums sums;
  const network::Hosts* const hosts = hosts_of(world);
  if (spec().pre_sum_per_host && hosts != nullptr) {
    sums = protocol::HostSums(
        host_sums_shape(*hosts, 2, spec().max_tokens, spec().top_k, problem_.result_bytes()),
        heap_.bytes());
  }
  const std::uint64_t heap_bytes = sums ? sums.end() : heap_.bytes();
  link_.emplace(world, world.fabric().allocate_heap(heap_bytes), problem_.places, sums,
                options_.deadline, "exchange");

  // A failure here is told to all ranks. This is also a barrier: no rank writes into a heap before
  // all ranks have mapped it.
  attempt_together(world.fabric(), [&] {
    const int threads = threads_of(options_.num_threads, num_ranks());
    if (problem_.quantised()) {
      quantised_ =
          Mapping::anonymous(static_cast<std::size_t>(spec().max_tokens) * prepared_bytes());
    }
    if (options_.trace) link_->record(threads, kMostTraceEvents);
    link_->start_threads(threads, [] {});
  });
  stats_.heap_bytes_reserved = heap_bytes;
}

std::unique_ptr<ExchangeHandle::State> Engine::make_handle() {
  return std::make_unique<DispatchHandle>();
}

// ------------------------------------------------------------------------------------ dispatch

void Engine::dispatch_send(const DispatchInput& input, State& state) {
  require_no_stream(input.stream);
  auto& handle = static_cast<DispatchHandle&>(state);
  const auto slots =
      static_cast<std::size_t>(input.tokens.rows) * static_cast<std::size_t>(spec().top_k);
  if (!input.reuse) {
    ids_.resize(slots);
    read_ids(problem_, input.ids, ids_.data());
  }
  link_->clear_traces();
  dispatch_ = {dispatch_.number + 1, ++calls_};
  stats_.dispatch_bytes = stats_.signal_bytes = 0;
  stats_.tokens_sent = 0;
  if (!input.reuse) {
    list_slots(input.weights, handle);
    publish_counts(handle);
  }
  prepare_tokens(input.tokens);
  send_tokens(input.tokens, handle, !input.reuse);
  stats_.dispatches = dispatch_.number;
  stats_.tokens = input.tokens.rows;
  for (int r = 0; r < num_ranks(); ++r) {
    if (r == rank()) continue;
    const auto to = static_cast<std::size_t>(r);
    stats_.tokens_sent += handle.num_tokens_to[to];
    stats_.dispatch_bytes += handle.num_tokens_to[to] * problem_.wire_bytes();
    if (!input.reuse) stats_.dispatch_bytes += handle.entries_to[to].size() * sizeof(ExchangeEntry);
    stats_.signal_bytes += sizeof(std::uint64_t);
  }
}

void Engine::list_slots(const SlotView& weights, DispatchHandle& handle) {
  const Traced traced(link_->trace_of(0), {TraceKind::kRoute, TraceRole::kPass});
  handle.layout = dispatch_.number;
  handle.planned = false;
  std::swap(handle.places, ids_);
  if (!problem_.place_of.empty()) {
    for (std::int32_t& id : handle.places) {
      if (id >= 0) id = problem_.place_of[static_cast<std::size_t>(id)];
    }
  }
  handle.weights.assign(handle.places.size(), 1.0f);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    handle.weights[i] = weights.dtype() == DType::kBF16
                            ? bf16_to_f32(static_cast<const std::uint16_t*>(weights.data())[i])
                            : static_cast<const float*>(weights.data())[i];
  }
  handle.list_slots(problem_, *link_);
}

void Engine::publish_counts(const DispatchHandle& handle) {
  const Traced traced(link_->trace_of(0), {TraceKind::kCounts, TraceRole::kPass});
  std::vector<std::uint64_t> counts(static_cast<std::size_t>(problem_.places.num_experts),
                                    protocol::numbered(dispatch_.number, 0));
  for (const std::int32_t place : handle.places) {
    if (place >= 0) ++counts[static_cast<std::size_t>(place)];
  }
  for (int i = 0; i < num_ranks(); ++i) {
    const int r = peer(i);
    step(Step::kPublishCounts, r, dispatch_);
    const auto num = static_cast<std::size_t>(problem_.places.count(r));
    // Release: what this rank read of the window before comes before others' next writes there.
    link_->to(r, Lane::kDispatch, dispatch_.of_all, [&](auto& to) {
      to.target(r, heap_.counts(dispatch_.number, rank()).in(link_->heaps().base[r]));
      to.words({counts.data() + problem_.places.begin(r), num});
    });
    if (r != rank()) stats_.signal_bytes += num * sizeof(std::uint64_t);
  }
  protocol::note_progress(link_->heaps());
}

// Quantises tokens once, however many ranks get them.
void Engine::prepare_tokens(const MatrixView& tokens) {
  if (!problem_.quantised() || tokens.dtype == DType::kF8E4M3) return;
  TraceEvent event{TraceKind::kGate, TraceRole::kPass};
  for_chunks(static_cast<std::size_t>(tokens.rows), event, [&](std::size_t begin, std::size_t end) {
    std::vector<std::uint16_t> row(
        tokens.dtype == DType::kBF16 ? 0 : static_cast<std::size_t>(spec().hidden));
    // Scales are made here first, because behind the codes they may be unaligned.
    std::vector<float> scales(static_cast<std::size_t>(problem_.groups()));
    for (std::size_t t = begin; t < end; ++t) {
      const void* from = tokens.row(static_cast<std::int64_t>(t));
      if (!row.empty()) {
        kernels().convert(from, tokens.dtype, row.data(), DType::kBF16, spec().hidden, 1);
        from = row.data();
      }
      std::byte* const to = quantised_.data() + t * prepared_bytes();
      kernels().quantize(static_cast<const std::uint16_t*>(from),
                         reinterpret_cast<std::uint8_t*>(to), scales.data(), spec().hidden);
      std::memcpy(to + problem_.token_bytes(), scales.data(), scales.size() * sizeof(float));
    }
  });
}

void Engine::put_token(const MatrixView& tokens, std::uint32_t token, std::byte* to) const {
  const std::size_t bytes = problem_.token_bytes(), scale_bytes = problem_.scale_bytes();
  const bool as_is = !problem_.quantised() || tokens.dtype == DType::kF8E4M3;
  const void* const codes = as_is ? tokens.row(token) : prepared(token);
  std::memcpy(to, codes, bytes);
  if (scale_bytes == 0) return;
  const void* const scales =
      as_is ? static_cast<const void*>(tokens.f32_scale() + token * tokens.scale_stride)
            : prepared(token) + bytes;
  std::memcpy(to + heap_.scale_offset(), scales, scale_bytes);
}

void Engine::send_tokens(const MatrixView& tokens, const DispatchHandle& handle, bool entries) {
  send_to_all(
      problem_.wire_bytes(),
      [&](int peer) { return handle.sent_to[static_cast<std::size_t>(peer)].tokens.size(); },
      [&](int peer, std::size_t begin, std::size_t end) {
        step(Step::kDispatch, peer, dispatch_);
        link_->to(peer, Lane::kDispatch, dispatch_.of_all,
                  [&](auto& to) { send_chunk(tokens, handle, peer, entries, begin, end, to); });
      },
      [&](int peer) {
        for (const int r : link_->ranks_behind(peer)) {
          step(Step::kArrived, r, dispatch_);
          // After the tokens and entries of all threads, which the last of them acquired.
          link_->signal(Lane::kDispatch, dispatch_.of_all, r,
                        heap_.arrived(dispatch_.number, rank()).in(link_->heaps().base[r]),
                        protocol::numbered(dispatch_.number, handle.layout));
        }
      });
}

template <typename To>
void Engine::send_chunk(const MatrixView& tokens, const DispatchHandle& handle, int peer,
                        bool entries, std::size_t begin, std::size_t end, To& to) const {
  const protocol::Heaps& heaps = link_->heaps();
  if (entries && begin == 0) {
    for (const int r : link_->ranks_behind(peer)) {
      const auto& list = handle.entries_to[static_cast<std::size_t>(r)];
      if (list.empty()) continue;
      to.target(r, heap_.entries(dispatch_.number, rank()).in(heaps.base[r]));
      to.put(list.data(), list.size() * sizeof(ExchangeEntry));
    }
  }
  const SentTokens& sent = handle.sent_to[static_cast<std::size_t>(peer)];
  // The row has the layout of a pool: scales stand behind the codes, at their offset.
  const std::size_t scales = problem_.scale_bytes();
  const std::size_t row_bytes =
      scales == 0 ? problem_.token_bytes() : heap_.scale_offset() + scales;
  for (std::size_t i = begin; i < end; ++i) {
    const std::size_t last =
        i + 1 < sent.tokens.size() ? sent.tokens[i + 1].first_place : sent.places.size();
    for (std::size_t p = sent.tokens[i].first_place; p < last; ++p) {
      const SentPlace& place = sent.places[p];
      to.target(place.rank,
                heap_.pool(dispatch_.number, rank(), place.position).in(heaps.base[place.rank]));
    }
    to.make(row_bytes, [&](std::byte* row) { put_token(tokens, sent.tokens[i].token, row); });
  }
  if (!entries || !sums_per_host(peer)) return;
  std::uint32_t* const slots = link_->sums_at(peer, dispatch_.number & 1).slots;
  for (std::size_t i = begin; i < end; ++i) {
    to.store(peer, slots + sent.tokens[i].token, sent.tokens[i].slots);
  }
}

void Engine::dispatch_recv(const DispatchOutput& output, State& state) {
  auto& handle = static_cast<DispatchHandle&>(state);
  link_->set_free();
  plan(handle);
  if (handle.end_of_rows > output.capacity) {
    throw Error(ErrorCode::kCapacityExceeded,
                fmt::format("{} rows came to rank {}, and the output has room for {} (capacity): "
                            "receive again with more; rows_needed() says how many",
                            handle.end_of_rows, rank(), output.capacity));
  }
  for (int i = 0; i < num_ranks(); ++i) {
    await_arrived(peer(i), handle.layout);
    if (handle.arrivals[static_cast<std::size_t>(peer(i))].empty()) {
      handle.list_arrivals(problem_, *link_, heap_, dispatch_.number, peer(i));
    }
    put_rows(output, handle, peer(i));
  }
  const std::size_t experts = handle.ends.size();
  for (std::size_t e = 0; e < experts; ++e) {
    if (output.ends != nullptr) output.ends[e] = static_cast<std::int32_t>(handle.ends[e]);
    if (output.counts != nullptr) {
      output.counts[e] =
          static_cast<std::int32_t>(handle.ends[e] - (e == 0 ? 0 : handle.ends[e - 1]));
    }
  }
  stats_.rows_received = experts == 0 ? 0 : handle.ends.back();
  if (output.num_rows != nullptr) {
    *output.num_rows = static_cast<std::int32_t>(stats_.rows_received);
  }
  link_->end_call();
}

std::int64_t Engine::rows_needed(State& state, void*) {
  auto& handle = static_cast<DispatchHandle&>(state);
  link_->set_free();
  plan(handle);
  return handle.layout_rows;
}

// Waits for all counts, and computes where every source's rows go.
void Engine::plan(DispatchHandle& handle) {
  if (handle.planned) return;
  await_counts(handle);
  handle.place_rows(problem_);
}

void Engine::await_counts(DispatchHandle& handle) {
  const auto experts = static_cast<std::size_t>(problem_.num_own());
  handle.count.assign(static_cast<std::size_t>(num_ranks()), std::vector<std::uint32_t>(experts));
  for (int source = 0; source < num_ranks(); ++source) {
    const std::uint64_t* const row =
        heap_.counts(dispatch_.number, source).in(link_->heaps().mine());
    const std::uint64_t* const arrived =
        heap_.arrived(dispatch_.number, source).in(link_->heaps().mine());
    auto& count = handle.count[static_cast<std::size_t>(source)];
    std::size_t e = 0;  // the first count that has not come
    TraceEvent event{TraceKind::kCounts, TraceRole::kPass, TraceWait::kCounts};
    event.peer = source;
    wait(
        dispatch_,
        [&] {
          for (; e < experts; ++e) {
            const std::uint64_t word = protocol::load_acquire(row + e);
            if (!protocol::is_of(word, dispatch_.number)) break;
            count[e] = static_cast<std::uint32_t>(word);
          }
          if (e == experts) return true;
          // A source that reuses a handle sends no counts.
          const std::uint64_t flag = protocol::load_acquire(arrived);
          if (protocol::is_of(flag, dispatch_.number) &&
              static_cast<std::uint32_t>(flag) != protocol::flag_of(handle.layout)) {
            refuse_mixture(source, handle.layout, flag);
          }
          return false;
        },
        [&] {
          return Missing{Phase::kCounts, source, e, protocol::flag_of(dispatch_.number),
                         protocol::load_acquire(row + e) >> 32};
        });
    const Traced here(link_->trace_of(0), event);
  }
}

void Engine::await_arrived(int source, std::uint64_t layout) {
  const std::uint64_t* const flag =
      heap_.arrived(dispatch_.number, source).in(link_->heaps().mine());
  std::uint64_t word = 0;
  wait(
      dispatch_,
      [&] {
        word = protocol::load_acquire(flag);
        return protocol::is_of(word, dispatch_.number);
      },
      [&] {
        return Missing{Phase::kDispatch, source, static_cast<std::uint64_t>(source),
                       protocol::flag_of(dispatch_.number), word >> 32};
      });
  if (static_cast<std::uint32_t>(word) != protocol::flag_of(layout)) {
    refuse_mixture(source, layout, word);
  }
}

void Engine::put_rows(const DispatchOutput& output, const DispatchHandle& handle, int source) {
  const auto& arrivals = handle.arrivals[static_cast<std::size_t>(source)];
  const std::size_t bytes = problem_.token_bytes(), scale_bytes = problem_.scale_bytes();
  const std::int64_t stride = (output.row_stride == 0 ? spec().hidden : output.row_stride) *
                              static_cast<std::int64_t>(size_of(spec().dispatch));
  const std::int64_t scale_stride =
      output.scale_stride == 0 ? problem_.groups() : output.scale_stride;
  TraceEvent event{TraceKind::kPack, TraceRole::kPack, TraceWait::kDispatch};
  event.peer = source;
  for_chunks(arrivals.size(), event, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const Arrival& arrival = arrivals[i];
      const std::byte* const token =
          heap_.pool(dispatch_.number, source, arrival.position).in(link_->heaps().mine());
      std::memcpy(static_cast<std::byte*>(output.rows) + arrival.row * stride, token, bytes);
      if (scale_bytes != 0) {
        std::memcpy(output.scales + arrival.row * scale_stride, token + heap_.scale_offset(),
                    scale_bytes);
      }
      if (output.origins != nullptr) {
        output.origins[arrival.row] = {source,
                                       static_cast<std::int32_t>(SlotEntry::token(arrival.slot)),
                                       static_cast<std::int32_t>(SlotEntry::k(arrival.slot))};
      }
      if (output.weights != nullptr) output.weights[arrival.packed] = arrival.weight;
    }
  });
  protocol::note_progress(link_->heaps());
}

// ------------------------------------------------------------------------------------- combine

void Engine::combine_send(const CombineInput& input, State& state) {
  require_no_stream(input.stream);
  auto& handle = static_cast<DispatchHandle&>(state);
  if (input.rows.rows < handle.end_of_rows) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("there are {} rows, and the last one that was received is row {}; pass "
                            "a result for each",
                            input.rows.rows, handle.end_of_rows - 1));
  }
  link_->set_free();
  combine_ = {combine_.number + 1, ++calls_};
  rows_returned_.store(0, std::memory_order_relaxed);
  send_to_all(
      problem_.result_bytes(),
      [&](int source) {
        return problem_.without_results ? 0
                                        : handle.arrivals[static_cast<std::size_t>(source)].size();
      },
      [&](int source, std::size_t begin, std::size_t end) {
        link_->to(source, Lane::kCombine, combine_.of_all, [&](auto& to) {
          if (are_summed(problem_, *link_, source)) {
            return_sums(input, handle, source, begin, end, to);
          } else {
            return_rows(input, handle, source, begin, end, to);
          }
        });
      },
      [&](int source) {
        step(Step::kFinished, source, combine_);
        // After the cells of all threads, which the last of them acquired.
        link_->signal(Lane::kCombine, combine_.of_all, source,
                      heap_.returned(combine_.number, rank()).in(link_->heaps().base[source]),
                      protocol::numbered(combine_.number, 0));
      });
  stats_.combines = combine_.number;
  stats_.signal_bytes += static_cast<std::uint64_t>(num_ranks() - 1) * sizeof(std::uint64_t);
  stats_.rows_returned = rows_returned_.load(std::memory_order_relaxed);
  stats_.combine_bytes = static_cast<std::uint64_t>(stats_.rows_returned) * problem_.result_bytes();
}

template <typename To>
void Engine::return_rows(const CombineInput& input, const DispatchHandle& handle, int source,
                         std::size_t begin, std::size_t end, To& to) {
  const auto& arrivals = handle.arrivals[static_cast<std::size_t>(source)];
  if (source != rank()) {
    rows_returned_.fetch_add(static_cast<std::int64_t>(end - begin), std::memory_order_relaxed);
  }
  for (std::size_t i = begin; i < end; ++i) {
    const Arrival& arrival = arrivals[i];
    const void* const row = input.rows.row(arrival.row);
    to.target(
        source,
        heap_.cell(combine_.number, SlotEntry::token(arrival.slot), SlotEntry::k(arrival.slot))
            .in(link_->heaps().base[source]));
    to.make(problem_.result_bytes(), [&](std::byte* result) {
      if (spec().weights == CombineWeights::kBySender) {
        kernels().convert(row, spec().combine, result, spec().combine, spec().hidden,
                          arrival.weight);
      } else {
        std::memcpy(result, row, problem_.result_bytes());
      }
    });
  }
}

std::uint32_t Engine::rows_of_token(const CombineInput& input, const DispatchHandle& handle,
                                    int source, std::size_t first, Summands& rows) const {
  const auto& arrivals = handle.arrivals[static_cast<std::size_t>(source)];
  const auto& order = handle.by_token[static_cast<std::size_t>(source)];
  const std::uint32_t token = SlotEntry::token(arrivals[order[first]].slot);
  std::uint32_t slots = 0;
  for (std::size_t i = first; i < order.size(); ++i) {
    const Arrival& arrival = arrivals[order[i]];
    if (SlotEntry::token(arrival.slot) != token) break;
    slots |= std::uint32_t{1} << SlotEntry::k(arrival.slot);
    rows.add(input.rows.row(arrival.row),
             spec().weights == CombineWeights::kBySender ? arrival.weight : 1.0f);
  }
  return slots;
}

template <typename To>
void Engine::return_sums(const CombineInput& input, const DispatchHandle& handle, int source,
                         std::size_t begin, std::size_t end, To& to) {
  const auto& arrivals = handle.arrivals[static_cast<std::size_t>(source)];
  const auto& order = handle.by_token[static_cast<std::size_t>(source)];
  const auto token_at = [&](std::size_t i) { return SlotEntry::token(arrivals[order[i]].slot); };
  std::optional<HostSum> host;
  if (sums_per_host(source)) {
    host.emplace(link_->sums_for(source, combine_.number & 1), spec().top_k,
                 problem_.result_bytes());
  }
  std::int64_t returned = 0;
  for (std::size_t i = begin; i < end; ++i) {
    if (i > 0 && token_at(i) == token_at(i - 1)) continue;
    const std::uint32_t token = token_at(i);
    Summands rows;
    std::uint32_t slots = rows_of_token(input, handle, source, i, rows);
    if (host) {
      const std::uint32_t all = handle.host_slots[static_cast<std::size_t>(source)][order[i]];
      if (slots != all) {
        host->store(token, slots, rows);
        if (!link_->keeps_sums_for(source)) returned += rows.count;
        if (!host->complete(token, slots, all, true, rows)) continue;
      }
      slots = all;
    }
    if (source != rank()) ++returned;
    const auto first_k = static_cast<std::uint32_t>(std::countr_zero(slots));
    to.target(source, heap_.cell(combine_.number, token, first_k).in(link_->heaps().base[source]));
    send_sum(to, rows, spec().combine, spec().hidden);
  }
  rows_returned_.fetch_add(returned, std::memory_order_relaxed);
}

void Engine::combine_recv(const CombineOutput& output, State& state) {
  auto& handle = static_cast<DispatchHandle&>(state);
  link_->set_free();
  // Waits for all ranks, also those without rows: a rank's flag also says that it has received the
  // previous combine, whose window the next one uses.
  for (int i = 0; i < num_ranks(); ++i) {
    const int source = peer(i);
    const std::uint64_t* const flag =
        heap_.returned(combine_.number, source).in(link_->heaps().mine());
    std::uint64_t word = 0;
    wait(
        combine_,
        [&] {
          word = protocol::load_acquire(flag);
          return protocol::is_of(word, combine_.number);
        },
        [&] {
          return Missing{Phase::kCombine, source, static_cast<std::uint64_t>(source),
                         protocol::flag_of(combine_.number), word >> 32};
        });
  }
  TraceEvent event{TraceKind::kCombine, TraceRole::kMath, TraceWait::kCombine};
  for_chunks(problem_.without_results ? 0 : static_cast<std::size_t>(handle.tokens), event,
             [&](std::size_t begin, std::size_t end) {
               step(Step::kCombine, rank(), combine_);
               sum_tokens(output, handle, begin, end);
             });
  link_->end_call();
}

void Engine::sum_tokens(const CombineOutput& output, const DispatchHandle& handle,
                        std::size_t begin, std::size_t end) const {
  const auto top_k = static_cast<std::size_t>(spec().top_k);
  const std::int64_t stride = (output.row_stride == 0 ? spec().hidden : output.row_stride) *
                              static_cast<std::int64_t>(size_of(output.dtype));
  const void* cells[protocol::kMaxTopK];
  float weights[protocol::kMaxTopK];
  for (std::size_t t = begin; t < end; ++t) {
    int count = 0;
    std::uint64_t ranks_seen = 0;  // a rank whose sum stands for its host's is the host's gateway
    for (std::size_t k = 0; k < top_k; ++k) {
      const std::int32_t place = handle.places[t * top_k + k];
      if (place < 0) continue;
      const int rank_of_place = problem_.places.owner(place);
      if (are_summed(problem_, *link_, rank_of_place)) {
        const std::uint64_t owner = std::uint64_t{1}
                                    << (sums_per_host(rank_of_place) ? link_->via(rank_of_place)
                                                                     : rank_of_place);
        if ((ranks_seen & owner) != 0) continue;
        ranks_seen |= owner;
      }
      cells[count] = heap_.cell(combine_.number, t, k).in(link_->heaps().mine());
      weights[count++] =
          spec().weights == CombineWeights::kByReceiver ? handle.weights[t * top_k + k] : 1.0f;
    }
    kernels().combine(cells, weights, count, spec().combine,
                      static_cast<std::byte*>(output.data) + static_cast<std::int64_t>(t) * stride,
                      output.dtype, spec().hidden, output.scale, output.accumulate);
  }
}

// ------------------------------------------------------------------------- threads and waiting

template <typename Items, typename Body, typename Sent>
void Engine::send_to_all(std::size_t item_bytes, const Items& items, const Body& body,
                         const Sent& sent) {
  struct Part {
    int to = 0;
    std::size_t items = 0, first_task = 0;
    std::atomic<std::size_t> left{0};
  };
  std::vector<Part> parts(static_cast<std::size_t>(num_ranks()));
  std::size_t tasks = 0, all_items = 0;
  for (int i = 0; i < num_ranks(); ++i) {
    // This rank comes last, because the others wait for their flags.
    Part& part = parts[static_cast<std::size_t>(i)];
    part.to = peer(i + 1);
    part.items = items(part.to);
    part.first_task = tasks;
    // A rank that gets nothing has one task, too: its flag.
    part.left = std::max<std::size_t>(1, protocol::ceil_div(part.items, kChunk));
    tasks += part.left;
    all_items += part.items;
  }
  std::atomic<std::size_t> next{0};
  const bool alone = all_items * item_bytes <= kAloneBytes;
  const auto run = [&](int thread) {
    std::size_t p = 0;
    for (std::size_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      while (p + 1 < parts.size() && parts[p + 1].first_task <= task) ++p;
      Part& part = parts[p];
      const std::size_t begin = (task - part.first_task) * kChunk;
      const std::size_t end = std::min(begin + kChunk, part.items);
      TraceEvent event{TraceKind::kSend, TraceRole::kSend};
      event.peer = part.to;
      event.rows = static_cast<std::int32_t>(end > begin ? end - begin : 0);
      {
        const Traced traced(link_->trace_of(thread), event);
        if (end > begin) body(part.to, begin, end);
        // Acquires the other threads' chunks, and releases this one's.
        if (part.left.fetch_sub(1, std::memory_order_acq_rel) == 1) sent(part.to);
      }
      protocol::note_progress(link_->heaps());
    }
  };
  link_->in_parallel(calls_, run, alone);
}

template <typename Body>
void Engine::for_chunks(std::size_t count, const TraceEvent& event, const Body& body) {
  if (count == 0) return;
  const auto run = [&](int thread, std::size_t first, std::size_t last) {
    TraceEvent chunk = event;
    chunk.rows = static_cast<std::int32_t>(last - first);
    const Traced traced(link_->trace_of(thread), chunk);
    body(first, last);
  };
  if (count <= kChunk) return run(0, 0, count);
  std::atomic<std::size_t> next{0};
  link_->in_parallel(calls_, [&](int thread) {
    for (std::size_t first; (first = next.fetch_add(kChunk, std::memory_order_relaxed)) < count;) {
      run(thread, first, std::min(first + kChunk, count));
      protocol::note_progress(link_->heaps());
    }
  });
}

template <typename Ready, typename WhatIsMissing>
void Engine::wait(const Call& call, Ready&& ready, WhatIsMissing&& missing) {
  const protocol::WaitResult result = link_->wait(call.of_all, link_->spans_hosts(), ready, [&] {
    const Missing lack = missing();
    step(Step::kWait, lack.peer, call);
    return lack;
  });
  if (result != protocol::WaitResult::kReady) link_->fail();
}

void Engine::await_host() {
  const auto ended = [&](int r) {
    return protocol::load_acquire(&link_->heaps().control(r)->ended);
  };
  const std::uint64_t mine = ended(rank());
  for (const int r : link_->ranks_beside()) {
    wait(
        dispatch_, [&] { return ended(r) >= mine; },
        [&] {
          return Missing{Phase::kDispatch, r, static_cast<std::uint64_t>(r), mine, ended(r)};
        });
  }
}

void Engine::give_up(int peer, std::chrono::nanoseconds waited) {
  link_->give_up({rank(), peer, Phase::kExperts, calls_, 0, 0, 0,
                  static_cast<std::uint64_t>(waited.count()), rank()});
}

void Engine::refuse_mixture(int source, std::uint64_t expected, std::uint64_t observed) {
  const Error error(
      ErrorCode::kSpecMismatch,
      fmt::format("in dispatch {} rank {} uses the rows of dispatch {}, and rank {} those of "
                  "dispatch {}; reuse handles of the same dispatch on all ranks, or on none; this "
                  "exchange cannot be used any more, make a new one on every rank",
                  dispatch_.number, source, static_cast<std::uint32_t>(observed), rank(),
                  protocol::flag_of(expected)));
  protocol::abort_world(
      link_->heaps(),
      {rank(), rank(), Phase::kDispatch, dispatch_.of_all, static_cast<std::uint64_t>(source),
       protocol::flag_of(expected), static_cast<std::uint32_t>(observed), 0, rank()});
  throw Error(error);
}

}  // namespace

std::unique_ptr<ExchangeEngine> make_exchange(const World& world, const ExchangeProblem& problem,
                                              const ExchangeOptions& options) {
  return std::make_unique<Engine>(world, problem, options);
}

}  // namespace switchyard::cpu
