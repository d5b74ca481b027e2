#include "fabric/fabric.h"

#include <fmt/core.h>

#include <utility>

#include "base/interrupt.h"
#include "base/limits.h"
#include "fabric/collective.h"
#include "network/rows.h"
#include "protocol/control.h"

namespace switchyard {

Fabric::AbortHook::AbortHook(Fabric& fabric, std::function<void()> hook)
    : fabric_(fabric), hook_(std::move(hook)) {
  const std::lock_guard lock(fabric_.hooks_mutex_);
  fabric_.hooks_.push_back(this);
  // A hook that comes too late for abort() runs at once.
  if (fabric_.was_aborted()) hook_();
}

Fabric::AbortHook::~AbortHook() {
  const std::lock_guard lock(fabric_.hooks_mutex_);
  std::erase(fabric_.hooks_, this);
}

void Fabric::abort(AbortCause cause) noexcept {
  {
    const std::lock_guard lock(hooks_mutex_);
    if (was_aborted()) return;
    aborted_.store(cause, std::memory_order_release);
    for (const AbortHook* const hook : hooks_) hook->hook_();
  }
  abort_collectives();
}

std::uint64_t Fabric::abort_word() const noexcept {
  const std::uint64_t why = abort_cause() == AbortCause::kInterrupted ? protocol::kInterrupted : 0;
  return protocol::kCalledOff | why | static_cast<std::uint64_t>(rank() + 1);
}

std::unique_ptr<network::RowsRegion> Fabric::share_rows(std::span<std::byte>,
                                                        const std::shared_ptr<const void>&, int) {
  return nullptr;
}

void Fabric::report(const TimeoutError& error) const noexcept {
  const auto name = [this](int rank) {
    return rank < 0 || rank >= size() ? rank : view_.name(rank);
  };
  WaitFailure failure = error.failure();
  failure.waiter_rank = name(failure.waiter_rank);
  failure.peer_rank = name(failure.peer_rank);
  if (view_.record) view_.record->give_up(failure.peer_rank);
  tell(error.what(), failure);
}

std::vector<UniqueFd> gather_lives(Fabric& fabric, UniqueFd& keeps) {
  UniqueFd life;
  attempt_together(fabric, [&] { life = protocol::life_of_process(keeps); });
  return fabric.exchange_fds(life.get());
}

void keep_record(Fabric& fabric) {
  if (fabric.size() == 1) return;
  struct Memory {
    std::shared_ptr<SymmetricSegment> words;
    UniqueFd life;
  };
  const auto memory = std::make_shared<Memory>();
  memory->words = fabric.allocate(sizeof(std::uint64_t));
  std::vector<std::uint64_t*> words;
  for (int r = 0; r < fabric.size(); ++r) {
    words.push_back(reinterpret_cast<std::uint64_t*>(memory->words->base(r)));
  }
  std::vector<UniqueFd> lives = gather_lives(fabric, memory->life);
  protocol::WorldView view;
  view.world_size = fabric.size();
  view.record = std::make_shared<protocol::WorldRecord>(fabric.rank(), std::move(words), memory,
                                                        std::move(lives));
  fabric.set_view(std::move(view));
}

void require_world(int rank, int size) {
  require_within("size", size, 1, protocol::kMaxRanks, " (the ranks of a world)");
  require_within("rank", rank, 0, size - 1);
}

void require_one_host(const Fabric& fabric, const char* what) {
  if (fabric.proxy() == nullptr) return;
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("{}; the ranks of this world are on several hosts. Over hosts there are "
                  "Exchange and MoeLayer, and on CPUs (Backend::kCpu) Workspace, and nothing "
                  "else; start all ranks on one host",
                  what));
}

WaitFailure abort_failure(int rank) {
  WaitFailure failure;
  failure.waiter_rank = rank;
  failure.peer_rank = rank;
  failure.phase = kAbortPhase;
  return failure;
}

std::string abort_message(int rank, AbortCause cause) {
  if (cause == AbortCause::kInterrupted) {
    return fmt::format("rank {} was interrupted, as by Ctrl-C, while it waited", rank);
  }
  return fmt::format("rank {} called World::abort()", rank);
}

void throw_if_interrupted(int rank) {
  if (!interrupted()) return;
  throw TimeoutError(ErrorCode::kAborted, abort_message(rank, AbortCause::kInterrupted),
                     abort_failure(rank));
}

}  // namespace switchyard
