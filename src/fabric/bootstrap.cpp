#include "fabric/bootstrap.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/interrupt.h"
#include "fabric/fabric.h"
#include "fabric/frames.h"
#include "fabric/hash.h"

namespace switchyard {
namespace {

constexpr int kRoot = 0;
// How long after its own deadline a member waits for the verdict of a root that is known to be in
// the same collective. The root acts on the earliest deadline of all, so only a stopped or starved
// root takes longer than an instant.
constexpr std::chrono::milliseconds kVerdictGrace{2'000};
// The same on one host while the world is made. No record says yet if the root still runs, so this
// is a part of the deadline: a stopped root is to be named soon after it. (Between hosts clocks
// differ, and the root may count from when it read the member's deadline.)
std::chrono::milliseconds start_grace(std::chrono::milliseconds deadline) {
  return std::clamp(deadline / 12, std::chrono::milliseconds(100), kVerdictGrace);
}
// How long a failing rank tries to tell its peers why, if their sockets are full.
constexpr std::chrono::seconds kFarewell{1};
// How often to try again, because neither a listener's appearance nor the end of SCM_RIGHTS
// congestion can be polled for.
constexpr std::chrono::milliseconds kRetryInterval{2};

// Rank 0 repeats in its own error what it told processes that it turned away, up to this length.
constexpr std::size_t kMaxRejectionBytes = 2000;

[[noreturn]] void throw_as(ErrorCode code, const std::string& message, const WaitFailure& failure) {
  if (code == ErrorCode::kTimeout || code == ErrorCode::kAborted) {
    throw TimeoutError(code, message, failure);
  }
  throw Error(code, message);
}

Clock::time_point retry_time(Clock::time_point until) {
  return std::min(until, Clock::now() + kRetryInterval);
}

// Returns a number by which frames of different worlds can be told apart. It is never 0.
std::uint64_t random_world() {
  std::uint64_t number = 0;
  fill_random(&number, sizeof number, "a new world");
  return number | 1;
}

}  // namespace

// The name is a hash, because it has room for 107 bytes and a rendezvous string may be longer. The
// hash includes the user id, so that two users' jobs with equal rendezvous strings do not meet.
std::string rendezvous_socket_name(std::string_view rendezvous) {
  const std::string text = fmt::format("{}:{}", ::geteuid(), rendezvous);
  const std::uint64_t low = fnv1a(kFnvBasis, text);
  const std::uint64_t high = fnv1a(low ^ 0x9e37'79b9'7f4a'7c15, text);
  return fmt::format("switchyard-{:016x}{:016x}", high, low);
}

Bootstrap::Bootstrap(int rank, int size, const std::string& rendezvous,
                     std::chrono::milliseconds deadline, std::string job,
                     const network::Secret& secret, protocol::WorldView view)
    : rank_(rank),
      size_(size),
      deadline_(checked_deadline(deadline)),
      job_(std::move(job)),
      view_(std::move(view)) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("rank {} of {} was asked for; ranks are 0 to size - 1, and a world has "
                            "at least one",
                            rank, size));
  }
  place_ = Place::of(rendezvous, rank, size, secret);
  channels_.resize(static_cast<std::size_t>(size));
  pids_.resize(static_cast<std::size_t>(size), 0);
  pids_[static_cast<std::size_t>(rank)] = ::getpid();
  if (size == 1) return;
  if (rank == kRoot) {
    admit_members();
  } else {
    join();
  }
}

Bootstrap::~Bootstrap() {
  if (!parting_ || death_ || called_off_.load() != AbortCause::kNone) return;
  for (Channel& channel : channels_) {
    if (channel.fd() < 0) continue;
    channel.queue(failure_frame(ErrorCode::kAborted, parting_->message, parting_->failure));
    channel.flush();
  }
}

void Bootstrap::part(const std::string& message, const WaitFailure& failure) noexcept {
  try {
    const std::lock_guard lock(parting_mutex_);
    if (!parting_) parting_ = Death{message, failure};
  } catch (...) {
    // There is no memory for the message; the record says whom this rank gave up on.
  }
}

