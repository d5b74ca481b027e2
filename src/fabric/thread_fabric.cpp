// Ranks as threads of one process: they meet under a mutex at start-up and share the address space.
#include <fmt/core.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <utility>

#include "base/interrupt.h"
#include "base/mapping.h"
#include "base/posix.h"
#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "network/network.h"
#include "switchyard/error.h"
#include "switchyard/world.h"

namespace switchyard {
namespace {

// The contribution of one rank to a collective.
struct Contribution {
  Call call;
  std::vector<std::byte> data;           // all_gather
  std::shared_ptr<const Mapping> block;  // allocate
  std::optional<Error> refusal;          // allocate: why there is no block
  std::shared_ptr<const UniqueFd> file;  // exchange_fds
};

// One collective. Its contributions are written under the meeting's mutex and never change once
// all ranks have arrived, so they are read without it afterwards.
struct Round {
  explicit Round(int size) : contributions(static_cast<std::size_t>(size)) {}

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (std::size_t r = 0; r < contributions.size(); ++r) {
      if (!contributions[r]) ranks.push_back(static_cast<int>(r));
    }
    return ranks;
  }

  std::vector<std::optional<Contribution>> contributions;
  int num_arrived = 0;
};

// Where the ranks of one world meet.
class Meeting {
 public:
  Meeting(int size, std::chrono::milliseconds deadline)
      : size_(size),
        deadline_(deadline),
        round_(std::make_shared<Round>(size)),
        departed_(static_cast<std::size_t>(size), false) {}

  int size() const { return size_; }

  // Returns when all ranks have contributed. A round that completed is never failed afterwards:
  // either all ranks see it complete or none does.
  std::shared_ptr<const Round> meet(int rank, Contribution mine, const protocol::WorldView& view) {
    std::unique_lock lock(mutex_);
    if (death_) throw_world_is_dead(death_->message, death_->failure);
    const std::shared_ptr<Round> round = round_;
    std::optional<Contribution>& slot = round->contributions[static_cast<std::size_t>(rank)];
    if (slot) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("two threads called a collective as rank {} at the same time; use "
                              "one thread per rank",
                              rank));
    }
    const Call call = mine.call;
    slot = std::move(mine);
    if (++round->num_arrived == size_) {
      round_ = std::make_shared<Round>(size_);
      ++num_completed_;
      settled_.notify_all();
      return round;
    }

