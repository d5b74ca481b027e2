// A rank that plays the problem, on a CPU or a GPU, on any rung.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "all_to_all/call.h"
#include "all_to_all/problem.h"
#include "all_to_all/rung.h"
#include "switchyard/layer.h"
#include "switchyard/symmetric_heap.h"
#include "switchyard/world.h"

namespace switchyard::all_to_all {

struct RankOptions {
  Backend backend = Backend::kCpu;
  int device = -1;          // kCuda: of this rank; -1: the current one
  int ranks_on_device = 1;  // kCuda: that share this rank's GPU, whose blocks must all fit on it
  StandIn stand_in = StandIn::kRank;
  std::chrono::milliseconds deadline{0};  // of every wait; 0: the world's
};

// Blocks of each stage's kernel; on a CPU, threads.
using Grids = std::array<int, kNumStages>;

struct CallTimes {
  std::array<double, kNumStages> stage_us{};
  // The time of the whole call. On a GPU it and the stages' are by the GPU's clock. A wait counts
  // in the stage that waits.
  double total_us = 0;
};

// The records of a stage's workers, in order of blocks and warps. The stage kExperts has none.
struct StageRecords {
  int blocks = 0, warps = 0;
  std::vector<Record> of_worker;
};
using CallRecords = std::array<StageRecords, kNumStages>;

// One thread per rank. All ranks make the same calls in the same order.
class Rank {
 public:
  virtual ~Rank() = default;
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  // The most blocks of a kernel that waits, the blocks before tuning, and what tuning tries.
  virtual int most_blocks() const = 0;
  Grids default_grids() const;
  virtual std::vector<int> grids_to_try() const = 0;

  // Collective. Chooses what the next calls do; flags and counters are all 0 behind it. Throws
  // Error{kInvalidArgument} for grids outside of 1 to most_blocks().
  void start(const Features& features, const Grids& grids);
  // Collective. Fills what a call writes, other than flags and counters, with numbers that are
  // none: a result that was not sent, or is read too early, is wrong then.
  void poison();

  // Collective: lets all ranks begin their next call at the same time; on a GPU behind a flush of
  // its L2 cache. Calls that are not timed need it not.
  virtual void get_ready() = 0;
  // Collective, behind start(): one call. Throws TimeoutError naming a rank that does not come.
  // `records`, if given, gets what every worker did.
  virtual CallTimes call(CallRecords* records = nullptr) = 0;

  // Returns the result of the last call: [T, H] in fp16.
  std::vector<std::uint16_t> result() const;

 protected:
  Rank(const World& world, const Case& problem, const RankOptions& options);

  // Writes `value` into each byte of the heap's memory; copies into it; copies from it. They return
  // when that is done.
  virtual void fill(void* memory, int value, std::size_t bytes) = 0;
  virtual void upload(void* to, const void* from, std::size_t bytes) = 0;
  virtual void download(void* to, const void* from, std::size_t bytes) const = 0;
  virtual int usual_blocks() const = 0;

  World& world() { return world_; }
  // Returns the next call, with its number and window.
  Call next_call();
  void check() const { heap_.check(); }

  // Bytes of memory that memset clears where flags are reset: counters before a call, and flags of
  // its window behind it.
  struct Part {
    void* memory;
    std::size_t bytes;
  };
  Part counters() const;
  std::vector<Part> flags_of_window(int window) const;

  // Called once by the backend's constructor: puts the rank's inputs where its calls read them.
  void upload_inputs();
  SymmetricHeap& heap() { return heap_; }
  const PeerMap& map() const { return call_.map; }

  Case problem_;
  RankOptions options_;
  Features features_;
  Grids grids_{};
  bool started_ = false;

 private:
  World world_;
  Routing routing_;
  Traffic traffic_;
  SymmetricHeap heap_;
  Call call_{};
  std::uint32_t number_ = 0;  // of the last call
};

// Collective. Throws Error{kInvalidArgument} as require_playable() does, {kUnsupported} for kCuda
// in a build without CUDA, and what SymmetricHeap throws.
std::unique_ptr<Rank> make_rank(const World& world, const Case& problem,
                                const RankOptions& options);

// The backends' own; call make_rank().
std::unique_ptr<Rank> make_cpu_rank(const World& world, const Case& problem,
                                    const RankOptions& options);
std::unique_ptr<Rank> make_gpu_rank(const World& world, const Case& problem,
                                    const RankOptions& options);

}  // namespace switchyard::all_to_all
