#include "fabric/bootstrap.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string_view>
#include <utility>

namespace switchyard {
namespace {

constexpr int kRoot = 0;
// How long after its own deadline a member waits for the verdict of a root that is known to be in
// the same collective. The root acts on the earliest deadline of all, so only a stopped or starved
// root takes longer than an instant.
constexpr std::chrono::seconds kVerdictGrace{2};
// How long a failing rank tries to tell its peers why, if their sockets are full.
constexpr std::chrono::seconds kFarewell{1};
// Neither a listener's appearance nor the end of SCM_RIGHTS congestion can be polled for.
constexpr std::chrono::milliseconds kRetryInterval{2};

struct HelloBody {
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::int64_t pid = 0;
};
static_assert(sizeof(HelloBody) == 16);

// Followed by the message's text.
struct FailureBody {
  std::int32_t code = 0;
  std::int32_t waiter_rank = 0;
  std::int32_t peer_rank = 0;
  std::int32_t reserved = 0;
  std::uint64_t slot = 0;
  std::uint64_t expected = 0;
  std::uint64_t observed = 0;
  double waited_seconds = 0;
};
static_assert(sizeof(FailureBody) == 48);

struct ReceivedFailure {
  ErrorCode code = ErrorCode::kAborted;
  std::string message;
  WaitFailure failure;
};

std::shared_ptr<const Payload> payload_of(const void* bytes, std::size_t num_bytes) {
  const std::byte* const begin = static_cast<const std::byte*>(bytes);
  return std::make_shared<const Payload>(begin, begin + num_bytes);
}

Frame frame_of(FrameKind kind, int rank, std::shared_ptr<const Payload> payload = nullptr) {
  Frame frame;
  frame.header.kind = kind;
  frame.header.rank = rank;
  frame.payload = std::move(payload);
  return frame;
}

std::int64_t to_wire(Clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}

Clock::time_point from_wire(std::int64_t nanoseconds) {
  return Clock::time_point(std::chrono::nanoseconds(nanoseconds));
}

Frame failure_frame(int rank, ErrorCode code, std::string_view message,
                    const WaitFailure& failure) {
  FailureBody body;
  body.code = static_cast<std::int32_t>(code);
  body.waiter_rank = failure.waiter_rank;
  body.peer_rank = failure.peer_rank;
  body.slot = failure.slot;
  body.expected = failure.expected;
  body.observed = failure.observed;
  body.waited_seconds = failure.waited_seconds;
  Payload payload(sizeof body + message.size());
  std::memcpy(payload.data(), &body, sizeof body);
  std::copy_n(reinterpret_cast<const std::byte*>(message.data()), message.size(),
              payload.begin() + sizeof body);
  return frame_of(FrameKind::kFailure, rank, std::make_shared<const Payload>(std::move(payload)));
}

ReceivedFailure read_failure(const Frame& frame) {
  FailureBody body;
  if (frame.payload->size() < sizeof body) {
    throw Error(ErrorCode::kSystem,
                fmt::format("rank {} sent a failure report of {} bytes, shorter than its header; "
                            "are all ranks of the same build?",
                            frame.header.rank, frame.payload->size()));
  }
  std::memcpy(&body, frame.payload->data(), sizeof body);
  ReceivedFailure received;
  received.code = static_cast<ErrorCode>(body.code);
  received.message.assign(reinterpret_cast<const char*>(frame.payload->data()) + sizeof body,
                          frame.payload->size() - sizeof body);
  received.failure.waiter_rank = body.waiter_rank;
  received.failure.peer_rank = body.peer_rank;
  received.failure.phase = "bootstrap";
  received.failure.slot = body.slot;
  received.failure.expected = body.expected;
  received.failure.observed = body.observed;
  received.failure.waited_seconds = body.waited_seconds;
  return received;
}

[[noreturn]] void throw_as(ErrorCode code, const std::string& message, const WaitFailure& failure) {
  if (code == ErrorCode::kTimeout || code == ErrorCode::kAborted) {
    throw TimeoutError(code, message, failure);
  }
  throw Error(code, message);
}

std::uint64_t fnv1a(std::uint64_t hash, std::string_view text) {
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x0000'0100'0000'01b3;
  }
  return hash;
}

struct SocketAddress {
  explicit SocketAddress(std::string_view rendezvous) {
    const std::string name = rendezvous_socket_name(rendezvous);
    address.sun_family = AF_UNIX;
    // sun_path[0] stays 0: the abstract namespace.
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }

