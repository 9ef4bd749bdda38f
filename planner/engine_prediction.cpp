#include "planner/engine_prediction.h"

#include <algorithm>
#include <stdexcept>
#include <variant>
#include <vector>

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

void run(const EngineRecording& r, const EngineEnvironment& environment, LeadDetail detail, EnginePrediction& p) {
  if (environment.cost == nullptr || !depends_on_timing(r.tape)) {
    p.memory = replay(r.tape, environment.allocator, r.counting);
    p.reserved = p.reserved_low = p.reserved_high = steady_reserved(p.memory);
    return;
  }
  WorkTimes times = work_times(r.tape, *environment.cost);
  p.memory = replay(r.tape, environment.allocator, r.counting, &times);
  p.reserved = p.reserved_low = p.reserved_high = steady_reserved(p.memory);
  if (detail == LeadDetail::expected) return;
  p.reserved_low = std::min(p.reserved, reserved_in_step(r, environment));
  times.pace.scale = 0.5;
  p.reserved_high = std::max(p.reserved, steady_reserved(replay(r.tape, environment.allocator, r.counting, &times)));
}

/// Calls visit(owner, change, now) at each alloc and free: the bytes that come or go, and all that is alive then.
template <class Visit>
void follow_live_bytes(const EngineTape& tape, Visit visit) {
  std::int64_t now = 0;
  for (const TapeOp& op : tape.ops()) {
    if (op.kind != TapeKind::alloc && op.kind != TapeKind::free) continue;
    const TapeBuffer& buffer = tape.buffer(static_cast<TapeId>(op.id));
    const std::int64_t change = op.kind == TapeKind::alloc ? buffer.bytes : -buffer.bytes;
    now += change;
    visit(buffer.owner, change, now);
  }
}

/// At the moment of the run at which most is alive.
OwnerBytes owners_at_peak(const EngineTape& tape) {
  OwnerBytes live{}, peak{};
  std::int64_t most = -1;
  follow_live_bytes(tape, [&](Owner owner, std::int64_t change, std::int64_t now) {
    live[static_cast<std::size_t>(owner)] += Bytes(static_cast<double>(change));
    if (now > most) most = now, peak = live;
  });
  return peak;
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

}  // namespace

Traffic steady_traffic(const EngineTape& tape, int accumulation) {
  std::vector<Traffic> micro_steps;  // of the last step
  for (const TapeOp& op : tape.ops()) {
    if (op.kind == TapeKind::mark && op.mark == Mark::step_begin) micro_steps.clear();
    if (op.kind == TapeKind::mark && op.mark == Mark::micro_begin) micro_steps.emplace_back();
    if (op.kind == TapeKind::work && !micro_steps.empty()) count(micro_steps.back(), tape.works()[op.id]);
  }
  const auto recorded = static_cast<int>(micro_steps.size());
  if (recorded != accumulation && (recorded != kDifferentMicroSteps || accumulation < recorded))
    throw std::logic_error("steady_traffic: a tape of another number of micro-steps");
  Traffic sum;
  for (std::size_t m = 0; m < micro_steps.size(); ++m) {
    // The second of three stands for all between the first and the last.
    add(sum, micro_steps[m], m == 1 && recorded < accumulation ? accumulation - 2 : 1);
  }
  return sum;
}

Bytes process_of(const DeepSpeedJob& job, const EngineEnvironment& environment) {
  return job.zero_init ? environment.deepspeed_zero_init_process : environment.deepspeed_process;
}

EngineRecording record_deepspeed(const EagerStep& step, TokenShape tokens, const DeepSpeedJob& job,
                                 const EngineEnvironment& environment) {
  EngineRecording r;
  const int micro_steps = std::min(job.accumulation, kDifferentMicroSteps);
  const EngineRun run{steps_until_steady(job), micro_steps, environment.cublas_workspace, tokens};
  record_run(*make_deepspeed_engine(step, job, r.tape), step, run, r.tape);
  r.accumulation = job.accumulation;
  r.alone = job.ranks == 1;
  r.counting = PeakCounting::each_phase;
  r.host = deepspeed_host_memory(step, job);
  r.process = process_of(job, environment);
  return r;
}

EngineRecording record_fsdp2(const EagerStep& step, TokenShape tokens, int accumulation, const Fsdp2Options& options,
                             const EngineEnvironment& environment) {
  constexpr int kSteadySteps = 3;  // states are made in the first step
  EngineRecording r;
  const int micro_steps = std::min(accumulation, kDifferentMicroSteps);
  const EngineRun run{kSteadySteps, micro_steps, environment.cublas_workspace, tokens};
  record_run(*make_fsdp2_engine(step, options, r.tape), step, run, r.tape);
  r.accumulation = accumulation;
  r.alone = options.ranks == 1;
  r.counting = PeakCounting::since_step;
  r.host = fsdp2_host_memory(step, options);
  r.process = environment.fsdp2_process;
  return r;
}

EnginePrediction predict(const EngineRecording& r, const EngineEnvironment& environment, LeadDetail detail) {
  EnginePrediction prediction;
  run(r, environment, detail, prediction);
  prediction.traffic = steady_traffic(r.tape, r.accumulation);
  if (r.alone)
    prediction.traffic.all_gather = prediction.traffic.reduce_scatter = prediction.traffic.all_reduce = Bytes();
  prediction.host_use = host_use(r.host);
  prediction.device_used = prediction.reserved + environment.context + environment.libraries +
                           environment.communicators + prediction.host_use.device_page_tables();
  prediction.host = r.process + prediction.host_use.total();
  prediction.owners = owners_at_peak(r.tape);
  return prediction;
}

Bytes reserved_in_step(const EngineRecording& r, const EngineEnvironment& environment) {
  return steady_reserved(replay(r.tape, environment.allocator, r.counting));
}

RunMemory replay_run(const EngineRecording& r, const EngineEnvironment& environment) {
  if (environment.cost == nullptr || !depends_on_timing(r.tape))
    return replay(r.tape, environment.allocator, r.counting);
  const WorkTimes times = work_times(r.tape, *environment.cost);
  return replay(r.tape, environment.allocator, r.counting, &times);
}

Bytes live_peak(const EngineTape& tape) {
  std::int64_t most = 0;
  follow_live_bytes(tape, [&](Owner, std::int64_t, std::int64_t now) { most = std::max(most, now); });
  return Bytes(static_cast<double>(most));
}

EnginePrediction predict_deepspeed(const EagerStep& step, TokenShape tokens, const DeepSpeedJob& job,
                                   const EngineEnvironment& environment) {
  return predict(record_deepspeed(step, tokens, job, environment), environment);
}

EnginePrediction predict_fsdp2(const EagerStep& step, TokenShape tokens, int accumulation, const Fsdp2Options& options,
                               const EngineEnvironment& environment) {
  return predict(record_fsdp2(step, tokens, accumulation, options, environment), environment);
}

}  // namespace zeroplan
