#pragma once

#include <string>
#include <vector>

#include "planner/report_json.h"

namespace zeroplan {

/// The rows of `whatif` for a spreadsheet: RFC 4180, one line a machine and workload, a header, units in the names of
/// the columns. What is not known is an empty cell.
std::string whatif_csv(const std::vector<NamedWhatif>& answers);

}  // namespace zeroplan