  sockaddr_un address{};
  socklen_t length = 0;
};

UniqueFd make_socket() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw_errno("cannot create a Unix socket for the rendezvous");
  return socket;
}

ucred credentials(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    throw_errno("cannot read the credentials of a rendezvous connection");
  }
  return peer;
}

// A closed channel if nobody listens yet.
Channel try_connect(const SocketAddress& address, const std::string& rendezvous) {
  UniqueFd socket = make_socket();
  if (::connect(socket.get(), address.get(), address.length) != 0) {
    if (errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR) return Channel();
    throw_errno(fmt::format("cannot connect to rendezvous '{}'", rendezvous));
  }
  if (const uid_t uid = credentials(socket.get()).uid; uid != ::getuid()) {
    throw Error(ErrorCode::kSystem,
                fmt::format("the socket of rendezvous '{}' is held by user {}, not by this user "
                            "({}); choose another rendezvous string",
                            rendezvous, uid, ::getuid()));
  }
  return Channel(std::move(socket));
}

void sleep_until(Clock::time_point until) {
  std::vector<pollfd> nothing;
  wait_ready(nothing, until);
}

Clock::time_point retry_time(Clock::time_point until) {
  return std::min(until, Clock::now() + kRetryInterval);
}

bool is_zombie(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  const std::string stat((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // "pid (name) state ...", where the name may contain parentheses itself.
  const std::size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= stat.size()) return false;
  const char state = stat[name_end + 2];
  return state == 'Z' || state == 'X';
}

}  // namespace

// A hash because the name has 107 bytes and a rendezvous string may be longer; with the user id so
// that two users' jobs with equal names do not meet.
std::string rendezvous_socket_name(std::string_view rendezvous) {
  const std::string text = fmt::format("{}:{}", ::getuid(), rendezvous);
  const std::uint64_t low = fnv1a(0xcbf2'9ce4'8422'2325, text);
  const std::uint64_t high = fnv1a(low ^ 0x9e37'79b9'7f4a'7c15, text);
  return fmt::format("switchyard-{:016x}{:016x}", high, low);
}

Bootstrap::Bootstrap(int rank, int size, std::string rendezvous, std::chrono::milliseconds deadline)
    : rank_(rank),
      size_(size),
      rendezvous_(std::move(rendezvous)),
      deadline_(checked_deadline(deadline)) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("rank {} of {} was asked for; ranks are 0 to size - 1, and a world has "
                            "at least one",
                            rank, size));
  }
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

Bootstrap::Wait Bootstrap::start_wait() const { return {Clock::now() + deadline_, rank_}; }

std::chrono::nanoseconds Bootstrap::waited(const Wait& wait) const {
  return deadline_ - (wait.until - Clock::now());
}

WaitFailure Bootstrap::failure_record(const Wait& wait, int peer) const {
  return bootstrap_failure(wait.waiter, peer, num_collectives_, size_, wait.num_arrived,
                           waited(wait));
}

std::string Bootstrap::describe(int rank) const {
  const pid_t pid = pids_[static_cast<std::size_t>(rank)];
  return pid > 0 ? fmt::format("rank {} (process {})", rank, pid) : fmt::format("rank {}", rank);
}

