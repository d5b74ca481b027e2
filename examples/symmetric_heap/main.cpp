// A one-sided all-gather on CPU ranks: every rank puts its block into all ranks' memory, raises a
// flag there, and waits for everybody's flag. all_gather.cu is the same as a kernel.
//
//   symmetric_heap [RANKS]                         threads of this process, 4 if not said
//   switchyard launch -n 4 -- symmetric_heap       processes
#include <switchyard/error.h>
#include <switchyard/peer.h>
#include <switchyard/symmetric_heap.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "on_ranks.h"

using namespace switchyard;

namespace {

constexpr std::size_t kWords = 1000;  // of each rank
constexpr std::uint64_t kRounds = 100;

std::uint32_t word(int rank, std::size_t i, std::uint64_t round) {
  return static_cast<std::uint32_t>(rank) << 24 | static_cast<std::uint32_t>(i * 31 + round);
}

// Runs one rank.
void all_gather(const World& world) {
  SymmetricHeap heap(world, 1 << 20);  // collective
  const auto ranks = static_cast<std::size_t>(world.size());
  // Two windows, used in turn: a rank that has everybody's flag of a round may put the next round
  // while others still read this one.
  auto* const windows = heap.allocate<std::uint32_t>(2 * ranks * kWords);
  auto* const flags = heap.allocate<std::uint64_t>(ranks);  // flag r is raised by rank r
  heap.barrier();  // all ranks have allocated, and the same

  const PeerMap map = heap.peer_map();
  const auto me = static_cast<std::size_t>(map.rank);
  std::vector<std::uint32_t> block(kWords);
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    std::uint32_t* const window = windows + round % 2 * ranks * kWords;
    for (std::size_t i = 0; i < kWords; ++i) block[i] = word(map.rank, i, round);
    for (int n = 0; n < map.size; ++n) {
      const int peer = (map.rank + n) % map.size;
      host::put(translate(map, window + me * kWords, peer), block.data(),
                kWords * sizeof(block[0]));
      host::signal(translate(map, flags + me, peer), round);
    }
    for (int peer = 0; peer < map.size; ++peer) {
      heap.wait(flags + peer, round, peer);  // throws TimeoutError, naming the rank
    }
    for (int peer = 0; peer < map.size; ++peer) {
      for (std::size_t i = 0; i < kWords; ++i) {
        if (window[static_cast<std::size_t>(peer) * kWords + i] == word(peer, i, round)) continue;
        throw std::runtime_error("rank " + std::to_string(map.rank) + " has a wrong word of rank " +
                                 std::to_string(peer));
      }
    }
  }
  heap.barrier();  // nobody writes here any more
}

}  // namespace

int main(int argc, char** argv) {
  return run_on_ranks(argc, argv, 4, "", static_cast<int>(kRounds), all_gather);
}
