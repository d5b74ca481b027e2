// Cuts a grouped GEMM's work by a schedule or by a table of configurations. It calls no CUDA, so
// that tests need no GPU.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "gpu/grouped/choice.h"
#include "switchyard/schedule.h"
#include "switchyard/tensor.h"
#include "switchyard/tuner.h"

namespace switchyard::gpu {

// The facts that a cut depends on beside the schedule.
struct CutFacts {
  protocol::TileShape tile;  // the highest
  bool token_major;          // tiles of FP8
  std::uint32_t k_blocks;    // stages of a token
};
// Returns the cut of a schedule; the rules decide what it leaves open. Throws
// Error{kInvalidArgument} or {kUnsupported} for a schedule that makes no sense. `paired` is no part
// of a cut.
GroupedCut cut_of(const GroupedSchedule& schedule, const CutFacts& facts);

// Returns the schedule of a configuration of `switchyard tune --kernel grouped`. Throws
// Error{kInvalidArgument} for any other configuration.
GroupedSchedule schedule_of(const tuner::Configuration& configuration);

// A table as kernels read it. It is split by what a launch fixes: blocks go singly or in pairs.
struct GroupedChoices {
  ChoiceRule rule;
  // Candidates of fewer splits come first, since splits need memory that a call may not have.
  std::vector<Candidate> single, paired;

  const std::vector<Candidate>& of(bool pairs) const { return pairs ? paired : single; }
  // Returns how many candidates have at most so many splits.
  static std::uint32_t count(const std::vector<Candidate>& candidates, std::uint32_t log2_splits);
};

struct TableFacts {
  CutFacts cut;
  DType compute;
  int num_experts, n, k;
  int num_sms;  // of the device
};
// Throws tuner::MismatchError for a table of another kernel, version, shape or device, naming both;
// Error{kInvalidArgument} for one whose configurations are none of this kernel's, or that has no
// entries, or more heights or entries than a kernel takes.
GroupedChoices choices_of(const tuner::Table& table, const TableFacts& facts);

// log2 of the most splits for which a call of so many rows has memory: the sums of all parts take
// at most kMostSplitBytes. More sums than that do not stay in the L2 cache, from which they are
// read again.
inline constexpr std::uint64_t kMostSplitBytes = std::uint64_t{64} << 20;
std::uint32_t most_log2_splits(std::int64_t rows, std::int64_t width);

// Returns whether a call of so many rows is launched in pairs: what the candidate with the least
// time for balanced experts does. The host knows only the number of rows.
bool choose_pairs(const GroupedChoices& choices, int num_experts, std::int64_t rows,
                  std::uint32_t log2_splits);

}  // namespace switchyard::gpu
