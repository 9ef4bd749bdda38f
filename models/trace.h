#pragma once

#include <vector>

#include "models/units.h"

namespace zeroplan {

struct Span {
  Seconds start, end;
  friend bool operator==(const Span&, const Span&) = default;
};

/// When each op of a flat schedule ran: ops[i] belongs to Schedule::ops()[i]. From estimate(), simulate() or an
/// executor.
struct Trace {
  std::vector<Span> ops;
};

}  // namespace zeroplan
