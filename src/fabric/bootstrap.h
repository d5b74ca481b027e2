// How the processes of a world find each other on one host, and the start-up collectives that carry
// bytes and file descriptors between them.
//
// Rank 0 listens on an abstract Unix socket whose name is a hash of the rendezvous string and the
// user id. The other ranks connect to it. The connections form a star through rank 0 and stay open
// for the life of the world, so that a process's end is seen at once. Abstract names leave nothing
// in the file system, however the processes end. All ranks must share a network namespace. Any
// process of the host can connect to an abstract socket: docs/security.md tells what that allows.
// Where the rendezvous is tcp://host:port, ranks of several hosts meet at that port in the same
// way. They have no descriptors to exchange, and no clock in common.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/posix.h"
#include "fabric/channel.h"
#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "fabric/lobby.h"
#include "fabric/place.h"
#include "protocol/world_record.h"
#include "switchyard/error.h"

namespace switchyard {

// The name of the socket that rank 0 listens on, as `ss -xl` lists it after the "@".
std::string rendezvous_socket_name(std::string_view rendezvous);

class Bootstrap {
 public:
  // Collective: returns when all `size` ranks have arrived. Throws
  //   TimeoutError{kTimeout}    naming the ranks that did not arrive within `deadline`,
  //   TimeoutError{kAborted}    naming a process that ended meanwhile,
  //   Error{kInvalidArgument}   for a rank outside [0, size) or claimed by two processes, or if
  //                             another job's world forms at this rendezvous,
  //   Error{kSpecMismatch}      if two processes disagree on the size, or on the protocol version.
  // `job` is launched_job(): ranks whose jobs are known and differ do not meet. `secret`: of ranks
  // that meet at a port. `view`: the numbers of these ranks in the world that they are part of, for
  // messages and failures; by default they are the world.
  Bootstrap(int rank, int size, const std::string& rendezvous, std::chrono::milliseconds deadline,
            std::string job = "", const network::Secret& secret = {},
            protocol::WorldView view = {});
  // Says why this rank gave up, if part() was called, so that nobody takes it for the culprit.
  ~Bootstrap();
  Bootstrap(const Bootstrap&) = delete;
  Bootstrap& operator=(const Bootstrap&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::chrono::milliseconds deadline() const { return deadline_; }
  void set_deadline(std::chrono::milliseconds deadline) { deadline_ = deadline; }

  // Collective. `all` receives size() blocks of mine.size() bytes, by rank. A block has at most 1
  // GiB. Throws Error{kSpecMismatch} on all ranks if the calls differ; the world stays usable.
  // Throws TimeoutError{kTimeout} if a rank does not call within the deadline, and
  // TimeoutError{kAborted} at once if a rank's process ends. After these two, every call throws
  // kAborted.
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all);

  // Collective. Every rank gives one open descriptor, which stays its own, and receives one of each
  // rank, its own included. Errors as all_gather.
  std::vector<UniqueFd> exchange_fds(int fd);

  // From now on waits are shown in the world's record, and it is asked who is to blame.
  void set_view(protocol::WorldView view) { view_ = std::move(view); }
  // Notes what ~Bootstrap() tells the peers; the first counts. Any thread may call it.
  void part(const std::string& message, const WaitFailure& failure) noexcept;

  // Ends the collective that this rank is in, and makes all later ones throw kAborted. Peers are
  // told why, or, if a thread is in a collective, see the connection end. May be called from any
  // thread.
  void abort(AbortCause cause) noexcept;

  // A random number of the world, the same on all ranks; 0 in a world of one.
  std::uint64_t world_number() const { return world_; }
  // The connection to a member, on rank 0, or to rank 0; -1 if there is none.
  int connection(int rank) const { return channels_[static_cast<std::size_t>(rank)].fd(); }

  // Returns "process 4711 has exited" or the like. Empty if nothing is known.
  std::string liveness(int rank) const;

 private:
  struct Death {
    std::string message;
    WaitFailure failure;
  };
  // A wait ends when the first of the ranks known to wait passes its own deadline.
  struct Wait {
    Clock::time_point until;
    int waiter;
    int num_arrived = 1;
  };

