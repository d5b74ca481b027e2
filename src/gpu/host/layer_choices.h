// Chooses a layer's schedules from a table. The host does this, since a launch fixes most of what
// differs. It calls no CUDA, so that tests need no GPU.
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

// Returns the schedule of a configuration of `switchyard tune --kernel layer`. Throws
// Error{kInvalidArgument} for any other configuration.
Schedule layer_schedule_of(const tuner::Configuration& configuration);

class LayerChoices {
 public:
  // Throws tuner::MismatchError for a table of another kernel, version, shape or device, naming
  // both; Error{kInvalidArgument} for one whose configurations are none of a layer's.
  LayerChoices(const tuner::Table& table, const LayerSpec& spec, DType compute, int num_sms);

  const std::vector<Schedule>& schedules() const { return schedules_; }
  // Returns the index of the schedule for a pass of so many tokens of each rank, without the small
  // kernel if the pass cannot be small. None: the rules decide.
  //
  // A table by tokens was measured on one rank, and says nothing of more. Any other table gives the
  // schedule with the least predicted time for the tokens of all ranks. Their rows are assumed to
  // be balanced, because the host knows no more. From such a table any pass may get the small
  // kernel where there is no other schedule.
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
