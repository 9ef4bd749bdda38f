#include "planner/export_deepspeed_choices.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

namespace zeroplan {

namespace {

// Elements. A bucket is at most 200 MB in 16 bits, where an all-reduce has three quarters of NCCL's full rate (measured
// on 8xA100: 177 GB/s at 128 MiB, 223 at 512 MiB, 234 at most): stage 3 holds the bucket for good and copies it at
// every reduction, stages 1 and 2 hold two of them in backward. At least 20 MB: smaller messages have half of the rate
// or less.
constexpr std::int64_t kLargestBucket = 100'000'000;
constexpr std::int64_t kSmallestBucket = 10'000'000;
// A prefetch of several parameters lives twice, as flat receive buffer and as copies, until its last parameter was
// used.
constexpr std::int64_t kLargestPrefetch = 100'000'000;
// The optimizer's step makes (gradient type + 4) bytes of each element of a sub-group: at most 0.6 GB in 16 bits.
constexpr std::int64_t kSubGroup = 100'000'000;
// On NVMe kOptimizerSwapBuffers of 4 bytes each: at most 2.4 GB page-locked a rank.
constexpr std::int64_t kSwapSubGroup = 50'000'000;
// Bytes a sub-group's element takes on the GPU with `ratio` < 1 (master, moments, fp32 gradient), against the plan's.
constexpr double kPartialOffloadBytes = 16;
// A training process without offload, measured 1.6 to 2.0 GiB.
constexpr double kProcessBytes = 2.0 * kGiB;

std::int64_t divided_up(std::int64_t count, std::int64_t by) { return (count + by - 1) / by; }

class Chooser {
 public:
  Chooser(const ExportSubject& subject, std::vector<std::string>& notes)
      : subject_(subject), plan_(subject.plan), shape_(shape_of(subject.model)), notes_(notes) {}

  DeepspeedChoices run() {
    choose_stage();
    choose_groups();
    choose_optimizer();
    choose_parameters();
    choose_sizes();
    choices_.fp32_accumulation = accumulates_in_fp32(choices_.stage);
    choose_partial_offload();
    choose_disk();
    note_placement();
    note_gradients();
    note_precision();
    note_update();
    note_memory();
    note_adapters();
    return choices_;
  }

 private:
  void note(std::string text) { notes_.push_back("deepspeed.json: " + std::move(text)); }
  bool narrow() const { return plan_.precision.weights != DType::fp32; }
  /// Of the optimizer; and of all weights.
  std::int64_t owned() const { return divided_up(shape_.trained, plan_.ranks); }
  std::int64_t owned_weights() const { return divided_up(shape_.parameters, plan_.ranks); }

  void choose_stage() {
    choices_.stage = plan_.zero_stage;
    if (plan_.zero_stage < 3 && plan_.optimizer.nvme > 0) {
      choices_.stage = 3;
      note(fmt::format("stage 3 instead of {}, because DeepSpeed reads and writes NVMe at stage 3 only.",
                       plan_.zero_stage));
    }
  }

  /// hpZ keeps a second 16-bit shard inside a group and everything else over all ranks. It needs 2/group + 4/ranks
  /// bytes a parameter (weights, gradients) where the plan has 4/group and more: never more memory, as long as both are
  /// on the GPU.
  void choose_groups() {
    if (plan_.zero_stage == 0 || plan_.shard_ranks == plan_.ranks) return;
    const bool on_gpu = plan_.parameters.hbm == plan_.parameters.total() && plan_.gradients == Tier::hbm;
    if (choices_.stage == 3 && plan_.zero_stage == 3 && on_gpu && plan_.shard_ranks > 1) {
      choices_.hpz_ranks = plan_.shard_ranks;
      if (plan_.engine == Engine::deepspeed) return;  // what the plan means
      note(fmt::format(
          "groups of {} ranks are hpZ: weights are gathered inside a group, gradients and optimizer states are "
          "sharded over all {} ranks (less memory, one gather a step between groups). MiCS, the plan's own form, "
          "trains up to DeepSpeed 0.19.2 only.",
          plan_.shard_ranks, plan_.ranks));
      return;
    }
    note(fmt::format("shards over all {} ranks instead of groups of {}: less memory, more traffic between groups.",
                     plan_.ranks, plan_.shard_ranks));
  }

