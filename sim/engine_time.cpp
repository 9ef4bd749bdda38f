#include "sim/engine_time.h"

#include <fmt/format.h>

#include <algorithm>

#include "models/error.h"
#include "sim/collective_model.h"
#include "sim/engine_time_fetch.h"
#include "sim/engine_time_parts.h"

namespace zeroplan {
namespace {

constexpr double kMillisecond = 1e-3;
constexpr double kMicrosecond = 1e-6;
constexpr double kSelectiveMatmul = 0.5;  // torchtitan's per-op policy keeps every second matmul
/// fp8 all-gathers carry one byte a weight, scales and the tensors that stay in 16 bits (step-time.md section 2).
constexpr double kFp8Gather = 0.55;
/// Copies around collectives, bytes a parameter: FSDP2 copies in, out and casts, less when it never reshards.
constexpr double kCopiesFsdp2 = 14, kCopiesFsdp2Kept = 10, kCopiesOthers = 8;
constexpr double kCopiesForward = 0.35;
/// Tensor and sequence parallelism: collectives of 2 B x hidden x tokens a layer, forward and backward.
constexpr double kTensorForward = 4, kTensorBackward = 6;

struct Shares {
  double matmul = 0, attention = 0, rest = 0;
};
Shares recomputed(TimedRecompute mode) {
  switch (mode) {
    case TimedRecompute::none:
      return {};
    case TimedRecompute::full:
      return {1, 1, 1};
    case TimedRecompute::selective:
      return {kSelectiveMatmul, 0, 1};
    case TimedRecompute::second_layer:
      return {0.5, 0.5, 0.5};
  }
  return {};
}

/// Seconds of each part of a step.
struct Parts {
  Seconds compute, exposed, host, offload;
  Seconds matmul, attention, streaming, head;
  Seconds forward, backward;
  Seconds last_backward;  // of the step's last micro-step: what writes of gradients hide behind
};

/// What of the gradients crosses in a micro-step.
enum class Reduces : std::uint8_t { nothing, in_groups, everything };
/// Whom ZeRO-3's forward gathers from: hpZ has its second copy from the first forward of a step on.
enum class Gathers : std::uint8_t { all, secondary };

/// Equal micro-steps.
struct MicroSteps {
  TokenShape tokens;
  double count = 1;
  Reduces reduces = Reduces::everything;
  Gathers gathers = Gathers::all;
};

/// One layer of a kind, forward or backward, before it is overlapped.
struct Phase {
  Seconds compute, communication, host, copies;  // copies: to or from the host, at the same time as kernels
};

class StepModel {
 public:
  StepModel(const ModelSpec& model, const EngineTimeContext& context) : model_(model), c_(context) {
    for (const BlockKind& kind : model.kinds) {
      if (kind.role == BlockRole::layer) continue;
      root_ += static_cast<double>(kind.parameters()) / c_.run.tensor_parallel;
      root_trained_ += static_cast<double>(kind.trainable_parameters()) / c_.run.tensor_parallel;
    }
    if (deepspeed() && c_.run.stage == 3) again_ = gathers_in_backward(model, c_.run);
  }

  Parts play() {
    micro_steps(c_.run.tokens, c_.run.accumulation, true);
    if (c_.run.remainder_batch > 0)
      micro_steps({c_.run.remainder_batch, c_.run.tokens.seq_len}, 1, c_.run.accumulation < 1);
    return parts_;
  }

 private:
  bool deepspeed() const { return c_.run.engine == TimedEngine::deepspeed; }
  double fit(TimeFit key) const { return c_.fit[key]; }

  /// `count` equal ones, which begin the step or do not. Under DeepSpeed's stages 0 and 1 gradients cross in the last
  /// one of the step, under MiCS they cross between groups only there.
  void micro_steps(TokenShape tokens, std::int64_t count, bool begin) {
    if (count < 1) return;
    const bool mics = deepspeed() && c_.run.stage == 3 && c_.run.shard_ranks < c_.run.ranks;
    const bool each = !deepspeed() || (c_.run.stage >= 2 && !mics);
    const auto all = static_cast<double>(count);
    if (each && !c_.has_secondary()) return add(MicroSteps{tokens, all});
    if (each) {
      if (begin) add(MicroSteps{tokens, 1});
      if (all > begin) add(MicroSteps{tokens, all - begin, Reduces::everything, Gathers::secondary});
      return;
    }
    if (count > 1) add(MicroSteps{tokens, all - 1, mics ? Reduces::in_groups : Reduces::nothing});
    add(MicroSteps{tokens, 1});
  }

