#include "network/rows.h"

#include <algorithm>
#include <utility>

#include "network/proxy.h"

namespace switchyard::network {
namespace {

// The most bytes of a put, so that one does not keep the others waiting.
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 20;

}  // namespace

RowsRegion::RowsRegion(std::shared_ptr<Proxy> proxy, std::span<std::byte> memory,
                       std::shared_ptr<const void> owner, int dmabuf)
    : proxy_(std::move(proxy)), owner_(std::move(owner)) {
  for (int host = 0; host < proxy_->hosts().num_hosts(); ++host) {
    unsent_.push_back(std::make_shared<std::atomic<std::uint64_t>>(0));
  }
  proxy_->on_thread([&](Network& network) {
    region_ = network.add(memory, dmabuf);
    key_ = network.key(region_);
  });
}

RowsRegion::~RowsRegion() {
  proxy_->on_thread([&](Network& network) {
    if (all_sent()) {
      network.remove(region_);
    } else {
      proxy_->kept_.push_back(std::move(owner_));
    }
  });
}

int RowsRegion::unsent_host() const {
  for (std::size_t host = 0; host < unsent_.size(); ++host) {
    if (unsent_[host]->load(std::memory_order_acquire) != 0) return static_cast<int>(host);
  }
  return -1;
}

std::uint64_t RowsRegion::unsent() const {
  std::uint64_t puts = 0;
  for (const auto& of_host : unsent_) puts += of_host->load(std::memory_order_acquire);
  return puts;
}

void RowsRegion::put(Lane lane, int host, const RegionKey& to, std::span<const RowsPut> puts) {
  const auto& unsent = unsent_[static_cast<std::size_t>(host)];
  std::vector<Proxy::Queued> queued;
  for (const RowsPut& put : puts) {
    for (std::uint64_t done = 0; done < put.bytes; done += kMostBytes) {
      const auto bytes = static_cast<std::uint32_t>(std::min(kMostBytes, put.bytes - done));
      queued.push_back({{proxy_->hosts().gateway(proxy_->rank(), host), region_, put.from + done,
                         bytes, to, put.to + done},
                        unsent});
    }
  }
  if (queued.empty()) return;
  unsent->fetch_add(queued.size(), std::memory_order_relaxed);
  proxy_->put_rows(lane, host, std::move(queued));
}

}  // namespace switchyard::network