  /// grad_accum_dtype fp32 costs nothing unsharded at stages 2 and 3 only: at stage 0 it is refused, at stage 1 every
  /// rank would hold all gradients in fp32; with the optimizer offloaded, stage 2 sums on the host in the model's type.
  bool accumulates_in_fp32(int stage) const {
    const bool offloaded = plan_.optimizer.hbm < plan_.optimizer.total();
    return narrow() && plan_.precision.accumulation == DType::fp32 && (stage == 3 || (stage == 2 && !offloaded));
  }

  void choose_optimizer() {
    const Placement& where = plan_.optimizer;
    if (where.hbm == where.total()) return;
    choices_.optimizer = where.nvme > 0 ? Tier::nvme : Tier::host;
  }

  void choose_parameters() {
    const Placement& where = plan_.parameters;
    if (where.hbm == where.total()) return;
    choices_.parameters = where.nvme > 0 ? Tier::nvme : Tier::host;
    if (where.hbm > 0) {
      note(fmt::format("all weight shards leave the GPU; the plan keeps {} of {} blocks there.", where.hbm,
                       where.total()));
    }
  }

  void choose_sizes() {
    const std::int64_t layer = std::max<std::int64_t>(shape_.largest_layer, 1);
    choices_.reduce_bucket = std::clamp(layer, kSmallestBucket, kLargestBucket);
    choices_.sub_group = std::min(owned(), choices_.optimizer == Tier::nvme ? kSwapSubGroup : kSubGroup);
    // DeepSpeed prefetches up to a bucket at every module's hook, and stops at max_live_parameters: that is the
    // look-ahead.
    choices_.prefetch_bucket = std::min(plan_.prefetch_layers * layer, kLargestPrefetch);
    choices_.live_parameters = (1 + plan_.prefetch_layers) * layer;
    // With recompute a window of two layers keeps a layer's weights from its recompute to its backward; without it any
    // window only keeps the end of the model alive from forward to backward.
    choices_.reuse_distance = plan_.recompute == Recompute::none ? 0 : 2 * layer;
    // Norms and biases stay gathered: many small messages less for 2 bytes a parameter of them.
    choices_.persistence_threshold = shape_.largest_vector;
    choices_.persistent_parameters = shape_.all_vectors;
    if (choices_.parameters != Tier::nvme) return;
    // A buffer holds one partition; a fetch needs one for each of a layer's parameters, and so does each layer read
    // ahead.
    choices_.swap_buffer = std::max<std::int64_t>(divided_up(shape_.largest_tensor, plan_.ranks), 1);
    choices_.swap_buffers = std::max<std::int64_t>(5, (1 + plan_.prefetch_layers) * shape_.layer_tensors + 2);
    const double on_host = share_of_first(subject_.model, plan_.parameters.hbm + plan_.parameters.host) -
                           share_of_first(subject_.model, plan_.parameters.hbm);
    choices_.max_in_cpu = static_cast<std::int64_t>(std::floor(on_host * static_cast<double>(owned_weights())));
  }

  Bytes host_capacity() const { return subject_.machine.usable_dram() * (1 - subject_.margin); }

  /// States partly on the GPU: all on the host if it has the room, else (stage 3) the share that surely fits the GPU
  /// there.
  void choose_partial_offload() {
    if (choices_.optimizer != Tier::host || plan_.optimizer.hbm == 0) return;
    const double kept = share_of_first(subject_.model, plan_.optimizer.hbm) *
                        plan_.precision.optimizer_bytes_per_parameter() / kPartialOffloadBytes;
    const bool fits = deepspeed_host_need(subject_, choices_).exact <= host_capacity();
    if (choices_.stage == 3 && choices_.parameters == Tier::hbm && !fits) {
      choices_.optimizer_ratio = std::clamp(std::ceil((1 - kept) * 100) / 100, 0.0, 1.0);
    }
  }

