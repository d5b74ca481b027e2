// Exchange on the GPU: it prepares everything once, so that a call is a few launches.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <nvtx3/nvtx3.hpp>
#include <optional>
#include <string_view>
#include <vector>

#include "exchange/engine.h"
#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "gpu/device.h"
#include "gpu/dispatch/launch.h"
#include "gpu/host/abort_link.h"
#include "gpu/host/cuda_error.h"
#include "gpu/host/device_scope.h"
#include "gpu/host/exchange_trace.h"
#include "gpu/host/mapped_memory.h"
#include "gpu/host/pass_memory.h"
#include "gpu/host/shown_word.h"
#include "gpu/host/symmetric_memory.h"
#include "layer/failure.h"
#include "layer/ids.h"
#include "switchyard/error.h"

namespace switchyard::gpu {
namespace {

using protocol::ceil_div;

// The profilers' domain of the host's calls.
struct NvtxDomain {
  static constexpr const char* name = "switchyard";
};
using HostRange = nvtx3::scoped_range_in<NvtxDomain>;

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

void require_aligned(const char* what, const void* data, std::int64_t row_bytes,
                     std::int64_t rows) {
  if (rows == 0 || (reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && row_bytes % 16 == 0)) {
    return;
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} start at {} with {} bytes from row to row; the GPU moves 16 bytes at "
                          "a time, so both must be multiples of 16",
                          what, data, row_bytes));
}

// Cuts memory into arrays.
class Cutter {
 public:
  template <typename T>
  std::size_t add(std::size_t count) {
    const std::size_t at = bytes_;
    bytes_ += protocol::round_up<std::size_t>(std::max<std::size_t>(count, 1) * sizeof(T), 256);
    return at;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_ = 0;
};

// The numbers of tokens with which a dispatch places rows while it still sends others. With more
// tokens, sending and placing hinder each other: docs/lab/dispatch.md.
constexpr std::int64_t kLeastEarlyTokens = 256, kMostEarlyTokens = 4096;

class Handle final : public ExchangeHandle::State {
 public:
  DeviceBuffer memory;
  HandleSite site{};
  bool new_layout = true;  // the last dispatch gave it its contents
};

class Engine final : public ExchangeEngine {
 public:
  Engine(const World& world, const ExchangeProblem& problem, const ExchangeOptions& options);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  std::unique_ptr<State> make_handle() override;
  void dispatch_send(const DispatchInput& input, State& handle) override;
  void dispatch_recv(const DispatchOutput& output, State& handle) override;
  void dispatch(const DispatchInput& input, const DispatchOutput& output, State& handle,
                const std::function<void()>& sent) override;
  std::int64_t rows_needed(State& handle, void* stream) override;
  void combine_send(const CombineInput& input, State& handle) override;
  void combine_recv(const CombineOutput& output, State& handle) override;
  void check() override;
  void check_received(const DispatchOutput& output) const override;
  void check_combined(const CombineOutput& output, const State& handle) const override;
  const ExchangeStats& stats() override;
  PassTrace trace() override;
  int num_threads() const override { return 0; }

 private:
  const ExchangeSpec& spec() const { return problem_.spec; }
  int num_ranks() const { return problem_.num_ranks; }
  void require_supported() const;
  void prepare();
  void describe();
  SlotsCall slots_call(const DispatchInput& input) const;
  void send(const DispatchInput& input, Handle& handle, DispatchReceive* early);
  void receive(const DispatchReceive& call, const Handle& handle, void* stream);
  DispatchReceive receive_call(const Handle& handle) const;
  DispatchReceive receive_call(const DispatchOutput& output, const Handle& handle) const;
  // The distance from row to row.
  std::int64_t row_bytes_of(const DispatchOutput& output) const {
    return (output.row_stride == 0 ? spec().hidden : output.row_stride) *
           static_cast<std::int64_t>(size_of(spec().dispatch));
  }
  ExchangeWords read_words();
  void throw_found(volatile std::uint64_t& word, ErrorCode code, const std::string& message);
  [[noreturn]] void fail();

