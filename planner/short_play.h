#pragma once
// The played step of many micro-steps from the plays of two short ones.

#include <cstdint>
#include <functional>

#include "sim/simulate.h"

namespace zeroplan {

/// How long a step is when it is played, and what it waits for.
struct PlayedStep {
  Seconds step;
  TimeBreakdown time;
};
PlayedStep played_step(const Simulation& simulation);

/// The part of a step in which more of a stream's or of a resource's work is waited for.
Seconds TimeBreakdown::*waited_for(Stream stream);
Seconds TimeBreakdown::*waited_for(ResourceRole role);

/// One plan's step with few micro-steps, twice: `longer` has some more of them. Both outlive this.
struct ShortPlays {
  const Simulation& shorter;
  const Simulation& longer;
  std::int64_t shorter_micro_steps = 0, longer_micro_steps = 0;

  /// Times the difference of the two that a step of so many micro-steps takes beyond `longer`.
  double differences_to(std::int64_t micro_steps) const;
};

/// What a step of `micro_steps`, no fewer than those played, cannot be shorter than: `longer`, and what its busiest
/// stream and its busiest resource have to do in it. `of`: waited_for() them.
struct LeastStep {
  Seconds step;
  Seconds TimeBreakdown::*of = nullptr;
};
LeastStep least_step(const ShortPlays& plays, std::int64_t micro_steps);

/// An extended step may be this much shorter than what bounds it: rounding, and ends of the step that overlap.
inline constexpr double kSteadyTolerance = 1e-3;

/// Adds to `longer` what one micro-step more takes, which is the difference of the plays, for each that was not played:
/// exact once micro-steps repeat. Where that falls below least_step() or below `least`, which the caller knows of the
/// whole step, micro-steps do not repeat yet (a short step hides a queue behind the update, a long one cannot): then
/// play_all() is the answer, or of a step too large for that, what bounds it.
PlayedStep extend_plays(const ShortPlays& plays, std::int64_t micro_steps, Seconds least,
                        const std::function<PlayedStep()>& play_all);

}  // namespace zeroplan
