#include "planner/engine_candidate.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "planner/engine_counts.h"

namespace zeroplan {
namespace {

std::string limit_of(const EngineTime& t) {
  const std::array<std::pair<StepLimit, Seconds>, 5> parts{{{StepLimit::compute, t.compute},
                                                            {StepLimit::communication, t.exposed_communication},
                                                            {StepLimit::host, t.host},
                                                            {StepLimit::optimizer, t.optimizer},
                                                            {StepLimit::offload, t.offload}}};
  for (const auto& [limit, seconds] : parts) {
    if (limit == t.limit) return fmt::format("{}: {:.0f} % of the step", to_string(limit), 100.0 * (seconds / t.step));
  }
  return std::string(to_string(t.limit));
}

void set_utilisation(Prediction& p, const ModelSpec& model, const GpuSpec& gpu, const Plan& plan, Flops run) {
  const auto peak = plan.precision.weights == DType::bf16   ? gpu.peak_bf16
                    : plan.precision.weights == DType::fp16 ? gpu.peak_fp16
                                                            : gpu.peak_fp32;
  if (!peak) return;
  const double flops =
      model_flops(model, plan.micro_step(), AttentionCount::causal).base() * static_cast<double>(plan.accumulation);
  p.mfu = flops / p.step.base() / peak->base();
  p.hfu = run.base() / p.step.base() / peak->base();
}

void put(TierMemory& tier, std::string_view owner, Bytes bytes) {
  if (bytes <= Bytes()) return;
  tier.breakdown.emplace_back(owner, bytes);
  tier.peak += bytes;
}

/// PyTorch's allocator asks for multiples of 2 MiB. Without rounding down the parts of a full card add up to a fraction
/// of a byte more than it has.
Bytes whole_segments(Bytes room) {
  constexpr double kSegment = 2 << 20;
  return Bytes(std::floor(room.base() / kSegment) * kSegment);
}

void set_gpu_memory(Prediction& p, const MachineSpec& machine, const EngineFit& fit) {
  Bytes owned;
  for (int o = 0; o < kNumOwners; ++o) {
    const Bytes bytes = fit.prediction.peak.owners[static_cast<std::size_t>(o)];
    put(p.gpu, to_string(static_cast<Owner>(o)), bytes);
    owned += bytes;
  }
  // The host's lead fills the card at most. A plan that fits only after flushes shows what it would need without them.
  const Bytes reserved =
      fit.fits_in_step() ? std::min(fit.reserved, whole_segments(fit.capacity - fit.overhead)) : fit.reserved;
  put(p.gpu, "allocator_cache", reserved - owned);
  const EngineEnvironment environment;
  put(p.gpu, "context", environment.context);
  put(p.gpu, "libraries", environment.libraries);
  const Bytes page_tables = fit.prediction.host_use.device_page_tables();
  put(p.gpu, "nccl", fit.overhead - environment.context - environment.libraries - page_tables);
  put(p.gpu, "page_tables", page_tables);  // of pinned host memory
  p.gpu.capacity = machine.gpu.memory;
  p.lower_bound = fit.allocated;
}

TierMemory host_memory(const MachineSpec& machine, const EngineFit& fit) {
  TierMemory host;
  const auto ranks = static_cast<double>(machine.gpus_per_node);
  const Bytes engine = ranks * fit.prediction.host_use.total();
  put(host, "offload", engine);
  put(host, "processes", fit.host - engine);
  host.pinned = ranks * fit.prediction.host_use.pinned;
  host.capacity = machine.usable_dram();
  return host;
}

std::optional<TierMemory> nvme_memory(const ModelSpec& model, const MachineSpec& machine, const Plan& plan) {
  if (engine_nvme(model, machine, plan) == Bytes()) return std::nullopt;
  Plan states = plan, weights = plan;
  states.parameters.nvme = weights.optimizer.nvme = 0;
  TierMemory nvme;
  put(nvme, to_string(Owner::parameters), engine_nvme(model, machine, weights));
  put(nvme, to_string(Owner::optimizer), engine_nvme(model, machine, states));
  nvme.capacity = machine.nvme.capacity;
  return nvme;
}

}  // namespace

Prediction engine_candidate_prediction(const ModelSpec& model, const MachineSpec& machine, const Plan& plan,
                                       const EngineTime& time, const EngineFit& fit, double tokens) {
  Prediction p;
  p.step = time.step;
  p.tokens_per_second = tokens / time.step.base();
  p.tokens_per_second_per_gpu = p.tokens_per_second / plan.ranks;
  p.time.compute = time.compute;
  p.time.exposed_communication = time.exposed_communication;
  p.time.exposed_offload = time.offload;
  p.time.optimizer = time.optimizer;
  p.time.idle = time.host;
  p.kernels = time.compute;
  p.traffic = fit.prediction.traffic;
  p.limited_by = limit_of(time);
  set_utilisation(p, model, machine.gpu, plan, fit.prediction.flops);
  set_gpu_memory(p, machine, fit);
  p.gpu.at_op = label(fit.prediction.peak, model);
  p.host = host_memory(machine, fit);
  p.nvme = nvme_memory(model, machine, plan);
  return p;
}

}  // namespace zeroplan