  World world_;
  int device_;
  unsigned blocks_ = 1;
  // No other rank uses this rank's device: blocks may briefly wait for other ranks there.
  bool alone_ = false;
  protocol::ExchangeHeap heap_;
  std::optional<SymmetricMemory> memory_;
  DeviceBuffer words_, place_of_, workspace_;
  std::unique_ptr<MappedMemory<ExchangeFailures>> failures_;
  ExchangeSite site_{};
  ExchangeStats stats_;
  std::optional<ExchangeTrace> trace_;
  std::unique_ptr<AbortLink> abort_link_;
  std::unique_ptr<ShownWord> shown_;  // uses the heap and the link
  // Copies words for stats() and trace(). Its stream is its own, so waiting kernels do not hold it
  // up.
  struct WordsCopy {
    Stream stream;
    MappedMemory<ExchangeWords> words;
  };
  std::unique_ptr<WordsCopy> words_copy_;
  std::optional<Fabric::AbortHook> abort_hook_;  // last: it uses the heap and the link
};

Engine::Engine(const World& world, const ExchangeProblem& problem, const ExchangeOptions& options)
    : ExchangeEngine(problem, options), world_(world), device_(options.device) {
  attempt_together(world_.fabric(), [&] { require_supported(); });
  protocol::ExchangeHeap::Shape shape;
  shape.num_ranks = num_ranks();
  shape.most_experts = problem_.places.max_count();
  shape.max_tokens = spec().max_tokens;
  shape.top_k = spec().top_k;
  shape.code_bytes = problem_.token_bytes();
  shape.scale_bytes = problem_.wire_bytes() - problem_.token_bytes();
  shape.result_bytes = problem_.result_bytes();
  shape.entry_bytes = sizeof(DeviceEntry);
  heap_ = protocol::ExchangeHeap(shape);
  const DeviceScope scope(device_);
  const std::vector<DeviceSite> sites = gather_device_sites(world_.fabric());
  const std::string_view own_site = sites[static_cast<std::size_t>(problem_.rank)].bus_id;
  alone_ = std::ranges::count_if(
               sites, [&](const DeviceSite& site) { return site.bus_id == own_site; }) == 1;
  memory_.emplace(world_.fabric(), heap_.bytes());
  // All ranks learn of a failure here. This is also a barrier: nobody writes into a heap before its
  // flags are down.
  attempt_together(world_.fabric(), [&] { prepare(); });
  abort_hook_.emplace(world_.fabric(),
                      [this] { abort_link_->raise(site_.heaps, world_.fabric().abort_word()); });
}

void Engine::require_supported() const {
  const auto unsupported = [](const std::string& message) {
    throw Error(ErrorCode::kUnsupported, message);
  };
  if (problem_.places.num_experts > static_cast<int>(kMostPlaces)) {
    unsupported(fmt::format("{} experts, or places of them; exchanges on GPUs have up to {}",
                            problem_.places.num_experts, kMostPlaces));
  }
  const int columns = problem_.quantised() ? 16 : 8;
  if (spec().hidden % columns != 0) {
    unsupported(fmt::format("hidden is {}; exchanges of {} on GPUs need a multiple of {}",
                            spec().hidden, to_string(spec().dispatch), columns));
  }
  const int sms = device_info(device_).num_sms;
  if (options_.max_sms > sms) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("max_sms is {}, and device {} has {} SMs; use as many at most",
                            options_.max_sms, device_, sms));
  }
}

