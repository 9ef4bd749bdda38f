#include "planner/engine_prediction.h"

namespace zeroplan {
namespace {

EnginePrediction finish(const EngineTape& tape, PeakCounting counting, const std::vector<HostBuffer>& host,
                        Bytes process, const EngineEnvironment& environment) {
  EnginePrediction prediction;
  prediction.memory = replay(tape, environment.allocator, counting);
  prediction.reserved =
      prediction.memory.steps.empty() ? prediction.memory.peak_reserved : prediction.memory.steps.back().reserved;
  prediction.host_use = host_use(host);
  prediction.device_used =
      prediction.reserved + environment.context + environment.libraries + prediction.host_use.device_page_tables();
  prediction.host = process + prediction.host_use.total();
  return prediction;
}

}  // namespace

EnginePrediction predict_deepspeed(const EagerStep& step, TokenShape tokens, const DeepSpeedJob& job,
                                   const EngineEnvironment& environment) {
  EngineTape tape;
  const EngineRun run{deepspeed_steady_steps(job), job.accumulation, environment.cublas_workspace, tokens};
  record_run(*make_deepspeed_engine(step, job, tape), step, run, tape);
  const Bytes process = job.zero_init ? environment.deepspeed_zero_init_process : environment.deepspeed_process;
  return finish(tape, PeakCounting::each_phase, deepspeed_host_memory(step, job), process, environment);
}

EnginePrediction predict_fsdp2(const EagerStep& step, TokenShape tokens, int accumulation, const Fsdp2Options& options,
                               const EngineEnvironment& environment) {
  constexpr int kSteadySteps = 3;  // states are made in the first step
  EngineTape tape;
  const EngineRun run{kSteadySteps, accumulation, environment.cublas_workspace, tokens};
  record_run(*make_fsdp2_engine(step, options, tape), step, run, tape);
  return finish(tape, PeakCounting::since_step, fsdp2_host_memory(step, options), environment.fsdp2_process,
                environment);
}

}  // namespace zeroplan
