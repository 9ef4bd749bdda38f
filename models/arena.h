#pragma once
// Static arena: where every buffer of one memory lies, worked out before the step runs. Alloc and Free stand on one
// stream in id order, so two step buffers may share bytes exactly when their [Alloc, Free) ranges of ids do not
// overlap: offline dynamic storage allocation, NP-hard in general, easy for training steps, whose lifetimes nest almost
// like a stack.

#include <cstdint>
#include <vector>

#include "models/schedule.h"

namespace zeroplan {

struct ArenaLayout {
  std::vector<std::int64_t> offset;  // bytes from the arena's start, by buffer index; -1: not in this memory
  Bytes size;                        // resident buffers, then the area that step buffers share
  Bytes lower_bound;                 // the live peak: no layout is smaller
  /// size / lower_bound; 1 for an empty arena.
  double ratio() const { return lower_bound > Bytes{} ? size / lower_bound : 1.0; }
};

enum class LayoutEffort : std::uint8_t {
  normal,    // a few milliseconds for 10^4 buffers: every reported plan
  thorough,  // searches longer for the last percent: before a run
};

/// Places every buffer of `memory`. Works on flat schedules and on those that repeat micro-steps
/// (Folding::micro_steps): a block's buffers keep their addresses in every iteration. Equal schedules give equal
/// offsets, multiples of kBufferAlignment; the search counts moves, not time. Throws std::logic_error when a buffer is
/// freed in another block than it was allocated in (Folding::layers), allocated twice or never freed.
ArenaLayout lay_out(const Schedule& schedule, Memory memory, LayoutEffort effort = LayoutEffort::normal);

/// Throws std::logic_error if two buffers that live at the same time share bytes, or one lies outside the arena or off
/// its alignment. Runs through the ops with the allocated ranges in a map, each repeated block twice.
void check_layout(const Schedule& schedule, Memory memory, const ArenaLayout& layout);

}  // namespace zeroplan