std::int64_t Bootstrap::deadline_on_wire(Clock::time_point until) const {
  // Clocks of hosts differ, so between them the time that is left travels.
  return to_wire(place_->is_one_host() ? until : Clock::time_point(until - Clock::now()));
}

Clock::time_point Bootstrap::until_on_wire(std::int64_t nanoseconds) const {
  const Clock::time_point time = from_wire(nanoseconds);
  return place_->is_one_host() ? time : Clock::now() + time.time_since_epoch();
}

Bootstrap::Wait Bootstrap::start_wait() const { return {Clock::now() + deadline_, rank_}; }

std::chrono::nanoseconds Bootstrap::waited(const Wait& wait) const {
  return deadline_ - (wait.until - Clock::now());
}

WaitFailure Bootstrap::failure_record(const Wait& wait, int peer) const {
  return bootstrap_failure(name(wait.waiter), name(peer), num_collectives_, size_, wait.num_arrived,
                           waited(wait));
}

Clock::time_point Bootstrap::keep_watch(int peer, Clock::time_point until) {
  if (!view_.record) return until;
  const bool all = size_ == world_size();
  view_.record->show({all ? protocol::Phase::kBootstrap : protocol::Phase::kNeighbours, name(peer),
                      num_collectives_, false});
  view_.record->look();
  return std::min(until, Clock::now() + protocol::WorldRecord::kBeat);
}

void Bootstrap::fail_late(const Wait& wait, std::span<const int> missing, const std::string& what,
                          const std::string& known, const std::vector<bool>& arrived) {
  const Blame found = blame(view_, rank_, missing, deadline_);
  WaitFailure failure = failure_record(wait, missing.front());
  failure.peer_rank = found.ranks.front();
  if (found.because.empty()) {
    fail(ErrorCode::kTimeout,
         fmt::format("{} of {} {} within {} ms{}; rank {} was waiting",
                     missing.size() == 1 ? describe(missing.front()) : list_ranks(found.ranks),
                     world_size(), what, deadline_.count(), known, name(wait.waiter)),
         failure, arrived);
  }
  std::vector<int> awaited;
  for (const int rank : missing) awaited.push_back(name(rank));
  fail(ErrorCode::kTimeout,
       fmt::format("{} of {} did not go on within {} ms: rank {} waited for {} in {}, and {}{}",
                   list_ranks(found.ranks), world_size(), deadline_.count(), name(wait.waiter),
                   list_ranks(awaited), activity_, found.because, known),
       failure, arrived);
}

void Bootstrap::fail_closed(const Wait& wait, int rank, bool garbled,
                            const std::vector<bool>& arrived) {
  WaitFailure failure = failure_record(wait, rank);
  if (view_.record) failure.peer_rank = view_.record->given_up_by(name(rank));
  if (failure.peer_rank != name(rank)) {
    fail(ErrorCode::kAborted,
         fmt::format("rank {} of {} is lost to the world: rank {} waited for it in vain, and left "
                     "during {}",
                     failure.peer_rank, world_size(), name(rank), activity_),
         failure, arrived);
  }
  fail(ErrorCode::kAborted,
       fmt::format("{} of {} {} during {}: the process ended, or destroyed or aborted its World",
                   describe(rank), world_size(),
                   garbled ? "broke the bootstrap protocol" : "closed its connection", activity_),
       failure, arrived);
}

std::string Bootstrap::describe(int rank) const {
  const pid_t pid = pids_[static_cast<std::size_t>(rank)];
  return pid > 0 ? fmt::format("rank {} (process {})", name(rank), pid)
                 : fmt::format("rank {}", name(rank));
}

Frame Bootstrap::frame_of(FrameKind kind, std::shared_ptr<const Payload> payload) const {
  Frame frame;
  frame.header.kind = kind;
  frame.header.world = world_;
  frame.header.rank = rank_;
  frame.payload = std::move(payload);
  return frame;
}

Frame Bootstrap::failure_frame(ErrorCode code, std::string_view message,
                               const WaitFailure& failure) const {
  return frame_of(FrameKind::kFailure, failure_payload(code, message, failure));
}

