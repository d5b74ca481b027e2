// Exchange: which engine, whether a call makes sense, and whether it has its turn.
#include "switchyard/exchange.h"

#include <fmt/core.h>

#include "base/posix.h"
#include "exchange/call.h"
#include "exchange/engine.h"
#include "exchange/staging.h"
#include "fabric/agreement.h"
#include "fabric/collective.h"
#include "layer/agreement.h"
#include "layer/engine.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

constexpr const char* kName = "the exchange";

using State = ExchangeHandle::State;

const char* name_of(RowLayout::Kind kind) {
  switch (kind) {
    case RowLayout::Kind::kPacked: return "packed";
    case RowLayout::Kind::kBlocked: return "blocked";
    case RowLayout::Kind::kPadded: return "padded";
  }
  return "unknown";
}

void agree_on(Fabric& fabric, const ExchangeSpec& spec, Backend backend) {
  agree(fabric,
        {{"backend", to_string(backend)},
         {"hidden", spec.hidden},
         {"num_experts", spec.num_experts},
         {"top_k", spec.top_k},
         {"max_tokens", spec.max_tokens},
         {"dispatch", to_string(spec.dispatch)},
         {"combine", to_string(spec.combine)},
         {"layout", name_of(spec.layout.kind)},
         {"layout.size", spec.layout.size},
         {"weights", to_string(spec.weights)},
         {"pre_sum", spec.pre_sum},
         {"pre_sum_per_host", spec.pre_sum_per_host},
         {"large_ids_are_none", spec.large_ids_are_none},
         {"placement", table_of(summary_of(spec.placement))}},
        "give every rank the same exchange");
}

std::unique_ptr<ExchangeEngine> make_engine(const World& world, const ExchangeSpec& spec,
                                            ExchangeOptions options) {
  check_options(options);
  const ExchangeProblem problem(spec, world.rank(), world.size());
  options.deadline =
      options.deadline.count() == 0 ? world.deadline() : checked_deadline(options.deadline);
  agree_on(world.fabric(), problem.spec, options.backend);
  if (options.backend == Backend::kCpu) {
    return cpu::make_exchange(world, problem, options);
  }
  const bool over_hosts = world.fabric().proxy() != nullptr;
  std::unique_ptr<StagingDevice> staging;
  attempt_together(world.fabric(), [&] {
    LayerOptions device;
    device.backend = Backend::kCuda;
    device.cuda.device = options.device;
    options.device = gpu::choose_device(device);
    if (over_hosts) staging = gpu::make_staging_device(options.device);
  });
  if (over_hosts) return make_staged_exchange(world, problem, options, std::move(staging));
  return gpu::make_exchange(world, problem, options);
}

State& state_of(const std::unique_ptr<State>& state, const ExchangeEngine& engine) {
  if (state == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                "the handle is empty; make one with make_handle() of the exchange");
  }
  if (state->calls != engine.calls()) {
    throw Error(ErrorCode::kInvalidArgument,
                "the handle is of another exchange; make one with make_handle() of this one");
  }
  return *state;
}

void require_received(const State& state, const char* call) {
  if (state.received) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}, but no dispatch was received with the handle; dispatch with it first",
                  call));
}

// Returns the handle's state, if a dispatch can be sent with it.
State& state_to_send(const DispatchInput& input, const std::unique_ptr<State>& handle,
                     ExchangeEngine& engine) {
  State& state = state_of(handle, engine);
  engine.check();
  const ExchangeCalls& calls = *engine.calls();
  check_turn_to_send("dispatch", calls.dispatch, calls);
  if (!input.reuse && calls.combine == &state) {
    throw Error(ErrorCode::kInvalidArgument,
                "a combine with the handle is on its way, which needs its contents; call "
                "combine_recv() first, or dispatch with another handle");
  }
  check_dispatch(engine.problem(), input, state);
  return state;
}

void note_sent(const DispatchInput& input, State& state) {
  if (!input.reuse) {
    state.tokens = input.tokens.rows;
    state.received = false;
  }
  state.calls->dispatch = &state;
}

}  // namespace

const char* to_string(CombineWeights weights) {
  switch (weights) {
    case CombineWeights::kByReceiver: return "receiver";
    case CombineWeights::kBySender: return "sender";
    case CombineWeights::kNone: return "none";
  }
  return "unknown";
}

ExchangeHandle::ExchangeHandle() = default;
ExchangeHandle::ExchangeHandle(std::unique_ptr<State> state) : state_(std::move(state)) {}
ExchangeHandle::~ExchangeHandle() { leave_inherited(state_); }
ExchangeHandle::ExchangeHandle(ExchangeHandle&&) noexcept = default;
ExchangeHandle& ExchangeHandle::operator=(ExchangeHandle&& other) noexcept {
  leave_inherited(state_);
  state_ = std::move(other.state_);
  return *this;
}
bool ExchangeHandle::dispatched() const { return state_ != nullptr && state_->received; }
std::int64_t ExchangeHandle::tokens() const { return state_ == nullptr ? 0 : state_->tokens; }

