// The thread of a rank that talks to other hosts, and the heaps that it talks about.
//
// A rank's threads put records into outboxes; the proxy sends them, and stores what comes from
// other hosts into the heaps of this host's ranks, flags after data, as a local sender would have
// done. It only ever stores, and never waits for a credit. So credits always come back, and no two
// proxies wait for each other.
//
// For a rank elsewhere a heap has only the words that ranks show each other (protocol::Control): a
// mirror that beats of the other proxy fill. See docs/hosts.md and decision 38.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/posix.h"
#include "network/arena.h"
#include "network/control_channel.h"
#include "network/hosts.h"
#include "network/network.h"
#include "network/outbox.h"
#include "network/records.h"
#include "network/ring.h"
#include "protocol/control.h"
#include "protocol/world_record.h"

namespace switchyard::network {

class Proxy;

// A rank that was heard of within this time (ns) is not called silent, however short the deadline.
inline constexpr std::int64_t kLeastSilence = 150'000'000;

// A heap of which some ranks are on other hosts, as one rank sees it. Any thread may send.
class RemoteHeap {
 public:
  // Collective, in the same order on all ranks. `bases` has the heaps of all ranks as this rank
  // maps them, and of ranks of other hosts a mirror of their Control. Nobody may send before all
  // ranks have made theirs.
  RemoteHeap(std::shared_ptr<Proxy> proxy, std::span<std::byte* const> bases, std::size_t bytes);
  // Waits until nothing of this heap is under way through this rank: until its own chunks have been
  // read, and the ranks of its host have ended as many calls as it has, because it may have to pass
  // on what they still wait for. It waits for the deadline at most, and not after an abort.
  ~RemoteHeap();
  RemoteHeap(const RemoteHeap&) = delete;
  RemoteHeap& operator=(const RemoteHeap&) = delete;

  const Hosts& hosts() const;
  // The rank whose verdict word this host's ranks share.
  int arbiter() const;
  // True if the rank's heap is mapped here.
  bool reaches(int rank) const;
  // The rank that takes what goes to this rank's host.
  int gateway_to(int rank) const;

  // Appends as Outbox::append() does, and copies: `payload` may change when it returns. Drops what
  // would go to a rank that has let go of its World.
  bool append(Lane lane, int host, RecordKind kind, std::span<const Target> targets,
              const void* payload, std::size_t bytes, std::size_t& done);
  void flush(Lane lane, int host);
  bool may_append(Lane lane, int host) const;

  // Counts a call that this rank has ended. The destructor waits until the host's other ranks have
  // ended as many.
  void end_call();

  // The rank that has been silent for longest, if that is a good part of the deadline; or -1.
  int silent_rank(std::uint64_t deadline_ns) const;

  // Gives the heap up because of `record`, or of a failure that another host found first: all hosts
  // that can still talk to each other learn the same. Returns at once; the abort word is raised
  // soon. False if that takes too long: then the caller raises it.
  bool propose(const protocol::FailureRecord& record) const;
  // `hook` is called once by the proxy's thread when the heap has been given up. It may not wait
  // for other ranks, nor throw.
  void on_abort(std::function<void()> hook);

 private:
  std::shared_ptr<Proxy> proxy_;
  protocol::Control* control_;  // this rank's
  std::uint32_t segment_ = 0;
};

struct ProxyOptions {
  WindowOptions windows;
  std::chrono::milliseconds deadline{30'000};
  // How often it tells others that it runs, while anything changes and while nothing does.
  std::chrono::milliseconds beat{10}, idle_beat{100};
  // How long the death of a rank may wait for the rank that decides what all hosts report; five
  // times that where a deadline has passed already. A rank that was silent for so long is not
  // asked. With 0 every host decides for itself.
  std::chrono::milliseconds verdict_time{100};
};

struct Traffic {
  std::uint64_t bytes_sent = 0;  // in chunks, headers included, and rows
  std::uint64_t chunks_sent = 0, chunks_received = 0;
};

class Proxy final : private Landing {
 public:
  // `alive`: for every rank of this host a word that its proxy keeps writing the time into, and
  // null for others; `keeps_alive` owns them. `channels`: to every rank of other hosts. `where`:
  // what to call each rank's host. `record`: of the world; it may be null. Words of other hosts'
  // ranks are brought there, and this rank's is sent to them.
  Proxy(const Hosts& hosts, int rank, const ProxyOptions& options, std::unique_ptr<Network> network,
        std::vector<std::uint64_t*> alive, std::shared_ptr<const void> keeps_alive,
        std::vector<ControlChannel> channels, std::vector<std::string> where,
        std::shared_ptr<protocol::WorldRecord> record = nullptr);
  // Says goodbye; waits at most a second for the others' sockets.
  ~Proxy() override;
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  // Address and connections of the network: exchange addresses, then start().
  Blob address() { return network_->address(); }
  void start(std::span<const Blob> addresses);

