#pragma once
// How fast the network, the links, host memory or the drives must be before a plan no longer waits for them, and from
// which batch on they are fast enough as they are.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "planner/search.h"
#include "sim/cost_model.h"

namespace zeroplan {

struct RequiredRate {
  ResourceRole role = ResourceRole::network;
  std::string name;       // "network"
  BytesPerSecond now;     // as machine.json states it: the NICs or drives of a node, a GPU's links, a node's DRAM
  BytesPerSecond needed;  // with it the step is within 5 % of what an endless rate would give
  Seconds unlimited;      // the step with an endless rate
  /// Sequences a step, with this rate as it is, from which on the step is within 5 % too; larger micro-batches (for
  /// links and network, which every micro-step uses at stages 2 and 3) or more of them. Activations of a larger
  /// micro-batch may not fit. Nothing when no batch up to 1024 times the plan's does.
  std::optional<std::int64_t> batch;
  bool by_micro_batch = false;
};

/// Of the resources that make the step more than 5 % longer than with an endless rate, the most costly first. Steps are
/// longest paths (estimates). Empty for plans of other engines.
std::vector<RequiredRate> required_rates(const Answer& answer, const Candidate& candidate);

}  // namespace zeroplan