UniqueFd Bootstrap::listen_as_root(const Wait& wait) {
  for (;;) {
    if (UniqueFd listener = place_->try_listen()) return listener;
    // Another process is rank 0 here. introduce() asks it as any rank would, and throws what it
    // says.
    Channel holder = place_->try_connect(wait.until);
    if (holder.fd() >= 0) {
      const std::string who = place_->describe(holder.fd());
      Wait asking = wait;
      introduce(holder, asking);
      if (Clock::now() >= wait.until) {
        throw Error(ErrorCode::kSystem,
                    fmt::format("the socket of rendezvous '{}' is held by {}, which does not "
                                "answer; choose another rendezvous string",
                                place_->rendezvous(), who));
      }
    } else if (Clock::now() >= wait.until) {
      throw Error(ErrorCode::kSystem,
                  fmt::format("the socket of rendezvous '{}' is bound by another process that does "
                              "not accept connections; choose another rendezvous string",
                              place_->rendezvous()));
    }
    await(retry_time(wait.until));
  }
}

void Bootstrap::admit_members() {
  Wait wait = start_wait();
  std::optional<Lobby> lobby(place_->make_lobby(listen_as_root(wait)));
  world_ = random_world();
  const auto joined = [&] {
    std::vector<bool> ranks(channels_.size());
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      ranks[r] = static_cast<int>(r) == rank_ || channels_[r].fd() >= 0;
    }
    return ranks;
  };

  while (wait.num_arrived < size_) {
    for (Lobby::Arrival& arrival : lobby->take_turn()) admit(arrival, joined(), wait);
    for (int r = 1; r < size_; ++r) {
      if (channels_[static_cast<std::size_t>(r)].fd() >= 0) hear_member(r, wait, joined());
    }
    if (wait.num_arrived == size_) break;

    if (Clock::now() >= wait.until) {
      const std::vector<bool> arrived = joined();
      const auto first_missing =
          static_cast<int>(std::find(arrived.begin(), arrived.end(), false) - arrived.begin());
      std::vector<int> missing;
      for (int r = 0; r < size_; ++r) {
        if (!arrived[static_cast<std::size_t>(r)]) missing.push_back(name(r));
      }
      fail(ErrorCode::kTimeout,
           fmt::format("{} of {} did not arrive at rendezvous '{}' within {} ms{}",
                       list_ranks(missing), world_size(), place_->rendezvous(), deadline_.count(),
                       rejections_ + lobby->refusals()),
           failure_record(wait, first_missing), arrived);
    }
    std::vector<pollfd> fds;
    lobby->add_interest(fds);
    for (const Channel& member : channels_) {
      if (member.fd() >= 0) fds.push_back(member.interest());
    }
    await(fds, std::min(wait.until, lobby->next_turn()));
  }

  // The listener is closed before anybody is welcomed. Otherwise a welcomed rank that goes on to
  // make its next world under the same rendezvous string could find this world's listener.
  lobby.reset();
  const SharedPayload welcome = welcome_payload(pids_);
  for (Channel& member : channels_) {
    if (member.fd() >= 0) member.queue(frame_of(FrameKind::kWelcome, welcome));
  }
  deliver(wait);
}

