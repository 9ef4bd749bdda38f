#include "sim/simulate.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <stdexcept>

#include "models/error.h"
#include "sim/cluster_player.h"
#include "sim/rank_costs.h"
#include "sim/replay.h"
#include "sim/simulation_report.h"
#include "sim/timed_program.h"

namespace zeroplan {
namespace {

constexpr std::size_t kNumGroups = 3;
/// Timed ops of one rank that are written out: 64 bytes each while the waits are worked out.
constexpr std::int64_t kMostOps = 20'000'000;

void refuse_endless(const Schedule& schedule, const std::vector<bool>& timed) {
  const auto times = schedule.multiplicities();
  std::int64_t ops = 0;
  for (std::size_t i = 0; i < times.size(); ++i) ops += timed[schedule.ops()[i].work.index] ? times[i] : 0;
  if (ops <= kMostOps) return;
  throw InputError(
      fmt::format("a step of {} timed ops a rank is too long to simulate op by op (at most {}): expected fewer "
                  "micro-steps, or --estimate",
                  format_count(ops), format_count(kMostOps)));
}

/// What a rank takes while all are played: streams, links, running ops. 3.4 to 11.5 KB, peak resident set over 1,024 to
/// 131,072 ranks (docs/simulator.md).
constexpr double kRankKB = 12;
/// Hours of playing: a folded node says the same to a nanosecond.
constexpr std::int64_t kMostRanks = 500'000;

Bytes memory_of_this_host() {
  return Bytes(static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE)));
}

void refuse_crowd(std::int64_t ranks) {
  const Bytes needed(static_cast<double>(ranks) * kRankKB * 1e3), there = memory_of_this_host();
  if (ranks <= kMostRanks && needed < there) return;
  throw InputError(fmt::format(
      "{} ranks one by one take about {} ({:.0f} KB a rank; this host has {}): expected at most {}; fold equal "
      "nodes instead (--ranks folded), which gives the same times",
      format_count(ranks), format_gib(needed), kRankKB, format_gib(there),
      format_count(std::min(kMostRanks, static_cast<std::int64_t>(there.base() / (kRankKB * 1e3))))));
}

/// Seconds of a resource, or none.
double at_least(Seconds time) { return time.base() > kLeastSeconds ? time.base() : 0; }

/// Evenly spread, as MachineCostModel has it: shard groups are neighbours, replicas hold the same shard.
RankGroup rank_group(Group kind, int ranks, int gpus, int shard_ranks) {
  const RankGroup all{ranks, ranks / gpus, gpus};
  if (kind == Group::all) return all;
  RankGroup shard;
  shard.ranks = shard_ranks;
  shard.ranks_per_node = std::min(shard_ranks, gpus);
  shard.nodes = shard_ranks / shard.ranks_per_node;
  if (kind == Group::shard) return shard;
  RankGroup replica;
  replica.ranks = ranks / shard_ranks;
  replica.ranks_per_node = std::min(std::max(1, gpus / shard.ranks_per_node), replica.ranks);
  replica.nodes = replica.ranks / replica.ranks_per_node;
  return replica;
}

/// The simulated ranks are the first `num_nodes` nodes.
RankGroups make_groups(Group kind, RankGroup size, int num_nodes, int gpus, int shard_ranks) {
  RankGroups groups;
  std::map<int, std::uint32_t> ids;
  std::map<NodeMembers, std::uint32_t> shapes;
  for (int rank = 0; rank < num_nodes * gpus; ++rank) {
    const int key = kind == Group::all ? 0 : kind == Group::shard ? rank / shard_ranks : rank % shard_ranks;
    const auto id = ids.try_emplace(key, static_cast<std::uint32_t>(ids.size())).first->second;
    if (id == groups.ranks.size()) groups.ranks.emplace_back();
    groups.ranks[id].push_back(static_cast<std::uint32_t>(rank));
    groups.group_of.push_back(id);
  }
  for (const auto& ranks : groups.ranks) {
    std::map<std::uint32_t, NodeMembers> by_node;
    for (std::uint32_t rank : ranks)
      by_node[rank / static_cast<std::uint32_t>(gpus)].ranks.push_back(static_cast<int>(rank) % gpus);
    auto& parts = groups.parts.emplace_back();
    for (auto& [node, members] : by_node) {
      members.several_nodes = size.nodes > 1;
      const auto [at, fresh] = shapes.try_emplace(members, static_cast<std::uint32_t>(groups.shapes.size()));
      if (fresh) groups.shapes.push_back(members);
      parts.push_back({node, at->second});
    }
  }
  return groups;
}

}  // namespace

