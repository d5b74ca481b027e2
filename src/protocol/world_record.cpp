#include "protocol/world_record.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "protocol/atomics.h"

namespace switchyard::protocol {
namespace {

std::int64_t now_ns() { return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count(); }

}  // namespace

WorldRecord::WorldRecord(int rank, std::vector<std::uint64_t*> words,
                         std::shared_ptr<const void> memory, std::vector<UniqueFd> lives)
    : rank_(rank),
      words_(std::move(words)),
      memory_(std::move(memory)),
      lives_(std::move(lives)),
      last_(words_.size()),
      seen_(words_.size() * words_.size()) {}

WorldRecord::~WorldRecord() {
  if (!watcher_.joinable()) return;
  const std::uint64_t one = 1;
  // It fails only where the counter is full, which wakes as well.
  [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof one);
  watcher_.join();
}

WorldRecord::LossHook::LossHook(WorldRecord& record, std::function<void(const WaitsFor&)> hook)
    : record_(record), hook_(std::move(hook)) {
  const std::lock_guard lock(record_.hooks_mutex_);
  record_.hooks_.push_back(this);
  if (record_.watcher_.joinable()) return;
  record_.stop_ = UniqueFd(::eventfd(0, EFD_CLOEXEC));
  if (!record_.stop_) throw_errno("cannot make an eventfd for the thread that sees ranks end");
  record_.watcher_ = std::thread([&of = record_] { of.watch(); });
}

WorldRecord::LossHook::~LossHook() {
  const std::lock_guard lock(record_.hooks_mutex_);
  std::erase(record_.hooks_, this);
}

// Takes the notes that threads which wait take on the host. A rank is gone for good, so a wait for
// it that is shown anew has not ended meanwhile.
void WorldRecord::watch() {
  std::uint64_t last = 0;
  for (;;) {
    std::vector<pollfd> fds{{stop_.get(), POLLIN, 0}};
    wait_ready(fds, Clock::now() + kBeat / 2);
    if (fds[0].revents != 0) return;
    look();
    const std::uint64_t now = word();
    const WaitsFor wait = WaitsFor::unpack(now), before = WaitsFor::unpack(last);
    const bool goes_on =
        now != last && wait.is_wait() && before.is_wait() && wait.peer == before.peer;
    last = now;
    if (!goes_on || wait.peer == rank_ || wait.peer >= size() || !is_gone(wait.peer)) continue;
    const std::lock_guard lock(hooks_mutex_);
    for (const LossHook* const hook : hooks_) hook->hook_(wait);
    hooks_.clear();
  }
}

void WorldRecord::show(const WaitsFor& wait) {
  std::uint64_t* const word = word_of(rank_);
  // Threads that sleep equally long write one behind the other, so a reader may see only the last
  // of them. A wait for the rank's own threads tells nothing beside one for another rank.
  const WaitsFor shown = WaitsFor::unpack(load_relaxed(word));
  if (wait.own && shown.is_wait() && !shown.own) return;
  // The beat is any number that differs from the last one.
  store_release(word, wait.pack(static_cast<std::uint32_t>(load_relaxed(word)) + 1));
}

void WorldRecord::end_wait() {
  std::uint64_t* const word = word_of(rank_);
  const std::uint64_t now = load_relaxed(word);
  // (Another thread of this rank may show its own wait at this moment, or have given up.)
  if (WaitsFor::unpack(now).is_wait()) compare_exchange(word, now, std::uint64_t{0});
}

void WorldRecord::go_on() {
  if (load_relaxed(word_of(rank_)) != 0) store_release(word_of(rank_), std::uint64_t{0});
}

void WorldRecord::give_up(int culprit) {
  if (culprit < 0 || culprit >= size() || culprit == rank_) return;
  store_release(word_of(rank_), WaitsFor{Phase::kGaveUp, culprit, 0, false}.pack(0));
}

void WorldRecord::leave() {
  if (WaitsFor::unpack(load_relaxed(word_of(rank_))).phase == Phase::kGaveUp) return;
  store_release(word_of(rank_), WaitsFor{Phase::kLeft, rank_, 0, false}.pack(0));
}

std::uint64_t WorldRecord::word() const { return load_acquire(word_of(rank_)); }

void WorldRecord::mirror(int rank, std::uint64_t word) { store_release(word_of(rank), word); }

void WorldRecord::see_off(int rank) {
  seen_off_.fetch_or(std::uint64_t{1} << rank, std::memory_order_release);
}

void WorldRecord::look() {
  const std::int64_t now = now_ns();
  std::int64_t next = next_look_.load(std::memory_order_relaxed);
  constexpr std::int64_t kInterval = std::chrono::nanoseconds(kBeat / 2).count();
  if (now < next || !next_look_.compare_exchange_strong(next, now + kInterval)) return;
  // A word that has changed since a look long ago may have done so then, and stand still now.
  const bool knows_before = now - next < std::chrono::nanoseconds(10 * kBeat).count();
  {
    const std::lock_guard lock(mutex_);
    for (int r = 0; r < size(); ++r) {
      std::uint64_t& last = last_[static_cast<std::size_t>(r)];
      const std::uint64_t word = load_acquire(word_of(r));
      if (word == last) continue;
      last = word;
      const WaitsFor wait = WaitsFor::unpack(word);
      if (!knows_before) continue;
      // A rank's wait for its own threads often is a consequence of another thread's wait.
      if (!wait.is_wait() || wait.own || wait.peer >= size()) continue;
      seen_[seen_at(r, wait.peer)] = {word, now};
    }
  }
  look_at_lives();
}

void WorldRecord::look_at_lives() const {
  std::array<pollfd, kMaxRanks> fds;
  std::array<int, kMaxRanks> ranks;
  nfds_t count = 0;
  const std::uint64_t ended = ended_.load(std::memory_order_relaxed);
  for (std::size_t r = 0; r < lives_.size(); ++r) {
    if (!lives_[r] || (ended >> r & 1) != 0) continue;
    ranks[count] = static_cast<int>(r);
    fds[count++] = {lives_[r].get(), POLLIN, 0};
  }
  if (count == 0 || ::poll(fds.data(), count, 0) <= 0) return;
  for (nfds_t i = 0; i < count; ++i) {
    if (fds[i].revents != 0) ended_.fetch_or(std::uint64_t{1} << ranks[i]);
  }
}

bool WorldRecord::is_gone(int rank) const {
  const std::uint64_t gone =
      ended_.load(std::memory_order_acquire) | seen_off_.load(std::memory_order_acquire);
  if ((gone >> rank & 1) != 0) return true;
  const bool is_here = lives_.empty() || lives_[static_cast<std::size_t>(rank)];
  return is_here && has_left(rank);
}

bool WorldRecord::has_left(int rank) const {
  return WaitsFor::unpack(load_acquire(word_of(rank))).phase == Phase::kLeft;
}

bool WorldRecord::has_ended(int rank) const {
  return (ended_.load(std::memory_order_acquire) >> rank & 1) != 0 && !has_left(rank);
}

int WorldRecord::given_up_by(int rank) const {
  const WaitsFor said = WaitsFor::unpack(load_acquire(word_of(rank)));
  return said.phase == Phase::kGaveUp && said.peer < size() ? said.peer : rank;
}

std::vector<WaitsFor> WorldRecord::waits_of(int rank, std::chrono::nanoseconds deadline) const {
  // This is long compared with the time between two beats, on a busy host and between hosts.
  using std::chrono::milliseconds;
  const auto window =
      std::clamp<std::chrono::nanoseconds>(deadline / 4, milliseconds(100), milliseconds(2'000));
  const std::int64_t since = now_ns() - window.count();
  std::vector<WaitsFor> waits;
  for (int peer = 0; peer < size() && !is_gone(rank); ++peer) {
    const Seen& last = seen(rank, peer);
    if (last.wait != 0 && last.changed >= since) waits.push_back(WaitsFor::unpack(last.wait));
  }
  return waits;
}

bool WorldRecord::waits(int rank, std::chrono::nanoseconds deadline) const {
  const std::lock_guard lock(mutex_);
  return !waits_of(rank, deadline).empty();
}

WorldRecord::Culprit WorldRecord::culprit(int suspect, std::chrono::nanoseconds deadline) const {
  look_at_lives();
  const std::lock_guard lock(mutex_);
  // The ranks that are yet to be looked at, each with who waits for it.
  std::vector<Culprit> pending{{suspect, -1, {}}};
  std::optional<Culprit> found;  // the first that does not wait
  std::uint64_t visited = 0;
  while (!pending.empty()) {
    const Culprit at = pending.back();
    pending.pop_back();
    if ((visited >> at.rank & 1) != 0) continue;
    visited |= std::uint64_t{1} << at.rank;
    const WaitsFor said = WaitsFor::unpack(load_acquire(word_of(at.rank)));
    if (said.phase == Phase::kGaveUp && said.peer < size()) return {said.peer, at.rank, said};
    if (is_gone(at.rank)) return at;
    const std::vector<WaitsFor> waits = waits_of(at.rank, deadline);
    // (This rank asks, so it waits.)
    if (waits.empty() && !found && at.rank != rank_) found = at;
    for (const WaitsFor& wait : waits) {
      if (wait.phase != Phase::kBootstrap) {
        pending.push_back({wait.peer, at.rank, wait});
        continue;
      }
      // A collective waits for all that are not in it.
      for (int r = size() - 1; r >= 0; --r) {
        const std::vector<WaitsFor> others = waits_of(r, deadline);
        const bool is_in_it = std::any_of(others.begin(), others.end(), [&](const WaitsFor& other) {
          return other.phase == Phase::kBootstrap && other.epoch == wait.epoch;
        });
        if (r != at.rank && !is_in_it) pending.push_back({r, at.rank, wait});
      }
    }
  }
  // They may wait for each other in a circle.
  return found.value_or(Culprit{suspect, -1, {}});
}

UniqueFd life_of_process(UniqueFd& keeps) {
#ifdef SYS_pidfd_open
  // (A child that is forked and lives on does not hold it open, as it would hold a pipe.)
  UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (process) return process;
#endif
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw_errno("cannot make a pipe");
  keeps = UniqueFd(ends[1]);
  return UniqueFd(ends[0]);
}

int WorldView::rank_of(int name) const {
  if (names.empty()) return name;
  const auto found = std::find(names.begin(), names.end(), name);
  return found == names.end() ? -1 : static_cast<int>(found - names.begin());
}

std::string WorldView::words_if_left(int rank) const {
  return record && record->has_left(name(rank))
             ? fmt::format("rank {} has destroyed its World", name(rank))
             : "";
}

std::optional<WorldRecord::Culprit> WorldView::culprit(int suspect,
                                                       std::chrono::nanoseconds deadline) const {
  if (!record) return WorldRecord::Culprit{suspect, -1, {}};
  WorldRecord::Culprit found = record->culprit(name(suspect), deadline);
  found.rank = rank_of(found.rank);
  if (found.rank < 0) return {};
  found.witness = found.witness < 0 ? -1 : rank_of(found.witness);
  return found;
}

}  // namespace switchyard::protocol
