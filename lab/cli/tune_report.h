// What `switchyard tune` says about a profile: regrets, baselines, ablation, regions; as text and
// as rows of results.
#pragma once

#include <string>
#include <vector>

#include "results/ramp_row.h"
#include "switchyard/tuner.h"
#include "tuning/regions.h"

namespace switchyard::cli {

// The settings that judge a profile.
struct Judging {
  tuner::FitOptions fit;
  tuner::DeviceConstants constants;
  int element_bytes = 1;  // of a weight
};

// A line such as "ramp-olmoe  32 tokens  beta 0.50  best 55.1 us (rows=16 paired)  rule 1.05x".
std::string point_text(const tuner::Profile& profile, const tuner::Point& point);

// Paragraphs of lines of at most kReportColumns columns. The profile has a model, and all of its
// points to fit on are timed.
std::vector<std::string> judgement_text(const tuner::Profile& profile, const Judging& judging);

struct RowSource {
  std::string commit, command;
};
std::vector<results::RampRow> ramp_rows(const tuner::Profile& profile, const Judging& judging,
                                        const RowSource& source);
std::vector<results::RegionRow> region_rows(const tuner::Profile& profile, const Judging& judging,
                                            const RowSource& source);

}  // namespace switchyard::cli