void Bootstrap::admit(Lobby::Arrival& arrival, const std::vector<bool>& taken, Wait& wait) {
  const FrameHeader& header = arrival.hello.header;
  const pid_t pid = arrival.peer.pid;
  const auto answer = [&](ErrorCode code, const std::string& message, const WaitFailure& failure) {
    arrival.channel.queue(failure_frame(code, message, failure));
    arrival.channel.flush();
  };
  const auto give_up = [&](const std::string& message) {
    const WaitFailure failure = failure_record(wait, header.rank);
    answer(ErrorCode::kSpecMismatch, message, failure);
    fail(ErrorCode::kSpecMismatch, message, failure, {});
  };
  const auto turn_away = [&](const std::string& message) {
    if (rejections_.size() < kMaxRejectionBytes) rejections_ += fmt::format("; {}", message);
    answer(ErrorCode::kInvalidArgument, message, failure_record(wait, header.rank));
  };
  HelloBody body;
  switch (judge(arrival.hello, hash_of_job(job_), taken, body)) {
    case Admission::kNotAHello: return;
    case Admission::kOtherVersion:
      return give_up(fmt::format(
          "{} at rendezvous '{}' speaks version {} of the bootstrap protocol, rank 0 "
          "(process {}) version {}; use one build of Switchyard for all ranks",
          arrival.who, place_->rendezvous(), header.version, ::getpid(), kProtocolVersion));
    case Admission::kOtherJob:
      return turn_away(fmt::format(
          "two jobs use rendezvous '{}' at the same time: {} wants to be rank {} there, "
          "but is not of the job of rank 0 (process {}; {}); give each world a rendezvous string "
          "of its own, or set SWITCHYARD_RENDEZVOUS to the same string on all ranks if they are "
          "one world",
          place_->rendezvous(), arrival.who, body.rank, ::getpid(), job_));
    case Admission::kOtherSize:
      return give_up(
          fmt::format("the ranks disagree on the size of the world at rendezvous '{}': rank 0 "
                      "(process {}) says {}, rank {} ({}) says {}",
                      place_->rendezvous(), ::getpid(), size_, body.rank, arrival.who, body.size));
    case Admission::kTaken:
      return turn_away(fmt::format("{} of rendezvous '{}' is already taken; {} claimed it as well",
                                   describe(body.rank), place_->rendezvous(), arrival.who));
    case Admission::kAdmitted: break;
  }
  if (arrival.proved_rank && body.rank != *arrival.proved_rank) return;
  Channel& member = channels_[static_cast<std::size_t>(body.rank)];
  member = std::move(arrival.channel);
  member.set_intake(intake_from_waiting_member());
  member.queue(frame_of(FrameKind::kEntered));
  // The kernel translates the pid into our namespace. If that changed it, the ranks do not share a
  // namespace, and the number would mean another process to some of them.
  pids_[static_cast<std::size_t>(body.rank)] = pid != 0 && pid == body.pid ? pid : 0;
  ++wait.num_arrived;
  if (const auto until = until_on_wire(header.deadline_ns); until < wait.until) {
    wait.until = until;
    wait.waiter = body.rank;
  }
}

void Bootstrap::join() {
  Wait wait = start_wait();
  for (;;) {
    throw_if_interrupted(rank_);
    Channel root = place_->try_connect(wait.until);
    if (root.fd() >= 0) {
      if (const std::optional<Frame> welcome = introduce(root, wait)) {
        const std::optional<std::vector<pid_t>> pids = read_welcome(*welcome, size_);
        if (!pids) {
          throw Error(ErrorCode::kSystem,
                      fmt::format("rank 0 at rendezvous '{}' sent a malformed welcome; are all "
                                  "ranks of the same build?",
                                  place_->rendezvous()));
        }
        // If the root does not know our pid, we are in another PID namespace, where the root's
        // numbers mean nothing.
        if ((*pids)[static_cast<std::size_t>(rank_)] != 0) pids_ = *pids;
        channels_[kRoot] = std::move(root);
        return;
      }
    }
    if (Clock::now() >= wait.until) {
      throw TimeoutError(
          ErrorCode::kTimeout,
          fmt::format("rank {} of {} did not arrive at rendezvous '{}' within {} ms, "
                      "or had given up or found all its ranks before; rank {} was waiting",
                      name(kRoot), world_size(), place_->rendezvous(), deadline_.count(),
                      name(rank_)),
          failure_record(wait, kRoot));
    }
    await(retry_time(wait.until));
  }
}

std::optional<Frame> Bootstrap::introduce(Channel& root, Wait& wait) {
  world_ = 0;
  const HelloBody body{rank_, size_, ::getpid(), hash_of_job(job_)};
  Frame hello = frame_of(FrameKind::kHello, payload_of(body));
  hello.header.deadline_ns = deadline_on_wire(wait.until);
  root.queue(std::move(hello));
  bool entered = false;
  return hear_root(root, wait, entered);
}

