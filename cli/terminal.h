#pragma once

#include "planner/report.h"

namespace zeroplan {

/// Colour on a terminal without NO_COLOR and TERM=dumb; more than ASCII on a terminal with a UTF-8 locale.
ReportStyle stdout_style();

}  // namespace zeroplan
