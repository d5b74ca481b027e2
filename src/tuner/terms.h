// The terms of the cost model.
#pragma once

#include <cmath>

#include "switchyard/tuner.h"

namespace switchyard::tuner {

struct Terms {
  Form form;
  int num_sms;

  bool rounds() const { return form == Form::kRoundedWaves || form == Form::kRoundedFull; }
  bool may_have_log() const { return form == Form::kFull || form == Form::kRoundedFull; }
  int fewest_points() const { return form == Form::kTasks ? 2 : may_have_log() ? 4 : 3; }
  // b's regressor. Unrounded waves would only be c's again, in other units, so b stays 0 (see
  // Form).
  double waves(double grid) const { return rounds() ? std::ceil(grid / num_sms) : 0; }
};

}  // namespace switchyard::tuner
