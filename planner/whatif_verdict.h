#pragma once
// Which row of a whatif answer to take, or what would have to change.

#include "planner/whatif.h"

namespace zeroplan {

/// A run and whose it is.
struct WhatifPoint {
  std::size_t row = 0;
  bool asked = true;  // false: with more nodes than the row was given
  WhatifRun run;
};

/// Whether `a` is to be preferred over `b`: node hours or USD when both have them, or time; ties by the other.
bool preferred(const WhatifRun& a, const WhatifRun& b, Prefer prefer);

/// Precondition: limits are given. `more` are runs with more nodes than rows were given, looked at when no row keeps
/// the limits.
WhatifVerdict verdict_of(const WhatifAnswer& answer, const std::vector<WhatifPoint>& more);

/// "21,340 USD in 12.3 days"; "12.3 days (no price)".
std::string run_text(const WhatifRun& run);
/// "8xH100 on 4 nodes".
std::string place_text(const WhatifRow& row, int nodes);
/// "the deadline of 30 days and the budget of 50,000 USD".
std::string limits_text(const WhatifLimits& limits);
/// "12.3 days"; hours below two days.
std::string days_text(Seconds time);
/// "21,340 USD".
std::string usd_text(double usd);
/// "21,340"; four digits and an exponent where nobody counts any more.
std::string whole_text(double value);

}  // namespace zeroplan
