#include "planner/validate_memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "models/error.h"
#include "planner/engine_fit.h"
#include "planner/validate_step_time_rows.h"

namespace zeroplan {
namespace {

/// A row as a run that the engines can be asked about.
struct Lowered {
  MeasuredStep step;
  EngineWorkload workload;
  bool ran = true;      // it fitted
  std::string assumed;  // what the row leaves open, taken for what needs least; empty: nothing
  bool bound = false;   // the prediction is a lower bound: only "does not fit" says something
};

/// Whether the run fitted. Throws InputError when the row does not say.
bool ran(const Cells& cells) {
  const std::string& status = cells.text("status");
  if (status == "ok") return true;
  if (cells.contains("status", "host")) throw InputError("the host's memory ran out; its size is not stated");
  if (cells.contains("status", "oom") || cells.contains("status", "memory")) return false;
  throw InputError("whether it fitted is not stated (" + status + ")");
}

void refuse_what_memory_lacks(const Cells& cells, const EngineTimeRun& run) {
  if (run.tensor_parallel > 1) throw InputError("tensor parallelism");
  if (run.fp8) throw InputError("fp8: its casts are not in the graph");
  if (run.stack == KernelStack::compiled_blocks || run.stack == KernelStack::compiled_graph)
    throw InputError("torch.compile keeps other tensors than eager PyTorch");
  if (run.offload_optimizer == OffloadedOptimizer::states) throw InputError("states on the host, update on the GPU");
  if (cells.contains("extra_notes", "chunked cross")) throw InputError("cross-entropy in chunks");
  if (cells.contains("offload_optimizer", "nvme") || cells.contains("offload_param", "nvme"))
    throw InputError("where NVMe takes over is not stated");
  if (cells.contains("framework", "Liger")) throw InputError("Liger's fused loss and layers");
  for (const std::string_view maximum : {"max source/target", "variable-length", "lengths may be shorter"})
    if (cells.contains("extra_notes", maximum))
      throw InputError("the sequence is a maximum, real lengths are not stated");
  if (run.quantized_weights || run.quantized_gradients) throw InputError("ZeRO++: quantized collectives");
}

/// A slip in a cell is no run: its graph would not end, or its bytes not fit into 64 bits.
void refuse_sizes(const MeasuredStep& step) {
  constexpr std::int64_t kLayers = 1000, kTokens = 100'000'000, kWidth = 1'000'000;
  const TokenShape& tokens = step.run.tokens;
  if (step.model->num_layers > kLayers || step.model->hidden > kWidth || step.model->vocab > 10 * kWidth)
    throw InputError("no model is that large");
  if (tokens.batch > kTokens || tokens.seq_len > kTokens || tokens.tokens() > kTokens ||
      step.run.remainder_batch > kTokens || step.run.accumulation > kTokens)
    throw InputError("no micro-batch is that large");
}

EagerCode code_of(KernelStack stack) {
  if (stack == KernelStack::composer) return EagerCode::llm_foundry;
  if (stack == KernelStack::megatron) return EagerCode::megatron;
  return stack == KernelStack::composer_fp32 ? EagerCode::llm_foundry_early : EagerCode::transformers;
}

void set_recompute(const Cells& cells, Lowered& row) {
  EngineWorkload& w = row.workload;
  const bool stated = cells.stated("activation_checkpointing") || cells.contains("extra_notes", "no checkpointing");
  const bool trainer = cells.contains("framework", "HF Trainer");  // off unless asked for
  const TimedRecompute recompute = stated    ? row.step.run.recompute
                                   : trainer ? TimedRecompute::none
                                             : TimedRecompute::full;
  if (!stated && !trainer) row.assumed += "checkpointing; ";
  w.checkpointing = recompute != TimedRecompute::none;
  w.keeps_operators = recompute == TimedRecompute::selective;
  w.offloads_checkpoints = row.step.run.offload_activations && w.checkpointing;
  w.checkpoint_every = recompute == TimedRecompute::second_layer ? 2 : 1;
}

/// What transformers or llm-foundry run with what the row says.
void set_workload(const Cells& cells, Lowered& row) {
  const EngineTimeRun& run = row.step.run;
  EngineWorkload& w = row.workload;
  w.tokens = run.tokens;
  w.accumulation = run.accumulation;
  if (w.accumulation == 0) {  // the micro-batch is larger than what there is
    w.tokens.batch = run.remainder_batch;
    w.accumulation = 1;
  }
  w.ranks = run.ranks;
  w.type = run.type;
  w.code = code_of(run.stack);
  if (w.code == EagerCode::llm_foundry || w.code == EagerCode::llm_foundry_early) {
    w.attention = EagerAttention::sdpa;
  } else if (run.attention == AttentionSoftware::unfused || run.attention == AttentionSoftware::eager) {
    w.attention = EagerAttention::eager;
  }
  set_recompute(cells, row);
}

Lowered lowered(const CsvTable& table, const CsvTable::Row& source, PublishedRows& rows) {
  const Cells cells(table, source);
  if (!cells.whole()) throw InputError("more or fewer cells than the header");
  Lowered row;
  row.ran = ran(cells);
  if (cells.contains("value_kind", "recalled")) throw InputError("no evidence (recalled)");
  row.step = rows.read_run(source, row.ran ? Unstated::refused : Unstated::one_token);
  row.step.row = cells.text("row_id") + ": " + row.step.row;
  row.step.machine.sockets = 1;  // rows do not say what joins two, and memory does not depend on it
  refuse_what_memory_lacks(cells, row.step.run);
  refuse_sizes(row.step);
  if (!cells.stated("micro_batch")) row.assumed += "micro-batch 1; ";
  if (!cells.stated("seq_len")) row.assumed += "1 token; ";
  set_workload(cells, row);
  return row;
}

/// Of DeepSpeed; HF Trainer and what stands on it ship configurations whose bucket sizes are "auto".
std::string deepspeed_text(const Cells& cells, const EngineTimeRun& run) {
  const std::string& framework = cells.text("framework");
  const bool automatic = framework.starts_with("HF Trainer") || framework.starts_with("ms-swift") ||
                         framework.starts_with("LLaMA-Factory");
  const std::string buckets = !automatic ? ""
                              : run.stage < 3
                                  ? R"(, "reduce_bucket_size": "auto")"
                                  : R"(, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                                 "stage3_param_persistence_threshold": "auto")";
  const std::string precision =
      run.type == DType::fp32 ? "" : fmt::format(R"("{}": {{"enabled": true}}, )", to_string(run.type));
  const std::string optimizer =
      run.offload_optimizer == OffloadedOptimizer::host ? R"(, "offload_optimizer": {"device": "cpu"})" : "";
  const std::string parameters = run.offload_parameters ? R"(, "offload_param": {"device": "cpu"})" : "";
  return fmt::format(
      R"({{{}"train_micro_batch_size_per_gpu": {}, "gradient_accumulation_steps": {},
          "zero_optimization": {{"stage": {}{}{}{}}}}})",
      precision, std::max<std::int64_t>(run.tokens.batch, 1), std::max<std::int64_t>(run.accumulation, 1), run.stage,
      optimizer, parameters, buckets);
}

