#include "network/rows.h"

#include <algorithm>
#include <utility>

#include "network/proxy.h"

namespace switchyard::network {
namespace {

// What is on its way is told by immediates of at most so many bytes, so that one put does not keep
// the others waiting.
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 20;

}  // namespace

RowsRegion::RowsRegion(std::shared_ptr<Proxy> proxy, std::span<std::byte> memory,
                       std::shared_ptr<const void> owner, int dmabuf)
    : proxy_(std::move(proxy)), owner_(std::move(owner)) {
  proxy_->on_thread([&](Network& network) {
    region_ = network.add_rows(memory, dmabuf);
    key_ = network.rows_key(region_);
  });
}

RowsRegion::~RowsRegion() {
  proxy_->on_thread([&](Network& network) {
    if (all_sent()) {
      network.remove_rows(region_);
    } else {
      proxy_->kept_.push_back(std::move(owner_));
    }
  });
}

void RowsRegion::put(Lane lane, int host, const RowsKey& to, std::span<const RowsPut> puts) {
  std::vector<Proxy::RowsCommand> commands;
  for (const RowsPut& put : puts) {
    for (std::uint64_t done = 0; done < put.bytes; done += kMostBytes) {
      const auto bytes = static_cast<std::uint32_t>(std::min(kMostBytes, put.bytes - done));
      commands.push_back({region_, put.from + done, bytes, to, put.to + done, unsent_});
    }
  }
  if (commands.empty()) return;
  unsent_->fetch_add(commands.size(), std::memory_order_relaxed);
  proxy_->put_rows(lane, host, std::move(commands));
}

}  // namespace switchyard::network
