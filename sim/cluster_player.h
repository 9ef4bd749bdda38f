#pragma once
// Plays one program on every rank at once. The heart of simulate(): streams, collectives, GPUs and shared resources;
// what the numbers mean to people is made elsewhere.

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "models/trace.h"
#include "sim/event_queue.h"
#include "sim/rank_costs.h"
#include "sim/sharing.h"
#include "sim/timed_program.h"

namespace zeroplan {

/// A work as the player needs it.
struct PlayedWork {
  WorkClass kind = WorkClass::none;
  double latency = 0;
  double sm = 0, hbm = 0;              // kernels: seconds of the whole GPU's
  GpuTake take;                        // transfers and collectives
  std::uint8_t group = 0;              // collectives: Group
  std::vector<std::vector<Use>> uses;  // transfers: by rank of the node; collectives: by group shape (see Groups)
  friend bool operator==(const PlayedWork&, const PlayedWork&) = default;
};

/// The groups of one kind. Ranks of group `id` are listed; shapes are what their node members look like.
struct RankGroups {
  std::vector<std::vector<std::uint32_t>> ranks;  // simulated ranks of each group
  std::vector<std::uint32_t> group_of;            // by simulated rank
  struct NodePart {
    std::uint32_t node = 0, shape = 0;
  };
  std::vector<std::vector<NodePart>> parts;  // by group
  std::vector<NodeMembers> shapes;
};

struct PlayerInput {
  const TimedProgram* program = nullptr;
  std::span<const PlayedWork> works;
  std::array<const RankGroups*, 3> groups{};  // by Group
  int num_nodes = 1, gpus_per_node = 1;
  std::uint32_t num_resources = 0;  // of a node
  int watched_rank = 0;
  bool sample = false;
};

/// What the watched rank's streams did: by stream and timed op.
struct WatchedOp {
  double start = 0, begin = 0, end = 0;  // on its stream; a collective's last member arrived; done
};
struct LoadSample {
  double time = 0, load = 0;
  std::uint32_t resource = 0;  // of the node; num_resources is the watched GPU's SMs, one more its memory
};
struct PlayerOutput {
  std::array<std::vector<WatchedOp>, kNumStreams> watched;
  std::vector<LoadSample> samples;
  double sm_held = 0;  // by the watched rank's collectives: part of the SMs, over time
  double step = 0;
  int last_rank = 0;
  std::int64_t events = 0;
};

/// A copy is a checkpoint: it goes on as the original would.
class ClusterPlayer {
 public:
  /// start(), advance() to the end, finish().
  PlayerOutput play(const PlayerInput& input);

  void start(const PlayerInput& input);
  /// Plays at least `events` more events, and all that happen at the time of the last; false when nothing is left.
  bool advance(std::int64_t events);
  /// Throws std::logic_error when ranks wait for each other for ever.
  PlayerOutput finish();

  /// Whether another program, which is the same up to op same[s] of each stream s, would have come to the same point.
  bool leads_here(const TimedProgram& program, const std::array<std::uint32_t, kNumStreams>& same) const;
  /// Goes on with another program. Precondition: leads_here(), and all else equal.
  void retarget(const PlayerInput& input);
  double now() const { return now_; }

 private:
  static constexpr std::uint32_t kStreams = kNumStreams;
  enum class Stage : std::uint8_t { ended, blocked, kernel, waiting, latency, transfer };

  /// An op under way: the current one of a stream, or a collective of a group.
  struct Running {
    double start = 0;         // kernels: the time it takes up its stream
    double updated = 0;       // when `left` was right; kernels: not before the latency is over
    double left = 1;          // part of the work
    double full = 0;          // seconds for the whole at the present rate
    std::uint32_t stamp = 0;  // of the valid event
    std::uint32_t work = 0;
    std::uint32_t arrived = 0;  // collectives: members
  };
  struct RankState {
    std::array<std::uint32_t, kNumStreams> done{}, need{};
    std::array<std::uint8_t, kNumStreams> waiters{};  // by stream: those blocked by it
    std::array<Stage, kNumStreams> stage{};
    double slow_sm = 1, slow_hbm = 1;  // 1 / what transfers leave to kernels
    std::uint8_t kernels = 0;          // streams with one, as bits
    bool dirty = false;
  };
  /// Collectives of one (stream, group kind): which slots they use.
  struct CollectiveSlots {
    std::uint32_t first = 0;
    bool used = false;
  };

  void reset();
  void add_collective_slots();
  void start_streams();
  void handle(Event event);
  void finish_collective(std::uint32_t slot);
  void finish(std::uint32_t rank, std::uint32_t stream);
  void try_start(std::uint32_t rank, std::uint32_t stream);
  static const Wait* unmet(const RankState& state, const TimedProgram& program, const TimedOp& op);
  bool block(std::uint32_t rank, std::uint32_t stream);
  void start_op(std::uint32_t rank, std::uint32_t stream, const TimedOp& op);
  void start_kernel(std::uint32_t rank, std::uint32_t stream, const PlayedWork& work);
  void start_transfer(std::uint32_t slot, std::uint32_t rank);
  void arrive(std::uint32_t rank, std::uint32_t stream, const PlayedWork& work);
  void start_collective(std::uint32_t slot);
  void settle();
  void apply(const FairSharing::Change& change);
  void refresh(std::uint32_t rank);
  void take_of_transfers(std::uint32_t rank, double& sms, double& hbm) const;
  void set_kernel(std::uint32_t slot, double full);
  void share_kernels(std::uint32_t rank);
  void mark(std::uint32_t rank);
  void mark_group(std::uint32_t slot);
  void push(std::uint32_t slot, double time);
  void sample();
  void add_sample(std::uint32_t resource, double load);
  void check_done();

  std::uint32_t collective_slot(std::uint32_t rank, std::uint32_t stream, std::uint8_t group) const;
  const RankGroups& groups_of(std::uint32_t slot) const;
  std::uint32_t group_id(std::uint32_t slot) const;

  PlayerInput in_;
  PlayerOutput out_;
  double now_ = 0;
  std::uint32_t num_ranks_ = 0, watched_ = 0;
  EventQueue queue_;
  FairSharing sharing_, gpu_sharing_;
  std::vector<RankState> ranks_;
  std::vector<Running> running_;  // ranks x streams, then collectives
  std::array<std::array<CollectiveSlots, 3>, kNumStreams> collective_slots_{};
  std::vector<std::uint32_t> slot_stream_, slot_kind_, slot_group_;  // by collective slot
  std::vector<std::uint32_t> dirty_ranks_;
  std::vector<Use> uses_;
  std::vector<double> last_load_;
  double held_ = 0, held_since_ = 0;
};

}  // namespace zeroplan
