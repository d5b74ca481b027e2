// The agreement of an exchange's ranks, before any of them sends a byte.
#pragma once

#include "exchange/problem.h"
#include "fabric/fabric.h"

namespace switchyard {

// Collective. Throws Error{kSpecMismatch} naming the first rank and field that differ from this
// rank's, with both values.
void agree(Fabric& fabric, const ExchangeProblem& mine, Backend backend);

}  // namespace switchyard
