// A trial as it is drawn: a world, what its ranks do, and which of them comes to harm, when and
// how. All of it follows from the seed.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "switchyard/layer.h"

namespace switchyard::failures {

inline constexpr int kMostRanks = 8;
inline constexpr int kMostHosts = 4;

enum class Harm {
  kKill,       // SIGKILL
  kStop,       // SIGSTOP
  kExit,       // the process exits without closing anything
  kInterrupt,  // SIGINT, which ends the process
  kReturn,     // the program returns or throws: everything is closed, and the process ends
};

// The part of a world's life in which the harm comes.
enum class Scene { kPass, kCollective, kExchange, kHeap, kClose, kStart, kMixed };

// A call that all ranks make.
enum class Act {
  kBarrier,
  kMakeLayer,
  kMakeExchange,
  kMakeHeap,
  kPass,
  kDispatch,
  kCombine,
  kHeapRing,  // a put, a flag to one rank, and a wait for the flag of another
  kHeapAll,   // flags to all ranks, and waits for theirs
  kHeapBarrier,
  kCloseLayer,
  kCloseExchange,
  kCloseHeap,
  kCloseWorld,
};
const char* to_string(Act act);

enum class How {
  kFromOutside,  // at a moment after all ranks are in the scene
  kBeforeAct,    // the victim does it itself, in place of a call
  kAtStep,       // the victim does it itself, at a step of the protocol within a call
};

struct Trial {
  // `num_gpus`: other than 0 if the ranks' layers are on GPUs, each on its own, and there is
  // nothing but layers and collectives.
  explicit Trial(std::uint64_t its_seed, int num_gpus = 0);

  // "stop in pass, several hosts, launched": what its row is called.
  std::string kind() const;
  std::string words() const;
  // Makes a layer, an exchange or a heap before the first round.
  bool uses(Act first, Act last) const;
  bool ends_by_itself() const { return scene == Scene::kClose; }
  int host_of(int rank) const { return rank / (ranks / hosts); }

  std::uint64_t seed;
  Harm harm{};
  Scene scene{};
  bool launched = false;
  int gpus = 0;
  int hosts = 1, ranks = 2, victim = 0;
  int exit_code = 0;         // of Harm::kExit and kReturn
  std::vector<Act> acts;     // of a round; rounds follow each other until the world fails
  int rounds = 0;            // Scene::kClose: so many, and then everything is closed
  std::vector<Act> closing;  // the calls after the last round
  How how{};
  std::chrono::microseconds moment{};  // kFromOutside: after all ranks are in their second round
  int act = 0;                         // kBeforeAct: of acts, or of closing
  ProtocolStep::Kind step{};           // kAtStep
  int at = 0;                          // kAtStep: after so many such steps
  int threads = 1;                     // of a rank's layers
  int heap_shift = 1;                  // kHeapRing: rank r sends to rank r + heap_shift
  // By rank: its tokens need nothing of the victim, so it can be done with a pass while others are
  // still in it.
  std::vector<bool> avoids_victim;
  std::vector<std::chrono::milliseconds> arrival;  // by rank; Scene::kStart: when it comes
};

}  // namespace switchyard::failures
