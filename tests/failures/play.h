// A rank of a trial.
#pragma once

#include <chrono>
#include <string>

#include "failures/board.h"
#include "failures/trial.h"

namespace switchyard::failures {

// Plays this process's part, and tells the board what came of it. `rendezvous`: empty for a rank
// that a launcher has started.
void play_rank(const Trial& trial, int rank, const std::string& rendezvous,
               std::chrono::milliseconds deadline, Board& board);

// The signal by which a rank is harmed from outside.
int signal_of(Harm harm);

}  // namespace switchyard::failures