  void add(const MicroSteps& steps) {
    const Seconds before = parts_.backward;
    std::vector<int> layers(model_.kinds.size());
    for (const int kind : model_.sequence) ++layers[static_cast<std::size_t>(kind)];
    const BlockKind* last = nullptr;
    for (std::size_t i = 0; i < model_.kinds.size(); ++i) {
      if (model_.kinds[i].role != BlockRole::layer) continue;
      last = &model_.kinds[i];
      MicroSteps of_kind = steps;
      of_kind.count *= layers[i];
      add_layers(*last, of_kind);
    }
    add_root(steps, last);
    parts_.last_backward = (parts_.backward - before) / steps.count;
  }

  Seconds gather(double parameters, Gathers gathers) const {
    if (deepspeed() && c_.run.stage < 3) return {};
    if (gathers == Gathers::secondary) return c_.gather_secondary(parameters);
    return c_.run.stage >= 2 ? c_.gather(parameters * (c_.run.fp8 ? kFp8Gather : 1)) : Seconds();
  }
  /// In backward: again where weights were dropped; hpZ keeps a copy among some ranks.
  Seconds gather_again(double parameters, double times) const {
    if (c_.run.stage < 3) return {};
    return gather(parameters, c_.has_secondary() ? Gathers::secondary : Gathers::all) * times;
  }
  /// How often that is, of a block's weights.
  double gathers_again(const BlockKind& kind) const {
    return again_.empty() ? 1 : again_[static_cast<std::size_t>(&kind - model_.kinds.data())];
  }
  Seconds reduce(double parameters, Reduces reduces) const {
    if (reduces == Reduces::nothing) return {};
    return reduces == Reduces::everything ? c_.reduce(parameters) : c_.reduce_inside(parameters);
  }
  Seconds reduce_block(const BlockKind& kind, double trained, Reduces reduces) const {
    return c_.exchanges() ? c_.reduce_exchanged(kind) : reduce(trained, reduces);
  }

  void add_layers(const BlockKind& kind, const MicroSteps& steps) {
    const EngineTimeRun& run = c_.run;
    const TokenShape tokens = steps.tokens;
    const double count = steps.count;
    const LayerWork work = layer_work(kind, run, tokens, c_.rates, c_.fit);
    Shares again = recomputed(run.recompute);
    const Seconds casts_again = work.casts_forward * (again.rest * again.matmul);
    const Seconds tensor = c_.tensor_parallel(tokens, model_.hidden);
    const Seconds tensor_again = tensor * kTensorForward * again.matmul;
    if (run.early_stop && run.recompute == TimedRecompute::full) again.matmul = 1 - work.last_linear;
    const double held = work.parameters / run.tensor_parallel;
    const double trained = work.trainable / run.tensor_parallel;
    const Seconds copies = engine_copies(held);
    const Seconds unpack = c_.dequantize(held);  // of each gather
    const double gathers = gathers_again(kind);
    const bool keeps = c_.has_secondary() && steps.gathers == Gathers::all;
    const Seconds kept = keeps ? c_.keep_secondary(held) : Seconds();

    Phase forward, backward;
    forward.compute = work.matmul_forward + work.attention_forward + work.streaming_forward + work.casts_forward +
                      copies * kCopiesForward + unpack + kept;
    backward.compute = unpack * gathers + work.matmul_backward + work.attention_backward + work.streaming_backward +
                       work.casts_backward + copies * (1 - kCopiesForward) + work.matmul_forward * again.matmul +
                       work.attention_forward * again.attention + work.streaming_forward * again.rest + casts_again;
    forward.communication = gather(held, steps.gathers);
    backward.communication = gather_again(held, gathers) + reduce_block(kind, trained, steps.reduces);
    const Seconds quantizes = c_.quantize_launches(kind);
    forward.host = host_floor(work) + quantizes;
    backward.host = host_floor_backward(work) + host_floor(work) * again.rest + quantizes * gathers;
    if (c_.exchanges()) backward.host += c_.exchange_launches(kind);
    forward.copies = backward.copies = offloaded_layer(held) + offloaded_activations(tokens);
    add_phase(forward, tensor * kTensorForward, count, parts_.forward);
    add_phase(backward, tensor * kTensorBackward + tensor_again, count, parts_.backward);
    count_kernels(work, again, copies + casts_again + unpack * (1 + gathers) + kept, count);
    const Seconds gradients = offloaded_gradients(trained) * count;
    parts_.offload += gradients;
    parts_.backward += gradients;
  }

  /// What of `compute` is which kind of kernel.
  void count_kernels(const LayerWork& work, const Shares& again, Seconds extra, double count) {
    parts_.matmul += (work.matmul_forward * (1 + again.matmul) + work.matmul_backward) * count;
    parts_.attention += (work.attention_forward * (1 + again.attention) + work.attention_backward) * count;
    parts_.streaming += (work.streaming_forward * (1 + again.rest) + work.streaming_backward + work.casts_forward +
                         work.casts_backward + extra) *
                        count;
  }

