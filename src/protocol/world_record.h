// The record of a world: one word of every rank that says what the rank waits for, or why it does
// not go on, wherever in the world it is: in a pass, an exchange, a collective or a symmetric heap.
// A rank that is about to blame another asks first whether that one waits itself. See
// decision 46.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/posix.h"
#include "protocol/control.h"

namespace switchyard::protocol {

class WorldRecord {
 public:
  // How often a waiting rank shows its wait at least. A rank whose word does not change is not
  // believed to wait.
  static constexpr std::chrono::milliseconds kBeat{20};

  // `words`: of all ranks, 0 at first; `memory` owns them. `lives`: of every rank a descriptor that
  // becomes readable when its process ends (life_of_process()), or none where that is not known.
  WorldRecord(int rank, std::vector<std::uint64_t*> words, std::shared_ptr<const void> memory,
              std::vector<UniqueFd> lives);
  ~WorldRecord();
  WorldRecord(const WorldRecord&) = delete;
  WorldRecord& operator=(const WorldRecord&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(words_.size()); }

  // ---- What this rank says of itself. Any thread may call these.

  // Says that it waits. Called again and again while it does.
  void show(const WaitsFor& wait);
  // Says that a wait is over. What it said of giving up stays.
  void end_wait();
  // Says that it goes on, and is not to blame for what it gave up before.
  void go_on();
  // Says that it gave up because of `culprit`. The word outlives its process.
  void give_up(int culprit);
  // Says that it lets go of its World.
  void leave();

  // ---- What it knows of others.

  // Takes notes of all words, at most once in half a kBeat. Every waiting thread calls it.
  void look();
  // True if the rank will never do anything in this world again, and all that it did is here: its
  // process has ended, or it left. (Of a rank of another host the thread that talks to other hosts
  // says so, because what the rank did before it left may be on its way.)
  bool is_gone(int rank) const;
  // True if it said that it leaves.
  bool has_left(int rank) const;
  // True if its process has ended, and it had not left before.
  bool has_ended(int rank) const;
  // The rank because of which a rank gave up; else the rank itself.
  int given_up_by(int rank) const;

  // The rank that a search for the culprit ends at.
  struct Culprit {
    int rank;
    int witness;    // who waits for it, as far as is known; -1: only the caller
    WaitsFor wait;  // what the witness waits for
  };
  // Follows the waits from `suspect` on: to a rank that is gone, or that a rank gave up on, else to
  // one that waits for nobody. Waits count that were seen within a part of the deadline of the
  // caller's wait.
  Culprit culprit(int suspect, std::chrono::nanoseconds deadline) const;
  // True if the rank was seen to wait lately, in the same sense.
  bool waits(int rank, std::chrono::nanoseconds deadline) const;

  // ---- For ranks whose waits are in kernels.

  // The address of this rank's word.
  std::uint64_t* own_word() const { return word_of(rank_); }
  // While such an object lives, a thread of the record takes notes of all words. It calls `hook`
  // once for a rank that is gone, when this rank's word says that it waits for it. `hook` may not
  // throw, nor wait for other ranks. The object's destructor waits until it is not running.
  class LossHook {
   public:
    LossHook(WorldRecord& record, std::function<void(const WaitsFor&)> hook);
    ~LossHook();
    LossHook(const LossHook&) = delete;
    LossHook& operator=(const LossHook&) = delete;

   private:
    friend class WorldRecord;
    WorldRecord& record_;
    std::function<void(const WaitsFor&)> hook_;
  };

  // ---- For the thread that talks to other hosts.
  std::uint64_t word() const;
  void mirror(int rank, std::uint64_t word);
  // Says that a rank of another host has left, and that all that it did before is here.
  void see_off(int rank);

 private:
  // The last wait of one rank for another that was seen.
  struct Seen {
    std::uint64_t wait = 0;
    std::int64_t changed = 0;  // ns, when the word changed to it
  };
  std::size_t seen_at(int rank, int peer) const {
    return static_cast<std::size_t>(rank) * words_.size() + static_cast<std::size_t>(peer);
  }
  const Seen& seen(int rank, int peer) const { return seen_[seen_at(rank, peer)]; }
  void look_at_lives() const;
  void watch();
  // The rank's waits for others that were seen lately. Requires the mutex.
  std::vector<WaitsFor> waits_of(int rank, std::chrono::nanoseconds deadline) const;
  std::uint64_t* word_of(int rank) const { return words_[static_cast<std::size_t>(rank)]; }

  const int rank_;
  const std::vector<std::uint64_t*> words_;
  const std::shared_ptr<const void> memory_;
  const std::vector<UniqueFd> lives_;
  mutable std::atomic<std::uint64_t> ended_{0};  // a bit for each rank whose process has ended
  std::atomic<std::uint64_t> seen_off_{0};       // and for each that see_off() was called for
  std::atomic<std::int64_t> next_look_{0};
  mutable std::mutex mutex_;
  std::vector<std::uint64_t> last_;  // by rank: its word at the last look
  std::vector<Seen> seen_;           // [rank][peer]: a rank has several threads, but one word

  std::mutex hooks_mutex_;
  std::vector<LossHook*> hooks_;
  UniqueFd stop_;  // ends the thread
  std::thread watcher_;
};

// Ends the wait that this rank shows in a record, which may be null, at the end of the scope.
class EndOfWait {
 public:
  explicit EndOfWait(WorldRecord* record) : record_(record) {}
  ~EndOfWait() {
    if (record_ != nullptr) record_->end_wait();
  }
  EndOfWait(const EndOfWait&) = delete;
  EndOfWait& operator=(const EndOfWait&) = delete;

 private:
  WorldRecord* record_;
};

// A descriptor that becomes readable in every process that holds it when the calling process ends,
// however it ends. `keeps` receives one that this process has to keep open until then.
UniqueFd life_of_process(UniqueFd& keeps);

// How a fabric's ranks stand in their world: its record, and their numbers there. A copy is cheap.
struct WorldView {
  std::shared_ptr<WorldRecord> record;  // null while the world is made, and in a world of one
  std::vector<int> names;               // empty: a rank has the same number in the world
  int world_size = 0;

  int name(int rank) const { return names.empty() ? rank : names[static_cast<std::size_t>(rank)]; }
  // The opposite; -1 if the fabric does not have the rank.
  int rank_of(int name) const;
  // Says that the rank has left, if it has: for Fabric::liveness(), until its connection closes.
  std::string words_if_left(int rank) const;
  // WorldRecord::culprit() in this fabric's numbers; nothing if it is a rank that the fabric does
  // not have.
  std::optional<WorldRecord::Culprit> culprit(int suspect, std::chrono::nanoseconds deadline) const;
};

}  // namespace switchyard::protocol
