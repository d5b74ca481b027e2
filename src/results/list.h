// Reads a file of rows that is already parsed as JSON.
#pragma once

#include <string>
#include <vector>

#include "results/all_to_all_row.h"
#include "results/exchange_row.h"
#include "results/fields.h"
#include "results/grouped_row.h"
#include "results/hosts_row.h"
#include "results/late_row.h"
#include "results/ramp_row.h"
#include "results/row.h"

namespace switchyard::results {

// Returns the rows of a file, which may have none. Throws what parse_rows() throws. `remedy` says
// which file to give instead if this one is of another kind.
std::vector<Row> rows_of(const Json& file, const std::string& source, const char* remedy);
std::vector<GroupedRow> grouped_rows_of(const Json& file, const std::string& source,
                                        const char* remedy);
std::vector<ExchangeRow> exchange_rows_of(const Json& file, const std::string& source,
                                          const char* remedy);
std::vector<HostsRow> hosts_rows_of(const Json& file, const std::string& source,
                                    const char* remedy);
std::vector<AllToAllRow> all_to_all_rows_of(const Json& file, const std::string& source,
                                            const char* remedy);
std::vector<LateRow> late_rows_of(const Json& file, const std::string& source, const char* remedy);
std::vector<RampRow> ramp_rows_of(const Json& file, const std::string& source, const char* remedy);
std::vector<RegionRow> region_rows_of(const Json& file, const std::string& source,
                                      const char* remedy);

}  // namespace switchyard::results
