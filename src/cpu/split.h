// Decides whether, and when, the rows of an expert may be computed in several parts.
#pragma once

#include <chrono>

#include "cpu/pass.h"

namespace switchyard::cpu {

// True if no product of this rank's experts depends on the height of its tile, so that a row has
// the same bits whichever rows are computed with it. The library chooses instructions by shape, so
// this is found out by multiplying; results are kept for the process.
bool bits_ignore_height(const LayerState& layer);

// How long an idle thread waits for late counts before it computes an expert's rows without them.
// The price of being wrong is that the weights of one expert are read a second time. So it waits as
// long as that takes: at worst it then loses twice what it could have gained.
std::chrono::nanoseconds patience_for(const LayerState& layer);

}  // namespace switchyard::cpu
