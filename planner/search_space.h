#pragma once
// The space the search goes through: what is chosen freely, and the plan each choice means.

#include <cstdint>
#include <vector>

#include "planner/search.h"

namespace zeroplan {

/// Where states go when they may leave the GPU. Optimizer blocks are then spread over tiers by what fits.
struct OffloadStyle {
  Tier parameters = Tier::hbm;
  Tier gradients = Tier::hbm;
  Tier optimizer = Tier::hbm;  // hbm: nothing leaves; host: host, rest by fit; nvme: disk allowed
  UpdateOn update = UpdateOn::host;
  bool whole = false;  // all optimizer blocks on that tier (the user said so)
  friend bool operator==(const OffloadStyle&, const OffloadStyle&) = default;
};

/// Offload that gains less does not come before a plan without it: a ratio of step times.
inline constexpr double kNoDifference = 1.003;

struct Choice {
  int stage = 0;
  int shard_ranks = 1;
  OffloadStyle offload;
  Recompute recompute = Recompute::none;
  std::int64_t micro_batch = 1;
  bool split_master = false;
  bool narrow_sum = false;  // gradients of several micro-steps summed in the 16-bit type
};

struct Workload {
  std::int64_t seq_len = 0, global_batch = 0;
  std::int64_t per_rank(int ranks) const { return global_batch / ranks; }
};

/// Sequence length and batch by the spec's defaults, checked. Adds what it assumed and warns of lengths beyond the
/// model's positions. Throws InputError naming the flag.
Workload workload_of(const Request& request, std::vector<Assumption>& assumptions, std::vector<std::string>& warnings);

std::vector<int> stages_of(const Request& request);
std::vector<int> shard_groups_of(const Request& request, int stage);
std::vector<OffloadStyle> offloads_of(const Request& request, int stage);
std::vector<Recompute> recomputes_of(const Request& request);
/// Divisors of the sequences per rank, ascending; at most `most` of them, spread evenly over the scale.
std::vector<std::int64_t> micro_batches_of(const Request& request, const Workload& workload, std::size_t most = 12);

/// The plan of a choice, with every optimizer block on `choice.offload.optimizer`.
Plan plan_of(const Request& request, const Workload& workload, const Choice& choice);

}  // namespace zeroplan