void Engine::prepare() {
  // Two blocks of the kernels that move rows fill an SM's queues.
  blocks_ = options_.max_sms != 0 ? static_cast<unsigned>(options_.max_sms)
                                  : 2 * static_cast<unsigned>(device_info(device_).num_sms);
  SWITCHYARD_CUDA(load_dispatch_kernels());
  SWITCHYARD_CUDA(load_combine_kernels());
  std::byte* const mine = memory_->base(problem_.rank);
  SWITCHYARD_CUDA(cudaMemset(mine, 0, heap_.flag_bytes()));
  // Fills with NaN, so that no call gets away with reading what nobody wrote.
  SWITCHYARD_CUDA(cudaMemset(mine + heap_.flag_bytes(), 0xff, heap_.bytes() - heap_.flag_bytes()));
  words_ = DeviceBuffer(sizeof(ExchangeWords));
  SWITCHYARD_CUDA(cudaMemset(words_.data(), 0, words_.bytes()));
  if (!problem_.place_of.empty()) {
    place_of_ = DeviceBuffer(problem_.place_of.size() * sizeof(std::int32_t));
    place_of_.upload(problem_.place_of.data(), place_of_.bytes());
  }
  Cutter cut;
  const auto parts = ceil_div<std::size_t>(static_cast<std::size_t>(spec().max_tokens),
                                           protocol::ExchangeHeap::kPartTokens);
  const auto places = static_cast<std::size_t>(problem_.places.num_experts);
  const std::size_t units_done = cut.add<std::uint32_t>(parts),
                    totals = cut.add<std::uint32_t>(kMostSorters * places),
                    totalled = cut.add<std::uint64_t>(kMostSorters),
                    placed = cut.add<std::uint32_t>(std::size_t{blocks_} * kMoverWarps);
  workspace_ = DeviceBuffer(cut.bytes());
  SWITCHYARD_CUDA(cudaMemset(workspace_.data(), 0, workspace_.bytes()));
  site_.units_done = reinterpret_cast<std::uint32_t*>(workspace_.data() + units_done);
  site_.totals = reinterpret_cast<std::uint32_t*>(workspace_.data() + totals);
  site_.totalled = reinterpret_cast<std::uint64_t*>(workspace_.data() + totalled);
  site_.placed = reinterpret_cast<std::uint32_t*>(workspace_.data() + placed);
  // A send that also places rows has the most blocks.
  if (options_.trace) site_.trace = trace_.emplace(blocks_ + kMostSorters + 1).records();
  failures_ = std::make_unique<MappedMemory<ExchangeFailures>>();
  abort_link_ = std::make_unique<AbortLink>(device_);
  words_copy_ = std::make_unique<WordsCopy>();
  describe();
  if (num_ranks() > 1) {
    shown_ = std::make_unique<ShownWord>(world_.fabric().view(), site_.heaps, *abort_link_);
  }
  SWITCHYARD_CUDA(cudaDeviceSynchronize());
}

void Engine::describe() {
  site_.heaps.experts = problem_.places;
  site_.heaps.rank = problem_.rank;
  for (int r = 0; r < num_ranks(); ++r) site_.heaps.base[r] = memory_->base(r);
  site_.heap = heap_;
  site_.words = reinterpret_cast<ExchangeWords*>(words_.data());
  site_.failures = const_cast<ExchangeFailures*>(failures_->on_device());
  site_.deadline_ns =
      static_cast<std::uint64_t>(std::chrono::nanoseconds(options_.deadline).count());
  site_.top_k = static_cast<std::uint32_t>(spec().top_k);
  site_.hidden = static_cast<std::uint32_t>(spec().hidden);
  site_.list = static_cast<std::uint32_t>(heap_.list());
  site_.slots = site_.list / static_cast<std::uint32_t>(spec().max_tokens);
  site_.most_tokens = static_cast<std::uint32_t>(spec().max_tokens);
  stats_.heap_bytes_reserved = heap_.bytes();
}

// Freeing memory would wait for the device without a limit. So a thread that can be left behind
// waits for it first.
Engine::~Engine() {
  abort_hook_.reset();
  const bool idle = abort_link_ == nullptr || device_is_idle(device_, options_.deadline);
  if (idle) {
    shown_.reset();
    return;
  }
  abort_link_->raise(site_.heaps);
  if (device_is_idle(device_, std::chrono::seconds(1))) return;
  const auto leak = [](auto& owner) { (void)new (std::nothrow) auto(std::move(owner)); };
  leak(memory_);
  leak(words_);
  leak(place_of_);
  leak(workspace_);
  leak(failures_);
  leak(shown_);
  leak(abort_link_);
  leak(words_copy_);
  leak(trace_);
}

