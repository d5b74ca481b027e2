// Recorded routings on the page: the balancedness of each layer over its steps.
#pragma once

#include <string>

#include "base/json.h"
#include "switchyard/recording.h"

namespace switchyard::report {

struct Routing {
  Recordings recordings;
  std::string file;  // the name that the page shows
};

// "layers.3: 1000 steps, 17 before them overwritten; beta 0.62 to 0.91, mean 0.80".
std::string routing_text(const Recording& recording);

// Returns the data that the page's script draws. Long recordings are thinned out to keep the page
// small; the numbers in words cover all steps.
Json routing_json(const Routing& routing);

}  // namespace switchyard::report
