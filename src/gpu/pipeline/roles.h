// The warps of a block by role and, derived from that, the arrivals that complete one phase of each
// barrier.
#pragma once

#include <cstdint>

#include "gpu/ptx/machine.h"

namespace switchyard::gpu {

// A block is a loading warpgroup, whose warps have roles of their own, and the math warpgroups.
// (More threads would leave the kernel fewer registers at entry than the widest matrix instruction
// has operands, and ptxas needs that many at entry whatever setmaxnreg says later.)
inline constexpr int kMathGroups = 2;
inline constexpr int kMathWarps = kWarpgroup / 32 * kMathGroups;
inline constexpr int kMathThreads = 32 * kMathWarps;
inline constexpr int kThreads = kWarpgroup * (1 + kMathGroups);
inline constexpr int kWarps = kThreads / 32;

// How tokens come into the ring.
enum class TokenSource {
  kPacked,    // one warp loads packed tiles; another packs them
  kGathered,  // two warps copy rows from where they are
};

// The ring of stages in a block's shared memory: see pipeline/ring.cuh. Stages of four-bit weights
// are small, so there are more of them.
inline constexpr std::uint32_t kRingBytes = 192 * 1024, kUsualStages = 12, kMaxStages = 24;

struct RoleWarps {
  int first, count;
  constexpr int threads() const { return 32 * count; }
};
// The table of roles.
struct BlockRoles {
  RoleWarps weights;    // asks for the tasks' weights
  RoleWarps scheduler;  // hands tasks to all other roles
  RoleWarps tokens;     // loads or gathers the tasks' tokens
  RoleWarps pack;       // packs rows into tiles
  RoleWarps math;       // multiplies
};
constexpr BlockRoles roles_of(TokenSource source) {
  return source == TokenSource::kPacked
             ? BlockRoles{{0, 1}, {1, 1}, {2, 1}, {3, 1}, {4, kMathWarps}}
             : BlockRoles{{0, 1}, {1, 1}, {2, 2}, {4, 0}, {4, kMathWarps}};
}
enum LoadingWarp : int {
  kWeightsWarp = roles_of(TokenSource::kPacked).weights.first,
  kSchedulerWarp = roles_of(TokenSource::kPacked).scheduler.first,
  kTokensWarp = roles_of(TokenSource::kPacked).tokens.first,  // the first one, if there are two
  kPackWarp = roles_of(TokenSource::kPacked).pack.first
};
static_assert(kWeightsWarp == roles_of(TokenSource::kGathered).weights.first &&
              kSchedulerWarp == roles_of(TokenSource::kGathered).scheduler.first &&
              kTokensWarp == roles_of(TokenSource::kGathered).tokens.first);
inline constexpr int kGatherThreads = roles_of(TokenSource::kGathered).tokens.threads();

// Arrivals that complete one phase of each mbarrier of a block.
struct Arrivals {
  int full, empty, task_full, task_empty, demand, ticket_full, gate_full, packing;
};
constexpr Arrivals arrivals_of(TokenSource source) {
  const BlockRoles roles = roles_of(source);
  const bool gathers = source == TokenSource::kGathered;
  return {
      // One thread announces the weights' bytes. Packed tokens are announced in the same way. With
      // gathered tokens, every gathering thread arrives when its copies have landed.
      .full = 1 + (gathers ? roles.tokens.threads() : 1),
      // Each math warp arrives when the products that read the stage are done. In a pair both
      // blocks fill a stage, and each waits for the math warps of both: see kPairedArrivals.
      .empty = roles.math.count,
      // The scheduler's thread arrives.
      .task_full = roles.scheduler.count,
      // Each warp that reads the task arrives; math warps do so when they have stored the tile.
      .task_empty = roles.weights.count + roles.tokens.count + roles.math.count,
      // For a GEMM, weights and tokens arrive once each; for a combine task, math arrives twice.
      .demand = 2,
      // The scheduler of the pair's first block arrives. Where tokens are gathered there are no
      // pairs, and the rehearsal of gather uses the barrier: each of its threads arrives once.
      .ticket_full = gathers ? roles.tokens.threads() : 1,
      // One thread announces the bytes.
      .gate_full = 1,
      .packing = 1,
  };
}

// Named barriers other than number 0, which __syncthreads() uses. In their role the math warpgroups
// use barriers 1 and 2, one for each; see group_barrier().
enum NamedBarrier : std::uint32_t {
  kOfMath = 1,      // all math warps, before their role
  kBothGroups = 3,  // all math warps, in their role
  kOfLoading,       // the loading warps
  kTilesPlaced,     // the math warps wait until the scheduler has placed tiles
  kAllPlaced,       // and the math warps have placed what is sent: the pack warp waits
  kBetweenRounds,   // the scheduler and the pack warp
};
constexpr std::uint32_t group_barrier(std::uint32_t group) { return 1 + group; }
inline constexpr int kMathAndScheduler = kMathThreads + 32;
inline constexpr int kMathSchedulerAndPack = kMathAndScheduler + 32;
inline constexpr int kSchedulerAndPack = 2 * 32;

// Registers per thread once the roles have begun. setmaxnreg hands out what the block got at
// launch, and no more: a warpgroup that asks for more waits for ever, without a deadline. See
// docs/decisions/0008.
struct RoleRegisters {
  int loading, math;
};
// Registers at launch: the SM's 65,536 divided among the threads of its blocks, in steps of 8.
constexpr int launch_registers(int blocks_per_sm) {
  return 65536 / (blocks_per_sm * kThreads) / 8 * 8;
}
constexpr bool suffice(RoleRegisters registers, int blocks_per_sm = 1) {
  constexpr auto valid = [](int count) { return count % 8 == 0 && count >= 24 && count <= 256; };
  return valid(registers.loading) && valid(registers.math) &&
         kWarpgroup * (registers.loading + kMathGroups * registers.math) <=
             kThreads * launch_registers(blocks_per_sm);
}

}  // namespace switchyard::gpu