std::unique_ptr<ExchangeHandle::State> Engine::make_handle() {
  const auto slots =
      static_cast<std::size_t>(spec().max_tokens) * static_cast<std::size_t>(spec().top_k);
  const auto ranks = static_cast<std::size_t>(num_ranks());
  const auto own = static_cast<std::size_t>(problem_.num_own());
  const std::size_t arrivals = ranks * site_.list;
  Cutter cut;
  const std::size_t places = cut.add<std::int32_t>(slots), weights = cut.add<float>(slots),
                    plan = cut.add<PlanWords>(1), row_base = cut.add<std::uint32_t>(ranks * own),
                    packed_base = cut.add<std::uint32_t>(ranks * own),
                    list_base = cut.add<std::uint32_t>(ranks * own),
                    limit = cut.add<std::uint32_t>(own), own_ends = cut.add<std::int32_t>(own),
                    entries = cut.add<DeviceEntry>(arrivals),
                    list = cut.add<DeviceArrival>(arrivals),
                    siblings = cut.add<std::uint32_t>(spec().pre_sum ? arrivals : 0),
                    index_of = cut.add<std::uint32_t>(spec().pre_sum ? ranks * slots : 0);
  auto handle = std::make_unique<Handle>();
  const DeviceScope scope(device_);
  handle->memory = DeviceBuffer(cut.bytes());
  // No dispatch has number 0: nothing is planned.
  SWITCHYARD_CUDA(cudaMemset(handle->memory.data() + plan, 0, sizeof(PlanWords)));
  const auto at = [&]<typename T>(T*& pointer, std::size_t offset) {
    pointer = reinterpret_cast<T*>(handle->memory.data() + offset);
  };
  HandleSite& site = handle->site;
  at(site.places, places);
  at(site.weights, weights);
  at(site.plan, plan);
  at(site.row_base, row_base);
  at(site.packed_base, packed_base);
  at(site.list_base, list_base);
  at(site.limit, limit);
  at(site.own_ends, own_ends);
  at(site.entries, entries);
  at(site.arrivals, list);
  if (spec().pre_sum) {
    at(site.siblings, siblings);
    at(site.index_of, index_of);
  }
  return handle;
}

// ------------------------------------------------------------------------------------ dispatch

SlotsCall Engine::slots_call(const DispatchInput& input) const {
  SlotsCall call{};
  call.ids = input.ids.data();
  call.wide_ids = input.ids.dtype() == DType::kI64;
  call.weights = input.weights.empty() ? nullptr : input.weights.data();
  call.bf16_weights = input.weights.dtype() == DType::kBF16;
  call.place_of = reinterpret_cast<const std::int32_t*>(place_of_.data());
  call.num_experts = spec().num_experts;
  call.large_ids_are_none = spec().large_ids_are_none;
  return call;
}

// Sends a dispatch. `early`, if not null, is the receive that follows; its `placing_blocks` is set.
void Engine::send(const DispatchInput& input, Handle& handle, DispatchReceive* early) {
  const MatrixView& tokens = input.tokens;
  const auto element = static_cast<std::int64_t>(size_of(tokens.dtype));
  if (tokens.rows > 0) {
    require_aligned("tokens", tokens.data, tokens.rows > 1 ? tokens.row_stride * element : 0,
                    tokens.rows);
  }
  const DeviceScope scope(device_);
  DispatchSend call{};
  call.tokens = static_cast<const std::byte*>(tokens.data);
  call.token_stride = tokens.row_stride * element;
  call.scales = tokens.f32_scale();
  call.scale_stride = tokens.scale_stride;
  call.count = static_cast<std::uint32_t>(tokens.rows);
  call.wire_bytes = static_cast<std::uint32_t>(problem_.token_bytes());
  call.groups = static_cast<std::uint32_t>(problem_.groups());
  call.num_places = static_cast<std::uint32_t>(problem_.places.num_experts);
  call.new_layout = !input.reuse;
  if (call.new_layout) call.slots = slots_call(input);
  Wire wire = Wire::kCopy;
  if (problem_.quantised() && tokens.rows > 0 && tokens.dtype != DType::kF8E4M3) {
    wire = tokens.dtype == DType::kBF16  ? Wire::kFromBF16
           : tokens.dtype == DType::kF16 ? Wire::kFromF16
                                         : Wire::kFromF32;
  }
  unsigned placing_blocks = 0;
  const LaunchTurn turn;
  SWITCHYARD_CUDA(launch_dispatch_send(site_, handle.site, call, early, wire,
                                       {blocks_, options_.max_sms != 0}, &placing_blocks,
                                       stream_of(input.stream)));
  if (early != nullptr) early->placing_blocks = placing_blocks;
  handle.new_layout = !input.reuse;
}