struct Simulator::State {
  explicit State(const MachineSpec& machine) : costs(machine) {}

  RankCosts costs;
  ClusterPlayer player;
  Replay replay;
  std::array<RankGroup, kNumGroups> sizes;
  std::array<RankGroups, kNumGroups> groups;

  void set_groups(int shard_ranks, int num_nodes) {
    const int ranks = costs.num_nodes() * costs.gpus_per_node();
    for (const Group kind : {Group::all, Group::shard, Group::replica}) {
      const auto k = static_cast<std::size_t>(kind);
      sizes[k] = rank_group(kind, ranks, costs.gpus_per_node(), shard_ranks);
      groups[k] = make_groups(kind, sizes[k], num_nodes, costs.gpus_per_node(), shard_ranks);
    }
  }

  PlayedWork played(const Work& work, const Demand& demand) const {
    PlayedWork result;
    const auto* collective = std::get_if<Collective>(&work);
    const std::size_t group = collective == nullptr ? 0 : static_cast<std::size_t>(collective->group);
    result.kind = RankCosts::classify(work, demand, sizes[group].ranks);
    result.latency = demand.latency.base();
    result.group = static_cast<std::uint8_t>(group);
    switch (result.kind) {
      case WorkClass::none:
        break;
      case WorkClass::kernel:
        result.sm = at_least(demand[ResourceRole::sm]);
        result.hbm = at_least(demand[ResourceRole::hbm]);
        break;
      case WorkClass::transfer:
        result.take = costs.take(work, demand, sizes[group]);
        for (int rank = 0; rank < costs.gpus_per_node(); ++rank) result.uses.push_back(costs.transfer(demand, rank));
        break;
      case WorkClass::collective:
        result.take = costs.take(work, demand, sizes[group]);
        for (const NodeMembers& shape : groups[group].shapes) {
          result.uses.push_back(costs.collective(*collective, demand, shape, sizes[group]));
        }
        break;
    }
    return result;
  }
};

Simulator::Simulator(const MachineSpec& machine) : state_(std::make_unique<State>(machine)) {}
Simulator::~Simulator() = default;
Simulator::Simulator(Simulator&&) noexcept = default;

Simulation Simulator::run(const Schedule& schedule, std::span<const Demand> demands, int shard_ranks,
                          const SimulateOptions& options) {
  State& s = *state_;
  const int num_nodes = options.ranks == SimulatedRanks::all ? s.costs.num_nodes() : 1;
  const int simulated = num_nodes * s.costs.gpus_per_node();
  if (options.rank < 0 || options.rank >= simulated)
    throw std::logic_error("simulate: the reported rank is not simulated");
  if (options.with_trace && schedule.folded()) throw std::logic_error("simulate: a trace needs a flat schedule");
  refuse_crowd(simulated);
  require_even_groups(s.costs.num_nodes() * s.costs.gpus_per_node(), s.costs.gpus_per_node(), shard_ranks);
  s.set_groups(shard_ranks, num_nodes);
  std::vector<PlayedWork> works;
  std::vector<bool> timed;
  for (std::size_t w = 0; w < demands.size(); ++w) {
    works.push_back(s.played(schedule.works()[w], demands[w]));
    timed.push_back(works.back().kind != WorkClass::none);
  }
  refuse_endless(schedule, timed);
  const TimedProgram program(schedule, timed);
  PlayerInput input;
  input.program = &program;
  input.works = works;
  for (std::size_t k = 0; k < kNumGroups; ++k) input.groups[k] = &s.groups[k];
  input.num_nodes = num_nodes;
  input.gpus_per_node = s.costs.gpus_per_node();
  input.num_resources = static_cast<std::uint32_t>(s.costs.resources().size());
  input.watched_rank = options.rank;
  input.sample = options.with_trace;
  const RunSettings settings{shard_ranks, num_nodes, options.rank, options.with_trace};
  const PlayerOutput output = options.reuse ? s.replay.play(settings, input, program, works) : s.player.play(input);
  Simulation result = report({schedule, demands, program, works, s.costs, s.groups, output, options});
  result.ranks = s.costs.num_nodes() * s.costs.gpus_per_node();
  result.gpus_per_node = s.costs.gpus_per_node();
  result.simulated_ranks = simulated;
  if (options.reuse) result.resumed_at = Seconds(s.replay.resumed_at());
  return result;
}

Simulation simulate(const Schedule& schedule, std::span<const Demand> demands, const MachineSpec& machine,
                    int shard_ranks, const SimulateOptions& options) {
  return Simulator(machine).run(schedule, demands, shard_ranks, options);
}

}  // namespace zeroplan