/// FSDP1 is taken for FSDP2: the same units, types, gathers and reductions (docs/accuracy.md). Stage 0 is DDP, of which
/// FSDP2 on one rank is less: weights, gradients and moments without DDP's buckets and autocast's copies.
Fsdp2Options fsdp_options(const Cells& cells, Lowered& row) {
  const EngineTimeRun& run = row.step.run;
  Fsdp2Options options;
  options.ranks = run.ranks;
  options.shard_ranks = run.shard_ranks;
  options.compute = run.type;
  options.reduction = run.reduction;
  options.reshard_after_forward = options.reshard_root = run.stage == 3 && !cells.contains("zero_variant", "never");
  options.offload = run.offload_parameters;
  if (!options.offload && cells.contains("extra_notes", "foreach")) options.adam = AdamForm::foreach;
  if (cells.contains("precision", "parameters in bf16") || cells.contains("precision", "bf16-true"))
    options.parameters = options.reduction = run.type;
  if (!cells.stated("precision")) {
    row.assumed += "16-bit weights and states; ";
    options.parameters = options.reduction = run.type;
  }
  if (run.stage == 0) {
    options.ranks = 1;
    row.workload.ranks = 1;
    row.bound = true;
  }
  return options;
}

class Fits {
 public:
  explicit Fits(double margin) : margin_(margin) {}
  EngineFit of(const Cells& cells, Lowered& row) {
    const MeasuredStep& step = row.step;
    if (model_ != step.model || machine_.name != step.machine.name || machine_.nodes != step.machine.nodes) {
      model_ = step.model;
      machine_ = step.machine;
      fitter_ = std::make_unique<EngineFitter>(*model_, machine_, margin_);
    }
    if (step.run.engine == TimedEngine::deepspeed)
      return fitter_->deepspeed_text(deepspeed_text(cells, step.run), row.workload);
    const Fsdp2Options options = fsdp_options(cells, row);
    return fitter_->fsdp2(options, row.workload);
  }

