#pragma once
// What is left of a schedule for a simulator: per stream the ops that take time, in order, and what each waits for.

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "models/schedule.h"

namespace zeroplan {

/// "The first `count` timed ops of that stream have ended."
class Wait {
 public:
  Wait(std::size_t stream, std::uint32_t count) : bits_(static_cast<std::uint32_t>(stream) << kCountBits | count) {}
  std::size_t stream() const { return bits_ >> kCountBits; }
  std::uint32_t count() const { return bits_ & ((1u << kCountBits) - 1); }
  friend bool operator==(const Wait&, const Wait&) = default;
  static constexpr std::uint32_t kMostOps = (1u << 29) - 1;

 private:
  static constexpr int kCountBits = 29;
  std::uint32_t bits_;
};

struct TimedOp {
  std::uint32_t work = 0;
  std::uint32_t op = 0;  // index in the schedule; the same for each iteration of a repeated block
  std::uint32_t first_wait = 0;
  std::uint32_t num_waits = 0;  // on other streams, at most one each
};

/// A schedule with its repeated blocks written out and the ops that take no time (Alloc, Free, Join) dissolved into
/// waits. Waits that others imply are left out.
class TimedProgram {
 public:
  TimedProgram() = default;
  /// `timed[w]`: whether ops of work w take time or meet other ranks.
  TimedProgram(const Schedule& schedule, const std::vector<bool>& timed);

  std::span<const TimedOp> stream(std::size_t index) const { return streams_[index]; }
  std::span<const Wait> waits(const TimedOp& op) const { return {waits_.data() + op.first_wait, op.num_waits}; }
  std::size_t num_ops() const;

 private:
  class Unroller;
  std::array<std::vector<TimedOp>, kNumStreams> streams_;
  std::vector<Wait> waits_;
};

}  // namespace zeroplan