UniqueFd Bootstrap::listen_as_root(const Wait& wait) {
  const SocketAddress address(rendezvous_);
  for (;;) {
    UniqueFd listener = make_socket();
    if (::bind(listener.get(), address.get(), address.length) == 0) {
      if (::listen(listener.get(), SOMAXCONN) != 0)
        throw_errno("cannot listen for the other ranks");
      return listener;
    }
    if (errno != EADDRINUSE) {
      throw_errno(fmt::format("cannot bind the socket of rendezvous '{}'", rendezvous_));
    }
    // Somebody else is rank 0 here. Ask as any rank would, to be told who.
    Channel holder = try_connect(address, rendezvous_);
    if (holder.fd() >= 0) {
      const pid_t holder_pid = credentials(holder.fd()).pid;
      Wait asking = wait;
      introduce(holder, asking);
      if (Clock::now() >= wait.until) {
        throw Error(ErrorCode::kSystem,
                    fmt::format("the socket of rendezvous '{}' is held by process {}, which does "
                                "not answer; choose another rendezvous string",
                                rendezvous_, holder_pid));
      }
    } else if (Clock::now() >= wait.until) {
      throw Error(ErrorCode::kSystem,
                  fmt::format("the socket of rendezvous '{}' is bound by another process that does "
                              "not listen; choose another rendezvous string",
                              rendezvous_));
    }
    sleep_until(retry_time(wait.until));
  }
}

void Bootstrap::admit_members() {
  Wait wait = start_wait();
  UniqueFd listener = listen_as_root(wait);
  std::vector<Channel> strangers;  // connected, but have not said who they are
  const auto joined = [&] {
    std::vector<bool> ranks(channels_.size());
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      ranks[r] = static_cast<int>(r) == rank_ || channels_[r].fd() >= 0;
    }
    return ranks;
  };

  while (wait.num_arrived < size_) {
    for (;;) {
      UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        if (errno == EAGAIN || errno == EWOULDBLOCK) break;
        throw_errno("cannot accept the connection of another rank");
      }
      if (credentials(socket.get()).uid == ::getuid()) strangers.emplace_back(std::move(socket));
    }
    for (Channel& stranger : strangers) {
      if (const std::optional<Frame> hello = stranger.receive()) {
        admit(stranger, *hello, wait);
        stranger = Channel();
      } else if (stranger.finished()) {
        stranger = Channel();
      }
    }
    std::erase_if(strangers, [](const Channel& stranger) { return stranger.fd() < 0; });
    for (int r = 1; r < size_; ++r) {
      if (channels_[static_cast<std::size_t>(r)].fd() >= 0) hear_member(r, wait, joined());
    }
    if (wait.num_arrived == size_) break;

    if (Clock::now() >= wait.until) {
      const std::vector<bool> arrived = joined();
      std::vector<int> missing;
      for (int r = 0; r < size_; ++r) {
        if (!arrived[static_cast<std::size_t>(r)]) missing.push_back(r);
      }
      fail(ErrorCode::kTimeout,
           fmt::format("{} of {} did not arrive at rendezvous '{}' within {} ms{}",
                       list_ranks(missing), size_, rendezvous_, deadline_.count(), rejections_),
           failure_record(wait, missing.front()), arrived);
    }
    std::vector<pollfd> fds{{listener.get(), POLLIN, 0}};
    for (const Channel& stranger : strangers) fds.push_back(stranger.interest());
    for (const Channel& member : channels_) {
      if (member.fd() >= 0) fds.push_back(member.interest());
    }
    wait_ready(fds, wait.until);
  }

  // Closed before anybody is welcomed: a rank that goes on to make its next world under the same
  // rendezvous string must not find this world's listener.
  listener.reset();
  std::vector<std::int64_t> pids(pids_.begin(), pids_.end());
  const auto welcome = payload_of(pids.data(), pids.size() * sizeof pids.front());
  for (Channel& member : channels_) {
    if (member.fd() >= 0) member.queue(frame_of(FrameKind::kWelcome, kRoot, welcome));
  }
  deliver(wait);
}

