// A fabric of the same ranks that can be given up by itself.
#pragma once

#include <memory>

#include "fabric/fabric.h"

namespace switchyard {

// Its abort() ends only what was made with it, on this rank and by its hooks on others. The abort()
// of `of` ends it, too. Collectives and memory are those of `of`.
std::shared_ptr<Fabric> make_scoped_fabric(std::shared_ptr<Fabric> of);

}  // namespace switchyard
