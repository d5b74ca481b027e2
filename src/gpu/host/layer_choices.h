// A layer's schedules from a table: chosen by the host, since a launch fixes most of what differs.
// It calls no CUDA, so that tests need no GPU.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "gpu/grouped/choice.h"
#include "switchyard/layer_spec.h"
#include "switchyard/schedule.h"
#include "switchyard/tensor.h"
#include "switchyard/tuner.h"

namespace switchyard::gpu {

// The schedule that a configuration's values tell: those of `switchyard tune --kernel layer`.
// Throws Error{kInvalidArgument} for others.
Schedule layer_schedule_of(const tuner::Configuration& configuration);

class LayerChoices {
 public:
  // Throws tuner::MismatchError for a table of another kernel, version, shape or device, naming
  // both; Error{kInvalidArgument} for one whose configurations are none of a layer's.
  LayerChoices(const tuner::Table& table, const LayerSpec& spec, DType compute, int num_sms);

  const std::vector<Schedule>& schedules() const { return schedules_; }
  // The index of the schedule for a pass of so many tokens of each rank. Of passes that cannot be
  // small, one without the small kernel. None: the rules.
  //
  // A table by tokens was measured on one rank, and says nothing of more. Of any other table it is
  // the schedule with the least predicted time for the tokens of all ranks, whose rows are assumed
  // to be balanced: the host knows no more. There any pass may get the small kernel where there is
  // no other schedule.
  std::optional<std::size_t> choose(std::int64_t tokens, int num_ranks, bool can_be_small);

 private:
  tuner::Table table_;
  int top_k_;
  ChoiceRule rule_{};
  std::vector<Schedule> schedules_;
  std::vector<Candidate> all_, large_;
  std::map<std::pair<std::int64_t, bool>, std::size_t> known_;  // by arguments of choose()
};

}  // namespace switchyard::gpu