void Engine::dispatch_send(const DispatchInput& input, State& state) {
  const HostRange range{"dispatch_send", nvtx3::payload{input.tokens.rows}};
  send(input, static_cast<Handle&>(state), nullptr);
}

void Engine::check_received(const DispatchOutput& output) const {
  require_aligned("the output's rows", output.rows, row_bytes_of(output), output.capacity);
}

void Engine::check_combined(const CombineOutput& output, const State& handle) const {
  const std::int64_t stride = output.row_stride == 0 ? spec().hidden : output.row_stride;
  require_aligned("the output's rows", output.data,
                  stride * static_cast<std::int64_t>(size_of(output.dtype)), handle.tokens);
}

DispatchReceive Engine::receive_call(const Handle& handle) const {
  DispatchReceive call{};
  call.wire_bytes = static_cast<std::uint32_t>(problem_.token_bytes());
  call.groups = static_cast<std::uint32_t>(problem_.groups());
  call.layout = spec().layout;
  call.own_experts = static_cast<std::uint32_t>(problem_.num_own());
  call.new_layout = handle.new_layout;
  return call;
}

DispatchReceive Engine::receive_call(const DispatchOutput& output, const Handle& handle) const {
  DispatchReceive call = receive_call(handle);
  call.rows = static_cast<std::byte*>(output.rows);
  call.capacity = output.capacity;
  call.row_stride = row_bytes_of(output);
  call.scales = output.scales;
  call.scale_stride = output.scale_stride == 0 ? problem_.groups() : output.scale_stride;
  call.ends = output.ends;
  call.counts = output.counts;
  call.num_rows = output.num_rows;
  call.origins = output.origins;
  call.weights = output.weights;
  return call;
}

void Engine::receive(const DispatchReceive& call, const Handle& handle, void* where) {
  const DeviceScope scope(device_);
  const cudaStream_t stream = stream_of(where);
  const LaunchTurn turn;
  SWITCHYARD_CUDA(launch_await_dispatch(site_, handle.site, call, stream));
  SWITCHYARD_CUDA(launch_place_rows(site_, handle.site, call, blocks_, stream));
}

void Engine::dispatch_recv(const DispatchOutput& output, State& state) {
  const HostRange range{"dispatch_recv"};
  const auto& handle = static_cast<Handle&>(state);
  receive(receive_call(output, handle), handle, output.stream);
}

void Engine::dispatch(const DispatchInput& input, const DispatchOutput& output, State& state,
                      const std::function<void()>& sent) {
  const HostRange range{"dispatch", nvtx3::payload{input.tokens.rows}};
  auto& handle = static_cast<Handle&>(state);
  DispatchReceive call = receive_call(output, handle);
  call.new_layout = !input.reuse;
  // Few tokens are sent before their receive can begin anyway. A device that others share has no
  // blocks to spare for waiting, and another stream may have other work before the receive.
  const bool early = alone_ && num_ranks() > 1 && input.stream == output.stream &&
                     input.tokens.rows >= kLeastEarlyTokens &&
                     input.tokens.rows <= kMostEarlyTokens && call.own_experts <= kMostEarlyExperts;
  send(input, handle, early ? &call : nullptr);
  sent();
  receive(call, handle, output.stream);
}

std::int64_t Engine::rows_needed(State& state, void* where) {
  const auto& handle = static_cast<Handle&>(state);
  const DeviceScope scope(device_);
  const cudaStream_t stream = stream_of(where);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  SWITCHYARD_CUDA(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) {
    throw Error(ErrorCode::kUnsupported,
                "rows_needed() of a handle waits on the host, and the stream is being captured; "
                "use rows_needed() without one");
  }
  if (calls()->dispatch == &state) {
    DispatchReceive call = receive_call(handle);
    call.capacity = -1;
    const LaunchTurn turn;
    SWITCHYARD_CUDA(launch_await_dispatch(site_, handle.site, call, stream));
  }
  // A copy to pageable memory holds the device's context until the stream has reached it, and other
  // ranks of this process could launch nothing meanwhile. So this waits first.
  SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
  PlanWords plan;
  SWITCHYARD_CUDA(
      cudaMemcpyAsync(&plan, handle.site.plan, sizeof plan, cudaMemcpyDeviceToHost, stream));
  SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
  check();
  return plan.layout_rows;
}

