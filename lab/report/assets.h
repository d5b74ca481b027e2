// The files of assets/. embed_assets.cmake turns them into a source file.
#pragma once

#include <string_view>

namespace switchyard::report::assets {

extern const std::string_view kPage;  // with {{placeholders}}
extern const std::string_view kStyle;
extern const std::string_view kPlot;      // scales, axes, tables: what all charts use
extern const std::string_view kCharts;    // charts of rows
extern const std::string_view kTuning;    // the choice of configurations
extern const std::string_view kLadder;    // the all-to-all problem
extern const std::string_view kTables;    // rows of all other kinds
extern const std::string_view kRouting;   // recorded routings
extern const std::string_view kTimeline;  // the time axis of a trace
extern const std::string_view kMain;

}  // namespace switchyard::report::assets
