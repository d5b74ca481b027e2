#include "network/proxy.h"

#include <fmt/core.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <set>
#include <system_error>
#include <utility>

#include "base/interrupt.h"
#include "base/threads.h"
#include "protocol/wait.h"
#include "switchyard/error.h"

namespace switchyard::network {
namespace {

using std::chrono::milliseconds;

// How often control channels are read while chunks keep coming.
constexpr milliseconds kControlInterval{1};
// How long the proxy beats fast after the last change.
constexpr milliseconds kActiveTime{1'000};
// A network may notice that a rank has left before the rank's goodbye is here, and the goodbye may
// be here before the last of what the rank sent.
constexpr milliseconds kGoodbyeGrace{50};
// A process that ended may have ended because it was told why the world failed, and the kernel may
// have dropped its last words. Then others tell the same within this time.
constexpr milliseconds kDeathGrace{20};
constexpr milliseconds kFarewell{1'000};
// ProxyOptions::verdict_time is for deaths, which are told within 200 ms. Other failures took a
// deadline to find, so their verdict may take this many times longer.
constexpr int kVerdictTimes = 5;
// A proxy that has not dealt with a proposal so long after it was due does not run.
constexpr milliseconds kProxyTime{1'000};
// The longest sleep where the network has no descriptor to wait for.
constexpr std::chrono::microseconds kBriefSleep{100};
// Stands in the place of a time once a rank of this host has left.
constexpr auto kGone = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
// The most events that a turn of the proxy takes, so that everything has its turn.
constexpr std::size_t kEventsPerTurn = 64;

std::int64_t to_ns(Clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}
std::int64_t now_ns() { return to_ns(Clock::now()); }

// Slots of all windows that a rank writes into.
std::uint64_t num_slots(const Hosts& hosts, const WindowOptions& options) {
  return static_cast<std::uint64_t>(hosts.num_hosts() - 1) * kNumLanes * options.window;
}

Immediate::Kind chunk_of(Lane lane) {
  return lane == Lane::kDispatch ? Immediate::Kind::kDispatchChunk : Immediate::Kind::kCombineChunk;
}

}  // namespace

Proxy::Proxy(const Hosts& hosts, int rank, const ProxyOptions& options,
             std::unique_ptr<Network> network, std::vector<std::uint64_t*> alive,
             std::shared_ptr<const void> keeps_alive, std::vector<ControlChannel> channels,
             std::vector<std::string> where, std::shared_ptr<protocol::WorldRecord> record)
    : hosts_(hosts),
      rank_(rank),
      options_(options),
      alive_(std::move(alive)),
      keeps_alive_(std::move(keeps_alive)),
      where_(std::move(where)),
      record_(std::move(record)),
      arena_(hosts, rank, options.windows),
      network_(std::move(network)),
      wake_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      channels_(std::move(channels)),
      ring_(num_slots(hosts, options.windows)),
      last_heard_(static_cast<std::size_t>(hosts.num_ranks())),
      peers_(static_cast<std::size_t>(hosts.num_ranks())),
      why_lost_(static_cast<std::size_t>(hosts.num_ranks())),
      suspected_(static_cast<std::size_t>(hosts.num_ranks())),
      distrusted_(static_cast<std::size_t>(hosts.num_ranks())) {
  if (!wake_fd_) throw_errno("cannot make an eventfd for the network's thread");
  network_->add(arena_.memory());
  const WindowOptions& windows = options_.windows;
  for (int host = 0; host < hosts_.num_hosts(); ++host) {
    for (int l = 0; l < kNumLanes; ++l) {
      if (host == hosts_.host_of(rank_)) {
        outboxes_.push_back(nullptr);
        continue;
      }
      const auto lane = static_cast<Lane>(l);
      Outbox::Place place;
      place.gateway = hosts_.gateway(rank_, host);
      place.number = static_cast<std::uint32_t>(outboxes_.size());
      place.from = arena_.outgoing_at(host, lane);
      place.to = Arena::window_at(hosts_, windows, place.gateway, rank_, lane);
      place.immediate = {chunk_of(lane), rank_, 0};
      outboxes_.push_back(
          std::make_unique<Outbox>(arena_, windows, place, ring_, [this] { wake(); }));
    }
  }
  queued_.resize(outboxes_.size());
  rows_.resize(outboxes_.size());
  for (const int source : hosts_.sources_of(rank_)) {
    for (int l = 0; l < kNumLanes; ++l) {
      Inbox inbox;
      inbox.source = source;
      inbox.lane = static_cast<Lane>(l);
      inbox.at = Arena::window_at(hosts_, windows, rank_, source, inbox.lane);
      inbox.arrived.resize(windows.window);
      inboxes_.push_back(std::move(inbox));
    }
  }
  // A sends to B exactly if B hears from A, so each is an acquaintance of the other.
  std::set<int> known;
  for (const auto& outbox : outboxes_) {
    if (outbox) known.insert(outbox->gateway());
  }
  for (const Inbox& inbox : inboxes_) known.insert(inbox.source);
  if (!known.empty()) first_unconnected_.store(*known.begin(), std::memory_order_relaxed);
  for (const int other : known) {
    // Only one of the two greets, so that they do not connect to each other at the same time.
    acquaintances_.push_back({other, rank_ < other ? Immediate::kGreeting : 0});
  }
}

void Proxy::start(std::span<const Blob> addresses) {
  network_->connect(addresses);
  const std::int64_t now = now_ns();
  for (auto& heard : last_heard_) heard.store(now, std::memory_order_relaxed);
  protocol::store_release(alive_[static_cast<std::size_t>(rank_)], static_cast<std::uint64_t>(now));
  next_beat_ = next_control_ = last_active_ = Clock::now();
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::kSystem,
                fmt::format("the network's thread could not be started ({}); {}",
                            error.code().message(), kThreadRemedy));
  }
}

Proxy::~Proxy() {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_seq_cst);
  wake();
  thread_.join();
}

std::int64_t Proxy::last_sign_of(int rank) const {
  const auto i = static_cast<std::size_t>(rank);
  if (!hosts_.same_host(rank, rank_)) return last_heard_[i].load(std::memory_order_acquire);
  return static_cast<std::int64_t>(protocol::load_acquire(alive_[i]));
}

Traffic Proxy::traffic() const {
  Traffic traffic;
  for (const auto& outbox : outboxes_) {
    if (outbox) traffic.bytes_sent += outbox->bytes_sent();
  }
  traffic.bytes_sent += row_bytes_sent_.load(std::memory_order_relaxed);
  traffic.chunks_sent = chunks_sent_.load(std::memory_order_relaxed);
  traffic.chunks_received = chunks_received_.load(std::memory_order_relaxed);
  return traffic;
}

std::string Proxy::liveness(int rank) const {
  if (!is_rank_elsewhere(rank)) return "";
  const auto i = static_cast<std::size_t>(rank);
  switch (peers_[i].load(std::memory_order_acquire)) {
    case Peer::kLost: {
      const std::lock_guard lock(words_mutex_);
      return fmt::format("rank {} on {} {}", rank, where_[i], why_lost_[i]);
    }
    case Peer::kDeparted:
      return fmt::format("rank {} on {} has destroyed its World", rank, where_[i]);
    case Peer::kHere: break;
  }
  const std::int64_t age = now_ns() - last_heard_[i].load(std::memory_order_acquire);
  if (age < kLeastSilence) return "";
  return fmt::format(
      "rank {} on {} was last heard of {:.3f} s ago: it is stopped, or its host "
      "cannot be reached",
      rank, where_[i], static_cast<double>(age) * 1e-9);
}

// The proxy looks for commands once more after it has said that it sleeps (ring.h).
void Proxy::wake() {
  if (!sleeping_.load(std::memory_order_seq_cst)) return;
  const std::uint64_t one = 1;
  // It fails only where the counter is full, which wakes as well.
  [[maybe_unused]] const ssize_t written = ::write(wake_fd_.get(), &one, sizeof one);
}

void Proxy::on_thread(const std::function<void(Network&)>& task) {
  std::packaged_task<void(Network&)> packaged(task);
  std::future<void> done = packaged.get_future();
  {
    const std::lock_guard lock(tasks_mutex_);
    tasks_.push_back(std::move(packaged));
  }
  has_tasks_.store(true, std::memory_order_seq_cst);
  wake();
  done.get();
}

void Proxy::put_rows(Lane lane, int host, std::vector<Queued> puts) {
  outbox(lane, host).count_rows(puts.size());
  const Immediate immediate{chunk_of(lane), rank_, Immediate::kRows};
  for (Queued& queued : puts) queued.put.immediate = immediate.pack();
  {
    const std::lock_guard lock(tasks_mutex_);
    auto& queue = rows_[outbox_number(lane, host)];
    std::move(puts.begin(), puts.end(), std::back_inserter(queue));
  }
  has_tasks_.store(true, std::memory_order_seq_cst);
  wake();
}

std::uint32_t Proxy::enter(std::span<std::byte* const> bases, std::size_t bytes) {
  const std::lock_guard lock(heaps_mutex_);
  Heap heap;
  heap.heaps.experts.num_ranks = hosts_.num_ranks();
  heap.heaps.rank = rank_;
  heap.heaps.arbiter = hosts_.ranks_of(hosts_.host_of(rank_)).front();
  std::copy(bases.begin(), bases.end(), heap.heaps.base);
  heap.bytes = bytes;
  heaps_.emplace(next_segment_, heap);
  return next_segment_++;
}

bool Proxy::is_quiet(const Heap& heap) const {
  for (std::size_t o = 0; o < outboxes_.size(); ++o) {
    if (!outboxes_[o] || outboxes_[o]->is_idle()) continue;
    // A rank that has left has read all that it wanted, though its last credits may be lost.
    const auto gateway = static_cast<std::size_t>(outboxes_[o]->gateway());
    if (peers_[gateway].load(std::memory_order_acquire) == Peer::kHere) return false;
  }
  const std::uint64_t ended = protocol::load_relaxed(&heap.heaps.control(rank_)->ended);
  const std::vector<int>& neighbours = hosts_.ranks_of(hosts_.host_of(rank_));
  return std::all_of(neighbours.begin(), neighbours.end(), [&](int r) {
    // A rank that has left in the middle of a call waits for nothing.
    return protocol::load_acquire(&heap.heaps.control(r)->ended) >= ended ||
           (record_ && record_->is_gone(r));
  });
}

void Proxy::leave(std::uint32_t segment) {
  Heap heap;
  {
    const std::lock_guard lock(heaps_mutex_);
    heap = heaps_.at(segment);
  }
  for (const auto& outbox : outboxes_) {
    if (outbox) outbox->flush();
  }
  const Clock::time_point until = Clock::now() + options_.deadline;
  const auto is_settled = [&] {
    const std::lock_guard lock(heaps_mutex_);
    return !heaps_.at(segment).proposal;
  };
  // A rank that gave up elsewhere in the world waits for nobody here.
  const auto gave_up = [&] { return record_ && record_->given_up_by(rank_) != rank_; };
  while (!protocol::aborted(heap.heaps) && !(is_quiet(heap) && is_settled()) && !gave_up() &&
         Clock::now() < until && !interrupted()) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  if (interrupted()) {
    // Others may still need what this rank would have passed on.
    const std::uint64_t word =
        protocol::kCalledOff | protocol::kInterrupted | static_cast<std::uint64_t>(rank_ + 1);
    for (int r = 0; r < heap.heaps.size(); ++r) {
      protocol::compare_exchange(&heap.heaps.control(r)->abort, std::uint64_t{0}, word);
    }
  }
  // Others must learn why before they see this rank leave.
  const Clock::time_point told_by = std::min(until, Clock::now() + kFarewell);
  std::unique_lock lock(heaps_mutex_);
  while (protocol::aborted(heap.heaps) && !heaps_.at(segment).abort_announced &&
         Clock::now() < told_by) {
    lock.unlock();
    wake();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    lock.lock();
  }
  heaps_.erase(segment);
}

std::byte* Proxy::at(std::uint32_t segment, const Target& target, std::uint64_t bytes,
                     std::string& fault) {
  const auto heap = heaps_.find(segment);
  if (heap == heaps_.end()) {
    if (segment >= next_segment_) fault = fmt::format("a record for heap {}", segment);
    return nullptr;
  }
  if (target.rank < 0 || target.rank >= hosts_.num_ranks() ||
      !hosts_.same_host(target.rank, rank_)) {
    fault = fmt::format("a record for rank {}, which is not of this host", target.rank);
    return nullptr;
  }
  // Nobody but its rank writes a Control, except through messages of its own kind.
  const std::uint64_t end = heap->second.bytes;
  if (target.offset < sizeof(protocol::Control) || target.offset > end ||
      bytes > end - target.offset) {
    fault = fmt::format("a record of {} bytes for offset {} of a heap of {}", bytes, target.offset,
                        end);
    return nullptr;
  }
  return heap->second.heaps.base[target.rank] + target.offset;
}

// ----------------------------------------------------------------------------------- the thread

void Proxy::run() {
  if (acquaintances_.empty()) network_->refuse_connections();
  while (!stopping_.load(std::memory_order_acquire)) {
    bool busy = hear_network();
    busy |= apply_arrived();
    if (first_unconnected() >= 0) greet();
    busy |= do_tasks();
    busy |= send_queued();
    const Clock::time_point now = Clock::now();
    if (busy) last_active_ = now;
    // Beats come first, because the rest may want the next turn before the next beat.
    if (now >= next_beat_) beat(now);
    if (now >= next_control_) {
      for (int r = 0; r < hosts_.num_ranks(); ++r) hear_control(r);
      next_control_ = now + kControlInterval;
      look_at_neighbours();
      check_suspects(now);
    }
    // It is cleared before the heaps are looked at, so a proposal that comes later is not missed.
    proposed_.store(false, std::memory_order_seq_cst);
    announce_aborts();
    if (!busy) sleep(network_->wait_fd() < 0);
  }
  say_goodbye();
}

bool Proxy::hear_network() {
  std::array<Event, kEventsPerTurn> events;
  const std::size_t count = network_->poll(events);
  for (std::size_t i = 0; i < count; ++i) hear(events[i]);
  return count > 0;
}

void Proxy::hear(const Event& event) {
  switch (event.kind) {
    case Event::Kind::kSent: {
      if (event.context >= kRowsContext) {
        const auto sent = sending_.find(event.context);
        if (sent == sending_.end()) return;
        sent->second.unsent->fetch_sub(1, std::memory_order_release);
        sending_.erase(sent);
        return;
      }
      const auto number = static_cast<std::size_t>(event.context >> 32);
      outboxes_[number]->sent(static_cast<std::uint32_t>(event.context));
      return;
    }
    case Event::Kind::kLost:
      if (!is_rank_elsewhere(event.rank)) return;  // the deadline shows whose it was
      return suspect(event.rank, "cannot be reached: " + event.why, kGoodbyeGrace);
    case Event::Kind::kArrived: break;
  }
  const Immediate immediate = Immediate::unpack(event.immediate);
  if (!is_rank_elsewhere(immediate.source)) return;  // nobody to blame
  last_heard_[static_cast<std::size_t>(immediate.source)].store(now_ns(),
                                                                std::memory_order_release);
  switch (immediate.kind) {
    case Immediate::Kind::kDispatchChunk: return hear_chunk(immediate, Lane::kDispatch);
    case Immediate::Kind::kCombineChunk: return hear_chunk(immediate, Lane::kCombine);
    case Immediate::Kind::kDispatchCredit: return hear_credit(immediate, Lane::kDispatch);
    case Immediate::Kind::kCombineCredit: return hear_credit(immediate, Lane::kCombine);
  }
}

void Proxy::hear_chunk(const Immediate& immediate, Lane lane) {
  const auto inbox = std::find_if(inboxes_.begin(), inboxes_.end(), [&](const Inbox& i) {
    return i.source == immediate.source && i.lane == lane;
  });
  if (inbox != inboxes_.end() && immediate.value == Immediate::kRows) {
    ++inbox->rows;
    return;
  }
  if (inbox == inboxes_.end() || immediate.value >= options_.windows.window ||
      inbox->arrived[immediate.value]) {
    distrust(immediate.source, fmt::format(": a chunk in slot {}", immediate.value));
    return;
  }
  inbox->arrived[immediate.value] = true;
  chunks_received_.fetch_add(1, std::memory_order_relaxed);
}

// The lower rank greets, the higher answers, and the lower answers that. So whoever has an answer
// knows that the connection, or each of the two where a provider has one for each direction, is
// there. The port that connections come in by is not needed from then on: a connection that breaks
// is not made again, because its rank is lost.
void Proxy::hear_greeting(const Immediate& immediate) {
  const auto known =
      std::find_if(acquaintances_.begin(), acquaintances_.end(),
                   [&](const Acquaintance& a) { return a.rank == immediate.source; });
  if (known == acquaintances_.end()) {
    return distrust(immediate.source, ": a greeting of a rank that sends nothing here");
  }
  if (immediate.value == Immediate::kAnswer) {
    if (known->has_answered) return;
    known->has_answered = true;
    if (rank_ > known->rank) return;
  }
  known->unsent = Immediate::kAnswer;
}

void Proxy::greet() {
  int unconnected = -1;
  for (Acquaintance& other : acquaintances_) {
    // If the queue is full, it goes with the next turn.
    if (other.unsent != 0 &&
        network_->signal(other.rank,
                         Immediate{Immediate::Kind::kDispatchCredit, rank_, other.unsent}.pack())) {
      other.unsent = 0;
    }
    if (unconnected < 0 && (other.unsent != 0 || !other.has_answered)) unconnected = other.rank;
  }
  if (unconnected < 0) network_->refuse_connections();
  first_unconnected_.store(unconnected, std::memory_order_release);
}

void Proxy::hear_credit(const Immediate& immediate, Lane lane) {
  if (lane == Lane::kDispatch && immediate.value >= Immediate::kGreeting) {
    return hear_greeting(immediate);
  }
  Outbox& credited = outbox(lane, hosts_.host_of(immediate.source));
  if (credited.gateway() != immediate.source || !credited.credited(immediate.value)) {
    distrust(immediate.source, fmt::format(": {} credits too many", immediate.value));
  }
}

bool Proxy::apply_arrived() {
  bool any = false;
  for (Inbox& inbox : inboxes_) {
    const std::uint32_t window = options_.windows.window;
    while (inbox.arrived[inbox.next % window]) {
      if (peers_[static_cast<std::size_t>(inbox.source)].load(std::memory_order_relaxed) ==
          Peer::kLost) {
        break;
      }
      const std::uint64_t slot = inbox.next % window;
      const std::span<const std::byte> chunk =
          arena_.chunk(inbox.at + slot * options_.windows.chunk_bytes);
      if (rows_before(chunk) > inbox.rows) break;
      std::string fault;
      {
        const std::lock_guard lock(heaps_mutex_);
        fault = apply(chunk, inbox.next, *this);
      }
      if (!fault.empty()) {
        distrust(inbox.source, ": " + fault);
        break;
      }
      inbox.arrived[slot] = false;
      ++inbox.next;
      ++inbox.owed;
      any = true;
    }
    if (inbox.owed == 0) continue;
    const Immediate credit{inbox.lane == Lane::kDispatch ? Immediate::Kind::kDispatchCredit
                                                         : Immediate::Kind::kCombineCredit,
                           rank_, inbox.owed};
    // If the queue is full, the credits go with the next turn.
    if (network_->signal(inbox.source, credit.pack())) inbox.owed = 0;
  }
  return any;
}

bool Proxy::send_queued() {
  Command command;
  bool any = false;
  while (ring_.pop(command)) {
    queued_[command.outbox].push_back(
        {{command.rank, 0, command.from, command.bytes, std::nullopt, command.to, command.immediate,
          std::uint64_t{command.outbox} << 32 | command.context},
         nullptr});
    any = true;
  }
  for (std::deque<Queued>& queue : queued_) {
    while (!queue.empty()) {
      auto& [put, unsent] = queue.front();
      if (peers_[static_cast<std::size_t>(put.rank)].load(std::memory_order_relaxed) !=
          Peer::kHere) {
        // Nobody waits for them any more.
        for (const Queued& lost : queue) {
          if (lost.unsent) lost.unsent->fetch_sub(1, std::memory_order_release);
        }
        queue.clear();
        break;
      }
      if (unsent) put.context = next_context_;
      if (!network_->put(put)) break;
      if (unsent) {
        sending_.emplace(next_context_++, RowsFlight{put.rank, std::move(unsent)});
        row_bytes_sent_.fetch_add(put.bytes, std::memory_order_relaxed);
      } else {
        chunks_sent_.fetch_add(1, std::memory_order_relaxed);
      }
      queue.pop_front();
      any = true;
    }
  }
  return any;
}

bool Proxy::do_tasks() {
  if (!has_tasks_.load(std::memory_order_seq_cst)) return false;
  std::deque<std::packaged_task<void(Network&)>> tasks;
  {
    const std::lock_guard lock(tasks_mutex_);
    has_tasks_.store(false, std::memory_order_seq_cst);
    tasks.swap(tasks_);
    for (std::size_t o = 0; o < rows_.size(); ++o) {
      std::move(rows_[o].begin(), rows_[o].end(), std::back_inserter(queued_[o]));
      rows_[o].clear();
    }
  }
  for (auto& task : tasks) task(*network_);
  return true;
}

// Forgets rows on their way to a rank that has left or is lost: nobody waits for them.
void Proxy::forget_rows(int rank) {
  std::erase_if(sending_, [&](const auto& entry) {
    if (entry.second.rank != rank) return false;
    entry.second.unsent->fetch_sub(1, std::memory_order_release);
    return true;
  });
}

void Proxy::hear_control(int rank) {
  ControlChannel& channel = channels_[static_cast<std::size_t>(rank)];
  if (!channel.is_open()) return;
  channel.flush();
  while (const std::optional<ControlMessage> message = channel.receive()) hear(rank, *message);
  if (channel.garbled()) {
    distrust(rank, " of control messages");
    channel.close();
  } else if (channel.at_end()) {
    suspect(rank, "closed its connection: its process has ended", kDeathGrace);
    channel.close();
  }
}

void Proxy::hear(int rank, const ControlMessage& message) {
  const auto i = static_cast<std::size_t>(rank);
  last_heard_[i].store(now_ns(), std::memory_order_release);
  if (message.kind == ControlMessage::Kind::kGoodbye) {
    Peer here = Peer::kHere;
    peers_[i].compare_exchange_strong(here, Peer::kDeparted, std::memory_order_acq_rel);
    // The other end waits for this, so that it does not close with messages unread: the kernel
    // would take the goodbye back.
    channels_[i].close();
    forget_rows(rank);
    // A rank that wants no more of this one may go at any time. But one that is waited for will
    // never do its part.
    suspected_[i] = Suspicion{Clock::now() + kGoodbyeGrace, "has destroyed its World"};
    next_beat_ = std::min(next_beat_, suspected_[i]->due);
    return;
  }
  if (message.kind == ControlMessage::Kind::kAlive || distrusted_[i]) return;
  if (message.kind == ControlMessage::Kind::kRecord) {
    if (record_) record_->mirror(rank, message.word);
    last_active_ = Clock::now();
    return;
  }
  const std::lock_guard lock(heaps_mutex_);
  const auto entry = heaps_.find(message.segment);
  if (entry == heaps_.end()) {
    if (message.kind == ControlMessage::Kind::kPropose) {
      ControlMessage decline;
      decline.kind = ControlMessage::Kind::kDecline;
      decline.segment = message.segment;
      channels_[i].send(decline);
    }
    return;
  }
  Heap& heap = entry->second;
  const protocol::Heaps& heaps = heap.heaps;
  if (message.kind == ControlMessage::Kind::kBeat) {
    protocol::store_release(&heaps.control(rank)->waits_for, message.word);
    protocol::store_release(&heaps.control(rank)->progress, message.progress);
    last_active_ = Clock::now();
    return;
  }
  // The decision about such a heap has been told to everybody.
  if (protocol::aborted(heaps)) return;
  if (message.kind == ControlMessage::Kind::kPropose) {
    note_proposal(heap, message.record);
    return pursue(message.segment, heap);
  }
  if (message.kind == ControlMessage::Kind::kDecline) {
    if (heap.proposal) heap.proposal->declined[i] = true;
    return pursue(message.segment, heap);
  }
  if ((message.word & protocol::kCalledOff) != 0) {
    protocol::compare_exchange(&heaps.control(rank_)->abort, std::uint64_t{0}, message.word);
  } else {
    // This rank takes the decision over as if it had found the failure. The first record that a
    // rank of a host takes over is the verdict of all of them.
    protocol::abort_world(heaps, message.record);
  }
  announce_abort(message.segment, heap);
}

void Proxy::send_to_all(const ControlMessage& message) {
  for (ControlChannel& channel : channels_) {
    if (channel.is_open()) channel.send(message);
  }
}

bool Proxy::propose(std::uint32_t segment, const protocol::FailureRecord& record) {
  {
    const std::lock_guard lock(heaps_mutex_);
    const auto entry = heaps_.find(segment);
    if (entry == heaps_.end()) return false;
    Heap& heap = entry->second;
    if (protocol::aborted(heap.heaps)) return true;
    if (heap.proposal) return Clock::now() < heap.proposal->due + kProxyTime;
    note_proposal(heap, record);
  }
  proposed_.store(true, std::memory_order_seq_cst);
  wake();
  return true;
}

// The first proposal stays. A later one is of the same failure or of another, and either may be
// told.
void Proxy::note_proposal(Heap& heap, const protocol::FailureRecord& record) const {
  if (heap.proposal || protocol::aborted(heap.heaps)) return;
  const int times = record.phase == protocol::Phase::kLink ? 1 : kVerdictTimes;
  heap.proposal = Proposal{record, Clock::now() + times * options_.verdict_time, -1,
                           std::vector<bool>(static_cast<std::size_t>(hosts_.num_ranks()))};
}

// Returns a rank of a host before this rank's own that can still answer; -1: this rank decides.
// Proposals thus go from host to host towards the first one, in no circle. A host that cannot reach
// the first one asks the next one, which may reach it.
int Proxy::who_decides(const Proposal& proposal, Clock::time_point now) const {
  if (now >= proposal.due) return -1;
  const std::int64_t silent =
      std::chrono::nanoseconds(kVerdictTimes * options_.verdict_time).count();
  for (int host = 0; host < hosts_.host_of(rank_); ++host) {
    for (const int r : hosts_.ranks_of(host)) {
      const auto i = static_cast<std::size_t>(r);
      if (channels_[i].is_open() && !distrusted_[i] && !proposal.declined[i] &&
          to_ns(now) - last_heard_[i].load(std::memory_order_relaxed) < silent) {
        return r;
      }
    }
  }
  return -1;
}

void Proxy::pursue(std::uint32_t segment, Heap& heap) {
  if (!heap.proposal) return;
  if (protocol::aborted(heap.heaps)) return heap.proposal.reset();
  Proposal& proposal = *heap.proposal;
  const int decides = who_decides(proposal, Clock::now());
  if (decides < 0) {
    protocol::abort_world(heap.heaps, proposal.record);
    heap.proposal.reset();
    return announce_abort(segment, heap);
  }
  if (decides != proposal.asked) {
    ControlMessage message;
    message.kind = ControlMessage::Kind::kPropose;
    message.segment = segment;
    message.record = proposal.record;
    channels_[static_cast<std::size_t>(decides)].send(message);
    proposal.asked = decides;
  }
  next_beat_ = std::min(next_beat_, proposal.due);
}

void Proxy::announce_abort(std::uint32_t segment, Heap& heap) {
  const std::uint64_t word = protocol::load_acquire(&heap.heaps.control(rank_)->abort);
  if (word == 0 || heap.abort_announced) return;
  heap.abort_announced = true;
  if (heap.on_abort) heap.on_abort();
  ControlMessage message;
  message.kind = ControlMessage::Kind::kAbort;
  message.segment = segment;
  message.word = word;
  if ((word & protocol::kCalledOff) == 0) {
    message.record = heap.heaps.control(static_cast<int>(word) - 1)->failure;
  }
  send_to_all(message);
}

void Proxy::announce_aborts() {
  const std::lock_guard lock(heaps_mutex_);
  for (auto& [segment, heap] : heaps_) {
    pursue(segment, heap);
    announce_abort(segment, heap);
  }
}

void Proxy::beat(Clock::time_point now) {
  protocol::store_release(alive_[static_cast<std::size_t>(rank_)],
                          static_cast<std::uint64_t>(to_ns(now)));
  bool told = false;
  {
    const std::lock_guard lock(heaps_mutex_);
    for (auto& [segment, heap] : heaps_) {
      ControlMessage message;
      message.kind = ControlMessage::Kind::kBeat;
      message.segment = segment;
      message.word = protocol::load_acquire(&heap.heaps.control(rank_)->waits_for);
      message.progress = protocol::load_relaxed(&heap.heaps.control(rank_)->progress);
      if (message.word == heap.told_waits_for && message.progress == heap.told_progress) continue;
      heap.told_waits_for = message.word;
      heap.told_progress = message.progress;
      for (ControlChannel& channel : channels_) {
        if (channel.is_open()) channel.send_if_idle(message);
      }
      told = true;
    }
  }
  told |= tell_record();
  if (told) {
    last_active_ = now;
  } else {
    const ControlMessage alive;
    for (ControlChannel& channel : channels_) {
      if (channel.is_open()) channel.send_if_idle(alive);
    }
  }
  next_beat_ = now + (now - last_active_ < kActiveTime ? options_.beat : options_.idle_beat);
}

// Sends this rank's word of the world's record if it has changed.
bool Proxy::tell_record() {
  if (!record_ || record_->word() == told_word_) return false;
  ControlMessage message;
  message.kind = ControlMessage::Kind::kRecord;
  message.word = told_word_ = record_->word();
  // A wait is said again at the next beat.
  const bool waits = protocol::WaitsFor::unpack(message.word).is_wait();
  for (ControlChannel& channel : channels_) {
    if (!channel.is_open()) continue;
    waits ? channel.send_if_idle(message) : channel.send(message);
  }
  return true;
}

void Proxy::suspect(int rank, const std::string& why, Clock::duration grace) {
  const auto i = static_cast<std::size_t>(rank);
  if (suspected_[i] || peers_[i].load(std::memory_order_relaxed) != Peer::kHere) return;
  suspected_[i] = Suspicion{Clock::now() + grace, why};
  next_beat_ = std::min(next_beat_, Clock::now() + grace);
}

// A rank of this host may have had to pass on what ranks of others wait for, so its death is a loss
// for all, also where no rank of this host waits for it.
void Proxy::look_at_neighbours() {
  if (!record_) return;
  record_->look();
  for (const int r : hosts_.ranks_of(hosts_.host_of(rank_))) {
    if (r != rank_ && record_->has_ended(r)) {
      suspect(r, "has ended: its process is gone", kDeathGrace);
    }
  }
}

void Proxy::check_suspects(Clock::time_point now) {
  for (std::size_t i = 0; i < suspected_.size(); ++i) {
    if (!suspected_[i] || now < suspected_[i]->due) continue;
    const std::string why = suspected_[i]->why;
    suspected_[i].reset();
    const Peer peer = peers_[i].load(std::memory_order_relaxed);
    if (peer == Peer::kHere) lose(static_cast<int>(i), why);
    // It is not lost for those that do not wait for it.
    if (peer == Peer::kDeparted && record_) record_->see_off(static_cast<int>(i));
  }
}

void Proxy::lose(int rank, const std::string& why) {
  const auto i = static_cast<std::size_t>(rank);
  if (peers_[i].load(std::memory_order_relaxed) == Peer::kLost) return;
  {
    const std::lock_guard lock(words_mutex_);
    why_lost_[i] = why;
  }
  peers_[i].store(Peer::kLost, std::memory_order_release);
  forget_rows(rank);
  const std::int64_t silence = now_ns() - last_sign_of(rank);
  const std::lock_guard lock(heaps_mutex_);
  for (auto& [segment, heap] : heaps_) {
    protocol::FailureRecord record{};
    record.waiter = record.witness = rank_;
    record.peer = rank;
    record.phase = protocol::Phase::kLink;
    record.epoch = protocol::load_relaxed(&heap.heaps.control(rank_)->ended) + 1;
    record.waited_ns = static_cast<std::uint64_t>(std::max<std::int64_t>(silence, 1));
    note_proposal(heap, record);
    pursue(segment, heap);
  }
}

void Proxy::distrust(int rank, const std::string& fault) {
  distrusted_[static_cast<std::size_t>(rank)] = true;
  lose(rank, "broke the protocol" + fault);
}

void Proxy::sleep(bool briefly) {
  sleeping_.store(true, std::memory_order_seq_cst);
  if (ring_.empty() && !proposed_.load(std::memory_order_seq_cst) &&
      !has_tasks_.load(std::memory_order_seq_cst) && !stopping_.load(std::memory_order_seq_cst) &&
      network_->may_sleep()) {
    std::vector<pollfd> fds{{wake_fd_.get(), POLLIN, 0}};
    if (network_->wait_fd() >= 0) fds.push_back({network_->wait_fd(), POLLIN, 0});
    const std::size_t first_channel = fds.size();
    for (const ControlChannel& channel : channels_) {
      if (!channel.is_open()) continue;
      fds.push_back(
          {channel.fd(), static_cast<short>(POLLIN | (channel.has_unsent() ? POLLOUT : 0)), 0});
    }
    Clock::time_point until = next_beat_;
    if (briefly) until = std::min(until, Clock::now() + kBriefSleep);
    const auto left =
        std::max(std::chrono::nanoseconds(0), std::chrono::nanoseconds(until - Clock::now()));
    const timespec timeout{left.count() / 1'000'000'000, left.count() % 1'000'000'000};
    if (::ppoll(fds.data(), fds.size(), &timeout, nullptr) > 0) {
      std::uint64_t count = 0;
      if (fds[0].revents != 0) {
        [[maybe_unused]] const ssize_t got = ::read(wake_fd_.get(), &count, sizeof count);
      }
      for (std::size_t i = first_channel; i < fds.size(); ++i) {
        if (fds[i].revents != 0) next_control_ = Clock::time_point();
      }
    }
  }
  sleeping_.store(false, std::memory_order_seq_cst);
}

// Closes no connection before the other end has: a kernel that finds messages unread then drops
// what it has not delivered yet, the goodbye or the reason of an abort.
void Proxy::say_goodbye() {
  ControlMessage goodbye;
  goodbye.kind = ControlMessage::Kind::kGoodbye;
  // The ranks of this host are told, too: this rank is never silent from now on.
  protocol::store_release(alive_[static_cast<std::size_t>(rank_)], kGone);
  announce_aborts();
  tell_record();
  send_to_all(goodbye);
  const Clock::time_point until = Clock::now() + kFarewell;
  for (;;) {
    std::vector<pollfd> fds;
    for (std::size_t r = 0; r < channels_.size(); ++r) {
      ControlChannel& channel = channels_[r];
      if (!channel.is_open()) continue;
      channel.flush();
      if (!channel.has_unsent()) channel.end_sending();
      while (channel.receive()) last_heard_[r].store(now_ns(), std::memory_order_relaxed);
      if (channel.at_end() || channel.garbled()) {
        channel.close();
        continue;
      }
      // A rank that has stopped will not answer; its kernel has what it was told.
      if (now_ns() - last_heard_[r].load(std::memory_order_relaxed) > kLeastSilence) continue;
      fds.push_back(
          {channel.fd(), static_cast<short>(POLLIN | (channel.has_unsent() ? POLLOUT : 0)), 0});
    }
    if (fds.empty() || Clock::now() >= until) return;
    wait_ready(fds, until);
  }
}

}  // namespace switchyard::network
