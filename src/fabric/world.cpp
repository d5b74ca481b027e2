#include "switchyard/world.h"

#include <array>
#include <cstddef>

#include "fabric/fabric.h"

namespace switchyard {

Fabric& World::fabric() const {
  fabric_->origin.require_here("the world");
  return *fabric_;
}

int World::rank() const { return fabric_->rank(); }

int World::size() const { return fabric_->size(); }

std::chrono::milliseconds World::deadline() const { return fabric_->deadline(); }

const char* World::fabric_name() const { return fabric_->name(); }

void World::abort() const noexcept {
  if (fabric_->origin.is_here()) fabric_->abort();
}

void World::barrier() {
  const std::array<std::byte, 1> mine{};
  std::vector<std::byte> all(static_cast<std::size_t>(size()));
  fabric().all_gather(mine, all);
}

}  // namespace switchyard