  /// DeepSpeed takes 18 to 20 bytes a parameter on the host where the plan takes 12 to 16. What the host has no room
  /// for goes to the node's NVMe, if that holds it.
  void choose_disk() {
    if (choices_.optimizer != Tier::host || choices_.optimizer_ratio < 1) return;
    const Bytes needed = deepspeed_host_need(subject_, choices_).exact;
    if (needed <= host_capacity()) return;
    DeepspeedChoices moved = choices_;
    moved.stage = 3;
    moved.optimizer = Tier::nvme;
    moved.fp32_accumulation = accumulates_in_fp32(3);
    moved.sub_group = std::min(owned(), kSwapSubGroup);
    if (disk_need(moved) > disk_capacity() || deepspeed_host_need(subject_, moved).exact > host_capacity()) return;
    note(
        fmt::format("optimizer states on NVMe{}: DeepSpeed would take {} of host memory a node, the machine leaves {}.",
                    choices_.stage < 3 ? " (stage 3)" : "", format_gib(needed), format_gib(host_capacity())));
    choices_ = moved;
  }

  void note_placement() {
    const Placement& where = plan_.optimizer;
    if (choices_.optimizer_ratio < 1) {
      note(
          fmt::format("ratio {:.2f} keeps about {:.0f} % of the optimizer states on the GPU, in whole sub-groups; the "
                      "host has no room "
                      "for all of them.",
                      choices_.optimizer_ratio, (1 - choices_.optimizer_ratio) * 100));
    } else if (choices_.optimizer == Tier::host && where.hbm > 0) {
      note(fmt::format("all optimizer states are on the host; the plan keeps {} of {} blocks on the GPU.", where.hbm,
                       where.total()));
    } else if (choices_.optimizer == Tier::nvme && where.nvme > 0 && where.nvme < where.total()) {
      note(fmt::format("all optimizer states are on NVMe; the plan has {} of {} blocks there.", where.nvme,
                       where.total()));
    }
  }

  void note_gradients() {
    if (plan_.accumulation > 1 && choices_.stage == 1 && plan_.reduce_each == ReduceEach::micro_step) {
      note("stage 1 reduces gradients once a step, not in every micro-step.");
    }
    if (plan_.precision.accumulation != DType::fp32 || !narrow() || choices_.fp32_accumulation) return;
    note(fmt::format("gradients are summed over micro-steps in {} instead of fp32{}.",
                     to_string(plan_.precision.gradients),
                     choices_.stage == 0   ? ": stage 0 has no other type"
                     : choices_.stage == 1 ? ": at stage 1 fp32 would cost 4 bytes a parameter on every rank"
                                           : ": stage 2 has no other type with an offloaded optimizer"));
  }

  void note_precision() {
    const Precision& precision = plan_.precision;
    if (precision.split_master) note("a whole fp32 master copy instead of a split one: 2 more bytes a parameter.");
    if (precision.states == DType::bf16) note("fp32 Adam states instead of bf16: 4 more bytes a parameter.");
    if (!narrow() && choices_.stage > 0)
      note("DeepSpeed keeps a separate fp32 master beside fp32 weights: 4 more bytes a parameter.");
  }

