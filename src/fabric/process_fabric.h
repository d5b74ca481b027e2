// The fabric of ranks that are processes.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "fabric/bootstrap.h"
#include "fabric/fabric.h"

namespace switchyard {

class ProcessFabric : public Fabric {
 public:
  using Fabric::Fabric;
  virtual const Bootstrap& bootstrap() const = 0;
};

// Collective. If the ranks meet at tcp://host:port, with `secret`, the fabric has collectives and
// no memory. `view` as in Bootstrap.
std::shared_ptr<ProcessFabric> make_process_fabric(int rank, int size,
                                                   const std::string& rendezvous,
                                                   std::chrono::milliseconds deadline,
                                                   const network::Secret& secret = {},
                                                   const protocol::WorldView& view = {});

}  // namespace switchyard
