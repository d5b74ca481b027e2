// Times GroupedGemm alone, on the shapes that rivals publish.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/floor.h"
#include "bench/observer.h"
#include "bench/run_note.h"
#include "bench/timed_place.h"
#include "results/grouped_row.h"
#include "switchyard/layer.h"
#include "switchyard/tensor.h"

namespace switchyard::bench {

// One problem: `experts` matrices [n, k], and `rows` rows for each, or as a mean.
struct GroupedPoint {
  int experts = 0, n = 0, k = 0;
  std::int64_t rows = 0;
  bool swiglu = false;         // the rows of a matrix are those of gate, then of up
  std::optional<double> beta;  // rows as a random router of this balancedness deals them

  bool operator==(const GroupedPoint&) const = default;
};

struct GroupedShape {
  int experts = 0, n = 0, k = 0;
  std::vector<std::int64_t> rows;
  bool swiglu = false;
};
std::vector<GroupedPoint> grouped_points_of(const GroupedShape& shape);

// The suite's points, those of one matrix side by side.
std::vector<GroupedPoint> grouped_suite();

// Every point with each of these balancednesses in turn; as it is if there are none.
std::vector<GroupedPoint> with_balancedness(const std::vector<GroupedPoint>& points,
                                            const std::vector<double>& betas);

// Returns the running sums of the experts' rows, GroupedInput::ends. They are equal, or those of a
// draw by `seed`. A draw is of tokens that choose some experts each, at least one and at most
// eight, so its sum may be a few rows below `experts * rows`.
std::vector<std::int32_t> ends_of(const GroupedPoint& point, std::uint64_t seed);

struct GroupedOptions : RunNote, TimingOptions {
  DType dtype = DType::kBF16;  // of the matrices; GroupedOperands tells that of the rows
  std::optional<machine::GpuFacts> facts;  // for kCuda: facts given for this run
};

using GroupedObserver = Observer<results::GroupedRow>;

class GroupedSession {
 public:
  // Throws what choose_floor() throws.
  GroupedSession(GroupedOptions options, GroupedObserver& observer);

  const std::string& machine() const { return machine_; }
  // As Session::why_no_floor().
  const std::string& why_no_floor() const { return floor_.why_not; }

  // Measures and returns the rows. Points that fail are left out.
  std::vector<results::GroupedRow> run(const std::vector<GroupedPoint>& points);

 private:
  GroupedOptions options_;
  GroupedObserver& observer_;
  std::string machine_;
  FloorChoice floor_;
};

}  // namespace switchyard::bench
