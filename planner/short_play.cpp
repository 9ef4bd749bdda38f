#include "planner/short_play.h"

#include <algorithm>

namespace zeroplan {
namespace {

constexpr double kMostUnsteadyOps = 2e6;  // timed ops of all simulated ranks: a tenth of a second

void extend(Seconds& longer, Seconds shorter, double more) { longer += more * (longer - shorter); }

PlayedStep extended(const ShortPlays& plays, double more) {
  constexpr Seconds TimeBreakdown::*kParts[] = {&TimeBreakdown::compute, &TimeBreakdown::exposed_communication,
                                                &TimeBreakdown::exposed_offload, &TimeBreakdown::optimizer,
                                                &TimeBreakdown::idle};
  PlayedStep step = played_step(plays.longer);
  extend(step.step, plays.shorter.step, more);
  for (const auto part : kParts) extend(step.time.*part, plays.shorter.breakdown.*part, more);
  return step;
}

}  // namespace

PlayedStep played_step(const Simulation& simulation) { return {simulation.step, simulation.breakdown}; }

Seconds TimeBreakdown::*waited_for(Stream stream) {
  switch (stream) {
    case Stream::compute:
      return &TimeBreakdown::compute;
    case Stream::gather:
    case Stream::reduce:
      return &TimeBreakdown::exposed_communication;
    case Stream::h2d:
    case Stream::d2h:
    case Stream::nvme_read:
    case Stream::nvme_write:
    case Stream::host:
      return &TimeBreakdown::exposed_offload;
  }
  return &TimeBreakdown::idle;
}

Seconds TimeBreakdown::*waited_for(ResourceRole role) {
  switch (role) {
    case ResourceRole::sm:
    case ResourceRole::hbm:
      return &TimeBreakdown::compute;
    case ResourceRole::links:
    case ResourceRole::network:
      return &TimeBreakdown::exposed_communication;
    case ResourceRole::h2d:
    case ResourceRole::d2h:
    case ResourceRole::dram:
    case ResourceRole::cpu:
    case ResourceRole::nvme_read:
    case ResourceRole::nvme_write:
      return &TimeBreakdown::exposed_offload;
  }
  return &TimeBreakdown::idle;
}

double ShortPlays::differences_to(std::int64_t micro_steps) const {
  return static_cast<double>(micro_steps - longer_micro_steps) /
         static_cast<double>(longer_micro_steps - shorter_micro_steps);
}

LeastStep least_step(const ShortPlays& plays, std::int64_t micro_steps) {
  const double more = plays.differences_to(micro_steps);
  LeastStep least{plays.longer.step, &TimeBreakdown::exposed_offload};
  const auto at_least = [&](Seconds busy, Seconds in_shorter, Seconds TimeBreakdown::*of) {
    extend(busy, in_shorter, more);
    if (busy > least.step) least = {busy, of};
  };
  // Ops of a stream run one after the other, and a resource does not do two things at once.
  for (std::size_t s = 0; s < kNumStreams; ++s) {
    at_least(plays.longer.streams[s].busy, plays.shorter.streams[s].busy, waited_for(static_cast<Stream>(s)));
  }
  for (std::size_t r = 0; r < kNumRoles; ++r) {
    at_least(plays.longer.role_busy[r], plays.shorter.role_busy[r], waited_for(static_cast<ResourceRole>(r)));
  }
  return least;
}

PlayedStep extend_plays(const ShortPlays& plays, std::int64_t micro_steps, Seconds least,
                        const std::function<PlayedStep()>& play_all) {
  PlayedStep step = extended(plays, plays.differences_to(micro_steps));
  LeastStep bound = least_step(plays, micro_steps);
  if (least > bound.step) bound = {least, &TimeBreakdown::exposed_offload};
  if (bound.step <= (1 + kSteadyTolerance) * step.step) return step;
  const auto all_ops = static_cast<double>(plays.longer.ops * plays.longer.simulated_ranks) *
                       static_cast<double>(micro_steps) / static_cast<double>(plays.longer_micro_steps);
  if (all_ops <= kMostUnsteadyOps) return play_all();
  step.time.*bound.of += bound.step - step.step;
  step.step = bound.step;
  return step;
}

}  // namespace zeroplan