void Bootstrap::admit(Channel& stranger, const Frame& hello, Wait& wait) {
  const ucred peer = credentials(stranger.fd());
  const auto give_up = [&](const std::string& message) {
    const WaitFailure failure = failure_record(wait, hello.header.rank);
    stranger.queue(failure_frame(rank_, ErrorCode::kSpecMismatch, message, failure));
    stranger.flush();
    fail(ErrorCode::kSpecMismatch, message, failure, {});
  };
  if (hello.header.version != kProtocolVersion) {
    give_up(
        fmt::format("process {} at rendezvous '{}' speaks version {} of the bootstrap protocol, "
                    "rank 0 (process {}) version {}; use one build of Switchyard for all ranks",
                    peer.pid, rendezvous_, hello.header.version, ::getpid(), kProtocolVersion));
  }
  HelloBody body;
  if (hello.header.kind != FrameKind::kHello || hello.payload->size() != sizeof body) return;
  std::memcpy(&body, hello.payload->data(), sizeof body);
  if (body.size != size_) {
    give_up(
        fmt::format("the ranks disagree on the size of the world at rendezvous '{}': rank 0 "
                    "(process {}) says {}, rank {} (process {}) says {}",
                    rendezvous_, ::getpid(), size_, body.rank, peer.pid, body.size));
  }
  if (body.rank < 0 || body.rank >= size_) return;

  Channel& member = channels_[static_cast<std::size_t>(body.rank)];
  if (body.rank == rank_ || member.fd() >= 0) {
    const std::string message =
        fmt::format("{} of rendezvous '{}' is already taken; process {} claimed it as well",
                    describe(body.rank), rendezvous_, peer.pid);
    rejections_ += fmt::format("; {}", message);
    stranger.queue(failure_frame(rank_, ErrorCode::kInvalidArgument, message,
                                 failure_record(wait, body.rank)));
    stranger.flush();
    return;
  }
  member = std::move(stranger);
  member.queue(frame_of(FrameKind::kEntered, rank_));
  // The kernel translates the pid into our namespace; if that changed it, the ranks do not share
  // one, and the number would mean another process to some of them.
  pids_[static_cast<std::size_t>(body.rank)] = peer.pid == body.pid ? peer.pid : 0;
  ++wait.num_arrived;
  if (const auto until = from_wire(hello.header.deadline_ns); until < wait.until) {
    wait.until = until;
    wait.waiter = body.rank;
  }
}

void Bootstrap::join() {
  Wait wait = start_wait();
  const SocketAddress address(rendezvous_);
  for (;;) {
    Channel root = try_connect(address, rendezvous_);
    if (root.fd() >= 0) {
      if (const std::optional<Frame> welcome = introduce(root, wait)) {
        std::vector<std::int64_t> pids(pids_.size());
        if (welcome->header.kind != FrameKind::kWelcome ||
            welcome->payload->size() != pids.size() * sizeof pids.front()) {
          throw Error(ErrorCode::kSystem,
                      fmt::format("rank 0 at rendezvous '{}' sent a malformed welcome; are all "
                                  "ranks of the same build?",
                                  rendezvous_));
        }
        std::memcpy(pids.data(), welcome->payload->data(), welcome->payload->size());
        // Unknown to the root means another PID namespace, in which its numbers mean nothing.
        if (pids[static_cast<std::size_t>(rank_)] != 0) pids_.assign(pids.begin(), pids.end());
        channels_[kRoot] = std::move(root);
        return;
      }
    }
    if (Clock::now() >= wait.until) {
      throw TimeoutError(ErrorCode::kTimeout,
                         fmt::format("rank 0 of {} did not arrive at rendezvous '{}' within {} ms, "
                                     "or had given up before; rank {} was waiting",
                                     size_, rendezvous_, deadline_.count(), rank_),
                         failure_record(wait, kRoot));
    }
    sleep_until(retry_time(wait.until));
  }
}

std::optional<Frame> Bootstrap::introduce(Channel& root, Wait& wait) {
  const HelloBody body{rank_, size_, ::getpid()};
  Frame hello = frame_of(FrameKind::kHello, rank_, payload_of(&body, sizeof body));
  hello.header.deadline_ns = to_wire(wait.until);
  root.queue(std::move(hello));
  bool entered = false;
  return hear_root(root, wait, entered);
}