  void note_update() {
    if (choices_.optimizer != Tier::hbm && plan_.update == UpdateOn::device) {
      note("Adam runs on the CPU; the plan streams the states through the GPU.");
    }
    const std::int64_t tokens = plan_.micro_step().tokens();
    // Predictions of other engines have the plain loss in them.
    if (plan_.engine == Engine::zeroplan && subject_.model.vocab > 0 && tokens > plan_.loss_chunk_tokens) {
      // Logits and the loss's copies live at once in backward: 14 bytes a token and word (torch 2.11, measured).
      note(fmt::format(
          "the plan computes the loss {} tokens at a time; a plain one takes {} for logits on each GPU. Use a fused "
          "or chunked cross-entropy.",
          plan_.loss_chunk_tokens,
          noted_gib(Bytes(14.0 * static_cast<double>(tokens) * static_cast<double>(subject_.model.vocab)))));
    }
    if (choices_.stage == 3) {
      const Bytes weights = bytes_of(shape_.parameters, plan_.precision.weights);
      note(
          fmt::format("create TrainingArguments before from_pretrained(), or use deepspeed.zero.Init: otherwise each "
                      "GPU first holds "
                      "all weights ({}).",
                      noted_gib(weights)));
    }
    if (plan_.recompute == Recompute::none) return;
    const bool whole = plan_.recompute == Recompute::full && plan_.recompute_layers == subject_.model.num_layers;
    note(fmt::format("turn gradient checkpointing on in the training script (DeepSpeed has no key for it){}.",
                     whole
                         ? ""
                         : fmt::format("; it recomputes every layer, the plan {} of {} layers ({})",
                                       plan_.recompute_layers, subject_.model.num_layers, to_string(plan_.recompute))));
  }

  /// Model states on one GPU at their highest: 0.19's own formulas, without activations, buckets and gathered layers.
  Bytes gpu_states() const {
    const auto all = static_cast<double>(shape_.parameters), own = static_cast<double>(owned());
    const double weights = size_of(plan_.precision.weights);
    const double trained = static_cast<double>(shape_.trained), frozen = static_cast<double>(owned_weights()) - own;
    if (choices_.stage == 0) return Bytes(trained * (narrow() ? 24 : 16) + (all - trained) * weights);
    if (choices_.stage < 3) {
      if (choices_.optimizer != Tier::hbm) return Bytes(all * weights);
      return Bytes(all * weights + own * (choices_.fp32_accumulation ? 16 : narrow() ? 20 : 24));
    }
    if (choices_.parameters != Tier::hbm) return Bytes();
    if (choices_.optimizer != Tier::hbm)
      return Bytes(frozen * weights + own * (weights + (1 - choices_.optimizer_ratio) * kPartialOffloadBytes));
    const double gradient = choices_.fp32_accumulation ? 4 : weights;
    return Bytes(frozen * weights + own * (weights + 12 + gradient));
  }

  void note_memory() {
    const Bytes gpu = gpu_states();
    const Bytes gpu_capacity = subject_.machine.gpu.memory * (1 - subject_.margin);
    if (gpu > gpu_capacity) {
      note(fmt::format(
          "does not fit: DeepSpeed's states alone take {} of each GPU's {} at the step, before activations.",
          format_gib(gpu), format_gib(gpu_capacity)));
    }
    if (choices_.optimizer == Tier::hbm && choices_.parameters == Tier::hbm) return;
    const HostNeed host = deepspeed_host_need(subject_, choices_);
    if (host.exact > host_capacity()) {
      note(fmt::format(
          "does not fit: DeepSpeed takes {} of host memory a node for this (18 to 20 bytes a parameter on the CPU), "
          "the machine leaves {}.",
          format_gib(host.exact), format_gib(host_capacity())));
    }
    if (choices_.optimizer == Tier::nvme || choices_.parameters == Tier::nvme) note_disk();
  }

  void note_adapters() {
    if (plan_.lora_rank == 0) return;
    note(
        fmt::format("wrap the model with peft in the training script: LoraConfig(r={}, "
                    "target_modules=\"all-linear\"); DeepSpeed has no key for it.",
                    plan_.lora_rank));
  }

  /// Master, moments and gradients: 16 bytes an element; weights in their own type.
  Bytes disk_need(const DeepspeedChoices& choices) const {
    const double states = choices.optimizer == Tier::nvme ? 16 * static_cast<double>(owned()) : 0;
    const double weights =
        choices.parameters == Tier::nvme ? size_of(plan_.precision.weights) * static_cast<double>(owned_weights()) : 0;
    return Bytes((states + weights) * subject_.ranks_per_node());
  }
  Bytes disk_capacity() const { return subject_.machine.nvme.capacity * (1 - subject_.margin); }