  int rank() const { return rank_; }
  const Hosts& hosts() const { return hosts_; }
  std::string network_name() const { return network_->name(); }
  Traffic traffic() const;
  // Returns what is known of a rank of another host that does not answer; empty if it was heard of
  // lately.
  std::string liveness(int rank) const;
  // The first rank that this one has no connection of the network with yet; -1: it has all of them.
  int first_unconnected() const { return first_unconnected_.load(std::memory_order_acquire); }
  // True of a rank of another host whose process has ended, or that broke the protocol.
  bool is_lost(int rank) const {
    return peers_[static_cast<std::size_t>(rank)].load(std::memory_order_acquire) == Peer::kLost;
  }
  // True of a rank of another host that has let go of its World.
  bool has_departed(int rank) const {
    return peers_[static_cast<std::size_t>(rank)].load(std::memory_order_acquire) ==
           Peer::kDeparted;
  }
  // True if rows may be in a device's memory.
  bool takes_device_memory() const { return network_->takes_device_memory(); }

 private:
  friend class RemoteHeap;
  friend class RowsRegion;

  // A failure that this rank has found or heard of, until a rank decides if it is the one that
  // ended the world.
  struct Proposal {
    protocol::FailureRecord record{};
    Clock::time_point due;       // then this rank decides
    int asked = -1;              // the rank that decides, as far as this one can tell
    std::vector<bool> declined;  // by rank
  };
  struct Heap {
    std::optional<Proposal> proposal;
    protocol::Heaps heaps;  // bases; ExpertPartition has the number of ranks only
    std::size_t bytes = 0;
    std::uint64_t told_waits_for = 0, told_progress = 0;
    bool abort_announced = false;
    std::function<void()> on_abort;
  };
  // A put that the thread has to start.
  struct Queued {
    Put put;
    std::shared_ptr<std::atomic<std::uint64_t>> unsent;  // of a region's rows; null: a chunk
  };
  // A window of this rank.
  struct Inbox {
    int source = 0;
    Lane lane = Lane::kDispatch;
    std::uint64_t at = 0;    // offset of the window
    std::uint64_t next = 0;  // number of the chunk that is applied next
    std::uint32_t owed = 0;  // credits
    std::uint64_t rows = 0;  // puts of rows that came
    std::vector<bool> arrived;
  };
  enum class Peer : std::uint8_t { kHere, kDeparted, kLost };
  // Contexts of rows are from here on; below are those of chunks.
  static constexpr std::uint64_t kRowsContext = std::uint64_t{1} << 63;

  static std::size_t outbox_number(Lane lane, int host) {
    return static_cast<std::size_t>(host) * kNumLanes + static_cast<std::size_t>(lane);
  }
  Outbox& outbox(Lane lane, int host) { return *outboxes_[outbox_number(lane, host)]; }
  // When the rank, of any host, was last known to run, in ns.
  std::int64_t last_sign_of(int rank) const;
  void wake();
  // Runs `task` on the thread, and throws what it throws.
  void on_thread(const std::function<void(Network&)>& task);
  void put_rows(Lane lane, int host, std::vector<Queued> puts);
  std::uint32_t enter(std::span<std::byte* const> bases, std::size_t bytes);
  void leave(std::uint32_t segment);
  bool is_quiet(const Heap& heap) const;
  bool propose(std::uint32_t segment, const protocol::FailureRecord& record);