    const Clock::time_point start = Clock::now();
    give_up_on_departed(rank, call);
    if (!await(lock, start + deadline_, rank, view, *round)) {
      const std::vector<int> missing = round->missing();
      const Blame found = blame(view, rank, missing, deadline_);
      die(ErrorCode::kTimeout,
          found.because.empty()
              ? fmt::format("{} of {} did not call {} within {} ms; rank {} was waiting",
                            list_ranks(missing), size_, to_string(call.kind), deadline_.count(),
                            rank)
              : fmt::format("{} of {} did not go on within {} ms: rank {} waited for {} in {}, and "
                            "{}",
                            list_ranks(found.ranks), size_, deadline_.count(), rank,
                            list_ranks(missing), to_string(call.kind), found.because),
          bootstrap_failure(rank, found.ranks.front(), num_completed_, size_, round->num_arrived,
                            Clock::now() - start));
    }
    if (round->num_arrived < size_) {
      throw TimeoutError(death_->code, death_->message, death_->failure);
    }
    return round;
  }

  void call_off(int rank, AbortCause cause) {
    const std::lock_guard lock(mutex_);
    if (!death_) die(ErrorCode::kAborted, abort_message(rank, cause), abort_failure(rank));
  }

  void depart(int rank) {
    const std::lock_guard lock(mutex_);
    departed_[static_cast<std::size_t>(rank)] = true;
    for (std::size_t r = 0; r < round_->contributions.size(); ++r) {
      if (const auto& waiting = round_->contributions[r]) {
        give_up_on_departed(static_cast<int>(r), waiting->call);
        return;
      }
    }
  }

  bool has_departed(int rank) const {
    const std::lock_guard lock(mutex_);
    return departed_[static_cast<std::size_t>(rank)];
  }

 private:
  struct Death {
    ErrorCode code;
    std::string message;
    WaitFailure failure;
  };

  // Returns true once the round is settled, false once `until` has passed. Shows in the world's
  // record that the rank waits. Throws if the rank's caller interrupts it, also if that is while
  // the round completes: the world ends then anyway.
  bool await(std::unique_lock<std::mutex>& lock, Clock::time_point until, int rank,
             const protocol::WorldView& view, const Round& round) {
    const auto settled = [&] { return round.num_arrived == size_ || death_; };
    const protocol::EndOfWait end_of_wait(view.record.get());
    for (;;) {
      if (view.record) {
        const std::uint64_t number = num_completed_ + 1;
        const std::vector<int> missing = round.missing();
        if (!missing.empty()) {
          view.record->show({protocol::Phase::kBootstrap, missing.front(), number, false});
        }
        view.record->look();
      }
      const auto next = std::min(until, Clock::now() + protocol::WorldRecord::kBeat);
      if (settled_.wait_until(lock, next, settled)) return true;
      // The caller may call World::abort() when it is asked.
      lock.unlock();
      const bool ended = interrupted();
      lock.lock();
      if (ended) {
        const std::string message = abort_message(rank, AbortCause::kInterrupted);
        const WaitFailure failure = abort_failure(rank);
        if (!death_) die(ErrorCode::kAborted, message, failure);
        throw TimeoutError(ErrorCode::kAborted, message, failure);
      }
      if (Clock::now() >= until) return settled();
    }
  }

  void die(ErrorCode code, std::string message, const WaitFailure& failure) {
    death_ = Death{code, std::move(message), failure};
    settled_.notify_all();
  }

  // A rank that let go of its world can never come, so the others stop waiting before the deadline.
  void give_up_on_departed(int waiter, const Call& call) {
    if (death_) return;
    for (const int peer : round_->missing()) {
      if (!departed_[static_cast<std::size_t>(peer)]) continue;
      die(ErrorCode::kAborted,
          fmt::format("rank {} of {} destroyed its World while rank {} waited for it in {}", peer,
                      size_, waiter, to_string(call.kind)),
          bootstrap_failure(waiter, peer, num_completed_, size_, round_->num_arrived,
                            std::chrono::nanoseconds(0)));
      return;
    }
  }

  const int size_;
  const std::chrono::milliseconds deadline_;
  mutable std::mutex mutex_;
  std::condition_variable settled_;
  std::shared_ptr<Round> round_;  // the one that ranks now join
  std::uint64_t num_completed_ = 0;
  std::vector<bool> departed_;
  std::optional<Death> death_;
};

// Holds every rank's block, so that a block outlives its owner's handle while a peer may write it.
class ThreadSegment final : public SymmetricSegment {
 public:
  ThreadSegment(const Round& round, std::size_t bytes) {
    bytes_ = bytes;
    for (const auto& contribution : round.contributions) {
      blocks_.push_back(contribution->block);
      bases_.push_back(contribution->block->data());
    }
  }

 private:
  std::vector<std::shared_ptr<const Mapping>> blocks_;
};

class ThreadFabric final : public Fabric {
 public:
  ThreadFabric(std::shared_ptr<Meeting> meeting, int rank, std::chrono::milliseconds deadline)
      : Fabric(deadline), meeting_(std::move(meeting)), rank_(rank) {}
  ThreadFabric(const ThreadFabric&) = delete;
  ThreadFabric& operator=(const ThreadFabric&) = delete;
  ~ThreadFabric() override {
    if (view_.record) view_.record->leave();
    meeting_->depart(rank_);
  }

