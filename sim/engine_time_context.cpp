#include <fmt/format.h>

#include <algorithm>

#include "models/eager_step.h"
#include "models/error.h"
#include "sim/engine_time_parts.h"
#include "sim/host_fractions.h"
#include "sim/host_model.h"

namespace zeroplan {
namespace {

/// deepspeed_network_* are of the NICs' sum on InfiniBand, of which the collective model takes this fraction; on other
/// networks DeepSpeed gets the same share of what the collective model gives them.
constexpr double kInfiniBandFraction = 0.87;
/// Of a sustained matmul's rate that training steps reach (step-time.md section 2: A100 0.87, H200 0.89, H100 0.89).
constexpr double kOfSustained = 0.88;
/// Host buffers that are not pinned.
constexpr BytesPerSecond kPageable(kPageableCopyRate);

TimeFit network_of(const GpuSpec& gpu) {
  if (gpu.arch == "Volta") return TimeFit::deepspeed_network_volta;
  return gpu.arch == "Ampere" ? TimeFit::deepspeed_network_ampere : TimeFit::deepspeed_network_hopper;
}

void check_zero_plus_plus(const EngineTimeRun& run, int per_node) {
  if (run.hpz_ranks <= 1 && !run.quantized_weights && !run.quantized_gradients) return;
  const bool known = run.engine == TimedEngine::deepspeed && run.stage == 3 && run.shard_ranks == run.ranks;
  if (!known || run.tensor_parallel > 1)
    throw InputError("step time: hpZ, qwZ and qgZ: expected DeepSpeed's stage 3 without MiCS and tensor parallelism");
  if (run.hpz_ranks <= 1) return;
  if (run.ranks % run.hpz_ranks != 0)
    throw InputError(
        fmt::format("step time: hpZ: expected a group that divides {} ranks, got {}", run.ranks, run.hpz_ranks));
  if (run.communicates && run.ranks > per_node && run.hpz_ranks % per_node != 0 && per_node % run.hpz_ranks != 0)
    throw InputError(
        fmt::format("step time: hpZ: expected groups of whole nodes, or whole groups in a node of {} ranks, "
                    "got groups of {}",
                    per_node, run.hpz_ranks));
}

EngineTimeRun completed(const EngineTimeRun& given, const MachineSpec& machine) {
  EngineTimeRun run = given;
  if (run.tensor_parallel < 1 || run.tensor_parallel > machine.gpus_per_node)
    throw InputError(fmt::format("step time: expected a tensor-parallel group inside a node of {} GPUs, got {}",
                                 machine.gpus_per_node, run.tensor_parallel));
  if (run.ranks == 0) run.ranks = machine.ranks() / run.tensor_parallel;
  if (run.shard_ranks == 0) run.shard_ranks = run.ranks;
  if (run.ranks < 1 || run.shard_ranks < 1 || run.ranks % run.shard_ranks != 0)
    throw InputError(fmt::format("step time: expected ranks in whole shard groups, got {} ranks in groups of {}",
                                 run.ranks, run.shard_ranks));
  const int per_node = std::max(1, machine.gpus_per_node / run.tensor_parallel);
  const bool whole_nodes = run.ranks > per_node && run.ranks % per_node == 0;
  if (run.communicates && whole_nodes && run.shard_ranks % per_node != 0 && per_node % run.shard_ranks != 0)
    throw InputError(
        fmt::format("step time: expected shard groups of whole nodes, or whole groups in a node of {} "
                    "ranks, got groups of {}",
                    per_node, run.shard_ranks));
  if (run.stage < 0 || run.stage > 3)
    throw InputError(fmt::format("step time: expected a stage 0 to 3, got {}", run.stage));
  if (run.engine != TimedEngine::deepspeed && run.stage == 1)
    throw InputError("step time: FSDP has no stage 1 (0 DDP, 2 SHARD_GRAD_OP, 3 FULL_SHARD)");
  if (run.tokens.batch < 1 || run.tokens.seq_len < 1 || run.accumulation < 0 ||
      (run.accumulation == 0 && run.remainder_batch == 0))
    throw InputError("step time: expected at least one micro-step of one token");
  check_zero_plus_plus(run, per_node);
  if (run.fp8 && run.engine == TimedEngine::deepspeed)
    throw InputError("step time: fp8 under DeepSpeed is not modelled");
  if (run.fp8 && machine.gpu.arch != "Hopper" && !machine.gpu.arch.starts_with("Blackwell"))
    throw InputError(fmt::format("step time: {} has no fp8 matmuls", machine.gpu.name));
  return run;
}

double attention_for(const EngineTimeFit& fit, const GpuSpec& gpu, AttentionSoftware kernel) {
  const bool fused = kernel != AttentionSoftware::unfused && kernel != AttentionSoftware::eager;
  if (!fused || gpu.arch == "Volta" || gpu.arch == "Pascal" || gpu.arch == "Turing") return 0;
  // Data-centre Blackwell takes Hopper's, all others Ampere's: what the kernels were written for.
  const bool hopper = gpu.arch == "Hopper" || gpu.compute_capability.starts_with("10.");
  const std::string_view arch = hopper ? "Hopper" : "Ampere";
  double best = 0;
  for (const AttentionEfficiency& each : fit.attention) {
    if (each.arch != arch) continue;
    if (each.kernel == to_string(kernel)) return each.value;
    if (each.kernel == to_string(AttentionSoftware::sdpa)) best = each.value;
  }
  return best;
}

FlopsPerSecond dense_peak(const GpuSpec& gpu, DType type) {
  if (type == DType::fp32) return gpu.peak_fp32.value_or(FlopsPerSecond());
  return std::max(gpu.peak_bf16.value_or(FlopsPerSecond()), gpu.peak_fp16.value_or(FlopsPerSecond()));
}

}  // namespace

MachineSpec deepspeed_network(const MachineSpec& machine, const EngineTimeFit& fit) {
  MachineSpec wired = machine;
  if (wired.nodes > 1)
    wired.network.bandwidth = wired.network.bandwidth * (fit[network_of(machine.gpu)] / kInfiniBandFraction);
  return wired;
}

ChosenEfficiency matmul_efficiency(const GpuSpec& gpu, std::string_view era, const EngineTimeFit& fit) {
  const MatmulEfficiency* best = nullptr;
  for (const MatmulEfficiency& each : fit.matmul) {
    if (!gpu.name.starts_with(each.gpu) || (each.era != "any" && each.era != era)) continue;
    const auto rank = [&](const MatmulEfficiency& m) { return std::pair(m.gpu.size(), m.era != "any"); };
    if (best == nullptr || rank(each) > rank(*best)) best = &each;
  }
  if (best != nullptr) return {best->value, best->source, false};
  const GpuModel model(gpu);
  const DType type = gpu.peak_bf16 ? DType::bf16 : DType::fp16;
  if (!model.supports(type)) throw InputError(fmt::format("step time: no 16-bit matmul rate for {}", gpu.name));
  return {kOfSustained * model.sustained_share(), "0.88 x sustained matmul rate / peak (docs/step-time.md)", true};
}

EngineTimeContext::EngineTimeContext(const ModelSpec& model, const MachineSpec& machine_given,
                                     const EngineTimeRun& given, const EngineTimeFit& fit_given)
    : run(completed(given, machine_given)),
      machine(machine_given),
      fit(fit_given),
      gpu(machine_given.gpu),
      model_(model) {
  if (machine.host_device) throw InputError("step time: DeepSpeed and FSDP need GPUs");
  const bool states_on_nvme = run.offload_optimizer == OffloadedOptimizer::nvme;
  const bool on_host = run.offload_optimizer == OffloadedOptimizer::host || states_on_nvme;
  if (on_host && (run.host_adam ? !(*run.host_adam > 0) : !(machine.dram_bandwidth > BytesPerSecond())))
    throw InputError(fmt::format("step time: {}: CPU Adam needs a rate: dram_bandwidth of the machine", machine.name));
  if (run.matmul_efficiency && !(*run.matmul_efficiency > 0 && *run.matmul_efficiency <= 1.5))
    throw InputError(fmt::format("step time: expected a matmul efficiency of the peak, in (0, 1.5], got {}",
                                 *run.matmul_efficiency));
  if (!gpu.supports(run.type))
    throw InputError(fmt::format("step time: {} has no matmul rate for {}", machine.gpu.name, to_string(run.type)));
  check_unmeasured(model);
  if ((states_on_nvme || run.parameters_on_nvme) &&
      !(machine.nvme.read > BytesPerSecond() && machine.nvme.write > BytesPerSecond()))
    throw InputError(fmt::format(
        "step time: {}: expected the rates of its NVMe drives (--nvme 4x2TB@6.5GB/s), got none", machine.name));
  efficiency = run.matmul_efficiency ? ChosenEfficiency{*run.matmul_efficiency, "given", false}
                                     : matmul_efficiency(machine.gpu, run.era, fit);
  const FlopsPerSecond peak = dense_peak(machine.gpu, run.type);
  rates.gpu = &gpu;
  rates.matmul_scale = gpu.matmul_rate(run.type) / (peak * efficiency.value);
  attention_efficiency = attention_for(fit, machine.gpu, run.attention);
  rates.fused_attention = peak * attention_efficiency;
  if (const double dims = exponential_dims(machine.gpu); dims > 0)
    rates.exponentials = dense_peak(machine.gpu, DType::bf16) / dims;
  // What holds products of attention back in 16 bits does not in fp32, whose own rate is a fifteenth.
  rates.unfused_attention = peak * (run.type == DType::fp32 ? efficiency.value : fit[TimeFit::unfused_attention_rate]);
  const bool hugging_face = run.stack == KernelStack::hugging_face;
  rates.streaming =
      machine.gpu.memory_bandwidth * fit[hugging_face ? TimeFit::memory_rate_hugging_face : TimeFit::memory_rate_eager];
  rates.scores = machine.gpu.memory_bandwidth * fit[TimeFit::memory_rate_scores];
  rates.wide_softmax = eager_softmax_is_fp32(model);
  ranks_per_node_ = std::max(1, machine.gpus_per_node / run.tensor_parallel);
  const bool offloads = on_host || run.offload_parameters || run.offload_activations ||
                        run.offload_optimizer == OffloadedOptimizer::states;
  if (offloads && !(pcie(true) > BytesPerSecond()))
    throw InputError(fmt::format("step time: {}: offload needs the rate of gpu.pcie", machine.name));
  if (!run.communicates || run.ranks * run.tensor_parallel == 1) return;
  if (run.ranks > ranks_per_node_ && run.ranks % ranks_per_node_ != 0)
    throw InputError(
        fmt::format("step time: expected whole nodes of {} ranks, got {} ranks", ranks_per_node_, run.ranks));
  const int nodes = std::max(1, run.ranks / ranks_per_node_);
  MachineSpec wired = machine;
  if (nodes != wired.nodes) wired.nodes = nodes;
  if (run.engine == TimedEngine::deepspeed) wired = deepspeed_network(wired, fit);
  collectives_.emplace(wired, CollectiveSetting::in_step);
  if (run.quantized_weights || exchanges()) queued_.emplace(wired, CollectiveSetting::queued);
  if (exchanges()) beyond_ring_ = all_to_all_beyond_ring(machine, ranks_per_node_);
}

Unmeasured unmeasured(const ModelSpec& model, const EngineTimeRun& run) {
  Unmeasured what;
  for (const BlockKind& kind : model.kinds) {
    what.encoders |= kind.ends_encoder || kind.memory >= 0;
    for (const GraphOp& op : kind.ops) what.experts |= op.kernel == Kernel::grouped_linear;
  }
  what.nvme = run.offload_optimizer == OffloadedOptimizer::nvme || run.parameters_on_nvme;
  return what;
}

void EngineTimeContext::check_unmeasured(const ModelSpec& model) const {
  const Unmeasured what = unmeasured(model, run);
  if (what.nvme && (run.engine != TimedEngine::deepspeed || run.stage != 3))
    throw InputError(
        "step time: offload to NVMe: expected DeepSpeed at stage 3, the only one that reads and writes it");
  if (what.experts && (run.stack != KernelStack::hugging_face || run.fp8 || run.tensor_parallel > 1))
    throw InputError(
        "step time: experts: expected transformers' grouped products in 16 bits without tensor parallelism, the only "
        "form of them that is modelled");
}

double EngineTimeContext::gpus_per_node() const {
  return std::min(run.communicates ? machine.gpus_per_node : 1, run.ranks * run.tensor_parallel);
}

Seconds EngineTimeContext::nvme_read(double bytes) const {
  const HostModel host(machine);
  return host.alone(host.disk_read(Bytes(bytes * gpus_per_node())));
}

Seconds EngineTimeContext::nvme_write(double bytes) const {
  const HostModel host(machine);
  return host.alone(host.disk_write(Bytes(bytes * gpus_per_node())));
}

RankGroup EngineTimeContext::group(int ranks) const {
  const int inside = std::min(ranks, ranks_per_node_);
  return {ranks, std::max(1, ranks / inside), inside};
}

/// ZeRO-3 gathers a layer in several messages.
double EngineTimeContext::messages() const {
  return run.engine == TimedEngine::deepspeed && run.stage == 3 ? fit[TimeFit::deepspeed_messages] : 1;
}

Seconds EngineTimeContext::collective(CollectiveKind kind, double bytes, RankGroup ranks) const {
  if (!collectives_ || ranks.ranks == 1) return {};
  return collectives_->cost(kind, Bytes(bytes / messages()), ranks).alone() * (messages() * run.collective_scale);
}

Seconds EngineTimeContext::gather(double parameters) const {
  const RankGroup all = group(run.shard_ranks);
  if (run.hierarchical_gather && all.nodes > 1) {
    const double bytes = parameters * size_of(run.type);
    // Each GPU collects a node's share of every shard it has neighbours for; the node then puts them together.
    return collective(CollectiveKind::all_gather, bytes / all.ranks_per_node, {all.nodes, all.nodes, 1}) +
           collective(CollectiveKind::all_gather, bytes, {all.ranks_per_node, 1, all.ranks_per_node});
  }
  return gather_among(parameters, group(run.shard_ranks));
}

Seconds EngineTimeContext::reduce_inside(double parameters) const {
  const double bytes = parameters * size_of(run.reduction);
  // DeepSpeed's stages 1 and 2 all-reduce their buckets, of which a rank keeps its part (deepspeed.md section 4.7).
  const bool whole = run.stage == 0 || (run.engine == TimedEngine::deepspeed && run.stage < 3);
  if (whole) return collective(CollectiveKind::all_reduce, bytes, group(run.ranks));
  return collective(CollectiveKind::reduce_scatter, bytes, group(run.shard_ranks));
}

Seconds EngineTimeContext::reduce_between(double parameters) const {
  const int copies = run.ranks / run.shard_ranks;
  const bool whole = run.stage == 0 || (run.engine == TimedEngine::deepspeed && run.stage < 3);
  if (whole || copies == 1) return {};
  // Ranks that own the same shard; as many such groups share a node's NICs as the node has shards.
  const int inside = std::max(1, ranks_per_node_ / run.shard_ranks);
  return collective(CollectiveKind::all_reduce, parameters * size_of(run.reduction) / run.shard_ranks,
                    {copies, std::max(1, copies / inside), std::min(copies, inside)});
}

Seconds EngineTimeContext::tensor_parallel(TokenShape tokens, std::int64_t hidden) const {
  if (run.tensor_parallel == 1 || !collectives_) return {};
  const Bytes message(static_cast<double>(tokens.tokens()) * static_cast<double>(hidden) * size_of(run.type));
  const RankGroup neighbours{run.tensor_parallel, 1, run.tensor_parallel};
  constexpr double kAsync = 0.5;  // half of it hides behind the pieces of the matmul (step-time.md section 2)
  return collectives_->cost(CollectiveKind::all_gather, message, neighbours).alone() *
         ((run.async_tensor_parallel ? kAsync : 1) * run.collective_scale);
}

BytesPerSecond EngineTimeContext::pcie(bool pinned) const {
  const BytesPerSecond link = std::max(machine.gpu.pcie, machine.gpu.c2c / std::max(1, machine.gpu.gpus_per_c2c));
  return pinned ? link * fit[TimeFit::pcie_rate] : kPageable;
}

std::vector<Assumption> EngineTimeContext::assumptions() const {
  std::vector<Assumption> list;
  list.push_back({"matmuls in a step", fmt::format("{:.3f} of {}'s dense peak", efficiency.value, machine.gpu.name),
                  std::string(efficiency.source)});
  list.push_back({"kernels", std::string(to_string(run.stack)), "docs/step-time.md"});
  if (attention_efficiency > 0) {
    list.push_back(
        {"attention",
         fmt::format("products at {:.3f} of the peak on the causal half, exponentials beside", attention_efficiency),
         std::string(to_string(run.attention))});
  } else if (run.attention == AttentionSoftware::eager) {
    list.push_back(
        {"attention", "eager, a kernel for each operation on the scores", "asked for, or the model has no other"});
  } else {
    list.push_back({"attention", "unfused, scores in memory", "asked for, or the GPU has no fused kernel"});
  }
  list.push_back({"host",
                  fmt::format("{:.0f} us a PyTorch op{}", fit[host_op()],
                              run.engine == TimedEngine::deepspeed && run.stage == 3
                                  ? fmt::format(" x {:.1f} for ZeRO-3's hooks", fit[TimeFit::host_stage3])
                                  : ""),
                  "fitted to steps of several hosts; a slow or busy CPU takes longer"});
  const bool host_adam =
      run.offload_optimizer == OffloadedOptimizer::host || run.offload_optimizer == OffloadedOptimizer::nvme;
  if (host_adam && !run.host_adam)
    list.push_back(
        {"CPU Adam", "a fraction of what the host's memory and cores allow",
         "measured on an H200 host of 16 cores (docs/step-time.md); published hosts reach 1.6 to 11 G parameters/s"});
  if (run.engine == TimedEngine::deepspeed && collectives_ && run.ranks > ranks_per_node_)
    list.push_back({"network under DeepSpeed",
                    fmt::format("{:.2f} of the NICs' sum on InfiniBand, other networks in proportion",
                                fit[network_of(machine.gpu)]),
                    fit.values[static_cast<std::size_t>(network_of(machine.gpu))].source});
  for (Assumption& each : zero_plus_plus_assumptions()) list.push_back(std::move(each));
  for (Assumption& each : unmeasured_assumptions()) list.push_back(std::move(each));
  return list;
}

std::vector<Assumption> EngineTimeContext::zero_plus_plus_assumptions() const {
  std::vector<std::string> kinds;
  if (has_secondary()) kinds.push_back(fmt::format("hpZ in groups of {}", run.hpz_ranks));
  if (run.quantized_weights) kinds.push_back("qwZ");
  if (run.quantized_gradients) kinds.push_back(exchanges() ? "qgZ" : "qgZ (on one node DeepSpeed's usual reduction)");
  if (kinds.empty()) return {};
  return {{"step time of ZeRO++", fmt::format("{}", fmt::join(kinds, ", ")),
           "by mechanism; measured rows have all three together (384 V100), none has one alone: docs/step-time.md"}};
}

std::vector<Assumption> EngineTimeContext::unmeasured_assumptions() const {
  constexpr std::string_view kNotMeasured = "by mechanism, not measured: docs/step-time.md";
  const Unmeasured what = unmeasured(model_, run);
  std::vector<Assumption> list;
  if (what.experts)
    list.push_back(
        {"step time of experts", "one grouped product a projection, tokens spread evenly", std::string(kNotMeasured)});
  if (what.encoders)
    list.push_back(
        {"step time of encoders", "their layers as a decoder's, of as many tokens", std::string(kNotMeasured)});
  if (what.nvme)
    list.push_back(
        {"step time of NVMe",
         fmt::format("drives at {:.1f} and {:.1f} GB/s a node, reads and writes one after the other",
                     machine.nvme.read.base() * kDiskFraction / 1e9, machine.nvme.write.base() * kDiskFraction / 1e9),
         std::string(kNotMeasured)});
  return list;
}

}  // namespace zeroplan
