// What the figures of a prediction mean: symptoms, which knobs cannot help, what the stage costs, what is not in them.

#include <fmt/format.h>

#include <algorithm>

#include "planner/check_parts.h"
#include "planner/lint_parts.h"

namespace zeroplan {
namespace {

using Remarks = std::vector<std::string>;

constexpr double kNoticeable = 0.02;  // of a GPU's memory: below it a term is not worth a sentence

std::string gb(Bytes bytes) { return fmt::format("{:.1f} GB", bytes.base() / 1e9); }

std::string ranks_text(int ranks) { return ranks == 1 ? "1 rank" : fmt::format("{} ranks", ranks); }

/// How running out shows, so that the right memory is looked at.
void symptoms(const RunPrediction& run, Remarks& remarks) {
  const EngineFit& fit = *run.memory;
  if (!fit.host_fits()) {
    remarks.push_back(fmt::format(
        "The host runs out: Linux kills a process, which shows as exit code -9 (SIGKILL) without a traceback, whatever "
        "the GPU has free ({} here). torch.OutOfMemoryError is the GPU's.",
        format_gib(std::max(Bytes(), fit.capacity - fit.reserved_low - fit.overhead))));
  } else if (fit.gpu == GpuVerdict::does_not_fit) {
    remarks.push_back(
        "The GPU runs out: torch.OutOfMemoryError in a rank's traceback. Exit code -9 would be the host.");
  }
}

const StageRow* row_of(const CheckPrediction& p, int stage) {
  const auto found = std::ranges::find(p.stages, stage, &StageRow::stage);
  return found == p.stages.end() ? nullptr : &*found;
}

/// A higher stage that needs more than a lower one.
void stage_order(const CheckPrediction& p, const CheckInput& input, int stage, Remarks& remarks) {
  const StageRow* own = row_of(p, stage);
  if (own == nullptr || stage == 0) return;
  const StageRow* least = own;
  for (const StageRow& row : p.stages) {
    if (row.stage < stage && row.run.memory->allocated < least->run.memory->allocated) least = &row;
  }
  const Bytes difference = own->run.memory->allocated - least->run.memory->allocated;
  if (difference < input.machine->gpu.memory * (kNoticeable / 4)) return;
  const std::string more = format_gib(difference);
  const std::string ranks = ranks_text(p.run.workload.ranks);
  remarks.push_back(
      stage == 3
          ? fmt::format("Stage 3 allocates {} more than stage {}: gathered layers, prefetch and the permanent bucket "
                        "outweigh the share of weights that it saves on {}.",
                        more, least->stage, ranks)
          : fmt::format("Stage {} allocates {} more than stage {}: its bucket is there in backward, when activations "
                        "peak, and outweighs the share of states that it saves on {}. contiguous_gradients "
                        "false, a smaller reduce_bucket_size or checkpointing lower it.",
                        stage, more, least->stage, ranks));
}

/// Which bytes a parameter are counted, and why: papers say 16, frameworks 14 to 24.
void states(const CheckPrediction& p, const CheckInput& input, const DeepSpeedConfig& config, Remarks& remarks) {
  if (p.run.workload.lora_rank > 0) return;
  const GpuStates all = gpu_states(config, input.model->parameters(), sharding_ranks(config, input.machine->ranks()));
  remarks.push_back(fmt::format("Model states on a GPU in the step: {} ({}).", format_gib(all.bytes), all.arithmetic));
}

/// What sharding saves of the states beside the buckets it needs, and the model size from which it pays.
void crossover(const CheckPrediction& p, const CheckInput& input, const DeepSpeedConfig& config, Remarks& remarks) {
  if (config.stage == 0 || p.run.workload.lora_rank > 0) return;
  const int ranks = sharding_ranks(config, input.machine->ranks());
  DeepSpeedConfig bare = config, unsharded = config;
  bare.reduce_bucket = 0;
  unsharded.stage = 0;
  constexpr std::int64_t kSample = 1'000'000'000;  // states are linear in the parameters
  const Bytes each = gpu_states(unsharded, kSample, ranks).bytes - gpu_states(bare, kSample, ranks).bytes;
  // Stage 3 keeps one of the communication's type (5.3), stages 1 and 2 have theirs in the weights' (4.4).
  const bool below_3 = config.stage < 3;
  const bool bucketed = config.contiguous_gradients || (below_3 && config.optimizer_on_host());
  const int copies = !bucketed ? 0 : below_3 && config.overlap_comm ? 2 : 1;
  const DType type = below_3 ? config.precision : config.communication.value_or(config.precision);
  const Bytes buffers = bytes_of(config.reduce_bucket, type) * copies;
  const double saved = each.base() / kSample;
  if (ranks > 1 && saved <= 0) return;
  const double crossing = saved > 0 ? buffers.base() / saved : 0;
  const auto parameters = static_cast<double>(input.model->parameters());
  if (crossing <= parameters) return;
  remarks.push_back(
      fmt::format("Below about {} parameters the buffers of stage {} ({}) outweigh the {:.1f} bytes a parameter that "
                  "it saves on {}: this model has {}. Stage 0, or a smaller reduce_bucket_size.",
                  format_count(static_cast<std::int64_t>(crossing)), config.stage, format_gib(buffers),
                  std::max(0.0, saved), ranks_text(ranks), format_count(input.model->parameters())));
}

/// Stage 3 gathers whole tensors: no bucket, sequence or overlap makes the largest smaller.
void largest_request(const CheckPrediction& p, const CheckInput& input, const DeepSpeedConfig& config,
                     std::int64_t largest, Remarks& remarks) {
  if (config.stage != 3 || p.run.workload.ranks == 1) return;
  const Bytes bytes = bytes_of(largest, config.precision);
  if (bytes < input.machine->gpu.memory * (kNoticeable / 4)) return;
  remarks.push_back(fmt::format(
      "The largest tensor is gathered in one piece: {} elements, {:.0f} MiB ({}). Sequence, micro-batch, buckets and "
      "overlap_comm do not change that request.",
      format_count(largest), bytes.base() / kMiB,
      largest > input.model->vocab * input.model->hidden ? "a layer's stack of experts or its largest matrix"
                                                         : "the embedding or the head"));
}

/// Knobs that were turned alone and moved nothing.
void idle_knobs(const CheckPrediction& p, Remarks& remarks) {
  std::vector<std::string> idle;
  for (const Gain& gain : p.gains) {
    const bool nothing = gain.allocated.base() < 0.001 * kGiB && gain.reserved.base() < 0.001 * kGiB;
    if (nothing && p.run.memory->host_fits()) idle.push_back(gain.changes.front().key);
  }
  if (idle.empty()) return;
  remarks.push_back(fmt::format("Turned alone, {} give{} nothing back on the GPU: the peak is made of other things.",
                                fmt::join(idle, ", "), idle.size() == 1 ? "s" : ""));
}

void adapters(const CheckPrediction& p, const CheckInput& input, const DeepSpeedConfig& config, Remarks& remarks) {
  if (p.run.workload.lora_rank == 0) return;
  const Bytes whole = bytes_of(input.model->parameters(), config.precision);
  const int ranks = p.run.workload.ranks;
  if (config.stage == 3) {
    remarks.push_back(fmt::format(
        "The frozen base is {} a GPU when stage 3 shards it, {} when deepspeed.zero.Init was not active while it was "
        "loaded; quantized weights are never sharded ({} in 8 bits, {} in 4). To see which: a sharded parameter has "
        "numel() 0 and its size in ds_numel.",
        gb(whole / ranks), gb(whole), gb(Bytes(static_cast<double>(input.model->parameters()))),
        gb(Bytes(static_cast<double>(input.model->parameters()) / 2))));
    remarks.push_back(fmt::format(
        "Saving the adapters takes {}. Gathering the base to save it takes {} of rank 0's host memory, layer by layer "
        "through the GPU.",
        gb(p.storage->weights), gb(whole)));
  } else {
    remarks.push_back(
        fmt::format("Stages 0 to 2 keep the frozen base whole on each GPU: {}; they shard the adapters' "
                    "states only.",
                    gb(whole)));
  }
  remarks.push_back(
      "Embeddings or a head trained beside adapters (modules_to_save) are not in it; several frameworks "
      "refuse them at stage 3.");
}

void loss(const CheckPrediction& p, const CheckInput& input, const LossBlocks& blocks, Remarks& remarks) {
  if (blocks.held < input.machine->gpu.memory * kNoticeable) return;
  constexpr std::int64_t kChunk = 1024;  // tokens; a usual chunk
  const std::int64_t tokens = p.run.workload.tokens.batch * p.run.workload.tokens.seq_len;
  remarks.push_back(fmt::format(
      "The loss: {} tokens x {} words are {} in fp32; {} such block{} and {} in 16 bits live at once {}, {}. A loss in "
      "chunks of {} tokens (fused or chunked cross-entropy) holds {} a block.",
      format_count(tokens), format_count(input.model->vocab), format_gib(blocks.block), blocks.fp32,
      blocks.fp32 == 1 ? "" : "s", blocks.half, blocks.in_backward ? "as backward begins" : "in forward",
      format_gib(blocks.held), kChunk,
      format_gib(logits_bytes(std::min(tokens, kChunk), input.model->vocab, DType::fp32))));
}

/// Attention that writes its scores out: what a stack without SDPA or FlashAttention would take on top.
void scores(const CheckPrediction& p, const CheckInput& input, Remarks& remarks) {
  if (usual_attention(*input.model) == EagerAttention::eager) return;
  std::int64_t heads = 0;
  for (const BlockKind& kind : input.model->kinds) {
    for (const GraphOp& op : kind.ops) heads = std::max(heads, op.attention.heads);
  }
  const TokenShape t = p.run.workload.tokens;
  const Bytes each(static_cast<double>(t.batch) * static_cast<double>(heads) * static_cast<double>(t.seq_len) *
                   static_cast<double>(t.seq_len) * size_of(DType::fp32));
  if (each < input.machine->gpu.memory * kNoticeable) return;
  remarks.push_back(fmt::format(
      "With SDPA or FlashAttention. Attention that writes its scores out (attn_implementation \"eager\") asks for {} x "
      "{} x {} in fp32, {}, two to three times in each layer.",
      format_count(t.batch * heads), format_count(t.seq_len), format_count(t.seq_len), format_gib(each)));
}

/// How much a micro-step gathers: once to three times the weights, by what is kept between uses.
std::string gathers_text(const CheckPrediction& p, const CheckInput& input, const DeepSpeedConfig& config) {
  if (config.stage != 3) return "";
  if (!p.run.memory) return " and gathers weights in each";
  const Bytes all =
      bytes_of(input.model->parameters(), config.precision) * static_cast<double>(p.run.workload.accumulation);
  return fmt::format(" and gathers {:.1f} x the weights in each", p.run.memory->prediction.traffic.all_gather / all);
}

void reductions(const CheckPrediction& p, const CheckInput& input, const DeepSpeedConfig& config, Remarks& remarks) {
  if (config.stage < 2 || p.run.workload.accumulation == 1 || p.run.workload.ranks == 1) return;
  const StageRow* first = row_of(p, 1);
  remarks.push_back(
      fmt::format("Stage {} reduces gradients in each of the {} micro-steps{}; stage 1 once a step{}.", config.stage,
                  p.run.workload.accumulation, gathers_text(p, input, config),
                  first != nullptr && first->run.memory->fits() ? ", and it fits here: on slow links prefer it" : ""));
}

void offload(const RunPrediction& run, const DeepSpeedConfig& config, Remarks& remarks) {
  if (!config.optimizer_on_host()) return;
  remarks.push_back(
      "Start it with deepspeed --bind_cores_to_rank: CPU Adam of ranks on each other's cores is slower (1.3 x in "
      "DeepSpeed PR 7474).");
  if (run.memory && run.memory->host_fits() && run.memory->host > run.memory->host_capacity * 0.9) {
    remarks.push_back(
        "The host is within 10 % of its limit; loading comes on top of it (above). More than 90 % is at risk.");
  }
}

void pressure(const RunPrediction& run, Remarks& remarks) {
  const EngineFit& fit = *run.memory;
  const Bytes least = fit.reserved_low + fit.overhead;
  if (!fit.fits() || least <= fit.capacity * 0.9) return;
  remarks.push_back(fmt::format(
      "{:.0f} % of what the card gives is in use: PyTorch's allocator flushes its cache when a request finds no room, "
      "a "
      "standstill each time (\"cache flushes\" in DeepSpeed's log). What each change gives back stands above.",
      100 * (std::min(least, fit.capacity) / fit.capacity)));
}

}  // namespace

std::int64_t largest_gather(const EagerStep& step) {
  std::int64_t largest = 0;
  for (const EagerParameter& parameter : step.parameters) largest = std::max(largest, parameter.elements);
  return largest;
}

std::int64_t largest_module(const EagerStep& step) {
  std::int64_t largest = 0;
  for (const EagerModule& module : step.modules) {
    std::int64_t own = 0;
    for (const int p : module.parameters) own += step.parameters[static_cast<std::size_t>(p)].elements;
    largest = std::max(largest, own);
  }
  return largest;
}

std::vector<std::string> check_remarks(const CheckPrediction& p, const CheckInput& input, const DeepSpeedConfig& config,
                                       const StepFacts& facts) {
  Remarks remarks;
  if (p.run.memory) {
    symptoms(p.run, remarks);
    pressure(p.run, remarks);
    stage_order(p, input, config.stage, remarks);
    idle_knobs(p, remarks);
    loss(p, input, facts.loss, remarks);
  }
  states(p, input, config, remarks);
  crossover(p, input, config, remarks);
  largest_request(p, input, config, facts.largest, remarks);
  adapters(p, input, config, remarks);
  scores(p, input, remarks);
  reductions(p, input, config, remarks);
  offload(p.run, config, remarks);
  return remarks;
}

}  // namespace zeroplan
