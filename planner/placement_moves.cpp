#include "planner/placement_moves.h"

#include <algorithm>
#include <map>

#include "models/lower.h"

namespace zeroplan {

Bytes PlacementMoves::gpu_budget() const { return (1 - request_.margin) * request_.machine.gpu.memory; }
Bytes PlacementMoves::host_budget_per_rank() const {
  return (1 - request_.margin) / request_.machine.gpus_per_node * request_.machine.usable_dram();
}

/// Bytes of one rank's part of each block.
std::vector<double> PlacementMoves::block_bytes(const Plan& plan, int bytes_per_parameter) const {
  std::vector<double> bytes;
  std::map<int, FlatLayout> layouts;
  for (int kind : request_.model.sequence) {
    auto [it, fresh] = layouts.try_emplace(kind);
    if (fresh)
      it->second =
          flat_layout(request_.model.kinds[static_cast<std::size_t>(kind)], plan.precision.weights, plan.shard_ranks);
    bytes.push_back(static_cast<double>(it->second.shard * bytes_per_parameter));
  }
  return bytes;
}

double PlacementMoves::fill_gpu(Plan& plan, const OffloadStyle& style, const Prediction& all_off) const {
  const bool states_move = style.parameters == Tier::hbm;
  const int gradient = plan.gradients == Tier::host ? size_of(plan.precision.accumulation) : 0;
  const auto bytes = block_bytes(
      plan, states_move ? plan.precision.optimizer_bytes_per_parameter() + gradient : size_of(plan.precision.weights));
  const double room = (gpu_budget() - all_off.gpu.peak).base() - kArenaReserve * all_off.lower_bound.base();
  double moved = 0;
  int blocks = 0;
  while (blocks < static_cast<int>(bytes.size()) && moved + bytes[static_cast<std::size_t>(blocks)] <= room) {
    moved += bytes[static_cast<std::size_t>(blocks++)];
  }
  Placement& placed = states_move ? plan.optimizer : plan.parameters;
  (placed.host > 0 ? placed.host : placed.nvme) -= blocks;
  placed.hbm += blocks;
  return placed.nvme > 0 ? 0 : moved;
}

bool PlacementMoves::spread(Plan& plan, const OffloadStyle& style, const Prediction& all_host) const {
  const auto states = block_bytes(plan, plan.precision.optimizer_bytes_per_parameter());
  const int blocks = static_cast<int>(states.size());
  const double host_used = all_host.host ? all_host.host->peak.base() / request_.machine.gpus_per_node : 0;
  const double largest = *std::max_element(states.begin(), states.end());
  const double freed = fill_gpu(plan, style, all_host);
  if (plan.optimizer.hbm == blocks || (style.parameters != Tier::hbm && plan.parameters.hbm == blocks)) {
    return false;  // then nothing needs to leave: another style
  }
  const double host_room = host_budget_per_rank().base() - host_used + freed;  // less than 0: so much must go to disk
  if (style.optimizer != Tier::nvme) return host_room >= 0;
  if (host_room >= 2 * largest) return false;  // the host style covers it, gaps of the arena included
  double held = 0;                             // states on the host; gradients stay there whatever goes to disk
  for (int i = plan.optimizer.hbm; i < blocks; ++i) held += states[static_cast<std::size_t>(i)];
  const double may_hold = held + host_room - 3 * largest;  // slots between disk and Adam
  int to_disk = 0;
  for (int i = blocks - 1; i >= plan.optimizer.hbm && held > may_hold; --i, ++to_disk)
    held -= states[static_cast<std::size_t>(i)];
  plan.optimizer.host -= to_disk;
  plan.optimizer.nvme += to_disk;
  return true;
}

/// Moves at least `missing` bytes of a rank off the GPU: optimizer states first, then weights, then activations by
/// recomputing more layers. False when nothing is left to move or the user fixed it.
bool PlacementMoves::relieve_gpu(Plan& plan, double missing) const {
  const bool movable = !request_.constraints.offload;
  for (const bool states : {true, false}) {
    Placement& placed = states ? plan.optimizer : plan.parameters;
    const bool elsewhere = placed.host + placed.nvme > 0;
    if (!movable || !elsewhere || placed.hbm == 0) continue;
    const auto bytes =
        block_bytes(plan, states ? plan.precision.optimizer_bytes_per_parameter() : size_of(plan.precision.weights));
    int blocks = 0;
    for (double moved = 0; moved < missing && blocks < placed.hbm; ++blocks) {
      moved += bytes[static_cast<std::size_t>(placed.hbm - 1 - blocks)];
    }
    placed.hbm -= blocks;
    (placed.host > 0 ? placed.host : placed.nvme) += blocks;
    return true;
  }
  if (plan.recompute == Recompute::none || plan.recompute_layers >= static_cast<int>(request_.model.num_layers))
    return false;
  ++plan.recompute_layers;
  return true;
}

/// Moves at least `missing` bytes of a rank from the host to disk.
bool PlacementMoves::relieve_host(Plan& plan, double missing) const {
  if (request_.constraints.offload || request_.machine.nvme.drives == 0) return false;
  const auto bytes = block_bytes(plan, plan.precision.optimizer_bytes_per_parameter());
  int blocks = 0;
  for (double moved = 0; moved < missing && blocks < plan.optimizer.host; ++blocks) {
    moved += bytes[static_cast<std::size_t>(plan.optimizer.hbm + plan.optimizer.host - 1 - blocks)];
  }
  plan.optimizer.host -= blocks;
  plan.optimizer.nvme += blocks;
  return blocks > 0;
}

bool PlacementMoves::relieve(Plan& plan, const Prediction& p) const {
  const double gpu = (p.gpu.peak - gpu_budget()).base();
  if (gpu > 0) return relieve_gpu(plan, gpu);
  const double host = p.host ? p.host->peak.base() / request_.machine.gpus_per_node - host_budget_per_rank().base() : 0;
  return host > 0 && relieve_host(plan, host);
}

}  // namespace zeroplan
