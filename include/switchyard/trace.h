// A record of what every role of a rank did in one forward pass, and when.
#pragma once

#include <cstdint>
#include <vector>

namespace switchyard {

// The role that an event belongs to. On the CPU every thread plays all roles.
enum class TraceRole : std::uint8_t {
  kPass,       // steps of a whole block, or rank: gate, routing, counts, plan
  kScheduler,  // takes tasks
  kWeights,    // streams a task's weights
  kTokens,     // streams a task's tokens
  kSend,       // writes rows to other ranks
  kPack,       // copies rows into token tiles
  kMath,       // GEMMs, their epilogues, combine
};

// Slows a role down, for tests of what waits for what: the role pauses after one in kOneIn of its
// tasks (rows, for roles that copy rows; steps, for kPass).
struct SlowRole {
  static constexpr std::uint32_t kOneIn = 16;
  TraceRole role = TraceRole::kPass;
  std::uint32_t nanoseconds = 0;
};

enum class TraceKind : std::uint8_t {
  kGate,    // activations prepared, partial logits
  kRoute,   // experts chosen, slots listed
  kCounts,  // counts sent to every rank, and awaited from every rank
  kPlan,    // tiles and offsets
  kSend,    // rows written to other ranks; with 0 rows: a flag raised for an expert's
  kPack,    // rows copied into tiles
  kGemm1,   // one tile and block of weight rows; a loading role's or the scheduler's part of it
  kGemm2,
  kCombine,  // a chunk of tokens summed
  kSignal,   // flags of completed tiles raised on other ranks
};

// The reason for the time between ready_ns and begin_ns.
enum class TraceWait : std::uint8_t {
  kNothing,
  kTask,      // another task
  kSlot,      // room in a ring or in a buffer of tiles
  kInput,     // an input from this rank: packed rows, a first GEMM's output, weights
  kCounts,    // other ranks' counts
  kDispatch,  // other ranks' rows
  kCombine,   // other ranks' results
  kCore,      // a processor core that another rank's thread was using; CPU only
};

struct TraceEvent {
  TraceKind kind{};
  TraceRole role{};
  TraceWait wait = TraceWait::kNothing;
  std::int32_t unit = 0;  // the block (CUDA, one per SM) or the thread (CPU)
  // Nanoseconds on the host's steady clock, on all ranks of one host. The role was free at
  // ready_ns, had what it waited for at begin_ns, and was done at end_ns.
  std::int64_t ready_ns = 0;
  std::int64_t begin_ns = 0;
  std::int64_t products_ns = 0;  // when a GEMM's sums were complete, on a GPU; else 0
  std::int64_t end_ns = 0;
  // The subject of the event; -1 where a field does not apply. Tiles are numbered within the rank,
  // the shared expert's first.
  std::int32_t tile = -1;    // kCombine: the chunk of tokens
  std::int32_t block = -1;   // block of weight rows, and part of K if split, within the tile
  std::int32_t expert = -1;  // among all ranks' experts; -1: the shared one
  std::int32_t rows = 0;     // token rows
  std::int32_t peer = -1;    // the rank written to, read from or waited for
};

// The events of one rank. Those of one unit and role do not overlap and are in order.
struct PassTrace {
  int rank = 0;
  int num_ranks = 1;
  std::uint64_t epoch = 0;
  // Events lost for lack of room; with kCuda lost stamps, counted since the previous trace.
  std::int64_t dropped = 0;
  std::vector<TraceEvent> events{};
};

// The values' names: "pass", "scheduler", ...; "gate", "route", ...; "nothing", "task", ...
const char* to_string(TraceRole role);
const char* to_string(TraceKind kind);
const char* to_string(TraceWait wait);

}  // namespace switchyard
