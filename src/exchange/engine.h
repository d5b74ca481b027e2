// What Exchange asks of an engine. Each engine is made by its own make_exchange(); neither knows
// the other.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>

#include "base/origin.h"
#include "exchange/problem.h"
#include "switchyard/exchange.h"

namespace switchyard {

// The calls of one exchange that are on their way. Its handles know them, too: a handle may end
// while a call with it is under way.
struct ExchangeCalls {
  const ExchangeHandle::State* dispatch = nullptr;  // sent and not received
  const ExchangeHandle::State* combine = nullptr;
  bool lost = false;  // the handle of such a call was destroyed
};

// An engine's own handles derive from it.
class ExchangeHandle::State {
 public:
  virtual ~State() {
    if (calls == nullptr || (calls->dispatch != this && calls->combine != this)) return;
    calls->lost = true;
  }
  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  const Origin origin;

  // Exchange keeps all of these, not the engine.
  std::shared_ptr<ExchangeCalls> calls;  // of the exchange that made it
  bool received = false;                 // a dispatch that gave it its contents
  std::int64_t tokens = 0;               // of that dispatch
};

// Exchange has checked every call as far as that is possible without reading the memory that it
// was given, and calls come in their order: see exchange/call.h.
class ExchangeEngine {
 public:
  using State = ExchangeHandle::State;

  virtual ~ExchangeEngine() = default;
  const Origin origin;

  virtual std::unique_ptr<State> make_handle() = 0;
  // With `reuse` the handle has contents for as many tokens. May throw for ids that it finds wrong,
  // before anything is sent.
  virtual void dispatch_send(const DispatchInput& input, State& handle) = 0;
  // May throw Error{kCapacityExceeded}, and is called again then.
  virtual void dispatch_recv(const DispatchOutput& output, State& handle) = 0;
  // Sends and receives, and calls `sent` in between. Throws before anything is sent, or what
  // check() and dispatch_recv() throw.
  virtual void dispatch(const DispatchInput& input, const DispatchOutput& output, State& handle,
                        const std::function<void()>& sent) {
    dispatch_send(input, handle);
    sent();
    check();
    dispatch_recv(output, handle);
  }
  // The rows of the layout for the dispatch that was sent with the handle.
  virtual std::int64_t rows_needed(State& handle, void* stream) = 0;
  virtual void combine_send(const CombineInput& input, State& handle) = 0;
  virtual void combine_recv(const CombineOutput& output, State& handle) = 0;
  // Throws what failed; called before each of the above.
  virtual void check() = 0;
  // Throw Error{kInvalidArgument} for outputs that this engine cannot fill. Called before a
  // receive, and before the send of a call that does both.
  virtual void check_received(const DispatchOutput& output) const { (void)output; }
  virtual void check_combined(const CombineOutput& output, const State& handle) const {
    (void)output;
    (void)handle;
  }
  // For ranks on several hosts, on the CPU. Waits until all ranks of this host have received what
  // this one has. From then on none of them waits for another host before it sends again.
  virtual void await_host() {}
  // For the same ranks. Ends the exchange on all of them, because `peer` did not do its part of
  // this rank's work on received tokens. check() then throws what all report.
  virtual void give_up(int peer, std::chrono::nanoseconds waited) {
    (void)peer;
    (void)waited;
  }
  // For the same ranks. Another thread calls `hook` once when the exchange has been given up. It
  // may not wait for other ranks, nor throw.
  virtual void on_abort(std::function<void()> hook) { (void)hook; }
  virtual const ExchangeStats& stats() = 0;
  virtual PassTrace trace() = 0;  // only with ExchangeOptions::trace
  virtual int num_threads() const = 0;

  const ExchangeProblem& problem() const { return problem_; }
  const ExchangeOptions& options() const { return options_; }
  const std::shared_ptr<ExchangeCalls>& calls() const { return calls_; }

 protected:
  ExchangeEngine(ExchangeProblem problem, ExchangeOptions options)
      : problem_(std::move(problem)), options_(std::move(options)) {}

  ExchangeProblem problem_;
  ExchangeOptions options_;  // the deadline is not 0

 private:
  std::shared_ptr<ExchangeCalls> calls_ = std::make_shared<ExchangeCalls>();
};

// Makes exchanges for tests, which have engines of their own.
struct ExchangeMaker {
  static Exchange make(std::unique_ptr<ExchangeEngine> engine);
};

// Collective. The ranks agree on spec and backend, and the options have been checked.
namespace cpu {
std::unique_ptr<ExchangeEngine> make_exchange(const World& world, const ExchangeProblem& problem,
                                              const ExchangeOptions& options);
}
namespace gpu {
// `options.device` is a device, not -1; it need not be the current one. Throws Error{kUnsupported}
// in a build without CUDA.
std::unique_ptr<ExchangeEngine> make_exchange(const World& world, const ExchangeProblem& problem,
                                              const ExchangeOptions& options);
}  // namespace gpu

}  // namespace switchyard