  std::int64_t deadline_on_wire(Clock::time_point until) const;
  Clock::time_point until_on_wire(std::int64_t nanoseconds) const;
  Wait start_wait() const;
  std::chrono::nanoseconds waited(const Wait& wait) const;
  WaitFailure failure_record(const Wait& wait, int peer) const;
  std::string describe(int rank) const;
  int name(int rank) const { return view_.name(rank); }
  int world_size() const { return view_.world_size > 0 ? view_.world_size : size_; }

  // Shows in the record that this rank waits for `peer`. Returns when to look again, `until` at the
  // latest.
  Clock::time_point keep_watch(int peer, Clock::time_point until);
  // Throws that `missing`, whom this rank waited for, did not do their part in time.
  [[noreturn]] void fail_late(const Wait& wait, std::span<const int> missing,
                              const std::string& what, const std::string& known,
                              const std::vector<bool>& arrived);
  // Throws that `rank` closed its connection.
  [[noreturn]] void fail_closed(const Wait& wait, int rank, bool garbled,
                                const std::vector<bool>& arrived);

  UniqueFd listen_as_root(const Wait& wait);
  void admit_members();
  void admit(Lobby::Arrival& arrival, const std::vector<bool>& taken, Wait& wait);
  void join();
  // Says hello, waits for the welcome and returns its frame. Returns nothing if the root went away
  // before it noticed us.
  std::optional<Frame> introduce(Channel& root, Wait& wait);

  std::vector<Frame> exchange(const Call& call, Frame mine);
  std::vector<Frame> exchange_as_root(const Call& call, Frame mine);
  std::vector<Frame> exchange_as_member(const Call& call, Frame mine);
  // Returns when the members' sockets have taken all that is queued.
  void deliver(const Wait& wait);

  // A frame of this rank in this world.
  Frame frame_of(FrameKind kind, std::shared_ptr<const Payload> payload = nullptr) const;
  Frame failure_frame(ErrorCode code, std::string_view message, const WaitFailure& failure) const;

  // Sends and receives what is possible now. A failure or the end of the connection is thrown.
  std::optional<Frame> hear_member(int rank, const Wait& wait, const std::vector<bool>& arrived);
  // Waits for a frame other than kEntered. Returns nothing if the connection ended before the root
  // entered.
  std::optional<Frame> hear_root(Channel& root, const Wait& wait, bool& entered);

  [[noreturn]] void fail_of_other_world(int rank, const Wait& wait,
                                        const std::vector<bool>& arrived);
  void throw_if_called_off();
  // Sleeps like wait_ready(), and fails if this rank's caller interrupts it.
  void await(std::vector<pollfd>& fds, Clock::time_point until);
  void await(Clock::time_point until);
  [[noreturn]] void fail_as_interrupted();
  // Marks the world dead, tells the peers why, and throws. A timeout reaches the ranks that had
  // `arrived` as kTimeout, because they waited as well.
  [[noreturn]] void fail(ErrorCode code, const std::string& message, const WaitFailure& failure,
                         const std::vector<bool>& arrived);

  int rank_;
  int size_;
  std::unique_ptr<Place> place_;
  std::chrono::milliseconds deadline_;
  std::string job_;
  // A random number that rank 0 gives the world and every frame carries; 0 until it is known.
  std::uint64_t world_ = 0;
  // The channels, by rank. The root has one to every member, and a member has one to the root. The
  // others are closed.
  std::vector<Channel> channels_;
  // Process ids, by rank; 0 if the number is not known because that process is in another PID
  // namespace.
  std::vector<pid_t> pids_;
  std::uint64_t num_collectives_ = 0;
  const char* activity_ = "making the world";
  std::string rejections_;  // what the root told processes that it turned away
  std::optional<Death> death_;
  std::mutex parting_mutex_;
  std::optional<Death> parting_;
  protocol::WorldView view_;
  std::atomic<AbortCause> called_off_{AbortCause::kNone};  // abort() sets it
  std::atomic<bool> in_collective_{false};
};

}  // namespace switchyard
