#pragma once
// Simulating again after a change: starts where the change begins to matter.

#include <array>
#include <cstdint>
#include <vector>

#include "sim/cluster_player.h"
#include "sim/timed_program.h"

namespace zeroplan {

/// What a run was about; two runs with equal settings on one machine differ in their programs and works only.
struct RunSettings {
  int shard_ranks = 1, num_nodes = 1, watched_rank = 0;
  bool sample = false;
  friend bool operator==(const RunSettings&, const RunSettings&) = default;
};

/// Keeps checkpoints of the run before. The next one begins at the latest checkpoint before the first op that differs
/// on any stream, and gives the same bits as a run from the start.
class Replay {
 public:
  static constexpr std::int64_t kCheckpoints = 16;

  /// `input` refers to `program` and `works`, which are kept for the next run. Groups must outlive it.
  PlayerOutput play(const RunSettings& settings, PlayerInput input, const TimedProgram& program,
                    const std::vector<PlayedWork>& works);
  /// Simulated time at which the last run began; 0: from the start.
  double resumed_at() const { return resumed_at_; }

 private:
  std::array<std::uint32_t, kNumStreams> same_ops(const TimedProgram& program,
                                                  const std::vector<PlayedWork>& works) const;

  RunSettings settings_;
  TimedProgram program_;
  std::vector<PlayedWork> works_;
  std::vector<ClusterPlayer> checkpoints_;
  double resumed_at_ = 0;
};

}  // namespace zeroplan
