// Checks whether a call of an exchange can be served, before anything is sent or stored and without
// reading through an address. All throw Error{kInvalidArgument, kShapeMismatch, kDTypeMismatch,
// kCapacityExceeded} naming the first value that is wrong and the remedy.
#pragma once

#include "exchange/engine.h"
#include "layer/ids.h"

namespace switchyard {

void check_options(const ExchangeOptions& options);

// Checks that the handle belongs to the exchange, and that the call has its turn. `call` is its
// name.
void check_turn_to_send(const char* call, const ExchangeHandle::State* pending,
                        const ExchangeCalls& calls);
void check_turn_to_receive(const char* call, const ExchangeHandle::State* pending,
                           const ExchangeHandle::State& handle, const ExchangeCalls& calls);

void check_dispatch(const ExchangeProblem& problem, const DispatchInput& input,
                    const ExchangeHandle::State& handle);
void check_received(const ExchangeProblem& problem, const DispatchOutput& output);
void check_results(const ExchangeProblem& problem, const CombineInput& input);
void check_combined(const ExchangeProblem& problem, const CombineOutput& output,
                    const ExchangeHandle::State& handle);
// Checks that outputs share no memory with each other, nor with the input, which is empty if a call
// only receives.
void require_apart_from_sent(const ExchangeProblem& problem, const DispatchInput& input,
                             const DispatchOutput& output);
void require_apart_from_sent(const ExchangeProblem& problem, const CombineInput& input,
                             const CombineOutput& output, std::int64_t tokens);

inline IdRules id_rules(const ExchangeSpec& spec) {
  return {BadIds::kRaise, spec.large_ids_are_none};
}
// The ids of a call that check_dispatch() has passed, in memory that the host can read: reads them
// into `ids`, [T, K], where kNoExpert is none. Throws Error{kInvalidArgument} for an id that no
// expert has, and for an expert that a token names twice; `ids` may then hold anything.
void read_ids(const ExchangeProblem& problem, const SlotView& given, std::int32_t* ids);

}  // namespace switchyard