std::optional<Frame> Bootstrap::hear_root(Channel& root, const Wait& wait, bool& entered) {
  for (;;) {
    root.flush();
    while (std::optional<Frame> frame = root.receive()) {
      if (frame->header.version != kProtocolVersion) {
        throw Error(ErrorCode::kSpecMismatch,
                    fmt::format("rank 0 at rendezvous '{}' speaks version {} of the bootstrap "
                                "protocol, rank {} version {}; use one build of Switchyard for all "
                                "ranks",
                                rendezvous_, frame->header.version, rank_, kProtocolVersion));
      }
      if (frame->header.kind == FrameKind::kEntered) {
        entered = true;
        continue;
      }
      if (frame->header.kind == FrameKind::kFailure) {
        const ReceivedFailure received = read_failure(*frame);
        // A disagreement found by a collective reaches all ranks alike; the world goes on.
        if (received.code != ErrorCode::kSpecMismatch) {
          death_ = Death{received.message, received.failure};
        }
        throw_as(received.code, received.message, received.failure);
      }
      return frame;
    }
    if (root.garbled()) {
      throw Error(ErrorCode::kSystem,
                  fmt::format("the socket of rendezvous '{}' is held by process {}, which is not a "
                              "rank of a Switchyard world; choose another rendezvous string",
                              rendezvous_, credentials(root.fd()).pid));
    }
    if (root.at_end()) {
      if (!entered && num_collectives_ == 0) return std::nullopt;
      fail(ErrorCode::kAborted,
           fmt::format("{} closed its connection to rank {} during {}: the process ended or "
                       "destroyed its World",
                       describe(kRoot), rank_, activity_),
           failure_record(wait, kRoot), {});
    }
    const Clock::time_point until = entered ? wait.until + kVerdictGrace : wait.until;
    if (Clock::now() >= until) {
      if (!entered && num_collectives_ == 0) return std::nullopt;
      const std::string known = liveness(kRoot);
      fail(ErrorCode::kTimeout,
           fmt::format("{} of {} did not {} {} within {} ms{}{}; rank {} was waiting",
                       describe(kRoot), size_, entered ? "complete" : "call", activity_,
                       deadline_.count(), known.empty() ? "" : ", ", known, rank_),
           failure_record(wait, kRoot), {});
    }
    std::vector<pollfd> fds{root.interest()};
    wait_ready(fds, root.congested() ? retry_time(until) : until);
  }
}

std::optional<Frame> Bootstrap::hear_member(int rank, const Wait& wait,
                                            const std::vector<bool>& arrived) {
  Channel& member = channels_[static_cast<std::size_t>(rank)];
  member.flush();
  std::optional<Frame> frame = member.receive();
  if (frame && frame->header.kind == FrameKind::kFailure) {
    const ReceivedFailure received = read_failure(*frame);
    fail(ErrorCode::kAborted, received.message, received.failure, arrived);
  }
  if (!frame && member.finished()) {
    fail(ErrorCode::kAborted,
         fmt::format("{} of {} {} during {}: the process ended or destroyed its World",
                     describe(rank), size_,
                     member.garbled() ? "broke the bootstrap protocol" : "closed its connection",
                     activity_),
         failure_record(wait, rank), arrived);
  }
  return frame;
}

void Bootstrap::fail(ErrorCode code, const std::string& message, const WaitFailure& failure,
                     const std::vector<bool>& arrived) {
  death_ = Death{message, failure};
  for (std::size_t r = 0; r < channels_.size(); ++r) {
    if (channels_[r].fd() < 0) continue;
    const bool waited_as_well = r < arrived.size() && arrived[r];
    const ErrorCode sent_code =
        code == ErrorCode::kTimeout && !waited_as_well ? ErrorCode::kAborted : code;
    channels_[r].queue(failure_frame(rank_, sent_code, message, failure));
  }
  for (const Clock::time_point until = Clock::now() + kFarewell;;) {
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
        // It stopped reading before the end of the collective: it said why, or it is gone.
        while (hear_member(r, wait, all_arrived)) {
        }
      }
      if (!member.has_unsent()) continue;
      slow.push_back(r);
      congested |= member.congested();
      // Not its input: that may already be its part of the next collective.
      fds.push_back({member.fd(), static_cast<short>(member.congested() ? 0 : POLLOUT), 0});
    }
    if (slow.empty()) return;
    if (Clock::now() >= until) {
      fail(ErrorCode::kTimeout,
           fmt::format("{} of {} called {} but did not read its result within {} ms",
                       list_ranks(slow), size_, activity_, deadline_.count()),
           failure_record(wait, slow.front()), all_arrived);
    }
    wait_ready(fds, congested ? retry_time(until) : until);
  }
}