  /// Copies in and out of flat buffers, casts.
  Seconds engine_copies(double parameters) const {
    double bytes = kCopiesOthers;
    if (c_.run.engine == TimedEngine::fsdp2) bytes = c_.run.stage == 3 ? kCopiesFsdp2 : kCopiesFsdp2Kept;
    return Bytes(bytes * parameters) / c_.rates.streaming;
  }

  Seconds host_floor_backward(const LayerWork& work) const {
    if (!c_.alone_on_host()) return host_floor(work);                   // the difference is not in those rows
    const double hooked = c_.run.stage > 0 ? work.trained_tensors : 0;  // stage 0 reduces once all is there
    return Seconds(kMicrosecond * (fit(TimeFit::host_op) * fit(TimeFit::host_op_backward) * work.host_ops +
                                   fit(TimeFit::host_hook_deepspeed) * hooked));
  }

  Seconds host_floor(const LayerWork& work) const {
    const EngineTimeRun& run = c_.run;
    const Seconds ops(fit(c_.host_op()) * kMicrosecond * work.host_ops);
    if (deepspeed()) return ops * (run.stage == 3 ? fit(TimeFit::host_stage3) : 1);
    double hooks = fit(TimeFit::host_fsdp1);
    if (run.engine == TimedEngine::fsdp2) {
      hooks = fit(run.stack == KernelStack::hugging_face ? TimeFit::host_fsdp2_hugging_face : TimeFit::host_fsdp2);
    }
    return ops + Seconds(hooks * kMillisecond);
  }

  /// Parameters of a layer that come from the host.
  Seconds offloaded_layer(double parameters) const {
    if (!c_.run.offload_parameters) return {};
    const int bytes = deepspeed() ? size_of(c_.run.type) : size_of(DType::fp32);
    const double own = parameters / c_.shards() * bytes;
    const Seconds up = Bytes(own) / c_.pcie(c_.run.pinned_parameters);
    return c_.run.parameters_on_nvme ? std::max(up, c_.nvme_read(own)) : up;
  }
  Seconds offloaded_activations(TokenShape tokens) const {
    if (!c_.run.offload_activations) return {};
    return Bytes(static_cast<double>(tokens.tokens()) * static_cast<double>(model_.hidden) * size_of(c_.run.type)) /
           c_.pcie(c_.run.pinned);
  }
  /// Gradients go to the host as they come, and nothing hides it (groundtruth: 0.14 s for 1.68 G parameters).
  Seconds offloaded_gradients(double parameters) const {
    const OffloadedOptimizer to = c_.run.offload_optimizer;
    if (to != OffloadedOptimizer::host && to != OffloadedOptimizer::nvme) return {};
    return Bytes(parameters / c_.shards() * size_of(DType::fp32)) / c_.pcie(c_.run.pinned);
  }

  /// Kernels and collectives at the same time slow each other; the host has to issue both.
  void add_phase(const Phase& phase, Seconds tensor, double count, Seconds& total) {
    const Seconds kernels = phase.compute + tensor;
    Seconds slowed = kernels;
    if (phase.communication > Seconds() && kernels > Seconds()) {
      slowed = kernels * (1 + fit(TimeFit::contention) * std::min(1.0, phase.communication / kernels));
    }
    const Seconds busy = std::max({slowed, phase.copies, phase.host});
    Seconds layer = std::max(busy, phase.communication);
    if (deepspeed()) layer += std::min(busy, phase.communication) * (1 - fit(TimeFit::deepspeed_hidden));
    const Seconds host = std::max(Seconds(), phase.host - std::max({slowed, phase.copies, phase.communication}));
    const Seconds offload = phase.copies > std::max(slowed, phase.host)
                                ? std::max(Seconds(), phase.copies - std::max(slowed, phase.communication))
                                : Seconds();
    parts_.compute += phase.compute * count;
    parts_.host += host * count;
    parts_.offload += offload * count;
    parts_.exposed += (layer - phase.compute - host - offload) * count;
    total += layer * count;
  }

  Seconds reduce_root(Reduces reduces) const {
    if (!c_.exchanges()) return reduce(root_trained_, reduces);
    Seconds sum;
    for (const BlockKind& kind : model_.kinds)
      if (kind.role != BlockRole::layer) sum += c_.reduce_exchanged(kind);
    return sum;
  }

