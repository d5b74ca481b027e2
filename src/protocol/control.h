// The words that ranks show each other beside their data: what each waits for, how far it is, and
// why the world ended.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/partition.h"

namespace switchyard::protocol {

inline constexpr int kMaxRanks = 64;
inline constexpr int kMaxTopK = 32;

enum class Phase : std::uint8_t {
  kNone,
  kGate,
  kSlots,  // of few tokens, whose passes have no counts
  kCounts,
  kDispatch,
  kExperts,
  kCombine,
  kLink,  // A rank is lost: its process or its connection ended. No rank waits in this phase.
  // Outside passes; words of a WorldRecord have these, too.
  kBootstrap,   // a collective of all ranks at start-up: a wait for all that are not in it
  kNeighbours,  // a collective of the ranks of a host
  kSignal,      // a flag of a symmetric heap
  kGaveUp,      // not a wait: the rank gave up because of `peer`
  kLeft,        // not a wait: the rank let go of its World
};

SWITCHYARD_HOST_DEVICE constexpr const char* phase_name(Phase phase) {
  switch (phase) {
    case Phase::kNone: return "none";
    case Phase::kGate: return "gate";
    case Phase::kSlots: return "slots";
    case Phase::kCounts: return "counts";
    case Phase::kDispatch: return "dispatch";
    case Phase::kExperts: return "experts";
    case Phase::kCombine: return "combine";
    case Phase::kLink: return "link";
    case Phase::kBootstrap:
    case Phase::kNeighbours: return "bootstrap";
    case Phase::kSignal: return "signal";
    case Phase::kGaveUp: return "gave up";
    case Phase::kLeft: return "left";
  }
  return "?";
}

// A failure, as a waiter whose deadline passed saw it.
struct FailureRecord {
  std::int32_t waiter;
  std::int32_t peer;  // the culprit
  Phase phase;        // the step that the culprit did not do,
  std::uint64_t epoch;
  std::uint64_t slot;  // the slot that the waiter itself lacked
  std::uint64_t expected;
  std::uint64_t observed;
  std::uint64_t waited_ns;
  std::int32_t witness;  // the rank that waits for that step; often the waiter
};

// "I wait for `peer` in `phase` of `epoch`", in one word so that it is read whole. The words of a
// deadlocked world compare like the steps that are missing, the earliest first, except that a
// rank's wait for its own threads comes after all waits for others: it often is a consequence.
struct WaitsFor {
  Phase phase = Phase::kNone;
  int peer = 0;
  std::uint64_t epoch = 0;
  bool own = false;  // the waiter is `peer` itself

  // The lowest bits change with `beat` while a wait lasts: a word that stays the same is of a rank
  // that has stopped.
  SWITCHYARD_HOST_DEVICE constexpr std::uint64_t pack(std::uint32_t beat) const {
    return static_cast<std::uint64_t>(own) << 63 | (epoch & kMostEpochs) << 24 |
           static_cast<std::uint64_t>(phase) << 20 | static_cast<std::uint64_t>(peer) << kBeatBits |
           (beat & ((1u << kBeatBits) - 1));
  }
  SWITCHYARD_HOST_DEVICE static constexpr WaitsFor unpack(std::uint64_t word) {
    return {static_cast<Phase>(word >> 20 & 15), static_cast<int>(word >> kBeatBits & 255),
            word >> 24 & kMostEpochs, (word >> 63) != 0};
  }
  // False for the other words of a WorldRecord.
  constexpr bool is_wait() const {
    return phase != Phase::kNone && phase != Phase::kGaveUp && phase != Phase::kLeft;
  }
  static constexpr int kBeatBits = 12;
  static constexpr std::uint64_t kMostEpochs = (std::uint64_t{1} << 39) - 1;
};
static_assert(kMaxRanks <= 256, "a peer has 8 bits");

// A bit of `abort`: the rank called World::abort(), and left no record.
inline constexpr std::uint64_t kCalledOff = std::uint64_t{1} << 32;
// Beside kCalledOff: it did not call that, but its own caller interrupted it (base/interrupt.h).
inline constexpr std::uint64_t kInterrupted = std::uint64_t{1} << 33;

// The wait of another rank, as a rank that looks for a culprit has seen it.
struct Sighting {
  std::uint64_t last;      // its `waits_for` when it was looked at last
  std::uint64_t earliest;  // the least that it changed to; 0: it did not change
};

// Every rank's own words, on cache lines of their own because peers poll them.
struct Control {
  // 0, or 1 + the rank whose `failure` ended the world; with kCalledOff, the rank that called off
  // all passes, or was interrupted.
  alignas(64) std::uint64_t abort;
  std::uint64_t verdict;                // the arbiter's: what every rank's `abort` will be
  std::uint64_t claim;                  // 0, or 1 once a thread of the owner writes `failure`
  FailureRecord failure;                // what ended the owner's own patience
  alignas(64) std::uint64_t waits_for;  // WaitsFor::pack of what the owner waits for; 0: it works
  alignas(64) std::uint64_t progress;   // steps the owner has completed since the layer was made
  std::uint64_t ended;  // calls the owner has ended; kept only where the world spans hosts
  // The owner's alone: 1 while one of its threads looks for a culprit, and what that thread saw.
  alignas(64) std::uint64_t judging;
  Sighting sightings[kMaxRanks];
};

// All ranks' heaps as this rank maps them; each begins with its rank's Control. Trivially copyable,
// so that a kernel can take it.
struct Heaps {
  ExpertPartition experts;
  int rank = 0;
  // The rank whose `verdict` word decides, and whose heap all that use the word have mapped: rank
  // 0, or the first of the rank's host.
  int arbiter = 0;
  std::byte* base[kMaxRanks] = {};
  // This rank's word in the world's record, for waits of kernels; null: they are not shown. On the
  // host a wait's pace shows it.
  std::uint64_t* shown = nullptr;

  SWITCHYARD_HOST_DEVICE int size() const { return experts.num_ranks; }
  SWITCHYARD_HOST_DEVICE std::byte* mine() const { return base[rank]; }
  SWITCHYARD_HOST_DEVICE Control* control(int of) const {
    return reinterpret_cast<Control*>(base[of]);
  }
};

}  // namespace switchyard::protocol