  // The thread calls the following.
  void run();
  bool hear_network();
  void hear(const Event& event);
  void hear_chunk(const Immediate& immediate, Lane lane);
  void hear_credit(const Immediate& immediate, Lane lane);
  void hear_greeting(const Immediate& immediate);
  void greet();
  bool apply_arrived();
  bool send_queued();
  void forget_rows(int rank);
  bool do_tasks();
  void hear_control(int rank);
  void hear(int rank, const ControlMessage& message);
  void send_to_all(const ControlMessage& message);
  void beat(Clock::time_point now);
  bool tell_record();
  void note_proposal(Heap& heap, const protocol::FailureRecord& record) const;
  int who_decides(const Proposal& proposal, Clock::time_point now) const;
  void pursue(std::uint32_t segment, Heap& heap);
  void announce_abort(std::uint32_t segment, Heap& heap);
  void announce_aborts();
  void look_at_neighbours();
  void check_suspects(Clock::time_point now);
  void suspect(int rank, const std::string& why, Clock::duration grace);
  void lose(int rank, const std::string& why);
  void distrust(int rank, const std::string& fault);
  void sleep(bool briefly);
  void say_goodbye();
  bool is_rank_elsewhere(int rank) const {
    return rank >= 0 && rank < hosts_.num_ranks() && !hosts_.same_host(rank, rank_);
  }

  std::byte* at(std::uint32_t segment, const Target& target, std::uint64_t bytes,
                std::string& fault) override;

  const Hosts hosts_;
  const int rank_;
  const ProxyOptions options_;
  std::vector<std::uint64_t*> alive_;
  std::shared_ptr<const void> keeps_alive_;
  std::vector<std::string> where_;
  const std::shared_ptr<protocol::WorldRecord> record_;
  std::uint64_t told_word_ = 0;  // of the record
  Arena arena_;
  std::vector<std::shared_ptr<const void>> kept_;  // memory that puts may still read
  std::unique_ptr<Network> network_;
  UniqueFd wake_fd_;
  std::vector<ControlChannel> channels_;
  CommandRing ring_;
  std::vector<std::unique_ptr<Outbox>> outboxes_;  // [host][lane]; null for the own host

  std::mutex tasks_mutex_;
  std::deque<std::packaged_task<void(Network&)>> tasks_;
  std::vector<std::vector<Queued>> rows_;  // by outbox
  std::atomic<bool> has_tasks_{false};     // there may be some of both

  // Held while records are applied, so that a heap that was left is not stored into any more.
  mutable std::mutex heaps_mutex_;
  std::map<std::uint32_t, Heap> heaps_;
  std::uint32_t next_segment_ = 0;

  std::vector<std::atomic<std::int64_t>> last_heard_;  // by rank, ns
  std::vector<std::atomic<Peer>> peers_;
  mutable std::mutex words_mutex_;
  std::vector<std::string> why_lost_;  // by rank

  // The thread's alone.
  std::vector<Inbox> inboxes_;
  std::vector<std::deque<Queued>> queued_;  // by outbox
  // A rank that this one sends to or hears from over the network, until both have answered.
  struct Acquaintance {
    int rank;
    std::uint32_t unsent = 0;  // a greeting or an answer; 0: none
    bool has_answered = false;
  };
  std::vector<Acquaintance> acquaintances_;
  // Puts of rows that are on their way, by context.
  struct RowsFlight {
    int rank;
    std::shared_ptr<std::atomic<std::uint64_t>> unsent;
  };
  std::unordered_map<std::uint64_t, RowsFlight> sending_;
  std::uint64_t next_context_ = kRowsContext;
  // A rank is suspected to be lost or, if it has said goodbye by then, to be gone.
  struct Suspicion {
    Clock::time_point due;
    std::string why;
  };
  std::vector<std::optional<Suspicion>> suspected_;  // by rank
  std::vector<bool> distrusted_;                     // by rank: it broke the protocol
  Clock::time_point next_beat_, next_control_, last_active_;
  std::atomic<std::uint64_t> chunks_sent_{0}, chunks_received_{0}, row_bytes_sent_{0};

  std::atomic<int> first_unconnected_{-1};
  std::atomic<bool> sleeping_{false}, stopping_{false};
  std::atomic<bool> proposed_{false};  // by a thread of the rank, and not looked at yet
  std::thread thread_;
};

}  // namespace switchyard::network