std::optional<Frame> Bootstrap::hear_root(Channel& root, const Wait& wait, bool& entered) {
  for (;;) {
    root.flush();
    while (std::optional<Frame> frame = root.receive()) {
      if (frame->header.version != kProtocolVersion) {
        throw Error(
            ErrorCode::kSpecMismatch,
            fmt::format("rank 0 at rendezvous '{}' speaks version {} of the bootstrap "
                        "protocol, rank {} version {}; use one build of Switchyard for all "
                        "ranks",
                        place_->rendezvous(), frame->header.version, rank_, kProtocolVersion));
      }
      if (world_ == 0 && frame->header.kind != FrameKind::kFailure) world_ = frame->header.world;
      if (world_ != 0 && frame->header.world != world_) fail_of_other_world(kRoot, wait, {});
      if (frame->header.kind == FrameKind::kEntered) {
        entered = true;
        continue;
      }
      if (frame->header.kind == FrameKind::kFailure) {
        const ReceivedFailure received = read_failure(*frame);
        // A collective reports a disagreement to all ranks alike, so the world stays usable.
        if (received.code != ErrorCode::kSpecMismatch) {
          death_ = Death{received.message, received.failure};
        }
        throw_as(received.code, received.message, received.failure);
      }
      return frame;
    }
    if (root.garbled() && world_ != 0) {
      fail(ErrorCode::kSystem,
           fmt::format("{} broke the bootstrap protocol during {}; is a World used by two threads, "
                       "or by a process and its fork?",
                       describe(kRoot), activity_),
           failure_record(wait, kRoot), {});
    }
    if (root.garbled()) {
      throw Error(
          ErrorCode::kSystem,
          fmt::format("the socket of rendezvous '{}' is held by {}, which is not a rank of a "
                      "Switchyard world; choose another rendezvous string",
                      place_->rendezvous(), place_->describe(root.fd())));
    }
    if (root.at_end()) {
      if (!entered && num_collectives_ == 0) return std::nullopt;
      fail_closed(wait, kRoot, false, {});
    }
    const Clock::time_point wake = keep_watch(kRoot, wait.until + kVerdictGrace);
    // On one host a root that runs gives its verdict at the earliest deadline of all. Between hosts
    // it may count from when it read this one; there the record says whom it waits for.
    std::chrono::milliseconds grace{0};
    if (entered && !view_.record) {
      grace = place_->is_one_host() ? start_grace(deadline_) : kVerdictGrace;
    } else if (entered && place_->is_one_host() && view_.record->waits(name(kRoot), deadline_)) {
      grace = kVerdictGrace;
    }
    const Clock::time_point until = wait.until + grace;
    if (Clock::now() >= until) {
      if (!entered && num_collectives_ == 0) return std::nullopt;
      const std::string known = liveness(kRoot);
      fail_late(wait, std::array{kRoot},
                fmt::format("did not {} {}", entered ? "complete" : "call", activity_),
                known.empty() ? "" : "; " + known, {});
    }
    std::vector<pollfd> fds{root.interest()};
    wait_ready(fds, root.congested() ? retry_time(until) : std::min(wake, until));
    if (!interrupted()) continue;
    // Until the world is complete, fail() does not know this channel.
    if (channels_[kRoot].fd() != root.fd()) {
      root.queue(failure_frame(ErrorCode::kAborted,
                               abort_message(name(rank_), AbortCause::kInterrupted),
                               abort_failure(name(rank_))));
      root.flush();
    }
    fail_as_interrupted();
  }
}

std::optional<Frame> Bootstrap::hear_member(int rank, const Wait& wait,
                                            const std::vector<bool>& arrived) {
  Channel& member = channels_[static_cast<std::size_t>(rank)];
  member.flush();
  std::optional<Frame> frame = member.receive();
  if (frame && frame->header.world != world_) fail_of_other_world(rank, wait, arrived);
  if (frame && frame->header.kind == FrameKind::kFailure) {
    const ReceivedFailure received = read_failure(*frame);
    fail(ErrorCode::kAborted, received.message, received.failure, arrived);
  }
  if (!frame && member.finished()) {
    fail_closed(wait, rank, member.garbled(), arrived);
  }
  return frame;
}