// ------------------------------------------------------------------------------------- combine

void Engine::combine_send(const CombineInput& input, State& state) {
  const HostRange range{"combine_send"};
  const MatrixView& rows = input.rows;
  CombineSend call{};
  call.rows = static_cast<const std::byte*>(rows.data);
  call.row_stride = rows.row_stride * static_cast<std::int64_t>(size_of(rows.dtype));
  call.num_rows = rows.rows;
  require_aligned("rows", rows.data, rows.rows > 1 ? call.row_stride : 0, rows.rows);
  call.weighs = spec().weights == CombineWeights::kBySender;
  call.pre_sum = spec().pre_sum;
  const DeviceScope scope(device_);
  const LaunchTurn turn;
  SWITCHYARD_CUDA(launch_combine_send(site_, static_cast<Handle&>(state).site, call, spec().combine,
                                      blocks_, stream_of(input.stream)));
}

void Engine::combine_recv(const CombineOutput& output, State& state) {
  const HostRange range{"combine_recv"};
  CombineReceive call{};
  call.out = output.data;
  call.to = output.dtype;
  call.out_stride = output.row_stride == 0 ? spec().hidden : output.row_stride;
  call.tokens = static_cast<std::uint32_t>(state.tokens);
  call.scale = output.scale;
  call.accumulate = output.accumulate;
  call.weighs = spec().weights == CombineWeights::kByReceiver;
  call.pre_sum = spec().pre_sum;
  const DeviceScope scope(device_);
  const cudaStream_t stream = stream_of(output.stream);
  const LaunchTurn turn;
  SWITCHYARD_CUDA(launch_await_combine(site_, stream));
  if (call.tokens == 0) return;
  SWITCHYARD_CUDA(launch_sum_tokens(site_, static_cast<Handle&>(state).site, call, spec().combine,
                                    blocks_, stream));
}

// ------------------------------------------------------------------------------------ failures

// Throws a failure and clears its word, so that it is reported once. The exchange lives on.
void Engine::throw_found(volatile std::uint64_t& word, ErrorCode code, const std::string& message) {
  word = 0;
  throw Error(code, message + " (in a call that has ended on the device)");
}

void Engine::check() {
  throw_if_aborted(world_, "exchange");
  volatile ExchangeFailures& failures = **failures_;
  if (failures.given_up != 0) fail();
  const auto low = [](std::uint64_t word) { return static_cast<std::uint32_t>(word); };
  const auto high = [](std::uint64_t word) {
    return static_cast<std::uint32_t>((word & ~ExchangeFailures::kFound) >> 32);
  };
  if (const std::uint64_t word = failures.duplicate; word != 0) {
    throw_found(failures.duplicate, ErrorCode::kInvalidArgument,
                named_twice_text(high(word), low(word)) + ", and the later slot was none");
  }
  if (const std::uint64_t word = failures.unknown; word != 0) {
    throw_found(failures.unknown, ErrorCode::kInvalidArgument,
                fmt::format("token {} has expert id {}; expert ids are 0 to {}, or {} for none; "
                            "the slot was none (large_ids_are_none lets ids of num_experts or "
                            "more mean none)",
                            high(word), static_cast<std::int32_t>(low(word)),
                            spec().num_experts - 1, kNoExpert));
  }
  if (const std::uint64_t word = failures.padded; word != 0) {
    throw_found(
        failures.padded, ErrorCode::kCapacityExceeded,
        fmt::format("expert {} got {} rows, and the padded layout has room for {}; make an "
                    "exchange with more (layout.size), or with another layout; rows without room "
                    "were not stored, and count as zeros in combine",
                    static_cast<std::uint32_t>(problem_.own().begin) + high(word), low(word),
                    spec().layout.size));
  }
  if (const std::uint64_t word = failures.capacity; word != 0) {
    throw_found(failures.capacity, ErrorCode::kCapacityExceeded,
                fmt::format("{} rows came to rank {}, and the output had less room (capacity); "
                            "rows_needed() says how many there are; rows without room were not "
                            "stored",
                            low(word), problem_.rank));
  }
  if (const std::uint64_t word = failures.results; word != 0) {
    throw_found(failures.results, ErrorCode::kShapeMismatch,
                fmt::format("combine got fewer rows of results than {}, the last row that was "
                            "received; pass a result for each; what was missing counted as zeros",
                            low(word)));
  }
}

