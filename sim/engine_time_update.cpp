#include <algorithm>

#include "models/fsdp2_engine.h"
#include "sim/engine_time_parts.h"
#include "sim/host_model.h"

namespace zeroplan {
namespace {

constexpr double kMillisecond = 1e-3;
constexpr double kGiga = 1e9;
/// fp32 master and two moments, one direction.
constexpr double kStateBytes = 12;
/// fp32 gradients that DeepSpeed writes to NVMe in backward and reads again beside the states (deepspeed.md section 7).
constexpr double kGradientBytes = 4;

/// Bytes that AdamW moves beyond the fused kernel's when each operation reads and writes fp32 by itself.
constexpr double kUnfusedBytes = static_cast<double>(kUnfusedAdamPasses - kFusedAdamPasses) * size_of(DType::fp32);
/// Kernels of a tensor in torch's loop (decay, lerp, mul, addcmul, sqrt, div, add, addcdiv), and what Python and
/// dispatch take for one (HostPace::kernel_forward). What DTensor adds is not measured.
constexpr double kLoopKernels = 8;
constexpr Seconds kLoopKernelHost = 45.0_us;

double optimizer_bytes(const EngineTimeContext& c) {
  switch (c.run.optimizer) {
    case OptimizerSoftware::torch_fused:
      return c.fit[TimeFit::optimizer_fused];
    case OptimizerSoftware::torch_foreach:
    case OptimizerSoftware::torch_loop:
      return c.fit[TimeFit::optimizer_fused] + kUnfusedBytes;
    case OptimizerSoftware::decoupled:
      return c.fit[TimeFit::optimizer_decoupled];
    case OptimizerSoftware::deepspeed:
      return c.fit[TimeFit::optimizer_deepspeed];
  }
  return 0;
}

double num_tensors(const ModelSpec& model) {
  double count = 0;
  for (const int kind : model.sequence)
    for (const TensorSpec& tensor : model.kinds[static_cast<std::size_t>(kind)].tensors)
      count += tensor.trainable && !tensor.tied ? static_cast<double>(tensor.copies) : 0;
  return count;
}

/// Parameters a second that all cores of a node update.
double host_adam(const EngineTimeContext& c) {
  if (c.run.host_adam) return *c.run.host_adam;
  const HostModel host(c.machine);
  const double rate = kGiga / host.alone(host.adam(static_cast<std::int64_t>(kGiga), AdamTypes{})).base();
  if (c.run.engine != TimedEngine::deepspeed) return rate * c.fit[TimeFit::cpu_adam_torch];
  const bool slow = c.run.stage == 3 && !c.run.offload_parameters;
  return rate * c.fit[slow ? TimeFit::cpu_adam_deepspeed_stage3 : TimeFit::cpu_adam_deepspeed];
}

/// Sub-groups are read, updated, written one after the other; a pipeline lets the update run beside one of the others.
/// Reads and writes share the drives.
Seconds swapped(Seconds read, Seconds update, Seconds write, const EngineTimeRun& run) {
  if (run.pipelined_read && run.pipelined_write) return std::max(update, read + write);
  if (run.pipelined_read) return write + std::max(read, update);
  if (run.pipelined_write) return read + std::max(update, write);
  return read + update + write;
}

/// `local`: parameters that a rank updates.
void update_on_host(const EngineTimeContext& c, double local, Update& update) {
  const EngineTimeRun& run = c.run;
  const Seconds adam = update.adam = Seconds(local * c.gpus_per_node() / host_adam(c));
  // Weights go up again, unless they stay on the host.
  const double up = run.offload_parameters ? 0 : local * size_of(run.type);
  update.offload = Bytes(up) / c.pcie(run.pinned);
  if (run.offload_optimizer == OffloadedOptimizer::nvme) {
    update.offload +=
        swapped(c.nvme_read(local * (kStateBytes + kGradientBytes)), adam, c.nvme_write(local * kStateBytes), run);
    update.gradient_writes = c.nvme_write(local * kGradientBytes);
  } else {
    update.offload += adam;
  }
  if (run.parameters_on_nvme) update.offload += c.nvme_write(local * size_of(run.type));
}

/// Its kernels.
Seconds update_on_gpu(const ModelSpec& model, const EngineTimeContext& c, double local) {
  const Seconds kernels = Bytes(local * optimizer_bytes(c)) / c.machine.gpu.memory_bandwidth;
  if (c.run.optimizer != OptimizerSoftware::torch_loop) return kernels;
  return std::max(kernels, kLoopKernelHost * (kLoopKernels * num_tensors(model)));
}

}  // namespace

Update step_update(const ModelSpec& model, const EngineTimeContext& c) {
  Update update;
  const EngineTimeRun& run = c.run;
  const bool deepspeed = run.engine == TimedEngine::deepspeed;
  const double trained = static_cast<double>(model.trainable_parameters()) / run.tensor_parallel;
  const double local = trained / c.shards();
  const BytesPerSecond memory = c.machine.gpu.memory_bandwidth;
  // What begins an update, and the copies of all weights once they are gathered, take the same wherever Adam runs.
  const TimeFit start = deepspeed ? TimeFit::optimizer_start_deepspeed : TimeFit::optimizer_start;
  update.optimizer = Seconds(c.fit[start] * kMillisecond);
  if (deepspeed && run.stage < 3) update.optimizer += Bytes(trained * c.fit[TimeFit::optimizer_deepspeed_all]) / memory;
  switch (run.offload_optimizer) {
    case OffloadedOptimizer::none:
      update.optimizer += update_on_gpu(model, c, local);
      break;
    case OffloadedOptimizer::host:
    case OffloadedOptimizer::nvme:
      update_on_host(c, local, update);
      break;
    case OffloadedOptimizer::states:
      // Both directions at the same time; what they brought is updated in between.
      update.offload = Bytes(local * kStateBytes) / c.pcie(run.pinned);
      update.optimizer += update_on_gpu(model, c, local);
      break;
  }
  if (!deepspeed) return update;
  if (run.stage == 1 || run.stage == 2) update.communication = c.gather(trained);
  // In Python, tensor by tensor, wherever Adam runs: what of the model's tensors a rank updates; stage 0 goes over all
  // of them in 16 bits (FP16_Optimizer: overflow, casts, copies).
  const bool by_tensor = run.stage == 0 ? run.type != DType::fp32 : run.stage < 3;
  if (by_tensor)
    update.optimizer +=
        Seconds(c.fit[TimeFit::optimizer_tensor_deepspeed] * kMillisecond * num_tensors(model) / c.shards());
  if (run.communicates) update.host = Seconds(c.fit[TimeFit::deepspeed_overhead]);
  return update;
}

}  // namespace zeroplan