void Bootstrap::abort(AbortCause cause) noexcept {
  // Sequentially consistent, as in exchange(): either this thread sees that another one is in a
  // collective, or that one sees that it is called off.
  called_off_.store(cause);
  if (!in_collective_.load()) {
    try {
      const Frame why = failure_frame(ErrorCode::kAborted, abort_message(name(rank_), cause),
                                      abort_failure(name(rank_)));
      for (Channel& channel : channels_) {
        if (channel.fd() < 0) continue;
        channel.queue(why);
        channel.flush();
      }
    } catch (...) {
      // There is no memory for the message. Peers see the end of the connection.
    }
  }
  // Channels are only shut down here, so that a thread that polls one sees its end. The destructor
  // closes them.
  for (const Channel& channel : channels_) {
    if (channel.fd() >= 0) ::shutdown(channel.fd(), SHUT_RDWR);
  }
}

void Bootstrap::throw_if_called_off() {
  const AbortCause cause = called_off_.load();
  if (cause == AbortCause::kNone) return;
  death_ = Death{abort_message(name(rank_), cause), abort_failure(name(rank_))};
  throw TimeoutError(ErrorCode::kAborted, death_->message, death_->failure);
}

void Bootstrap::await(std::vector<pollfd>& fds, Clock::time_point until) {
  wait_ready(fds, until);
  if (interrupted()) fail_as_interrupted();
}

void Bootstrap::await(Clock::time_point until) {
  std::vector<pollfd> nothing;
  await(nothing, until);
}

void Bootstrap::fail_as_interrupted() {
  fail(ErrorCode::kAborted, abort_message(name(rank_), AbortCause::kInterrupted),
       abort_failure(name(rank_)), {});
}

void Bootstrap::fail(ErrorCode code, const std::string& message, const WaitFailure& failure,
                     const std::vector<bool>& arrived) {
  throw_if_called_off();
  death_ = Death{message, failure};
  for (std::size_t r = 0; r < channels_.size(); ++r) {
    if (channels_[r].fd() < 0) continue;
    const bool waited_as_well = r < arrived.size() && arrived[r];
    const ErrorCode sent_code =
        code == ErrorCode::kTimeout && !waited_as_well ? ErrorCode::kAborted : code;
    channels_[r].queue(failure_frame(sent_code, message, failure));
  }
  const auto farewell = was_interrupted() ? kInterruptInterval : kFarewell;
  for (const Clock::time_point until = Clock::now() + farewell;;) {
    std::vector<pollfd> fds;
    for (Channel& channel : channels_) {
      channel.flush();
      if (channel.has_unsent()) fds.push_back({channel.fd(), POLLOUT, 0});
    }
    if (fds.empty() || Clock::now() >= until) break;
    wait_ready(fds, retry_time(until));
  }
  throw_as(code, message, failure);
}

void Bootstrap::fail_of_other_world(int rank, const Wait& wait, const std::vector<bool>& arrived) {
  fail(ErrorCode::kSystem,
       fmt::format("{} sent a message of another world during {}; make every World in the process "
                   "that uses it",
                   describe(rank), activity_),
       failure_record(wait, rank), arrived);
}

void Bootstrap::deliver(const Wait& wait) {
  const Clock::time_point until = Clock::now() + deadline_ + kVerdictGrace;
  const std::vector<bool> all_arrived(channels_.size(), true);
  for (;;) {
    std::vector<pollfd> fds;
    std::vector<int> slow;
    bool congested = false;
    for (int r = 0; r < size_; ++r) {
      Channel& member = channels_[static_cast<std::size_t>(r)];
      member.flush();
      if (member.send_failed()) {
        // The member stopped reading before the end of the collective. It said why, or it is gone.
        while (hear_member(r, wait, all_arrived)) {
        }
      }
      if (!member.has_unsent()) continue;
      slow.push_back(r);
      congested |= member.congested();
      // Its input is not polled for, because that may already be its part of the next collective.
      fds.push_back({member.fd(), static_cast<short>(member.congested() ? 0 : POLLOUT), 0});
    }
    if (slow.empty()) return;
    if (Clock::now() >= until) {
      std::vector<int> named;
      for (const int rank : slow) named.push_back(name(rank));
      fail(ErrorCode::kTimeout,
           fmt::format("{} of {} called {} but did not read its result within {} ms",
                       list_ranks(named), world_size(), activity_, deadline_.count()),
           failure_record(wait, slow.front()), all_arrived);
    }
    const Clock::time_point wake = keep_watch(slow.front(), until);
    await(fds, congested ? retry_time(until) : wake);
  }
}

