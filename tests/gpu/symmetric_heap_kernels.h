// Kernels of symmetric_heap_test.cpp, one rank's launches. They enqueue, and return what CUDA says.
#pragma once

#include <cstdint>

#include "switchyard/peer_map.h"

namespace switchyard::testing {

// Loads all kernels: the first launch of one would wait for the device, and so for other ranks.
int load_heap_kernels();

// Rounds of an all-gather, in one launch of `blocks` blocks of 256 threads. Each rank puts `bytes`
// bytes, whose first is at `shift` from a multiple of 16, into all ranks' windows.
struct GatherCall {
  PeerMap map;
  std::uint8_t* windows;       // [2, ranks, room]
  std::uint64_t* flags;        // [ranks]: blocks that have put, over all rounds
  std::uint64_t room;          // a multiple of 16
  std::uint64_t bytes, shift;  // together at most `room`
  std::uint32_t first_round, rounds, blocks;
  bool by_warps;         // each warp puts a part, instead of each block
  std::uint8_t* source;  // [blocks, room], this rank's: each block writes its part, then puts it
  std::uint32_t* wrong;  // bytes that came wrong, added to
  PeerWait* failed;      // the wait that failed
};
int launch_gather(const GatherCall& call, void* stream);

// Each rank puts a value and a flag of 32 bits into the next rank's memory, `rounds` times, waiting
// for that of the rank before in between, by one thread.
struct RingCall {
  PeerMap map;
  std::uint64_t* value;
  std::uint32_t* flag;
  std::uint32_t* taken;  // raised by the next rank when it has read the value
  std::uint32_t first_round, rounds;
  std::uint32_t* wrong;
  PeerWait* failed;
};
int launch_ring(const RingCall& call, void* stream);

// Waits for a flag that nobody raises, and gives up if `gives_up`.
struct StallCall {
  PeerMap map;
  std::uint64_t* flag;
  std::uint64_t deadline_ns;
  int peer;
  bool gives_up;
  PeerWait* outcome;
};
int launch_stall(const StallCall& call, void* stream);

}  // namespace switchyard::testing
