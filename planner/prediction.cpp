#include "planner/prediction.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "models/arena.h"
#include "models/error.h"
#include "models/lower.h"
#include "models/op_label.h"
#include "models/overloaded.h"

namespace zeroplan {
namespace {

/// Arithmetic of a schedule, recompute included, and its traffic.
struct Totals {
  double flops = 0;
  Traffic traffic;
};

Bytes& lane(Traffic& t, const Collective& c) {
  switch (c.kind) {
    case CollectiveKind::all_gather:
      return t.all_gather;
    case CollectiveKind::reduce_scatter:
      return t.reduce_scatter;
    case CollectiveKind::all_reduce:
      return t.all_reduce;
  }
  return t.all_reduce;
}

Bytes& lane(Traffic& t, const Copy& c) {
  if (c.from == Memory::nvme) return t.nvme_read;
  if (c.to == Memory::nvme) return t.nvme_write;
  return c.to == Memory::hbm ? t.h2d : t.d2h;
}

Totals totals(const Schedule& schedule) {
  Totals sum;
  const auto times = schedule.multiplicities();
  for (std::size_t i = 0; i < times.size(); ++i) {
    const auto n = static_cast<double>(times[i]);
    std::visit(overloaded{
                   [](const Alloc&) {},
                   [](const Free&) {},
                   [&](const Compute& c) { sum.flops += n * work_flops(c).base(); },
                   [&](const Collective& c) { lane(sum.traffic, c) += n * c.message(); },
                   [&](const Copy& c) { lane(sum.traffic, c) += n * c.bytes; },
                   [](const AdamStep&) {},
                   [](const Join&) {},
               },
               schedule.work(schedule.ops()[i]));
  }
  return sum;
}

std::optional<FlopsPerSecond> peak_of(const GpuSpec& gpu, DType type) {
  switch (type) {
    case DType::bf16:
      return gpu.peak_bf16;
    case DType::fp16:
      return gpu.peak_fp16;
    case DType::fp32:
      return gpu.peak_fp32;
    case DType::u8:
    case DType::i32:
    case DType::i64:
      return std::nullopt;
  }
  return std::nullopt;
}

constexpr bool is_compute(ResourceRole r) { return r == ResourceRole::sm || r == ResourceRole::hbm; }
constexpr bool is_link(ResourceRole r) { return r == ResourceRole::links || r == ResourceRole::network; }

std::string limit_of(ResourceRole role, const Prediction& p, const MachineSpec& machine) {
  const double share = 100 * (p.busy[static_cast<std::size_t>(role)] / p.step);
  return fmt::format("{}: busy {:.0f} % of the step", role_name(role, machine), std::min(share, 100.0));
}

/// The resource that is busy for most of the step, else the one behind the largest part of it.
std::string limit_text(const Prediction& p, const MachineSpec& machine) {
  constexpr double kMostOfTheStep = 0.75;
  const auto busiest = std::max_element(p.busy.begin(), p.busy.end());
  if (*busiest > kMostOfTheStep * p.step) {
    return limit_of(static_cast<ResourceRole>(busiest - p.busy.begin()), p, machine);
  }
  const TimeBreakdown& t = p.time;
  const bool update_on_host = p.host && p.busy[static_cast<std::size_t>(ResourceRole::dram)] > 0.5 * t.optimizer;
  struct Part {
    Seconds time;
    bool (*belongs)(ResourceRole);
  };
  const Part parts[] = {
      {t.compute, [](ResourceRole r) { return is_compute(r); }},
      {t.exposed_communication, [](ResourceRole r) { return is_link(r); }},
      {t.exposed_offload, [](ResourceRole r) { return !is_compute(r) && !is_link(r); }},
      {t.optimizer, update_on_host ? [](ResourceRole r) { return !is_compute(r) && !is_link(r); }
                                   : [](ResourceRole r) { return r == ResourceRole::hbm; }},
  };
  const Part* largest = std::max_element(std::begin(parts), std::end(parts),
                                         [](const Part& a, const Part& b) { return a.time < b.time; });
  int best = -1;
  for (int r = 0; r < kNumRoles; ++r) {
    if (!largest->belongs(static_cast<ResourceRole>(r))) continue;
    if (best < 0 || p.busy[static_cast<std::size_t>(r)] > p.busy[static_cast<std::size_t>(best)]) best = r;
  }
  return limit_of(static_cast<ResourceRole>(best), p, machine);
}

/// Streams overlap, but one resource does not do two things at once: the step is no shorter than the busiest resource
/// needs. What is added is waiting for it.
void no_less_than_busiest(Estimate& e) {
  const auto busiest = std::max_element(e.role_busy.begin(), e.role_busy.end());
  const Seconds more = *busiest - e.step;
  if (more <= Seconds()) return;
  e.step = *busiest;
  e.breakdown.*waited_for(static_cast<ResourceRole>(busiest - e.role_busy.begin())) += more;
}

void put(TierMemory& tier, std::string_view owner, Bytes bytes) {
  if (bytes == Bytes()) return;
  tier.breakdown.emplace_back(owner, bytes);
  tier.peak += bytes;
}

}  // namespace

struct Predictor::State {
  State(const ModelSpec& m, const MachineSpec& mach) : model(m), machine(mach), lowering(model) {}