std::vector<Frame> Bootstrap::exchange(const Call& call, Frame mine) {
  const struct InCollective {
    std::atomic<bool>& flag;
    explicit InCollective(std::atomic<bool>& in) : flag(in) { flag.store(true); }
    ~InCollective() { flag.store(false); }
  } in_collective(in_collective_);
  if (death_) throw_world_is_dead(death_->message, death_->failure);
  throw_if_called_off();
  ++num_collectives_;
  activity_ = to_string(call.kind);
  if (view_.record) view_.record->go_on();
  {
    const std::lock_guard lock(parting_mutex_);
    parting_.reset();
  }
  const protocol::EndOfWait end_of_wait(view_.record.get());
  if (size_ == 1) {
    std::vector<Frame> parts;
    parts.push_back(std::move(mine));
    return parts;
  }
  mine.header.kind = FrameKind::kContribution;
  mine.header.world = world_;
  mine.header.rank = rank_;
  mine.header.call = call.kind;
  return rank_ == kRoot ? exchange_as_root(call, std::move(mine))
                        : exchange_as_member(call, std::move(mine));
}

std::vector<Frame> Bootstrap::exchange_as_root(const Call& call, Frame mine) {
  Wait wait = start_wait();
  for (Channel& member : channels_) member.set_intake(intake_of_contributions(call));
  std::vector<Frame> parts(channels_.size());
  std::vector<Call> calls(channels_.size());
  std::vector<bool> arrived(channels_.size(), false);
  parts[kRoot] = std::move(mine);
  calls[kRoot] = call;
  arrived[kRoot] = true;
  for (int r = 1; r < size_; ++r) {
    channels_[static_cast<std::size_t>(r)].queue(frame_of(FrameKind::kEntered));
  }

  for (;;) {
    bool heard = false;
    for (int r = 1; r < size_; ++r) {
      const std::size_t i = static_cast<std::size_t>(r);
      while (std::optional<Frame> frame = hear_member(r, wait, arrived)) {
        heard = true;
        if (frame->header.kind != FrameKind::kContribution || arrived[i]) {
          fail(ErrorCode::kSystem,
               fmt::format("{} sent a message out of turn during {}; is its World used by two "
                           "threads?",
                           describe(r), activity_),
               failure_record(wait, r), arrived);
        }
        arrived[i] = true;
        ++wait.num_arrived;
        if (const auto until = until_on_wire(frame->header.deadline_ns); until < wait.until) {
          wait.until = until;
          wait.waiter = r;
        }
        calls[i] = {frame->header.call, frame->header.payload_bytes};
        parts[i] = std::move(*frame);
      }
    }
    // A member that gave up on a late root sent its failure after its contribution, so a pass that
    // brings nothing more is needed before the collective counts as complete.
    if (heard) continue;
    if (wait.num_arrived == size_) break;

    if (Clock::now() >= wait.until) {
      std::vector<int> missing;
      std::string known;
      for (int r = 1; r < size_; ++r) {
        if (arrived[static_cast<std::size_t>(r)]) continue;
        missing.push_back(r);
        const pid_t pid = pids_[static_cast<std::size_t>(r)];
        const std::string hint = liveness(r);
        if (!hint.empty()) {
          known += fmt::format("; {}", hint);
        } else if (pid > 0) {
          known += fmt::format("; process {} (rank {}) still runs", pid, name(r));
        }
      }
      fail_late(wait, missing, fmt::format("did not call {}", activity_), known, arrived);
    }
    std::vector<pollfd> fds;
    int awaited = kRoot;
    for (int r = size_ - 1; r > 0; --r) {
      fds.push_back(channels_[static_cast<std::size_t>(r)].interest());
      if (!arrived[static_cast<std::size_t>(r)]) awaited = r;
    }
    await(fds, keep_watch(awaited, wait.until));
  }

  try {
    require_same_call(calls);
  } catch (const Error& error) {
    const Frame verdict = failure_frame(error.code(), error.what(), failure_record(wait, kRoot));
    for (int r = 1; r < size_; ++r) channels_[static_cast<std::size_t>(r)].queue(verdict);
    deliver(wait);
    throw;
  }
  for (int r = 0; call.kind == CallKind::kExchangeFds && r < size_; ++r) {
    if (parts[static_cast<std::size_t>(r)].fd) continue;
    fail(
        ErrorCode::kSystem,
        fmt::format("the file descriptor of {} did not reach rank 0, which may have too many open: "
                    "raise `ulimit -n`",
                    describe(r)),
        failure_record(wait, rank_), arrived);
  }
  for (int from = 0; from < size_; ++from) {
    Frame& part = parts[static_cast<std::size_t>(from)];
    part.header.kind = FrameKind::kPart;
    for (int to = 1; to < size_; ++to) channels_[static_cast<std::size_t>(to)].queue(part);
  }
  deliver(wait);
  return parts;
}

