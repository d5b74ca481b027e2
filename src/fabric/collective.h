// The common parts of all fabrics' start-up collectives: the description of a call, and messages
// that name the ranks that disagree or are missing.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "protocol/world_record.h"
#include "switchyard/error.h"

namespace switchyard {

class Fabric;

enum class CallKind : std::uint32_t { kAllGather, kExchangeFds, kAllocate };

const char* to_string(CallKind kind);

// The part of a collective call that all ranks must agree on.
struct Call {
  CallKind kind = CallKind::kAllGather;
  std::uint64_t bytes = 0;
  bool operator==(const Call&) const = default;
};

// Throws Error{kSpecMismatch} naming a rank that differs from rank 0, if there is one.
void require_same_call(std::span<const Call> by_rank);

// Collective. Throws what require_same_call() does for allocations of so many bytes, and
// Error{kInvalidArgument} for none.
void require_same_bytes(Fabric& fabric, std::uint64_t bytes);

// Throws Error{kInvalidArgument} unless all_bytes == size * mine_bytes.
void require_gather_space(std::size_t mine_bytes, std::size_t all_bytes, int size);

// Collective. If any rank has an error, throws the first rank's error on all ranks. So no rank
// waits for one that gave up. `wait`: of an error that is a TimeoutError, which is thrown as one.
void share_outcome(Fabric& fabric, const std::optional<Error>& mine,
                   const std::optional<WaitFailure>& wait = std::nullopt);

// True once the fabric's world has been made.
bool has_record(const Fabric& fabric);

// Collective. Runs `step` and shares its outcome.
template <typename Step>
void attempt_together(Fabric& fabric, const Step& step) {
  std::optional<Error> failure;
  std::optional<WaitFailure> wait;
  try {
    step();
  } catch (const TimeoutError& error) {
    // The others learn of it from the world's record, and the rank that it names would be waited
    // for once more. Where there is no record yet, they learn of it here.
    if (has_record(fabric)) throw;
    failure = error;
    wait = error.failure();
  } catch (const Error& error) {
    failure = error;
  } catch (const std::bad_alloc&) {
    failure = Error(ErrorCode::kCapacityExceeded,
                    "memory ran out; declare a smaller maximum number of tokens, use fewer ranks, "
                    "or raise `ulimit -v`");
  } catch (const std::exception& error) {
    failure = Error(ErrorCode::kSystem, error.what());
  }
  share_outcome(fabric, failure, wait);
}

// A list for messages: "rank 3", "ranks 1 and 3", "ranks 0, 1 and 3".
std::string list_ranks(std::span<const int> ranks);

// The ranks, by their numbers in the world, because of which those that a collective lacks did not
// come: they themselves where `because` is empty. A rank that waits for another is not named.
struct Blame {
  std::vector<int> ranks;
  std::string because;
};
// `missing` and `rank`, which asks, are of the fabric; `deadline`: of the collective.
Blame blame(const protocol::WorldView& view, int rank, std::span<const int> missing,
            std::chrono::nanoseconds deadline);

// The record of a collective that was given up: `waiter` waited for `peer` in the collective with
// number `slot` in its world (0 while the world is made), with `arrived` of `size` ranks there.
WaitFailure bootstrap_failure(int waiter, int peer, std::uint64_t slot, int size, int arrived,
                              std::chrono::nanoseconds waited);

// Throws the failure of a world again. A world that has failed once stays failed, because a rank
// may be anywhere in a collective that the others left, and later messages could not be matched up.
[[noreturn]] void throw_world_is_dead(const std::string& message, const WaitFailure& failure);

}  // namespace switchyard