  MachineCostModel& cost(const Plan& plan) {
    const std::pair key{plan.shard_ranks, plan.precision.weights};
    auto it = costs.find(key);
    if (it == costs.end()) it = costs.try_emplace(key, machine, plan.shard_ranks, plan.precision.weights, &model).first;
    return it->second;
  }

  DeviceOverhead overhead(const Plan& plan) {
    DeviceOverhead o;
    if (machine.host_device) o.context = o.libraries = Bytes();
    o.communicators = cost(plan).communicator_memory();
    return o;
  }

  /// Every op as if alone, at the costs as they are scaled now.
  Seconds estimated_step(const Plan& plan) {
    const Schedule schedule = lowering.zeroplan(plan, Folding::layers);
    Estimate result = estimator.run(schedule, demands(schedule, cost(plan)));
    no_less_than_busiest(result);
    return result.step;
  }

  ModelSpec model;
  MachineSpec machine;
  Simulator& simulator() {
    if (!simulator_) simulator_.emplace(machine);
    return *simulator_;
  }

  Lowering lowering;
  Estimator estimator;
  std::optional<Simulator> simulator_;
  std::map<std::pair<int, DType>, MachineCostModel> costs;
};

Predictor::Predictor(const ModelSpec& model, const MachineSpec& machine)
    : state_(std::make_unique<State>(model, machine)) {}
Predictor::~Predictor() = default;
const ModelSpec& Predictor::model() const { return state_->model; }
const MachineSpec& Predictor::machine() const { return state_->machine; }

namespace {

/// The kernel that the allocation at `index` was made for.
std::string kernel_after(const Schedule& schedule, std::uint32_t index, const ModelSpec& model) {
  for (const Op& op : schedule.ops().subspan(index)) {
    const Work& work = schedule.work(op);
    if (!std::holds_alternative<Alloc>(work) && !std::holds_alternative<Free>(work)) return label(schedule, op, model);
  }
  return {};
}

TierMemory gpu_memory(const MemoryPeak& peak, Bytes arena, const DeviceOverhead& overhead, Bytes capacity) {
  TierMemory tier;
  tier.capacity = capacity;
  for (int o = 0; o < kNumOwners; ++o)
    put(tier, to_string(static_cast<Owner>(o)), peak.owners[static_cast<std::size_t>(o)]);
  put(tier, "arena_gaps", arena - peak.bytes);
  put(tier, "context", overhead.context);
  put(tier, "libraries", overhead.libraries);
  put(tier, "nccl", overhead.communicators);
  return tier;
}

/// `beside`: what a rank needs beside its peak. A tier that holds nothing else is only told of when that does not fit.
std::optional<TierMemory> node_memory(std::initializer_list<const MemoryPeak*> peaks, int ranks, Bytes capacity,
                                      Bytes beside = {}) {
  TierMemory tier;
  tier.capacity = capacity;
  for (int o = 0; o < kNumOwners; ++o) {
    Bytes bytes;
    for (const MemoryPeak* peak : peaks)
      bytes += static_cast<double>(ranks) * peak->owners[static_cast<std::size_t>(o)];
    put(tier, to_string(static_cast<Owner>(o)), bytes);
  }
  const Bytes all_beside = static_cast<double>(ranks) * beside;
  if (tier.peak == Bytes() && all_beside <= capacity) return std::nullopt;
  put(tier, "load_and_save", all_beside);
  return tier;
}

/// Host memory that loading or saving needs beyond the step's peak.
Bytes load_and_save(const MemoryTimeline& memory, Bytes staging) {
  Bytes residents, step;
  for (const Memory m : {Memory::dram, Memory::pinned}) {
    residents += memory.peak(m).resident;
    step += memory.peak(m).bytes;
  }
  return std::max(Bytes(), residents + staging - step);
}

}  // namespace

namespace {

void refuse_other_engines(const Plan& plan) {
  if (plan.engine == Engine::zeroplan) return;
  throw InputError(fmt::format(
      "engine: expected zeroplan; plans of {} are predicted as a whole (zeroplan plan --engine), not op by op",
      to_string(plan.engine)));
}

}  // namespace

Prediction Predictor::predict(const Plan& plan, Detail detail) {
  refuse_other_engines(plan);
  State& s = *state_;
  const MachineCostModel& cost = s.cost(plan);
  const Schedule schedule = s.lowering.zeroplan(plan, Folding::layers);
  Estimate estimate = s.estimator.run(schedule, demands(schedule, cost));
  const Seconds kernels = estimate.breakdown.compute;
  no_less_than_busiest(estimate);
  const MemoryTimeline memory(schedule);
  const Totals sum = totals(schedule);

  Prediction p;
  p.step = estimate.step;
  p.time = estimate.breakdown;
  p.kernels = kernels;
  p.busy = estimate.role_busy;
  p.traffic = sum.traffic;
  const double tokens = static_cast<double>(plan.global_batch()) * static_cast<double>(plan.seq_len);
  p.tokens_per_second = tokens / p.step.base();
  p.tokens_per_second_per_gpu = p.tokens_per_second / plan.ranks;
  if (const auto peak = peak_of(s.machine.gpu, plan.precision.weights)) {
    const double model =
        model_flops(s.model, plan.micro_step(), AttentionCount::causal).base() * static_cast<double>(plan.accumulation);
    p.mfu = model / p.step.base() / peak->base();
    p.hfu = sum.flops / p.step.base() / peak->base();
  }
  const int node = s.machine.gpus_per_node;
  const MemoryPeak& live = memory.peak(Memory::hbm);
  p.lower_bound = live.bytes;
  Bytes arena = live.bytes;
  std::string where;
  if (detail == Detail::laid_out) {
    const Schedule flat = s.lowering.zeroplan(plan, Folding::micro_steps);
    arena = lay_out(flat, Memory::hbm, LayoutEffort::normal).size;
    where = kernel_after(flat, MemoryTimeline(flat).peak(Memory::hbm).at_op, s.model);
  }
  p.gpu = gpu_memory(live, arena, s.overhead(plan), s.machine.gpu.memory);
  p.gpu.at_op = where;
  p.host = node_memory({&memory.peak(Memory::dram), &memory.peak(Memory::pinned)}, node, s.machine.usable_dram(),
                       load_and_save(memory, transient_staging(s.model, plan, schedule)));
  if (p.host) p.host->pinned = static_cast<double>(node) * memory.peak(Memory::pinned).bytes;
  p.nvme = node_memory({&memory.peak(Memory::nvme)}, node, s.machine.nvme.capacity);
  p.limited_by = limit_text(p, s.machine);
  return p;
}

Simulation Predictor::simulate(const Plan& plan, const SimulateOptions& options) {
  State& s = *state_;
  const MachineCostModel& cost = s.cost(plan);
  const Schedule schedule = s.lowering.zeroplan(plan, options.with_trace ? Folding::none : Folding::layers);
  return s.simulator().run(schedule, demands(schedule, cost), plan.shard_ranks, options);
}

PlayedStep Predictor::play_shortly(const Plan& plan) {
  const auto play = [&](std::int64_t micro_steps) {
    Plan part = plan;
    part.accumulation = micro_steps;
    return simulate(part, {});
  };
  const auto play_all = [&] { return played_step(play(plan.accumulation)); };
  if (plan.accumulation <= kShortSteps + kLongerSteps) return play_all();
  const Simulation shorter = play(kShortSteps), longer = play(kLongerSteps);
  return extend_plays({shorter, longer, kShortSteps, kLongerSteps}, plan.accumulation, state_->estimated_step(plan),
                      play_all);
}

Seconds Predictor::played_step_with(const Plan& plan, ResourceRole role, double factor) {
  MachineCostModel& cost = state_->cost(plan);
  cost.scale(role, factor);
  const Seconds step = play_shortly(plan).step;
  cost.scale(role, 1);
  return step;
}

void use_played_step(Prediction& p, const PlayedStep& played, const MachineSpec& machine) {
  const double faster = p.step / played.step;
  p.step = played.step;
  p.time = played.time;
  p.tokens_per_second *= faster;
  p.tokens_per_second_per_gpu *= faster;
  if (p.mfu) *p.mfu *= faster;
  if (p.hfu) *p.hfu *= faster;
  p.limited_by = limit_text(p, machine);
  p.simulated = true;
}

Seconds Predictor::step_with(const Plan& plan, ResourceRole role, double factor) {
  MachineCostModel& cost = state_->cost(plan);
  cost.scale(role, factor);
  const Seconds step = state_->estimated_step(plan);
  cost.scale(role, 1);
  return step;
}

const MachineCostModel& Predictor::cost_model(const Plan& plan) { return state_->cost(plan); }

std::vector<Assumption> Predictor::assumptions(const Plan& plan) const {
  std::vector<Assumption> all = state_->cost(plan).assumptions();
  const DeviceOverhead o = state_->overhead(plan);
  if (!state_->machine.host_device) {
    all.push_back({"CUDA context and libraries", format_gib(o.context + o.libraries) + " a GPU",
                   "measured on one H200 with CUDA 13.0"});
  }
  return all;
}

std::array<Bytes, kNumMemories> Predictor::resident_states(const Plan& plan) const {
  const State& s = *state_;
  std::array<Bytes, kNumMemories> bytes{};
  const auto add = [&](Tier tier, Bytes b) {
    bytes[static_cast<std::size_t>(tier == Tier::hbm    ? Memory::hbm
                                   : tier == Tier::host ? Memory::dram
                                                        : Memory::nvme)] += b;
  };
  std::map<int, FlatLayout> layouts;
  for (std::size_t i = 0; i < s.model.sequence.size(); ++i) {
    const int kind = s.model.sequence[i];
    auto [it, fresh] = layouts.try_emplace(kind);
    if (fresh)
      it->second = flat_layout(s.model.kinds[static_cast<std::size_t>(kind)], plan.precision.weights, plan.shard_ranks);
    const FlatLayout& layout = it->second;
    const Tier weights = plan.parameters.tier_of(static_cast<int>(i)),
               states = plan.optimizer.tier_of(static_cast<int>(i));
    const bool whole = plan.zero_stage < 3;
    add(weights, bytes_of(whole ? layout.padded : layout.shard, plan.precision.weights));
    const bool host_gradient = plan.gradients == Tier::host && states != Tier::hbm;
    const bool whole_gradient = plan.zero_stage < 2 && plan.reduce_each == ReduceEach::step;
    add(host_gradient ? Tier::host : Tier::hbm,
        bytes_of(whole_gradient ? layout.padded : layout.shard, plan.precision.accumulation));
    add(states, Bytes(static_cast<double>(layout.shard * plan.precision.optimizer_bytes_per_parameter())));
  }
  return bytes;
}

bool fits(const Prediction& p, double margin) {
  const auto ok = [&](const TierMemory& tier) { return tier.peak <= (1 - margin) * tier.capacity; };
  return ok(p.gpu) && (!p.host || ok(*p.host)) && (!p.nvme || ok(*p.nvme));
}

}  // namespace zeroplan
