#include "planner/check_prediction_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "planner/check_explained_report.h"
#include "planner/lint_report.h"
#include "planner/report_layout.h"

namespace zeroplan {
namespace {

using Json = nlohmann::ordered_json;

const StepMemory* steady(const EngineFit& fit) {
  const auto& steps = fit.prediction.memory.steps;
  return steps.empty() ? nullptr : &steps.back();
}

double tokens_per_second(const RunPrediction& run) {
  const double tokens = static_cast<double>(run.global_batch()) * static_cast<double>(run.workload.tokens.seq_len);
  return tokens / run.time->step.base();
}

std::string verdict_of(const EngineFit& fit) {
  if (fit.gpu == GpuVerdict::does_not_fit) return fmt::format("does not fit: {}: {}", fit.failed_at, fit.failure);
  if (!fit.host_fits()) return "does not fit: the host is too small";
  if (fit.gpu == GpuVerdict::fits) return "fits";
  if (fit.fits_in_step()) {
    return "fits; when the host runs far ahead, PyTorch reserves all of the card and gives cached memory back, a "
           "standstill each time";
  }
  return fmt::format(
      "fits only after the allocator gives cached memory back ({} times in the first steps, each a "
      "standstill)",
      fit.flushes);
}

std::string run_text(const RunPrediction& run) {
  const EngineWorkload& w = run.workload;
  return fmt::format("micro-batch {} x {}, {} tokens, {}, {}{}{}", w.tokens.batch, w.accumulation, w.tokens.seq_len,
                     to_string(w.type), w.checkpointing ? "every layer checkpointed" : "no checkpointing",
                     w.lora_rank > 0 ? fmt::format(", LoRA of rank {}", w.lora_rank) : "",
                     w.allocator_conf.empty() ? "" : ", PYTORCH_CUDA_ALLOC_CONF=" + w.allocator_conf);
}

std::string line_of(std::string_view name, const std::string& value) {
  return fmt::format("  {:<22} {}\n", name, value);
}

std::string reserved_text(const EngineFit& fit) {
  if (fit.reserved_low >= fit.reserved_high) return format_gib(fit.reserved);
  return fmt::format("{} on a card without limit ({} to {}, by how far the host runs ahead)", format_gib(fit.reserved),
                     format_gib(fit.reserved_low), format_gib(fit.reserved_high));
}

std::string device_text(const EngineFit& fit) {
  const Bytes low = fit.reserved_low + fit.overhead;
  const std::string from = low < fit.device() ? format_gib(low) + " to " : "";
  return fmt::format("{}{} of {}, a margin taken off; with context, libraries, NCCL", from, format_gib(fit.device()),
                     format_gib(fit.capacity));
}

std::string memory_text(const EngineFit& fit, const ReportStyle& style) {
  std::string text = "Memory of a GPU under DeepSpeed, steady step, the rank that needs most\n";
  text += line_of("initialize, peak", format_gib(fit.prediction.memory.init_peak));
  if (const StepMemory* s = steady(fit)) {
    text += line_of("forward, peak", format_gib(s->forward)) + line_of("backward, peak", format_gib(s->backward)) +
            line_of("step, peak", format_gib(s->step)) + line_of("after the step", format_gib(s->after));
  }
  text += line_of("reserved by PyTorch", reserved_text(fit));
  text += line_of("device memory used", device_text(fit));
  text +=
      line_of("host, a node", fmt::format("{} of {}, {} of it pinned by each rank", format_gib(fit.host),
                                          format_gib(fit.host_capacity), format_gib(fit.prediction.host_use.pinned)));
  for (const auto& [name, value] : memory_details(fit.prediction)) text += line_of(name, value);
  const bool good = fit.fits_in_step();
  text += "  " + inked(verdict_of(fit), good ? Ink::good : Ink::bad, style) + "\n";
  if (!fit.caveat.empty()) text += "  " + fit.caveat + "\n";
  return text;
}

std::string time_text(const RunPrediction& run) {
  const EngineTime& t = *run.time;
  std::string text = fmt::format("Step {}, {}, limited by {}\n", format_seconds(t.step),
                                 format_speed(tokens_per_second(run)), to_string(t.limit));
  const std::pair<std::string_view, Seconds> parts[] = {{"kernels", t.compute},
                                                        {"exposed collectives", t.exposed_communication},
                                                        {"host", t.host},
                                                        {"optimizer", t.optimizer},
                                                        {"offload", t.offload}};
  for (const auto& [name, seconds] : parts) {
    if (seconds <= Seconds()) continue;
    text += line_of(name, fmt::format("{:<9} {:5.1f} %", format_seconds(seconds), 100 * (seconds / t.step)));
  }
  return text;
}

std::string change_text(const KeyChange& change) {
  const std::string where = change.in_script ? "    (argument of the training script)" : "";
  std::string text;
  if (!change.from.empty()) text += printable_line(fmt::format("  - {}: {}", change.key, change.from)) + where + "\n";
  return text + printable_line(fmt::format("  + {}: {}", change.key, change.to)) + where + "\n";
}

std::string nearest_text(const CheckPrediction& p, const ReportStyle& style) {
  const NearestConfig& n = *p.nearest;
  if (!n.result) {
    return fmt::format(
        "Nothing near it fits: {} configurations predicted (smaller buckets and micro-batches, "
        "checkpointing, higher stages, offload to the host)\n",
        n.tried);
  }
  std::string text = inked(n.aim == NearestAim::fits ? "Nearest configuration that fits" : "Nearest that is faster",
                           Ink::bold, style) +
                     fmt::format(", verified by prediction ({} tried)\n", n.tried);
  for (const KeyChange& change : n.changes) text += change_text(change);
  const RunPrediction& run = *n.result;
  text += fmt::format("  then: {} allocated of a GPU's {}, {} of {} on the host; {}\n",
                      format_gib(run.memory->allocated), format_gib(run.memory->capacity - run.memory->overhead),
                      format_gib(run.memory->host), format_gib(run.memory->host_capacity), verdict_of(*run.memory));
  if (!run.memory->caveat.empty()) text += "        " + run.memory->caveat + "\n";
  for (const NotPredicted& missing : run.missing) {
    text += printable_line(fmt::format("        {} not predicted: {}", missing.part, missing.why)) + "\n";
  }
  if (run.time && p.run.time) {
    text += fmt::format("        {} a step instead of {}\n", format_seconds(run.time->step),
                        format_seconds(p.run.time->step));
  }
  return text;
}

// --- JSON --------------------------------------------------------------------------------------------

/// Names of files and keys may hold what is no UTF-8.
std::string text_of(const Json& j) { return j.dump(-1, ' ', false, Json::error_handler_t::replace); }

std::int64_t bytes(Bytes value) { return static_cast<std::int64_t>(value.base() + 0.5); }

Json gpu_json(const EngineFit& fit) {
  Json j{{"init", bytes(fit.prediction.memory.init_peak)}};
  if (const StepMemory* s = steady(fit)) {
    j["forward"] = bytes(s->forward);
    j["backward"] = bytes(s->backward);
    j["step"] = bytes(s->step);
    j["after"] = bytes(s->after);
  }
  j["allocated"] = bytes(fit.allocated);
  j["reserved"] = bytes(fit.reserved);
  j["reserved_low"] = bytes(fit.reserved_low);
  j["reserved_high"] = bytes(fit.reserved_high);
  j["device_used"] = bytes(fit.device());
  j["capacity"] = bytes(fit.capacity);
  j["verdict"] = to_string(fit.gpu);
  if (!fit.failure.empty()) j["failure"] = fit.failed_at + ": " + fit.failure;
  if (!fit.caveat.empty()) j["caveat"] = fit.caveat;
  return j;
}

Json host_json(const RunPrediction& run, int ranks_per_node) {
  const EngineFit& fit = *run.memory;
  return {{"per_node", bytes(fit.host)},
          {"pinned", bytes(fit.prediction.host_use.pinned * static_cast<double>(ranks_per_node))},
          {"capacity", bytes(fit.host_capacity)},
          {"fits", fit.host_fits()}};
}

Json time_json(const RunPrediction& run) {
  const EngineTime& t = *run.time;
  return {{"step_seconds", t.step.base()},
          {"tokens_per_second", tokens_per_second(run)},
          {"parts",
           {{"kernels", t.compute.base()},
            {"exposed_collectives", t.exposed_communication.base()},
            {"host", t.host.base()},
            {"optimizer", t.optimizer.base()},
            {"offload", t.offload.base()}}},
          {"limited_by", to_string(t.limit)}};
}

Json run_json(const RunPrediction& run, int ranks_per_node) {
  const EngineWorkload& w = run.workload;
  Json j;
  j["workload"] = {{"micro_batch", w.tokens.batch},
                   {"accumulation", w.accumulation},
                   {"ranks", w.ranks},
                   {"global_batch", run.global_batch()},
                   {"seq_len", w.tokens.seq_len},
                   {"precision", to_string(w.type)},
                   {"recompute", w.checkpointing ? "full" : "none"},
                   {"lora_rank", w.lora_rank}};
  if (!w.allocator_conf.empty()) j["workload"]["allocator_conf"] = w.allocator_conf;
  if (run.memory) {
    j["fits"] = run.memory->fits();
    j["gpu"] = gpu_json(*run.memory);
    j["host"] = host_json(run, ranks_per_node);
  }
  if (run.time) j["time"] = time_json(run);
  return j;
}

}  // namespace

std::string report_prediction(const CheckPrediction& p, const MachineSpec& machine, const ReportStyle& style) {
  std::string text = fmt::format("\nPrediction for {}: {}\n", gpus_text(machine), run_text(p.run));
  if (p.corrected) text += "  of the file as --fix corrects it: DeepSpeed refuses or ignores parts of it as it is\n";
  text += "\n";
  if (p.run.memory) text += memory_text(*p.run.memory, style);
  if (p.run.time) text += (p.run.memory ? "\n" : "") + time_text(p.run);
  for (const NotPredicted& missing : p.run.missing) {
    text += printable_line(fmt::format("{} not predicted: {}", missing.part, missing.why)) + "\n";
  }
  text += explained_text(p, style);
  if (p.nearest) text += "\n" + nearest_text(p, style);
  if (!p.assumptions.empty()) text += "\n" + assumptions_section(p.assumptions, style);
  return text;
}

std::string prediction_json(const CheckPrediction& p) {
  Json j{{"corrected", p.corrected}};
  j.update(run_json(p.run, p.ranks_per_node));
  j.update(Json::parse(explained_json(p)));
  j["not_predicted"] = Json::array();
  for (const NotPredicted& missing : p.run.missing) {
    j["not_predicted"].push_back({{"part", missing.part}, {"why", missing.why}});
  }
  j["assumptions"] = Json::array();
  for (const Assumption& a : p.assumptions) {
    j["assumptions"].push_back({{"what", a.what}, {"value", a.value}, {"source", a.source}});
  }
  return text_of(j);
}

std::string nearest_json(const CheckPrediction& p) {
  if (!p.nearest) return "null";
  const NearestConfig& n = *p.nearest;
  Json j{{"aim", to_string(n.aim)}, {"found", n.result.has_value()}, {"tried", n.tried}, {"changes", Json::array()}};
  for (const KeyChange& change : n.changes) {
    const Json from = change.from.empty() ? Json() : Json(change.from);
    j["changes"].push_back({{"key", change.key},
                            {"where", change.in_script ? "script" : "file"},
                            {"from", from},
                            {"to", Json::parse(change.to)}});
  }
  if (n.result) j["result"] = run_json(*n.result, p.ranks_per_node);
  return text_of(j);
}

}  // namespace zeroplan
