#include "planner/engine_prediction.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <variant>
#include <vector>

#include "models/op_label.h"

namespace zeroplan {
namespace {

/// Steps until a step repeats. With three micro-steps stage 3 has its trace after the first step.
int steps_until_steady(const DeepSpeedJob& job) {
  return job.accumulation >= kDifferentMicroSteps ? 2 : deepspeed_steady_steps(job);
}

bool depends_on_timing(const EngineTape& tape) {
  return std::ranges::any_of(tape.ops(), [](const TapeOp& op) { return op.kind == TapeKind::record_stream; });
}

Bytes steady_reserved(const RunMemory& memory) {
  return memory.steps.empty() ? memory.peak_reserved : memory.steps.back().reserved;
}

/// Times of the works where the host's lead matters and is known: nothing otherwise.
std::optional<WorkTimes> lead_times(const EngineRecording& r, const EngineEnvironment& environment) {
  if (environment.cost == nullptr || !depends_on_timing(r.tape)) return std::nullopt;
  return work_times(r.tape, *environment.cost);
}

RunMemory replayed(const EngineRecording& r, const EngineEnvironment& environment,
                   const std::optional<WorkTimes>& times) {
  return replay(r.tape, environment.allocator, r.counting, times ? &*times : nullptr);
}

void run(const EngineRecording& r, const EngineEnvironment& environment, LeadDetail detail, EnginePrediction& p) {
  std::optional<WorkTimes> times = lead_times(r, environment);
  p.memory = replayed(r, environment, times);
  p.reserved = p.reserved_low = p.reserved_high = steady_reserved(p.memory);
  if (!times || detail == LeadDetail::expected) return;
  p.reserved_low = std::min(p.reserved, reserved_in_step(r, environment));
  times->pace.scale = 0.5;
  p.reserved_high = std::max(p.reserved, steady_reserved(replayed(r, environment, times)));
}

void count(Traffic& sum, const Work& work) {
  if (const auto* c = std::get_if<Collective>(&work)) {
    Bytes& lane = c->kind == CollectiveKind::all_gather       ? sum.all_gather
                  : c->kind == CollectiveKind::reduce_scatter ? sum.reduce_scatter
                                                              : sum.all_reduce;
    lane += c->message();
  } else if (const auto* copy = std::get_if<Copy>(&work)) {
    Bytes& lane = copy->from == Memory::nvme  ? sum.nvme_read
                  : copy->to == Memory::nvme  ? sum.nvme_write
                  : copy->to == Memory::hbm   ? sum.h2d
                  : copy->from == Memory::hbm ? sum.d2h
                                              : throw std::logic_error("traffic: a copy within the host");
    lane += copy->bytes;
  }
}

void add(Traffic& sum, const Traffic& more, double times) {
  constexpr Bytes Traffic::*kLanes[] = {
      &Traffic::all_gather, &Traffic::reduce_scatter, &Traffic::all_reduce, &Traffic::h2d,
      &Traffic::d2h,        &Traffic::nvme_read,      &Traffic::nvme_write};
  for (const auto lane : kLanes) sum.*lane += times * (more.*lane);
}

/// Calls visit(work, times) for all that the last step does; of three micro-steps the second stands for all between the
/// first and the last.
template <class Visit>
void follow_steady_step(const EngineTape& tape, int accumulation, Visit visit) {
  std::size_t begin = 0;
  int recorded = 0;
  for (std::size_t i = 0; i < tape.ops().size(); ++i) {
    const TapeOp& op = tape.ops()[i];
    if (op.kind != TapeKind::mark) continue;
    if (op.mark == Mark::step_begin) begin = i, recorded = 0;
    if (op.mark == Mark::micro_begin) ++recorded;
  }
  if (recorded != accumulation && (recorded != kDifferentMicroSteps || accumulation < recorded))
    throw std::logic_error("steady_traffic: a tape of another number of micro-steps");
  int micro_step = -1;
  for (std::size_t i = begin; i < tape.ops().size(); ++i) {
    const TapeOp& op = tape.ops()[i];
    if (op.kind == TapeKind::mark && op.mark == Mark::micro_begin) ++micro_step;
    if (op.kind != TapeKind::work || micro_step < 0) continue;
    visit(tape.works()[op.id], micro_step == 1 && recorded < accumulation ? accumulation - 2.0 : 1.0);
  }
}

}  // namespace

Traffic steady_traffic(const EngineTape& tape, int accumulation) {
  Traffic sum;
  follow_steady_step(tape, accumulation, [&](const Work& work, double times) {
    Traffic one;
    count(one, work);
    add(sum, one, times);
  });
  return sum;
}

int EngineRecording::members(Group group) const {
  switch (group) {
    case Group::all:
      return ranks;
    case Group::shard:
      return shard_ranks;
    case Group::replica:
      return ranks / shard_ranks;
  }
  return ranks;
}

Bytes steady_sent(const EngineRecording& r) {
  Bytes sum;
  follow_steady_step(r.tape, r.accumulation, [&](const Work& work, double times) {
    const auto* collective = std::get_if<Collective>(&work);
    if (collective == nullptr) return;
    const double members = r.members(collective->group);
    const double passes = collective->kind == CollectiveKind::all_reduce ? 2 : 1;
    sum += collective->message() * (times * passes * (members - 1) / members);
  });
  return sum;
}

Flops steady_flops(const EngineRecording& r) {
  Flops sum;
  follow_steady_step(r.tape, r.accumulation, [&](const Work& work, double times) {
    if (const auto* compute = std::get_if<Compute>(&work)) sum += work_flops(*compute) * times;
  });
  return sum;
}

Bytes process_of(const DeepSpeedJob& job, const EngineEnvironment& environment) {
  return job.zero_init ? environment.deepspeed_zero_init_process : environment.deepspeed_process;
}

namespace {

int micro_steps_recorded(int accumulation, RecordedMicroSteps recorded) {
  return recorded == RecordedMicroSteps::all ? accumulation : std::min(accumulation, kDifferentMicroSteps);
}

/// Of collectives in Group::shard: MiCS' group, hpZ's, or the node that qgZ exchanges in first.
int group_of_shards(const DeepSpeedJob& job) {
  if (job.config.hpz()) return static_cast<int>(job.config.hpz_ranks);
  const bool nodes = job.ranks_per_node > 0 && job.ranks % job.ranks_per_node == 0;
  return job.config.quantized_gradients && !job.config.mics() && nodes ? job.ranks_per_node : job.shard_ranks();
}

}  // namespace

EngineRecording record_deepspeed(const EagerStep& step, TokenShape tokens, const DeepSpeedJob& job,
                                 const EngineEnvironment& environment, int least_steps, RecordedMicroSteps recorded) {
  EngineRecording r;
  const int micro_steps = micro_steps_recorded(job.accumulation, recorded);
  const EngineRun run{std::max(least_steps, steps_until_steady(job)), micro_steps, environment.cublas_workspace,
                      tokens};
  record_run(*make_deepspeed_engine(step, job, r.tape), step, run, r.tape);
  r.accumulation = job.accumulation;
  r.ranks = job.ranks;
  r.shard_ranks = group_of_shards(job);
  r.counting = PeakCounting::each_phase;
  r.host = deepspeed_host_memory(step, job);
  r.process = process_of(job, environment);
  return r;
}

EngineRecording record_fsdp2(const EagerStep& step, TokenShape tokens, int accumulation, const Fsdp2Options& options,
                             const EngineEnvironment& environment, int least_steps, RecordedMicroSteps recorded) {
  constexpr int kSteadySteps = 3;  // states are made in the first step
  EngineRecording r;
  const int micro_steps = micro_steps_recorded(accumulation, recorded);
  const EngineRun run{std::max(least_steps, kSteadySteps), micro_steps, environment.cublas_workspace, tokens};
  record_run(*make_fsdp2_engine(step, options, r.tape), step, run, r.tape);
  r.accumulation = accumulation;
  r.ranks = options.ranks;
  r.shard_ranks = options.group();
  r.counting = PeakCounting::since_step;
  r.host = fsdp2_host_memory(step, options);
  r.process = environment.fsdp2_process;
  return r;
}

EnginePrediction predict(const EngineRecording& r, const EngineEnvironment& environment, LeadDetail detail) {
  EnginePrediction prediction;
  run(r, environment, detail, prediction);
  prediction.traffic = steady_traffic(r.tape, r.accumulation);
  if (r.alone())
    prediction.traffic.all_gather = prediction.traffic.reduce_scatter = prediction.traffic.all_reduce = Bytes();
  prediction.sent = r.alone() ? Bytes() : steady_sent(r);
  prediction.host_use = host_use(r.host);
  prediction.device_used = prediction.reserved + environment.context + environment.libraries +
                           environment.communicators + prediction.host_use.device_page_tables();
  prediction.host = r.process + prediction.host_use.total();
  prediction.peak = peak_moment(r.tape);
  prediction.flops = steady_flops(r);
  return prediction;
}

Bytes reserved_in_step(const EngineRecording& r, const EngineEnvironment& environment) {
  return steady_reserved(replayed(r, environment, std::nullopt));
}

RunMemory replay_run(const EngineRecording& r, const EngineEnvironment& environment) {
  return replayed(r, environment, lead_times(r, environment));
}

Bytes live_peak(const EngineTape& tape) {
  std::int64_t now = 0, most = 0;
  for (const TapeOp& op : tape.ops()) {
    if (op.kind != TapeKind::alloc && op.kind != TapeKind::free) continue;
    const std::int64_t bytes = tape.buffer(static_cast<TapeId>(op.id)).bytes;
    now += op.kind == TapeKind::alloc ? bytes : -bytes;
    most = std::max(most, now);
  }
  return Bytes(static_cast<double>(most));
}

EnginePrediction predict_deepspeed(const EagerStep& step, TokenShape tokens, const DeepSpeedJob& job,
                                   const EngineEnvironment& environment, int least_steps) {
  return predict(record_deepspeed(step, tokens, job, environment, least_steps), environment);
}

EnginePrediction predict_fsdp2(const EagerStep& step, TokenShape tokens, int accumulation, const Fsdp2Options& options,
                               const EngineEnvironment& environment, int least_steps) {
  return predict(record_fsdp2(step, tokens, accumulation, options, environment, least_steps), environment);
}

}  // namespace zeroplan