  int rank() const override { return rank_; }
  int size() const override { return meeting_->size(); }
  const char* name() const override { return "threads"; }

  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    require_gather_space(mine.size(), all.size(), size());
    Contribution contribution;
    contribution.call = {CallKind::kAllGather, mine.size()};
    contribution.data.assign(mine.begin(), mine.end());
    const auto round = meet(std::move(contribution));
    if (mine.empty()) return;
    for (std::size_t r = 0; r < round->contributions.size(); ++r) {
      std::memcpy(all.data() + r * mine.size(), round->contributions[r]->data.data(), mine.size());
    }
  }

  std::shared_ptr<SymmetricSegment> allocate(std::size_t bytes) override {
    Contribution contribution;
    contribution.call = {CallKind::kAllocate, bytes};
    try {
      if (bytes == 0) {
        throw Error(ErrorCode::kInvalidArgument,
                    "a symmetric segment of 0 bytes was asked for; ask for at least 1");
      }
      contribution.block = std::make_shared<const Mapping>(Mapping::anonymous(bytes));
    } catch (const Error& error) {
      contribution.refusal = error;
    }
    const auto round = meet(std::move(contribution));
    for (std::size_t r = 0; r < round->contributions.size(); ++r) {
      if (const auto& refusal = round->contributions[r]->refusal) {
        throw Error(refusal->code(), fmt::format("rank {}: {}", r, refusal->what()));
      }
    }
    return std::make_shared<ThreadSegment>(*round, bytes);
  }

  std::vector<UniqueFd> exchange_fds(int fd) override {
    Contribution contribution;
    contribution.call = {CallKind::kExchangeFds, 0};
    contribution.file = std::make_shared<const UniqueFd>(duplicate(fd));
    const auto round = meet(std::move(contribution));
    std::vector<UniqueFd> fds;
    for (const auto& theirs : round->contributions) fds.push_back(duplicate(theirs->file->get()));
    return fds;
  }

  std::string liveness(int rank) const override {
    return meeting_->has_departed(rank) ? fmt::format("rank {} has destroyed its World", rank) : "";
  }

  void abort_collectives() noexcept override {
    try {
      meeting_->call_off(rank_, abort_cause());
    } catch (...) {
      // There is no memory for the message, so the others wait until their deadlines.
    }
  }

 private:
  std::shared_ptr<const Round> meet(Contribution mine) {
    if (view_.record) view_.record->go_on();
    auto round = meeting_->meet(rank_, std::move(mine), view_);
    std::vector<Call> calls;
    for (const auto& contribution : round->contributions) calls.push_back(contribution->call);
    require_same_call(calls);
    return round;
  }

  std::shared_ptr<Meeting> meeting_;
  int rank_;
};

}  // namespace

std::vector<World> World::threads(int size, const WorldOptions& options) {
  require_world(0, size);
  const std::chrono::milliseconds deadline = checked_deadline(options.deadline);
  network::check(network::WindowOptions{options.network.chunk_bytes, options.network.window});
  const auto meeting = std::make_shared<Meeting>(size, deadline);
  std::vector<World> worlds;
  worlds.reserve(static_cast<std::size_t>(size));
  // Pages of their own: devices may map them, and nothing else that lies beside them.
  constexpr std::size_t kLine = 64;
  const auto words =
      std::make_shared<const Mapping>(Mapping::anonymous(kLine * static_cast<std::size_t>(size)));
  for (int rank = 0; rank < size; ++rank) {
    const auto fabric = make_shared_here<ThreadFabric>(meeting, rank, deadline);
    if (size > 1) {
      std::vector<std::uint64_t*> of_ranks;
      for (int r = 0; r < size; ++r) {
        of_ranks.push_back(
            reinterpret_cast<std::uint64_t*>(words->data() + kLine * static_cast<std::size_t>(r)));
      }
      fabric->set_view({std::make_shared<protocol::WorldRecord>(rank, std::move(of_ranks), words,
                                                                std::vector<UniqueFd>()),
                        {},
                        size});
    }
    worlds.emplace_back(fabric);
  }
  return worlds;
}

World World::single(const WorldOptions& options) { return threads(1, options).front(); }

}  // namespace switchyard
