// One model's operands in place, to be run in one configuration after the other.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "bench/tune.h"
#include "gpu/device.h"

namespace switchyard::bench {

class TuneSubject {
 public:
  virtual ~TuneSubject() = default;
  // Sets the rows of the passes that follow.
  virtual void set_counts(std::span<const std::int64_t> counts) = 0;
  virtual std::uint64_t touched_bytes(std::span<const std::int64_t> counts) const = 0;
  // Makes the configuration on so many copies of the weights. Throws Error{kUnsupported} if it
  // cannot run these counts.
  virtual void choose(std::size_t configuration, int copies) = 0;
  virtual void poison_output() = 0;
  // One pass on a copy. On a GPU it is enqueued on stream().
  virtual void run(int copy) = 0;
  virtual const gpu::Stream& stream() const = 0;  // of a GPU only
  // Some rows of the last output, evenly spread. Waits for the passes.
  virtual std::vector<float> sample() = 0;
};

std::unique_ptr<TuneSubject> make_grouped_subject(const TuneModel& model,
                                                  const TuneOptions& options,
                                                  const std::vector<GroupedChoice>& choices);
std::unique_ptr<TuneSubject> make_layer_subject(const TuneModel& model, const TuneOptions& options,
                                                const std::vector<LayerChoice>& choices);

}  // namespace switchyard::bench