  /// Embedding and head, and what of the first and the last layer nothing hides.
  void add_root(const MicroSteps& steps, const BlockKind* layer) {
    const double count = steps.count;
    const HeadWork head = head_work(model_, c_.run, steps.tokens, c_.rates);
    const Seconds copies = engine_copies(root_) + c_.dequantize(root_);
    const Seconds kernels = (head.matmul + head.streaming + copies) * count;
    parts_.head += kernels;
    parts_.compute += kernels;
    parts_.forward += kernels / 3;
    parts_.backward += kernels * 2 / 3;
    Seconds exposed;
    if (deepspeed()) {
      exposed = reduce_root(steps.reduces);
      if (c_.run.stage == 3) exposed += gather(root_, steps.gathers);
    } else if (layer != nullptr) {
      const double held = static_cast<double>(layer->parameters()) / c_.run.tensor_parallel;
      const double trained = static_cast<double>(layer->trainable_parameters()) / c_.run.tensor_parallel;
      exposed = gather(held, Gathers::all) + (c_.run.stage >= 2 ? c_.gather(root_) : Seconds()) + c_.reduce(trained) +
                c_.reduce(root_trained_) * 0.5;
    }
    const Seconds gradients = offloaded_gradients(root_trained_) * count;
    parts_.exposed += exposed * count;
    parts_.offload += gradients;
    parts_.backward += exposed * count + gradients;
  }

  const ModelSpec& model_;
  const EngineTimeContext& c_;
  double root_ = 0;  // parameters of embedding and head on one GPU of the tensor-parallel group
  double root_trained_ = 0;
  std::vector<double> again_;  // ZeRO-3: gathers of a kind's weights in backward
  Parts parts_;
};

StepLimit limit_of(const EngineTime& time) {
  const std::pair<Seconds, StepLimit> parts[] = {{time.compute, StepLimit::compute},
                                                 {time.exposed_communication, StepLimit::communication},
                                                 {time.host, StepLimit::host},
                                                 {time.optimizer, StepLimit::optimizer},
                                                 {time.offload, StepLimit::offload}};
  return std::max_element(std::begin(parts), std::end(parts))->second;
}

}  // namespace

EngineTime predict_engine_time(const ModelSpec& model, const MachineSpec& machine, const EngineTimeRun& run,
                               const EngineTimeFit& fit) {
  const EngineTimeContext context(model, machine, run, fit);
  const Parts parts = StepModel(model, context).play();
  const Update update = step_update(model, context);
  EngineTime time;
  time.compute = parts.compute;
  time.exposed_communication = parts.exposed + update.communication;
  time.host = parts.host + update.host;
  time.overhead = update.host;
  time.optimizer = update.optimizer;
  const Seconds late_writes = std::max(Seconds(), update.gradient_writes - parts.last_backward);
  time.offload = parts.offload + update.offload + late_writes;
  time.step = time.compute + time.exposed_communication + time.host + time.optimizer + time.offload;
  time.host_update = update.adam;
  time.matmul = parts.matmul;
  time.attention = parts.attention;
  time.streaming = parts.streaming;
  time.head = parts.head;
  time.forward = parts.forward;
  time.backward = parts.backward;
  time.limit = limit_of(time);
  time.assumptions = context.assumptions();
  return time;
}

std::string_view to_string(TimedEngine value) {
  switch (value) {
    case TimedEngine::deepspeed:
      return "DeepSpeed";
    case TimedEngine::fsdp1:
      return "FSDP1";
    case TimedEngine::fsdp2:
      return "FSDP2";
  }
  return "";
}

std::string_view to_string(KernelStack value) {
  switch (value) {
    case KernelStack::hugging_face:
      return "transformers, eager";
    case KernelStack::torchtitan:
      return "PyTorch modules, eager";
    case KernelStack::compiled_blocks:
      return "compiled blocks";
    case KernelStack::compiled_graph:
      return "one compiled graph";
    case KernelStack::composer:
      return "llm-foundry";
    case KernelStack::composer_fp32:
      return "llm-foundry, fp32 norms";
    case KernelStack::megatron:
      return "Megatron";
  }
  return "";
}

std::string_view to_string(AttentionSoftware value) {
  switch (value) {
    case AttentionSoftware::sdpa:
      return "SDPA";
    case AttentionSoftware::triton_flash:
      return "triton flash";
    case AttentionSoftware::early_flash:
      return "early flash";
    case AttentionSoftware::unfused:
      return "unfused";
    case AttentionSoftware::eager:
      return "eager";
  }
  return "";
}

std::string_view to_string(StepLimit value) {
  switch (value) {
    case StepLimit::compute:
      return "compute";
    case StepLimit::communication:
      return "communication";
    case StepLimit::host:
      return "host";
    case StepLimit::optimizer:
      return "optimizer";
    case StepLimit::offload:
      return "offload";
  }
  return "";
}

}  // namespace zeroplan