Exchange::Exchange(const World& world, const ExchangeSpec& spec, const ExchangeOptions& options)
    : Exchange(make_engine(world, spec, options)) {}
Exchange::Exchange(std::unique_ptr<ExchangeEngine> engine) : engine_(std::move(engine)) {}
Exchange ExchangeMaker::make(std::unique_ptr<ExchangeEngine> engine) {
  return Exchange(std::move(engine));
}
Exchange::~Exchange() { leave_inherited(engine_); }
Exchange::Exchange(Exchange&&) noexcept = default;
Exchange& Exchange::operator=(Exchange&& other) noexcept {
  leave_inherited(engine_);
  engine_ = std::move(other.engine_);
  return *this;
}

ExchangeEngine& Exchange::engine() const { return held_here(engine_, kName); }

ExchangeHandle Exchange::make_handle() const {
  std::unique_ptr<State> state = engine().make_handle();
  state->calls = engine().calls();
  return ExchangeHandle(std::move(state));
}

void Exchange::dispatch_send(const DispatchInput& input, ExchangeHandle& handle) {
  State& state = state_to_send(input, handle.state_, engine());
  engine().dispatch_send(input, state);
  note_sent(input, state);
}

void Exchange::dispatch_recv(const DispatchOutput& output, ExchangeHandle& handle) {
  State& state = state_of(handle.state_, engine());
  engine().check();
  ExchangeCalls& calls = *engine().calls();
  check_turn_to_receive("dispatch", calls.dispatch, state, calls);
  check_received(engine().problem(), output);
  require_apart_from_sent(engine().problem(), {}, output);
  engine().check_received(output);
  engine().dispatch_recv(output, state);
  state.received = true;
  calls.dispatch = nullptr;
}

void Exchange::dispatch(const DispatchInput& input, const DispatchOutput& output,
                        ExchangeHandle& handle) {
  check_received(engine().problem(), output);
  engine().check_received(output);
  State& state = state_to_send(input, handle.state_, engine());
  require_apart_from_sent(engine().problem(), input, output);
  engine().dispatch(input, output, state, [&] { note_sent(input, state); });
  state.received = true;
  engine().calls()->dispatch = nullptr;
}

std::int64_t Exchange::rows_needed() const { return engine().problem().rows_needed(); }
std::int64_t Exchange::rows_needed(ExchangeHandle& handle, void* stream) {
  State& state = state_of(handle.state_, engine());
  engine().check();
  if (engine().calls()->dispatch != &state) {
    require_received(state, "rows_needed(), which counts rows");
  }
  return engine().rows_needed(state, stream);
}

void Exchange::combine_send(const CombineInput& input, ExchangeHandle& handle) {
  State& state = state_of(handle.state_, engine());
  engine().check();
  ExchangeCalls& calls = *engine().calls();
  check_turn_to_send("combine", calls.combine, calls);
  require_received(state, "combine_send()");
  check_results(engine().problem(), input);
  engine().combine_send(input, state);
  calls.combine = &state;
}

void Exchange::combine_recv(const CombineOutput& output, ExchangeHandle& handle) {
  State& state = state_of(handle.state_, engine());
  engine().check();
  ExchangeCalls& calls = *engine().calls();
  check_turn_to_receive("combine", calls.combine, state, calls);
  check_combined(engine().problem(), output, state);
  require_apart_from_sent(engine().problem(), {}, output, state.tokens);
  engine().check_combined(output, state);
  engine().combine_recv(output, state);
  calls.combine = nullptr;
}

void Exchange::combine(const CombineInput& input, const CombineOutput& output,
                       ExchangeHandle& handle) {
  const State& state = state_of(handle.state_, engine());
  require_received(state, "combine()");
  check_combined(engine().problem(), output, state);
  engine().check_combined(output, state);
  check_results(engine().problem(), input);
  require_apart_from_sent(engine().problem(), input, output, state.tokens);
  combine_send(input, handle);
  combine_recv(output, handle);
}

void Exchange::check() { engine().check(); }
const ExchangeStats& Exchange::stats() const { return engine().stats(); }
PassTrace Exchange::trace() const {
  if (!engine().options().trace) {
    throw Error(ErrorCode::kInvalidArgument,
                "the exchange records no trace; make it with the option trace set");
  }
  return engine().trace();
}

const ExchangeSpec& Exchange::spec() const { return held(engine_, kName).problem().spec; }
Backend Exchange::backend() const { return held(engine_, kName).options().backend; }
int Exchange::num_threads() const { return held(engine_, kName).num_threads(); }
ExpertRange Exchange::own_places() const { return held(engine_, kName).problem().own(); }

}  // namespace switchyard
