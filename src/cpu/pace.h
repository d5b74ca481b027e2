// How threads of the CPU engine pause during a wait.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <thread>

#include "network/proxy.h"
#include "protocol/wait.h"
#include "protocol/world_record.h"
#include "trace/clock.h"

namespace switchyard::cpu {

class HostPace : public protocol::WaitsAlone {
 public:
  // `view`: of the heap's ranks. `remote`: of the heap, where some ranks are on other hosts; else
  // null. `stays_awake`: see kAwake.
  explicit HostPace(const protocol::WorldView& view, const network::RemoteHeap* remote = nullptr,
                    bool stays_awake = false)
      : view_(view), remote_(remote), stays_awake_(stays_awake) {}

  static constexpr std::uint32_t kLooksPerAbortCheck = 1;
  static constexpr std::uint32_t kLeastLooksOfAJudge = 64;
  // Peers must see that a waiting rank still runs, and they see it when the rank looks at the
  // clock. After a sleep such a look costs little by comparison. On a host with more threads than
  // cores a yield may last for many time slices, so the number of looks alone does not tell how
  // long ago the last one was.
  bool reads_clock(std::uint32_t looks) {
    if (looks % 64 == 0 || first_sleep_ != 0) return true;
    if (looks < kFirstYield) return false;
    const std::uint64_t time = clock();
    if (last_read_ == 0) last_read_ = time;
    return time - last_read_ >= kLongestSilence;
  }
  std::uint64_t now() { return last_read_ = clock(); }
  int silent_rank(std::uint64_t deadline_ns) const {
    return remote_ == nullptr ? -1 : remote_->silent_rank(deadline_ns);
  }
  // In the world's record waits have the world's numbers.
  void show(protocol::WaitsFor wait) const {
    if (!view_.record) return;
    wait.peer = view_.name(wait.peer);
    view_.record->show(wait);
    view_.record->look();
  }
  void end_wait() const {
    if (view_.record) view_.record->end_wait();
  }
  bool is_gone(int rank) const { return view_.record && view_.record->is_gone(view_.name(rank)); }
  std::optional<protocol::WorldRecord::Culprit> behind(int suspect,
                                                       std::uint64_t deadline_ns) const {
    return view_.culprit(suspect, std::chrono::nanoseconds(deadline_ns));
  }
  bool propose(const protocol::FailureRecord& record) const {
    return remote_ != nullptr && remote_->propose(record);
  }
  // Ranks may outnumber cores, so after a few looks the thread leaves the core to others. Every
  // wake-up takes the core from them for some microseconds, so sleeps grow with the time already
  // waited. Even the longest sleep is a few hundredths of that time.
  void pause(std::uint32_t looks) {
    if (looks < kFirstYield) {
      first_sleep_ = 0;  // A pace may serve several waits, one after the other.
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else if (!sleeps(looks)) {
      std::this_thread::yield();
    } else {
      const std::uint32_t microseconds = 50 + 10 * std::min(looks - first_sleep_, 95u);
      std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    }
  }

 private:
  static constexpr std::uint32_t kFirstYield = 32, kFirstSleep = 512;
  static constexpr std::uint64_t kLongestSilence = 1'000'000;  // ns
  // Data from another host takes hundreds of microseconds. Ranks that slept meanwhile would wait
  // for each other's sleeps, pass after pass. So a thread that waits for all of its rank may stay
  // awake for kAwake, if yields are so short that nobody else wants the core.
  static constexpr std::uint64_t kAwake = 2'000'000, kBriefYield = 2'000;  // ns

  static std::uint64_t clock() { return static_cast<std::uint64_t>(trace::now_ns()); }

  bool sleeps(std::uint32_t looks) {
    if (first_sleep_ != 0) return true;
    if (looks == kFirstYield && stays_awake_) yields_since_ = clock();
    if (looks < kFirstSleep) return false;
    if (stays_awake_) {
      const std::uint64_t yielded = clock() - yields_since_;
      if (yielded < std::min(kAwake, (looks - kFirstYield) * kBriefYield)) return false;
    }
    first_sleep_ = looks;
    return true;
  }

  const protocol::WorldView& view_;
  const network::RemoteHeap* remote_;
  const bool stays_awake_;
  std::uint64_t last_read_ = 0, yields_since_ = 0;
  std::uint32_t first_sleep_ = 0;  // the look; 0: not yet
};

}  // namespace switchyard::cpu