std::vector<Frame> Bootstrap::exchange_as_member(const Call& call, Frame mine) {
  const Wait wait = start_wait();
  Channel& root = channels_[kRoot];
  root.set_intake(intake_of_parts(call));
  mine.header.deadline_ns = deadline_on_wire(wait.until);
  root.queue(std::move(mine));
  bool entered = false;
  std::vector<Frame> parts;
  for (int r = 0; r < size_; ++r) {
    std::optional<Frame> part = hear_root(root, wait, entered);
    if (part->header.kind != FrameKind::kPart || part->header.rank != r ||
        part->header.payload_bytes != call.bytes) {
      fail(ErrorCode::kSystem,
           fmt::format("{} sent a message out of turn during {}; is a World used by two threads?",
                       describe(kRoot), activity_),
           failure_record(wait, kRoot), {});
    }
    if (call.kind == CallKind::kExchangeFds && !part->fd) {
      fail(ErrorCode::kSystem,
           fmt::format("the file descriptor of {} did not reach rank {}, which may have too many "
                       "open: raise `ulimit -n`",
                       describe(r), name(rank_)),
           failure_record(wait, rank_), {});
    }
    parts.push_back(std::move(*part));
  }
  return parts;
}

void Bootstrap::all_gather(std::span<const std::byte> mine, std::span<std::byte> all) {
  require_gather_space(mine.size(), all.size(), size_);
  if (mine.size() > kMaxPayloadBytes) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("all_gather of {} bytes; it is for start-up, at most {} bytes each",
                            mine.size(), kMaxPayloadBytes));
  }
  Frame frame;
  frame.payload = payload_of(mine.data(), mine.size());
  const std::vector<Frame> parts = exchange({CallKind::kAllGather, mine.size()}, std::move(frame));
  std::byte* out = all.data();
  for (const Frame& part : parts) {
    out = std::copy(part.payload->begin(), part.payload->end(), out);
  }
}

std::vector<UniqueFd> Bootstrap::exchange_fds(int fd) {
  Frame frame;
  frame.payload = payload_of(nullptr, 0);
  frame.fd = std::make_shared<const UniqueFd>(duplicate(fd));
  std::vector<Frame> parts = exchange({CallKind::kExchangeFds, 0}, std::move(frame));
  std::vector<UniqueFd> fds;
  for (const Frame& part : parts) fds.push_back(duplicate(part.fd->get()));
  return fds;
}

std::string Bootstrap::liveness(int rank) const {
  if (rank == rank_) return "";
  const pid_t pid = pids_[static_cast<std::size_t>(rank)];
  const ProcessState state = pid > 0 ? state_of_process(pid) : ProcessState::kRuns;
  if (state == ProcessState::kExited) return fmt::format("process {} has exited", pid);
  if (state == ProcessState::kStopped) {
    return fmt::format("process {} is stopped, by a signal such as SIGSTOP or by a debugger", pid);
  }
  const Channel& channel = channels_[static_cast<std::size_t>(rank)];
  if (channel.fd() >= 0) {
    pollfd entry{channel.fd(), POLLRDHUP, 0};
    if (::poll(&entry, 1, 0) > 0) return fmt::format("{} closed its connection", describe(rank));
  }
  return "";
}

}  // namespace switchyard