void Engine::fail() {
  volatile ExchangeFailures& failures = **failures_;
  const DeviceScope scope(device_);
  SWITCHYARD_CUDA(cudaDeviceSynchronize());
  if (const std::uint64_t word = failures.mixture; word != 0) {
    const std::uint64_t of = failures.mixture_of;
    failures.mixture = 0;
    throw Error(ErrorCode::kSpecMismatch,
                fmt::format("in dispatch {} rank {} uses the rows of dispatch {}, and rank {} "
                            "those of dispatch {}; reuse handles of the same dispatch on all "
                            "ranks, or on none; this exchange cannot be used any more, make a new "
                            "one on every rank",
                            of >> 32, (word & ~ExchangeFailures::kFound) >> 32,
                            static_cast<std::uint32_t>(word), problem_.rank,
                            static_cast<std::uint32_t>(of)));
  }
  const auto control_of = [this](int rank) {
    protocol::Control control;
    SWITCHYARD_CUDA(
        cudaMemcpy(&control, site_.heaps.control(rank), sizeof control, cudaMemcpyDeviceToHost));
    return control;
  };
  std::uint64_t abort = control_of(problem_.rank).abort;
  if (abort == 0) abort = static_cast<std::uint64_t>(problem_.rank) + 1;
  throw_abort(
      world_, abort, [&](int failed) { return followed(world_, control_of(failed).failure); },
      "exchange");
}

ExchangeWords Engine::read_words() {
  const auto stream = stream_of(words_copy_->stream.handle());
  auto* const to = const_cast<ExchangeWords*>(&*words_copy_->words);
  SWITCHYARD_CUDA(cudaMemcpyAsync(to, words_.data(), sizeof *to, cudaMemcpyDeviceToHost, stream));
  SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
  return *to;
}

PassTrace Engine::trace() {
  const DeviceScope scope(device_);
  check();
  const ExchangeWords words = read_words();
  PassTrace trace;
  trace.rank = problem_.rank;
  trace.num_ranks = num_ranks();
  trace_->read(words.dispatch, words.combine, words_copy_->stream, trace);
  return trace;
}

const ExchangeStats& Engine::stats() {
  const DeviceScope scope(device_);
  check();
  const ExchangeWords words = read_words();
  const auto others = static_cast<std::uint64_t>(num_ranks() - 1);
  const auto far_places =
      static_cast<std::uint64_t>(problem_.places.num_experts - problem_.num_own());
  stats_.dispatches = words.dispatch;
  stats_.combines = words.combine;
  stats_.tokens = words.tokens;
  stats_.tokens_sent = words.tokens_sent;
  stats_.rows_received = words.rows_received;
  stats_.rows_returned = words.rows_returned;
  stats_.dispatch_bytes = words.tokens_sent * problem_.wire_bytes() +
                          words.entries_sent * std::uint64_t{sizeof(DeviceEntry)};
  stats_.combine_bytes = words.rows_returned * problem_.result_bytes();
  // A dispatch has a flag, a head of two words, and a flag for each part of its tokens.
  const std::uint64_t parts =
      ceil_div<std::uint64_t>(words.tokens, protocol::ExchangeHeap::kPartTokens);
  stats_.signal_bytes =
      sizeof(std::uint64_t) *
      (others * ((words.dispatch != 0 ? 3 + parts : 0u) + (words.combine != 0 ? 1u : 0u)) +
       words.new_layout * far_places);
  return stats_;
}

}  // namespace

std::unique_ptr<ExchangeEngine> make_exchange(const World& world, const ExchangeProblem& problem,
                                              const ExchangeOptions& options) {
  const HostRange range{"make exchange"};
  return std::make_unique<Engine>(world, problem, options);
}

}  // namespace switchyard::gpu
