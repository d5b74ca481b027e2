#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "network/proxy.h"
#include "protocol/atomics.h"

namespace switchyard::network {

RemoteHeap::RemoteHeap(std::shared_ptr<Proxy> proxy, std::span<std::byte* const> bases,
                       std::size_t bytes)
    : proxy_(std::move(proxy)),
      control_(
          reinterpret_cast<protocol::Control*>(bases[static_cast<std::size_t>(proxy_->rank_)])),
      segment_(proxy_->enter(bases, bytes)) {}

RemoteHeap::~RemoteHeap() { proxy_->leave(segment_); }

const Hosts& RemoteHeap::hosts() const { return proxy_->hosts_; }

int RemoteHeap::arbiter() const {
  return proxy_->hosts_.ranks_of(proxy_->hosts_.host_of(proxy_->rank_)).front();
}

bool RemoteHeap::reaches(int rank) const { return proxy_->hosts_.same_host(rank, proxy_->rank_); }

int RemoteHeap::gateway_to(int rank) const {
  return proxy_->hosts_.gateway(proxy_->rank_, proxy_->hosts_.host_of(rank));
}

bool RemoteHeap::append(Lane lane, int host, RecordKind kind, std::span<const Target> targets,
                        const void* payload, std::size_t bytes, std::size_t& done) {
  // A rank that has left gives no credits any more. Nobody wanted what it would have passed on, or
  // those who do give up at their deadline.
  if (proxy_->has_departed(proxy_->hosts_.gateway(proxy_->rank_, host))) {
    done = bytes;
    return true;
  }
  return proxy_->outbox(lane, host).append(kind, segment_, targets, payload, bytes, done);
}

void RemoteHeap::flush(Lane lane, int host) { proxy_->outbox(lane, host).flush(); }

bool RemoteHeap::may_append(Lane lane, int host) const {
  return proxy_->has_departed(proxy_->hosts_.gateway(proxy_->rank_, host)) ||
         proxy_->outbox(lane, host).may_append();
}

void RemoteHeap::end_call() {
  protocol::store_release(&control_->ended, protocol::load_relaxed(&control_->ended) + 1);
}

int RemoteHeap::silent_rank(std::uint64_t deadline_ns) const {
  const std::int64_t now = std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
  std::int64_t longest = std::max(static_cast<std::int64_t>(deadline_ns / 2), kLeastSilence);
  int silent = -1;
  for (int r = 0; r < proxy_->hosts_.num_ranks(); ++r) {
    // A rank that has said goodbye is silent with good reason. If it is missed, waits for it end by
    // the world's record.
    if (r == proxy_->rank_ || proxy_->has_departed(r)) continue;
    const std::int64_t heard = proxy_->last_sign_of(r);
    if (now - heard <= longest) continue;
    longest = now - heard;
    silent = r;
  }
  return silent;
}

void RemoteHeap::on_abort(std::function<void()> hook) {
  const std::lock_guard lock(proxy_->heaps_mutex_);
  Proxy::Heap& heap = proxy_->heaps_.at(segment_);
  heap.on_abort = std::move(hook);
  if (heap.abort_announced) heap.on_abort();
}

bool RemoteHeap::propose(const protocol::FailureRecord& record) const {
  return proxy_->propose(segment_, record);
}

}  // namespace switchyard::network
