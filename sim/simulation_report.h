#pragma once
// From what the player saw to what people ask: breakdown, streams, resources, trace. Only simulate.cpp includes this.

#include <array>
#include <span>
#include <vector>

#include "sim/cluster_player.h"
#include "sim/simulate.h"

namespace zeroplan {

struct ReportInput {
  const Schedule& schedule;
  std::span<const Demand> demands;
  const TimedProgram& program;
  std::span<const PlayedWork> works;
  const RankCosts& costs;
  const std::array<RankGroups, 3>& groups;
  const PlayerOutput& output;
  const SimulateOptions& options;
};

/// All of a Simulation but the numbers of ranks.
Simulation report(const ReportInput& input);

}  // namespace zeroplan