std::vector<Frame> Bootstrap::exchange(const Call& call, Frame mine) {
  if (death_) throw_world_is_dead(death_->message, death_->failure);
  ++num_collectives_;
  activity_ = to_string(call.kind);
  if (size_ == 1) {
    std::vector<Frame> parts;
    parts.push_back(std::move(mine));
    return parts;
  }
  mine.header.kind = FrameKind::kContribution;
  mine.header.rank = rank_;
  mine.header.call = call.kind;
  return rank_ == kRoot ? exchange_as_root(call, std::move(mine))
                        : exchange_as_member(call, std::move(mine));
}

std::vector<Frame> Bootstrap::exchange_as_root(const Call& call, Frame mine) {
  Wait wait = start_wait();
  std::vector<Frame> parts(channels_.size());
  std::vector<Call> calls(channels_.size());
  std::vector<bool> arrived(channels_.size(), false);
  parts[kRoot] = std::move(mine);
  calls[kRoot] = call;
  arrived[kRoot] = true;
  for (int r = 1; r < size_; ++r) {
    channels_[static_cast<std::size_t>(r)].queue(frame_of(FrameKind::kEntered, kRoot));
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
        if (const auto until = from_wire(frame->header.deadline_ns); until < wait.until) {
          wait.until = until;
          wait.waiter = r;
        }
        calls[i] = {frame->header.call, frame->payload->size()};
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
          known += fmt::format("; process {} (rank {}) still runs", pid, r);
        }
      }
      fail(
          ErrorCode::kTimeout,
          fmt::format("{} of {} did not call {} within {} ms; rank {} was waiting{}",
                      list_ranks(missing), size_, activity_, deadline_.count(), wait.waiter, known),
          failure_record(wait, missing.front()), arrived);
    }
    std::vector<pollfd> fds;
    for (int r = 1; r < size_; ++r) {
      fds.push_back(channels_[static_cast<std::size_t>(r)].interest());
    }
    wait_ready(fds, wait.until);
  }

  try {
    require_same_call(calls);
  } catch (const Error& error) {
    const Frame verdict =
        failure_frame(kRoot, error.code(), error.what(), failure_record(wait, kRoot));
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
  mine.header.deadline_ns = to_wire(wait.until);
  root.queue(std::move(mine));
  bool entered = false;
  std::vector<Frame> parts;
  for (int r = 0; r < size_; ++r) {
    std::optional<Frame> part = hear_root(root, wait, entered);
    if (part->header.kind != FrameKind::kPart || part->header.rank != r ||
        part->payload->size() != call.bytes) {
      fail(ErrorCode::kSystem,
           fmt::format("{} sent a message out of turn during {}; is a World used by two threads?",
                       describe(kRoot), activity_),
           failure_record(wait, kRoot), {});
    }
    if (call.kind == CallKind::kExchangeFds && !part->fd) {
      fail(ErrorCode::kSystem,
           fmt::format("the file descriptor of {} did not reach rank {}, which may have too many "
                       "open: raise `ulimit -n`",
                       describe(r), rank_),
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
  if (pid > 0 && ((::kill(pid, 0) != 0 && errno == ESRCH) || is_zombie(pid))) {
    return fmt::format("process {} has exited", pid);
  }
  const Channel& channel = channels_[static_cast<std::size_t>(rank)];
  if (channel.fd() >= 0) {
    pollfd entry{channel.fd(), POLLRDHUP, 0};
    if (::poll(&entry, 1, 0) > 0) return fmt::format("{} closed its connection", describe(rank));
  }
  return "";
}

}  // namespace switchyard
