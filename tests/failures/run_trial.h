// One trial: its ranks as processes, the harm, and what came of it.
#pragma once

#include <string>

#include "fabric/namespaces.h"
#include "failures/judge.h"
#include "failures/trial.h"

namespace switchyard::failures {

// Arguments of this program with which a launcher starts it as a rank: the seed, the descriptor of
// the board, and the deadline in ms.
inline constexpr const char* kRankArgument = "--rank-of-trial";

// `hosts` are those of all trials that are not launched; null if there are none here. Needs a
// process with one thread, whose children are all of the trial.
Verdict run_trial(const Trial& trial, const Limits& limits, const NetworkNamespaces* hosts);

// The rank that a launcher started, with the three arguments behind kRankArgument. Does not return.
[[noreturn]] void run_launched_rank(char** arguments);

}  // namespace switchyard::failures