 private:
  double margin_;
  std::shared_ptr<const ModelSpec> model_;
  MachineSpec machine_;
  std::unique_ptr<EngineFitter> fitter_;
};

Verdict verdict_of(const Cells& cells, const Lowered& row, const EngineFit& fit) {
  Verdict verdict;
  verdict.line = row.step.line;
  verdict.id = cells.text("row_id");
  verdict.row = row.step.row;
  verdict.measured_fits = row.ran;
  verdict.predicted_fits = fit.gpu != GpuVerdict::does_not_fit;
  verdict.need = fit.reserved_low + fit.overhead;
  verdict.capacity = fit.capacity;
  if (!verdict.predicted_fits) verdict.why = fit.failed_at + ": " + fit.failure;
  return verdict;
}

/// The counter that the row's peak was read from; nothing when it does not say.
std::optional<Measured> counter_of(const Cells& cells) {
  const std::string& kind = cells.text("mem_kind");
  if (kind.starts_with("max reserved by CUDA")) return Measured::published_reserved;
  if (kind.starts_with("peak allocated") || kind.starts_with("torch peak allocated") ||
      kind.find("max_memory_allocated") != std::string::npos)
    return Measured::published_allocated;
  return kind.starts_with("nvidia-smi used") ? std::optional(Measured::published_used) : std::nullopt;
}

std::optional<Comparison> comparison_of(const Cells& cells, const Lowered& row, const EngineFit& fit) {
  const std::optional<Measured> counter = counter_of(cells);
  if (!counter || !cells.stated("peak_mem_gib") || !row.assumed.empty() || row.bound) return std::nullopt;
  Comparison comparison;
  comparison.quantity = *counter;
  comparison.line = row.step.line;
  comparison.row = row.step.row;
  comparison.measured = Bytes(cells.number("peak_mem_gib") * kGiB);
  comparison.predicted = *counter == Measured::published_allocated ? fit.allocated
                         : *counter == Measured::published_reserved
                             ? fit.reserved
                             : std::min(fit.device(), row.step.machine.gpu.memory);
  return comparison;
}

}  // namespace

PublishedMemory read_published_memory(std::string_view text, const std::string& name, double margin) {
  const CsvTable table = CsvTable::parse(text, name);
  PublishedMemory result;
  for (const std::string_view column : {"status", "model", "framework", "gpu", "n_gpus"})
    if (!table.has(column)) return result;
  PublishedRows rows(table);
  Fits fits(margin);
  for (const CsvTable::Row& source : table.rows()) {
    const Cells cells(table, source);
    try {
      Lowered row = lowered(table, source, rows);
      const EngineFit fit = fits.of(cells, row);
      const Verdict verdict = verdict_of(cells, row, fit);
      if (verdict.predicted_fits && row.bound) throw InputError("DDP: only a lower bound is known, and it fits");
      if (verdict.predicted_fits && !row.ran && !row.assumed.empty())
        throw InputError(
            fmt::format("not enough is stated: it fits with {}", row.assumed.substr(0, row.assumed.size() - 2)));
      result.verdicts.push_back(verdict);
      if (const auto comparison = comparison_of(cells, row, fit)) result.comparisons.push_back(*comparison);
    } catch (const InputError& error) {
      result.skipped.push_back({source.line, rows.describe(source), error.what()});
    }
  }
  return result;
}

}  // namespace zeroplan
