#pragma once
// The same training on several machines.

#include <optional>
#include <string>
#include <vector>

#include "planner/cost.h"
#include "planner/search.h"

namespace zeroplan {

/// One machine and the name it was asked for by.
struct Alternative {
  std::string name;  // "8xH100"
  MachineSpec machine;
};

struct WhatifRow {
  Alternative alternative;
  std::optional<Answer> answer;  // absent when the machine cannot run the workload at all: then `refusal` says why
  std::string refusal;
  bool cheapest = false, fastest = false;  // among those that fit; ties go to the first

  /// The best plan, or nullptr when none fits.
  const Candidate* best() const;
  std::optional<RunCost> cost() const;
};

struct WhatifAnswer {
  Request workload;                     // with sequence length and global batch; its machine is not set
  std::vector<WhatifRow> rows;          // in the order asked for
  std::vector<Assumption> assumptions;  // of the workload; each row's answer has the machine's
  bool any_fits() const;
};

/// Plans the workload on each machine, with one global batch for all: a multiple of the ranks of each. Throws
/// InputError when the workload is wrong everywhere.
WhatifAnswer plan_alternatives(const Request& workload, const std::vector<Alternative>& alternatives);

}  // namespace zeroplan
