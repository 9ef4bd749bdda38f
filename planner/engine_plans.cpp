#include "planner/engine_plans.h"

#include <algorithm>

#include "planner/engine_candidate.h"
#include "planner/engine_counts.h"
#include "planner/export_parts.h"

namespace zeroplan {

namespace {

bool on_nvme(const Placement& where) { return where.nvme > 0; }
OptimizerSoftware software_of(AdamForm form) {
  switch (form) {
    case AdamForm::fused:
      return OptimizerSoftware::torch_fused;
    case AdamForm::foreach:
      return OptimizerSoftware::torch_foreach;
    case AdamForm::loop:
      return OptimizerSoftware::torch_loop;
  }
  return OptimizerSoftware::torch_fused;
}
std::int64_t largest_layer(const ModelSpec& model) {
  std::int64_t most = 1;
  for (const BlockKind& kind : model.kinds)
    if (kind.role == BlockRole::layer) most = std::max(most, kind.parameters());
  return most;
}
bool on_nvme(const Plan& plan) { return on_nvme(plan.optimizer) || on_nvme(plan.parameters); }

}  // namespace

EngineTimeRun engine_time_run(const Plan& p, const ModelSpec& model) {
  const bool deepspeed = p.engine == Engine::deepspeed;
  EngineTimeRun run;
  run.engine = deepspeed ? TimedEngine::deepspeed : TimedEngine::fsdp2;
  run.stage = p.zero_stage;
  run.tokens = p.micro_step();
  run.accumulation = p.accumulation;
  run.ranks = p.ranks;
  if (p.zero_stage > 0 && p.shard_ranks != p.ranks) (deepspeed ? run.hpz_ranks : run.shard_ranks) = p.shard_ranks;
  run.recompute = p.recompute == Recompute::none ? TimedRecompute::none : TimedRecompute::full;
  run.type = p.precision.weights;
  run.reduction = deepspeed ? p.precision.gradients : DType::fp32;
  run.optimizer = deepspeed ? OptimizerSoftware::deepspeed : software_of(p.adam);
  if (usual_attention(model) == EagerAttention::eager) run.attention = AttentionSoftware::eager;
  const bool offloaded = p.optimizer.hbm < p.optimizer.total();
  if (offloaded) run.offload_optimizer = OffloadedOptimizer::host;
  if (on_nvme(p.optimizer)) {
    run.offload_optimizer = OffloadedOptimizer::nvme;
    run.pipelined_read = run.pipelined_write = true;  // as deepspeed.json has it
  }
  // grad_accum_dtype as the exporter chooses it (export_deepspeed_choices.cpp).
  const bool sums = p.precision.accumulation == DType::fp32 && p.precision.weights != DType::fp32;
  run.fp32_gradients = deepspeed && sums && (p.zero_stage == 3 || (p.zero_stage == 2 && !offloaded));
  // deepspeed.json's window (export_deepspeed_choices.cpp): a layer's weights stay from its recompute to its backward.
  run.max_reuse = p.recompute == Recompute::none ? 0 : 2 * largest_layer(model);
  run.parameters_on_nvme = on_nvme(p.parameters);
  run.offload_parameters = p.parameters.hbm < p.parameters.total();
  return run;
}

EngineWorkload engine_workload(const Plan& p) {
  EngineWorkload w;
  w.tokens = p.micro_step();
  w.accumulation = p.accumulation;
  w.ranks = p.ranks;
  w.checkpointing = p.recompute != Recompute::none;
  w.type = p.precision.weights;
  w.lora_rank = p.lora_rank;
  w.allocator_conf = p.allocator_conf;
  return w;
}

Fsdp2Options fsdp2_options(const Plan& p) {
  Fsdp2Options o;
  o.ranks = p.ranks;
  o.shard_ranks = p.shard_ranks == p.ranks ? 0 : p.shard_ranks;
  o.reshard_after_forward = o.reshard_root = p.zero_stage == 3;
  o.compute = p.precision.weights;
  o.offload = p.parameters.hbm < p.parameters.total();
  o.adam = p.adam;
  return o;
}

EnginePlans::EnginePlans(const Request& request)
    : request_(request),
      trained_(adapted_model(request.model, request.lora_rank)),
      diskless_(request.machine),
      fitter_(request_.model, request_.machine, request_.margin) {
  diskless_.nvme = {};
}

EngineTime EnginePlans::time(const Plan& plan, const MachineSpec& machine, const EngineTimeFit& fit,
                             double collective_scale) const {
  EngineTimeRun run = engine_time_run(plan, request_.model);
  run.collective_scale = collective_scale;
  return predict_engine_time(trained_, machine, run, fit);
}

bool EnginePlans::nvme_fits(const Plan& plan) const {
  return engine_nvme(trained_, request_.machine, plan) <= request_.machine.nvme.capacity * (1 - request_.margin);
}

DeepSpeedConfig EnginePlans::configuration(const Plan& plan) const {
  const Prediction none;
  const MachineSpec& machine = on_nvme(plan) ? request_.machine : diskless_;
  const std::string json = export_deepspeed({plan, trained_, machine, none, request_.margin}).json;
  return read_deepspeed_config(ConfigText::parse(json, "deepspeed.json"), request_.model.hidden);
}

EngineTrial EnginePlans::try_fit(const Plan& plan) {
  if (!nvme_fits(plan)) return {};
  const Bytes known = engine_states_on_gpu(trained_, plan) + engine_saved_activations(trained_, plan);
  const EngineWorkload w = engine_workload(plan);
  return plan.engine == Engine::deepspeed ? fitter_.try_deepspeed(configuration(plan), w, known)
                                          : fitter_.try_fsdp2(fsdp2_options(plan), w, known);
}

EngineFit EnginePlans::fit(const Plan& plan, FitDetail detail) {
  const EngineWorkload w = engine_workload(plan);
  return plan.engine == Engine::deepspeed ? fitter_.deepspeed(configuration(plan), w, detail)
                                          : fitter_.fsdp2(fsdp2_options(plan), w, detail);
}

EngineRecording EnginePlans::record(const Plan& plan, std::int64_t accumulation, RecordedMicroSteps recorded) {
  EngineWorkload w = engine_workload(plan);
  w.accumulation = accumulation;
  return plan.engine == Engine::deepspeed ? fitter_.record_deepspeed(configuration(plan), w, recorded)
                                          : fitter_.record_fsdp2(fsdp2_options(plan), w, recorded);
}

Candidate EnginePlans::candidate(const Plan& plan, const EngineTime& time, const EngineFit& fit) const {
  const auto tokens = static_cast<double>(plan.global_batch() * plan.seq_len);
  return {plan, engine_candidate_prediction(trained_, request_.machine, plan, time, fit, tokens),
          fit.fits_in_step() && nvme_fits(plan)};
}

}  // namespace zeroplan
