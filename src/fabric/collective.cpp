#include "fabric/collective.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "base/join.h"
#include "fabric/fabric.h"
#include "fabric/frames.h"

namespace switchyard {

const char* to_string(CallKind kind) {
  switch (kind) {
    case CallKind::kAllGather: return "all_gather";
    case CallKind::kExchangeFds: return "exchange_fds";
    case CallKind::kAllocate: return "allocate";
  }
  return "an unknown collective";
}

void require_same_call(std::span<const Call> by_rank) {
  const auto other = std::find_if(by_rank.begin(), by_rank.end(),
                                  [&](const Call& call) { return call != by_rank.front(); });
  if (other == by_rank.end()) return;
  const auto describe = [](const Call& call) {
    return fmt::format("{} of {} bytes", to_string(call.kind), call.bytes);
  };
  throw Error(ErrorCode::kSpecMismatch,
              fmt::format("the ranks disagree on a collective call: rank 0 called {}, rank {} "
                          "called {}; all ranks must make the same calls in the same order with "
                          "the same sizes",
                          describe(by_rank.front()), other - by_rank.begin(), describe(*other)));
}

void require_same_bytes(Fabric& fabric, std::uint64_t bytes) {
  std::vector<Call> calls;
  for (const std::uint64_t theirs : gather(fabric, bytes)) {
    calls.push_back({CallKind::kAllocate, theirs});
  }
  require_same_call(calls);
  if (bytes == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "a symmetric segment of 0 bytes was asked for; ask for at least 1");
  }
}

void require_gather_space(std::size_t mine_bytes, std::size_t all_bytes, int size) {
  if (all_bytes == static_cast<std::size_t>(size) * mine_bytes) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("all_gather of {} bytes from {} ranks into {} bytes; give room for {}",
                  mine_bytes, size, all_bytes, static_cast<std::size_t>(size) * mine_bytes));
}

void share_outcome(Fabric& fabric, const std::optional<Error>& mine,
                   const std::optional<WaitFailure>& wait) {
  if (fabric.size() == 1) {
    if (mine && wait) throw TimeoutError(mine->code(), mine->what(), *wait);
    if (mine) throw Error(*mine);
    return;
  }
  struct Outcome {
    std::int32_t failed = 0, timed_out = 0;
    FailureBody body;
    std::array<char, 512> message{};
  };
  Outcome outcome;
  if (mine) {
    outcome.failed = 1;
    outcome.timed_out = wait ? 1 : 0;
    outcome.body = FailureBody::of(mine->code(), wait.value_or(WaitFailure()));
    const std::string_view text = mine->what();
    std::copy_n(text.begin(), std::min(text.size(), outcome.message.size() - 1),
                outcome.message.begin());
  }
  const std::vector<Outcome> all = gather(fabric, outcome);
  for (std::size_t r = 0; r < all.size(); ++r) {
    const Outcome& theirs = all[r];
    if (theirs.failed == 0) continue;
    const auto code = static_cast<ErrorCode>(theirs.body.code);
    if (theirs.timed_out == 0) {
      throw Error(code, fmt::format("rank {}: {}", r, theirs.message.data()));
    }
    // The message names the rank that waited.
    throw TimeoutError(code, theirs.message.data(), theirs.body.failure());
  }
}

std::string list_ranks(std::span<const int> ranks) {
  if (ranks.size() == 1) return fmt::format("rank {}", ranks.front());
  return fmt::format("ranks {} and {}", join(ranks.first(ranks.size() - 1), ", "), ranks.back());
}

bool has_record(const Fabric& fabric) { return fabric.view().record != nullptr; }

Blame blame(const protocol::WorldView& view, int rank, std::span<const int> missing,
            std::chrono::nanoseconds deadline) {
  Blame blame;
  for (const int suspect : missing) {
    protocol::WorldRecord::Culprit found{view.name(suspect), -1, {}};
    if (view.record) found = view.record->culprit(found.rank, deadline);
    if (found.rank == view.name(rank)) found = {view.name(suspect), -1, {}};
    if (found.witness >= 0) {
      const bool gave_up = found.wait.phase == protocol::Phase::kGaveUp;
      blame.because +=
          fmt::format("{}rank {} {} rank {}", blame.because.empty() ? "" : ", ", found.witness,
                      gave_up ? "waited in vain for" : "waits for", found.rank);
      if (!gave_up) blame.because += fmt::format(" ({})", protocol::phase_name(found.wait.phase));
    }
    if (std::find(blame.ranks.begin(), blame.ranks.end(), found.rank) == blame.ranks.end()) {
      blame.ranks.push_back(found.rank);
    }
  }
  std::sort(blame.ranks.begin(), blame.ranks.end());
  return blame;
}

WaitFailure bootstrap_failure(int waiter, int peer, std::uint64_t slot, int size, int arrived,
                              std::chrono::nanoseconds waited) {
  WaitFailure failure;
  failure.waiter_rank = waiter;
  failure.peer_rank = peer;
  failure.phase = "bootstrap";
  failure.slot = slot;
  failure.expected = static_cast<std::uint64_t>(size);
  failure.observed = static_cast<std::uint64_t>(arrived);
  failure.waited_seconds = std::chrono::duration<double>(waited).count();
  return failure;
}

void throw_world_is_dead(const std::string& message, const WaitFailure& failure) {
  throw TimeoutError(
      ErrorCode::kAborted,
      fmt::format("this world is dead, make a new one; it failed because: {}", message), failure);
}

}  // namespace switchyard
