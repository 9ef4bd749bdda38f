#include "planner/engine_prediction.h"

#include <algorithm>

#include <algorithm>

namespace zeroplan {
namespace {

/// Micro-steps after the second and before the last allocate what the second does, at the same addresses: a step of
/// more is replayed with so many (tests/engine_fit_test.cpp compares).
constexpr int kDifferentMicroSteps = 3;

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

void run(const EngineTape& tape, PeakCounting counting, const EngineEnvironment& environment,
         EnginePrediction& prediction) {
  const RunMemory prompt = replay(tape, environment.allocator, counting);
  prediction.reserved_low = steady_reserved(prompt);
  if (environment.cost == nullptr || !depends_on_timing(tape)) {
    prediction.memory = prompt;
    prediction.reserved = prediction.reserved_high = prediction.reserved_low;
    return;
  }
  WorkTimes times = work_times(tape, *environment.cost);
  prediction.memory = replay(tape, environment.allocator, counting, &times);
  prediction.reserved = steady_reserved(prediction.memory);
  times.pace.scale = 0.5;
  prediction.reserved_high =
      std::max(prediction.reserved, steady_reserved(replay(tape, environment.allocator, counting, &times)));
  prediction.reserved_low = std::min(prediction.reserved_low, prediction.reserved);
}

/// At the moment of the run at which most is alive.
OwnerBytes owners_at_peak(const EngineTape& tape) {
  OwnerBytes live{}, peak{};
  std::int64_t now = 0, most = -1;
  for (const TapeOp& op : tape.ops()) {
    if (op.kind != TapeKind::alloc && op.kind != TapeKind::free) continue;
    const TapeBuffer& buffer = tape.buffer(static_cast<TapeId>(op.id));
    const std::int64_t bytes = op.kind == TapeKind::alloc ? buffer.bytes : -buffer.bytes;
    now += bytes;
    live[static_cast<std::size_t>(buffer.owner)] += Bytes(static_cast<double>(bytes));
    if (now > most) most = now, peak = live;
  }
  return peak;
}

EnginePrediction finish(const EngineTape& tape, PeakCounting counting, const std::vector<HostBuffer>& host,
                        Bytes process, const EngineEnvironment& environment) {
  EnginePrediction prediction;
  run(tape, counting, environment, prediction);
  prediction.host_use = host_use(host);
  prediction.device_used = prediction.reserved + environment.context + environment.libraries +
                           environment.communicators + prediction.host_use.device_page_tables();
  prediction.host = process + prediction.host_use.total();
  prediction.owners = owners_at_peak(tape);
  return prediction;
}

}  // namespace

EnginePrediction predict_deepspeed(const EagerStep& step, TokenShape tokens, const DeepSpeedJob& job,
                                   const EngineEnvironment& environment) {
  EngineTape tape;
  const int micro_steps = std::min(job.accumulation, kDifferentMicroSteps);
  const EngineRun run{steps_until_steady(job), micro_steps, environment.cublas_workspace, tokens};
  record_run(*make_deepspeed_engine(step, job, tape), step, run, tape);
  const Bytes process = job.zero_init ? environment.deepspeed_zero_init_process : environment.deepspeed_process;
  return finish(tape, PeakCounting::each_phase, deepspeed_host_memory(step, job), process, environment);
}

EnginePrediction predict_fsdp2(const EagerStep& step, TokenShape tokens, int accumulation, const Fsdp2Options& options,
                               const EngineEnvironment& environment) {
  constexpr int kSteadySteps = 3;  // states are made in the first step
  EngineTape tape;
  const int micro_steps = std::min(accumulation, kDifferentMicroSteps);
  const EngineRun run{kSteadySteps, micro_steps, environment.cublas_workspace, tokens};
  record_run(*make_fsdp2_engine(step, options, tape), step, run, tape);
  return finish(tape, PeakCounting::since_step, fsdp2_host_memory(step, options), environment.fsdp2_process,
                environment);
}

}  // namespace zeroplan