  void note_disk() {
    const Bytes disk = disk_need(choices_);
    if (disk <= disk_capacity()) return;
    note(fmt::format("does not fit: DeepSpeed writes {} of NVMe a node, the machine has {}.", format_gib(disk),
                     format_gib(subject_.machine.nvme.capacity)));
  }

  const ExportSubject& subject_;
  const Plan& plan_;
  ModelShape shape_;
  std::vector<std::string>& notes_;
  DeepspeedChoices choices_;
};

/// Sums one rank's host blocks: as asked for, and as torch's pinned allocator rounds them.
struct HostSum {
  double exact = 0, rounded = 0;
  void pageable(double bytes) { exact += bytes, rounded += bytes; }
  void pinned(double bytes, double blocks = 1) {
    exact += bytes * blocks;
    rounded += static_cast<double>(std::bit_ceil(static_cast<std::uint64_t>(bytes))) * blocks;
  }
};

/// Stages 1 and 2: master, fp32 gradient and 16-bit staging pinned, moments pageable, one temporary of the largest
/// tensor, and with accumulation one gradient buffer for each parameter.
void add_optimizer_below_3(const Plan& plan, const ModelShape& shape, double own, HostSum& sum) {
  const double weights = size_of(plan.precision.weights);
  sum.pinned(4 * own), sum.pinned(4 * own), sum.pinned(weights * own);
  sum.pageable(8 * own);
  sum.pinned(weights * static_cast<double>(shape.largest_tensor));
  if (plan.accumulation > 1) sum.pinned(weights * own);
}

/// Stage 3: master and moments pageable, fp32 gradients pinned by sub-group, the gradient buffer pinned; on NVMe the
/// states are in page-locked swap buffers of exact size and only the gradient buffer stays.
void add_optimizer_at_3(const Plan& plan, const DeepspeedChoices& choices, double own, HostSum& sum) {
  const double gradient = choices.fp32_accumulation ? 4 : size_of(plan.precision.weights);
  sum.pinned(gradient * own);
  const auto group = static_cast<double>(choices.sub_group);
  if (choices.optimizer == Tier::nvme) {
    sum.pageable(4 * group * static_cast<double>(kOptimizerSwapBuffers));
    return;
  }
  const double on_host = own * choices.optimizer_ratio, groups = std::floor(on_host / group);
  sum.pageable(12 * on_host);
  sum.pinned(4 * group, groups);
  sum.pinned(4 * (on_host - groups * group));
}

}  // namespace

DeepspeedChoices choose_deepspeed(const ExportSubject& subject, std::vector<std::string>& notes) {
  return Chooser(subject, notes).run();
}

HostNeed deepspeed_host_need(const ExportSubject& subject, const DeepspeedChoices& choices) {
  const Plan& plan = subject.plan;
  const ModelShape shape = shape_of(subject.model);
  const auto own = static_cast<double>(divided_up(shape.trained, plan.ranks));
  const auto held = static_cast<double>(divided_up(shape.parameters, plan.ranks));
  const double weights = size_of(plan.precision.weights);
  HostSum sum;
  sum.pageable(kProcessBytes);
  if (choices.optimizer != Tier::hbm && choices.stage < 3) add_optimizer_below_3(plan, shape, own, sum);
  if (choices.optimizer != Tier::hbm && choices.stage == 3) add_optimizer_at_3(plan, choices, own, sum);
  if (choices.parameters == Tier::host) {
    sum.pinned(weights * held);
    sum.rounded +=
        2 * weights * held;  // the parameters' first blocks stay in torch's cache, rounded up to twice their size
  } else if (choices.parameters == Tier::nvme) {
    sum.pageable(weights * static_cast<double>(choices.swap_buffer * choices.swap_buffers));
    sum.pinned(weights * static_cast<double>(choices.max_in_cpu + choices.sub_group));
  }
  return {Bytes(sum.exact) * subject.ranks_per_node(), Bytes(sum.rounded) * subject.ranks_per_node()};
}

}  // namespace zeroplan
