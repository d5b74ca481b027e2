#include "cpu/remote_peers.h"

#include "cpu/pace.h"

namespace switchyard::cpu {

void RemotePeers::send(network::Lane lane, std::uint64_t epoch, int host, network::RecordKind kind,
                       std::span<const network::Target> targets, const void* from,
                       std::size_t bytes) const {
  using protocol::Missing;
  using protocol::Phase;
  std::size_t done = 0;
  HostPace pace(heap_);
  while (!heap_->append(lane, host, kind, targets, from, bytes, done)) {
    // Credits need nothing but the other proxy. A process that has stopped gives none, and then
    // this rank need not say why: everybody sees that it is silent.
    const int gateway = heap_->hosts().gateway(heaps_->rank, host);
    const protocol::WaitResult result = protocol::wait_until(
        *heaps_, epoch, deadline_ns_, pace, [&] { return heap_->may_append(lane, host); },
        [&] {
          return Missing{lane == network::Lane::kDispatch ? Phase::kDispatch : Phase::kCombine,
                         gateway, static_cast<std::uint64_t>(host), bytes, done};
        });
    if (result != protocol::WaitResult::kReady) return;
  }
}

}  // namespace switchyard::cpu
